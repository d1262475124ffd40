//! The one fetch engine under all planes: `ensure` that chunks are in a layer's data file.
//!
//! A request starts a flight for every chunk that is neither there nor on its way, joins the others,
//! and is told once when all are there or one cannot come. Fill threads take queued chunks with their
//! neighbours in the pack, read them in one go, decode and verify each, write it, and tell.
//!
//! Failures: a wrong digest is read again from the store once, then looked for elsewhere; a pack that
//! is gone is looked for elsewhere; a store that cannot be reached and a disk without room are tried
//! again, with growing pauses, until the deadline of those who wait. A deadline passes even while a
//! read hangs.
//!
//! Locking: see the parts. Threads hold no lock while they read, decode, write or tell.

mod buffers;
mod flights;
mod outage;
mod queue;
mod siblings;
mod source;
mod steps;
mod timer;
mod waiter;
mod worker;

#[cfg(test)]
mod lanes;
#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;

pub use source::{Locator, Source, StoreCounters};
pub use waiter::{Class, Done, Failure};

use crate::cache::{CachedLayer, Space};
use crate::clock::{Clock, SystemClock};
use crate::incidents::Incidents;
use buffers::Buffers;
use flights::Flights;
use layer::{ChunkDigest, Context, Result};
use outage::Outage;
use queue::{Duty, Queue};
use siblings::Siblings;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use timer::{Due, Timer};
use waiter::Waiter;

/// Chunks that one `complete` has in flight at once.
const COMPLETE_WINDOW: usize = 64;
/// How long a load under a rate sleeps before it looks whether it is wanted still.
const LONGEST_REST: Duration = Duration::from_millis(100);
/// How long a background chunk may take before `complete` gives up.
const BACKGROUND_DEADLINE: Duration = Duration::from_secs(600);

/// Where room can be made when the cache disk is full.
pub trait MakeRoom: Send + Sync {
    /// Drops something that nobody uses; false when there is nothing to drop.
    fn make_room(&self) -> bool;

    /// A layer that nobody uses and that has this chunk.
    fn dormant(&self, digest: &ChunkDigest) -> Option<(Arc<CachedLayer>, usize)>;
}

/// Settings of the engine.
#[derive(Debug, Clone)]
pub struct FetchSettings {
    /// How long a demand may wait.
    pub deadline: Duration,
    /// How long a disk may be full, with nothing to evict, before demands are refused.
    pub full_disk_deadline: Duration,
    /// Threads that read and decode.
    pub threads: usize,
}

/// What the engine did since it was made.
#[derive(Debug, Default)]
pub struct FetchCounters {
    /// Chunks filled.
    pub fills: AtomicU64,
    /// Of them, taken from another layer on this node.
    pub copies: AtomicU64,
    /// Of those, without copying: the files share their blocks.
    pub shared: AtomicU64,
    /// Plain bytes filled.
    pub filled_bytes: AtomicU64,
    /// Chunks whose bytes did not have their digest.
    pub verify_failures: AtomicU64,
    /// Plain bytes read for readers and not kept.
    pub uncached_bytes: AtomicU64,
}

/// A cached layer with what it takes to fetch its chunks.
#[derive(Debug)]
pub struct FetchLayer {
    cached: Arc<CachedLayer>,
    source: Source,
    flights: Flights,
    fills: AtomicU64,
    verify_failures: AtomicU64,
}

impl FetchLayer {
    /// Nothing is on its way yet.
    pub fn new(cached: Arc<CachedLayer>, source: Source) -> Arc<Self> {
        let (flights, fills) = (Flights::default(), AtomicU64::new(0));
        let verify_failures = AtomicU64::new(0);
        Arc::new(Self { cached, source, flights, fills, verify_failures })
    }

    /// The layer in the cache.
    pub fn cached(&self) -> &Arc<CachedLayer> {
        &self.cached
    }

    /// Reads the location hint beside what the caller does next, so that the first reader does not wait for
    /// it. What fails is met again, and told, by that reader.
    pub fn locate_ahead(self: &Arc<Self>) {
        let layer = Arc::clone(self);
        let started = spawn("locate", move || layer.source.look_ahead());
        if let Err(error) = started {
            tracing::debug!(error = %error.chain(), "locations are read when they are needed");
        }
    }

    fn flights(&self) -> &Flights {
        &self.flights
    }

