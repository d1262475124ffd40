//! Fetching ahead what a profile says: when a layer is attached, in the order of first touch.
//!
//! One thread reads profiles from the store and feeds the engine, a window of chunks at a time, so that
//! neighbours in a pack can become one read and a detach has little to take back. What is wanted of all
//! layers lies in one line, ordered by its place in its profile. The engine keeps all of it behind demand.
//!
//! Bounded: orders, wants and the window have a limit each; what passes one is left to demand.
//!
//! Locking: one mutex around the line, never held while the engine or the store is called.

use super::plan;
use crate::fetch::{Class, Engine, FetchLayer, spawn};
use layer::profile::Step;
use layer::{EnvId, LayerId, Result};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use store::{Profiled, Store};

/// Chunks in the engine at once.
const WINDOW_CHUNKS: usize = 256;
/// Entries of the line.
const MAX_WANTS: usize = 1 << 17;
/// Layers whose profile has not been looked at.
const MAX_ORDERS: usize = 1024;
/// Profiles that are remembered, and for how long: the layers of an environment are attached together.
const REMEMBERED: usize = 8;
const FRESH: Duration = Duration::from_secs(5);

/// A layer that was attached.
#[derive(Debug)]
struct Order {
    layer: Weak<FetchLayer>,
    environment: Option<EnvId>,
}

#[derive(Debug)]
struct Entry {
    layer: Weak<FetchLayer>,
    id: LayerId,
    chunks: Range<usize>,
}

#[derive(Debug, Default)]
struct State {
    orders: VecDeque<Order>,
    line: BTreeMap<(u32, u64), Entry>,
    entered: u64,
    in_flight: usize,
}

#[derive(Debug)]
struct Shared {
    engine: Engine,
    store: Arc<Store>,
    state: Mutex<State>,
    changed: Condvar,
}

/// A handle; clones share it.
#[derive(Debug, Clone)]
pub struct Prefetcher {
    shared: Arc<Shared>,
}

enum Work {
    Look(Order),
    Fetch(Entry),
}

impl Prefetcher {
    /// Starts the thread.
    pub fn start(engine: Engine, store: Arc<Store>) -> Result<Self> {
        let state = Mutex::default();
        let shared = Arc::new(Shared { engine, store, state, changed: Condvar::new() });
        let own = Arc::clone(&shared);
        spawn("prefetch", move || own.run())?;
        Ok(Self { shared })
    }

    /// A layer was opened for somebody: fetches what the profile of its environment, or its own,
    /// says. Returns at once.
    pub fn attached(&self, layer: &Arc<FetchLayer>, environment: Option<EnvId>) {
        if layer.cached().is_complete() {
            return;
        }
        let mut state = self.shared.lock();
        if state.orders.len() < MAX_ORDERS {
            state.orders.push_back(Order { layer: Arc::downgrade(layer), environment });
            self.shared.changed.notify_one();
        }
    }

    /// Nobody uses a layer any more: what is not on its way stays where it is.
    pub fn forget(&self, layer: &LayerId) {
        self.shared.lock().line.retain(|_, entry| entry.id != *layer);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(self: &Arc<Self>) {
        let mut known = Known::default();
        loop {
            match self.next() {
                Work::Look(order) => {
                    let Some(layer) = order.layer.upgrade() else { continue };
                    let steps = known.steps(&self.store, layer.cached().id(), order.environment);
                    self.enter(&layer, &steps);
                }
                Work::Fetch(entry) => self.fetch(entry),
            }
        }
    }

    fn next(&self) -> Work {
        let mut state = self.lock();
        loop {
            if let Some(order) = state.orders.pop_front() {
                return Work::Look(order);
            }
            if state.in_flight < WINDOW_CHUNKS
                && let Some((_, entry)) = state.line.pop_first()
            {
                state.in_flight += entry.chunks.len();
                return Work::Fetch(entry);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn enter(&self, layer: &Arc<FetchLayer>, steps: &[Step]) {
        let cached = layer.cached();
        let wants = plan::wants(steps, &cached.id(), cached.table());
        if wants.is_empty() {
            return;
        }
        tracing::info!(layer = %cached.id(), reads = wants.len(), "prefetching by profile");
        let mut state = self.lock();
        for want in wants.into_iter().filter(|want| !cached.has_all(want.chunks.clone())) {
            if state.line.len() == MAX_WANTS {
                break;
            }
            state.entered += 1;
            let key = (want.place, state.entered);
            let layer = Arc::downgrade(layer);
            state.line.insert(key, Entry { layer, id: cached.id(), chunks: want.chunks });
        }
    }

    fn fetch(self: &Arc<Self>, entry: Entry) {
        let chunks = entry.chunks.len();
        let Some(layer) = entry.layer.upgrade() else { return self.over(chunks) };
        let shared = Arc::clone(self);
        // A chunk that does not come is met again, and told, by whoever reads it.
        let done = Box::new(move |_| shared.over(chunks));
        self.engine.request(&layer, entry.chunks, Class::Prefetch, done);
    }

    fn over(&self, chunks: usize) {
        let mut state = self.lock();
        state.in_flight -= chunks;
        if !state.line.is_empty() && state.in_flight < WINDOW_CHUNKS {
            self.changed.notify_one();
        }
    }
}

/// Profiles that were read a moment ago.
#[derive(Default)]
struct Known {
    profiles: Vec<(Profiled, Instant, Arc<[Step]>)>,
}

impl Known {
    /// Of the environment where it has a profile, else of the layer; no steps where neither has.
    fn steps(&mut self, store: &Store, layer: LayerId, environment: Option<EnvId>) -> Arc<[Step]> {
        let own = Profiled::Layer(layer);
        match environment.map(|id| self.read(store, Profiled::Environment(id))) {
            Some(steps) if !steps.is_empty() => steps,
            _ => self.read(store, own),
        }
    }

    fn read(&mut self, store: &Store, of: Profiled) -> Arc<[Step]> {
        self.profiles.retain(|(_, since, _)| since.elapsed() < FRESH);
        if let Some((_, _, steps)) = self.profiles.iter().find(|(known, _, _)| *known == of) {
            return Arc::clone(steps);
        }
        let steps: Arc<[Step]> = match store.read_profile(&of) {
            Ok(profile) => profile.map(|profile| profile.order()).unwrap_or_default().into(),
            Err(error) => {
                tracing::warn!(%of, error = %error.chain(), "no profile can be read");
                Arc::default()
            }
        };
        // What is absent may be recorded the next moment.
        if steps.is_empty() {
            return steps;
        }
        if self.profiles.len() == REMEMBERED {
            self.profiles.remove(0);
        }
        self.profiles.push((of, Instant::now(), Arc::clone(&steps)));
        steps
    }
}
