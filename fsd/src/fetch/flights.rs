//! Single flight: the chunks of one layer that are on their way, and who waits for each.
//!
//! ```text
//! (none) --request--> Queued --take--> Running --landed--> (none), waiters told
//!                       ^                 |---- failed --> (none), waiters told why
//!                       |--- due <-- Resting <-- retry
//! ```
//!
//! Locking: one mutex a layer, held for map operations only; never while reading, decoding or telling.
// INVARIANT: a chunk's bit is set before its flight is removed, and requests look at the bit under the
// lock, so no request misses both.

use super::waiter::{Class, Failure, Waiter};
use layer::location::{Locations, Placement};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Queued,
    Running,
    Resting,
}

/// One chunk on its way.
#[derive(Debug)]
struct Flight {
    state: State,
    class: Class,
    waiters: Vec<Arc<Waiter>>,
    history: History,
}

/// What was tried for a chunk already.
#[derive(Debug, Clone, Copy, Default)]
pub struct History {
    /// How often it was put off.
    pub rests: u32,
    /// It was read again after a wrong digest.
    pub reread: bool,
    /// It was looked for elsewhere.
    pub relocated: bool,
    /// Pages of it are in the data file and somebody reads them.
    pub shown: bool,
}

/// What a request did.
#[derive(Debug, Default)]
pub struct Asked {
    /// Chunks to queue.
    pub fresh: Vec<usize>,
    /// Chunks that became more urgent while they are read or decoded.
    pub lifted: Vec<usize>,
    /// It waits for a chunk that somebody else asked for first.
    pub joined: bool,
}

/// Some chunks that lie near each other in a pack and that one read takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Their indexes, in the order of the pack; at least one.
    pub chunks: Vec<usize>,
}

/// How far one read goes.
#[derive(Debug, Clone, Copy)]
pub struct Reach {
    /// The longest read that takes what is as urgent, in stored bytes.
    pub bytes: u64,
    /// The longest read that takes what is less urgent along.
    pub extra_bytes: u64,
    /// Bytes of others that a read may pass over to the next chunk.
    pub gap_bytes: u64,
}

/// How many chunks a read looks at on either side.
const MAX_LOOK: usize = 256;

/// The flights of one layer.
#[derive(Debug, Default)]
pub struct Flights {
    /// In order, so that a read looks only at those that are on their way around its chunk.
    map: Mutex<BTreeMap<usize, Flight>>,
}

impl Flights {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Flight>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets `waiter` wait for the chunks that `present` denies, starting flights where none is.
    pub fn request(
        &self,
        chunks: Range<usize>,
        class: Class,
        waiter: &Arc<Waiter>,
        present: impl Fn(usize) -> bool,
    ) -> Asked {
        let mut asked = Asked::default();
        let mut flights = self.lock();
        for chunk in chunks {
            if present(chunk) {
                continue;
            }
            waiter.add();
            match flights.entry(chunk) {
                Entry::Vacant(vacant) => {
                    vacant.insert(Flight {
                        state: State::Queued,
                        class,
                        waiters: vec![Arc::clone(waiter)],
                        history: History::default(),
                    });
                    asked.fresh.push(chunk);
                }
                Entry::Occupied(mut occupied) => {
                    let flight = occupied.get_mut();
                    flight.waiters.push(Arc::clone(waiter));
                    asked.joined = true;
                    if class < flight.class {
                        flight.class = class;
                        match flight.state {
                            State::Queued => asked.fresh.push(chunk),
                            State::Running => asked.lifted.push(chunk),
                            State::Resting => {}
                        }
                    }
                }
            }
        }
        asked
    }

    /// Whether nothing is on its way.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Whether this chunk waits to be taken.
    pub fn is_queued(&self, chunk: usize) -> bool {
        self.lock().get(&chunk).is_some_and(|flight| flight.state == State::Queued)
    }

    /// Takes a queued chunk and its queued neighbours in the pack, as far as `reach` goes.
    pub fn take(&self, chunk: usize, locations: &Locations, reach: Reach) -> Option<Run> {
        let mut flights = self.lock();
        let first = flights.get(&chunk).filter(|flight| flight.state == State::Queued)?;
        let (alone, class) = (first.history.reread, first.class);
        let mut chunks = VecDeque::from([chunk]);
        if let Some(own) = locations.placements.get(chunk).copied().flatten()
            && !alone
        {
            let (mut start, mut end) = (own.offset, end_of(&own));
            // What is not wanted may lie anywhere, and bytes between two that are may be skipped.
            let wanted = |(index, flight): (&usize, &Flight)| {
                let takes = flight.state == State::Queued && !flight.history.reread;
                let more = if flight.class <= class { reach.bytes } else { reach.extra_bytes };
                let place = locations.placements.get(*index).copied().flatten()?;
                takes.then_some((*index, place, more))
            };
            let after = flights.range(chunk + 1..=chunk.saturating_add(MAX_LOOK));
            for (index, next, longest) in after.filter_map(wanted) {
                if next.pack != own.pack || next.offset < end || next.offset - end > reach.gap_bytes
                {
                    break;
                }
                if end_of(&next) - start > longest {
                    break;
                }
                end = end_of(&next);
                chunks.push_back(index);
            }
            let ahead = flights.range(chunk.saturating_sub(MAX_LOOK)..chunk).rev();
            for (index, before, longest) in ahead.filter_map(wanted) {
                let stop = end_of(&before);
                if before.pack != own.pack || stop > start || start - stop > reach.gap_bytes {
                    break;
                }
                if end - before.offset > longest {
                    break;
                }
                start = before.offset;
                chunks.push_front(index);
            }
        }
        for index in &chunks {
            if let Some(flight) = flights.get_mut(index) {
                flight.state = State::Running;
            }
        }
        Some(Run { chunks: chunks.into() })
    }

