//! The clock of this host, as entries and leases on the store record it; tests put another in its place.

use std::fmt::Debug;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What a store and its collector ask for the time.
pub trait Clock: Send + Sync + Debug {
    /// Nanoseconds since 1970; 0 for a clock before it.
    fn now_unix_ns(&self) -> u64;

    /// Waits.
    fn sleep(&self, time: Duration);
}

/// This host's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostClock;

impl Clock for HostClock {
    fn now_unix_ns(&self) -> u64 {
        now_unix_ns()
    }

    fn sleep(&self, time: Duration) {
        thread::sleep(time);
    }
}

/// Nanoseconds since 1970; 0 for a clock before it.
pub fn now_unix_ns() -> u64 {
    u64::try_from(since_1970().as_nanos()).unwrap_or(u64::MAX)
}

/// Seconds since 1970; 0 for a clock before it.
pub(crate) fn now_unix_s() -> u64 {
    since_1970().as_secs()
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
