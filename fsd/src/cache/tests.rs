//! The cache without an engine: evictions that are broken off at every step, readers meanwhile, repairs.

use super::evict::Evicting;
use super::*;
use crate::known_layer::{self, CHUNK_BYTES, pattern as plain};
use layer::ChunkDigest;
use layer::layer_file::LayerFile;
use layer::manifest::LayerKind;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use store::Backend;
use store::backend::memory::Memory;

const CHUNKS: usize = 40;
/// A cache folder and a store with one layer of [`CHUNKS`] chunks.
struct Shop {
    folder: tempfile::TempDir,
    store: Store,
    id: LayerId,
}

impl Shop {
    fn new() -> Self {
        let store = Store::open(Arc::new(Memory::new())).unwrap();
        let id = known_layer::put_layer(&store, CHUNKS, plain);
        Self { folder: tempfile::tempdir().unwrap(), store, id }
    }

    fn cache(&self) -> NodeCache {
        NodeCache::open(self.folder.path(), CacheSettings::default()).unwrap()
    }

    fn open(&self, cache: &NodeCache) -> CachedLayer {
        cache.open_layer(&self.id, &self.store, None).unwrap()
    }

    /// A layer with all chunks, durably.
    fn full(&self, cache: &NodeCache) -> CachedLayer {
        let layer = self.open(cache);
        (0..CHUNKS).for_each(|chunk| layer.fill(chunk, &plain(chunk)).unwrap());
        layer.make_durable().unwrap();
        layer
    }
}

/// What a chunk is if it counts as present.
fn assert_right(layer: &CachedLayer) {
    let mut got = vec![0; CHUNK_BYTES];
    for chunk in (0..CHUNKS).filter(|chunk| layer.has(*chunk)) {
        layer.read((chunk * CHUNK_BYTES) as u64, &mut got).unwrap();
        assert!(got == plain(chunk), "chunk {chunk}");
    }
}

fn blocks(shop: &Shop, cache: &NodeCache) -> u64 {
    std::fs::metadata(cache.folder_of(&shop.id).join(DATA)).unwrap().blocks() * 512
}

#[test]
fn an_eviction_broken_off_at_any_step_leaves_no_bit_without_its_bytes() {
    for end in [Evicting::Begun, Evicting::Forgotten, Evicting::Punched] {
        let shop = Shop::new();
        let cache = shop.cache();
        let layer = shop.full(&cache);
        let broken = layer.evict_stepwise(&[3, 4, 20, 30], |step| match step == end {
            true => Err(Error::new(ErrorKind::Internal, "killed here")),
            false => Ok(()),
        });
        assert!(broken.is_err());
        // In the process that goes on, and in the next one.
        assert_right(&layer);
        drop((layer, cache));
        let cache = shop.cache();
        let layer = shop.open(&cache);
        assert_right(&layer);
        let left = (0..CHUNKS).filter(|chunk| layer.has(*chunk)).count();
        assert_eq!(left, if end == Evicting::Begun { CHUNKS } else { CHUNKS - 4 }, "{end:?}");
        for chunk in [3, 4, 20, 30].into_iter().filter(|_| left < CHUNKS) {
            layer.fill(chunk, &plain(chunk)).unwrap();
        }
        layer.make_durable().unwrap();
        assert!(layer.is_durably_complete());
        assert_right(&layer);
    }
}

#[test]
fn an_eviction_gives_back_its_blocks_and_is_durable() {
    let shop = Shop::new();
    let cache = shop.cache();
    let layer = shop.full(&cache);
    let before = blocks(&shop, &cache);
    let wanted: Vec<usize> = (8..24).collect();
    assert_eq!(layer.evict(&wanted).unwrap(), (16 * CHUNK_BYTES) as u64);
    assert_eq!(layer.evict(&wanted).unwrap(), 0);
    assert_eq!(before - blocks(&shop, &cache), (16 * CHUNK_BYTES) as u64);
    assert!(!layer.is_durably_complete() && !layer.has(8) && layer.has(7) && layer.has(24));
    assert_eq!(layer.read(8 * CHUNK_BYTES as u64, &mut [0]).unwrap_err().kind(), ErrorKind::Busy);
    let again = shop.open(&cache);
    assert!(!(8..24).any(|chunk| again.has(chunk)) && again.has(7));
    assert_eq!(layer.groups().iter().map(|(_, chunks, _)| chunks.len()).sum::<usize>(), 24);
}

#[test]
fn a_released_layer_does_not_speak_for_the_next_opening() {
    let shop = Shop::new();
    let cache = shop.cache();
    let released = shop.full(&cache);
    released.retire();
    let layer = shop.open(&cache);
    layer.evict(&[3]).unwrap();
    // A fetch that was under way ends late, and upkeep had looked at the layer before.
    released.fill(4, &plain(4)).unwrap();
    assert!(!released.make_durable().unwrap());
    assert_eq!(released.evict(&[5]).unwrap(), 0);
    drop((released, layer, cache));
    let cache = shop.cache();
    let layer = shop.open(&cache);
    assert!(!layer.has(3) && layer.has(4) && layer.has(5));
    assert_right(&layer);
}

