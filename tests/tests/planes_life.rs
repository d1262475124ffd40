//! Planes that fsd answers itself: what ends with it, what is kept by the kernel, what a full disk and
//! a user without root do to them.
#![allow(clippy::unwrap_used)]

mod fsd_world;

use fsd_world::{LayerShape, World};
use proto::v1::Plane;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use sys::mount::{Recursive, Unmount};
use sys::probe::{Capability, skip_test};

/// Those that cannot be served on by a later fsd.
const MORTAL: [Plane; 2] = [Plane::ErofsFuse, Plane::Fuse];

/// What a reader of a dead fsd's layer may get: EIO, ENOTCONN, ECONNABORTED.
const CLOSED: [i32; 3] = [5, 107, 103];

fn attach(world: &World, plane: Plane) -> PathBuf {
    let attached = world.attach_as("test", plane).unwrap();
    assert_eq!(attached.plane(), plane);
    attached.mount_path.into()
}

fn drop_caches() {
    std::fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
}

#[test]
fn a_dead_fsd_is_an_error_for_its_readers_and_never_zeros() {
    for plane in MORTAL {
        // Without its store, so that a reader is blocked when fsd dies.
        let mut world = World::new(&LayerShape::default()).unwrap();
        let away = world.folder.path().join("away");
        world.store_query = format!("?fault_away_while_exists={}", away.display());
        world.start().unwrap();
        let at = attach(&world, plane);
        std::fs::write(&away, "").unwrap();
        let (name, expected) = world.layer.files.iter().next_back().unwrap();
        let (path, expected) = (at.join(name), expected.clone());
        let file = std::fs::File::open(&path).unwrap();
        let blocked = std::thread::spawn(move || {
            let mut got = vec![0; expected.len()];
            file.read_exact_at(&mut got, 0).map(|()| got == expected)
        });
        std::thread::sleep(Duration::from_millis(150));
        assert!(!blocked.is_finished(), "{plane:?}: it waits for its bytes");
        world.kill_fsd().unwrap();
        let error = blocked.join().unwrap().unwrap_err();
        assert!(CLOSED.contains(&error.raw_os_error().unwrap()), "{plane:?}: {error}");
        for name in world.layer.files.keys() {
            let error = std::fs::read(at.join(name)).unwrap_err();
            assert!(CLOSED.contains(&error.raw_os_error().unwrap()), "{plane:?}, {name}: {error}");
        }
        // The next fsd takes the dead mount away and serves the layer anew.
        std::fs::remove_file(&away).unwrap();
        world.start().unwrap();
        assert!(world.mounts().is_empty() && world.stats().unwrap().layers.is_empty());
        let at = attach(&world, plane);
        world.compare(&at).unwrap();
        assert!(world.detach("test").unwrap());
        world.drain(false).unwrap();
        assert!(world.wait_end().unwrap().success());
        assert!(world.mounts().is_empty());
    }
}

#[test]
fn fuse_is_asked_once_for_what_the_kernel_can_keep() {
    let mut world = World::new(&LayerShape::default()).unwrap();
    world.start().unwrap();
    let at = attach(&world, Plane::Fuse);
    world.compare(&at).unwrap();
    let reads = |world: &World| {
        let layer = &world.stats().unwrap().layers[0];
        layer.hits + layer.waits + layer.fills
    };
    let before = reads(&world);
    world.compare(&at).unwrap();
    assert_eq!(reads(&world), before, "the page cache survives a close and an open");
    drop_caches();
    world.compare(&at).unwrap();
    assert!(reads(&world) > before);
}

