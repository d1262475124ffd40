//! The life of a fill, one step at a time. Between two steps nothing is locked and nothing blocks, so
//! whoever carries a step may put it down: threads do not (`worker`), the fault simulation does.
//!
//! ```text
//! Take --run of chunks--> Read --stored bytes--> Decode, for each --verified bytes--> Write --> Keep --> landed
//!  |--held by a sibling--> written, landed
//! ```
//! `Write` writes what readers of the data file wait for and lets them go on; `Keep` the whole chunk, and its bit
//! follows. Where nobody waits for less than a chunk, one step does both.
//!
//! A step that fails decides what becomes of its chunks: read again, looked for elsewhere, put to rest,
//! or given up; and those who wait are told.
//!
//! Locking: none is held here while anything blocks.

use super::buffers::Buffer;
use super::flights::{History, Reach, Run, end_of};
use super::queue::{Job, Piece, Ticket};
use super::siblings::Copied;
use super::waiter::{Class, Failure};
use super::{FetchLayer, Inner, MakeRoom};
use crate::incidents::IncidentKind;
use layer::location::Locations;
use layer::pack::Codec;
use layer::{ChunkDigest, Error, ErrorKind, Result};
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// For blocked readers: long for them, short for what they only pass by.
const DEMAND: Reach = Reach { bytes: 1 << 20, extra_bytes: 256 << 10, gap_bytes: 32 << 10 };
/// For everything else: short, because a demand may come meanwhile and find the link busy.
const LOW: Reach = Reach { bytes: 256 << 10, extra_bytes: 256 << 10, gap_bytes: 32 << 10 };
const FIRST_REST: Duration = Duration::from_millis(50);
const LONGEST_REST: Duration = Duration::from_secs(2);

/// What is done next for some chunks.
#[derive(Debug)]
pub enum Step {
    /// Take a queued chunk with its queued neighbours.
    Take(Ticket, Class),
    /// Read what was taken.
    Read(Reading),
    /// Decode and verify one chunk of what was read.
    Decode(Piece),
    /// Write of a verified chunk what readers wait for, or all of it.
    Write(Verified),
    /// Write all of a verified chunk and set its bit.
    Keep(Verified),
}

/// Chunks that were taken, to be read in one go.
#[derive(Debug)]
pub struct Reading {
    layer: Arc<FetchLayer>,
    run: Run,
    locations: Arc<Locations>,
}

/// A chunk whose bytes have its digest.
#[derive(Debug)]
pub struct Verified {
    /// Whose chunk.
    pub layer: Arc<FetchLayer>,
    /// Its index.
    pub chunk: usize,
    /// Its bytes.
    pub plain: Plain,
}

/// The verified bytes of a chunk.
#[derive(Debug)]
pub enum Plain {
    /// As they are stored: a part of what was read.
    Stored(Arc<Buffer>, Range<usize>),
    /// Decompressed.
    Decoded(Buffer),
}

impl Deref for Plain {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Stored(payload, part) => &payload[part.clone()],
            Self::Decoded(plain) => plain,
        }
    }
}

/// What a step led to.
#[derive(Debug)]
pub enum Next {
    /// Nothing more to do.
    Over,
    /// One more step.
    Then(Step),
    /// Several chunks to decode, by anyone.
    Decode(Vec<Piece>),
}

impl From<Job> for Step {
    fn from(job: Job) -> Self {
        match job {
            Job::Decode(piece) => Self::Decode(piece),
            Job::Read(ticket, class) => Self::Take(ticket, class),
        }
    }
}

impl Step {
    /// Does it.
    pub fn advance(self, inner: &Arc<Inner>) -> Next {
        match self {
            Self::Take(ticket, class) => take(inner, &ticket, class),
            Self::Read(reading) => read(inner, &reading),
            Self::Decode(piece) => decode(inner, &piece),
            Self::Write(verified) if write_pages(inner, &verified) => {
                Next::Then(Self::Keep(verified))
            }
            Self::Write(verified) | Self::Keep(verified) => {
                write(inner, &verified.layer, verified.chunk, &verified.plain);
                Next::Over
            }
        }
    }
}

