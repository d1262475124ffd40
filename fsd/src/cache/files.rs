//! The files of one cached layer, as its bookkeeping sees them: the seam between the cache and a disk.
//!
//! [`FolderFiles`] is a folder of the node cache. The fault simulation has another implementation, which
//! loses what a real disk may lose.
//!
//! Locking: none; the operating system's. `write_presence` is called under the layer's durable state.
// CRASH: data that was written and not synced, and a presence state whose write did not return, may be
// there, be torn, or be missing after a power cut.

use layer::presence::SlotWrite;
use layer::{Context, Result};
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::OnceLock;

/// What the cache does with a layer's files.
pub trait LayerFiles: std::fmt::Debug + Send + Sync {
    /// The data file through a descriptor that raises no events.
    fn quiet_data(&self) -> BorrowedFd<'_>;

    /// Copies bytes out of the data file. Holes are zeros.
    fn read_data(&self, into: &mut [u8], offset: u64) -> std::io::Result<()>;

    /// Writes bytes of the data file. They may be lost until the next [`LayerFiles::sync_data`].
    fn write_data(&self, bytes: &[u8], offset: u64) -> std::io::Result<()>;

    /// Makes durable what was written before. After an error all of that may be lost, also from memory,
    /// and a later success says nothing about it.
    fn sync_data(&self) -> std::io::Result<()>;

    /// Gives the blocks of a range back: from now on it reads as zeros. Where nothing can be given back,
    /// zeros are written.
    fn punch(&self, range: Range<u64>) -> std::io::Result<()> {
        self.write_data(&vec![0; (range.end - range.start) as usize], range.start)
    }

    /// Makes the bytes at `to` the same blocks as `range` of another data file.
    fn share(&self, source: BorrowedFd<'_>, range: Range<u64>, to: u64) -> std::io::Result<()> {
        _ = (source, range, to);
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// The page cache need not keep this clean range.
    fn let_go(&self, range: Range<u64>) -> std::io::Result<()>;

    /// Makes a presence file of these bytes, durably, beside metadata that is durable. Called when there
    /// is none.
    fn create_presence(&self, bytes: &[u8]) -> Result<()>;

    /// Writes one slot of the presence file durably. After an error it is there, torn, or as before.
    fn write_presence(&self, write: &SlotWrite) -> Result<()>;
}

/// A layer's folder in the node cache.
#[derive(Debug)]
pub struct FolderFiles {
    path: PathBuf,
    /// INVARIANT: the folder itself, not its name: after an eviction another one may have the name, and a
    /// late flush of the old one must not speak for it.
    folder: File,
    data: File,
    present: OnceLock<File>,
}

impl FolderFiles {
    /// The open files of the folder at `path`; `present` where there is one.
    pub fn new(path: PathBuf, data: File, present: Option<File>) -> Result<Self> {
        let folder = File::open(&path).context(|| format!("open {}", path.display()))?;
        let present = present.map_or_else(OnceLock::new, OnceLock::from);
        Ok(Self { path, folder, data, present })
    }

    fn open_at(&self, name: &str, flags: OFlags) -> std::io::Result<File> {
        let mode = Mode::RUSR | Mode::WUSR;
        Ok(File::from(rustix::fs::openat(&self.folder, name, flags, mode)?))
    }
}

impl LayerFiles for FolderFiles {
    fn quiet_data(&self) -> BorrowedFd<'_> {
        self.data.as_fd()
    }

    fn read_data(&self, into: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.data.read_exact_at(into, offset)
    }

    fn write_data(&self, bytes: &[u8], offset: u64) -> std::io::Result<()> {
        self.data.write_all_at(bytes, offset)
    }

    fn sync_data(&self) -> std::io::Result<()> {
        self.data.sync_data()
    }

    fn punch(&self, range: Range<u64>) -> std::io::Result<()> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.data, how, range.start, range.end - range.start)?)
    }

    fn share(&self, source: BorrowedFd<'_>, range: Range<u64>, to: u64) -> std::io::Result<()> {
        let bytes = range.end - range.start;
        sys::reflink::clone_range(source, range.start, bytes, self.data.as_fd(), to)
    }

    fn let_go(&self, range: Range<u64>) -> std::io::Result<()> {
        let length = std::num::NonZero::new(range.end - range.start);
        Ok(rustix::fs::fadvise(&self.data, range.start, length, rustix::fs::Advice::DontNeed)?)
    }

    fn create_presence(&self, bytes: &[u8]) -> Result<()> {
        let name = || format!("write {}", self.path.join(super::PRESENT).display());
        let create = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        for part in [super::METADATA, super::CHUNKS, super::MANIFEST] {
            let file = self.open_at(part, OFlags::RDONLY | OFlags::CLOEXEC).context(name)?;
            file.sync_all().context(name)?;
        }
        // What a failed attempt left.
        match rustix::fs::unlinkat(&self.folder, super::PRESENT, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(layer::Error::io(name(), error.into())),
        }
        let file = self.open_at(super::PRESENT, create).context(name)?;
        file.write_all_at(bytes, 0).context(name)?;
        file.sync_all().context(name)?;
        self.folder.sync_all().context(name)?;
        let _ = self.present.set(file);
        Ok(())
    }

    fn write_presence(&self, write: &SlotWrite) -> Result<()> {
        let name = || format!("write {}", self.path.join(super::PRESENT).display());
        let Some(file) = self.present.get() else {
            return Err(layer::Error::not_found(name()));
        };
        file.write_all_at(&write.bytes, write.offset).context(name)?;
        file.sync_data().context(name)
    }
}
