//! The clock of this host, as entries and leases on the store record it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

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
