//! The engine over a store in memory that counts, delays and lies.

use super::*;
use crate::cache::{CacheSettings, NodeCache};
use crate::known_layer::{self, CHUNK_BYTES, pattern as plain};
use layer::location::Locations;
use layer::{Error, ErrorKind, LayerId};
use std::sync::atomic::AtomicUsize;
use store::Store;
use store::backend::fault::{Fault, FaultPlan};
use store::backend::memory::Memory;

const CHUNKS: usize = 40;

/// Writes all chunks into one pack, in order.
fn write_pack(store: &Store) -> Locations {
    known_layer::put_pack(store, CHUNKS, plain)
}

fn publish(store: &Store) -> (LayerId, Locations) {
    let id = known_layer::put_layer(store, CHUNKS, plain);
    let locations = write_pack(store);
    store.put_locations(&id, &locations).unwrap();
    (id, locations)
}

/// A locator that publishes what it was given, once.
#[derive(Default)]
struct Relocation {
    store: Mutex<Option<(Arc<Store>, LayerId)>>,
    asked: AtomicUsize,
}

impl Locator for Relocation {
    fn locate(&self, _layer: &LayerId) -> Result<()> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        match self.store.lock().unwrap().take() {
            Some((store, id)) => {
                let fresh = write_pack(&store);
                store.put_locations(&id, &fresh).map(|_| ())
            }
            None => Err(Error::new(ErrorKind::Unavailable, "no imaged here")),
        }
    }
}

struct Bench {
    folder: tempfile::TempDir,
    cache: NodeCache,
    fault: Arc<Fault>,
    store: Arc<Store>,
    id: LayerId,
    locations: Locations,
    layer: Arc<FetchLayer>,
    engine: Engine,
    counters: Arc<StoreCounters>,
    relocation: Arc<Relocation>,
}

fn bench(deadline: Duration) -> Bench {
    let folder = tempfile::tempdir().unwrap();
    let fault = Arc::new(Fault::new(Arc::new(Memory::new()), FaultPlan::default()));
    let store = Arc::new(Store::open(Arc::clone(&fault) as Arc<dyn store::Backend>).unwrap());
    let (id, locations) = publish(&store);
    let cache = NodeCache::open(folder.path(), CacheSettings::default()).unwrap();
    let cached = Arc::new(cache.open_layer(&id, &store, None).unwrap());
    let counters = Arc::new(StoreCounters::default());
    let relocation = Arc::new(Relocation::default());
    let source = Source::new(
        id,
        CHUNKS,
        Arc::clone(&store),
        Arc::clone(&relocation) as Arc<dyn Locator>,
        Arc::clone(&counters),
    );
    let settings = FetchSettings { deadline, full_disk_deadline: deadline, threads: 4 };
    let engine = Engine::start(settings, cache.space().clone()).unwrap();
    let layer = FetchLayer::new(cached, source);
    Bench { folder, cache, fault, store, id, locations, layer, engine, counters, relocation }
}

impl Bench {
    fn assert_filled(&self, chunks: Range<usize>) {
        for index in chunks {
            assert!(self.layer.cached().has(index), "chunk {index} is missing");
            let mut got = vec![0; CHUNK_BYTES];
            self.layer.cached().read((index * CHUNK_BYTES) as u64, &mut got).unwrap();
            assert!(got == plain(index), "chunk {index} differs");
        }
    }

    fn reads(&self) -> u64 {
        self.counters.reads.load(Ordering::SeqCst)
    }
}

fn late(per_mille: u32) -> FaultPlan {
    FaultPlan {
        delay_per_mille: per_mille,
        max_delay: Duration::from_millis(60),
        only_class: "packs".into(),
        ..FaultPlan::default()
    }
}

#[test]
fn many_requests_of_one_chunk_are_one_read() {
    let bench = bench(Duration::from_secs(30));
    bench.fault.set_plan(late(1000));
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| bench.engine.ensure(&bench.layer, 3..4, Class::Demand).unwrap());
        }
    });
    assert_eq!(bench.reads(), 1);
    assert_eq!(bench.layer.fills(), 1);
    bench.assert_filled(3..4);
}

