//! Mounts, made with the mount API of Linux 5.2 and later: every mount is built detached, as a
//! descriptor, and only then attached to a path.
//!
//! For: EROFS layers, overlays over descriptors, the small file systems of a sandbox, clones of trees,
//! attributes and id maps of mounts, and reading the mount table. Not for: mount(8), loop devices,
//! /etc/fstab.
//!
//! Errors carry what the kernel wrote into the file system context's message log; [`crate::errno_of`]
//! still finds the errno.
//!
//! What survives a crash: a detached mount goes away with its last descriptor; an attached one stays
//! until it is unmounted. Close the [`MountFd`] before unmounting, or the kernel answers EBUSY.

mod ext4;
mod filesystem;
mod fuse;
mod idmap;
mod table;

pub use ext4::Ext4;
pub use filesystem::{
    DevPts, Erofs, ErofsOnDemand, Mqueue, Overlay, OverlayLower, OverlayUpper, Proc,
    ProcVisibility, Sysfs, Tmpfs,
};
pub use fuse::Fuse;
pub use idmap::{IdMap, IdRange};
pub use table::{MountEntry, parse_mounts, read_mounts, read_mounts_of};

use crate::Explained;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// What holds for a mount as a whole. All false is the kernel's default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Attributes {
    /// Nothing can be written through this mount.
    pub read_only: bool,
    /// Set-user-id and file capabilities are ignored.
    pub nosuid: bool,
    /// Device nodes cannot be opened.
    pub nodev: bool,
    /// Programs cannot be executed.
    pub noexec: bool,
    /// Symlinks are not followed.
    pub nosymfollow: bool,
}

impl Attributes {
    /// What a lower layer gets: read-only and without devices, but set-user-id programs stay what
    /// they are for the sandbox. Whiteouts (devices 0/0) keep working for overlayfs.
    pub const LAYER: Self =
        Self { read_only: true, nosuid: false, nodev: true, noexec: false, nosymfollow: false };

    /// What the small kernel file systems of a sandbox get.
    pub const KERNEL: Self =
        Self { read_only: false, nosuid: true, nodev: true, noexec: true, nosymfollow: false };

    fn bits(self) -> u64 {
        // linux/mount.h MOUNT_ATTR_*
        let mut bits = 0;
        for (is_set, bit) in [
            (self.read_only, 0x0000_0001),
            (self.nosuid, 0x0000_0002),
            (self.nodev, 0x0000_0004),
            (self.noexec, 0x0000_0008),
            (self.nosymfollow, 0x0020_0000),
        ] {
            if is_set {
                bits |= bit;
            }
        }
        bits
    }
}

/// How mount events travel between copies of a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Propagation {
    /// Neither sends nor receives.
    Private,
    /// Receives from its master only.
    Slave,
    /// Sends and receives.
    Shared,
    /// Private, and cannot be bound anywhere else.
    Unbindable,
}

impl Propagation {
    fn bits(self) -> u64 {
        match self {
            Self::Private => libc::MS_PRIVATE,
            Self::Slave => libc::MS_SLAVE,
            Self::Shared => libc::MS_SHARED,
            Self::Unbindable => libc::MS_UNBINDABLE,
        }
    }
}

/// A mount as a descriptor: detached until [`attach`]ed, and gone with its last descriptor if never.
#[derive(Debug)]
pub struct MountFd {
    fd: OwnedFd,
}

impl MountFd {
    /// Takes over a descriptor from `fsmount`, `open_tree` or another process.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Gives up the descriptor.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Attaches it to an existing path; a trailing symlink is followed.
    pub fn attach(&self, path: &Path) -> io::Result<()> {
        attach(self, path)
    }

    /// Changes attributes of this mount.
    pub fn set_attributes(&self, change: &AttributeChange<'_>) -> io::Result<()> {
        set_attributes(self.fd.as_fd(), Path::new(""), change)
    }

    /// A detached clone of this mount, which shares its file system but has its own attributes.
    pub fn try_clone_tree(&self, recursive: Recursive) -> io::Result<Self> {
        clone_tree_at(self.fd.as_fd(), Path::new(""), recursive)
    }
}

impl AsFd for MountFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Whether an operation takes the mounts below along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recursive {
    /// This mount only.
    No,
    /// And all mounts below it.
    Yes,
}

/// A change of the attributes of one mount or of a tree of mounts.
#[derive(Debug, Clone, Copy)]
pub struct AttributeChange<'fd> {
    /// Attributes that get set.
    pub set: Attributes,
    /// Attributes that get cleared.
    pub clear: Attributes,
    /// A new propagation, or the old one.
    pub propagation: Option<Propagation>,
    /// Shift owners through the map of this user namespace. Only for detached mounts, once.
    pub idmap: Option<BorrowedFd<'fd>>,
    /// Whether the mounts below change too.
    pub recursive: Recursive,
}

