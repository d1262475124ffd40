//! Protected paths: mounts over what a sandbox must not change or read.
//!
//! Root of the sandbox has no right over mounts, so what they cover stays covered. The kernel moves or removes
//! nothing that is a mount point; so that no folder above is moved away and replaced by another, each of
//! them is made a mount point too. Paths with symlinks are refused, since a symlink can be replaced.

use crate::stage;
use crate::wire::{Failure, Step};
use proto::launch::Protected;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use sys::file::{FileKind, OFlags};
use sys::mount::{self, AttributeChange, Attributes, MountFd, Recursive};

/// Covers all of `paths`, which are absolute. Before anything of the sandbox runs.
pub fn cover(root: &MountFd, paths: &[Protected]) -> Result<(), Failure> {
    let mut mounted = BTreeSet::new();
    for protected in paths {
        let path = Path::new(OsStr::from_bytes(&protected.path));
        let inner = path.strip_prefix("/").unwrap_or(path);
        pin_parents(root, inner, &mut mounted)
            .and_then(|()| cover_one(root, inner, protected.hidden))
            .step(|| format!("protect {}", path.display()))?;
        mounted.insert(inner.to_owned());
    }
    Ok(())
}

fn pin_parents(root: &MountFd, path: &Path, mounted: &mut BTreeSet<PathBuf>) -> io::Result<()> {
    let mut parents: Vec<&Path> = path.ancestors().skip(1).collect();
    // The root itself cannot be moved.
    parents.pop();
    for parent in parents.into_iter().rev() {
        if mounted.insert(parent.to_owned()) {
            let place = open(root, parent)?;
            let same = mount::clone_tree_at(place.as_fd(), Path::new(""), Recursive::Yes)?;
            mount::attach_at(&same, place.as_fd(), Path::new(""))?;
        }
    }
    Ok(())
}

fn cover_one(root: &MountFd, path: &Path, hidden: bool) -> io::Result<()> {
    let place = open(root, path)?;
    let stat = sys::file::stat_fd(place.as_fd())?;
    let is_folder = stat.kind == FileKind::Directory;
    let cover = match (hidden, is_folder) {
        (true, true) => stage::hidden_folder()?,
        (true, false) if stat.links > 1 => {
            // They would show it.
            return Err(io::Error::other("the file has other names, by hard links"));
        }
        (true, false) => stage::hidden_file()?,
        (false, _) => {
            let same = mount::clone_tree_at(place.as_fd(), Path::new(""), Recursive::Yes)?;
            let set = Attributes { read_only: true, nodev: true, ..Attributes::default() };
            let recursive = Recursive::Yes;
            same.set_attributes(&AttributeChange { set, recursive, ..AttributeChange::default() })?;
            same
        }
    };
    mount::attach_at(&cover, place.as_fd(), Path::new(""))
}

fn open(root: &MountFd, path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    sys::file::open_without_symlinks(root.as_fd(), path, flags, 0)
}
