//! Mounting EROFS, and knowing whether a superblock still lives.
//!
//! A mount point is one user of a superblock; sandboxes hold clones of it. The superblock has the image
//! open until the last of them is gone.

use layer::{Context, Result};
use std::path::Path;
use sys::mount::{Attributes, Erofs, Unmount};

/// Mounts a layer's image with its data at an existing folder.
pub fn mount_erofs(metadata: &Path, data: &Path, at: &Path) -> Result<()> {
    let mounted = Erofs { metadata, device: Some(data) }.mount_detached(Attributes::LAYER);
    mounted
        .and_then(|mount| mount.attach(at))
        .context(|| format!("mount {} at {}", metadata.display(), at.display()))
}

/// Unmounts; lazily when somebody works inside of it. Nothing mounted is no error.
pub fn unmount(at: &Path) -> Result<()> {
    let name = || format!("unmount {}", at.display());
    for how in [Unmount::Now, Unmount::Lazy] {
        match sys::mount::unmount(at, how) {
            Ok(()) => return Ok(()),
            Err(error)
                if sys::errno_of(&error) == Some(rustix::io::Errno::INVAL.raw_os_error()) =>
            {
                return Ok(());
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {}
            Err(error) => return Err(error).context(name),
        }
    }
    Err(layer::Error::new(layer::ErrorKind::Busy, name()))
}

/// Whether a superblock of this image exists, mounted here, cloned elsewhere or lazily unmounted.
pub fn has_superblock(metadata: &Path) -> Result<bool> {
    sys::lease::is_open_elsewhere(metadata).context(|| format!("lease {}", metadata.display()))
}