impl Default for AttributeChange<'_> {
    fn default() -> Self {
        Self {
            set: Attributes::default(),
            clear: Attributes::default(),
            propagation: None,
            idmap: None,
            recursive: Recursive::No,
        }
    }
}

/// The kernel's `struct mount_attr`, first version.
#[repr(C)]
struct RawAttributes {
    set: u64,
    clear: u64,
    propagation: u64,
    userns_fd: u64,
}

/// Changes attributes of the mount at `path` below `folder` (an empty path: of `folder` itself).
pub fn set_attributes(
    folder: BorrowedFd<'_>,
    path: &Path,
    change: &AttributeChange<'_>,
) -> io::Result<()> {
    const ATTR_IDMAP: u64 = 0x0010_0000;
    let raw = RawAttributes {
        set: change.set.bits() | change.idmap.map_or(0, |_| ATTR_IDMAP),
        clear: change.clear.bits(),
        propagation: change.propagation.map_or(0, Propagation::bits),
        userns_fd: change.idmap.map_or(0, |fd| fd.as_raw_fd() as u64),
    };
    let mut flags = libc::AT_SYMLINK_NOFOLLOW as u32;
    if path.as_os_str().is_empty() {
        flags |= libc::AT_EMPTY_PATH as u32;
    }
    if change.recursive == Recursive::Yes {
        flags |= libc::AT_RECURSIVE as u32;
    }
    let name = crate::c_path(path)?;
    // SAFETY: `name` is a C string and `raw` has the size that is passed; both outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            folder.as_raw_fd(),
            name.as_ptr(),
            flags,
            &raw const raw,
            size_of::<RawAttributes>(),
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Changes attributes of the mount at `path`, for instance its propagation.
pub fn set_attributes_of(path: &Path, change: &AttributeChange<'_>) -> io::Result<()> {
    set_attributes(rustix::fs::CWD, path, change)
}

/// Attaches a detached mount to an existing path. Both a folder and a file can be a mount point, for a
/// mount whose root is of the same kind.
pub fn attach(mount: &MountFd, path: &Path) -> io::Result<()> {
    attach_at(mount, rustix::fs::CWD, path)
}

/// Attaches a detached mount to a path below `folder` (an empty path: on `folder` itself).
pub fn attach_at(mount: &MountFd, folder: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let mut flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    if path.as_os_str().is_empty() {
        flags |= MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    } else {
        flags |= MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
    }
    rustix::mount::move_mount(&mount.fd, "", folder, path, flags)
        .map_err(|error| Explained::wrap(&error.into(), format!("attach a mount to {path:?}")))
}

/// A detached clone of the mount that `path` lies on, with `path` as its root (a bind mount that is
/// not attached yet).
pub fn clone_tree(path: &Path, recursive: Recursive) -> io::Result<MountFd> {
    clone_tree_at(rustix::fs::CWD, path, recursive)
}

/// [`clone_tree`] for a path below `folder` (an empty path: `folder` itself).
pub fn clone_tree_at(
    folder: BorrowedFd<'_>,
    path: &Path,
    recursive: Recursive,
) -> io::Result<MountFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if path.as_os_str().is_empty() {
        flags |= OpenTreeFlags::AT_EMPTY_PATH;
    }
    if recursive == Recursive::Yes {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    rustix::mount::open_tree(folder, path, flags)
        .map(MountFd::from_fd)
        .map_err(|error| Explained::wrap(&error.into(), format!("clone the mount at {path:?}")))
}

/// A descriptor of the place `path` on its own mount, not a clone: for `lowerdir+` and the like.
pub fn open_place(path: &Path) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// Binds `source` to `target` with these attributes.
pub fn bind(
    source: &Path,
    target: &Path,
    attributes: Attributes,
    recursive: Recursive,
) -> io::Result<()> {
    let mount = clone_tree(source, recursive)?;
    let change = AttributeChange { set: attributes, recursive, ..AttributeChange::default() };
    mount.set_attributes(&change)?;
    attach(&mount, target)
}

/// How to unmount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmount {
    /// EBUSY while anybody uses it.
    Now,
    /// Out of sight at once, gone when the last user goes.
    Lazy,
}

/// Unmounts what is at `path`; a trailing symlink is not followed. EINVAL when nothing is mounted there.
pub fn unmount(path: &Path, how: Unmount) -> io::Result<()> {
    let flags = match how {
        Unmount::Now => UnmountFlags::NOFOLLOW,
        Unmount::Lazy => UnmountFlags::NOFOLLOW | UnmountFlags::DETACH,
    };
    Ok(rustix::mount::unmount(path, flags)?)
}

/// Makes `new_root` the root of this mount namespace and lazily unmounts the old one. The working
/// directory becomes the new root.
pub fn pivot_root(new_root: BorrowedFd<'_>) -> io::Result<()> {
    rustix::process::fchdir(new_root)?;
    // The old root is stacked on the new one under the same name, so no folder is needed for it.
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    Ok(rustix::process::chdir("/")?)
}

#[cfg(test)]
mod tests;
