//! The work of the fill threads, in three lanes: demand before prefetch before background, always; and
//! within a lane decoding before reading.
//!
//! Lower lanes never hold all threads: their reads are short and few at once, so that neither a thread nor
//! the link to the store is busy with them for long when a demand comes. A demand for a chunk that a
//! lower lane has read already lifts what is left to decode of it. Background has threads of its own, which
//! stand back for all others on the processors; nobody else does its work.
//!
//! Bounded: one ticket a flight and class (flights are bounded by the events that can be outstanding
//! and by the windows of prefetch and completion), and as many pieces to decode as one read of each
//! thread brings.
//!
//! Locking: one mutex; a condition variable for each kind of thread.

use super::FetchLayer;
use super::buffers::Buffer;
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
    pub payload: Arc<Buffer>,
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

/// What a thread is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Duty {
    /// Demand and prefetch.
    Urgent,
    /// The background lane alone.
    Background,
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

    fn next(&mut self, duty: Duty, low_limit: usize) -> Option<Job> {
        match duty {
            Duty::Urgent => self
                .next_of(Class::Demand, true)
                .or_else(|| self.next_of(Class::Prefetch, self.low_reads < low_limit)),
            Duty::Background => {
                let may_read = self.low_reads < low_limit && self.prefetch.tickets.is_empty();
                self.next_of(Class::Background, may_read)
            }
        }
    }

    fn next_of(&mut self, class: Class, may_read: bool) -> Option<Job> {
        let lane = self.lane(class);
        if let Some(piece) = lane.pieces.pop_front() {
            return Some(Job::Decode(piece));
        }
        let ticket = if may_read { lane.tickets.pop_front() } else { None };
        self.low_reads += usize::from(ticket.is_some() && class != Class::Demand);
        ticket.map(|ticket| Job::Read(ticket, class))
    }

    /// Whether a thread for the background lane would find something.
    fn has_background(&self, low_limit: usize) -> bool {
        let may_read = self.low_reads < low_limit && self.prefetch.tickets.is_empty();
        !self.background.pieces.is_empty() || (may_read && !self.background.tickets.is_empty())
    }
}

/// The queue.
#[derive(Debug)]
pub struct Queue {
    state: Mutex<State>,
    ready: Condvar,
    background_ready: Condvar,
    low_limit: usize,
    processors: usize,
}

impl Queue {
    /// At most `low_limit` threads are in reads of lower lanes at once.
    pub fn new(low_limit: usize) -> Self {
        let (ready, background_ready) = (Condvar::new(), Condvar::new());
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { state: Mutex::default(), ready, background_ready, low_limit, processors }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// At most so many threads are in reads of lower lanes at once.
    pub fn low_limit(&self) -> usize {
        self.low_limit
    }

    /// Who waits for work of this class.
    fn waiting_for(&self, class: Class) -> &Condvar {
        match class {
            Class::Demand | Class::Prefetch => &self.ready,
            Class::Background => &self.background_ready,
        }
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
            self.waiting_for(class).notify_one();
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
            self.waiting_for(class).notify_one();
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
    pub fn wait(&self, duty: Duty) -> Job {
        let waiting = match duty {
            Duty::Urgent => &self.ready,
            Duty::Background => &self.background_ready,
        };
        let mut state = self.lock();
        loop {
            if let Some(job) = state.next(duty, self.low_limit) {
                // The last prefetch gives way to what lies behind it.
                if duty == Duty::Urgent && state.has_background(self.low_limit) {
                    self.background_ready.notify_one();
                }
                return job;
            }
            state = waiting.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The next work of one kind of thread, without waiting.
    #[cfg(test)]
    pub fn try_duty(&self, duty: Duty) -> Option<Job> {
        self.lock().next(duty, self.low_limit)
    }

    /// The next work, without waiting.
    #[cfg(test)]
    pub fn try_next(&self) -> Option<Job> {
        self.try_duty(Duty::Urgent).or_else(|| self.try_duty(Duty::Background))
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
        if !state.prefetch.tickets.is_empty() {
            self.ready.notify_one();
        } else if !state.background.tickets.is_empty() {
            self.background_ready.notify_one();
        }
    }
}
