//! Files and folders by descriptor: opening that no symlink can lead astray, whole metadata, locks.
//!
//! For: walking, reading and writing trees that hostile code made, and files whose bytes are counted.
//! The parts: [`folder`] (walk and remove trees), [`space`] (holes, allocation, sync, reflinks, page
//! cache), [`publish`] (appear complete or not at all), [`xattr`].
//!
//! Nothing here follows a trailing symlink unless its name says so. Names are bytes. Locking: none,
//! except [`lock`] itself.

pub mod folder;
pub mod publish;
pub mod space;
pub mod xattr;

pub use folder::Folder;
pub use rustix::fs::OFlags;

use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, ResolveFlags, StatxFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// How often a lookup that raced with a rename is tried again before EAGAIN is answered.
const LOOKUP_ATTEMPTS: usize = 64;

fn open_resolved(
    folder: BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
    mode: u32,
    resolve: ResolveFlags,
) -> io::Result<OwnedFd> {
    let path: PathBuf = if path.as_os_str().is_empty() { ".".into() } else { path.into() };
    let flags = flags | OFlags::CLOEXEC;
    // The kernel refuses a mode where no file can come into being.
    let creates = flags.intersects(OFlags::CREATE) || flags.contains(OFlags::TMPFILE);
    let mode = Mode::from_raw_mode(if creates { mode & 0o7777 } else { 0 });
    let mut attempts = 0;
    loop {
        match rustix::fs::openat2(folder, &path, flags, mode, resolve) {
            Ok(fd) => return Ok(fd),
            Err(rustix::io::Errno::AGAIN) if attempts < LOOKUP_ATTEMPTS => attempts += 1,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Opens a path as if `root` were the root of the file system: absolute symlinks and `..` stay inside.
///
/// Magic links of /proc are refused (ELOOP). An empty path is the root itself.
pub fn open_in_root(
    root: BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
    mode: u32,
) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    open_resolved(root, path, flags, mode, resolve)
}

/// Opens a path that must stay below `folder`: whatever would leave it is EXDEV, absolute paths too.
pub fn open_beneath(
    folder: BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
    mode: u32,
) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    open_resolved(folder, path, flags, mode, resolve)
}

/// Opens a path below `folder` that contains no symlink at all; a symlink anywhere is ELOOP.
pub fn open_without_symlinks(
    folder: BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
    mode: u32,
) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    open_resolved(folder, path, flags, mode, resolve)
}

/// What an inode is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A character device; 0/0 is an overlay's whiteout.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A named pipe.
    Fifo,
    /// A named socket.
    Socket,
}

impl FileKind {
    fn from_raw_mode(mode: u32) -> io::Result<Self> {
        match mode & libc::S_IFMT {
            libc::S_IFREG => Ok(Self::Regular),
            libc::S_IFDIR => Ok(Self::Directory),
            libc::S_IFLNK => Ok(Self::Symlink),
            libc::S_IFCHR => Ok(Self::CharDevice),
            libc::S_IFBLK => Ok(Self::BlockDevice),
            libc::S_IFIFO => Ok(Self::Fifo),
            libc::S_IFSOCK => Ok(Self::Socket),
            other => {
                let text = format!("inode of unknown type {other:o}");
                Err(io::Error::new(io::ErrorKind::InvalidData, text))
            }
        }
    }
}

/// A moment: whole seconds since 1970, rounded down, and the nanoseconds after them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time {
    /// Seconds; negative before 1970.
    pub secs: i64,
    /// 0..1_000_000_000, always forward from `secs`.
    pub nanos: u32,
}

/// A device number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Device {
    /// Which driver.
    pub major: u32,
    /// Which device of it.
    pub minor: u32,
}

