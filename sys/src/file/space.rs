//! Where a file's bytes lie: holes, allocation, reflinks, durability, page cache, room on the disk.
//!
//! What survives a crash: what [`sync_data`] has returned Ok for. A failed sync must be taken for the
//! loss of everything written since the last good one: the kernel reports it once only.

use rustix::fs::{Advice, FallocateFlags, SeekFrom};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Frees the blocks of a range; it reads as zeros afterwards and the size stays.
pub fn punch_hole(fd: BorrowedFd<'_>, offset: u64, bytes: u64) -> io::Result<()> {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::io::retry_on_intr(|| rustix::fs::fallocate(fd, mode, offset, bytes))?)
}

/// Reserves blocks for a range, growing the file if it ends before; it reads as zeros where nothing was.
pub fn allocate(fd: BorrowedFd<'_>, offset: u64, bytes: u64) -> io::Result<()> {
    let mode = FallocateFlags::empty();
    Ok(rustix::io::retry_on_intr(|| rustix::fs::fallocate(fd, mode, offset, bytes))?)
}

/// Sets the size; growth is a hole.
pub fn set_size(fd: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    Ok(rustix::io::retry_on_intr(|| rustix::fs::ftruncate(fd, bytes))?)
}

/// Makes the bytes and the size of a file durable. Never retried: after an error the file is suspect.
pub fn sync_data(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::fs::fdatasync(fd)?)
}

/// Makes a file with all its metadata durable; for a folder, the names in it.
pub fn sync_all(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::fs::fsync(fd)?)
}

/// Makes everything on the file system of `fd` durable.
pub fn sync_file_system(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::fs::syncfs(fd)?)
}

/// Runs of a file that hold data; between them are holes. Moves the descriptor's offset.
#[derive(Debug)]
pub struct DataRanges<'fd> {
    fd: BorrowedFd<'fd>,
    next: Option<u64>,
}

/// The runs of a file that hold data, in order. Where the file system knows no holes: one run.
pub fn data_ranges(fd: BorrowedFd<'_>) -> DataRanges<'_> {
    DataRanges { fd, next: Some(0) }
}

impl DataRanges<'_> {
    fn find(&mut self, from: u64) -> rustix::io::Result<Option<Range<u64>>> {
        let start = match rustix::fs::seek(self.fd, SeekFrom::Data(from)) {
            Ok(start) => start,
            // Nothing but a hole follows, or the end.
            Err(rustix::io::Errno::NXIO) => return Ok(None),
            Err(error) => return Err(error),
        };
        match rustix::fs::seek(self.fd, SeekFrom::Hole(start)) {
            Ok(end) => Ok(Some(start..end)),
            // Somebody shortened the file in between.
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Iterator for DataRanges<'_> {
    type Item = io::Result<Range<u64>>;

    fn next(&mut self) -> Option<Self::Item> {
        let from = self.next.take()?;
        match self.find(from) {
            Ok(Some(range)) => {
                self.next = Some(range.end);
                Some(Ok(range))
            }
            Ok(None) => None,
            Err(error) => Some(Err(error.into())),
        }
    }
}

/// The kernel's `struct file_clone_range`.
#[repr(C)]
struct RawCloneRange {
    source: i64,
    source_offset: u64,
    bytes: u64,
    target_offset: u64,
}

/// Lets two files share blocks (reflink). Offsets and length are multiples of the file system's block.
///
/// EOPNOTSUPP where the file system cannot (ext4), EXDEV between two file systems.
pub fn clone_range(
    source: BorrowedFd<'_>,
    source_offset: u64,
    target: BorrowedFd<'_>,
    target_offset: u64,
    bytes: u64,
) -> io::Result<()> {
    let range =
        RawCloneRange { source: source.as_raw_fd().into(), source_offset, bytes, target_offset };
    // SAFETY: FICLONERANGE reads one struct file_clone_range, which `range` is.
    let result =
        unsafe { libc::ioctl(target.as_raw_fd(), libc::FICLONERANGE as _, &raw const range) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Copies a range inside the kernel, as a reflink where possible. `UnexpectedEof` when the source ends
/// before; EXDEV or EOPNOTSUPP where the two file systems cannot.
pub fn copy_range(
    source: BorrowedFd<'_>,
    source_offset: u64,
    target: BorrowedFd<'_>,
    target_offset: u64,
    bytes: u64,
) -> io::Result<()> {
    let (mut from, mut to, mut rest) = (source_offset, target_offset, bytes);
    while rest > 0 {
        let step = usize::try_from(rest).unwrap_or(usize::MAX).min(1 << 30);
        let copied = rustix::io::retry_on_intr(|| {
            // The kernel moves both offsets itself, but only on success.
            rustix::fs::copy_file_range(source, Some(&mut from), target, Some(&mut to), step)
        })?;
        if copied == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        rest -= copied as u64;
    }
    Ok(())
}

/// Reads exactly this many bytes at this offset. `UnexpectedEof` when the file ends before.
pub fn read_exact_at(fd: BorrowedFd<'_>, mut into: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !into.is_empty() {
        let length = rustix::io::retry_on_intr(|| rustix::io::pread(fd, &mut *into, offset))?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        into = &mut into[length..];
        offset += length as u64;
    }
    Ok(())
}

/// Whether pages that a write or read brought in stay in the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageCache {
    /// As usual.
    Keep,
    /// Let go as soon as they are clean (`RWF_DONTCACHE`, Linux 6.14); EOPNOTSUPP where the file
    /// system cannot.
    LetGo,
}

const RWF_DONTCACHE: u32 = 0x80;

fn flags_of(cache: PageCache) -> rustix::io::ReadWriteFlags {
    match cache {
        PageCache::Keep => rustix::io::ReadWriteFlags::empty(),
        PageCache::LetGo => rustix::io::ReadWriteFlags::from_bits_retain(RWF_DONTCACHE),
    }
}

/// Writes all bytes at this offset.
pub fn write_all_at(
    fd: BorrowedFd<'_>,
    mut from: &[u8],
    mut offset: u64,
    cache: PageCache,
) -> io::Result<()> {
    while !from.is_empty() {
        let written = rustix::io::retry_on_intr(|| {
            rustix::io::pwritev2(fd, &[io::IoSlice::new(from)], offset, flags_of(cache))
        })?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        from = &from[written..];
        offset += written as u64;
    }
    Ok(())
}

/// One read at this offset, of at least one byte unless the file ends there.
pub fn read_at(
    fd: BorrowedFd<'_>,
    into: &mut [u8],
    offset: u64,
    cache: PageCache,
) -> io::Result<usize> {
    Ok(rustix::io::retry_on_intr(|| {
        rustix::io::preadv2(fd, &mut [io::IoSliceMut::new(into)], offset, flags_of(cache))
    })?)
}

/// Lets go of the clean cached pages of a range; zero bytes means to the end. Dirty pages stay.
pub fn drop_cached(fd: BorrowedFd<'_>, offset: u64, bytes: u64) -> io::Result<()> {
    let bytes = std::num::NonZeroU64::new(bytes);
    Ok(rustix::fs::fadvise(fd, offset, bytes, Advice::DontNeed)?)
}

/// Says that a file will be read from front to back.
pub fn expect_sequential(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::fs::fadvise(fd, 0, None, Advice::Sequential)?)
}

/// Has a range read into the page cache, without waiting for it.
pub fn read_ahead(fd: BorrowedFd<'_>, offset: u64, bytes: u64) -> io::Result<()> {
    let bytes = std::num::NonZeroU64::new(bytes);
    Ok(rustix::fs::fadvise(fd, offset, bytes, Advice::WillNeed)?)
}

/// Whether a file lies on a block device of this host, rather than behind a network or a daemon.
pub fn is_on_local_disk(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // File systems without a device of their own have numbers with major 0.
    Ok(rustix::fs::major(rustix::fs::fstat(fd)?.st_dev) != 0)
}

/// What kind of file system a file lies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystemKind {
    /// ext2, ext3 or ext4: they share one number.
    Ext,
    /// XFS.
    Xfs,
    /// btrfs.
    Btrfs,
    /// tmpfs (and ramfs).
    Tmpfs,
    /// overlayfs.
    Overlay,
    /// FUSE.
    Fuse,
    /// EROFS.
    Erofs,
    /// NFS.
    Nfs,
    /// Any other, by its number.
    Other(u64),
}