    /// Chunks filled since this value was made.
    pub fn fills(&self) -> u64 {
        self.fills.load(Ordering::Relaxed)
    }

    /// Reads of the store whose bytes did not have their digest.
    pub fn verify_failures(&self) -> u64 {
        self.verify_failures.load(Ordering::Relaxed)
    }
}

/// How a request was met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Met {
    /// It waits only for chunks that it asked for itself.
    Started,
    /// It waits also for what others asked for.
    Joined,
}

#[derive(Debug)]
struct Inner {
    settings: FetchSettings,
    clock: Arc<dyn Clock>,
    queue: Queue,
    timer: Timer,
    buffers: Arc<Buffers>,
    counters: FetchCounters,
    space: SpaceGuard,
    store_away: Outage,
    disk_full: Outage,
    siblings: Siblings,
    incidents: Incidents,
}

impl Inner {
    /// Tells those whose deadline has passed, and queues what has rested.
    fn ring(&self, due: Due) {
        for waiter in due.expired {
            waiter.expire();
        }
        let now = self.clock.now();
        for queue::Ticket { layer, chunk } in due.rested {
            if let Some(class) = layer.flights.wake(chunk, now) {
                self.queue.push(&layer, &[chunk], class, true);
            }
        }
    }
}

/// How much room the cache disk has.
pub trait Room: std::fmt::Debug + Send + Sync {
    /// `NoSpace` when there is none for so many bytes more.
    fn check(&self, bytes: u64) -> Result<()>;

    /// Something was freed: measure again at the next check.
    fn forget(&self);
}

impl Room for Space {
    fn check(&self, bytes: u64) -> Result<()> {
        Space::check(self, bytes)
    }

    fn forget(&self) {
        Space::forget(self);
    }
}

/// The disk's room and who can make more of it.
struct SpaceGuard {
    space: Box<dyn Room>,
    make_room: Mutex<Option<Arc<dyn MakeRoom>>>,
}

impl std::fmt::Debug for SpaceGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.space.fmt(f)
    }
}

impl SpaceGuard {
    /// Who was set to make room.
    fn owner(&self) -> Option<Arc<dyn MakeRoom>> {
        self.make_room.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(Arc::clone)
    }

    /// `NoSpace` when the disk has no room for this and none can be made.
    fn check(&self, bytes: u64) -> Result<()> {
        let Err(full) = self.space.check(bytes) else { return Ok(()) };
        let make_room = self.owner();
        while make_room.as_ref().is_some_and(|make_room| make_room.make_room()) {
            self.space.forget();
            if self.space.check(bytes).is_ok() {
                return Ok(());
            }
        }
        Err(full)
    }
}

/// What somebody waits for, and until when.
#[derive(Debug, Clone)]
struct Wanted {
    layer: Arc<FetchLayer>,
    chunks: Range<usize>,
    class: Class,
    deadline: Instant,
    /// Where no more of the chunks is wanted than these bytes of the data file.
    pages: Option<Pages>,
}

/// Bytes of a data file that somebody waits for who will read that file himself.
#[derive(Debug, Clone)]
struct Pages {
    bytes: Range<u64>,
    /// What had been lost of the layer when they were asked for.
    losses: u64,
}

impl Wanted {
    /// Whether all of it is in the data file, after every chunk of it has come once.
    fn is_there(&self) -> bool {
        // What came stays while nothing is lost, also pages of a chunk that is not whole yet.
        let nothing_lost = |pages: &Pages| pages.losses == self.layer.cached.losses();
        self.pages.as_ref().is_some_and(nothing_lost)
            || self.layer.cached.has_all(self.chunks.clone())
    }
}

/// The engine: a handle; clones share it.
#[derive(Debug, Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

impl Engine {
    /// Starts the threads.
    pub fn start(settings: FetchSettings, space: Space) -> Result<Self> {
        let threads = settings.threads.max(1);
        let Self { inner } = Self::idle(settings, Box::new(space), Arc::new(SystemClock));
        for index in 0..threads {
            let inner = Arc::clone(&inner);
            spawn(&format!("fill-{index}"), move || worker::run(&inner, Duty::Urgent))?;
        }
        for index in 0..inner.queue.low_limit() {
            let inner = Arc::clone(&inner);
            spawn(&format!("background-{index}"), move || worker::run_background(&inner))?;
        }
        let timing = Arc::clone(&inner);
        spawn("fill-timer", move || worker::run_timer(&timing))?;
        Ok(Self { inner })
    }

