//! Who waits for chunks, and how they are told exactly once.
//!
//! Locking: one mutex around the closure that tells, held only to take it out.

use layer::{Error, ErrorKind};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// What came first comes first: demand before prefetch before background.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// A reader is blocked.
    Demand,
    /// Somebody will probably read it soon.
    Prefetch,
    /// To make a layer complete.
    Background,
}

/// Why chunks did not come. Shared by all who waited for them.
#[derive(Debug, Clone)]
pub struct Failure(Arc<Error>);

impl Failure {
    /// What a caller can act on.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind()
    }

    /// The whole chain in one line.
    pub fn chain(&self) -> String {
        self.0.chain()
    }

    /// The failure as an error of its own.
    pub fn to_error(&self) -> Error {
        Error::new(self.kind(), self.chain())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self(Arc::new(error))
    }
}

/// Called once: everything is there, or why not.
pub type Done = Box<dyn FnOnce(Result<(), Failure>) + Send>;

/// One request for some chunks.
pub struct Waiter {
    done: Mutex<Option<Done>>,
    remaining: AtomicUsize,
    deadline: Instant,
    pages: Option<Range<u64>>,
    delayed_by: Mutex<Option<Failure>>,
}

impl Waiter {
    /// Waits for one thing more than was added: the guard that [`Waiter::arrived`] takes back when
    /// all chunks were added.
    ///
    /// With `pages` it needs no more of the chunks than these bytes of the data file.
    pub fn new(deadline: Instant, pages: Option<Range<u64>>, done: Done) -> Arc<Self> {
        Arc::new(Self {
            done: Mutex::new(Some(done)),
            remaining: AtomicUsize::new(1),
            deadline,
            pages,
            delayed_by: Mutex::new(None),
        })
    }

    /// What it needs of a chunk that has these bytes of the data file; nothing where it needs the whole chunk.
    pub fn pages_in(&self, chunk: &Range<u64>) -> Option<Range<u64>> {
        let pages = self.pages.as_ref()?;
        Some(pages.start.max(chunk.start)..pages.end.min(chunk.end))
    }

    /// One chunk more to wait for.
    pub fn add(&self) {
        self.remaining.fetch_add(1, Ordering::AcqRel);
    }

    /// One thing less to wait for; the last one tells.
    pub fn arrived(&self) {
        if self.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.tell(Ok(()));
        }
    }

    /// Tells the failure, if nothing was told yet.
    pub fn fail(&self, failure: &Failure) {
        self.tell(Err(failure.clone()));
    }

    /// Notes why it takes longer.
    pub fn delayed(&self, failure: &Failure) {
        *self.delayed_by.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure.clone());
    }

    /// Tells that the deadline has passed, and what the delay was about.
    pub fn expire(&self) {
        let reason = self.delayed_by.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let error = match reason {
            Some(reason) => {
                Error::new(reason.kind(), format!("deadline passed: {}", reason.chain()))
            }
            None => Error::new(ErrorKind::Timeout, "deadline passed while the store was read"),
        };
        self.fail(&error.into());
    }

    /// Until when it makes sense to try.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Whether it was told.
    pub fn is_over(&self) -> bool {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    fn tell(&self, result: Result<(), Failure>) {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(done) = done {
            done(result);
        }
    }
}

impl std::fmt::Debug for Waiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiter").field("remaining", &self.remaining).finish_non_exhaustive()
    }
}
