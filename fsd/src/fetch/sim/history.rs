//! One history: readers, fill threads, a timer, write-back, eviction, kills and power cuts, in an order
//! that its fate decides. One thread; whoever is in the middle of an operation may be interrupted by any
//! of the others.
//!
//! Checked: what a reader gets; what counts as present after a crash; that everybody who waits is told
//! once; that all is readable once faults are over; that nothing is left on its way then.
//!
//! Locking: each part has its mutex, held for a look only; no engine code runs under one.

use super::disk::{SimDisk, SimFiles, SimRoom};
use super::fate::{Fate, Fault, Interrupt};
use super::mounts::Mounts;
use super::mutant::Mutant;
use super::store::{SimStore, TrueLayer, Truth};
use crate::cache::CachedLayer;
use crate::cache::entry::Parts;
use crate::clock::Clock;
use crate::fetch::steps::{Next, Plain, Step, Verified};
use crate::fetch::{Class, Engine, Failure, FetchLayer, FetchSettings, Source, StoreCounters};
use crate::journal::FileKey;
use crate::served::ServedLayer;
use layer::chunk::BLOCK_BYTES;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use store::Store;

const READERS: usize = 5;
const WORKERS: usize = 3;
const DEADLINE: Duration = Duration::from_secs(10);
/// Chunks that one reader asks for at most.
const MAX_CHUNKS: u64 = 4;
/// Actions after the end of all faults before it is a failure that something is not readable.
const PATIENCE: usize = 20_000;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Who reads the data file of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plane {
    /// The kernel, once it was let go.
    Kernel,
    /// fsd, which answers with the bytes.
    Fsd,
}

/// What somebody who waits was told: that all is there, or the bytes themselves, or why not.
type Told = Result<Option<Vec<u8>>, String>;
pub(super) type Answer = Arc<Mutex<Option<Told>>>;

/// Tells; complains when it is dropped without having told.
struct Teller {
    fate: Arc<Fate>,
    answer: Answer,
    disk: Option<Arc<SimDisk>>,
    told: bool,
}

impl Teller {
    fn tell(self, result: Result<(), Failure>) {
        self.answer(result.map(|()| None).map_err(|failure| failure.chain()));
    }

    fn answer(mut self, told: Told) {
        self.told = true;
        if self.fate.is_dead() {
            return;
        }
        if let (Ok(None), Some(disk)) = (&told, &self.disk) {
            disk.reader_let_go();
        }
        *lock(&self.answer) = Some(told);
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        if !self.told && !self.fate.is_dead() {
            self.fate.violated("somebody who waits was forgotten".to_owned());
        }
    }
}

/// A reader of a mounted layer.
#[derive(Default)]
pub(super) enum Reader {
    #[default]
    Idle,
    Waiting(Read),
}

/// A read under way.
#[derive(Clone)]
pub(super) struct Read {
    pub(super) layer: usize,
    /// What it reads, in whole pages, and the chunks of that.
    bytes: Range<u64>,
    chunks: Range<usize>,
    pub(super) disk: Arc<SimDisk>,
    pub(super) answer: Answer,
}

/// A fill thread.
#[derive(Default)]
struct Worker {
    steps: Vec<Step>,
    low: bool,
    busy: bool,
}

/// One life of fsd.
pub(super) struct Process {
    engine: Engine,
    pub(super) layers: Vec<Option<Arc<ServedLayer>>>,
    workers: Vec<Worker>,
    pub(super) flushing: Vec<bool>,
}

/// The world of one history.
pub struct History {
    pub(super) fate: Arc<Fate>,
    pub(super) mutant: Mutant,
    truth: &'static Truth,
    sim_store: Arc<SimStore>,
    store: Arc<Store>,
    counters: Arc<StoreCounters>,
    pub(super) planes: Vec<Plane>,
    pub(super) disks: Mutex<Vec<Arc<SimDisk>>>,
    pub(super) process: Mutex<Process>,
    pub(super) readers: Mutex<Vec<Reader>>,
    pub(super) mounts: Mutex<Mounts>,
    power_cut: Mutex<bool>,
    pub(super) tally: Mutex<Tally>,
}

