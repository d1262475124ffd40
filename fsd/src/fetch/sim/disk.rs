//! A disk that loses what a disk may lose.
//!
//! Each file has what the page cache shows and what is on the platter. Writes make blocks dirty; a sync
//! brings them down; a power cut keeps any of the dirty blocks, whole, torn at a sector, or not at all,
//! in no order. After a failed sync its blocks are clean and not on the platter: they can be seen until
//! the kernel reclaims them, and no later sync says anything about them.
//!
//! Two things are taken as given, as the design does: write-back fails in a sync and not before, and the
//! kernel does not reclaim a page between the answer to a reader and that reader's own read.

use super::fate::{Fate, Fault};
use super::mutant::Mutant;
use crate::cache::files::LayerFiles;
use crate::fetch::Room;
use layer::presence::{Presence, SlotWrite};
use layer::{Error, ErrorKind, LayerId, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

const BLOCK: usize = 4096;
const SECTOR: usize = 512;

/// A file between memory and platter.
#[derive(Debug)]
struct SimFile {
    seen: Vec<u8>,
    platter: Vec<u8>,
    /// Dirty blocks, each with the write that made it so.
    dirty: BTreeMap<usize, u64>,
    /// Clean blocks that are not on the platter.
    lost: BTreeSet<usize>,
    writes: u64,
}

impl SimFile {
    fn sparse(bytes: usize) -> Self {
        let (seen, platter) = (vec![0; bytes], vec![0; bytes]);
        Self { seen, platter, dirty: BTreeMap::new(), lost: BTreeSet::new(), writes: 0 }
    }

    fn write(&mut self, bytes: &[u8], offset: usize) {
        self.seen[offset..offset + bytes.len()].copy_from_slice(bytes);
        self.writes += 1;
        for block in offset / BLOCK..(offset + bytes.len()).div_ceil(BLOCK) {
            self.dirty.insert(block, self.writes);
            self.lost.remove(&block);
        }
    }

    fn range(&self, block: usize) -> Range<usize> {
        block * BLOCK..((block + 1) * BLOCK).min(self.seen.len())
    }

    /// Ends a sync of what was dirty when it began.
    fn synced(&mut self, dirty: &BTreeMap<usize, u64>, success: bool) {
        for (block, write) in dirty {
            if self.dirty.get(block) == Some(write) {
                self.dirty.remove(block);
                if !success {
                    self.lost.insert(*block);
                }
            }
            if success {
                let range = self.range(*block);
                self.platter[range.clone()].copy_from_slice(&self.seen[range]);
            }
        }
    }

    fn reclaim(&mut self, block: usize) {
        if self.lost.remove(&block) {
            let range = self.range(block);
            self.seen[range.clone()].copy_from_slice(&self.platter[range]);
        }
    }

    fn power_cut(&mut self, fate: &Fate) {
        for block in std::mem::take(&mut self.dirty).into_keys() {
            let range = self.range(block);
            let kept = match fate.below(3) {
                0 => 0,
                1 => range.len(),
                _ => fate.below((BLOCK / SECTOR) as u64 + 1) as usize * SECTOR,
            };
            let kept = range.start..range.start + kept.min(range.len());
            self.platter[kept.clone()].copy_from_slice(&self.seen[kept]);
        }
        self.lost.clear();
        self.seen.clone_from(&self.platter);
    }
}

/// The disk under one cached layer.
#[derive(Debug)]
pub struct SimDisk {
    fate: Arc<Fate>,
    mutant: Mutant,
    data: Mutex<SimFile>,
    present: Mutex<Option<SimFile>>,
    /// A write that was said to be done: what only a mutant has.
    late: Mutex<Option<(Vec<u8>, u64)>>,
    /// Readers that were let go and have not read yet.
    let_go: AtomicUsize,
    /// Operations under way, one inside the other.
    operations: AtomicUsize,
}

/// An operation of the process that others may interrupt.
struct Operation<'a>(&'a SimDisk);

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        self.0.operations.fetch_sub(1, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SimDisk {
    /// An empty data file of its final size, and no presence file.
    pub fn new(fate: Arc<Fate>, mutant: Mutant, bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            fate,
            mutant,
            data: Mutex::new(SimFile::sparse(bytes as usize)),
            present: Mutex::new(None),
            late: Mutex::new(None),
            let_go: AtomicUsize::new(0),
            operations: AtomicUsize::new(0),
        })
    }

    fn begin(&self) -> (Operation<'_>, bool) {
        let others = self.operations.fetch_add(1, Ordering::Relaxed);
        (Operation(self), others == 0)
    }

    /// Whether nobody is in the middle of an operation: what waits for all of them may run.
    pub fn is_quiet(&self) -> bool {
        self.operations.load(Ordering::Relaxed) == 0
    }

    /// What a reader of the data file sees.
    pub fn seen(&self, range: Range<u64>) -> Vec<u8> {
        lock(&self.data).seen[range.start as usize..range.end as usize].to_vec()
    }

    /// What is on the platter.
    pub fn platter(&self, range: Range<u64>) -> Vec<u8> {
        lock(&self.data).platter[range.start as usize..range.end as usize].to_vec()
    }

    /// What the presence file says to whoever opens it.
    pub fn presence(&self, layer: LayerId, chunks: usize) -> Option<Presence> {
        let present = lock(&self.present);
        present.as_ref().map(|file| Presence::decode(layer, chunks as u32, &file.seen))
    }

    /// A reader was let go: it reads soon.
    pub fn reader_let_go(&self) {
        self.let_go.fetch_add(1, Ordering::Relaxed);
    }

    /// It has read.
    pub fn reader_has_read(&self) {
        self.let_go.fetch_sub(1, Ordering::Relaxed);
    }

    /// The kernel needs memory: clean pages go.
    pub fn reclaim(&self) {
        if self.let_go.load(Ordering::Relaxed) == 0 {
            let mut data = lock(&self.data);
            for block in data.lost.clone() {
                data.reclaim(block);
            }
        }
    }

    /// What was not synced is kept, torn or lost.
    pub fn power_cut(&self) {
        lock(&self.data).power_cut(&self.fate);
        if let Some(present) = lock(&self.present).as_mut() {
            present.power_cut(&self.fate);
        }
        self.let_go.store(0, Ordering::Relaxed);
    }

    /// Throws a range away under whoever reads it: what only a mutant does.
    pub fn punch(&self, range: Range<u64>) {
        let range = range.start as usize..range.end as usize;
        let mut data = lock(&self.data);
        data.seen[range.clone()].fill(0);
        data.platter[range].fill(0);
    }

    fn alive(&self) -> io::Result<()> {
        if self.fate.is_dead() { Err(io::Error::other("the process is dead")) } else { Ok(()) }
    }

    fn sync_presence(&self) -> Result<()> {
        let name = || "write the presence file".to_owned();
        let _operation = self.begin();
        self.fate.interrupt();
        self.alive().map_err(|error| Error::io(name(), error))?;
        let mut present = lock(&self.present);
        let Some(file) = present.as_mut() else { return Err(Error::not_found(name())) };
        let dirty = file.dirty.clone();
        let success = !self.fate.strikes(Fault::PresenceFails);
        file.synced(&dirty, success);
        if success {
            return Ok(());
        }
        Err(Error::io(name(), io::Error::from_raw_os_error(5)))
    }
}

