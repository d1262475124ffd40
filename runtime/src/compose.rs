//! The root of a sandbox: an overlay of its layers under its own writable folder, made detached.
//!
//! Under all layers lies a skeleton of empty places (/proc, /dev, /etc/hosts, ...) so that an image
//! without them can be started and nothing has to be written into the sandbox's own layer.

use crate::pool::Slot;
use layer::{Context, Error, Result};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use sys::mount::{self, Attributes, MountFd, Overlay, OverlayLower, OverlayUpper};

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
pub fn overlay(skeleton: &Path, layers: &[PathBuf], slot: &Slot) -> Result<MountFd> {
    let top = layers.last().ok_or_else(|| Error::invalid("an environment without layers"))?;
    own_like(&slot.upper, top)?;
    let place =
        |path: &Path| mount::open_place(path).context(|| format!("open {}", path.display()));
    let (upper, work) = (place(&slot.upper)?, place(&slot.work)?);
    let lowers: Vec<OverlayLower<'_>> = layers
        .iter()
        .rev()
        .map(PathBuf::as_path)
        .chain([skeleton])
        .map(OverlayLower::Path)
        .collect();
    let overlay = Overlay {
        name: "lamella",
        lowers: &lowers,
        upper: Some(OverlayUpper { upper: upper.as_fd(), work: work.as_fd() }),
        // Otherwise the end of every sandbox would wait for the whole file system to be flushed. After a
        // crash of the machine no sandbox lives that could miss anything.
        volatile: true,
    };
    // A device node that is made inside must open nothing.
    let attributes = Attributes { nodev: true, ..Attributes::default() };
    overlay.mount_detached(attributes).context(|| "mount the sandbox's overlay".into())
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
