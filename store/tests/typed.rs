//! What `store::Store` promises, on a sound store and on one that fails: every byte is checked, references
//! move by compare-and-swap, and what is half done is invisible.
#![allow(clippy::unwrap_used)]

mod places;

use layer::chunk::{BLOCK_BYTES, Chunk, ChunkTable};
use layer::environment::{Environment, RunConfig};
use layer::layer_file::LayerFile;
use layer::location::{Locations, Placement};
use layer::manifest::{LayerKind, Manifest};
use layer::pack::Codec;
use layer::reference::{RefKind, Reference, Target};
use layer::{ChunkDigest, Digest, EnvId, ErrorKind, LayerId};
use proptest::prelude::*;
use std::sync::{Arc, Barrier};
use std::thread;
use store::backend::fault::{Fault, FaultPlan};
use store::backend::memory::Memory;
use store::codec::{decode_chunk, encode_chunk};
use store::{Backend, Key, Store};

fn layer_file(chunks: &[Chunk], note: &str) -> LayerFile {
    let chunk_table = ChunkTable::new(chunks.to_vec()).unwrap();
    let metadata = note.as_bytes().to_vec();
    let manifest = Manifest {
        directories: 1,
        ..Manifest::describing(LayerKind::Base, &chunk_table, &metadata)
    };
    LayerFile { manifest, chunk_table, metadata }
}

/// Calls `check` with an empty store of every kind.
fn each_store(check: impl Fn(Arc<dyn Backend>, Store)) {
    places::on_every_backend(|backend| {
        let store = Store::open(backend.clone()).unwrap();
        check(backend, store);
    });
}

fn put_some_layer(store: &Store, note: &str) -> LayerId {
    store.put_layer(&layer_file(&[], note).encode().unwrap()).unwrap().0
}

fn reference(text: &str) -> Reference {
    text.parse().unwrap()
}

/// Replaces an object's bytes behind the store's back.
fn damage(backend: &dyn Backend, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let key = Key::new(name).unwrap();
    let mut bytes = backend.read_all(&key, 1 << 30).unwrap();
    change(&mut bytes);
    backend.delete(&key).unwrap();
    let mut upload = backend.create(&key).unwrap();
    upload.write(&bytes).unwrap();
    upload.publish().unwrap();
}

