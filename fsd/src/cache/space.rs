//! Room on the cache disk: how much there is, and when to stop filling.
//!
//! Locking: one mutex around the last measurement, which is taken again when it is old.

use layer::{Context, Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a measurement of the free space is believed.
const BELIEVED: Duration = Duration::from_millis(100);

const EXT4: u64 = 0xef53;
const XFS: u64 = 0x5846_5342;
const BTRFS: u64 = 0x9123_683e;

/// `Unsupported` where the kernel takes no file-backed EROFS and no pre-content marks.
pub fn check_file_system(folder: &Path) -> Result<()> {
    let found = rustix::fs::statfs(folder)
        .map_err(|error| Error::io(format!("statfs {}", folder.display()), error.into()))?;
    let kind = found.f_type as u64;
    if [EXT4, XFS, BTRFS].contains(&kind) {
        return Ok(());
    }
    let text = format!(
        "the node cache {} lies on a file system of type {kind:#x}; it needs ext4, XFS or btrfs",
        folder.display()
    );
    Err(Error::new(ErrorKind::Unsupported, text))
}

/// The free space of the cache's file system against a reserve.
///
/// Clones share the last measurement.
#[derive(Debug, Clone)]
pub struct Space {
    folder: PathBuf,
    reserve_bytes: u64,
    measured: Arc<Mutex<Option<(Instant, u64)>>>,
}

impl Space {
    /// Keeps `reserve_bytes` of the file system that holds `folder` free.
    pub fn new(folder: &Path, reserve_bytes: u64) -> Self {
        Self { folder: folder.to_owned(), reserve_bytes, measured: Arc::default() }
    }

    /// `NoSpace` when less than the reserve would stay free after `bytes` more are written.
    pub fn check(&self, bytes: u64) -> Result<()> {
        let mut measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        let free = match *measured {
            Some((when, free))
                if when.elapsed() < BELIEVED && free > self.reserve_bytes + bytes =>
            {
                *measured = Some((when, free - bytes));
                free
            }
            _ => {
                let found = rustix::fs::statvfs(&self.folder).map_err(std::io::Error::from);
                let found = found.context(|| format!("statvfs {}", self.folder.display()))?;
                let free = found.f_bavail * found.f_frsize;
                *measured = Some((Instant::now(), free));
                free
            }
        };
        if free > self.reserve_bytes.saturating_add(bytes) {
            return Ok(());
        }
        let text = format!(
            "the cache disk of {} has {free} bytes free, the reserve is {}",
            self.folder.display(),
            self.reserve_bytes
        );
        Err(Error::new(ErrorKind::NoSpace, text))
    }

    /// Measure again at the next check: something was freed.
    pub fn forget(&self) {
        *self.measured.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
