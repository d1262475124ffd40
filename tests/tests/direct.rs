//! The plane `direct`: EROFS over the plain data space on the store, with no daemon in the read path.
#![allow(clippy::unwrap_used)]

mod fsd_world;

use fsd_world::{LayerShape, World, drop_caches};
use layer::ErrorKind;
use proto::v1::Plane;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use store::{SpaceMade, Store};
use sys::mount::{Recursive, Unmount};

fn store(world: &World) -> Store {
    let url = format!("file://{}", world.store_folder.display());
    Store::open(store::open(&url).unwrap()).unwrap()
}

fn space(world: &World) -> PathBuf {
    world.store_folder.join("spaces").join(world.layer.id.to_string())
}

/// A world whose layer has its plain data space on the store.
fn materialised() -> World {
    let world = World::new(&LayerShape::default()).unwrap();
    let made = store(&world).put_space(&world.layer.id).unwrap();
    assert_eq!(made, SpaceMade { bytes: world.layer.data_bytes, existed: false });
    world
}

/// Makes a published object writable and opens it.
fn tamper(path: &Path) -> std::fs::File {
    let mut permissions = std::fs::metadata(path).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o600);
    std::fs::set_permissions(path, permissions).unwrap();
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn refusal(world: &World) -> String {
    format!("{:#}", world.attach_as("test", Plane::Direct).unwrap_err())
}

#[test]
fn a_mount_reads_on_after_the_daemon_died_and_is_found_again() {
    let mut world = materialised();
    world.start().unwrap();
    let attached = world.attach_as("test", Plane::Direct).unwrap();
    assert_eq!(attached.plane(), Plane::Direct);
    assert!(attached.complete, "no read needs a fetch");
    let at = PathBuf::from(&attached.mount_path);
    let (some, _) = world.layer.files.first_key_value().unwrap();
    std::fs::read(at.join(some)).unwrap();
    world.kill_fsd().unwrap();
    // Nobody of ours is left to answer.
    for index in 0..fsd::KEEPERS {
        if world.keeper_pid(index).is_some() {
            world.kill_keeper(index).unwrap();
        }
    }
    drop_caches();
    world.compare(&at).unwrap();
    world.start().unwrap();
    let stats = world.stats().unwrap();
    assert_eq!(stats.layers.len(), 1, "served on\n{}", world.log());
    assert_eq!(stats.layers[0].plane(), Plane::Direct);
    assert_eq!(stats.layers[0].holders, ["test"]);
    assert_eq!((stats.fetched_bytes, stats.events), (0, 0));
    drop_caches();
    world.compare(&at).unwrap();
    assert_eq!(world.attach_as("other", Plane::Direct).unwrap().mount_path, attached.mount_path);
    assert!(world.attach_as("third", Plane::ErofsFuse).is_err(), "served by another plane");
    assert!(!world.detach("test").unwrap());
    assert!(world.detach("other").unwrap());
    assert!(world.mounts().is_empty());
    // Any plane may have it now.
    let auto = world.attach_as("test", Plane::Auto).unwrap();
    assert_ne!(auto.plane(), Plane::Direct);
    world.compare(Path::new(&auto.mount_path)).unwrap();
    assert!(world.detach("test").unwrap());
    world.drain(false).unwrap();
}

#[test]
fn a_clone_of_the_mount_outlives_the_last_detach() {
    let mut world = materialised();
    world.start().unwrap();
    let at = PathBuf::from(world.attach_as("a", Plane::Direct).unwrap().mount_path);
    let clone = sys::mount::clone_tree(&at, Recursive::No).unwrap();
    let inside = world.folder.path().join("data/clone");
    std::fs::create_dir_all(&inside).unwrap();
    clone.attach(&inside).unwrap();
    drop(clone);
    assert!(world.detach("a").unwrap());
    assert!(world.evict().is_err(), "its superblock lives");
    world.kill_fsd().unwrap();
    drop_caches();
    world.compare(&inside).unwrap();
    world.start().unwrap();
    sys::mount::unmount(&inside, Unmount::Now).unwrap();
}

#[test]
fn what_is_absent_or_has_the_wrong_length_is_refused_and_says_what_helps() {
    let mut world = World::new(&LayerShape::default()).unwrap();
    world.start().unwrap();
    let absent = refusal(&world);
    assert!(absent.contains("no plain data space") && absent.contains("materialise"), "{absent}");
    store(&world).put_space(&world.layer.id).unwrap();
    let right = world.layer.data_bytes;
    for wrong in [right - 4096, right - 1, right + 1, 0] {
        tamper(&space(&world)).set_len(wrong).unwrap();
        let refused = refusal(&world);
        assert!(refused.contains(&format!("has {wrong} bytes, not {right}")), "{refused}");
    }
    assert!(world.mounts().is_empty());
    assert!(world.stats().unwrap().layers.is_empty());
    // The layer itself is none the worse.
    let at = world.attach("test").unwrap();
    world.compare(&at).unwrap();
}

#[test]
fn a_store_that_is_no_mounted_directory_is_refused() {
    let mut world = materialised();
    // What slows reads down must not be gone around.
    world.store_query = "?latency_ms=1".to_owned();
    world.start().unwrap();
    let refused = refusal(&world);
    assert!(refused.contains("is no mounted directory"), "{refused}");
}

#[test]
fn a_data_space_is_verified_when_it_is_made_and_by_its_check() {
    let world = materialised();
    let (store, id) = (store(&world), world.layer.id);
    let (_, table) = store.read_layer_tables(&id).unwrap();
    assert_eq!(store.check_space(&id, &table).unwrap(), Vec::<String>::new());
    assert!(store.put_space(&id).unwrap().existed);
    // One flipped bit, in content and in zeros.
    let zero = table.chunks().iter().position(layer::chunk::Chunk::is_zero).unwrap();
    for index in [0, zero, table.len() - 1] {
        let (file, at) = (tamper(&space(&world)), table.chunks()[index].offset() + 77);
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
        let found = store.check_space(&id, &table).unwrap();
        assert_eq!(found.len(), 1);
        assert!(found[0].contains(&format!("chunk {index} ")), "{found:?}");
        assert!(!store.put_space(&id).unwrap().existed, "made again");
        assert!(store.check_space(&id, &table).unwrap().is_empty());
    }
    tamper(&space(&world)).set_len(4096).unwrap();
    assert_eq!(store.check_space(&id, &table).unwrap().len(), 1);
}

#[test]
fn a_damaged_pack_makes_no_data_space() {
    let world = World::new(&LayerShape::default()).unwrap();
    let id = world.layer.id;
    let pack = world.layer.packs[0].to_string();
    let path = world.store_folder.join("packs").join(&pack[..2]).join(&pack);
    tamper(&path).write_all_at(&[0; 64], 100_000).unwrap();
    assert_eq!(store(&world).put_space(&id).unwrap_err().kind(), ErrorKind::Corrupt);
    assert!(store(&world).space(&id).unwrap().is_none(), "nothing is visible");
    std::fs::remove_file(&path).unwrap();
    assert_eq!(store(&world).put_space(&id).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(store(&world).space(&id).unwrap().is_none());
}