#[test]
fn neighbours_become_one_read_and_present_chunks_none() {
    let bench = bench(Duration::from_secs(30));
    bench.engine.ensure(&bench.layer, 0..CHUNKS, Class::Demand).unwrap();
    assert_eq!(bench.reads(), 1, "all chunks lie next to each other");
    bench.assert_filled(0..CHUNKS);
    bench.engine.ensure(&bench.layer, 0..CHUNKS, Class::Demand).unwrap();
    assert_eq!(bench.reads(), 1);
    assert_eq!(bench.engine.complete(&bench.layer, 0, &|| true).unwrap(), 0);
}

#[test]
fn a_thread_that_fills_itself_leaves_nothing_behind() {
    let bench = bench(Duration::from_secs(30));
    let (tell, told) = crossbeam_channel::bounded(1);
    let done = Box::new(move |result: Result<(), Failure>| tell.send(result.is_ok()).unwrap());
    bench.engine.page_in(&bench.layer, bytes_of(5..9), true, done);
    assert!(told.recv().unwrap());
    bench.assert_filled(5..9);
}

fn bytes_of(chunks: Range<usize>) -> Range<u64> {
    (chunks.start * CHUNK_BYTES) as u64..(chunks.end * CHUNK_BYTES) as u64
}

#[test]
fn who_reads_a_page_goes_on_before_the_rest_of_its_chunk_is_there() {
    use steps::{Next, Step};
    let bench = bench(Duration::from_secs(30));
    let cached = bench.layer.cached();
    let space = Box::new(Space::new(bench.folder.path(), 0, None));
    let settings = bench.engine.inner.settings.clone();
    let engine = Engine::idle(settings, space, Arc::new(SystemClock));
    let ask = |bytes: Range<u64>| {
        let (tell, told) = crossbeam_channel::bounded(1);
        let done = Box::new(move |result: Result<(), Failure>| tell.send(result.is_ok()).unwrap());
        engine.page_in(&bench.layer, bytes, false, done);
        told
    };
    let page = 4096_u64;
    let chunk = bytes_of(3..4);
    let first = ask(chunk.start + page..chunk.start + 2 * page);
    let whole = ask(chunk.clone());
    let mut step = Step::from(engine.inner.queue.try_next().unwrap());
    while !matches!(step, Step::Keep(_)) {
        assert!(first.is_empty() && whole.is_empty());
        step = match step.advance(&engine.inner) {
            Next::Then(next) => next,
            Next::Decode(pieces) => Step::Decode(pieces.into_iter().next().unwrap()),
            Next::Over => panic!("the chunk was not kept"),
        };
    }
    assert!(first.try_recv().unwrap() && whole.is_empty() && !cached.has(3));
    let mut seen = vec![0; CHUNK_BYTES];
    rustix::io::pread(cached.quiet_data(), &mut seen, chunk.start).unwrap();
    let mut wanted = vec![0; CHUNK_BYTES];
    wanted[4096..8192].copy_from_slice(&plain(3)[4096..8192]);
    assert!(seen == wanted, "the page, and no more of the chunk");
    // Somebody who comes now waits for all of it.
    let late = ask(chunk.start + page..chunk.start + 2 * page);
    assert!(late.is_empty());
    assert!(matches!(step.advance(&engine.inner), Next::Over));
    assert!(whole.try_recv().unwrap() && late.try_recv().unwrap());
    bench.assert_filled(3..4);
}