/// The open files of a [`SimDisk`], in the hands of one process.
#[derive(Debug)]
pub struct SimFiles {
    disk: Arc<SimDisk>,
}

impl SimFiles {
    /// Opens them.
    pub fn open(disk: &Arc<SimDisk>) -> Box<Self> {
        Box::new(Self { disk: Arc::clone(disk) })
    }
}

impl LayerFiles for SimFiles {
    fn quiet_data(&self) -> BorrowedFd<'_> {
        static NOTHING: OnceLock<File> = OnceLock::new();
        NOTHING.get_or_init(|| File::open("/dev/null").unwrap()).as_fd()
    }

    fn read_data(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let _operation = self.disk.begin();
        self.disk.fate.interrupt();
        self.disk.alive()?;
        into.copy_from_slice(&self.disk.seen(offset..offset + into.len() as u64));
        Ok(())
    }

    fn write_data(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let _operation = self.disk.begin();
        self.disk.fate.interrupt();
        self.disk.alive()?;
        if self.disk.mutant == Mutant::SetsTheBitBeforeTheBytes {
            let before = lock(&self.disk.late).replace((bytes.to_vec(), offset));
            if let Some((bytes, offset)) = before {
                lock(&self.disk.data).write(&bytes, offset as usize);
            }
            return Ok(());
        }
        let full = self.disk.fate.strikes(Fault::WriteFull);
        let written = if full { BLOCK * (bytes.len() / BLOCK / 2) } else { bytes.len() };
        lock(&self.disk.data).write(&bytes[..written], offset as usize);
        self.disk.fate.interrupt();
        self.disk.alive()?;
        if full { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn sync_data(&self) -> io::Result<()> {
        if self.disk.mutant == Mutant::RecordsBeforeTheSync {
            return Ok(());
        }
        let (_operation, alone) = self.disk.begin();
        self.disk.fate.interrupt();
        self.disk.alive()?;
        let dirty = lock(&self.disk.data).dirty.clone();
        self.disk.fate.interrupt();
        self.disk.alive()?;
        // A failure makes the cache wait for all others: inside of one of them it would wait for itself.
        let success = !alone || dirty.is_empty() || !self.disk.fate.strikes(Fault::SyncFails);
        lock(&self.disk.data).synced(&dirty, success);
        self.disk.fate.interrupt();
        if success { self.disk.alive() } else { Err(io::Error::from_raw_os_error(5)) }
    }

    fn punch(&self, range: Range<u64>) -> io::Result<()> {
        self.disk.alive()?;
        let zeros = vec![0; (range.end - range.start) as usize];
        lock(&self.disk.data).write(&zeros, range.start as usize);
        Ok(())
    }

    fn let_go(&self, range: Range<u64>) -> io::Result<()> {
        if self.disk.let_go.load(Ordering::Relaxed) == 0 {
            let mut data = lock(&self.disk.data);
            for block in range.start as usize / BLOCK..(range.end as usize).div_ceil(BLOCK) {
                data.reclaim(block);
            }
        }
        Ok(())
    }

    fn create_presence(&self, bytes: &[u8]) -> Result<()> {
        self.disk.fate.interrupt();
        self.disk.alive().map_err(|error| Error::io("create the presence file", error))?;
        let mut file = SimFile::sparse(bytes.len());
        file.write(bytes, 0);
        *lock(&self.disk.present) = Some(file);
        self.disk.sync_presence()
    }

    fn write_presence(&self, write: &SlotWrite) -> Result<()> {
        self.disk.fate.interrupt();
        self.disk.alive().map_err(|error| Error::io("write the presence file", error))?;
        if let Some(file) = lock(&self.disk.present).as_mut() {
            file.write(&write.bytes, write.offset as usize);
        }
        self.disk.sync_presence()
    }
}

/// The room on the disk.
#[derive(Debug)]
pub struct SimRoom(pub Arc<Fate>);

impl Room for SimRoom {
    fn check(&self, _bytes: u64) -> Result<()> {
        if self.0.strikes(Fault::NoRoom) {
            return Err(Error::new(ErrorKind::NoSpace, "no room above the reserve"));
        }
        Ok(())
    }

    fn forget(&self) {}
}