fn take(inner: &Arc<Inner>, ticket: &Ticket, class: Class) -> Next {
    let layer = &ticket.layer;
    if !layer.flights.is_queued(ticket.chunk) {
        return Next::Over;
    }
    let reach = if class == Class::Demand { DEMAND } else { LOW };
    let locations = match layer.source.locations() {
        Ok(locations) => locations,
        Err(error) => {
            let nowhere = Locations { packs: Vec::new(), placements: Vec::new() };
            if let Some(run) = layer.flights.take(ticket.chunk, &nowhere, reach) {
                settle(inner, layer, &run, &Arc::new(nowhere), error);
            }
            return Next::Over;
        }
    };
    let run = layer.flights.take(ticket.chunk, &locations, reach);
    match run.and_then(|run| copy_from_siblings(inner, layer, run, &locations)) {
        Some(run) => Next::Then(Step::Read(Reading { layer: Arc::clone(layer), run, locations })),
        None => Next::Over,
    }
}

/// Takes those chunks of a run from this node that another layer has. Answers the first neighbours of
/// what is left, to be read; the others go back to the queue.
fn copy_from_siblings(
    inner: &Arc<Inner>,
    layer: &Arc<FetchLayer>,
    mut run: Run,
    locations: &Locations,
) -> Option<Run> {
    let owner = inner.space.owner();
    run.chunks.retain(|chunk| !copy(inner, layer, *chunk, owner.as_deref()));
    let far = run.chunks.windows(2).position(|pair| {
        let end = locations.get(pair[0]).map_or(0, |(_, place)| end_of(&place));
        let next = locations.get(pair[1]).map_or(u64::MAX, |(_, place)| place.offset);
        next.saturating_sub(end) > DEMAND.gap_bytes
    });
    let others = far.map_or_else(Vec::new, |at| run.chunks.split_off(at + 1));
    for chunk in others {
        let history = layer.flights.history(chunk);
        if let Some(class) = layer.flights.put_back(chunk, history, None) {
            inner.queue.push(layer, &[chunk], class, true);
        }
    }
    (!run.chunks.is_empty()).then_some(run)
}

/// Fills a chunk from another layer of this node; false when none has it.
fn copy(
    inner: &Arc<Inner>,
    layer: &Arc<FetchLayer>,
    chunk: usize,
    owner: Option<&dyn MakeRoom>,
) -> bool {
    // What somebody reads is never replaced by blocks that turn out to be others.
    if layer.flights.history(chunk).shown {
        return false;
    }
    let Some(copied) = inner.siblings.copy(&layer.cached, chunk, owner) else { return false };
    let bytes = u64::from(layer.cached.table().chunks()[chunk].plain_bytes());
    inner.counters.copies.fetch_add(1, Ordering::Relaxed);
    layer.cached.counters().copied_bytes.fetch_add(bytes, Ordering::Relaxed);
    match copied {
        Copied::Shared => {
            inner.counters.shared.fetch_add(1, Ordering::Relaxed);
            landed(inner, layer, chunk, bytes);
        }
        Copied::Plain(plain) => write(inner, layer, chunk, &plain),
    }
    true
}

fn read(inner: &Arc<Inner>, reading: &Reading) -> Next {
    match read_run(inner, reading) {
        Ok(pieces) => {
            inner.store_away.over();
            Next::Decode(pieces)
        }
        Err(error) => {
            settle(inner, &reading.layer, &reading.run, &reading.locations, error);
            Next::Over
        }
    }
}

fn read_run(inner: &Arc<Inner>, reading: &Reading) -> Result<Vec<Piece>> {
    let Reading { layer, run, locations } = reading;
    // INVARIANT: a run has at least one chunk.
    let (first, last) = (run.chunks[0], run.chunks[run.chunks.len() - 1]);
    let (Some((pack, first)), Some((_, last))) = (locations.get(first), locations.get(last)) else {
        let text = format!("no location for chunk {first} of layer {}", layer.cached.id());
        return Err(Error::not_found(text));
    };
    let bytes = (end_of(&last) - first.offset) as usize;
    let mut payload = inner.buffers.take(bytes);
    layer.source.read(&pack, first.offset, &mut payload)?;
    let payload = Arc::new(payload);
    let mut pieces = Vec::with_capacity(run.chunks.len());
    for chunk in run.chunks.iter().copied() {
        let Some((_, placement)) = locations.get(chunk) else { continue };
        let start = (placement.offset - first.offset) as usize;
        pieces.push(Piece {
            layer: Arc::clone(layer),
            chunk,
            payload: Arc::clone(&payload),
            part: start..start + placement.stored_bytes as usize,
            placement,
            locations: Arc::clone(locations),
        });
    }
    Ok(pieces)
}

