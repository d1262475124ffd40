//! One layer in the node cache: its chunk table, its data file, and which chunks are there.
//!
//! Order of a fill: the caller has verified the bytes, [`CachedLayer::fill`] writes them and then sets
//! the bit in memory, and only then is a reader let go. [`CachedLayer::make_durable`] follows later. A reader of
//! the file who waits for some pages of a chunk is let go after [`CachedLayer::put_pages`], and the fill follows.
//!
//! Locking: the bits are atomics; the durable state has its own mutex, held while a flush runs. Whoever
//! reads bytes because their bit is set, or writes bytes to set it, holds `access` shared meanwhile;
//! an eviction takes it alone. Order: durable state, then access.
//! Writes go through the quiet descriptor, which was opened before the file was marked and so raises
//! no events: any other would wait for itself.
// CRASH: between a fill and the durable bit the chunk is simply fetched again. The data is flushed
// before the bit is written, so a durable bit never precedes its bytes.

use super::bits::Bits;
use super::evict::runs;
use super::files::LayerFiles;
use super::index::ChunkIndex;
use super::usage::Usage;
use crate::journal::FileKey;
use layer::chunk::{Chunk, ChunkTable};
use layer::presence::Presence;
use layer::{ChunkDigest, Context, Error, ErrorKind, LayerId, Result};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

/// What is on disk: the bits that survive a power cut.
#[derive(Debug)]
pub(super) struct Durable {
    pub(super) presence: Presence,
    /// Whether there is a presence file.
    recorded: bool,
    /// Whether the layer may have been opened anew since: its files are another one's to speak of.
    pub(super) retired: bool,
}

/// What became of a layer's chunks since it was opened.
#[derive(Debug, Default)]
pub struct CacheCounters {
    /// Plain bytes filled, from wherever.
    pub filled_bytes: AtomicU64,
    /// Of them, copied or shared from another layer on this node.
    pub copied_bytes: AtomicU64,
    /// Plain bytes evicted.
    pub evicted_bytes: AtomicU64,
}

/// A layer whose metadata is complete on this node and whose data arrives chunk by chunk.
#[derive(Debug)]
pub struct CachedLayer {
    id: LayerId,
    folder: PathBuf,
    table: Arc<ChunkTable>,
    index: OnceLock<Arc<ChunkIndex>>,
    pub(super) files: Box<dyn LayerFiles>,
    key: FileKey,
    pub(super) bits: Bits,
    pub(super) losses: AtomicU64,
    usage: Usage,
    pub(super) dirty: AtomicBool,
    write_back_failed: AtomicBool,
    pub(super) durable: Mutex<Durable>,
    pub(super) durably_complete: AtomicBool,
    pub(super) access: RwLock<()>,
    pub(super) counters: CacheCounters,
}

/// The parts that [`CachedLayer::new`] puts together.
#[derive(Debug)]
pub struct Parts {
    /// The layer.
    pub id: LayerId,
    /// Where its files are.
    pub folder: PathBuf,
    /// Its chunks, verified against the manifest.
    pub table: Arc<ChunkTable>,
    /// Device and inode of the data file.
    pub key: FileKey,
    /// Its open files.
    pub files: Box<dyn LayerFiles>,
    /// What its presence file says, where there is one.
    pub present: Option<Presence>,
}

impl CachedLayer {
    /// Only durable bits and chunks of zeros count as present.
    pub fn new(parts: Parts) -> Self {
        let Parts { id, folder, table, key, files, present } = parts;
        let recorded = present.is_some();
        let mut presence = present.unwrap_or_else(|| Presence::new(id, table.len() as u32));
        let bits = Bits::new(table.len());
        for (index, chunk) in table.chunks().iter().enumerate() {
            // A chunk of zeros is a hole of the sparse file from the start.
            if chunk.is_zero() {
                presence.set(index as u32);
            }
            if presence.get(index as u32) {
                bits.set(index);
            }
        }
        let durably_complete = recorded && presence.is_complete();
        Self {
            id,
            folder,
            usage: Usage::new(table.len()),
            table,
            index: OnceLock::new(),
            files,
            key,
            bits,
            losses: AtomicU64::new(0),
            dirty: AtomicBool::new(!recorded),
            write_back_failed: AtomicBool::new(false),
            durable: Mutex::new(Durable { presence, recorded, retired: false }),
            durably_complete: AtomicBool::new(durably_complete),
            access: RwLock::new(()),
            counters: CacheCounters::default(),
        }
    }

