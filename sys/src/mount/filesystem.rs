//! Builders of file systems: each makes one detached mount.

use super::{Attributes, MountFd};
use crate::Explained;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// A file system that is being configured (`fsopen`).
pub(super) struct Context {
    fd: OwnedFd,
    kind: &'static str,
}

impl Context {
    pub(super) fn open(kind: &'static str) -> io::Result<Self> {
        rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)
            .map(|fd| Self { fd, kind })
            .map_err(|error| Explained::wrap(&error.into(), format!("open file system {kind}")))
    }

    /// Adds the kernel's messages to an error. Reading takes them off the log, one a read.
    fn explain(&self, error: rustix::io::Errno, doing: &str) -> io::Error {
        const MAX_MESSAGES: usize = 8;
        let mut text = format!("{} file system: {doing}", self.kind);
        let mut buffer = [0; 1024];
        for _ in 0..MAX_MESSAGES {
            let Ok(length) = rustix::io::read(&self.fd, &mut buffer) else { break };
            let message = String::from_utf8_lossy(&buffer[..length]);
            // A level letter and a space come first.
            let message = message.get(2..).unwrap_or(&message).trim();
            if !message.is_empty() {
                text.push_str(" (");
                text.push_str(message);
                text.push(')');
            }
        }
        Explained::wrap(&error.into(), text)
    }

    pub(super) fn flag(&self, key: &str) -> io::Result<()> {
        rustix::mount::fsconfig_set_flag(&self.fd, key).map_err(|e| self.explain(e, key))
    }

    pub(super) fn string(&self, key: &str, value: &str) -> io::Result<()> {
        rustix::mount::fsconfig_set_string(&self.fd, key, value)
            .map_err(|e| self.explain(e, &format!("{key}={value}")))
    }

    /// A path as a string option: the kernel resolves it in the caller's root and namespace.
    pub(super) fn path(&self, key: &str, value: &Path) -> io::Result<()> {
        rustix::mount::fsconfig_set_string(&self.fd, key, value)
            .map_err(|e| self.explain(e, &format!("{key}={}", value.display())))
    }

    /// A place given by descriptor; by its /proc name where the kernel takes no descriptor for the key.
    fn place(&self, key: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
        match rustix::mount::fsconfig_set_fd(&self.fd, key, fd) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => {
                let name = format!("/proc/self/fd/{}", fd.as_raw_fd());
                self.path(key, Path::new(&name))
            }
            Err(error) => Err(self.explain(error, key)),
        }
    }

    pub(super) fn mount(&self, attributes: Attributes) -> io::Result<MountFd> {
        rustix::mount::fsconfig_create(&self.fd).map_err(|e| self.explain(e, "create"))?;
        let bits = u32::try_from(attributes.bits()).unwrap_or(0);
        rustix::mount::fsmount(
            &self.fd,
            FsMountFlags::FSMOUNT_CLOEXEC,
            MountAttrFlags::from_bits_retain(bits),
        )
        .map(MountFd::from_fd)
        .map_err(|e| self.explain(e, "mount"))
    }
}

/// An EROFS image in a plain file, with its data in a second plain file.
///
/// ENOTBLK means a kernel without file-backed EROFS (before 6.12) or a backing file system that cannot
/// carry it.
#[derive(Debug, Clone, Copy)]
pub struct Erofs<'a> {
    /// The image, or its metadata when there is a device.
    pub metadata: &'a Path,
    /// The file that holds the data blocks.
    pub device: Option<&'a Path>,
}

impl Erofs<'_> {
    /// Makes the mount, always read-only.
    pub fn mount_detached(&self, attributes: Attributes) -> io::Result<MountFd> {
        let context = Context::open("erofs")?;
        context.path("source", self.metadata)?;
        if let Some(device) = self.device {
            context.path("device", device)?;
        }
        context.flag("ro")?;
        context.mount(Attributes { read_only: true, ..attributes })
    }
}

/// An EROFS image that the kernel reads through cachefiles in on-demand mode.
///
/// EINVAL means a kernel without `EROFS_FS_ONDEMAND` or a cache that is not bound; EEXIST that an image
/// of this name is mounted in the domain.
#[derive(Debug, Clone, Copy)]
pub struct ErofsOnDemand<'a> {
    /// The cookie of the image, or of its metadata.
    pub name: &'a str,
    /// What shares cache files; at most one image of a name in it.
    pub domain: &'a str,
    /// The cookie of the data blocks.
    pub device: &'a str,
}

impl ErofsOnDemand<'_> {
    /// Makes the mount, always read-only.
    pub fn mount_detached(&self, attributes: Attributes) -> io::Result<MountFd> {
        let context = Context::open("erofs")?;
        context.string("fsid", self.name)?;
        context.string("domain_id", self.domain)?;
        context.string("device", self.device)?;
        context.flag("ro")?;
        context.mount(Attributes { read_only: true, ..attributes })
    }
}

/// One lower layer of an overlay.
#[derive(Debug, Clone, Copy)]
pub enum OverlayLower<'a> {
    /// A descriptor: of a detached mount, or of a folder.
    Fd(BorrowedFd<'a>),
    /// A path.
    Path(&'a Path),
}

/// Where an overlay writes. Both folders lie on one file system, which must be able to carry trusted
/// xattrs, `O_TMPFILE` and whiteouts (ext4, XFS, btrfs, tmpfs).
#[derive(Debug, Clone, Copy)]
pub struct OverlayUpper<'a> {
    /// What was written.
    pub upper: BorrowedFd<'a>,
    /// Scratch folder of overlayfs: empty, and of no other mount.
    pub work: BorrowedFd<'a>,
}

