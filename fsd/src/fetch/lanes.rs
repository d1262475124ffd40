//! The lanes over a scripted store: every read of a pack stands at a gate until the test lets it pass, so
//! what is read before what is no matter of speed.

use super::queue::{Duty, Job};
use super::*;
use crate::cache::{CacheSettings, NodeCache};
use crate::known_layer::{self, noise};
use layer::location::Placement;
use layer::{Error, LayerId};
use std::sync::Condvar;
use store::backend::memory::Memory;
use store::{Backend, Key, Store, Upload};

const CHUNKS: usize = 200;
const THREADS: usize = 4;
/// Reads of lower lanes that may run at once with so many threads.
const LOW_READS: usize = 2;

/// Which chunks the reads that have come ask for, and how many may pass.
#[derive(Debug, Default)]
struct Gate {
    came: Vec<Range<u64>>,
    passed: Vec<Range<u64>>,
    open: bool,
}

#[derive(Debug)]
struct Gated {
    memory: Memory,
    gate: Mutex<Gate>,
    moved: Condvar,
}

impl Gated {
    /// Waits until so many reads have come, and answers them in order of their coming.
    fn came(&self, count: usize) -> Vec<Range<u64>> {
        let gate = self.gate.lock().unwrap();
        self.moved.wait_while(gate, |gate| gate.came.len() < count).unwrap().came.clone()
    }

    fn let_pass(&self, range: &Range<u64>) {
        self.gate.lock().unwrap().passed.push(range.clone());
        self.moved.notify_all();
    }

    fn open(&self) {
        self.gate.lock().unwrap().open = true;
        self.moved.notify_all();
    }
}

impl Backend for Gated {
    fn read_at(&self, key: &Key, offset: u64, into: &mut [u8]) -> Result<()> {
        if key.as_str().starts_with("packs/") {
            let range = offset..offset + into.len() as u64;
            let mut gate = self.gate.lock().unwrap();
            gate.came.push(range.clone());
            self.moved.notify_all();
            drop(self.moved.wait_while(gate, |gate| !gate.open && !gate.passed.contains(&range)));
        }
        self.memory.read_at(key, offset, into)
    }
    fn read_all(&self, key: &Key, max_bytes: u64) -> Result<Vec<u8>> {
        self.memory.read_all(key, max_bytes)
    }
    fn size(&self, key: &Key) -> Result<u64> {
        self.memory.size(key)
    }
    fn create(&self, key: &Key) -> Result<Box<dyn Upload>> {
        self.memory.create(key)
    }
    fn list(&self, prefix: &str, start_after: Option<&str>, limit: usize) -> Result<Vec<String>> {
        self.memory.list(prefix, start_after, limit)
    }
    fn delete(&self, key: &Key) -> Result<()> {
        self.memory.delete(key)
    }
    fn describe(&self) -> String {
        "a gate".to_owned()
    }
}

struct Nobody;

impl Locator for Nobody {
    fn locate(&self, _layer: &LayerId) -> Result<()> {
        Err(Error::not_found("no imaged here"))
    }
}

struct World {
    _folder: tempfile::TempDir,
    gated: Arc<Gated>,
    layer: Arc<FetchLayer>,
    engine: Engine,
    places: Vec<Placement>,
}

/// All chunks lie one behind the other in one pack. Without `threads` nothing moves by itself.
fn world(threads: bool) -> World {
    let gated =
        Arc::new(Gated { memory: Memory::new(), gate: Mutex::default(), moved: Condvar::new() });
    let store = Arc::new(Store::open(Arc::clone(&gated) as Arc<dyn Backend>).unwrap());
    let id = known_layer::put_layer(&store, CHUNKS, noise);
    let locations = known_layer::put_pack(&store, CHUNKS, noise);
    let places: Vec<Placement> = locations.placements.iter().copied().flatten().collect();
    store.put_locations(&id, &locations).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let cache = NodeCache::open(folder.path(), CacheSettings::default()).unwrap();
    let cached = Arc::new(cache.open_layer(&id, &store, None).unwrap());
    let counters = Arc::new(StoreCounters::default());
    let source = Source::new(id, CHUNKS, store, Arc::new(Nobody), counters);
    let deadline = Duration::from_secs(600);
    let settings = FetchSettings { deadline, full_disk_deadline: deadline, threads: THREADS };
    let engine = match threads {
        true => Engine::start(settings, cache.space().clone()).unwrap(),
        false => Engine::idle(settings, Box::new(cache.space().clone()), Arc::new(SystemClock)),
    };
    World { _folder: folder, gated, layer: FetchLayer::new(cached, source), engine, places }
}

impl World {
    fn ask(&self, chunks: Range<usize>, class: Class) -> crossbeam_channel::Receiver<bool> {
        let (tell, told) = crossbeam_channel::bounded(1);
        let done = Box::new(move |result: Result<(), Failure>| tell.send(result.is_ok()).unwrap());
        self.engine.request(&self.layer, chunks, class, done);
        told
    }

    fn covers(&self, read: &Range<u64>, chunk: usize) -> bool {
        read.contains(&self.places[chunk].offset)
    }
}

