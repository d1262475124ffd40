//! Room on the cache disk: how much there is, when to stop filling, and when to evict.
//!
//! Locking: one mutex around the last measurements, which are taken again when they are old.

use layer::{Context, Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
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

/// How large the cache may grow: above `high` the least recently used is evicted until `low` is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheLimit {
    /// Bytes on disk that start an eviction.
    pub high_bytes: u64,
    /// Bytes on disk that end it.
    pub low_bytes: u64,
}

impl CacheLimit {
    /// The low watermark a tenth below the high one.
    pub fn of(high_bytes: u64) -> Self {
        Self { high_bytes, low_bytes: high_bytes - high_bytes / 10 }
    }
}

#[derive(Debug, Default)]
struct State {
    /// When the free space was measured, and what is left of it.
    measured: Option<(Instant, u64)>,
    /// Bytes of the cache: as measured, and what was filled since.
    used: u64,
}

#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    reserve_bytes: u64,
    limit: Option<CacheLimit>,
    state: Mutex<State>,
    over: Condvar,
}

/// The free space of the cache's file system against a reserve, and the cache's size against a limit.
///
/// The reserve is hard: nothing is filled into it. The limit is soft: what exceeds it is evicted soon.
/// Clones share one state.
#[derive(Debug, Clone)]
pub struct Space {
    shared: Arc<Shared>,
}

impl Space {
    /// Keeps `reserve_bytes` of the file system that holds `folder` free.
    pub fn new(folder: &Path, reserve_bytes: u64, limit: Option<CacheLimit>) -> Self {
        let shared = Shared {
            folder: folder.to_owned(),
            reserve_bytes,
            limit,
            state: Mutex::default(),
            over: Condvar::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The limit, if there is one.
    pub fn limit(&self) -> Option<CacheLimit> {
        self.shared.limit
    }

    /// Bytes that are kept free.
    pub fn reserve_bytes(&self) -> u64 {
        self.shared.reserve_bytes
    }

    /// Bytes that the file system has free for us.
    pub fn free_bytes(&self) -> Result<u64> {
        let folder = &self.shared.folder;
        let found = rustix::fs::statvfs(folder).map_err(std::io::Error::from);
        let found = found.context(|| format!("statvfs {}", folder.display()))?;
        Ok(found.f_bavail * found.f_frsize)
    }

    /// Counts `bytes` that are about to be written. `NoSpace` when less than the reserve would stay free.
    pub fn check(&self, bytes: u64) -> Result<()> {
        let reserve = self.shared.reserve_bytes;
        let mut state = self.state();
        let free = match state.measured {
            Some((when, free)) if when.elapsed() < BELIEVED && free > reserve + bytes => free,
            _ => self.free_bytes()?,
        };
        if free > reserve.saturating_add(bytes) {
            let when = match state.measured {
                Some((when, before)) if before == free => when,
                _ => Instant::now(),
            };
            state.measured = Some((when, free - bytes));
            state.used += bytes;
            if self.shared.limit.is_some_and(|limit| state.used > limit.high_bytes) {
                self.shared.over.notify_one();
            }
            return Ok(());
        }
        state.measured = None;
        let folder = self.shared.folder.display();
        let text =
            format!("the cache disk of {folder} has {free} bytes free, the reserve is {reserve}");
        Err(Error::new(ErrorKind::NoSpace, text))
    }

    /// Measure again at the next check: something was freed.
    pub fn forget(&self) {
        self.state().measured = None;
    }

    /// The cache was measured.
    pub fn set_used(&self, bytes: u64) {
        self.state().used = bytes;
    }

    /// Waits until the cache has outgrown its limit, or the time is over. Answers whether it has.
    pub fn wait_over(&self, patience: Duration) -> bool {
        let Some(limit) = self.shared.limit else { return false };
        let state = self.state();
        let (state, _) = self
            .shared
            .over
            .wait_timeout_while(state, patience, |state| state.used <= limit.high_bytes)
            .unwrap_or_else(PoisonError::into_inner);
        state.used > limit.high_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_is_refused_and_the_limit_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let limit = CacheLimit::of(1000);
        assert_eq!(limit.low_bytes, 900);
        let space = Space::new(folder.path(), 0, Some(limit));
        space.check(1000).unwrap();
        assert!(!space.wait_over(Duration::ZERO));
        space.check(1).unwrap();
        assert!(space.wait_over(Duration::from_secs(60)));
        space.set_used(900);
        assert!(!space.wait_over(Duration::ZERO));
        let full = Space::new(folder.path(), u64::MAX / 2, None);
        assert_eq!(full.check(0).unwrap_err().kind(), ErrorKind::NoSpace);
    }
}