    /// The part of a running chunk, whose place in the data file is `chunk_bytes`, that readers of the file wait
    /// for and that lets them go on before the rest is there; nothing where they need all of it.
    pub fn pages(&self, chunk: usize, chunk_bytes: &Range<u64>) -> Option<Range<u64>> {
        let flights = self.lock();
        let waiters = flights.get(&chunk)?.waiters.iter();
        let pages = waiters.filter_map(|waiter| waiter.pages_in(chunk_bytes));
        let pages = pages.filter(|pages| pages != chunk_bytes);
        let hull = pages.reduce(|one, other| one.start.min(other.start)..one.end.max(other.end))?;
        (hull != *chunk_bytes).then_some(hull)
    }

    /// These pages of a running chunk are in the data file, which [`Flights::pages`] asked for: tells who
    /// waited for no more.
    pub fn pages_landed(&self, chunk: usize, chunk_bytes: &Range<u64>, pages: &Range<u64>) {
        let mut flights = self.lock();
        let Some(flight) = flights.get_mut(&chunk) else { return };
        let told = flight.waiters.extract_if(.., |waiter| {
            let needs = waiter.pages_in(chunk_bytes);
            needs.is_some_and(|needs| pages.start <= needs.start && needs.end <= pages.end)
        });
        let told: Vec<_> = told.collect();
        flight.history.shown = true;
        drop(flights);
        told.iter().for_each(|waiter| waiter.arrived());
    }

    /// The chunk is in the data file and its bit is set: tells who waited.
    pub fn landed(&self, chunk: usize) {
        let flight = self.lock().remove(&chunk);
        for waiter in flight.into_iter().flat_map(|flight| flight.waiters) {
            waiter.arrived();
        }
    }

    /// The chunk does not come: tells who waited.
    pub fn failed(&self, chunk: usize, failure: &Failure) {
        let flight = self.lock().remove(&chunk);
        for waiter in flight.into_iter().flat_map(|flight| flight.waiters) {
            waiter.fail(failure);
        }
    }

    /// What was tried for a chunk.
    pub fn history(&self, chunk: usize) -> History {
        self.lock().get(&chunk).map(|flight| flight.history).unwrap_or_default()
    }

    /// Whether a blocked reader waits for a chunk.
    pub fn is_demanded(&self, chunk: usize) -> bool {
        self.lock().get(&chunk).is_some_and(|flight| flight.class == Class::Demand)
    }

    /// Puts a running chunk back: at once, or to rest until [`Flights::wake`].
    pub fn put_back(
        &self,
        chunk: usize,
        history: History,
        delay: Option<&Failure>,
    ) -> Option<Class> {
        let mut flights = self.lock();
        let flight = flights.get_mut(&chunk)?;
        flight.history = history;
        flight.state = if delay.is_some() { State::Resting } else { State::Queued };
        for waiter in &flight.waiters {
            if let Some(failure) = delay {
                waiter.delayed(failure);
            }
        }
        Some(flight.class)
    }

    /// Ends the rest of a chunk. Answers its class, or nothing when nobody waits for it any more.
    pub fn wake(&self, chunk: usize, now: Instant) -> Option<Class> {
        let mut flights = self.lock();
        let flight = flights.get_mut(&chunk).filter(|flight| flight.state == State::Resting)?;
        flight.waiters.retain(|waiter| !waiter.is_over());
        let wanted = flight.waiters.iter().any(|waiter| waiter.deadline() > now);
        if !wanted {
            let flight = flights.remove(&chunk);
            drop(flights);
            for waiter in flight.into_iter().flat_map(|flight| flight.waiters) {
                waiter.expire();
            }
            return None;
        }
        flight.state = State::Queued;
        Some(flight.class)
    }
}

