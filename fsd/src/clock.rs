//! What time it is: the seam that lets a simulation own the time of the fetch engine.
//!
//! Locking: none. Says nothing about the time of day.

use std::time::Instant;

/// Time that only goes forward.
pub trait Clock: std::fmt::Debug + Send + Sync {
    /// Now.
    fn now(&self) -> Instant;
}

/// The machine's.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}
