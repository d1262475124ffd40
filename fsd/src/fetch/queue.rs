//! The work of the fill threads: demand before prefetch before background, decoding before reading.
//!
//! Bounded: one ticket a flight and class (flights are bounded by the events that can be outstanding
//! and by the window of a completion), and as many pieces to decode as one read of each thread brings.
//!
//! Locking: one mutex and one condition variable.

use super::FetchLayer;
use super::waiter::Class;
use layer::location::{Locations, Placement};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A chunk that may be taken. Stale when its flight is no longer queued.
#[derive(Debug, Clone)]
pub struct Ticket {
    /// Whose chunk.
    pub layer: Arc<FetchLayer>,
    /// Its index.
    pub chunk: usize,
}

/// A chunk whose stored bytes were read.
#[derive(Debug)]
pub struct Piece {
    /// Whose chunk.
    pub layer: Arc<FetchLayer>,
    /// Its index.
    pub chunk: usize,
    /// The bytes of the whole read.
    pub payload: Arc<Vec<u8>>,
    /// Which of them are this chunk's.
    pub part: Range<usize>,
    /// How to decode them.
    pub placement: Placement,
    /// The hint that led to them.
    pub locations: Arc<Locations>,
}

/// What a fill thread does next.
#[derive(Debug)]
pub enum Job {
    /// Decode, verify, write.
    Decode(Piece),
    /// Take the chunk and its neighbours and read them.
    Read(Ticket, Class),
}

#[derive(Debug, Default)]
struct State {
    pieces: VecDeque<Piece>,
    demand: VecDeque<Ticket>,
    prefetch: VecDeque<Ticket>,
    background: VecDeque<Ticket>,
    background_running: usize,
}

impl State {
    fn next(&mut self, background_limit: usize) -> Option<Job> {
        if let Some(piece) = self.pieces.pop_front() {
            return Some(Job::Decode(piece));
        }
        for (line, class) in
            [(&mut self.demand, Class::Demand), (&mut self.prefetch, Class::Prefetch)]
        {
            if let Some(ticket) = line.pop_front() {
                return Some(Job::Read(ticket, class));
            }
        }
        if self.background_running == background_limit {
            return None;
        }
        let ticket = self.background.pop_front()?;
        self.background_running += 1;
        Some(Job::Read(ticket, Class::Background))
    }
}

/// The queue.
#[derive(Debug)]
pub struct Queue {
    state: Mutex<State>,
    ready: Condvar,
    background_limit: usize,
}

impl Queue {
    /// At most `background_limit` threads are in background reads at once.
    pub fn new(background_limit: usize) -> Self {
        Self { state: Mutex::default(), ready: Condvar::new(), background_limit }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues chunks; wakes a thread unless the caller is about to take the work itself.
    pub fn push(&self, layer: &Arc<FetchLayer>, chunks: &[usize], class: Class, wake: bool) {
        if chunks.is_empty() {
            return;
        }
        let mut state = self.lock();
        let line = match class {
            Class::Demand => &mut state.demand,
            Class::Prefetch => &mut state.prefetch,
            Class::Background => &mut state.background,
        };
        line.extend(chunks.iter().map(|chunk| Ticket { layer: Arc::clone(layer), chunk: *chunk }));
        drop(state);
        if wake {
            self.ready.notify_one();
        }
    }

    /// Queues pieces to decode and wakes threads for them.
    pub fn push_pieces(&self, pieces: impl Iterator<Item = Piece>) {
        self.lock().pieces.extend(pieces);
        self.ready.notify_all();
    }

    /// Wakes a thread if something urgent still waits: for a caller that took only part of it.
    pub fn wake_for_rest(&self) {
        let mut state = self.lock();
        while let Some(front) = state.demand.front() {
            if front.layer.flights().is_queued(front.chunk) {
                drop(state);
                self.ready.notify_one();
                return;
            }
            state.demand.pop_front();
        }
    }

    /// A piece to decode, without waiting.
    pub fn try_piece(&self) -> Option<Piece> {
        self.lock().pieces.pop_front()
    }

    /// A demand ticket, without waiting.
    pub fn try_demand(&self) -> Option<Ticket> {
        self.lock().demand.pop_front()
    }

    /// Waits for work.
    pub fn wait(&self) -> Job {
        let mut state = self.lock();
        loop {
            match state.next(self.background_limit) {
                Some(job) => return job,
                None => state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// The next work, without waiting.
    #[cfg(test)]
    pub fn try_next(&self) -> Option<Job> {
        self.lock().next(self.background_limit)
    }

    /// A background read that [`Queue::wait`] gave out is over.
    pub fn background_over(&self) {
        let mut state = self.lock();
        state.background_running -= 1;
        if !state.background.is_empty() {
            self.ready.notify_one();
        }
    }
}