/// All that `statx(2)` says about an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// What it is.
    pub kind: FileKind,
    /// Permission bits with set-user-id, set-group-id and sticky: 07777.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Names of it.
    pub links: u32,
    /// Its number on its file system.
    pub inode: u64,
    /// The file system's device number.
    pub device: Device,
    /// The device it stands for; 0/0 for what is no device.
    pub rdev: Device,
    /// Space it takes, in units of 512 bytes.
    pub blocks_512: u64,
    /// Last access.
    pub atime: Time,
    /// Last change of its bytes.
    pub mtime: Time,
    /// Last change of it.
    pub ctime: Time,
    /// The mount it was reached through.
    pub mount_id: u64,
}

impl Stat {
    fn from_raw(raw: &rustix::fs::Statx) -> io::Result<Self> {
        let time = |raw: rustix::fs::StatxTimestamp| Time { secs: raw.tv_sec, nanos: raw.tv_nsec };
        Ok(Self {
            kind: FileKind::from_raw_mode(u32::from(raw.stx_mode))?,
            mode: u32::from(raw.stx_mode) & 0o7777,
            uid: raw.stx_uid,
            gid: raw.stx_gid,
            size: raw.stx_size,
            links: raw.stx_nlink,
            inode: raw.stx_ino,
            device: Device { major: raw.stx_dev_major, minor: raw.stx_dev_minor },
            rdev: Device { major: raw.stx_rdev_major, minor: raw.stx_rdev_minor },
            blocks_512: raw.stx_blocks,
            atime: time(raw.stx_atime),
            mtime: time(raw.stx_mtime),
            ctime: time(raw.stx_ctime),
            mount_id: raw.stx_mnt_id,
        })
    }

    /// Whether it is an overlay's whiteout: a character device 0/0.
    pub fn is_whiteout(&self) -> bool {
        self.kind == FileKind::CharDevice && self.rdev == Device::default()
    }
}

/// Metadata of the inode that `name` in `folder` names; a symlink is not followed.
pub fn stat_at(folder: BorrowedFd<'_>, name: &[u8]) -> io::Result<Stat> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID;
    Stat::from_raw(&rustix::fs::statx(folder, name, flags, wanted)?)
}

/// Metadata of an open file, also of one opened with `O_PATH`.
pub fn stat_fd(fd: BorrowedFd<'_>) -> io::Result<Stat> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID;
    Stat::from_raw(&rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, wanted)?)
}

/// Metadata of the inode that a path names; a trailing symlink is not followed.
pub fn stat(path: &Path) -> io::Result<Stat> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID;
    Stat::from_raw(&rustix::fs::statx(CWD, path, flags, wanted)?)
}

fn mtime_only(mtime: Time) -> rustix::fs::Timestamps {
    let omit = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT as _ };
    let set = rustix::fs::Timespec { tv_sec: mtime.secs, tv_nsec: mtime.nanos.into() };
    rustix::fs::Timestamps { last_access: omit, last_modification: set }
}

/// Sets the time of last change of `name` in `folder`, of a symlink itself too.
pub fn set_mtime_at(folder: BorrowedFd<'_>, name: &[u8], mtime: Time) -> io::Result<()> {
    let flags = AtFlags::SYMLINK_NOFOLLOW;
    Ok(rustix::fs::utimensat(folder, name, &mtime_only(mtime), flags)?)
}

/// Sets the time of last change of an open file.
pub fn set_mtime_fd(fd: BorrowedFd<'_>, mtime: Time) -> io::Result<()> {
    Ok(rustix::fs::futimens(fd, &mtime_only(mtime))?)
}

/// Sets owner and group of `name` in `folder`, of a symlink itself too. Clears set-user-id bits, so the
/// mode is set afterwards.
pub fn set_owner_at(folder: BorrowedFd<'_>, name: &[u8], uid: u32, gid: u32) -> io::Result<()> {
    let (uid, gid) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
    let flags = AtFlags::SYMLINK_NOFOLLOW;
    Ok(rustix::fs::chownat(folder, name, Some(uid), Some(gid), flags)?)
}

