//! Mounting EROFS, and knowing whether a superblock still lives.
//!
//! A mount point is one user of a superblock; sandboxes hold clones of it. The superblock's own device
//! number stays listed in sysfs until the last of them is gone.

use layer::{Context, Result};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use sys::mount::{Attributes, Erofs, Unmount};

/// Device number of a superblock, major and minor.
pub type Superblock = (u32, u32);

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

/// The superblock that is mounted here.
pub fn superblock_at(at: &Path) -> Result<Superblock> {
    let device = std::fs::metadata(at).context(|| format!("stat {}", at.display()))?.dev();
    Ok((rustix::fs::major(device), rustix::fs::minor(device)))
}

/// Whether a superblock with this number exists. A number that was given out anew counts as alive,
/// which only delays the release.
pub fn is_alive((major, minor): Superblock) -> bool {
    Path::new(&format!("/sys/class/bdi/{major}:{minor}")).exists()
}

/// Sets how much the kernel reads ahead on a superblock.
pub fn set_readahead((major, minor): Superblock, bytes: u64) -> Result<()> {
    let path = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    std::fs::write(&path, (bytes / 1024).to_string()).context(|| format!("write {path}"))
}
