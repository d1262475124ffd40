//! The root of a sandbox: an overlay of its layers under its own writable folder, made detached.
//!
//! Under all layers lies a skeleton of empty places (/proc, /dev, /etc/hosts, ...) so that an image
//! without them can be started and nothing has to be written into the sandbox's own layer.

use crate::pool::{Slot, Users};
use layer::{Context, Error, ErrorKind, Result};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use sys::file::OFlags;
use sys::mount::{
    self, AttributeChange, Attributes, MountFd, Overlay, OverlayLower, OverlayUpper, Recursive,
};

/// Folders of the skeleton and their modes.
const FOLDERS: [(&str, u32); 5] =
    [("dev", 0o755), ("etc", 0o755), ("proc", 0o555), ("sys", 0o555), ("tmp", 0o1777)];
/// Files of the skeleton: empty, covered by mounts.
const FILES: [&str; 3] = ["etc/hostname", "etc/hosts", "etc/resolv.conf"];

/// Makes the skeleton, or completes it.
pub fn make_skeleton(folder: &Path) -> Result<()> {
    for (name, mode) in FOLDERS {
        let path = folder.join(name);
        std::fs::create_dir_all(&path)
            .and_then(|()| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)))
            .context(|| format!("make {}", path.display()))?;
    }
    for name in FILES {
        let path = folder.join(name);
        if !path.exists() {
            std::fs::write(&path, b"").context(|| format!("make {}", path.display()))?;
        }
    }
    Ok(())
}

/// Mounts the overlay. `layers`: mount points, bottom first. Blocking; reads metadata only.
///
/// With users of its own, the sandbox gets every layer and its writable folder by mounts that show their
/// files as those of its users; what lies on disk keeps the numbers that it has inside. Ids beyond them
/// appear as nobody's, and their files cannot be changed. Unsupported, before anything is changed: a file
/// system cannot shift owners.
///
/// `seed`: what the writable folder begins with.
pub fn overlay(
    skeleton: &Path,
    layers: &[PathBuf],
    slot: &Slot,
    users: Option<&Users>,
    seed: Option<&Path>,
) -> Result<MountFd> {
    let top = layers.last().ok_or_else(|| Error::invalid("an environment without layers"))?;
    let shown = |path: &Path| show(path, users);
    let lowers = layers.iter().rev().map(PathBuf::as_path).chain([skeleton]);
    let lowers = lowers.map(shown).collect::<Result<Vec<MountFd>>>()?;
    let lowers: Vec<_> = lowers.iter().map(|lower| OverlayLower::Fd(lower.as_fd())).collect();
    match seed {
        Some(seed) => crate::fork::copy_tree(seed, &slot.upper)?,
        None => own_like(&slot.upper, top)?,
    }
    // One mount for both, which overlayfs asks for.
    let writable = shown(&slot.folder)?;
    let place = |name: &str| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        sys::file::open_beneath(writable.as_fd(), Path::new(name), flags, 0)
            .context(|| format!("open {name} of slot {}", slot.number))
    };
    let (upper, work) = (place(Slot::UPPER)?, place(Slot::WORK)?);
    let overlay = Overlay {
        name: "lamella",
        lowers: &lowers,
        upper: Some(OverlayUpper { upper: upper.as_fd(), work: work.as_fd() }),
        // Otherwise the end of every sandbox would wait for the whole file system to be flushed. After a
        // crash of the machine no sandbox lives that could miss anything.
        volatile: true,
    };
    // overlayfs copies files up as whoever mounts it, whose number the mounts must know.
    let _as_its_root = users.map(|users| users.ids.assume()).transpose()?;
    // A device node that is made inside must open nothing.
    let attributes = Attributes { nodev: true, ..Attributes::default() };
    overlay.mount_detached(attributes).context(|| "mount the sandbox's overlay".into())
}

/// A detached copy of the mount at `path`, with its files shown as those of `users`.
pub fn show(path: &Path, users: Option<&Users>) -> Result<MountFd> {
    let copy = mount::clone_tree(path, Recursive::No)
        .context(|| format!("copy the mount of {}", path.display()))?;
    if let Some(users) = users {
        let idmap = Some(users.namespace.as_fd());
        let change = AttributeChange { idmap, ..AttributeChange::default() };
        match copy.set_attributes(&change) {
            Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => {
                let text = format!("the file system of {} cannot shift owners", path.display());
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
            shifted => shifted.context(|| format!("shift the owners of {}", path.display()))?,
        }
    }
    Ok(copy)
}

/// The root of an overlay shows the owner and mode of its upper folder: those of the image's root.
fn own_like(upper: &Path, image: &Path) -> Result<()> {
    let wanted =
        std::fs::metadata(image).context(|| format!("look at layer {}", image.display()))?;
    let apply = || -> std::io::Result<()> {
        let now = std::fs::metadata(upper)?;
        if (now.uid(), now.gid()) != (wanted.uid(), wanted.gid()) {
            std::os::unix::fs::chown(upper, Some(wanted.uid()), Some(wanted.gid()))?;
        }
        if now.mode() & 0o7777 != wanted.mode() & 0o7777 {
            std::fs::set_permissions(upper, wanted.permissions())?;
        }
        Ok(())
    };
    apply().context(|| format!("prepare {}", upper.display()))
}