/// What happened, to see that something did.
#[derive(Debug, Default, Clone, Copy)]
pub struct Tally {
    /// Reads that were compared.
    pub right: u64,
    /// Reads that got an error.
    pub errors: u64,
    /// Layers thrown out of the cache.
    pub evictions: u64,
    /// Evictions of single chunks.
    pub punches: u64,
    /// Chunks copied from another layer.
    pub copies: u64,
    /// Chunks of which readers were let go before all of it was there.
    pub ahead: u64,
    /// Layers mounted.
    pub mounts: u64,
    /// Takeovers that came to their end.
    pub takeovers: u64,
}

/// How a history ended.
pub struct End {
    /// What must not happen and did.
    pub violation: Option<String>,
    /// What happened, where it was wanted.
    pub log: String,
    /// How often each fault struck.
    pub struck: [u64; super::fate::FAULTS],
    /// The rest.
    pub tally: Tally,
}

impl Interrupt for History {
    fn act(&self) {
        self.one_action();
    }
}

impl History {
    /// Lives through the history of `seed`.
    pub fn run(seed: u64, mutant: Mutant, logged: bool) -> End {
        let fate = Arc::new(Fate::new(seed, logged));
        let truth = Truth::get();
        let sim_store = SimStore::new(truth, &fate);
        let history = Arc::new_cyclic(|own: &Weak<Self>| {
            fate.set_others(own.clone());
            let disk = |layer: &TrueLayer| {
                SimDisk::new(Arc::clone(&fate), mutant, layer.table.data_bytes())
            };
            Self {
                mutant,
                truth,
                store: Arc::new(
                    Store::open(Arc::clone(&sim_store) as Arc<dyn store::Backend>).unwrap(),
                ),
                sim_store,
                counters: Arc::default(),
                planes: truth.layers.iter().map(|_| plane(&fate)).collect(),
                disks: Mutex::new(truth.layers.iter().map(disk).collect()),
                process: Mutex::new(Process::start(&fate, truth.layers.len())),
                readers: Mutex::new((0..READERS).map(|_| Reader::Idle).collect()),
                mounts: Mutex::new(Mounts::new(truth.layers.len())),
                power_cut: Mutex::new(false),
                tally: Mutex::default(),
                fate: Arc::clone(&fate),
            }
        });
        history.live();
        let tally = *lock(&history.tally);
        End { violation: fate.violation(), log: fate.log(), struck: fate.struck(), tally }
    }

    fn live(&self) {
        for _ in 0..20 + self.fate.below(180) {
            self.one_action();
            // The successor may die as well, in the middle of its takeover.
            while self.fate.is_dead() {
                self.restart();
            }
            if self.fate.violation().is_some() {
                return;
            }
        }
        self.fate.note(|| "faults are over".to_owned());
        self.fate.calm();
        self.sim_store.repair();
        self.settle();
    }

    /// One action of somebody who is not in the middle of one.
    fn one_action(&self) {
        if self.fate.is_dead() {
            return;
        }
        if self.fate.strikes(Fault::Kill) {
            return self.fate.die();
        }
        if self.fate.strikes(Fault::PowerCut) {
            *lock(&self.power_cut) = true;
            return self.fate.die();
        }
        // Upkeep and eviction begin after a takeover, and so does the service.
        let taking_over = self.is_taking_over();
        if taking_over && self.fate.below(3) == 0 {
            self.take_over();
            return;
        }
        match self.fate.below(21) {
            0..6 => self.reader(self.fate.below(READERS as u64) as usize),
            6..13 => self.worker(self.fate.below(WORKERS as u64) as usize),
            13 => self.time_passes(),
            14 => self.ring(),
            15 | 16 if !taking_over => self.flush(self.any_layer()),
            17 => lock(&self.disks)[self.any_layer()].reclaim(),
            _ if taking_over || self.fate.is_calm() => {}
            18 => self.advice(self.any_layer()),
            19 => self.evict(self.any_layer()),
            20 => self.detach(self.any_layer()),
            _ => {}
        }
    }

    fn any_layer(&self) -> usize {
        self.fate.below(self.truth.layers.len() as u64) as usize
    }