fn decode(inner: &Arc<Inner>, piece: &Piece) -> Next {
    let Piece { layer, chunk, payload, part, placement, locations } = piece;
    let entry = &layer.cached.table().chunks()[*chunk];
    let stored = &payload[part.clone()];
    let verified = |plain| {
        Next::Then(Step::Write(Verified { layer: Arc::clone(layer), chunk: *chunk, plain }))
    };
    if placement.codec == Codec::None
        && stored.len() == entry.plain_bytes() as usize
        && ChunkDigest::of(stored) == entry.digest
    {
        return verified(Plain::Stored(Arc::clone(payload), part.clone()));
    }
    let mut plain = inner.buffers.take(entry.plain_bytes() as usize);
    match store::codec::decode_chunk_into(stored, placement.codec, &entry.digest, &mut plain) {
        Ok(()) => verified(Plain::Decoded(plain)),
        Err(error) => {
            let pack = locations.get(*chunk).map(|(pack, _)| pack.to_string()).unwrap_or_default();
            let error = error.context(format!("chunk {chunk} in pack {pack}"));
            mismatch(inner, layer, &error);
            damaged(inner, layer, *chunk, locations, error);
            Next::Over
        }
    }
}

/// Bytes from the store do not have their digest.
fn mismatch(inner: &Arc<Inner>, layer: &Arc<FetchLayer>, error: &Error) {
    let id = layer.cached.id();
    inner.counters.verify_failures.fetch_add(1, Ordering::Relaxed);
    layer.verify_failures.fetch_add(1, Ordering::Relaxed);
    tracing::warn!(layer = %id, error = %error.chain(), "a chunk on the store is damaged");
    inner.incidents.note(IncidentKind::Integrity, id, error.chain());
}

/// Writes what readers of the data file wait for, where that is less than the chunk, and tells them. What fails
/// here fails again with the whole chunk, which decides what becomes of it.
// INVARIANT: the chunk has no bit yet. Whoever else wants any of it waits until all of it is there.
// CRASH: what was written without a bit counts for nobody, and is written over when it is fetched again.
fn write_pages(inner: &Arc<Inner>, verified: &Verified) -> bool {
    let Verified { layer, chunk, plain } = verified;
    let place = layer.cached.table().chunks()[*chunk].byte_range();
    let Some(pages) = layer.flights.pages(*chunk, &place) else { return false };
    let part = &plain[(pages.start - place.start) as usize..(pages.end - place.start) as usize];
    let room = inner.space.check(plain.len() as u64);
    let written = room.is_ok() && layer.cached.put_pages(pages.start, part);
    if written {
        layer.flights.pages_landed(*chunk, &place, &pages);
    }
    written
}

fn write(inner: &Arc<Inner>, layer: &Arc<FetchLayer>, chunk: usize, plain: &[u8]) {
    let written =
        inner.space.check(plain.len() as u64).and_then(|()| layer.cached.fill(chunk, plain));
    match written {
        Ok(()) => {
            if inner.disk_full.over() {
                let text = "the cache disk has room again".to_owned();
                inner.incidents.note(IncidentKind::Room, layer.cached.id(), text);
            }
            landed(inner, layer, chunk, plain.len() as u64);
        }
        Err(error) if error.kind() == ErrorKind::NoSpace => rest(inner, layer, chunk, error),
        Err(error) => give_up(inner, layer, chunk, error),
    }
}

/// The bit of a chunk is set: counts it and tells who waited.
fn landed(inner: &Arc<Inner>, layer: &Arc<FetchLayer>, chunk: usize, bytes: u64) {
    layer.fills.fetch_add(1, Ordering::Relaxed);
    inner.counters.fills.fetch_add(1, Ordering::Relaxed);
    inner.counters.filled_bytes.fetch_add(bytes, Ordering::Relaxed);
    layer.flights.landed(chunk);
}

/// The stored bytes are wrong: once more from the store, then from another place.
fn damaged(
    inner: &Arc<Inner>,
    layer: &Arc<FetchLayer>,
    chunk: usize,
    locations: &Arc<Locations>,
    error: Error,
) {
    let history = layer.flights.history(chunk);
    if history.reread {
        return elsewhere(inner, layer, chunk, locations, error);
    }
    let history = History { reread: true, ..history };
    if let Some(class) = layer.flights.put_back(chunk, history, None) {
        inner.queue.push(layer, &[chunk], class, true);
    }
}

