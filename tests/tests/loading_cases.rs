//! Situations that broke comparable systems, each as its kind: what the store, an index or a restart may do
//! to a reader. Others of the list stand where their subject is: SPECIFICATION.md names them.
#![allow(clippy::unwrap_used)]

mod fsd_world;

use fsd_world::{LayerShape, Published, World, publish};
use proto::v1::Plane;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use store::Store;

fn world(options: &[&str]) -> World {
    let shape = LayerShape { files: 16, max_file_bytes: 200 << 10, ..LayerShape::default() };
    let mut world = World::new(&shape).unwrap();
    world.options = options.iter().map(|word| (*word).to_owned()).collect();
    world
}

fn store_of(world: &World) -> Store {
    let url = format!("file://{}", world.store_folder.display());
    Store::open(store::open(&url).unwrap()).unwrap()
}

/// Reads every file: how many were right and how many were refused. A wrong one is the end.
#[track_caller]
fn right_and_refused(layer: &Published, at: &Path) -> (usize, usize) {
    let (mut right, mut refused) = (0, 0);
    for (name, expected) in &layer.files {
        match std::fs::read(at.join(name)) {
            Ok(got) => {
                assert!(
                    got == *expected,
                    "{name}: {}",
                    fsd_world::first_difference(&got, expected)
                );
                right += 1;
            }
            Err(_) => refused += 1,
        }
    }
    (right, refused)
}

fn pack_path(world: &World) -> PathBuf {
    let pack = world.layer.packs[0].to_string();
    world.store_folder.join("packs").join(&pack[..2]).join(&pack)
}

/// What becomes of a pack; nothing when it goes.
type Damage = fn(&[u8]) -> Option<Vec<u8>>;

#[test]
fn a_pack_that_is_cut_missing_or_foreign_is_an_error_and_never_other_bytes() {
    let damages: [(&str, Damage); 4] = [
        ("cut", |bytes| Some(bytes[..bytes.len() / 2].to_vec())),
        ("empty", |_| Some(Vec::new())),
        ("missing", |_| None),
        ("foreign", |bytes| Some(bytes.iter().map(|byte| !byte).collect())),
    ];
    for (what, damage) in damages {
        let mut world = world(&["--deadline-ms", "1000"]);
        let path = pack_path(&world);
        let right = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        if let Some(bytes) = damage(&right) {
            std::fs::write(&path, bytes).unwrap();
        }
        world.start().unwrap();
        let at = world.attach("test").unwrap();
        let (_, refused) = right_and_refused(&world.layer, &at);
        assert!(refused > 0, "{what}: nothing was refused");
        _ = std::fs::remove_file(&path);
        std::fs::write(&path, right).unwrap();
        // Objects are never replaced, so a running fsd may have the damaged one open still.
        world.kill_fsd().unwrap();
        world.start().unwrap();
        world.compare(&at).unwrap();
    }
}

#[test]
fn a_store_that_trickles_is_an_error_at_the_deadline() {
    let mut world = world(&["--deadline-ms", "400"]);
    world.start().unwrap();
    let at = world.attach("test").unwrap();
    world.kill_fsd().unwrap();
    world.store_query = "?bandwidth=100".into();
    world.start().unwrap();
    let (name, expected) = world.layer.files.iter().next().unwrap();
    let read = std::fs::read(at.join(name));
    assert!(read.is_err() || read.is_ok_and(|got| got == *expected), "progress is no bytes");
    assert!(world.stats().unwrap().errors_answered > 0);
    world.kill_fsd().unwrap();
    world.store_query.clear();
    world.start().unwrap();
    world.compare(&at).unwrap();
}

#[test]
fn a_store_that_is_away_for_a_while_is_waited_for() {
    let mut world = world(&["--deadline-ms", "60000"]);
    let away = world.folder.path().join("away");
    world.store_query = format!("?fault_away_while_exists={}", away.display());
    world.start().unwrap();
    let at = world.attach("test").unwrap();
    std::fs::write(&away, "").unwrap();
    std::thread::scope(|scope| {
        let readers = [(); 6].map(|()| scope.spawn(|| right_and_refused(&world.layer, &at)));
        std::thread::sleep(Duration::from_millis(700));
        assert!(readers.iter().all(|reader| !reader.is_finished()), "they wait");
        std::fs::remove_file(&away).unwrap();
        for reader in readers {
            assert_eq!(reader.join().unwrap(), (world.layer.files.len(), 0));
        }
    });
}