/// Sets the permission bits (07777) of `name` in `folder`. A symlink is not followed; its own mode
/// cannot be set (EOPNOTSUPP).
pub fn set_mode_at(folder: BorrowedFd<'_>, name: &[u8], mode: u32) -> io::Result<()> {
    let c_name = crate::c_name(name)?;
    // SAFETY: `c_name` is a C string that outlives the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_fchmodat2,
            folder.as_raw_fd(),
            c_name.as_ptr(),
            mode & 0o7777,
            libc::AT_SYMLINK_NOFOLLOW,
        )
    };
    if result == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() != Some(libc::ENOSYS) {
        return Err(error);
    }
    // Before Linux 6.6: through the descriptor's name in /proc, which leads to the inode itself.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(folder, name, flags, Mode::empty())?;
    if stat_fd(fd.as_fd())?.kind == FileKind::Symlink {
        return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    }
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    Ok(rustix::fs::chmod(path, Mode::from_raw_mode(mode & 0o7777))?)
}

/// Makes a device, pipe, socket or empty regular file. The process's umask applies to `mode`.
pub fn make_node_at(
    folder: BorrowedFd<'_>,
    name: &[u8],
    kind: FileKind,
    mode: u32,
    rdev: Device,
) -> io::Result<()> {
    use rustix::fs::FileType;
    let file_type = match kind {
        FileKind::Regular => FileType::RegularFile,
        FileKind::CharDevice => FileType::CharacterDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
        FileKind::Fifo => FileType::Fifo,
        FileKind::Socket => FileType::Socket,
        FileKind::Directory | FileKind::Symlink => {
            let text = "mknod makes neither directories nor symlinks";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
    };
    let device = rustix::fs::makedev(rdev.major, rdev.minor);
    let mode = Mode::from_raw_mode(mode & 0o7777);
    Ok(rustix::fs::mknodat(folder, name, file_type, mode, device)?)
}

/// Makes a directory. The process's umask applies to `mode`.
pub fn make_folder_at(folder: BorrowedFd<'_>, name: &[u8], mode: u32) -> io::Result<()> {
    Ok(rustix::fs::mkdirat(folder, name, Mode::from_raw_mode(mode & 0o7777))?)
}

/// Makes a symlink with this target.
pub fn make_symlink_at(folder: BorrowedFd<'_>, name: &[u8], target: &[u8]) -> io::Result<()> {
    Ok(rustix::fs::symlinkat(target, folder, name)?)
}

/// Gives an inode a second name. A symlink is linked itself.
pub fn make_link_at(
    old_folder: BorrowedFd<'_>,
    old_name: &[u8],
    folder: BorrowedFd<'_>,
    name: &[u8],
) -> io::Result<()> {
    Ok(rustix::fs::linkat(old_folder, old_name, folder, name, AtFlags::empty())?)
}

/// The target of a symlink.
pub fn read_link_at(folder: BorrowedFd<'_>, name: &[u8]) -> io::Result<Vec<u8>> {
    Ok(rustix::fs::readlinkat(folder, name, Vec::new())?.into_bytes())
}

/// How a whole file is locked (`flock`). The lock belongs to the open file and ends with its last
/// descriptor, so it survives in children that inherit it and never outlives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lock {
    /// Any number of holders.
    Shared,
    /// One holder.
    Exclusive,
}

/// Takes the lock, waiting for it.
pub fn lock(fd: BorrowedFd<'_>, how: Lock) -> io::Result<()> {
    let operation = match how {
        Lock::Shared => FlockOperation::LockShared,
        Lock::Exclusive => FlockOperation::LockExclusive,
    };
    Ok(rustix::io::retry_on_intr(|| rustix::fs::flock(fd, operation))?)
}

/// Takes the lock if it is free; false when somebody else has it.
pub fn try_lock(fd: BorrowedFd<'_>, how: Lock) -> io::Result<bool> {
    let operation = match how {
        Lock::Shared => FlockOperation::NonBlockingLockShared,
        Lock::Exclusive => FlockOperation::NonBlockingLockExclusive,
    };
    match rustix::io::retry_on_intr(|| rustix::fs::flock(fd, operation)) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Gives the lock back before the descriptor is closed.
pub fn unlock(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::fs::flock(fd, FlockOperation::Unlock)?)
}

#[cfg(test)]
mod tests;