#[test]
fn a_store_is_made_once_and_recognised_after() {
    places::on_every_backend(|backend| {
        let stores: Vec<Store> = thread::scope(|scope| {
            let open = || scope.spawn(|| Store::open(backend.clone()).unwrap());
            let opening: Vec<_> = (0..4).map(|_| open()).collect();
            opening.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(stores.iter().all(|store| store.id() == stores[0].id()));
        damage(&*backend, "FORMAT", |bytes| {
            *bytes = String::from_utf8(bytes.clone()).unwrap().replace(":1", ":9").into_bytes();
        });
        let error = Store::open(backend.clone()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
        damage(&*backend, "FORMAT", Vec::clear);
        assert_eq!(Store::open(backend.clone()).unwrap_err().kind(), ErrorKind::Corrupt);
    });
}

#[test]
fn layers_are_checked_when_written_and_when_read() {
    each_store(|memory, store| {
        let file = layer_file(&[], "one");
        let bytes = file.encode().unwrap();
        assert_eq!(store.put_layer(&bytes).unwrap(), (file.id(), false));
        assert_eq!(store.put_layer(&bytes).unwrap(), (file.id(), true));
        assert_eq!(store.read_layer(&file.id()).unwrap(), file);
        assert_eq!(store.list_layers().unwrap(), [file.id()]);
        assert_eq!(store.layers_like(&file.id().to_string()[..8]).unwrap(), [file.id()]);
        assert_eq!(store.layers_like("00000000").unwrap(), []);
        assert!(store.layers_like("/").is_err() && store.layers_like("../x").is_err());
        let layout = store.read_layer_layout(&file.id()).unwrap();
        let of_file = layout.metadata.start as usize..layout.metadata.end as usize;
        let mut metadata = vec![0; of_file.len()];
        store.read_layer_part(&file.id(), layout.metadata.start, &mut metadata).unwrap();
        assert!(!metadata.is_empty() && metadata == bytes[of_file]);
        let tables = (file.manifest.clone(), file.chunk_table.clone());
        assert_eq!(store.read_layer_tables(&file.id()).unwrap(), tables);
        let absent = store.read_layer(&LayerId([9; 32])).unwrap_err();
        assert_eq!(
            (absent.kind(), absent.to_string().contains("is not on the store")),
            (ErrorKind::NotFound, true)
        );

        let name = store.backend().list("layers/", None, 1).unwrap().remove(0);
        damage(&*memory, &name, |bytes| *bytes.last_mut().unwrap() ^= 1);
        assert_eq!(store.read_layer(&file.id()).unwrap_err().kind(), ErrorKind::Corrupt);
        damage(&*memory, &name, |bytes| *bytes = layer_file(&[], "two").encode().unwrap());
        assert_eq!(store.read_layer_tables(&file.id()).unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(store.read_layer(&file.id()).unwrap_err().kind(), ErrorKind::Corrupt);
        // Publishing the same layer again repairs it.
        assert_eq!(store.put_layer(&bytes).unwrap(), (file.id(), false));
        assert_eq!(store.read_layer(&file.id()).unwrap(), file);
        let mut broken = bytes.clone();
        broken.truncate(100);
        assert_eq!(store.put_layer(&broken).unwrap_err().kind(), ErrorKind::Corrupt);
    });
}

#[test]
fn environments_are_checked_when_written_and_when_read() {
    each_store(|memory, store| {
        let environment = Environment::new(vec![LayerId([1; 32])], RunConfig::default()).unwrap();
        let document = environment.canonical();
        assert_eq!(store.put_environment(&document).unwrap(), (environment.id(), false));
        assert_eq!(store.put_environment(&document).unwrap(), (environment.id(), true));
        assert_eq!(store.read_environment(&environment.id()).unwrap(), environment);
        assert_eq!(store.list_environments().unwrap(), [environment.id()]);
        assert!(store.put_environment(b"{}").is_err());
        let other = Environment::new(vec![LayerId([2; 32])], RunConfig::default()).unwrap();
        let name = store.backend().list("envs/", None, 1).unwrap().remove(0);
        damage(&*memory, &name, |bytes| *bytes = other.canonical());
        assert_eq!(
            store.read_environment(&environment.id()).unwrap_err().kind(),
            ErrorKind::Corrupt
        );
    });
}

#[test]
fn an_unfinished_pack_is_invisible_and_an_empty_one_refused() {
    each_store(|_, store| {
        let plain = [7; 8192];
        let digest = ChunkDigest::of(&plain);
        let mut pack = store.pack_writer().unwrap();
        let id = pack.id();
        pack.append(digest, Codec::None, 8192, &plain).unwrap();
        assert!(pack.append(digest, Codec::None, 4096, &plain).is_err());
        assert!(pack.append(ChunkDigest::ZERO, Codec::None, 8192, &plain).is_err());
        drop(pack);
        assert!(store.list_packs().unwrap().is_empty());
        assert_eq!(store.read_pack_footer(&id).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(store.pack_writer().unwrap().finish().unwrap_err().kind(), ErrorKind::Invalid);
        assert!(store.list_packs().unwrap().is_empty());
    });
}

/// Where codec, pack and footer meet: every chunk comes back, whatever was stored. A chunk is some blocks of a
/// byte, or of what cannot be compressed.
fn packs_give_back(store: &Store, shapes: &[(u32, u8, bool)]) {
    let mut pack = store.pack_writer().unwrap();
    let mut plains = Vec::new();
    for (number, (blocks, fill, mixed)) in shapes.iter().enumerate() {
        let mut plain = vec![*fill; (blocks.min(&4) * BLOCK_BYTES) as usize];
        plain[..8].copy_from_slice(&(number as u64).to_le_bytes());
        if *mixed {
            let mut hash = Digest::of(&plain);
            for part in plain.chunks_mut(32) {
                hash = Digest::of(hash.as_bytes());
                part.copy_from_slice(hash.as_bytes());
            }
        }
        let (codec, payload) = encode_chunk(&plain, 1);
        pack.append(ChunkDigest::of(&plain), codec, plain.len() as u32, &payload).unwrap();
        plains.push(plain);
    }
    let sealed = pack.finish().unwrap();
    let entries = store.read_pack_footer(&sealed.id).unwrap();
    assert_eq!(entries, sealed.entries);
    for (entry, plain) in entries.iter().zip(&plains) {
        let mut payload = vec![0; entry.stored_bytes as usize];
        store.read_pack(&sealed.id, entry.offset, &mut payload).unwrap();
        let found = decode_chunk(&payload, entry.codec, entry.plain_bytes, &entry.digest).unwrap();
        assert_eq!(&found, plain);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn packs_give_back_every_chunk(
        shapes in proptest::collection::vec((1..40u32, any::<u8>(), any::<bool>()), 1..1500),
    ) {
        packs_give_back(&Store::open(Arc::new(Memory::new())).unwrap(), &shapes);
    }
}

#[test]
fn packs_give_back_every_chunk_in_every_place() {
    // 24 MiB in all: more than one part of an upload in parts, and more than one range of a read.
    let shapes: Vec<(u32, u8, bool)> =
        (0..1500_u32).map(|number| (4, number as u8, number % 10 != 0)).collect();
    each_store(|_, store| {
        packs_give_back(&store, &shapes[..40]);
        let mut pack = store.pack_writer().unwrap();
        for (number, _) in shapes.iter().enumerate() {
            let plain = vec![number as u8; 16384];
            pack.append(ChunkDigest::of(&plain), Codec::None, 16384, &plain).unwrap();
        }
        let sealed = pack.finish().unwrap();
        assert_eq!(store.read_pack_footer(&sealed.id).unwrap(), sealed.entries);
        // One read over the borders of parts, ranges and requests.
        let (first, last) = (sealed.entries[2], sealed.entries[1400]);
        let mut read = vec![0; (last.offset - first.offset) as usize];
        store.read_pack(&sealed.id, first.offset, &mut read).unwrap();
        for (chunk, number) in read.chunks(16384).zip(2_usize..) {
            assert!(chunk.iter().all(|byte| *byte == number as u8), "chunk {number}");
        }
    });
}

#[test]
fn a_damaged_pack_is_told_and_not_believed() {
    each_store(|memory, store| {
        let mut pack = store.pack_writer().unwrap();
        pack.append(ChunkDigest::of(&[1; 4096]), Codec::None, 4096, &[1; 4096]).unwrap();
        let id = pack.finish().unwrap().id;
        let name = memory.list("packs/", None, 1).unwrap().remove(0);
        let whole = memory.read_all(&Key::new(name.as_str()).unwrap(), 1 << 20).unwrap();
        for change in [0, whole.len() - 1, whole.len() - 100] {
            damage(&*memory, &name, |bytes| bytes[change] ^= 4);
            assert_eq!(
                store.read_pack_footer(&id).unwrap_err().kind(),
                ErrorKind::Corrupt,
                "{change}"
            );
            damage(&*memory, &name, |bytes| bytes[change] ^= 4);
        }
        damage(&*memory, &name, |bytes| bytes.truncate(90));
        assert_eq!(store.read_pack_footer(&id).unwrap_err().kind(), ErrorKind::Corrupt);
    });
}

#[test]
fn the_newest_readable_hint_counts() {
    each_store(|memory, store| {
        let layer = LayerId([3; 32]);
        assert_eq!(store.read_locations(&layer).unwrap(), None);
        let hint = |offset| Locations {
            packs: vec![layer::PackId([1; 16])],
            placements: vec![
                None,
                Some(Placement { pack: 0, offset, stored_bytes: 9, codec: Codec::Zstd }),
            ],
        };
        for number in 1..=5 {
            assert_eq!(store.put_locations(&layer, &hint(number)).unwrap(), number);
            assert_eq!(store.read_locations(&layer).unwrap(), Some(hint(number)));
        }
        let names = memory.list("locations/", None, 99).unwrap();
        assert_eq!(names.len(), 3, "{names:?}");
        damage(&*memory, &names[0], |bytes| bytes[30] ^= 1);
        assert_eq!(store.read_locations(&layer).unwrap(), Some(hint(4)));
        assert_eq!(store.put_locations(&layer, &hint(6)).unwrap(), 6);
    });
}

#[test]
fn references_keep_their_history_and_lists_do_not_mix_names() {
    each_store(|_, store| {
        let layers: Vec<LayerId> =
            (0..3).map(|note| put_some_layer(&store, &note.to_string())).collect();
        let target = |number: usize| Some(Target::Layer(layers[number]));
        for (name, number) in
            [("base/a/b:c", 0), ("base/a:b", 1), ("base/a/b:latest", 2), ("diff/a:b", 0)]
        {
            let entry = store.move_reference(&reference(name), target(number), "me", None).unwrap();
            assert_eq!((entry.number, entry.target), (1, target(number)));
        }
        let a = reference("base/a:b");
        assert_eq!(store.move_reference(&a, target(0), "you", Some(1)).unwrap().number, 2);
        assert_eq!(store.move_reference(&a, None, "you", None).unwrap().number, 3);
        let history = store.history(&a).unwrap();
        let seen: Vec<_> = history.iter().map(|entry| (entry.number, entry.target)).collect();
        assert_eq!(seen, [(3, None), (2, target(0)), (1, target(1))]);
        assert_eq!(store.current(&a).unwrap().unwrap(), history[0]);
        assert_eq!(store.current(&reference("base/a:c")).unwrap(), None);
        let names = |kind| -> Vec<String> {
            store.list_references(kind).unwrap().iter().map(|(name, _)| name.to_string()).collect()
        };
        assert_eq!(names(Some(RefKind::Base)), ["base/a/b:c", "base/a/b:latest", "base/a:b"]);
        assert_eq!(names(None).len(), 4);
        assert_eq!(store.list_references(None).unwrap()[2], (a, 3));
        assert_eq!(names(Some(RefKind::Env)), Vec::<String>::new());
    });
}

#[test]
fn a_reference_moves_only_to_what_exists_and_from_where_it_was_expected() {
    each_store(|_, store| {
        let layer = put_some_layer(&store, "x");
        let a = reference("base/a");
        let kind =
            |target, expected| store.move_reference(&a, target, "", expected).unwrap_err().kind();
        assert_eq!(kind(Some(Target::Layer(LayerId([9; 32]))), None), ErrorKind::NotFound);
        assert_eq!(kind(Some(Target::Environment(EnvId([9; 32]))), None), ErrorKind::Invalid);
        assert_eq!(kind(Some(Target::Layer(layer)), Some(1)), ErrorKind::Exists);
        assert_eq!(store.current(&a).unwrap(), None);
        store.move_reference(&a, Some(Target::Layer(layer)), "", Some(0)).unwrap();
        assert_eq!(kind(Some(Target::Layer(layer)), Some(0)), ErrorKind::Exists);
    });
}

#[test]
fn of_many_compare_and_swaps_exactly_one_wins_and_blind_moves_all_do() {
    each_store(|_, store| {
        let target = Some(Target::Layer(put_some_layer(&store, "x")));
        let a = reference("base/a");
        let race = |expected: Option<u64>| -> usize {
            let start = Barrier::new(8);
            thread::scope(|scope| {
                let run = || {
                    start.wait();
                    store.move_reference(&a, target, "racer", expected).is_ok()
                };
                let racers: Vec<_> = (0..8).map(|_| scope.spawn(run)).collect();
                racers
                    .into_iter()
                    .filter(|_| true)
                    .map(|racer| usize::from(racer.join().unwrap()))
                    .sum()
            })
        };
        assert_eq!(race(Some(0)), 1);
        assert_eq!(race(None), 8);
        let numbers: Vec<u64> =
            store.history(&a).unwrap().iter().map(|entry| entry.number).collect();
        assert_eq!(numbers, (1..=9).rev().collect::<Vec<_>>());
    });
}

#[test]
fn a_writer_recognises_its_own_entry_after_a_lost_answer() {
    each_store(|backend, sound| {
        let target = Some(Target::Layer(put_some_layer(&sound, "x")));
        let plan = FaultPlan {
            lost_answer_per_mille: 1000,
            only_class: "refs".into(),
            ..FaultPlan::default()
        };
        let unsure = Store::open(Arc::new(Fault::new(backend, plan))).unwrap();
        let a = reference("base/a");
        for number in 1..4 {
            let entry = unsure.move_reference(&a, target, "me", Some(number - 1)).unwrap();
            assert_eq!(entry.number, number);
            assert_eq!(sound.current(&a).unwrap().unwrap(), entry);
        }
    });
}

#[test]
fn leases_end_and_are_released() {
    each_store(|_, store| {
        let ids = vec![Digest::of(b"layer")];
        let lease = store.put_lease("node-1", ids.clone(), "a sandbox", 3_600_000).unwrap();
        let over = store.put_lease("node-1", ids, "", 0).unwrap();
        assert_eq!(
            (
                lease.holder(),
                lease.has_expired(store::now_unix_ns()),
                over.has_expired(store::now_unix_ns())
            ),
            ("node-1", false, true)
        );
        assert_eq!(store.read_lease(&lease.id).unwrap(), lease);
        assert_eq!(store.list_leases().unwrap().len(), 2);
        store.delete_lease(&over.id).unwrap();
        store.delete_lease(&over.id).unwrap();
        assert_eq!(store.list_leases().unwrap(), [lease]);
        for bad in ["", "a/b", "..", "a b"] {
            assert!(store.put_lease(bad, Vec::new(), "", 1).is_err(), "{bad}");
        }
        assert!(store.read_lease("../FORMAT").is_err());
    });
}

/// On a store that fails in every way it knows, an operation succeeds or fails, and what is read is right.
fn failing_gives_no_wrong_bytes(place: impl Fn() -> Arc<dyn Backend>, seeds: u64) -> u64 {
    let mut struck = 0;
    for seed in 0..seeds {
        let place = place();
        let sound = Store::open(place.clone()).unwrap();
        let plan = FaultPlan {
            seed,
            error_per_mille: 80,
            short_read_per_mille: 50,
            bit_flip_per_mille: 80,
            torn_write_per_mille: 80,
            lost_upload_per_mille: 80,
            lost_answer_per_mille: 80,
            ..FaultPlan::default()
        };
        let fault = Fault::new(place, FaultPlan::default());
        let store = Store::open(Arc::new(fault.clone())).unwrap();
        fault.set_plan(plan);
        let a = reference("base/a");
        let mut last = 0;
        for round in 0..30_u32 {
            let file = layer_file(&[], &format!("{seed} {round}"));
            if let Ok((id, _)) = store.put_layer(&file.encode().unwrap()) {
                assert_eq!(id, file.id());
                if let Ok(read) = store.read_layer(&id) {
                    assert_eq!(read, file);
                }
                if let Ok(entry) = store.move_reference(&a, Some(Target::Layer(id)), "me", None) {
                    assert!(entry.number > last, "{} after {last}", entry.number);
                    last = entry.number;
                }
            }
            if let Ok(Some(entry)) = store.current(&a) {
                assert!(entry.number >= last && entry.author == "me");
            }
            let plain = vec![round as u8; 8192];
            let (codec, payload) = encode_chunk(&plain, 1);
            let digest = ChunkDigest::of(&plain);
            let sealed = store.pack_writer().and_then(|mut pack| {
                pack.append(digest, codec, 8192, &payload)?;
                pack.finish()
            });
            let Ok(sealed) = sealed else { continue };
            let mut read = vec![0; payload.len()];
            let entry = sealed.entries[0];
            let decoded = store
                .read_pack(&sealed.id, entry.offset, &mut read)
                .and_then(|()| decode_chunk(&read, codec, 8192, &digest));
            assert!(decoded.is_err() || decoded.unwrap() == plain);
        }
        // Nothing is visible that is not whole or recognised as damaged, now without faults.
        for id in sound.list_layers().unwrap() {
            match sound.read_layer(&id) {
                Ok(file) => assert_eq!(file.id(), id),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}"),
            }
        }
        struck += fault.struck();
    }
    struck
}

#[test]
fn a_failing_store_gives_errors_and_never_wrong_bytes() {
    let struck = failing_gives_no_wrong_bytes(|| Arc::new(Memory::new()), 40);
    assert!(struck > 1000, "only {struck} faults struck");
    places::on_every_backend(|backend| {
        let struck = failing_gives_no_wrong_bytes(|| backend.clone(), 1);
        assert!(struck > 20, "only {struck} faults struck");
    });
}