    fn engine(&self) -> Engine {
        lock(&self.process).engine.clone()
    }

    fn time_passes(&self) {
        let most = if self.fate.is_calm() { 20 } else { 400 };
        self.fate.pass(Duration::from_millis(1 + self.fate.below(most)));
    }

    fn ring(&self) {
        let inner = self.engine().inner;
        let mut due = inner.timer.due(inner.clock.now());
        if self.mutant == Mutant::ForgetsTheResting {
            due.rested.clear();
        }
        inner.ring(due);
    }

    /// The layer as this process has it open; opened when it is not.
    pub(super) fn open(&self, index: usize) -> Arc<ServedLayer> {
        if let Some(open) = &lock(&self.process).layers[index] {
            return Arc::clone(open);
        }
        let layer = &self.truth.layers[index];
        let disk = Arc::clone(&lock(&self.disks)[index]);
        let cached = CachedLayer::new(Parts {
            id: layer.id,
            folder: "/nowhere".into(),
            table: layer.table.clone().into(),
            key: FileKey { device: 0, inode: index as u64 },
            files: SimFiles::open(&disk),
            present: disk.presence(layer.id, layer.table.len()),
        });
        self.check_presence(layer, &disk, &cached);
        let locator = Arc::clone(&self.sim_store);
        let (store, counters) = (Arc::clone(&self.store), Arc::clone(&self.counters));
        let source = Source::new(layer.id, layer.table.len(), store, locator, counters);
        let fetch = FetchLayer::new(Arc::new(cached), source);
        let open = ServedLayer::new(Arc::clone(&fetch), false, Arc::default());
        let mut process = lock(&self.process);
        process.engine.add_sibling(&fetch);
        process.layers[index] = Some(Arc::clone(&open));
        open
    }

    /// What a new process believes must be so, in memory and on the platter.
    fn check_presence(&self, layer: &TrueLayer, disk: &SimDisk, cached: &CachedLayer) {
        for (index, chunk) in layer.table.chunks().iter().enumerate() {
            let range = chunk.byte_range();
            let truth = &layer.data[range.start as usize..range.end as usize];
            if cached.has(index)
                && (disk.seen(range.clone()) != truth || disk.platter(range) != truth)
            {
                self.fate.violated(format!(
                    "chunk {index} of layer {} is believed and is not durable and right",
                    layer.id.0[0]
                ));
            }
        }
    }

    fn reader(&self, index: usize) {
        let reader = std::mem::take(&mut lock(&self.readers)[index]);
        match reader {
            Reader::Idle if !self.fate.is_calm() => self.begin_read(index),
            Reader::Idle => {}
            Reader::Waiting(read) => {
                let told = lock(&read.answer).take();
                match told {
                    Some(result) => self.end_read(index, &read, result),
                    None => lock(&self.readers)[index] = Reader::Waiting(read),
                }
            }
        }
    }

    fn begin_read(&self, index: usize) {
        let layer = self.any_layer();
        if !self.is_mounted(layer) && !self.attach(layer) {
            return;
        }
        let count = self.truth.layers[layer].table.len() as u64;
        let start = self.fate.below(count);
        let end = (start + 1 + self.fate.below(MAX_CHUNKS)).min(count);
        let chunks = start as usize..end as usize;
        let disk = Arc::clone(&lock(&self.disks)[layer]);
        let bytes = self.pages_of(layer, &chunks);
        let read = Read { layer, bytes, chunks, disk, answer: Answer::default() };
        self.fate.note(|| {
            format!("reader {index} asks for {layer}:{:?}, bytes {:?}", read.chunks, read.bytes)
        });
        if self.is_taking_over() {
            lock(&self.readers)[index] = Reader::Waiting(read);
            return self.queue(index);
        }
        self.ask(index, read);
    }

    /// Some pages at least of every one of these chunks: all of them, or less at both ends.
    fn pages_of(&self, layer: usize, chunks: &Range<usize>) -> Range<u64> {
        let layer = &self.truth.layers[layer];
        let mut bytes = range_of(layer, chunks);
        let blocks = |chunk: usize| u64::from(layer.table.chunks()[chunk].blocks);
        let block = u64::from(BLOCK_BYTES);
        bytes.start += self.fate.below(blocks(chunks.start)) * block;
        let last = layer.table.chunks()[chunks.end - 1].offset().max(bytes.start);
        bytes.end -= self.fate.below((bytes.end - last) / block) * block;
        bytes
    }