    /// The layer.
    pub fn id(&self) -> LayerId {
        self.id
    }

    /// Its chunks, verified against the manifest.
    pub fn table(&self) -> &ChunkTable {
        &self.table
    }

    /// Its chunks by digest; made at the first call.
    pub(super) fn index(&self) -> &Arc<ChunkIndex> {
        self.index.get_or_init(|| Arc::new(ChunkIndex::new(&self.table)))
    }

    /// Takes the index that was made when the layer was opened before.
    pub(super) fn set_index(&self, index: Arc<ChunkIndex>) {
        let _ = self.index.set(index);
    }

    /// A place of a chunk with this digest, present or not.
    pub fn find(&self, digest: &ChunkDigest) -> Option<usize> {
        let found = self.index().find(digest)?;
        self.table.chunks().get(found).is_some_and(|chunk| chunk.digest == *digest).then_some(found)
    }

    /// Where its files are.
    pub(super) fn folder(&self) -> &std::path::Path {
        &self.folder
    }

    /// Device and inode of the data file.
    pub fn key(&self) -> FileKey {
        self.key
    }

    /// The data file through a descriptor that raises no events.
    pub fn quiet_data(&self) -> BorrowedFd<'_> {
        self.files.quiet_data()
    }

    /// Path of the EROFS metadata image.
    pub fn metadata_path(&self) -> PathBuf {
        self.folder.join(super::METADATA)
    }

    /// Path of the data file.
    pub fn data_path(&self) -> PathBuf {
        self.folder.join(super::DATA)
    }

    /// Whether this chunk is in the data file.
    pub fn has(&self, chunk: usize) -> bool {
        self.bits.get(chunk)
    }

    /// Whether this chunk is known to be durably in the data file. Never waits.
    pub fn has_durably(&self, chunk: usize) -> bool {
        self.durable.try_lock().is_ok_and(|durable| durable.presence.get(chunk as u32))
    }

    /// Whether all of these chunks are in the data file.
    pub fn has_all(&self, chunks: Range<usize>) -> bool {
        self.bits.covers(chunks)
    }

    /// Whether every chunk is in the data file (not necessarily durably).
    pub fn is_complete(&self) -> bool {
        self.bits.is_full()
    }

    /// Whether every chunk is durably in the data file: no fault of this node can lose one.
    pub fn is_durably_complete(&self) -> bool {
        self.durably_complete.load(Ordering::Acquire)
    }

    /// Plain bytes of the chunks that are in the data file.
    pub fn present_bytes(&self) -> u64 {
        let chunks = self.table.chunks().iter().enumerate();
        chunks
            .filter(|(index, chunk)| !chunk.is_zero() && self.bits.get(*index))
            .map(|(_, chunk)| u64::from(chunk.plain_bytes()))
            .sum()
    }

    /// Plain bytes filled since this value was made.
    pub fn filled_bytes(&self) -> u64 {
        self.counters.filled_bytes.load(Ordering::Relaxed)
    }

    /// What was done since this value was made.
    pub fn counters(&self) -> &CacheCounters {
        &self.counters
    }

    /// The groups of chunks with something in them that can be evicted: when each was used last, the
    /// present chunks, and their bytes.
    pub fn groups(&self) -> Vec<(u64, Vec<usize>, u64)> {
        let table = self.table.chunks();
        let held = |chunk: &usize| self.bits.get(*chunk) && !table[*chunk].is_zero();
        let groups = self.usage.groups().map(|(chunks, last)| {
            let chunks: Vec<usize> = chunks.filter(held).collect();
            let bytes = chunks.iter().map(|chunk| u64::from(table[*chunk].plain_bytes())).sum();
            (last, chunks, bytes)
        });
        groups.filter(|(_, chunks, _)| !chunks.is_empty()).collect()
    }

    fn chunk(&self, chunk: usize) -> Result<&Chunk> {
        let found = self.table.chunks().get(chunk);
        found.ok_or_else(|| Error::invalid(format!("chunk {chunk} of layer {}", self.id)))
    }

    /// Writes the verified bytes of a chunk and sets its bit. `NoSpace` when the disk is full.
    pub fn fill(&self, chunk: usize, plain: &[u8]) -> Result<()> {
        let name = || format!("fill chunk {chunk} of layer {}", self.id);
        let entry = self.chunk(chunk)?;
        debug_assert_eq!(plain.len(), entry.plain_bytes() as usize);
        let access = self.access.read().unwrap_or_else(PoisonError::into_inner);
        self.files.write_data(plain, entry.offset()).context(name)?;
        let filled = self.filled(chunk, entry);
        drop(access);
        self.checked(filled)
    }

    /// Writes verified pages of a chunk whose bit is not set, and leaves it so: for a reader who does not wait for
    /// the rest. False where they were not written, or where a page in memory is no proof.
    pub fn put_pages(&self, offset: u64, plain: &[u8]) -> bool {
        let _access = self.access.read().unwrap_or_else(PoisonError::into_inner);
        !self.write_back_failed.load(Ordering::Acquire)
            && self.files.write_data(plain, offset).is_ok()
    }

    /// How often something that had been in the data file was evicted, or lost by a failed write-back.
    pub fn losses(&self) -> u64 {
        self.losses.load(Ordering::Acquire)
    }

    /// Fills a chunk with the blocks of another layer's data file, and verifies what it got. False where
    /// the file system cannot share them; then nothing has changed.
    pub fn fill_shared(&self, chunk: usize, source: &Self, source_chunk: usize) -> Result<bool> {
        let name = || format!("share chunk {chunk} of layer {}", self.id);
        let (entry, from) = (self.chunk(chunk)?, source.chunk(source_chunk)?.byte_range());
        let access = self.access.read().unwrap_or_else(PoisonError::into_inner);
        match self.files.share(source.quiet_data(), from, entry.offset()) {
            Err(error) if sys::reflink::cannot_share(&error) => return Ok(false),
            Err(error) if error.kind() == std::io::ErrorKind::Unsupported => return Ok(false),
            other => other.context(name)?,
        }
        let mut plain = vec![0; entry.plain_bytes() as usize];
        self.files.read_data(&mut plain, entry.offset()).context(name)?;
        // The source may have been evicted meanwhile: only the bytes themselves say what they are.
        if ChunkDigest::of(&plain) != entry.digest {
            return Err(Error::corrupt(name()));
        }
        let filled = self.filled(chunk, entry);
        drop(access);
        self.checked(filled).map(|()| true)
    }

    /// A fill whose own flush failed may have lost what others had filled.
    fn checked(&self, filled: Result<()>) -> Result<()> {
        if filled.is_err() {
            self.distrust(&self.durable.lock().unwrap_or_else(PoisonError::into_inner));
        }
        filled
    }

    /// Under `access`: the bytes of a chunk are in the file. Fails only when a flush does.
    fn filled(&self, chunk: usize, entry: &Chunk) -> Result<()> {
        if self.write_back_failed.load(Ordering::Acquire) {
            // The disk has lost pages of this file before: the page cache is no proof any more.
            let name = || format!("flush chunk {chunk} of layer {}", self.id);
            self.files.sync_data().context(name)?;
        }
        self.dirty.store(true, Ordering::Release);
        // INVARIANT: the bit follows the bytes.
        self.bits.set(chunk);
        self.usage.touch(chunk..chunk + 1);
        self.counters.filled_bytes.fetch_add(u64::from(entry.plain_bytes()), Ordering::Relaxed);
        Ok(())
    }

    /// Copies bytes of present chunks out of the data file. `Busy` when one of them is not present (any
    /// more): it was evicted after the caller looked.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let what = format!("read {} bytes at {offset} of layer {}", into.len(), self.id);
        let chunks = self.table.covering(offset, into.len() as u64);
        let _access = self.access.read().unwrap_or_else(PoisonError::into_inner);
        if !self.bits.covers(chunks.clone()) {
            return Err(Error::new(ErrorKind::Busy, what));
        }
        self.usage.touch(chunks);
        self.files.read_data(into, offset).context(|| what)
    }

    /// Flushes what was filled, then records it. Answers whether the durable state changed.
    ///
    /// After a failed flush nothing that was not durable counts as present any more.
    pub fn make_durable(&self) -> Result<bool> {
        let name = || format!("make layer {} durable", self.id);
        let mut durable = self.durable.lock().unwrap_or_else(PoisonError::into_inner);
        if durable.retired || !self.dirty.swap(false, Ordering::AcqRel) {
            return Ok(false);
        }
        let fresh: Vec<u32> = (0..self.table.len() as u32)
            .filter(|chunk| self.bits.get(*chunk as usize) && !durable.presence.get(*chunk))
            .collect();
        if let Err(error) = self.files.sync_data() {
            self.distrust(&durable);
            return Err(error).context(name);
        }
        self.write_back_failed.store(false, Ordering::Release);
        for chunk in &fresh {
            durable.presence.set(*chunk);
        }
        if let Err(error) = self.write_presence(&mut durable) {
            // The state in memory runs ahead of the disk, so the next round writes it again.
            self.dirty.store(true, Ordering::Release);
            return Err(error).context(name);
        }
        self.durably_complete.store(durable.presence.is_complete(), Ordering::Release);
        drop(durable);
        self.let_go_of_pages(&fresh);
        Ok(true)
    }

    /// The layer is released and may be opened anew: what is still filled here is right and counts for nobody.
    // INVARIANT: of all openings of a folder only the last writes presence, or hears of a failed sync.
    pub fn retire(&self) {
        self.durable.lock().unwrap_or_else(PoisonError::into_inner).retired = true;
    }

    pub(super) fn write_presence(&self, durable: &mut Durable) -> Result<()> {
        if durable.recorded {
            return self.files.write_presence(&durable.presence.next_write());
        }
        self.files.create_presence(&durable.presence.encode())?;
        durable.recorded = true;
        Ok(())
    }

    /// After a failed flush the kernel may have dropped pages that it could not write, also pages that
    /// were filled while it ran. Waits for fills under way: their bits are cleared too.
    // INVARIANT: nothing that could be lost counts as present, so the next read fetches it again.
    fn distrust(&self, durable: &Durable) {
        self.write_back_failed.store(true, Ordering::Release);
        let _alone = self.access.write().unwrap_or_else(PoisonError::into_inner);
        self.losses.fetch_add(1, Ordering::AcqRel);
        for chunk in (0..self.table.len() as u32).filter(|chunk| !durable.presence.get(*chunk)) {
            self.bits.clear(chunk as usize);
        }
        self.dirty.store(true, Ordering::Release);
    }

    /// The file system above has its own copy of what was read; the backing file's need not stay.
    fn let_go_of_pages(&self, fresh: &[u32]) {
        let ranges = fresh.iter().map(|chunk| self.table.chunks()[*chunk as usize].byte_range());
        for run in runs(ranges) {
            if let Err(error) = self.files.let_go(run) {
                tracing::debug!(%error, layer = %self.id, "let go of pages");
            }
        }
    }
}
