//! How a build tells its caller what it is doing, and how the caller stops it.
//!
//! Not here: drawing. Every method may be called from any worker thread at any moment.

use layer::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