#[test]
fn a_hint_that_leads_elsewhere_never_shows_other_bytes() {
    let mut world = world(&["--deadline-ms", "1000"]);
    let store = store_of(&world);
    let right = store.read_locations(&world.layer.id).unwrap().unwrap();
    let mut wrong = right.clone();
    let places: Vec<_> = right.placements.iter().flatten().copied().collect();
    let mut next = places.iter().cycle().skip(1);
    for place in wrong.placements.iter_mut().flatten() {
        *place = *next.next().unwrap();
    }
    // And one that claims far more than there is.
    if let Some(place) = wrong.placements.iter_mut().flatten().next() {
        place.stored_bytes = 16 << 20;
    }
    store.put_locations(&world.layer.id, &wrong).unwrap();
    world.start().unwrap();
    let at = world.attach("test").unwrap();
    assert!(right_and_refused(&world.layer, &at).1 > 0);
    store.put_locations(&world.layer.id, &right).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while right_and_refused(&world.layer, &at).1 > 0 {
        assert!(Instant::now() < deadline, "the hint is right\n{}", world.log());
    }
    assert!(world.stats().unwrap().verify_failures > 0);
}

#[test]
fn a_layer_that_cannot_be_served_on_does_not_keep_the_others() {
    let mut world = world(&[]);
    let shape =
        LayerShape { files: 4, max_file_bytes: 50 << 10, seed: 99, ..LayerShape::default() };
    let other = publish(&store_of(&world), &shape).unwrap();
    world.start().unwrap();
    let at = world.attach("test").unwrap();
    world.attach_layer("test", other.id, Plane::Auto).unwrap();
    world.kill_fsd().unwrap();
    let folder = world.data.join("cache").join(other.id.to_string());
    std::fs::write(folder.join("chunks"), "torn").unwrap();
    world.start().unwrap();
    world.compare(&at).unwrap();
    let layers = world.stats().unwrap().layers;
    assert_eq!(layers.len(), 1, "the damaged one is given up");
    assert!(world.log().contains("a mount is lost"), "and said so");
    assert_eq!(world.mounts().len(), 1);
    // It comes anew from the store.
    let again = world.attach_layer("test", other.id, Plane::Auto).unwrap();
    assert_eq!(right_and_refused(&other, Path::new(&again.mount_path)), (4, 0));
}

#[test]
fn a_restart_loses_no_open_file() {
    let mut world = world(&[]);
    world.start().unwrap();
    let at = world.attach("test").unwrap();
    let open: Vec<(File, &Vec<u8>)> = world
        .layer
        .files
        .iter()
        .map(|(name, expected)| (File::open(at.join(name)).unwrap(), expected))
        .collect();
    let lengths: Vec<usize> = open.iter().map(|(_, expected)| expected.len()).collect();
    let handles: Vec<File> = open.into_iter().map(|(file, _)| file).collect();
    for (round, handle) in handles.iter().enumerate() {
        if round % 4 == 0 {
            world.kill_fsd().unwrap();
            world.start().unwrap();
        }
        let mut got = vec![0; lengths[round]];
        handle.read_exact_at(&mut got, 0).unwrap();
        assert!(world.layer.files.values().nth(round).unwrap() == &got, "file {round}");
    }
}

#[test]
fn an_eviction_never_takes_what_is_mounted_and_a_mount_that_races_it_is_whole() {
    let mut world = world(&["--sync-ms", "50"]);
    world.start().unwrap();
    let (rounds, evicted) = (30, std::sync::atomic::AtomicUsize::new(0));
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                if world.evict().is_ok() {
                    evicted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                }
            }
        });
        let reads = [(); 3].map(|()| {
            scope.spawn(|| {
                for round in 0..rounds {
                    let holder = format!("{:?}-{round}", std::thread::current().id());
                    let at = world.attach(&holder).unwrap();
                    let files = world.layer.files.iter();
                    for (name, expected) in files.skip(round % 7).step_by(5) {
                        assert!(std::fs::read(at.join(name)).unwrap() == *expected, "{name}");
                    }
                    world.detach(&holder).unwrap();
                }
            })
        });
        let results = reads.map(std::thread::ScopedJoinHandle::join);
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
    println!("{} evictions", evicted.into_inner());
    assert!(world.mounts().is_empty());
}
