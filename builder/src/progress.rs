//! How a build tells its caller what it is doing, and how the caller stops it.
//!
//! Not here: drawing. Every method may be called from any worker thread at any moment.

use layer::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What a build is busy with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Listing what the source holds (and unpacking it when it is compressed).
    Index,
    /// Reading contents once to find what is equal and what is zero.
    Digest,
    /// Cutting, compressing and uploading what the store lacks.
    Encode,
    /// Writing the metadata image and naming the layer.
    Commit,
}

/// Receives what a build reports. All methods have empty defaults.
pub trait Progress: Send + Sync {
    /// A phase begins; `files` and `bytes` are what it has to do, 0 when that is not known yet.
    fn phase(&self, _phase: Phase, _files: u64, _bytes: u64) {}
    /// This much of the phase is done since the last call.
    fn advance(&self, _files: u64, _bytes: u64) {}
    /// Plain bytes that were compressed and uploaded, and the bytes they became.
    fn stored(&self, _plain_bytes: u64, _stored_bytes: u64) {}
    /// Plain bytes that needed no upload: known to the store, repeated, or zero.
    fn reused(&self, _plain_bytes: u64) {}
    /// Something that the user should know and that is no error.
    fn notice(&self, _text: &str) {}
}

/// Notices of one build that are passed on; the others are only counted.
const MOST_NOTICES: u64 = 20;

/// Passes everything on, but of the notices only the first: a tree of a million odd files says so in a
/// few lines. How many were left out is said when this is dropped.
pub(crate) struct FewNotices<'a> {
    inner: &'a dyn Progress,
    given: AtomicU64,
}

impl<'a> FewNotices<'a> {
    pub(crate) fn of(inner: &'a dyn Progress) -> Self {
        Self { inner, given: AtomicU64::new(0) }
    }
}

impl Progress for FewNotices<'_> {
    fn phase(&self, phase: Phase, files: u64, bytes: u64) {
        self.inner.phase(phase, files, bytes);
    }

    fn advance(&self, files: u64, bytes: u64) {
        self.inner.advance(files, bytes);
    }

    fn stored(&self, plain_bytes: u64, stored_bytes: u64) {
        self.inner.stored(plain_bytes, stored_bytes);
    }

    fn reused(&self, plain_bytes: u64) {
        self.inner.reused(plain_bytes);
    }

    fn notice(&self, text: &str) {
        if self.given.fetch_add(1, Ordering::Relaxed) < MOST_NOTICES {
            self.inner.notice(text);
        }
    }
}

impl Drop for FewNotices<'_> {
    fn drop(&mut self) {
        let left_out = self.given.load(Ordering::Relaxed).saturating_sub(MOST_NOTICES);
        if left_out > 0 {
            self.inner.notice(&format!("{left_out} more notices are left out"));
        }
    }
}

/// Reports nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {}

/// A switch that ends a build at its next step. Clones share the switch.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A switch that nobody has pressed.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends the build soon; it returns an error and leaves nothing behind that is visible.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether [`Cancel::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// [`ErrorKind::Unavailable`] when cancelled: the work was right and can be repeated.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() {
            return Err(Error::new(ErrorKind::Unavailable, "cancelled"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Heard(Mutex<Vec<String>>);

    impl Progress for Heard {
        fn notice(&self, text: &str) {
            self.0.lock().unwrap().push(text.to_owned());
        }
    }

    #[test]
    fn endless_notices_end_with_a_count() {
        for (given, heard) in [(0, 0), (20, 20), (1_000, 21)] {
            let progress = Heard::default();
            let few = FewNotices::of(&progress);
            (0..given).for_each(|number| few.notice(&format!("notice {number}")));
            drop(few);
            let notices = progress.0.into_inner().unwrap();
            assert_eq!(notices.len(), heard);
            let last = (given > 20).then_some("980 more notices are left out");
            assert_eq!(notices.get(20).map(String::as_str), last);
        }
    }
}
