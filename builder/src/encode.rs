//! Second reading of the contents: fills the planned chunks, asks what the store lacks, compresses and
//! uploads that.
//!
//! Each worker takes a batch of neighbouring chunks, so one question to the store covers many chunks
//! and memory is bounded by workers times batch size. What a chunk is called does not depend on who
//! made it or when; only the order of uploads does.

use crate::content::{Content, Open, Origin};
use crate::digest::is_zero;
use crate::parallel::{Turn, Turns, for_each};
use crate::plan::{Fill, Part, Plan, PlannedChunk};
use crate::progress::{Cancel, Progress};
use crate::publish::{EncodedChunk, Publisher};
use layer::chunk::{Chunk, ChunkTable};
use layer::{ChunkDigest, Error, ErrorKind, Result};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Plain bytes in one batch, as far as one chunk is not larger.
const BATCH_BYTES: u64 = 4 << 20;
/// Chunks in one batch, so that known ones do not make endless batches.
const BATCH_CHUNKS: usize = 4096;

/// What encoding did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Chunks that were uploaded.
    pub new_chunks: u64,
    /// Their plain bytes.
    pub new_plain_bytes: u64,
    /// Their encoded bytes.
    pub new_stored_bytes: u64,
    /// Plain bytes that needed no upload.
    pub reused_plain_bytes: u64,
}

/// What all workers share.
pub(crate) struct Encoder<'a> {
    pub plan: &'a Plan,
    /// The numbers of all its chunks, in the order in which they are uploaded.
    pub order: &'a [usize],
    pub contents: &'a [&'a Content],
    pub origins: &'a [Arc<Origin>],
    pub publisher: &'a dyn Publisher,
    pub level: i32,
    pub threads: usize,
    pub cancel: &'a Cancel,
    pub progress: &'a dyn Progress,
}

/// What workers write to.
struct Shared {
    digests: Vec<ChunkDigest>,
    /// Chunks that some worker has taken care of.
    claimed: HashSet<ChunkDigest>,
    totals: Totals,
}

impl Shared {
    /// Which of these chunks nobody has taken care of yet: the caller does. Zeros need no care.
    fn claim(&mut self, digests: &[ChunkDigest]) -> Vec<usize> {
        let mut claimed = |digest| digest != ChunkDigest::ZERO && self.claimed.insert(digest);
        (0..digests.len()).filter(|&at| claimed(digests[at])).collect()
    }
}