    /// As an event thread does: at once when all is there, else through the engine.
    pub(super) fn ask(&self, index: usize, read: Read) {
        lock(&self.readers)[index] = Reader::Waiting(read.clone());
        let served = self.open(read.layer);
        let layer = served.fetch();
        let teller = Teller {
            fate: Arc::clone(&self.fate),
            answer: read.answer,
            disk: Some(read.disk),
            told: false,
        };
        if self.planes[read.layer] == Plane::Fsd {
            let range = read.bytes;
            let (engine, bytes) = (self.engine(), range.end - range.start);
            let answer = move |bytes: layer::Result<Vec<u8>>| {
                teller.answer(bytes.map(Some).map_err(|error| error.chain()));
            };
            return crate::reads::read(&engine, &served, range.start, bytes, answer);
        }
        if layer.cached().has_all(read.chunks.clone()) {
            return teller.tell(Ok(()));
        }
        let done = Box::new(move |result| teller.tell(result));
        if self.fate.below(4) == 0 {
            // As a takeover does.
            self.engine().request(layer, read.chunks, Class::Demand, done);
        } else {
            let fills = self.fate.below(3) == 0 && self.mutant == Mutant::None;
            self.engine().page_in(layer, read.bytes, fills, done);
        }
    }

    /// A reader that was let go reads what the kernel has; one that was refused has an error.
    fn end_read(&self, index: usize, read: &Read, told: Told) {
        let (layer, range) = (&self.truth.layers[read.layer], read.bytes.clone());
        let seen = match told {
            Ok(Some(bytes)) => bytes,
            Ok(None) => {
                read.disk.reader_has_read();
                read.disk.seen(range.clone())
            }
            Err(why) => {
                self.fate.note(|| format!("reader {index} was refused: {why}"));
                lock(&self.tally).errors += 1;
                return;
            }
        };
        self.fate.note(|| format!("reader {index} has read {}:{:?}", read.layer, read.chunks));
        lock(&self.tally).right += 1;
        if seen != layer.data[range.start as usize..range.end as usize] {
            let (layer, chunks) = (read.layer, &read.chunks);
            self.fate.violated(format!("reader {index}: wrong bytes in {layer}:{chunks:?}"));
        }
    }

    fn worker(&self, index: usize) {
        let (engine, step) = {
            let mut process = lock(&self.process);
            let engine = process.engine.clone();
            let worker = &mut process.workers[index];
            if worker.busy {
                return;
            }
            if worker.steps.is_empty() {
                let Some(job) = engine.inner.queue.try_next() else { return };
                let step = Step::from(job);
                worker.low = matches!(step, Step::Take(_, Class::Prefetch | Class::Background));
                worker.steps.push(step);
            }
            worker.busy = true;
            (engine, worker.steps.pop())
        };
        let Some(step) = step else { return };
        self.fate.note(|| format!("worker {index}: {}", name_of(&step)));
        let more = self.advance(&engine, step);
        let mut process = lock(&self.process);
        let worker = &mut process.workers[index];
        worker.busy = false;
        worker.steps.extend(more);
        if worker.steps.is_empty() && std::mem::take(&mut worker.low) {
            engine.inner.queue.low_read_over();
        }
    }