    /// An engine without threads: somebody else carries its steps.
    fn idle(settings: FetchSettings, space: Box<dyn Room>, clock: Arc<dyn Clock>) -> Self {
        let inner = Arc::new(Inner {
            clock,
            queue: Queue::new((settings.threads / 2).max(1)),
            timer: Timer::default(),
            buffers: Arc::default(),
            counters: FetchCounters::default(),
            space: SpaceGuard { space, make_room: Mutex::new(None) },
            store_away: Outage::default(),
            disk_full: Outage::default(),
            siblings: Siblings::default(),
            incidents: Incidents::default(),
            settings,
        });
        Self { inner }
    }

    /// Who is asked to make room when the disk is full.
    pub fn set_make_room(&self, make_room: Arc<dyn MakeRoom>) {
        *self.inner.space.make_room.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(make_room);
    }

    /// Lets chunks of this layer be copied into others.
    pub fn add_sibling(&self, layer: &Arc<FetchLayer>) {
        self.inner.siblings.add(layer);
    }

    /// What went wrong lately.
    pub fn incidents(&self) -> &Incidents {
        &self.inner.incidents
    }

    /// How long a demand waits for room on a full disk.
    pub fn full_disk_deadline(&self) -> Duration {
        self.inner.settings.full_disk_deadline
    }

    /// Whether the cache disk is full with nothing to evict.
    pub fn disk_is_full(&self) -> bool {
        !self.inner.disk_full.begins()
    }

    /// What was done so far.
    pub fn counters(&self) -> &FetchCounters {
        &self.inner.counters
    }

    /// Calls `done` once these chunks are in the data file, or with the reason why not.
    pub fn request(
        &self,
        layer: &Arc<FetchLayer>,
        chunks: Range<usize>,
        class: Class,
        done: Done,
    ) -> Met {
        let deadline = match class {
            Class::Demand => self.inner.settings.deadline,
            Class::Prefetch | Class::Background => BACKGROUND_DEADLINE,
        };
        self.want(self.wanted(layer, chunks, class, deadline), true, done)
    }

    /// Fetches chunks that will probably be read soon, behind all demand.
    pub fn prefetch(&self, layer: &Arc<FetchLayer>, chunks: Range<usize>) {
        self.request(layer, chunks, Class::Prefetch, Box::new(|_| ()));
    }

    /// As a demand [`Engine::request`], for somebody who reads the data file himself and no more of it than
    /// `bytes`, whole pages: `done` is called once these are in it, and the rest of their chunks follows.
    ///
    /// Where `fills`, the calling thread does the first read itself. For one that has nothing else to do: it
    /// saves waking another one.
    // INVARIANT: the bytes are verified, with all of their chunk, before they are written.
    pub fn page_in(
        &self,
        layer: &Arc<FetchLayer>,
        bytes: Range<u64>,
        fills: bool,
        done: Done,
    ) -> Met {
        let chunks =
            layer.cached.table().covering(bytes.start, bytes.end.saturating_sub(bytes.start));
        let mut wanted = self.wanted(layer, chunks, Class::Demand, self.inner.settings.deadline);
        wanted.pages = Some(Pages { bytes, losses: layer.cached.losses() });
        let met = self.want(wanted, !fills, done);
        if fills {
            worker::fill_one_demand(&self.inner);
        }
        met
    }

    fn wanted(
        &self,
        layer: &Arc<FetchLayer>,
        chunks: Range<usize>,
        class: Class,
        patience: Duration,
    ) -> Wanted {
        let deadline = self.inner.clock.now() + patience;
        Wanted { layer: Arc::clone(layer), chunks, class, deadline, pages: None }
    }

