//! `kill -9` in the middle of builds through the image daemon: what is visible is whole, the catalog comes back,
//! and the next build finishes the work.

#![allow(clippy::unwrap_used)]

use builder::publish::ImagesPublisher;
use builder::{BuildOptions, Silent, Source, build};
use layer::manifest::LayerKind;
use layer::reference::Target;
use proto::v1::images_client::ImagesClient;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use store::Store;

const DIRECTORY: &str = "LAMELLA_TEST_IMAGED_KILL";
const ROUNDS: u64 = 10;

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn open_store(directory: &Path) -> Arc<Store> {
    let url = format!("file://{}", directory.join("store").display());
    Arc::new(Store::open(store::open(&url).unwrap()).unwrap())
}

fn plant(root: &Path, seed: u64) {
    fs::create_dir_all(root).unwrap();
    let mut state = seed;
    for at in 0..60_usize {
        let next = |_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u8
        };
        fs::write(root.join(format!("file{at}")), (0..at * 2000).map(next).collect::<Vec<u8>>())
            .unwrap();
    }
}

/// Builds, publishes and tags tree after tree; `rounds` of them.
fn build_trees(directory: &Path, seeds: std::ops::Range<u64>) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let catalog_dir = directory.join("catalog");
    let config = imaged::ImagedConfig { store: open_store(directory), catalog_dir };
    let service = imaged::Service::open(config).unwrap();
    let channel = runtime.block_on(proto::connect::in_process(service.routes())).unwrap();
    for seed in seeds {
        let root = directory.join(format!("root{}", seed % 4));
        plant(&root, seed);
        let source = Source::parse(root.to_str().unwrap()).unwrap();
        let publisher =
            ImagesPublisher::open(runtime.handle().clone(), channel.clone(), "test").unwrap();
        let options = BuildOptions { threads: 2, ..BuildOptions::new(LayerKind::Workspace) };
        let built = build(&source, &publisher, &options, &Silent).unwrap();
        let request = proto::v1::TagRequest {
            reference: "workspace/x".into(),
            target: Some(proto::v1::tag_request::Target::LayerId(built.layer_id().0.to_vec())),
            author: "tester".into(),
            expected_number: None,
        };
        runtime.block_on(ImagesClient::new(channel.clone()).tag(request)).unwrap();
    }
}

/// A child process of the test below; nothing when run by itself.
#[test]
fn endless_builder() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    build_trees(Path::new(&directory), 0..u64::MAX);
}

/// Every visible layer has every chunk, and every entry points to a layer. Returns the number of entries.
fn check(directory: &Path) -> usize {
    let store = open_store(directory);
    assert_eq!(fs::read_dir(directory.join("store/.tmp")).map_or(0, Iterator::count), 0);
    for id in store.list_layers().unwrap() {
        let (_, table) = store.read_layer_tables(&id).unwrap();
        let locations = store.read_locations(&id).unwrap().unwrap();
        for (index, chunk) in
            table.chunks().iter().enumerate().filter(|(_, chunk)| !chunk.is_zero())
        {
            let (pack, place) = locations.get(index).unwrap();
            let mut payload = vec![0; place.stored_bytes as usize];
            store.read_pack(&pack, place.offset, &mut payload).unwrap();
            store::codec::verify_chunk(&payload, place.codec, chunk.plain_bytes(), &chunk.digest)
                .unwrap();
        }
    }
    let history = store.history(&"workspace/x".parse().unwrap()).unwrap();
    for entry in &history {
        assert!(matches!(entry.target, Some(Target::Layer(id)) if store.has_layer(&id).unwrap()));
    }
    history.len()
}

#[test]
fn a_killed_daemon_and_builder_leave_nothing_half_done() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("store")).unwrap();
    let mut entries = 0;
    for round in 0..ROUNDS {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "endless_builder"])
            .env(DIRECTORY, directory.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let child = Killed(child);
        std::thread::sleep(Duration::from_millis(60 + round * 37 % 400));
        drop(child);
        let now = check(directory.path());
        assert!(now >= entries, "entries are never lost");
        entries = now;
    }
    build_trees(directory.path(), 0..2);
    assert!(check(directory.path()) >= entries + 2);
    println!("{entries} tags were made before kills");
}