    fn advance(&self, engine: &Engine, step: Step) -> Vec<Step> {
        let step = match (self.mutant, step) {
            (Mutant::DoesNotVerify, Step::Decode(piece)) => {
                let entry = piece.layer.cached.table().chunks()[piece.chunk];
                let mut plain = engine.inner.buffers.take(entry.plain_bytes() as usize);
                let stored = &piece.payload[piece.part.clone()];
                let codec = piece.placement.codec;
                let _ = store::codec::decode_chunk_into(stored, codec, &entry.digest, &mut plain);
                let (layer, chunk, plain) = (piece.layer, piece.chunk, Plain::Decoded(plain));
                return vec![Step::Write(Verified { layer, chunk, plain })];
            }
            (Mutant::LetsGoBeforeThePages, Step::Write(verified)) => {
                let Verified { layer, chunk, .. } = &verified;
                let place = layer.cached.table().chunks()[*chunk].byte_range();
                if let Some(pages) = layer.flights.pages(*chunk, &place) {
                    layer.flights.pages_landed(*chunk, &place, &pages);
                }
                return vec![Step::Keep(verified)];
            }
            (_, step) => step,
        };
        if let Step::Keep(_) = &step {
            lock(&self.tally).ahead += 1;
        }
        match step.advance(&engine.inner) {
            Next::Over => Vec::new(),
            Next::Then(step) => vec![step],
            Next::Decode(pieces) => pieces.into_iter().map(Step::Decode).collect(),
        }
    }

    fn flush(&self, index: usize) {
        if self.is_late(index) {
            return self.flush_late(index);
        }
        let Some(layer) = self.begin_flush(index) else { return };
        if !self.fate.is_calm() && self.fate.below(4) == 0 {
            return self.keep_late(index, layer);
        }
        self.fate.note(|| format!("write-back of {index}"));
        // A failure is what write-back has to live with: it is tried again.
        let _ = layer.fetch().cached().make_durable();
        self.end_flush(index);
    }

    /// Prefetch or background: nobody minds when it fails, but it must end.
    fn advice(&self, index: usize) {
        let count = self.truth.layers[index].table.len() as u64;
        let start = self.fate.below(count);
        let chunks = start as usize..(start + 1 + self.fate.below(count - start)) as usize;
        let class = if self.fate.below(2) == 0 { Class::Prefetch } else { Class::Background };
        self.fate.note(|| format!("{class:?} of {index}:{chunks:?}"));
        let (fate, answer) = (Arc::clone(&self.fate), Answer::default());
        let teller = Teller { fate, answer, disk: None, told: false };
        let done = Box::new(move |result| teller.tell(result));
        self.engine().request(self.open(index).fetch(), chunks, class, done);
    }

    /// Throws a layer out of the cache, as is done once nobody has it mounted.
    fn evict(&self, index: usize) {
        if self.mutant == Mutant::PunchesBeforeTheBit {
            let disk = Arc::clone(&lock(&self.disks)[index]);
            return disk.punch(0..self.truth.layers[index].table.data_bytes());
        }
        if self.planes[index] == Plane::Fsd && self.fate.below(3) > 0 {
            return self.evict_some(index);
        }
        if self.is_mounted(index) {
            return self.detach(index);
        }
        if self.is_read(index) || lock(&self.process).flushing[index] {
            return;
        }
        self.fate.note(|| format!("evict {index}"));
        lock(&self.tally).evictions += 1;
        let bytes = self.truth.layers[index].table.data_bytes();
        lock(&self.disks)[index] = SimDisk::new(Arc::clone(&self.fate), self.mutant, bytes);
        let closed = lock(&self.process).layers[index].take();
        drop(closed);
    }

    /// Drops some chunks of a layer whose readers all come through fsd.
    fn evict_some(&self, index: usize) {
        let Some(layer) = self.begin_flush(index) else { return };
        let cached = layer.fetch().cached();
        let chunks: Vec<usize> =
            (0..cached.table().len()).filter(|_| self.fate.below(3) == 0).collect();
        self.fate.note(|| format!("evict {index}:{chunks:?}"));
        if cached.evict(&chunks).is_ok_and(|freed| freed > 0) {
            lock(&self.tally).punches += 1;
        }
        self.end_flush(index);
    }

    /// A new process, after a kill or a power cut, takes over from the dead one.
    fn restart(&self) {
        let power_cut = std::mem::take(&mut *lock(&self.power_cut));
        self.fate
            .note(|| format!("restart after {}", if power_cut { "a power cut" } else { "a kill" }));
        let fresh = Process::start(&self.fate, self.truth.layers.len());
        let dead = std::mem::replace(&mut *lock(&self.process), fresh);
        lock(&self.tally).copies += copies(&dead.engine);
        // The dead tell nobody; this only frees what its waiters hold.
        let inner = &dead.engine.inner;
        inner.ring(inner.timer.due(inner.clock.now() + 100 * DEADLINE));
        drop(dead);
        let disks = lock(&self.disks).clone();
        if power_cut {
            disks.iter().for_each(|disk| disk.power_cut());
        }
        self.begin_takeover(power_cut);
        self.fate.revive();
    }