    /// Calls `done` once all that is wanted is there.
    fn want(&self, wanted: Wanted, wake: bool, done: Done) -> Met {
        let (engine, mut again) = (self.clone(), wanted.clone());
        // INVARIANT: whoever is told finds all of it. While the last chunks were on their way, the first may
        // have been evicted, or lost by a failed write-back.
        let waiter = Waiter::new(
            wanted.deadline,
            wanted.pages.as_ref().map(|pages| pages.bytes.clone()),
            Box::new(move |result| {
                if result.is_ok() && !again.is_there() {
                    if let Some(pages) = &mut again.pages {
                        pages.losses = again.layer.cached.losses();
                    }
                    engine.want(again, true, done);
                } else {
                    done(result);
                }
            }),
        );
        let Wanted { layer, chunks, class, .. } = wanted;
        let asked = layer.flights.request(chunks, class, &waiter, |chunk| layer.cached.has(chunk));
        self.inner.queue.push(&layer, &asked.fresh, class, wake);
        self.inner.queue.lift(&layer, &asked.lifted);
        // The guard goes last, so that the waiter is not told before every chunk was added.
        waiter.arrived();
        if !waiter.is_over() {
            self.inner.timer.watch(waiter);
        }
        if asked.joined { Met::Joined } else { Met::Started }
    }

    /// As [`Engine::request`], and waits.
    pub fn ensure(
        &self,
        layer: &Arc<FetchLayer>,
        chunks: Range<usize>,
        class: Class,
    ) -> Result<(), Failure> {
        let (tell, told) = crossbeam_channel::bounded(1);
        let done = Box::new(move |result| {
            // The other end waits below and goes away only with the answer.
            let _ = tell.send(result);
        });
        self.request(layer, chunks, class, done);
        told.recv().unwrap_or_else(|_| {
            Err(layer::Error::new(layer::ErrorKind::Internal, "a fill was forgotten").into())
        })
    }

    /// Loads a whole layer behind all demand, a window at a time and at most `rate` plain bytes a second
    /// (0 is no limit), until `goes_on` says no. Answers the plain bytes filled. What is there already is
    /// passed over, so one that was broken off goes on where it was.
    pub fn complete(
        &self,
        layer: &Arc<FetchLayer>,
        rate: u64,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<u64> {
        let before = layer.cached.filled_bytes();
        let chunks = layer.cached.table().len();
        // Short windows under a low rate, so that it holds within a part of a second.
        let step = match rate {
            0 => COMPLETE_WINDOW,
            rate => {
                usize::try_from(rate >> 20).unwrap_or(COMPLETE_WINDOW).clamp(1, COMPLETE_WINDOW)
            }
        };
        let begin = Instant::now();
        for start in (0..chunks).step_by(step) {
            let window = start..(start + step).min(chunks);
            if layer.cached.has_all(window.clone()) {
                continue;
            }
            if !goes_on() {
                break;
            }
            self.ensure(layer, window, Class::Background)
                .map_err(|failure| failure.to_error())
                .context(|| format!("complete layer {}", layer.cached.id()))?;
            if rate > 0 {
                let filled = layer.cached.filled_bytes().saturating_sub(before);
                let due = Duration::from_secs_f64(filled as f64 / rate as f64);
                // Others may bring the rest meanwhile.
                rest(begin + due, &|| goes_on() && !layer.cached.is_complete());
            }
        }
        Ok(layer.cached.filled_bytes() - before)
    }

    /// Whether the cache disk has room for this much, or some can be made.
    pub fn has_room(&self, bytes: u64) -> bool {
        self.inner.space.check(bytes).is_ok()
    }

    /// Reads and verifies one chunk without keeping it: for planes that answer reads themselves while
    /// the disk is full.
    pub fn read_uncached(&self, layer: &Arc<FetchLayer>, chunk: usize) -> Result<Vec<u8>> {
        let plain = steps::read_uncached(&self.inner, layer, chunk)?;
        self.inner.counters.uncached_bytes.fetch_add(plain.len() as u64, Ordering::Relaxed);
        Ok(plain)
    }
}

/// Sleeps until then, or until there is nothing to go on with.
fn rest(until: Instant, goes_on: &dyn Fn() -> bool) {
    while goes_on()
        && let Some(left) = until.checked_duration_since(Instant::now())
    {
        std::thread::sleep(left.min(LONGEST_REST));
    }
}

/// Ends the process when its thread panics.
///
/// A thread of ours that dies alone would leave readers waiting; a process that dies is taken over
/// from by the next one, with every event that it owed.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Starts a named thread; a panic in it ends the process.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .stack_size(512 << 10)
        .spawn(move || {
            let _abort = AbortOnPanic;
            body();
        })
        .map(|_| ())
        .context(|| format!("start thread {name}"))
}
