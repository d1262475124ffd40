//! Layers that are brought ahead of the one that is unpacked, a few side by side.
//!
//! Bounded: so many threads, and as many layers on their way or waiting; each waits in a file without a name.
//! Locking: one mutex around who is where, never held while something is brought. The consumer takes the layers in
//! their order; when it ends early, what is on its way is broken off.

use crate::source::blob::Region;
use layer::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Brings a layer. Calls the second now and then, and ends with its error.
pub(super) type Fetch<'a> = dyn Fn(usize, &dyn Fn() -> Result<()>) -> Result<Region> + Sync + 'a;

/// The layers to bring, in order.
pub(super) struct Ahead<'a> {
    fetch: &'a Fetch<'a>,
    layers: Vec<usize>,
    at_once: usize,
    state: Mutex<State>,
    moved: Condvar,
    stopped: AtomicBool,
}

struct State {
    /// How many were begun, and how many were taken.
    begun: usize,
    taken: usize,
    /// What was brought and not taken, by its place in the list.
    brought: Vec<Option<Result<Region>>>,
}

impl<'a> Ahead<'a> {
    fn new(fetch: &'a Fetch<'a>, layers: Vec<usize>, at_once: usize) -> Self {
        let brought = layers.iter().map(|_| None).collect();
        Self {
            fetch,
            layers,
            at_once: at_once.max(1),
            state: Mutex::new(State { begun: 0, taken: 0, brought }),
            moved: Condvar::new(),
            stopped: AtomicBool::new(false),
        }
    }

    /// Runs `consumer` while layers are brought for it.
    pub(super) fn with<T>(
        fetch: &'a Fetch<'a>,
        layers: Vec<usize>,
        at_once: usize,
        consumer: impl FnOnce(&Self) -> Result<T>,
    ) -> Result<T> {
        let ahead = Self::new(fetch, layers, at_once);
        std::thread::scope(|scope| {
            for _ in 0..ahead.at_once.min(ahead.layers.len()) {
                scope.spawn(|| ahead.work());
            }
            let _stop = Stop(&ahead);
            consumer(&ahead)
        })
    }

    /// The next layer of the list. Waits for it.
    pub(super) fn next(&self) -> Result<Region> {
        let mut state = self.lock();
        let at = state.taken;
        loop {
            if let Some(brought) = state.brought.get_mut(at).and_then(Option::take) {
                state.taken += 1;
                self.moved.notify_all();
                return brought;
            }
            if at >= self.layers.len() {
                let text = "more layers are taken than were asked for";
                return Err(Error::new(ErrorKind::Internal, text));
            }
            state = self.wait(state);
        }
    }

    fn work(&self) {
        let going = || match self.stopped.load(Ordering::Relaxed) {
            true => Err(Error::new(ErrorKind::Unavailable, "another layer failed")),
            false => Ok(()),
        };
        while let Some(at) = self.begin() {
            let mut brought = Brought { ahead: self, at, result: None };
            brought.result = Some((self.fetch)(self.layers[at], &going));
        }
    }

    /// The next one to bring, once there is room for it.
    fn begin(&self) -> Option<usize> {
        let mut state = self.lock();
        loop {
            if self.stopped.load(Ordering::Relaxed) || state.begun == self.layers.len() {
                return None;
            }
            if state.begun < state.taken + self.at_once {
                state.begun += 1;
                return Some(state.begun - 1);
            }
            state = self.wait(state);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'g>(&self, state: MutexGuard<'g, State>) -> MutexGuard<'g, State> {
        self.moved.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

/// Puts down what a thread brought, also when it panicked.
struct Brought<'a, 'b> {
    ahead: &'a Ahead<'b>,
    at: usize,
    result: Option<Result<Region>>,
}

impl Drop for Brought<'_, '_> {
    fn drop(&mut self) {
        let died = || Err(Error::new(ErrorKind::Internal, "a thread that fetched a layer died"));
        let result = self.result.take().unwrap_or_else(died);
        if let Some(place) = self.ahead.lock().brought.get_mut(self.at) {
            *place = Some(result);
        }
        self.ahead.moved.notify_all();
    }
}

/// Ends the threads when the consumer has ended.
struct Stop<'a, 'b>(&'a Ahead<'b>);

impl Drop for Stop<'_, '_> {
    fn drop(&mut self) {
        let state = self.0.lock();
        self.0.stopped.store(true, Ordering::Relaxed);
        drop(state);
        self.0.moved.notify_all();
    }
}