impl Encoder<'_> {
    /// Encodes and uploads everything and flushes; returns the finished chunk table.
    pub(crate) fn run(&self) -> Result<(ChunkTable, Totals)> {
        let batches = batches(&self.plan.chunks, self.order);
        let turns = Turns::default();
        let shared = Mutex::new(Shared {
            digests: vec![ChunkDigest::ZERO; self.plan.chunks.len()],
            claimed: HashSet::new(),
            totals: Totals::default(),
        });
        for_each(self.threads, batches.len(), self.cancel, Vec::new, |buffer, task| {
            self.batch(&self.order[batches[task].clone()], turns.announce(task), buffer, &shared)
        })?;
        for origin in self.origins {
            origin.finish()?;
        }
        self.publisher.flush()?;
        let shared = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
        let chunks: Vec<Chunk> = self
            .plan
            .chunks
            .iter()
            .zip(shared.digests)
            .map(|(planned, digest)| planned.finished(digest))
            .collect();
        Ok((ChunkTable::new(chunks)?, shared.totals))
    }

    /// Fills and names some chunks, and uploads them when those before are uploaded: so they lie in
    /// packs as they were ordered, whoever was faster.
    fn batch(
        &self,
        numbers: &[usize],
        turn: Turn<'_>,
        buffer: &mut Vec<u8>,
        shared: &Mutex<Shared>,
    ) -> Result<()> {
        let chunks: Vec<&PlannedChunk> =
            numbers.iter().map(|number| &self.plan.chunks[*number]).collect();
        let plain = self.fill(&chunks, buffer)?;
        let digests: Vec<ChunkDigest> = chunks
            .iter()
            .zip(&plain)
            .map(|(chunk, bytes)| match &chunk.fill {
                Fill::Known(digest) => *digest,
                Fill::Parts(_) if is_zero(&buffer[bytes.clone()]) => ChunkDigest::ZERO,
                Fill::Parts(_) => ChunkDigest::of(&buffer[bytes.clone()]),
            })
            .collect();
        let mine = {
            let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
            for (number, digest) in numbers.iter().zip(&digests) {
                shared.digests[*number] = *digest;
            }
            shared.claim(&digests)
        };
        let mut totals = Totals::default();
        let mut encoded = Vec::new();
        for at in self.missing(&digests, &mine)? {
            self.cancel.check()?;
            if matches!(chunks[at].fill, Fill::Known(_)) {
                let text = format!("chunk {} of a lower layer is not on the store", digests[at]);
                return Err(Error::not_found(text));
            }
            encoded.push(self.encode(digests[at], &buffer[plain[at].clone()], &mut totals));
        }
        if !turn.take() {
            return Ok(());
        }
        for chunk in encoded {
            self.cancel.check()?;
            self.publisher.upload(chunk)?;
        }
        drop(turn);
        let all: u64 = chunks.iter().map(|chunk| chunk.plain_bytes()).sum();
        totals.reused_plain_bytes = all - totals.new_plain_bytes;
        self.progress.reused(totals.reused_plain_bytes);
        self.progress.advance(0, all);
        let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.totals = shared.totals.plus(totals);
        Ok(())
    }

    /// Which of the chunks `mine` the store lacks.
    fn missing(&self, digests: &[ChunkDigest], mine: &[usize]) -> Result<Vec<usize>> {
        if mine.is_empty() {
            return Ok(Vec::new());
        }
        let asked: Vec<ChunkDigest> = mine.iter().map(|&at| digests[at]).collect();
        let missing = self.publisher.missing(&asked)?;
        if missing.len() != asked.len() {
            return Err(Error::new(ErrorKind::Internal, "the store answered another question"));
        }
        Ok(mine.iter().zip(missing).filter_map(|(&at, missing)| missing.then_some(at)).collect())
    }

    fn encode(&self, digest: ChunkDigest, plain: &[u8], totals: &mut Totals) -> EncodedChunk {
        let (codec, payload) = store::codec::encode_chunk(plain, self.level);
        totals.new_chunks += 1;
        totals.new_plain_bytes += plain.len() as u64;
        totals.new_stored_bytes += payload.len() as u64;
        self.progress.stored(plain.len() as u64, payload.len() as u64);
        let plain_bytes = plain.len() as u32;
        EncodedChunk { digest, codec, plain_bytes, payload }
    }

    /// Reads the plain bytes of chunks into the buffer; returns where each lies in it.
    fn fill(&self, chunks: &[&PlannedChunk], buffer: &mut Vec<u8>) -> Result<Vec<Range<usize>>> {
        let mut ranges = Vec::with_capacity(chunks.len());
        let mut end = 0;
        for chunk in chunks {
            let start = end;
            end += chunk.read_bytes() as usize;
            ranges.push(start..end);
        }
        // Only grows: what an earlier batch left behind is overwritten or cleared below.
        if buffer.len() < end {
            buffer.resize(end, 0);
        }
        let mut reader = PartReader { contents: self.contents, origins: self.origins, open: None };
        for (chunk, range) in chunks.iter().zip(&ranges) {
            let Fill::Parts(parts) = &chunk.fill else { continue };
            let plain = &mut buffer[range.clone()];
            let mut filled = 0;
            for part in &self.plan.parts[parts.clone()] {
                let start = part.at as usize;
                let stop = start + part.bytes as usize;
                plain[filled..start].fill(0);
                reader.read(part, &mut plain[start..stop])?;
                filled = stop;
            }
            plain[filled..].fill(0);
        }
        reader.finish()?;
        Ok(ranges)
    }
}

/// Keeps the last file open, as neighbouring parts often come from one.
struct PartReader<'a> {
    contents: &'a [&'a Content],
    origins: &'a [Arc<Origin>],
    open: Option<(usize, Open<'a>)>,
}

impl PartReader<'_> {
    fn read(&mut self, part: &Part, buffer: &mut [u8]) -> Result<()> {
        if self.open.as_ref().is_none_or(|(file, _)| *file != part.file) {
            self.finish()?;
        }
        let (_, open) = match &mut self.open {
            Some(open) => open,
            closed => closed.insert((part.file, self.contents[part.file].open(self.origins)?)),
        };
        open.read_at(part.offset, buffer)
    }

    fn finish(&mut self) -> Result<()> {
        match self.open.take() {
            Some((_, open)) => open.finish(),
            None => Ok(()),
        }
    }
}

impl Totals {
    /// What this and a later repetition did: uploads add up, what needed none is as the last one found it.
    pub(crate) fn then(self, again: Self) -> Self {
        Self { reused_plain_bytes: 0, ..self }.plus(again)
    }

    fn plus(self, other: Self) -> Self {
        Self {
            new_chunks: self.new_chunks + other.new_chunks,
            new_plain_bytes: self.new_plain_bytes + other.new_plain_bytes,
            new_stored_bytes: self.new_stored_bytes + other.new_stored_bytes,
            reused_plain_bytes: self.reused_plain_bytes + other.reused_plain_bytes,
        }
    }
}

/// Ranges of `order` that are done in one go.
fn batches(chunks: &[PlannedChunk], order: &[usize]) -> Vec<Range<usize>> {
    let mut batches = Vec::new();
    let mut start = 0;
    let mut bytes = 0;
    for (at, number) in order.iter().enumerate() {
        let chunk = &chunks[*number];
        let length = chunk.read_bytes();
        if at > start && (bytes + length > BATCH_BYTES || at - start >= BATCH_CHUNKS) {
            batches.push(start..at);
            start = at;
            bytes = 0;
        }
        bytes += length;
    }
    if start < order.len() {
        batches.push(start..order.len());
    }
    batches
}
