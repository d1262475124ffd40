//! One layer in the node cache: its chunk table, its data file, and which chunks are there.
//!
//! Order of a fill: the caller has verified the bytes, [`CachedLayer::fill`] writes them and then sets
//! the bit in memory, and only then is a reader let go. [`CachedLayer::make_durable`] follows later.
//!
//! Locking: the bits are atomics; the durable state has its own mutex, held while a flush runs.
//! Writes go through the quiet descriptor, which was opened before the file was marked and so raises
//! no events: any other would wait for itself.
// CRASH: between a fill and the durable bit the chunk is simply fetched again. The data is flushed
// before the bit is written, so a durable bit never precedes its bytes.

use super::bits::Bits;
use super::files::LayerFiles;
use crate::journal::FileKey;
use layer::chunk::ChunkTable;
use layer::presence::Presence;
use layer::{Context, LayerId, Result};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// What is on disk: the bits that survive a power cut.
#[derive(Debug)]
struct Durable {
    presence: Presence,
    /// Whether there is a presence file.
    recorded: bool,
}

/// A layer whose metadata is complete on this node and whose data arrives chunk by chunk.
#[derive(Debug)]
pub struct CachedLayer {
    id: LayerId,
    folder: PathBuf,
    table: ChunkTable,
    files: Box<dyn LayerFiles>,
    key: FileKey,
    bits: Bits,
    dirty: AtomicBool,
    write_back_failed: AtomicBool,
    durable: Mutex<Durable>,
    durably_complete: AtomicBool,
    filled_bytes: AtomicU64,
}

/// The parts that [`CachedLayer::new`] puts together.
#[derive(Debug)]
pub struct Parts {
    /// The layer.
    pub id: LayerId,
    /// Where its files are.
    pub folder: PathBuf,
    /// Its chunks, verified against the manifest.
    pub table: ChunkTable,
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
            table,
            files,
            key,
            bits,
            dirty: AtomicBool::new(!recorded),
            write_back_failed: AtomicBool::new(false),
            durable: Mutex::new(Durable { presence, recorded }),
            durably_complete: AtomicBool::new(durably_complete),
            filled_bytes: AtomicU64::new(0),
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
        self.filled_bytes.load(Ordering::Relaxed)
    }

    /// Writes the verified bytes of a chunk and sets its bit. `NoSpace` when the disk is full.
    pub fn fill(&self, chunk: usize, plain: &[u8]) -> Result<()> {
        let name = || format!("fill chunk {chunk} of layer {}", self.id);
        let Some(entry) = self.table.chunks().get(chunk) else {
            return Err(layer::Error::invalid(name()));
        };
        debug_assert_eq!(plain.len(), entry.plain_bytes() as usize);
        self.files.write_data(plain, entry.offset()).context(name)?;
        if self.write_back_failed.load(Ordering::Acquire) {
            // The disk has lost pages of this file before: the page cache is no proof any more.
            self.files.sync_data().context(name)?;
        }
        self.dirty.store(true, Ordering::Release);
        // INVARIANT: the bit follows the bytes.
        self.bits.set(chunk);
        self.filled_bytes.fetch_add(plain.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Copies bytes of present chunks out of the data file.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let name = || format!("read {} bytes at {offset} of layer {}", into.len(), self.id);
        let what = name();
        self.files.read_data(into, offset).context(|| what)
    }

    /// Flushes what was filled, then records it. Answers whether the durable state changed.
    ///
    /// After a failed flush nothing that was not durable counts as present any more.
    pub fn make_durable(&self) -> Result<bool> {
        let name = || format!("make layer {} durable", self.id);
        let mut durable = self.durable.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.dirty.swap(false, Ordering::AcqRel) {
            return Ok(false);
        }
        let fresh: Vec<u32> = (0..self.table.len() as u32)
            .filter(|chunk| self.bits.get(*chunk as usize) && !durable.presence.get(*chunk))
            .collect();
        if let Err(error) = self.files.sync_data() {
            self.distrust(&fresh);
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

    fn write_presence(&self, durable: &mut Durable) -> Result<()> {
        if durable.recorded {
            return self.files.write_presence(&durable.presence.next_write());
        }
        self.files.create_presence(&durable.presence.encode())?;
        durable.recorded = true;
        Ok(())
    }

    /// After a failed flush the kernel may have dropped pages that it could not write.
    // INVARIANT: nothing that could be lost counts as present, so the next read fetches it again.
    fn distrust(&self, fresh: &[u32]) {
        self.write_back_failed.store(true, Ordering::Release);
        for chunk in fresh {
            self.bits.clear(*chunk as usize);
        }
        self.dirty.store(true, Ordering::Release);
    }

    /// The file system above has its own copy of what was read; the backing file's need not stay.
    fn let_go_of_pages(&self, fresh: &[u32]) {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for chunk in fresh {
            let range = self.table.chunks()[*chunk as usize].byte_range();
            match runs.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => runs.push(range),
            }
        }
        for run in runs {
            if let Err(error) = self.files.let_go(run) {
                tracing::debug!(%error, layer = %self.id, "let go of pages");
            }
        }
    }
}
