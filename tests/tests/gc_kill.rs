//! Two builders and two collectors, processes of their own with catalogs of their own on one store, ended by
//! `kill -9` at random moments, for dozens of histories: what has a name is complete, and in the end what has none
//! is gone.

#![allow(clippy::unwrap_used)]

use builder::publish::ImagesPublisher;
use builder::{BuildOptions, Silent, Source, build};
use imaged::{CollectOptions, ImagedConfig, Service};
use layer::ErrorKind;
use layer::manifest::LayerKind;
use layer::reference::Target;
use proto::v1::images_client::ImagesClient;
use proto::v1::{TagRequest, UntagRequest, tag_request};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use store::Store;

const DIRECTORY: &str = "LAMELLA_TEST_GC_KILL";
const PART: &str = "LAMELLA_TEST_GC_KILL_PART";
const HISTORIES: u64 = 24;
const PARTS: [&str; 4] = ["build0", "build1", "collect0", "collect1"];

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

fn service(directory: &Path, part: &str) -> Service {
    let catalog_dir = directory.join(format!("catalog-{part}"));
    Service::open(ImagedConfig { store: open_store(directory), catalog_dir }).unwrap()
}

/// What deletes at once whatever two runs in a row find without a use.
fn eager() -> CollectOptions {
    CollectOptions {
        grace: Duration::ZERO,
        history: Duration::ZERO,
        compact_below_percent: 70,
        ..CollectOptions::default()
    }
}

fn plant(root: &Path, seed: u64) {
    fs::create_dir_all(root).unwrap();
    for at in 0..12_u64 {
        // Some files of every tree are those of the tree before.
        let mut state = (seed / (1 + at % 4)) << 8 | at;
        let next = |_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u8
        };
        let content: Vec<u8> = (0..(at + 1) * 9000).map(next).collect();
        fs::write(root.join(format!("file{at}")), content).unwrap();
    }
}

/// Builds trees, names them and takes names away, until it is killed.
fn build_trees(directory: &Path, part: &str, seed: u64) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let service = service(directory, part);
    let channel = runtime.block_on(proto::connect::in_process(service.routes())).unwrap();
    let mut client = ImagesClient::new(channel.clone());
    for round in 0.. {
        let root = directory.join(format!("root-{part}"));
        plant(&root, (seed * 7 + round) % 40);
        let source = Source::parse(root.to_str().unwrap()).unwrap();
        let publisher =
            ImagesPublisher::open(runtime.handle().clone(), channel.clone(), "test").unwrap();
        let options = BuildOptions { threads: 1, ..BuildOptions::new(LayerKind::Workspace) };
        let reference = format!("workspace/{part}-{}", round % 3);
        match build(&source, &publisher, &options, &Silent) {
            Ok(built) => {
                drop(publisher);
                let request = TagRequest {
                    reference,
                    target: Some(tag_request::Target::LayerId(built.layer_id().0.to_vec())),
                    author: "tester".into(),
                    expected_number: None,
                };
                // Between the end of the publish and its name it may have been collected.
                if let Err(status) = runtime.block_on(client.tag(request)) {
                    let error = proto::status::from_status(status);
                    assert!(
                        matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Busy),
                        "{error:?}"
                    );
                }
            }
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Busy), "{error:?}");
            }
        }
        if round % 3 == 2 {
            let reference = format!("workspace/{part}-{}", round % 2);
            let request = UntagRequest { reference, author: "tester".into() };
            let _ = runtime.block_on(client.untag(request));
        }
    }
}

fn collect(directory: &Path, part: &str) {
    let service = service(directory, part);
    loop {
        match service.collect(&eager()) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::Busy, "{}", error.chain()),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A child process of the test below; nothing when run by itself.
#[test]
fn endless_part() {
    let (Ok(directory), Ok(part)) = (std::env::var(DIRECTORY), std::env::var(PART)) else { return };
    let directory = Path::new(&directory);
    let (part, seed) = part.split_once(' ').unwrap();
    if part.starts_with("build") {
        build_trees(directory, part, seed.parse().unwrap());
    } else {
        collect(directory, part);
    }
}

fn start(directory: &Path, part: &str, seed: u64) -> Killed {
    let log = fs::File::options()
        .create(true)
        .append(true)
        .open(directory.join(format!("log-{part}")))
        .unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "endless_part", "--nocapture"])
        .env(DIRECTORY, directory)
        .env(PART, format!("{part} {seed}"))
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    Killed(child)
}

/// Everything on the store is whole. Returns how many layers and names there are.
fn check(directory: &Path, seed: u64) -> (usize, usize) {
    for part in PARTS {
        let log = fs::read_to_string(directory.join(format!("log-{part}"))).unwrap_or_default();
        assert!(!log.contains("panicked"), "seed {seed}: {part}: {log}");
    }
    let store = open_store(directory);
    let checked = imaged::fsck::check(&store, true).unwrap();
    assert_eq!(checked.damages, [], "seed {seed}");
    let mut names = 0;
    for (reference, number) in store.list_references(None).unwrap() {
        let target = store.read_entry(&reference, number).unwrap().target;
        if let Some(Target::Layer(id)) = target {
            assert!(store.has_layer(&id).unwrap(), "seed {seed}: {reference} dangles");
            names += 1;
        }
    }
    (store.list_layers().unwrap().len(), names)
}

#[test]
fn builders_and_collectors_that_are_killed_leave_all_that_is_named_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (mut most, mut collected) = (0, 0);
    for seed in 0..HISTORIES {
        let parts = PARTS.map(|part| start(directory, part, seed));
        // The first start fills the catalogs; the others go on from there.
        let pause = if seed == 0 { 1500 } else { 150 + seed * 97 % 500 };
        std::thread::sleep(Duration::from_millis(pause));
        let [one, two, three, four] = parts;
        for part in if seed % 2 == 0 { [one, three, two, four] } else { [four, two, three, one] } {
            drop(part);
            std::thread::sleep(Duration::from_millis(seed * 31 % 40));
        }
        let before = check(directory, seed);
        most = most.max(before.0);
        // As if the leases of the dead had ended.
        let store = open_store(directory);
        for lease in store.list_lease_ids().unwrap() {
            store.delete_lease(&lease).unwrap();
        }
        let service = service(directory, "collect0");
        for _ in 0..2 {
            collected += service.collect(&eager()).unwrap().deleted;
        }
        drop(service);
        let (layers, names) = check(directory, seed);
        assert!(layers <= names, "seed {seed}: {layers} layers for {names} names");
    }
    assert!(most > 2 && collected > 10, "{most} layers at most, {collected} things collected");
    println!("{most} layers at most, {collected} things collected between histories");
}
