//! How long something has been failing without a break: the store, or the room on the disk.
//!
//! The first reader waits to its deadline. While the outage goes on, later ones are tried once and
//! refused at once: one read of a file is many events, and waiting for each would take minutes.
//!
//! Locking: one mutex around the start of the outage.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// An outage, or none.
#[derive(Debug, Default)]
pub struct Outage {
    since: Mutex<Option<Instant>>,
}

impl Outage {
    /// It failed again. Answers whether it has been failing for longer than this.
    pub fn failed(&self, now: Instant, patience: Duration) -> bool {
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        now.saturating_duration_since(*since.get_or_insert(now)) > patience
    }

    /// Whether it has not failed since it worked last.
    pub fn begins(&self) -> bool {
        self.since.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// It works. Answers whether it had not.
    pub fn over(&self) -> bool {
        self.since.lock().unwrap_or_else(PoisonError::into_inner).take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_lasts_from_its_first_failure_to_the_next_success() {
        let outage = Outage::default();
        let (start, patience) = (Instant::now(), Duration::from_millis(1));
        assert!(!outage.failed(start, patience));
        assert!(!outage.failed(start + patience, patience));
        assert!(outage.failed(start + 2 * patience, patience));
        assert!(outage.over() && outage.begins());
        assert!(!outage.failed(start + 3 * patience, patience));
    }
}
