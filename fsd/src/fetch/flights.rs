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

use super::source::adjoin;
use super::waiter::{Class, Failure, Waiter};
use layer::location::Locations;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
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
}

/// What a request did.
#[derive(Debug, Default)]
pub struct Asked {
    /// Chunks to queue.
    pub fresh: Vec<usize>,
    /// It waits for a chunk that somebody else asked for first.
    pub joined: bool,
}

/// Some neighbouring chunks that one read takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Their indexes.
    pub chunks: Range<usize>,
    /// Stored bytes of all of them.
    pub bytes: usize,
}

/// The flights of one layer.
#[derive(Debug, Default)]
pub struct Flights {
    map: Mutex<HashMap<usize, Flight>>,
}

impl Flights {
    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Flight>> {
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
                        if flight.state == State::Queued {
                            asked.fresh.push(chunk);
                        }
                    }
                }
            }
        }
        asked
    }

    /// Whether this chunk waits to be taken.
    pub fn is_queued(&self, chunk: usize) -> bool {
        self.lock().get(&chunk).is_some_and(|flight| flight.state == State::Queued)
    }

    /// Takes a queued chunk and its queued neighbours in the pack, up to `max_bytes`.
    pub fn take(&self, chunk: usize, locations: &Locations, max_bytes: usize) -> Option<Run> {
        let mut flights = self.lock();
        let placement = |index: usize| locations.placements.get(index).copied().flatten();
        let queued = |flights: &HashMap<usize, Flight>, index: usize| {
            flights
                .get(&index)
                .is_some_and(|flight| flight.state == State::Queued && !flight.history.reread)
        };
        let first = flights.get(&chunk).filter(|flight| flight.state == State::Queued)?;
        let alone = first.history.reread;
        let mut run = Run { chunks: chunk..chunk + 1, bytes: 0 };
        if let Some(own) = placement(chunk) {
            run.bytes = own.stored_bytes as usize;
            let (mut low, mut high) = (own, own);
            while !alone && queued(&flights, run.chunks.end) {
                let Some(next) = placement(run.chunks.end).filter(|next| adjoin(&high, next))
                else {
                    break;
                };
                if run.bytes + next.stored_bytes as usize > max_bytes {
                    break;
                }
                run.bytes += next.stored_bytes as usize;
                run.chunks.end += 1;
                high = next;
            }
            while !alone && run.chunks.start > 0 && queued(&flights, run.chunks.start - 1) {
                let before = placement(run.chunks.start - 1).filter(|before| adjoin(before, &low));
                let Some(before) = before else { break };
                if run.bytes + before.stored_bytes as usize > max_bytes {
                    break;
                }
                run.bytes += before.stored_bytes as usize;
                run.chunks.start -= 1;
                low = before;
            }
        }
        for index in run.chunks.clone() {
            if let Some(flight) = flights.get_mut(&index) {
                flight.state = State::Running;
            }
        }
        Some(run)
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

#[cfg(test)]
mod tests {
    use super::*;
    use layer::PackId;
    use layer::location::Placement;
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
        Waiter::new(Instant::now() + Duration::from_secs(60), Box::new(|_| ()))
    }

    #[test]
    fn neighbours_in_a_pack_are_taken_together_up_to_the_bound() {
        let flights = Flights::default();
        let places = locations(&[(0, 64, 10), (0, 74, 10), (0, 84, 10), (1, 94, 10), (1, 104, 10)]);
        flights.request(0..5, Class::Demand, &waiter(), |chunk| chunk == 4);
        let run = flights.take(1, &places, 1000).unwrap();
        assert_eq!(run, Run { chunks: 0..3, bytes: 30 });
        assert!(flights.take(0, &places, 1000).is_none(), "already taken");
        assert_eq!(flights.take(3, &places, 1000).unwrap().chunks, 3..4);

        let bounded = Flights::default();
        bounded.request(0..3, Class::Demand, &waiter(), |_| false);
        assert_eq!(bounded.take(0, &places, 25).unwrap().chunks, 0..2);
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
        let soon = Waiter::new(Instant::now(), Box::new(|_| ()));
        flights.request(0..1, Class::Demand, &soon, |_| false);
        flights.take(0, &locations(&[(0, 64, 1)]), 10).unwrap();
        let failure = Failure::from(layer::Error::corrupt("x"));
        flights.put_back(0, History::default(), Some(&failure)).unwrap();
        assert!(flights.wake(0, Instant::now() + Duration::from_secs(1)).is_none());
        assert!(soon.is_over() && flights.lock().is_empty());
    }
}
