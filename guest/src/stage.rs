//! The zygote's own mount namespace: a few entries, so that every sandbox copies a small table, and the
//! trees that all sandboxes share read-only copies of.
//!
//! ```text
//! /            tmpfs, read-write, nothing else in it
//! /root        where a sandbox's root is attached before it becomes the root
//! /dev         tmpfs, read-only: the harmless devices, links, mount points
//! /sys         tmpfs, read-only: the few parts of sysfs that programs need
//! /masks       tmpfs, read-only and empty: covers what a sandbox must not see
//! /hidden      tmpfs, read-only: a folder and a file that nobody may open, over protected paths
//! ```

use crate::users::Users;
use crate::wire::{Failure, Step};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, symlink};
use std::path::Path;
use sys::file::{Device, FileKind, make_node_at};
use sys::mount::{
    self, AttributeChange, Attributes, MountFd, Propagation, Recursive, Sysfs, Tmpfs,
};

/// Where the root of a sandbox is attached first.
pub const ROOT: &str = "/root";

/// Where the small files of a sandbox are made before they are bound.
pub const FILES: &str = "/files";

/// Devices that hold no state of the host: name, minor number of major 1.
const MEMORY_DEVICES: [(&str, u32); 5] =
    [("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)];

/// Links that programs expect in /dev.
const LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// What sandboxes see of sysfs: how many processors and memory nodes there are.
const SYSFS_PARTS: [&str; 3] =
    ["devices/system/cpu", "devices/system/node", "kernel/mm/transparent_hugepage"];

/// Moves the calling process into its own mount namespace and builds the trees.
pub fn build() -> Result<(), Failure> {
    own_namespace().step(|| "make the zygote's mount namespace".into())?;
    devices().step(|| "make /dev".into())?;
    system().step(|| "make /sys".into())?;
    let masks = small_tmpfs(0o555).and_then(|empty| {
        attach_new(&empty, "/masks")?;
        read_only(&empty)
    });
    masks.step(|| "make /masks".into())?;
    hidden().step(|| "make /hidden".into())
}

// The copies are made by path: a child lives in a copy of the namespace, so a descriptor of the
// zygote's own mounts would be foreign to it.

/// A copy for a sandbox's /dev, with empty folders for pts, shm and mqueue.
pub fn dev(users: Option<&Users>) -> io::Result<MountFd> {
    let copy = mount::clone_tree(Path::new("/dev"), Recursive::No)?;
    users.map_or(Ok(()), |users| users.shift(&copy))?;
    Ok(copy)
}

/// A copy for a sandbox's /sys.
pub fn sys() -> io::Result<MountFd> {
    mount::clone_tree(Path::new("/sys"), Recursive::Yes)
}

/// Something that covers a folder.
pub fn empty() -> io::Result<MountFd> {
    mount::clone_tree(Path::new("/masks"), Recursive::No)
}

/// Something that covers a file.
pub fn null() -> io::Result<MountFd> {
    mount::clone_tree(Path::new("/dev/null"), Recursive::No)
}

/// Something that covers a folder, and that nobody may open.
pub fn hidden_folder() -> io::Result<MountFd> {
    mount::clone_tree(Path::new("/hidden/folder"), Recursive::No)
}

/// Something that covers a file, and that nobody may open.
pub fn hidden_file() -> io::Result<MountFd> {
    mount::clone_tree(Path::new("/hidden/file"), Recursive::No)
}

fn small_tmpfs(mode: u32) -> io::Result<MountFd> {
    let tmpfs = Tmpfs { name: "lamella", mode, size_bytes: Some(1 << 20), inodes: Some(128) };
    tmpfs.mount_detached(Attributes { nosuid: true, ..Attributes::default() })
}

fn read_only(mount: &MountFd) -> io::Result<()> {
    let set = Attributes { read_only: true, nosuid: true, noexec: true, ..Attributes::default() };
    mount.set_attributes(&AttributeChange { set, ..AttributeChange::default() })
}

fn attach_new(mount: &MountFd, path: &str) -> io::Result<()> {
    make_folder(path)?;
    mount.attach(Path::new(path))
}

fn make_folder(path: impl AsRef<Path>) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o755).create(path)
}

fn own_namespace() -> io::Result<()> {
    sys::process::unshare(sys::process::Namespaces::MOUNT)?;
    let private = AttributeChange {
        propagation: Some(Propagation::Private),
        recursive: Recursive::Yes,
        ..AttributeChange::default()
    };
    mount::set_attributes_of(Path::new("/"), &private)?;
    let root = small_tmpfs(0o700)?;
    // Any folder does: the whole old tree goes with it.
    root.attach(Path::new("/proc"))?;
    mount::pivot_root(root.as_fd())?;
    make_folder(ROOT)?;
    make_folder(FILES)
}

fn hidden() -> io::Result<()> {
    let hidden = small_tmpfs(0o700)?;
    attach_new(&hidden, "/hidden")?;
    std::fs::DirBuilder::new().mode(0o000).create("/hidden/folder")?;
    std::fs::OpenOptions::new().write(true).create_new(true).mode(0o000).open("/hidden/file")?;
    read_only(&hidden)
}

fn devices() -> io::Result<()> {
    let dev = small_tmpfs(0o755)?;
    attach_new(&dev, "/dev")?;
    let folder = std::fs::File::open("/dev")?;
    let node = |name: &str, major, minor| {
        let device = Device { major, minor };
        make_node_at(folder.as_fd(), name.as_bytes(), FileKind::CharDevice, 0o666, device)
    };
    for (name, minor) in MEMORY_DEVICES {
        node(name, 1, minor)?;
    }
    node("tty", 5, 0)?;
    for (name, target) in LINKS {
        symlink(target, Path::new("/dev").join(name))?;
    }
    for folder in ["pts", "shm", "mqueue"] {
        make_folder(Path::new("/dev").join(folder))?;
    }
    read_only(&dev)
}

fn system() -> io::Result<()> {
    let whole = Sysfs.mount_detached(Attributes { read_only: true, ..Attributes::KERNEL })?;
    attach_new(&whole, "/sysfs")?;
    let sys = small_tmpfs(0o755)?;
    attach_new(&sys, "/sys")?;
    make_folder("/sys/fs/cgroup")?;
    for part in SYSFS_PARTS {
        let source = Path::new("/sysfs").join(part);
        if source.exists() {
            let target = Path::new("/sys").join(part);
            make_folder(&target)?;
            let attributes = Attributes { read_only: true, ..Attributes::KERNEL };
            mount::bind(&source, &target, attributes, Recursive::No)?;
        }
    }
    mount::unmount(Path::new("/sysfs"), mount::Unmount::Lazy)?;
    read_only(&sys)
}