#[test]
fn a_clone_of_a_fuse_mount_is_served_until_it_is_gone() {
    let mut world = World::new(&LayerShape::default()).unwrap();
    world.start().unwrap();
    let at = attach(&world, Plane::Fuse);
    let inside = world.folder.path().join("data/clone");
    std::fs::create_dir_all(&inside).unwrap();
    sys::mount::clone_tree(&at, Recursive::No).unwrap().attach(&inside).unwrap();
    assert!(world.detach("test").unwrap());
    assert!(world.evict().is_err(), "its superblock lives");
    world.compare(&inside).unwrap();
    // Mounted once more beside the clone; both are served.
    let at = attach(&world, Plane::Fuse);
    drop_caches();
    world.compare(&at).unwrap();
    world.compare(&inside).unwrap();
    assert!(world.detach("test").unwrap());
    assert!(world.drain(false).is_err(), "the clone is in use");
    sys::mount::unmount(&inside, Unmount::Now).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while world.evict().is_err() {
        assert!(Instant::now() < deadline, "never released");
        std::thread::sleep(Duration::from_millis(20));
    }
    world.drain(false).unwrap();
    assert!(world.wait_end().unwrap().success());
}

#[test]
fn the_plane_is_forced_by_name_and_a_missing_one_is_an_error() {
    let mut world = World::new(&LayerShape::default()).unwrap();
    for (name, plane) in [
        ("fuse", Plane::Fuse),
        ("erofs-fuse", Plane::ErofsFuse),
        ("erofs-fanotify", Plane::ErofsFanotify),
    ] {
        world.options = vec!["--plane".to_owned(), name.to_owned()];
        world.start().unwrap();
        let attached = world.attach_as("test", Plane::Auto).unwrap();
        assert_eq!(attached.plane(), plane);
        world.compare(Path::new(&attached.mount_path)).unwrap();
        world.detach("test").unwrap();
        world.drain(false).unwrap();
        world.wait_end().unwrap();
    }
    let scratch = world.folder.path();
    let needs = fsd::PlaneKind::ErofsFscache.needs();
    if sys::probe::Capabilities::probe_only(scratch, needs).first_missing(needs).is_some() {
        world.options = ["--plane", "erofs-fscache"].map(str::to_owned).to_vec();
        let error = format!("{:#}", world.start().unwrap_err());
        assert!(error.contains("no plane erofs-fscache"), "{error}");
    }
}

/// As a user who owns the data directory and the store and nothing else. Where only root may open
/// /dev/fuse, a device that everybody may open takes its place, as distributions have it.
#[test]
fn a_user_without_root_mounts_fuse_in_a_user_namespace() {
    const SCRIPT: &str = r#"
        set -e
        mknod "$0/fuse" c 10 229
        chmod 666 "$0/fuse"
        mount --bind "$0/fuse" /dev/fuse
        cd "$0"
        exec setpriv --reuid 1000 --regid 1000 --clear-groups \
            unshare --user --map-root-user --mount "$@"
    "#;
    let mut world = World::new(&LayerShape::default()).unwrap();
    let folder = world.folder.path().to_owned();
    std::fs::create_dir_all(&world.data).unwrap();
    let program = folder.join("program");
    std::fs::copy(env!("CARGO_BIN_EXE_fsd-process"), &program).unwrap();
    let owned = Command::new("chown").args(["-R", "1000:1000"]).arg(&folder).status().unwrap();
    assert!(owned.success());
    let needs = [Capability::Fuse, Capability::UserNamespaces];
    if skip_test("a_user_without_root_mounts_fuse_in_a_user_namespace", &folder, &needs) {
        return;
    }
    let (name, expected) = world.layer.files.iter().next().unwrap();
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", SCRIPT])
        .arg(&folder)
        .arg(&program)
        .args(["trial", "--layer", &world.layer.id.to_string(), "--name", name])
        .arg("--data")
        .arg(&world.data)
        .arg("--store")
        .arg(format!("file://{}", world.store_folder.display()))
        .output()
        .unwrap();
    let (told, log) = (output.stdout.as_slice(), String::from_utf8_lossy(&output.stderr));
    let wanted = format!("PLANE_FUSE {}\n", layer::Digest::of(expected));
    assert_eq!(String::from_utf8_lossy(told), wanted, "{log}");
    assert!(output.status.success(), "{log}");
    world.end();
}
