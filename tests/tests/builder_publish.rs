//! A build through the image daemon: what the store holds afterwards is what was built, and a second build
//! of the same tree finds it all there.

#![allow(clippy::unwrap_used)]

mod image_daemon;

use builder::{BuildOptions, Publisher, Silent, Source, build, publish_environment};
use image_daemon::ImageDaemon;
use layer::manifest::LayerKind;
use layer::{ChunkDigest, ErrorKind};
use std::fs;
use std::path::Path;

/// While a file of this name is in a world's directory, its store is away.
const AWAY: &str = "away";

struct World(ImageDaemon);

impl World {
    fn new() -> Self {
        let away = |dir: &Path| format!("fault_away_while_exists={}", dir.join(AWAY).display());
        Self(ImageDaemon::new(away))
    }

    fn plant(&self) -> std::path::PathBuf {
        let root = self.0.dir.path().join("root");
        fs::create_dir_all(root.join("dir")).unwrap();
        let mut state = 1_u64;
        for at in 0..200_usize {
            let bytes: Vec<u8> = (0..at * 1000 + 1)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 33) as u8
                })
                .collect();
            fs::write(root.join(format!("dir/file{at}")), bytes).unwrap();
        }
        fs::write(root.join("zeros"), vec![0; 1 << 20]).unwrap();
        root
    }
}

fn options() -> BuildOptions {
    BuildOptions { threads: 3, ..BuildOptions::new(LayerKind::Workspace) }
}

fn source(path: &Path) -> Source {
    Source::parse(path.to_str().unwrap()).unwrap()
}

#[test]
fn a_build_is_published_whole_and_only_once() {
    let world = World::new();
    let source = source(&world.plant());
    let publisher = world.0.publisher();
    let built = build(&source, &publisher, &options(), &Silent).unwrap();
    assert!(built.top().new_stored_bytes > 10_000_000);
    let file = world.0.store.read_layer(&built.layer_id()).unwrap();
    assert_eq!(file.manifest, built.top().manifest);
    let locations = world.0.store.read_locations(&built.layer_id()).unwrap().unwrap();
    for (chunk, placement) in file.chunk_table.chunks().iter().zip(&locations.placements) {
        let placement = placement.as_ref().unwrap();
        let mut payload = vec![0; placement.stored_bytes as usize];
        let pack = locations.packs[placement.pack as usize];
        world.0.store.read_pack(&pack, placement.offset, &mut payload).unwrap();
        // Checks the digest.
        store::codec::decode_chunk(&payload, placement.codec, chunk.plain_bytes(), &chunk.digest)
            .unwrap();
    }
    let config = layer::environment::RunConfig::default();
    publish_environment(built.layer_ids(), config, &publisher).unwrap();
    let again = build(&source, &world.0.publisher(), &options(), &Silent).unwrap();
    assert_eq!(again.layer_id(), built.layer_id());
    assert_eq!(again.top().new_chunks, 0);
}

#[test]
fn two_builds_at_once_both_succeed() {
    let world = World::new();
    let source = source(&world.plant());
    let ids: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let built = build(&source, &world.0.publisher(), &options(), &Silent).unwrap();
                    built.layer_id()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(ids[0], ids[1]);
    assert!(world.0.store.read_layer(&ids[0]).is_ok());
}

#[test]
fn a_wrong_chunk_is_refused_with_the_daemon_s_reason() {
    let world = World::new();
    let publisher = world.0.publisher();
    let chunk = builder::EncodedChunk {
        digest: ChunkDigest([7; 32]),
        codec: layer::pack::Codec::None,
        plain_bytes: 4096,
        payload: vec![1; 4096],
    };
    // The verdict may come with the upload or with the flush.
    let error = publisher.upload(chunk).and_then(|()| publisher.flush()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.chain());
}

/// What a publish of hours ago was told counts no more when it has ended; what is on the store is found again.
#[test]
fn a_publish_that_has_ended_is_opened_again() {
    let world = World::new();
    let source = source(&world.plant());
    let publisher = world.0.publisher();
    for lease in world.0.store.list_leases().unwrap() {
        world.0.close(&lease.id);
    }
    assert_eq!(publisher.missing(&[ChunkDigest([7; 32])]).unwrap_err().kind(), ErrorKind::NotFound);
    let built = build(&source, &publisher, &options(), &Silent).unwrap();
    assert!(world.0.store.read_layer(&built.layer_id()).is_ok());
}

/// Every thread that uploads learns why the daemon refused, whoever asked first, and later calls too.
#[test]
fn all_threads_learn_the_daemon_s_reason() {
    let world = World::new();
    let publisher = world.0.publisher();
    fs::write(world.0.dir.path().join(AWAY), "").unwrap();
    let chunk = |number: u32| {
        let plain = number.to_le_bytes().repeat(1024);
        builder::EncodedChunk {
            digest: ChunkDigest::of(&plain),
            codec: layer::pack::Codec::None,
            plain_bytes: 4096,
            payload: plain,
        }
    };
    let upload_until_refused = |thread: u32| {
        let uploads = (0..100_000).map(|number| publisher.upload(chunk(thread << 20 | number)));
        uploads.filter_map(layer::Result::err).next().unwrap()
    };
    let errors: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..4).map(|thread| scope.spawn(move || upload_until_refused(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let later = publisher.flush().unwrap_err();
    for error in errors.iter().chain([&later]) {
        assert!(error.chain().contains("the store is away"), "{}", error.chain());
    }
}