    /// Faults are over: everybody is served, everything can be read, and nothing stays behind.
    fn settle(&self) {
        self.until("the end of a takeover", || self.take_over());
        self.until("the end of all reads", || {
            lock(&self.readers).iter().all(|reader| matches!(reader, Reader::Idle))
        });
        for index in 0..self.truth.layers.len() {
            let (served, answer) = (self.open(index), Answer::default());
            let layer = served.fetch();
            let (fate, tell) = (Arc::clone(&self.fate), Arc::clone(&answer));
            let teller = Teller { fate, answer: tell, disk: None, told: false };
            let chunks = 0..layer.cached().table().len();
            let done = Box::new(move |result| teller.tell(result));
            self.engine().request(layer, chunks, Class::Demand, done);
            self.until("the fill of a whole layer", || lock(&answer).is_some());
            if let Some(Err(why)) = &*lock(&answer) {
                self.fate.violated(format!("no faults, but: {why}"));
            }
            let disk = Arc::clone(&lock(&self.disks)[index]);
            let truth = &self.truth.layers[index];
            if disk.seen(0..truth.table.data_bytes()) != truth.data {
                self.fate.violated(format!("layer {index} is not what it should be"));
            }
            self.until("a whole layer on the platter", || {
                self.flush(index);
                layer.cached().is_durably_complete()
            });
            self.check_presence(truth, &disk, layer.cached());
        }
        let engine = self.engine();
        let idle = || engine.inner.queue.is_empty() && engine.inner.timer.is_idle();
        self.until("an idle engine", || {
            idle() && lock(&self.process).workers.iter().all(|worker| worker.steps.is_empty())
        });
        for layer in lock(&self.process).layers.iter().flatten() {
            let fetch = layer.fetch();
            if !fetch.flights.is_empty() || Arc::strong_count(fetch) != 1 {
                self.fate.violated("a flight is left, or a layer is held".to_owned());
            }
        }
        lock(&self.tally).copies += copies(&engine);
    }

    fn until(&self, what: &str, done: impl Fn() -> bool) {
        for round in 0..PATIENCE {
            if self.fate.violation().is_some() || done() {
                return;
            }
            self.one_action();
            if round % 64 == 63 {
                self.fate.pass(Duration::from_millis(250));
            }
        }
        self.fate.violated(format!("{what} did not come"));
    }
}

fn plane(fate: &Fate) -> Plane {
    if fate.below(2) == 0 { Plane::Kernel } else { Plane::Fsd }
}

fn range_of(layer: &TrueLayer, chunks: &Range<usize>) -> Range<u64> {
    let table = layer.table.chunks();
    table[chunks.start].offset()..table[chunks.end - 1].byte_range().end
}

fn copies(engine: &Engine) -> u64 {
    engine.counters().copies.load(std::sync::atomic::Ordering::Relaxed)
}

fn name_of(step: &Step) -> String {
    match step {
        Step::Take(ticket, class) => format!("take {} {class:?}", ticket.chunk),
        Step::Read(_) => "read".to_owned(),
        Step::Decode(piece) => format!("decode {}", piece.chunk),
        Step::Write(verified) => format!("write {}", verified.chunk),
        Step::Keep(verified) => format!("keep {}", verified.chunk),
    }
}

impl Process {
    fn start(fate: &Arc<Fate>, layers: usize) -> Self {
        let settings =
            FetchSettings { deadline: DEADLINE, full_disk_deadline: DEADLINE, threads: WORKERS };
        let clock = Arc::clone(fate) as Arc<dyn Clock>;
        Self {
            engine: Engine::idle(settings, Box::new(SimRoom(Arc::clone(fate))), clock),
            layers: vec![None; layers],
            workers: (0..WORKERS).map(|_| Worker::default()).collect(),
            flushing: vec![false; layers],
        }
    }
}
