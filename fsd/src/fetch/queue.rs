//! The work of the fill threads, in three lanes: demand before prefetch before background, always; and
//! within a lane decoding before reading.
//!
//! Lower lanes never hold all threads: their reads are short and few at once, so that neither a thread nor
//! the link to the store is busy with them for long when a demand comes. A demand for a chunk that a
//! lower lane has read already lifts what is left to decode of it.
//!
//! Bounded: one ticket a flight and class (flights are bounded by the events that can be outstanding
//! and by the windows of prefetch and completion), and as many pieces to decode as one read of each
//! thread brings.
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

/// The work of one class.
#[derive(Debug, Default)]
struct Lane {
    pieces: VecDeque<Piece>,
    tickets: VecDeque<Ticket>,
}

#[derive(Debug, Default)]
struct State {
    demand: Lane,
    prefetch: Lane,
    background: Lane,
    low_reads: usize,
}

impl State {
    fn lane(&mut self, class: Class) -> &mut Lane {
        match class {
            Class::Demand => &mut self.demand,
            Class::Prefetch => &mut self.prefetch,
            Class::Background => &mut self.background,
        }
    }

    fn next(&mut self, low_limit: usize) -> Option<Job> {
        for class in [Class::Demand, Class::Prefetch, Class::Background] {
            let may_read = class == Class::Demand || self.low_reads < low_limit;
            let lane = self.lane(class);
            if let Some(piece) = lane.pieces.pop_front() {
                return Some(Job::Decode(piece));
            }
            if may_read && let Some(ticket) = lane.tickets.pop_front() {
                self.low_reads += usize::from(class != Class::Demand);
                return Some(Job::Read(ticket, class));
            }
        }
        None
    }
}

/// The queue.
#[derive(Debug)]
pub struct Queue {
    state: Mutex<State>,
    ready: Condvar,
    low_limit: usize,
    processors: usize,
}

impl Queue {
    /// At most `low_limit` threads are in reads of lower lanes at once.
    pub fn new(low_limit: usize) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { state: Mutex::default(), ready: Condvar::new(), low_limit, processors }
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
        let tickets = &mut state.lane(class).tickets;
        tickets
            .extend(chunks.iter().map(|chunk| Ticket { layer: Arc::clone(layer), chunk: *chunk }));
        drop(state);
        if wake {
            self.ready.notify_one();
        }
    }

    /// Queues pieces to decode and wakes as many threads as can be of use for them.
    pub fn push_pieces(&self, class: Class, pieces: impl Iterator<Item = Piece>) {
        let mut state = self.lock();
        let lane = &mut state.lane(class).pieces;
        let before = lane.len();
        lane.extend(pieces);
        let fresh = lane.len() - before;
        drop(state);
        for _ in 0..fresh.min(self.processors) {
            self.ready.notify_one();
        }
    }

    /// Somebody waits now for chunks that a lower lane has read: what of them is not decoded yet
    /// becomes urgent.
    pub fn lift(&self, layer: &Arc<FetchLayer>, chunks: &[usize]) {
        if chunks.is_empty() {
            return;
        }
        let mut state = self.lock();
        let mut lifted = VecDeque::new();
        for class in [Class::Prefetch, Class::Background] {
            let pieces = &mut state.lane(class).pieces;
            for index in (0..pieces.len()).rev() {
                let is_it = pieces.get(index).is_some_and(|piece| {
                    Arc::ptr_eq(&piece.layer, layer) && chunks.contains(&piece.chunk)
                });
                if is_it && let Some(piece) = pieces.remove(index) {
                    lifted.push_front(piece);
                }
            }
        }
        if !lifted.is_empty() {
            state.demand.pieces.append(&mut lifted);
            drop(state);
            self.ready.notify_one();
        }
    }

    /// Wakes a thread if something urgent still waits: for a caller that took only part of it.
    pub fn wake_for_rest(&self) {
        let mut state = self.lock();
        while let Some(front) = state.demand.tickets.front() {
            if front.layer.flights().is_queued(front.chunk) {
                drop(state);
                self.ready.notify_one();
                return;
            }
            state.demand.tickets.pop_front();
        }
    }

    /// A piece to decode that somebody waits for, without waiting.
    pub fn try_piece(&self) -> Option<Piece> {
        self.lock().demand.pieces.pop_front()
    }

    /// A demand ticket, without waiting.
    pub fn try_demand(&self) -> Option<Ticket> {
        self.lock().demand.tickets.pop_front()
    }

    /// Waits for work.
    pub fn wait(&self) -> Job {
        let mut state = self.lock();
        loop {
            match state.next(self.low_limit) {
                Some(job) => return job,
                None => state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// The next work, without waiting.
    #[cfg(test)]
    pub fn try_next(&self) -> Option<Job> {
        self.lock().next(self.low_limit)
    }

    /// Whether nothing is queued.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        let state = self.lock();
        let lanes = [&state.demand, &state.prefetch, &state.background];
        lanes.iter().all(|lane| lane.pieces.is_empty() && lane.tickets.is_empty())
    }

    /// A read of a lower lane that [`Queue::wait`] gave out is over.
    pub fn low_read_over(&self) {
        let mut state = self.lock();
        state.low_reads -= 1;
        if !state.prefetch.tickets.is_empty() || !state.background.tickets.is_empty() {
            self.ready.notify_one();
        }
    }
}