#[test]
fn a_wrong_bit_on_the_way_is_read_again_once() {
    let bench = bench(Duration::from_secs(30));
    let plan = FaultPlan {
        seed: 3,
        bit_flip_per_mille: 400,
        only_class: "packs".into(),
        ..FaultPlan::default()
    };
    bench.fault.set_plan(plan);
    let mut right = 0;
    for index in 0..CHUNKS {
        match bench.engine.ensure(&bench.layer, index..index + 1, Class::Demand) {
            Ok(()) => {
                right += 1;
                bench.assert_filled(index..index + 1);
            }
            Err(failure) => assert_eq!(failure.kind(), ErrorKind::Corrupt, "{}", failure.chain()),
        }
    }
    assert!(bench.engine.counters().verify_failures.load(Ordering::SeqCst) > 0);
    // Struck twice in a row is an error; with four of ten reads struck most chunks come.
    assert!(right > CHUNKS / 2, "{right} of {CHUNKS}");
}

#[test]
fn a_stale_hint_leads_to_imaged() {
    let bench = bench(Duration::from_secs(30));
    let pack = bench.locations.packs[0];
    let listed = bench.store.backend().list("packs/", None, 100).unwrap();
    assert!(listed.iter().any(|key| key.ends_with(&pack.to_string())));
    for key in listed {
        bench.store.backend().delete(&store::Key::new(key).unwrap()).unwrap();
    }
    *bench.relocation.store.lock().unwrap() = Some((Arc::clone(&bench.store), bench.id));
    bench.engine.ensure(&bench.layer, 0..CHUNKS, Class::Demand).unwrap();
    bench.assert_filled(0..CHUNKS);
    assert_eq!(bench.relocation.asked.load(Ordering::SeqCst), 1);
}

#[test]
fn a_pack_that_is_gone_for_good_is_an_error() {
    let bench = bench(Duration::from_secs(30));
    for key in bench.store.backend().list("packs/", None, 100).unwrap() {
        bench.store.backend().delete(&store::Key::new(key).unwrap()).unwrap();
    }
    let failure = bench.engine.ensure(&bench.layer, 0..2, Class::Demand).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::NotFound, "{}", failure.chain());
    assert!(!bench.layer.cached().has(0));
}

#[test]
fn a_store_that_is_away_is_waited_for_until_the_deadline() {
    let bench = bench(Duration::from_millis(400));
    bench.layer.source.locations().unwrap();
    bench.fault.set_plan(FaultPlan { away: true, ..FaultPlan::default() });
    let failure = bench.engine.ensure(&bench.layer, 0..2, Class::Demand).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::Unavailable);
    assert!(failure.chain().contains("deadline"), "{}", failure.chain());

    let (tell, told) = crossbeam_channel::bounded(1);
    let done = Box::new(move |result: Result<(), Failure>| tell.send(result.is_ok()).unwrap());
    bench.engine.request(&bench.layer, 0..2, Class::Background, done);
    bench.fault.set_plan(FaultPlan::default());
    assert!(told.recv().unwrap(), "it comes once the store is back");
    bench.assert_filled(0..2);
}

#[test]
fn a_deadline_passes_while_a_read_hangs() {
    let bench = bench(Duration::from_millis(100));
    bench.layer.source.locations().unwrap();
    let plan = FaultPlan {
        delay_per_mille: 1000,
        max_delay: Duration::from_secs(3),
        only_class: "packs".into(),
        seed: 1,
        ..FaultPlan::default()
    };
    bench.fault.set_plan(plan);
    let late = (0..4).filter(|index| {
        bench
            .engine
            .ensure(&bench.layer, *index * 10..*index * 10 + 1, Class::Demand)
            .is_err_and(|failure| failure.kind() == ErrorKind::Timeout)
    });
    assert!(late.count() > 0, "no read took longer than the deadline");
}