/// An overlay with redirect_dir=on, metacopy=off, index=off, xino=on.
///
/// Renamed directories are recorded by `trusted.overlay.redirect`; every copied-up file is whole; hard
/// links break on copy-up; inode numbers are stable. The mount is made with the caller's rights, in the
/// initial user namespace.
#[derive(Debug, Clone, Copy)]
pub struct Overlay<'a> {
    /// What the mount table shows as the source.
    pub name: &'a str,
    /// Lower layers, the topmost first. At least one, two without an upper.
    pub lowers: &'a [OverlayLower<'a>],
    /// Where writes go; none makes a read-only overlay.
    pub upper: Option<OverlayUpper<'a>>,
    /// Skip every sync of the upper: a crash of the machine may lose or tear it.
    pub volatile: bool,
}

impl Overlay<'_> {
    /// Makes the mount.
    pub fn mount_detached(&self, attributes: Attributes) -> io::Result<MountFd> {
        let context = Context::open("overlay")?;
        context.string("source", self.name)?;
        for lower in self.lowers {
            match lower {
                OverlayLower::Fd(fd) => context.place("lowerdir+", *fd)?,
                OverlayLower::Path(path) => context.path("lowerdir+", path)?,
            }
        }
        if let Some(upper) = &self.upper {
            context.place("upperdir", upper.upper)?;
            context.place("workdir", upper.work)?;
            if self.volatile {
                context.flag("volatile")?;
            }
        }
        for (key, value) in
            [("redirect_dir", "on"), ("metacopy", "off"), ("index", "off"), ("xino", "on")]
        {
            context.string(key, value)?;
        }
        context.mount(attributes)
    }
}

/// A file system in memory.
#[derive(Debug, Clone, Copy)]
pub struct Tmpfs<'a> {
    /// What the mount table shows as the source.
    pub name: &'a str,
    /// Mode of its root, 07777.
    pub mode: u32,
    /// Most bytes it may hold; none is half of the memory.
    pub size_bytes: Option<u64>,
    /// Most inodes it may hold; none is the kernel's default.
    pub inodes: Option<u64>,
}

impl Tmpfs<'_> {
    /// Makes the mount.
    pub fn mount_detached(&self, attributes: Attributes) -> io::Result<MountFd> {
        let context = Context::open("tmpfs")?;
        context.string("source", self.name)?;
        context.string("mode", &format!("{:o}", self.mode & 0o7777))?;
        if let Some(size) = self.size_bytes {
            context.string("size", &size.to_string())?;
        }
        if let Some(inodes) = self.inodes {
            context.string("nr_inodes", &inodes.to_string())?;
        }
        context.mount(attributes)
    }
}

/// What users see of processes of others in a [`Proc`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ProcVisibility {
    /// Everything.
    #[default]
    All,
    /// Only what they may trace.
    OnlyTraceable,
}

/// A proc of the caller's pid namespace.
#[derive(Debug, Clone, Copy, Default)]
pub struct Proc {
    /// Who sees whose processes.
    pub visibility: ProcVisibility,
    /// Only the folders of processes, nothing about the system.
    pub only_processes: bool,
}

impl Proc {
    /// Makes the mount.
    pub fn mount_detached(&self, attributes: Attributes) -> io::Result<MountFd> {
        let context = Context::open("proc")?;
        context.string("source", "proc")?;
        if self.visibility == ProcVisibility::OnlyTraceable {
            context.string("hidepid", "ptraceable")?;
        }
        if self.only_processes {
            context.string("subset", "pid")?;
        }
        context.mount(attributes)
    }
}

/// A private set of pseudo terminals.
#[derive(Debug, Clone, Copy)]
pub struct DevPts {
    /// Group of new terminals; none is the creator's.
    pub gid: Option<u32>,
    /// Mode of new terminals.
    pub mode: u32,
}

impl DevPts {
    /// Makes the mount. Its `ptmx` may be opened by everybody.
    pub fn mount_detached(&self, attributes: Attributes) -> io::Result<MountFd> {
        let context = Context::open("devpts")?;
        context.string("source", "devpts")?;
        context.flag("newinstance")?;
        context.string("ptmxmode", "666")?;
        context.string("mode", &format!("{:o}", self.mode & 0o777))?;
        if let Some(gid) = self.gid {
            context.string("gid", &gid.to_string())?;
        }
        // Terminals are devices, so nodev would make them useless.
        context.mount(Attributes { nodev: false, ..attributes })
    }
}

/// POSIX message queues of the caller's IPC namespace.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mqueue;

impl Mqueue {
    /// Makes the mount.
    pub fn mount_detached(&self, attributes: Attributes) -> io::Result<MountFd> {
        let context = Context::open("mqueue")?;
        context.string("source", "mqueue")?;
        context.mount(attributes)
    }
}

/// A sysfs that shows the network devices of the caller's network namespace.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sysfs;

impl Sysfs {
    /// Makes the mount.
    pub fn mount_detached(&self, attributes: Attributes) -> io::Result<MountFd> {
        let context = Context::open("sysfs")?;
        context.string("source", "sysfs")?;
        context.mount(attributes)
    }
}

impl MountFd {
    /// Opens a path inside this mount, attached or not, without following a symlink out of it.
    pub fn open_inside(&self, path: &Path) -> io::Result<OwnedFd> {
        use rustix::fs::{Mode, OFlags, ResolveFlags};
        let path: PathBuf = if path.as_os_str().is_empty() { ".".into() } else { path.into() };
        Ok(rustix::fs::openat2(
            self.as_fd(),
            path,
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::IN_ROOT,
        )?)
    }
}