/// Where a chunk ends in its pack.
pub fn end_of(place: &Placement) -> u64 {
    place.offset + u64::from(place.stored_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use layer::PackId;
    use layer::pack::Codec;
    use std::time::Duration;

    fn locations(places: &[(u32, u64, u32)]) -> Locations {
        let placements = places
            .iter()
            .map(|(pack, offset, stored_bytes)| {
                let (pack, offset, stored_bytes) = (*pack, *offset, *stored_bytes);
                Some(Placement { pack, offset, stored_bytes, codec: Codec::Zstd })
            })
            .collect();
        Locations { packs: vec![PackId([0; 16]), PackId([1; 16])], placements }
    }

    fn waiter() -> Arc<Waiter> {
        Waiter::new(Instant::now() + Duration::from_secs(60), None, Box::new(|_| ()))
    }

    const REACH: Reach = Reach { bytes: 1000, extra_bytes: 1000, gap_bytes: 0 };

    fn taken(flights: &Flights, chunk: usize, places: &Locations, reach: Reach) -> Vec<usize> {
        flights.take(chunk, places, reach).map(|run| run.chunks).unwrap_or_default()
    }

    #[test]
    fn neighbours_in_a_pack_are_taken_together_up_to_the_bound() {
        let flights = Flights::default();
        let places = locations(&[(0, 64, 10), (0, 74, 10), (0, 84, 10), (1, 94, 10), (1, 104, 10)]);
        flights.request(0..5, Class::Demand, &waiter(), |chunk| chunk == 4);
        assert_eq!(taken(&flights, 1, &places, REACH), [0, 1, 2]);
        assert!(flights.take(0, &places, REACH).is_none(), "already taken");
        assert_eq!(taken(&flights, 3, &places, REACH), [3]);

        let bounded = Flights::default();
        bounded.request(0..3, Class::Demand, &waiter(), |_| false);
        assert_eq!(taken(&bounded, 0, &places, Reach { bytes: 25, ..REACH }), [0, 1]);
    }

    #[test]
    fn a_read_passes_over_small_gaps_only() {
        let flights = Flights::default();
        let places = locations(&[(0, 64, 10), (0, 74, 10), (0, 84, 10), (0, 120, 10), (0, 30, 10)]);
        flights.request(0..5, Class::Prefetch, &waiter(), |chunk| chunk == 1);
        assert_eq!(taken(&flights, 2, &places, Reach { gap_bytes: 10, ..REACH }), [0, 2]);
        assert_eq!(taken(&flights, 3, &places, Reach { gap_bytes: 10, ..REACH }), [3]);
        assert_eq!(taken(&flights, 4, &places, REACH), [4], "backwards in the pack");
    }

    #[test]
    fn a_demand_takes_little_of_what_nobody_waits_for() {
        let places = locations(&[(0, 0, 10), (0, 10, 10), (0, 20, 10), (0, 30, 10)]);
        let reach = Reach { bytes: 1000, extra_bytes: 20, gap_bytes: 0 };
        let flights = Flights::default();
        flights.request(0..4, Class::Prefetch, &waiter(), |_| false);
        flights.request(1..2, Class::Demand, &waiter(), |_| false);
        assert_eq!(taken(&flights, 1, &places, reach), [1, 2]);
        // A prefetch takes along what became urgent.
        let flights = Flights::default();
        flights.request(0..4, Class::Prefetch, &waiter(), |_| false);
        flights.request(3..4, Class::Demand, &waiter(), |_| false);
        assert_eq!(taken(&flights, 0, &places, reach), [0, 1, 2, 3]);
    }

    #[test]
    fn a_demand_lifts_what_is_on_its_way() {
        let flights = Flights::default();
        let places = locations(&[(0, 0, 10), (0, 10, 10)]);
        flights.request(0..2, Class::Prefetch, &waiter(), |_| false);
        taken(&flights, 0, &places, Reach { bytes: 10, ..REACH });
        let asked = flights.request(0..2, Class::Demand, &waiter(), |_| false);
        assert_eq!((asked.lifted, asked.fresh), (vec![0], vec![1]));
    }

    #[test]
    fn a_second_request_joins_and_lifts_the_class() {
        let flights = Flights::default();
        let first = flights.request(0..1, Class::Background, &waiter(), |_| false);
        assert_eq!((first.fresh.as_slice(), first.joined), (&[0][..], false));
        let second = flights.request(0..1, Class::Demand, &waiter(), |_| false);
        assert_eq!((second.fresh.as_slice(), second.joined), (&[0][..], true));
        let third = flights.request(0..1, Class::Prefetch, &waiter(), |_| false);
        assert!(third.fresh.is_empty() && third.joined);
    }

    #[test]
    fn a_resting_chunk_that_nobody_waits_for_is_given_up() {
        let flights = Flights::default();
        let soon = Waiter::new(Instant::now(), None, Box::new(|_| ()));
        flights.request(0..1, Class::Demand, &soon, |_| false);
        flights.take(0, &locations(&[(0, 64, 1)]), REACH).unwrap();
        let failure = Failure::from(layer::Error::corrupt("x"));
        flights.put_back(0, History::default(), Some(&failure)).unwrap();
        assert!(flights.wake(0, Instant::now() + Duration::from_secs(1)).is_none());
        assert!(soon.is_over() && flights.lock().is_empty());
    }
}