/// A file system's kind and room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSystem {
    /// Its kind.
    pub kind: FileSystemKind,
    /// Size of its blocks in bytes.
    pub block_bytes: u64,
    /// All bytes of it.
    pub total_bytes: u64,
    /// Bytes that may still be written by anybody.
    pub available_bytes: u64,
    /// Inodes that may still be made; `u64::MAX` where there is no limit.
    pub available_inodes: u64,
}

impl FileSystem {
    /// Whether the node cache may lie here: file-backed EROFS and pre-content events are tried on
    /// ext4, XFS and btrfs, and refused by the kernel on tmpfs, overlayfs and FUSE.
    pub fn can_back_layers(&self) -> bool {
        matches!(self.kind, FileSystemKind::Ext | FileSystemKind::Xfs | FileSystemKind::Btrfs)
    }
}

/// Whether a file system has no room for one more write or one more file. What cannot be asked is not full.
pub fn is_full(path: &std::path::Path) -> bool {
    /// ext4 refuses a write while it holds a few blocks back for the tables of what is not written out yet.
    const HELD_BACK_BYTES: u64 = 256 << 10;
    let Ok(now) = rustix::fs::statvfs(path) else { return false };
    let left = now.f_bavail.saturating_mul(now.f_frsize);
    let total = now.f_blocks.saturating_mul(now.f_frsize);
    // Some file systems have no bound on files, and say zero of zero.
    left < HELD_BACK_BYTES.min(total / 64) || left == 0 || (now.f_files > 0 && now.f_ffree == 0)
}

/// Asks about the file system that an open file lies on.
pub fn file_system(fd: BorrowedFd<'_>) -> io::Result<FileSystem> {
    let found = rustix::fs::fstatfs(fd)?;
    let kind = match found.f_type as u64 {
        0xEF53 => FileSystemKind::Ext,
        0x5846_5342 => FileSystemKind::Xfs,
        0x9123_683E => FileSystemKind::Btrfs,
        0x0102_1994 | 0x8584_58F6 => FileSystemKind::Tmpfs,
        0x794C_7630 => FileSystemKind::Overlay,
        0x6573_5546 => FileSystemKind::Fuse,
        0xE0F5_E1E2 => FileSystemKind::Erofs,
        0x6969 => FileSystemKind::Nfs,
        other => FileSystemKind::Other(other),
    };
    let block_bytes = found.f_frsize as u64;
    Ok(FileSystem {
        kind,
        block_bytes,
        total_bytes: found.f_blocks.saturating_mul(block_bytes),
        available_bytes: found.f_bavail.saturating_mul(block_bytes),
        available_inodes: if found.f_files == 0 { u64::MAX } else { found.f_ffree },
    })
}
