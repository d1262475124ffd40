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
use crate::journal::FileKey;
use layer::chunk::ChunkTable;
use layer::presence::Presence;
use layer::{Context, LayerId, Result};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// What is on disk: the bits that survive a power cut.
#[derive(Debug)]
struct Durable {
    presence: Presence,
    file: Option<File>,
}

/// A layer whose metadata is complete on this node and whose data arrives chunk by chunk.
#[derive(Debug)]
pub struct CachedLayer {
    id: LayerId,
    folder: PathBuf,
    table: ChunkTable,
    data: File,
    key: FileKey,
    bits: Bits,
    dirty: AtomicBool,
    write_back_failed: AtomicBool,
    durable: Mutex<Durable>,
    durably_complete: AtomicBool,
    filled_bytes: AtomicU64,
}

/// The parts that [`CachedLayer::new`] puts together.
pub(super) struct Parts {
    pub id: LayerId,
    pub folder: PathBuf,
    pub table: ChunkTable,
    pub data: File,
    pub present: Option<(Presence, File)>,
}

impl CachedLayer {
    /// Only durable bits and chunks of zeros count as present.
    pub(super) fn new(parts: Parts) -> Result<Self> {
        let Parts { id, folder, table, data, present } = parts;
        let metadata = data.metadata().context(|| format!("stat data of layer {id}"))?;
        let key = FileKey { device: metadata.dev(), inode: metadata.ino() };
        let (mut presence, file) = match present {
            Some((presence, file)) => (presence, Some(file)),
            None => (Presence::new(id, table.len() as u32), None),
        };
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
        let durably_complete = file.is_some() && presence.is_complete();
        Ok(Self {
            id,
            folder,
            table,
            data,
            key,
            bits,
            dirty: AtomicBool::new(file.is_none()),
            write_back_failed: AtomicBool::new(false),
            durable: Mutex::new(Durable { presence, file }),
            durably_complete: AtomicBool::new(durably_complete),
            filled_bytes: AtomicU64::new(0),
        })
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
        self.data.as_fd()
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
        self.data.write_all_at(plain, entry.offset()).context(name)?;
        if self.write_back_failed.load(Ordering::Acquire) {
            // The disk has lost pages of this file before: the page cache is no proof any more.
            self.data.sync_data().context(name)?;
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
        self.data.read_exact_at(into, offset).context(|| what)
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
        if let Err(error) = self.data.sync_data() {
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

    /// Whole folder first: a presence file exists only beside metadata that is durable.
    fn write_presence(&self, durable: &mut Durable) -> Result<()> {
        let path = self.folder.join(super::PRESENT);
        let name = || format!("write {}", path.display());
        if let Some(file) = &durable.file {
            let write = durable.presence.next_write();
            file.write_all_at(&write.bytes, write.offset).context(name)?;
            return file.sync_data().context(name);
        }
        for part in [super::METADATA, super::CHUNKS, super::MANIFEST] {
            let file = File::open(self.folder.join(part)).context(name)?;
            file.sync_all().context(name)?;
        }
        let file = super::create_file(&path)?;
        file.write_all_at(&durable.presence.encode(), 0).context(name)?;
        file.sync_all().context(name)?;
        File::open(&self.folder).and_then(|folder| folder.sync_all()).context(name)?;
        durable.file = Some(file);
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
            let length = std::num::NonZero::new(run.end - run.start);
            let advice = rustix::fs::Advice::DontNeed;
            if let Err(error) = rustix::fs::fadvise(&self.data, run.start, length, advice) {
                tracing::debug!(%error, layer = %self.id, "let go of pages");
            }
        }
    }
}