#[test]
fn only_durable_chunks_are_believed_after_a_restart() {
    let bench = bench(Duration::from_secs(30));
    bench.engine.ensure(&bench.layer, 0..10, Class::Demand).unwrap();
    assert!(bench.layer.cached().make_durable().unwrap());
    bench.engine.ensure(&bench.layer, 10..20, Class::Demand).unwrap();
    let again = bench.cache.open_layer(&bench.id, &bench.store, None).unwrap();
    assert!(again.has_all(0..10) && !(10..20).any(|index| again.has(index)));
    assert!(!again.is_durably_complete());
    bench.engine.complete(&bench.layer, 0, &|| true).unwrap();
    bench.layer.cached().make_durable().unwrap();
    let again = bench.cache.open_layer(&bench.id, &bench.store, None).unwrap();
    assert!(again.is_durably_complete() && bench.layer.cached().is_durably_complete());
}

#[test]
fn a_chunk_that_another_layer_holds_is_copied() {
    let first = bench(Duration::from_secs(30));
    first.engine.add_sibling(&first.layer);
    first.engine.ensure(&first.layer, 4..8, Class::Demand).unwrap();
    let reads = first.reads();
    // The same content under another cache folder stands for another layer.
    let second = bench(Duration::from_secs(30));
    first.engine.ensure(&second.layer, 4..8, Class::Demand).unwrap();
    second.assert_filled(4..8);
    assert_eq!((first.reads(), second.reads()), (reads, 0));
    first.engine.ensure(&second.layer, 2..10, Class::Demand).unwrap();
    second.assert_filled(2..10);
    assert!(second.reads() > 0);
    assert_eq!(first.engine.counters().copies.load(Ordering::SeqCst), 4);
}

#[test]
fn a_damaged_folder_is_fetched_anew() {
    let bench = bench(Duration::from_secs(30));
    let folder = bench.cache.folder_of(&bench.id);
    bench.engine.ensure(&bench.layer, 0..10, Class::Demand).unwrap();
    for (part, cut) in [("chunks", 4), ("meta.erofs", 4095), ("manifest", 0), ("data", 1)] {
        let path = folder.join(part);
        // With durable bits beside it: they say nothing about the other parts.
        bench.cache.open_layer(&bench.id, &bench.store, None).unwrap().make_durable().unwrap();
        assert!(folder.join("present").exists());
        std::fs::File::options().write(true).open(&path).unwrap().set_len(cut).unwrap();
        let again = bench.cache.open_layer(&bench.id, &bench.store, None).unwrap();
        assert_eq!(again.table().len(), CHUNKS, "{part}");
        std::fs::remove_file(&path).unwrap();
        let again = bench.cache.open_layer(&bench.id, &bench.store, None).unwrap();
        assert_eq!(again.table().len(), CHUNKS, "{part}");
    }
    assert!(
        NodeCache::open(folder.parent().unwrap(), CacheSettings::default()).unwrap_err().kind()
            == ErrorKind::Busy
    );
}

#[test]
fn a_metadata_image_that_changed_on_the_disk_is_fetched_anew_by_the_next_process() {
    let Bench { folder, cache, store, id, layer, .. } = bench(Duration::from_secs(30));
    let path = cache.folder_of(&id).join("meta.erofs");
    layer.cached().make_durable().unwrap();
    let sound = std::fs::read(&path).unwrap();
    std::fs::write(&path, vec![9; sound.len()]).unwrap();
    drop(cache);
    let cache = NodeCache::open(folder.path(), CacheSettings::default()).unwrap();
    cache.open_layer(&id, &store, None).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), sound);
}

#[test]
fn a_late_flush_of_an_evicted_layer_does_not_speak_for_the_next() {
    let bench = bench(Duration::from_secs(30));
    bench.engine.ensure(&bench.layer, 0..CHUNKS, Class::Demand).unwrap();
    bench.cache.remove(&bench.id).unwrap();
    let next = bench.cache.open_layer(&bench.id, &bench.store, None).unwrap();
    assert!(!next.has(0));
    // Its folder is gone: there is nothing to say, and nobody to say it of.
    assert!(bench.layer.cached().make_durable().is_err());
    let again = bench.cache.open_layer(&bench.id, &bench.store, None).unwrap();
    assert!(!(0..CHUNKS).any(|chunk| again.has(chunk)), "the next one has no data yet");
}