#[test]
fn a_demand_waits_for_no_prefetch_and_a_prefetch_for_no_background() {
    let world = world(true);
    let background = world.ask(100..CHUNKS, Class::Background);
    let first = world.gated.came(1);
    let prefetch = world.ask(0..100, Class::Prefetch);
    let low = world.gated.came(LOW_READS);
    assert!(low.len() == LOW_READS && world.covers(&first[0], 100));
    // Both low reads stand at the gate; others of their lanes wait, and still a thread is free.
    let demand = world.ask(60..61, Class::Demand);
    let all = world.gated.came(LOW_READS + 1);
    assert_eq!(all.len(), LOW_READS + 1);
    let urgent = &all[LOW_READS];
    assert!(world.covers(urgent, 60));
    assert!(urgent.end - urgent.start <= 288 << 10, "a demand takes little along: {urgent:?}");
    world.gated.let_pass(urgent);
    assert!(demand.recv().unwrap());
    assert!(!world.layer.cached().has(0) && !world.layer.cached().has(100));
    // A low read that ends makes room for one of the prefetch lane, though background is older.
    world.gated.let_pass(&first[0]);
    let next = world.gated.came(LOW_READS + 2);
    assert!((0..100).any(|chunk| world.covers(&next[LOW_READS + 1], chunk)), "{next:?}");
    world.gated.open();
    assert!(prefetch.recv().unwrap() && background.recv().unwrap());
    let longest = world.gated.came(0).iter().map(|read| read.end - read.start).max().unwrap();
    assert!(longest <= 256 << 10, "lower lanes read little at once: {longest}");
}

#[test]
fn the_queue_gives_out_the_most_urgent_first() {
    let world = world(false);
    let queue = &world.engine.inner.queue;
    let _background = world.ask(0..1, Class::Background);
    let _prefetch = world.ask(50..51, Class::Prefetch);
    let _demand = world.ask(100..101, Class::Demand);
    // A demand for what is queued as prefetch stands in both lanes; the flight is taken once.
    let _promoted = world.ask(50..51, Class::Demand);
    let mut order = Vec::new();
    while let Some(Job::Read(ticket, class)) = queue.try_next() {
        order.push((ticket.chunk, class));
        if class != Class::Demand {
            queue.low_read_over();
        }
    }
    let expected =
        [(100, Class::Demand), (50, Class::Demand), (50, Class::Prefetch), (0, Class::Background)];
    assert_eq!(order, expected);
}

#[test]
fn no_thread_for_demand_does_background_work() {
    let world = world(false);
    let queue = &world.engine.inner.queue;
    world.gated.open();
    let _background = world.ask(0..1, Class::Background);
    assert!(queue.try_duty(Duty::Urgent).is_none());
    let _prefetch = world.ask(50..51, Class::Prefetch);
    assert!(queue.try_duty(Duty::Background).is_none(), "a prefetch waits");
    let Some(Job::Read(ticket, class)) = queue.try_duty(Duty::Urgent) else {
        panic!("no prefetch")
    };
    assert_eq!((ticket.chunk, class), (50, Class::Prefetch));
    let Some(Job::Read(ticket, class)) = queue.try_duty(Duty::Background) else { panic!("none") };
    worker::carry(&world.engine.inner, steps::Step::Take(ticket, class), class);
    assert!(queue.try_duty(Duty::Urgent).is_none(), "what it read is decoded by its own threads");
    assert!(
        matches!(queue.try_duty(Duty::Background), Some(Job::Decode(piece)) if piece.chunk == 0)
    );
}

/// The names of the threads of this process that stand back, from the fields behind the name.
fn threads_that_stand_back() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    let nice = |stat: &String| -> Option<String> {
        let (head, tail) = stat.rsplit_once(") ")?;
        let nice: i32 = tail.split(' ').nth(16)?.parse().ok()?;
        (nice == 10).then(|| head.split_once('(').map(|(_, name)| name.to_owned()))?
    };
    stats.filter_map(|stat| nice(&stat)).collect()
}

#[test]
fn background_work_stands_back_on_the_processors() {
    let world = world(true);
    world.gated.open();
    assert!(world.ask(0..CHUNKS, Class::Background).recv().unwrap());
    let names = threads_that_stand_back();
    assert!(names.iter().any(|name| name.starts_with("background-")), "{names:?}");
    assert!(names.iter().all(|name| name.starts_with("background-")), "{names:?}");
}

#[test]
fn what_a_prefetch_has_read_is_decoded_first_once_somebody_waits() {
    let world = world(false);
    world.gated.open();
    let queue = &world.engine.inner.queue;
    let _prefetch = world.ask(0..8, Class::Prefetch);
    let Some(Job::Read(ticket, class)) = queue.try_next() else { panic!("nothing is queued") };
    worker::carry(&world.engine.inner, steps::Step::Take(ticket, class), class);
    let _demand = world.ask(5..6, Class::Demand);
    let _other = world.ask(90..91, Class::Demand);
    let Some(Job::Decode(piece)) = queue.try_next() else { panic!("nothing was read") };
    assert_eq!(piece.chunk, 5);
    let Some(Job::Read(ticket, Class::Demand)) = queue.try_next() else { panic!("no demand") };
    assert_eq!(ticket.chunk, 90);
    let Some(Job::Decode(piece)) = queue.try_next() else { panic!("the rest is gone") };
    assert_eq!(piece.chunk, 0);
}