/// Looks for a chunk under a fresh hint, once.
fn elsewhere(
    inner: &Arc<Inner>,
    layer: &Arc<FetchLayer>,
    chunk: usize,
    stale: &Arc<Locations>,
    error: Error,
) {
    let history = layer.flights.history(chunk);
    if history.relocated {
        return give_up(inner, layer, chunk, error);
    }
    match layer.source.relocate(stale) {
        Ok(_) => {
            let history = History { relocated: true, reread: false, ..history };
            if let Some(class) = layer.flights.put_back(chunk, history, None) {
                inner.queue.push(layer, &[chunk], class, true);
            }
        }
        Err(missing) => {
            tracing::debug!(error = %missing.chain(), "no other location");
            give_up(inner, layer, chunk, error);
        }
    }
}

/// A run could not be read.
fn settle(
    inner: &Arc<Inner>,
    layer: &Arc<FetchLayer>,
    run: &Run,
    locations: &Arc<Locations>,
    error: Error,
) {
    let failure = Failure::from(error);
    for chunk in run.chunks.iter().copied() {
        let error = failure.to_error();
        match error.kind() {
            ErrorKind::NotFound | ErrorKind::Corrupt => {
                elsewhere(inner, layer, chunk, locations, error);
            }
            ErrorKind::Unavailable
            | ErrorKind::Timeout
            | ErrorKind::Busy
            | ErrorKind::Internal
            | ErrorKind::NoSpace => rest(inner, layer, chunk, error),
            ErrorKind::Exists | ErrorKind::Invalid | ErrorKind::Unsupported | ErrorKind::Denied => {
                give_up(inner, layer, chunk, error);
            }
        }
    }
}

/// Tries again after a pause that grows.
fn rest(inner: &Arc<Inner>, layer: &Arc<FetchLayer>, chunk: usize, error: Error) {
    let now = inner.clock.now();
    let full = error.kind() == ErrorKind::NoSpace;
    let (outage, patience) = if full {
        if inner.disk_full.begins() {
            inner.incidents.note(IncidentKind::DiskFull, layer.cached.id(), error.chain());
        }
        (&inner.disk_full, inner.settings.full_disk_deadline)
    } else {
        (&inner.store_away, inner.settings.deadline)
    };
    // What nobody waits for is not read from the store again and again only to find the disk full.
    if outage.failed(now, patience) && (full || layer.flights.is_demanded(chunk)) {
        return give_up(inner, layer, chunk, error);
    }
    let history = layer.flights.history(chunk);
    let failure = Failure::from(error);
    if history.rests == 0 {
        let chain = failure.chain();
        tracing::warn!(layer = %layer.cached.id(), chunk, error = %chain, "a fill has to wait");
    }
    let delay = FIRST_REST.saturating_mul(1 << history.rests.min(16)).min(LONGEST_REST);
    let history = History { rests: history.rests + 1, ..history };
    if layer.flights.put_back(chunk, history, Some(&failure)).is_some() {
        inner.timer.rest(Ticket { layer: Arc::clone(layer), chunk }, now + delay);
    }
}

fn give_up(inner: &Arc<Inner>, layer: &Arc<FetchLayer>, chunk: usize, error: Error) {
    let error = error.context(format!("chunk {chunk} of layer {}", layer.cached.id()));
    if layer.flights.is_demanded(chunk) {
        tracing::error!(error = %error.chain(), "a fill failed");
        inner.incidents.note(IncidentKind::Refused, layer.cached.id(), error.chain());
    } else {
        tracing::warn!(error = %error.chain(), "a fill that nobody waits for failed");
    }
    layer.flights.failed(chunk, &error.into());
}

/// Reads and verifies one chunk without keeping it.
pub fn read_uncached(inner: &Arc<Inner>, layer: &Arc<FetchLayer>, chunk: usize) -> Result<Vec<u8>> {
    let entry = layer.cached.table().chunks().get(chunk).copied();
    let entry = entry.ok_or_else(|| Error::invalid(format!("chunk {chunk}")))?;
    if entry.is_zero() {
        return Ok(vec![0; entry.plain_bytes() as usize]);
    }
    let mut last = None;
    for _ in 0..2 {
        let locations = layer.source.locations()?;
        let Some((pack, placement)) = locations.get(chunk) else { break };
        let mut stored = inner.buffers.take(placement.stored_bytes as usize);
        layer.source.read(&pack, placement.offset, &mut stored)?;
        match store::codec::decode_chunk(
            &stored,
            placement.codec,
            entry.plain_bytes(),
            &entry.digest,
        ) {
            Ok(plain) => return Ok(plain),
            Err(error) => {
                let error = error.context(format!("chunk {chunk} in pack {pack}"));
                mismatch(inner, layer, &error);
                last = Some(error);
            }
        }
    }
    Err(last.unwrap_or_else(|| Error::not_found(format!("no location for chunk {chunk}"))))
}