#[test]
fn what_a_machine_may_have_mapped_never_loses_a_block() {
    let shop = Shop::new();
    let cache = shop.cache();
    let layer = shop.full(&cache);
    assert!(!layer.is_exposed());
    let exposed = layer.expose(2 << 20).unwrap();
    for path in [&exposed.metadata, &exposed.data] {
        assert_eq!(std::fs::metadata(path).unwrap().len(), 2 << 20);
    }
    assert_eq!(layer.evict(&[1, 2, 3]).unwrap(), 0);
    assert!(layer.is_durably_complete() && layer.has(2));
    // What is disowned because it is wrong keeps its blocks too, also for the next process.
    layer.disown(&[2]).unwrap();
    assert_eq!(layer.expose(2 << 20).unwrap_err().kind(), ErrorKind::Busy);
    drop((layer, cache));
    let cache = shop.cache();
    let again = shop.open(&cache);
    assert!(again.is_exposed() && !again.has(2));
    let mut got = vec![0; CHUNK_BYTES];
    std::fs::File::open(&exposed.data)
        .unwrap()
        .read_exact_at(&mut got, 2 * CHUNK_BYTES as u64)
        .unwrap();
    assert!(got == plain(2));
}

#[test]
fn a_reader_during_evictions_sees_right_bytes_or_is_told() {
    let shop = Shop::new();
    let cache = shop.cache();
    let layer = shop.full(&cache);
    let (over, right, told) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for reader in 0..3 {
            let (layer, over, right, told) = (&layer, &over, &right, &told);
            scope.spawn(move || {
                let mut got = vec![0; CHUNK_BYTES];
                for round in 0.. {
                    let chunk = (round * 7 + reader) % CHUNKS;
                    // As a plane does: look first, read then.
                    if layer.has(chunk) {
                        match layer.read((chunk * CHUNK_BYTES) as u64, &mut got) {
                            Ok(()) => {
                                assert!(got == plain(chunk), "chunk {chunk}");
                                right.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(error) => {
                                assert_eq!(error.kind(), ErrorKind::Busy);
                                told.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    } else {
                        layer.fill(chunk, &plain(chunk)).unwrap();
                    }
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        for round in 0..150 {
            let some: Vec<usize> = (0..CHUNKS).filter(|chunk| (chunk + round) % 3 > 0).collect();
            layer.evict(&some).unwrap();
            if round % 10 == 0 {
                layer.make_durable().unwrap();
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(right.load(Ordering::Relaxed) > 0);
    layer.make_durable().unwrap();
    assert_right(&shop.open(&cache));
}

#[test]
fn what_a_crash_left_behind_cleared_bits_is_given_back_at_the_next_open() {
    let shop = Shop::new();
    let cache = shop.cache();
    let layer = shop.open(&cache);
    let folder = cache.folder_of(&shop.id);
    // Filled and never made durable, as by a process that was killed; more than a mebibyte of it.
    let data = std::fs::OpenOptions::new().write(true).open(folder.join(DATA)).unwrap();
    drop(layer);
    let before = blocks(&shop, &cache);
    data.set_len(0).unwrap();
    data.set_len((CHUNKS * CHUNK_BYTES) as u64).unwrap();
    data.write_all_at(&vec![9; CHUNKS * CHUNK_BYTES], 0).unwrap();
    // The whole layer is smaller than the slack, so it is asked for directly.
    let again = shop.open(&cache);
    assert!(blocks(&shop, &cache) > before);
    again.give_back_absent().unwrap();
    assert_eq!(blocks(&shop, &cache), 0);
}

#[test]
fn a_check_finds_every_kind_of_damage_and_dropping_it_is_durable() {
    let shop = Shop::new();
    let cache = shop.cache();
    drop(shop.full(&cache));
    let folder = cache.folder_of(&shop.id);
    let found = |cache: &NodeCache| cache.check_resting(&shop.id, false).unwrap();
    let whole = found(&cache);
    assert_eq!((whole.damages, whole.chunks), (0, CHUNKS as u64));
    let data = std::fs::OpenOptions::new().write(true).open(folder.join(DATA)).unwrap();
    data.write_all_at(b"?", 5 * CHUNK_BYTES as u64 + 9).unwrap();
    assert_eq!(found(&cache).listed, ["chunk 5 has other bytes"]);
    assert_eq!(cache.check_resting(&shop.id, true).unwrap().repaired, 1);
    let repaired = found(&cache);
    assert_eq!((repaired.damages, repaired.chunks), (0, CHUNKS as u64 - 1));
    std::fs::write(folder.join(PRESENT), b"no state").unwrap();
    assert_eq!(found(&cache).damages, 1);
    assert_eq!(cache.check_resting(&shop.id, true).unwrap().repaired, 1);
    assert_eq!(found(&cache).damages, 0);
    std::fs::write(folder.join(METADATA), vec![8; 4096]).unwrap();
    assert!(found(&cache).ruined);
    cache.check_resting(&shop.id, true).unwrap();
    assert_eq!(cache.check_resting(&shop.id, true).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_layer_out_of_use_gives_its_chunks_until_it_goes() {
    let shop = Shop::new();
    let cache = shop.cache();
    drop(shop.full(&cache));
    drop(cache);
    let cache = shop.cache();
    let digest = ChunkDigest::of(&plain(7));
    assert!(cache.shelf().find(&digest).is_empty());
    cache.fill_shelf().unwrap();
    assert_eq!(cache.shelf().find(&digest), [(shop.id, 7)]);
    assert!(cache.open_dormant(&shop.id).unwrap().has(7));
    cache.remove(&shop.id).unwrap();
    assert!(cache.shelf().find(&digest).is_empty());
    assert!(cache.open_dormant(&shop.id).is_err());
}

#[test]
fn metadata_is_verified_at_every_open_where_that_is_asked_for() {
    for always_verify in [false, true] {
        let shop = Shop::new();
        let settings = CacheSettings { always_verify, ..CacheSettings::default() };
        let cache = NodeCache::open(shop.folder.path(), settings).unwrap();
        drop(shop.open(&cache));
        let path = cache.folder_of(&shop.id).join(METADATA);
        std::fs::write(&path, vec![8; 4096]).unwrap();
        drop(shop.open(&cache));
        // What is found wrong is fetched anew.
        assert_eq!(std::fs::read(&path).unwrap()[0] == 7, always_verify);
    }
}

/// A layer file with this metadata image and without data.
fn layer_file(metadata: Vec<u8>) -> LayerFile {
    let chunk_table = ChunkTable::default();
    let manifest = Manifest {
        directories: 1,
        ..Manifest::describing(LayerKind::Base, &chunk_table, &metadata)
    };
    LayerFile { manifest, chunk_table, metadata }
}

fn noise(bytes: usize) -> Vec<u8> {
    let mut noise = vec![0; bytes];
    blake3::Hasher::new().finalize_xof().fill(&mut noise);
    noise
}

#[test]
fn an_image_of_any_size_comes_whole() {
    let words: Vec<u8> = (0..1_000_000_u32).flat_map(|at| (at / 9).to_le_bytes()).collect();
    // Nothing, one part, many that shrink, more than one request has room for.
    for image in [Vec::new(), noise(4096), words, noise(9 << 20)] {
        let shop = Shop::new();
        let cache = shop.cache();
        let (id, _) = shop.store.put_layer(&layer_file(image.clone()).encode().unwrap()).unwrap();
        // What a killed fsd left of it.
        let arriving = shop.folder.path().join(format!("{ARRIVING}{id}"));
        std::fs::create_dir(&arriving).unwrap();
        std::fs::write(arriving.join(METADATA), b"torn").unwrap();
        let opened = cache.open_layer(&id, &shop.store, None).unwrap();
        assert!(std::fs::read(opened.metadata_path()).unwrap() == image, "{} bytes", image.len());
        assert!(!arriving.exists());
    }
}

#[test]
fn a_wrong_part_of_an_image_is_named_and_nothing_of_it_stays() {
    let memory = Arc::new(Memory::new());
    let store = Store::open(memory.clone()).unwrap();
    let file = layer_file(noise(5 << 20));
    let (id, mut bytes) = (file.id(), file.encode().unwrap());
    let end = bytes.len();
    bytes[end - 40] ^= 1;
    let name = id.to_string();
    let key = store::Key::new(format!("layers/{}/{name}", &name[..2])).unwrap();
    let mut upload = memory.create(&key).unwrap();
    upload.write(&bytes).unwrap();
    upload.publish().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let cache = NodeCache::open(folder.path(), CacheSettings::default()).unwrap();
    let error = cache.open_layer(&id, &store, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let text = error.chain().to_string();
    assert!(text.contains("bytes 4980736 to 5242880 of a metadata image: wrong digest"), "{text}");
    assert!(cache.layers().unwrap().is_empty());
    assert!(!folder.path().join(format!("{ARRIVING}{id}")).exists());
}

#[test]
fn what_is_known_of_a_layer_is_not_read_again_by_this_process() {
    let shop = Shop::new();
    let cache = shop.cache();
    drop(shop.full(&cache));
    let chunks = cache.folder_of(&shop.id).join(super::CHUNKS);
    let right = std::fs::read(&chunks).unwrap();
    std::fs::write(&chunks, b"another hand").unwrap();
    assert!(shop.open(&cache).has(7), "the verified table of before");
    drop(cache);
    let cache = shop.cache();
    assert!(!shop.open(&cache).has(7), "discarded, and brought anew");
    assert!(std::fs::read(&chunks).unwrap() == right);
}
