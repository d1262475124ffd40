//! What went wrong lately, for people: the last few things that a counter alone does not explain.
//!
//! Bounded: the oldest goes first. Locking: one mutex around the list. Nothing survives a restart; the
//! log has all of it.

use layer::LayerId;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// How many are kept.
const KEPT: usize = 64;

/// What kind of thing happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IncidentKind {
    /// Stored bytes did not have their digest.
    Integrity,
    /// The cache disk is full and nothing can be evicted.
    DiskFull,
    /// There is room again.
    Room,
    /// A chunk did not come; its readers got an error.
    Refused,
}

impl IncidentKind {
    /// One word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Integrity => "integrity",
            Self::DiskFull => "disk-full",
            Self::Room => "room",
            Self::Refused => "refused",
        }
    }
}

/// One thing that happened.
#[derive(Debug, Clone)]
pub struct Incident {
    /// When, in milliseconds since 1970.
    pub time_ms: u64,
    /// What.
    pub kind: IncidentKind,
    /// To which layer.
    pub layer: LayerId,
    /// In words: chunk, pack, reason.
    pub text: String,
}

/// The last incidents.
#[derive(Debug, Default)]
pub struct Incidents {
    last: Mutex<VecDeque<Incident>>,
}

impl Incidents {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Incident>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes one.
    pub fn note(&self, kind: IncidentKind, layer: LayerId, text: String) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let time_ms = since.map_or(0, |since| since.as_millis() as u64);
        let mut last = self.lock();
        if last.len() == KEPT {
            last.pop_front();
        }
        last.push_back(Incident { time_ms, kind, layer, text });
    }

    /// All that are kept, the oldest first.
    pub fn list(&self) -> Vec<Incident> {
        self.lock().iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_are_kept() {
        let incidents = Incidents::default();
        for number in 0..KEPT + 3 {
            incidents.note(IncidentKind::Refused, LayerId([1; 32]), number.to_string());
        }
        let list = incidents.list();
        assert_eq!((list.len(), list[0].text.as_str()), (KEPT, "3"));
    }
}
