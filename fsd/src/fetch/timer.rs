//! Deadlines of waiters, and chunks that rest before they are tried again.
//!
//! The thread sleeps without waking while there is nothing to watch.
//!
//! Locking: one mutex around both lists; nobody is told and nothing is queued while it is held.

use super::queue::Ticket;
use super::waiter::Waiter;
use crate::clock::Clock;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How late a deadline or the end of a rest may be noticed.
const TICK: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
struct State {
    waiters: Vec<Arc<Waiter>>,
    resting: Vec<(Instant, Ticket)>,
    asleep: bool,
}

/// What has come due.
#[derive(Debug, Default)]
pub struct Due {
    /// Waiters whose deadline has passed.
    pub expired: Vec<Arc<Waiter>>,
    /// Chunks to be tried again.
    pub rested: Vec<Ticket>,
}

/// What is watched.
#[derive(Debug, Default)]
pub struct Timer {
    state: Mutex<State>,
    changed: Condvar,
}

impl Timer {
    /// Watches the deadline of a waiter until it was told.
    pub fn watch(&self, waiter: Arc<Waiter>) {
        self.add(|state| state.waiters.push(waiter));
    }

    /// Brings a chunk back when it is `due`.
    pub fn rest(&self, ticket: Ticket, due: Instant) {
        self.add(|state| state.resting.push((due, ticket)));
    }

    fn add(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state);
        if state.asleep {
            self.changed.notify_one();
        }
    }

    /// What is due, without waiting.
    #[cfg(test)]
    pub fn due(&self, now: Instant) -> Due {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).take_due(now)
    }

    /// Whether nothing is watched.
    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.waiters.is_empty() && state.resting.is_empty()
    }

    /// Waits until something is due.
    pub fn wait(&self, clock: &dyn Clock) -> Due {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            while state.waiters.is_empty() && state.resting.is_empty() {
                state.asleep = true;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.asleep = false;
            }
            let (next, _) =
                self.changed.wait_timeout(state, TICK).unwrap_or_else(PoisonError::into_inner);
            state = next;
            let due = state.take_due(clock.now());
            if !due.expired.is_empty() || !due.rested.is_empty() {
                return due;
            }
        }
    }
}

impl State {
    fn take_due(&mut self, now: Instant) -> Due {
        let mut due = Due::default();
        self.waiters.retain(|waiter| {
            if waiter.is_over() {
                return false;
            }
            let expired = waiter.deadline() <= now;
            if expired {
                due.expired.push(Arc::clone(waiter));
            }
            !expired
        });
        self.resting.retain(|(when, ticket)| {
            let rested = *when <= now;
            if rested {
                due.rested.push(ticket.clone());
            }
            !rested
        });
        due
    }
}
