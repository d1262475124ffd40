//! Layers mounted lazily by the kernel: every byte, the counters, and what is left afterwards.
#![allow(clippy::unwrap_used)]

mod fsd_world;

use fsd_world::{LayerShape, World, drop_caches, wait_until};
use proto::v1::Plane;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;
use sys::mount::{Recursive, Unmount};

fn world() -> World {
    World::new(&LayerShape::default()).unwrap()
}

#[test]
fn a_lazy_mount_has_every_byte_and_drops_its_mark_when_complete() {
    let mut world = world();
    world.start().unwrap();
    let at = world.attach("test").unwrap();
    let before = world.stats().unwrap();
    assert_eq!(std::fs::read_dir(&at).unwrap().count(), world.layer.files.len());
    assert_eq!(world.stats().unwrap().events, before.events, "listing raises no event");
    assert!(before.layers[0].marked && !before.layers[0].complete);
    assert_eq!(before.keeper_pids.len(), 2);

    world.compare(&at).unwrap();
    let after = world.stats().unwrap();
    assert!(after.events > 0 && after.errors_answered == 0);
    assert!(after.layers[0].asked_bytes <= after.layers[0].data_bytes);

    world.complete().unwrap();
    wait_until("the drop of the mark", || !world.stats().unwrap().layers[0].marked);
    let complete = world.stats().unwrap();
    assert!(complete.layers[0].complete);
    drop_caches();
    world.compare(&at).unwrap();
    assert_eq!(world.stats().unwrap().events, complete.events, "a complete layer raises none");

    assert!(world.detach("test").unwrap());
    assert!(world.mounts().is_empty());
    world.drain(false).unwrap();
    assert!(world.wait_end().unwrap().success());
    assert!(world.keeper_pid(0).is_none() && world.keeper_pid(1).is_none());
}

#[test]
fn one_small_read_fetches_little() {
    let mut world = world();
    world.start().unwrap();
    let at = world.attach("test").unwrap();
    let (name, expected) =
        world.layer.files.iter().find(|(_, content)| content.len() > 300_000).unwrap();
    let mut got = [0; 4096];
    File::open(at.join(name)).unwrap().read_exact_at(&mut got, 200_000).unwrap();
    assert_eq!(got[..], expected[200_000..204_096]);
    let stats = world.stats().unwrap();
    assert!(stats.fetched_bytes > 0 && stats.fetched_bytes * 4 < stats.layers[0].data_bytes);
}

#[test]
fn erofs_fuse_has_every_byte_and_fails_closed() {
    let mut world = world();
    world.start().unwrap();
    let attached = world.attach_as("test", Plane::ErofsFuse).unwrap();
    assert_eq!(attached.plane(), Plane::ErofsFuse);
    let at = Path::new(&attached.mount_path).to_owned();
    let unread = world.layer.files.keys().next_back().unwrap().clone();
    for (name, expected) in world.layer.files.iter().filter(|(name, _)| **name != unread) {
        assert!(std::fs::read(at.join(name)).unwrap() == *expected, "{name}");
    }
    assert!(world.attach_as("other", Plane::ErofsFanotify).is_err(), "served by another plane");
    world.kill_fsd().unwrap();
    let broken = std::fs::read(at.join(&unread));
    assert!(broken.is_err() || broken.unwrap() == world.layer.files[&unread], "zeros were read");
    world.start().unwrap();
    assert!(world.stats().unwrap().layers.is_empty(), "nobody can serve it on");
    assert!(world.mounts().is_empty(), "{:?}", world.mounts());

    world.attach_as("again", Plane::ErofsFuse).unwrap();
    world.complete().unwrap();
    world.compare(&at).unwrap();
    assert!(world.detach("again").unwrap());
    world.attach_as("direct", Plane::ErofsFuse).unwrap();
    let before = world.stats().unwrap();
    drop_caches();
    world.compare(&at).unwrap();
    assert_eq!(world.stats().unwrap().layers[0].hits, before.layers[0].hits, "read directly");
    assert!(world.detach("direct").unwrap());
    world.drain(false).unwrap();
    assert!(world.wait_end().unwrap().success());
    assert!(world.mounts().is_empty());
}

#[test]
fn holders_count_once_each_and_survive_a_restart() {
    let mut world = world();
    world.start().unwrap();
    let at = world.attach("a").unwrap();
    assert_eq!(world.attach("a").unwrap(), at);
    world.attach("b").unwrap();
    assert!(!world.detach("a").unwrap());
    assert!(world.detach("a").is_err(), "it holds nothing any more");
    assert!(world.evict().is_err(), "in use");
    assert!(world.drain(false).is_err(), "in use");
    std::fs::read(at.join("file-0000")).unwrap();
    world.kill_fsd().unwrap();
    world.start().unwrap();
    let stats = world.stats().unwrap();
    assert_eq!(stats.layers[0].holders, ["b"]);
    assert!(stats.layers[0].marked);
    world.compare(&at).unwrap();
    assert!(world.detach("b").unwrap());
    assert!(world.mounts().is_empty());
    assert!(world.evict().unwrap() > 0);
}

#[test]
fn the_kernel_reads_little_ahead_until_a_layer_is_busy_or_complete() {
    let mut world = world();
    world.start().unwrap();
    let noted = world.run_folder().join("holders").join(world.layer.id.to_string()).join(".device");
    let mut at = world.attach("a").unwrap();
    wait_until("a mount while nobody else mounts", || {
        let known = noted.exists();
        if !known {
            world.detach("a").unwrap();
            at = world.attach("a").unwrap();
        }
        known
    });
    let name = std::fs::read_to_string(&noted).unwrap();
    let knob = Path::new("/sys/class/bdi").join(name).join("read_ahead_kb");
    let kib = || std::fs::read_to_string(&knob).unwrap().trim().to_owned();
    assert_eq!(kib(), "16");
    world.compare(&at).unwrap();
    assert_eq!(kib(), "128", "much was read");
    world.kill_fsd().unwrap();
    world.start().unwrap();
    assert_eq!(kib(), "16", "the next fsd was asked for nothing yet");
    world.complete().unwrap();
    wait_until("the readahead of a complete layer", || kib() == "128");
    world.kill_fsd().unwrap();
    world.start().unwrap();
    assert_eq!(kib(), "128", "complete when it was taken over");
}

#[test]
fn a_mount_that_nobody_holds_is_gone_after_a_restart() {
    let mut world = world();
    world.start().unwrap();
    world.attach("a").unwrap();
    world.kill_fsd().unwrap();
    let holder = world.run_folder().join("holders").join(world.layer.id.to_string()).join("a");
    std::fs::remove_file(holder).unwrap();
    world.start().unwrap();
    assert!(world.mounts().is_empty());
    assert!(world.stats().unwrap().layers.is_empty());
    // And a holder without a mount is forgotten.
    let folder = world.run_folder().join("holders").join(world.layer.id.to_string());
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("ghost"), "").unwrap();
    world.kill_fsd().unwrap();
    world.start().unwrap();
    assert!(!folder.exists());
}

#[test]
fn a_clone_of_the_mount_is_served_after_the_last_detach_and_after_a_restart() {
    let mut world = world();
    world.start().unwrap();
    let at = world.attach("a").unwrap();
    let clone = sys::mount::clone_tree(&at, Recursive::No).unwrap();
    let inside = world.folder.path().join("data/clone");
    std::fs::create_dir_all(&inside).unwrap();
    clone.attach(&inside).unwrap();
    drop(clone);
    assert!(world.detach("a").unwrap());
    assert!(world.evict().is_err(), "its superblock lives");
    std::fs::read(inside.join("file-0000")).unwrap();
    world.kill_fsd().unwrap();
    world.start().unwrap();
    world.compare(&inside).unwrap();
    world.attach("b").unwrap();
    world.compare(&at).unwrap();
    assert!(world.detach("b").unwrap());
    sys::mount::unmount(&inside, Unmount::Now).unwrap();
    wait_until("the release", || world.evict().is_ok());
}

#[test]
fn a_second_daemon_is_refused_with_the_pid_of_the_first() {
    let mut world = world();
    world.start().unwrap();
    let first = world.fsd_pid().unwrap();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_fsd-process"))
        .args(["fsd", "--store", "memory:x", "--data"])
        .arg(&world.data)
        .output()
        .unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains(&format!("process {first}")), "{text}");
    world.attach("still works").unwrap();
}

#[test]
fn a_corrupt_pack_is_an_error_and_never_wrong_bytes() {
    let mut world = world();
    for pack in &world.layer.packs {
        let pack = pack.to_string();
        let path = world.store_folder.join("packs").join(&pack[..2]).join(&pack);
        let mut bytes = std::fs::read(&path).unwrap();
        for at in (10_000..bytes.len() - 100_000).step_by(150_000) {
            bytes[at] ^= 0x40;
        }
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
    }
    world.start().unwrap();
    let at = world.attach("test").unwrap();
    let (mut refused, mut right) = (0, 0);
    for (name, expected) in &world.layer.files {
        match std::fs::read(at.join(name)) {
            Ok(got) => {
                assert!(got == *expected, "{name}");
                right += 1;
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(5), "{name}");
                refused += 1;
            }
        }
    }
    assert!(refused > 0 && right > 0, "{refused} refused, {right} right");
    let stats = world.stats().unwrap();
    assert!(stats.verify_failures > 0);
    assert_eq!(stats.layers[0].verify_failures, stats.verify_failures);
    assert!(stats.layers[0].denials > 0);
    let pack = world.layer.packs[0].to_string();
    let told = stats.incidents.iter().filter(|incident| incident.kind == "integrity");
    // Each damaged chunk was read once more before its readers were refused.
    let told = told.filter(|incident| incident.text.contains(&pack)).count();
    assert!(told >= 2, "{:?}", stats.incidents);
}

#[test]
fn mapped_and_copied_files_have_every_byte() {
    let mut world = world();
    world.start().unwrap();
    let at = world.attach("test").unwrap();
    let names: Vec<&String> = world.layer.files.keys().collect();
    // cp uses copy_file_range and SEEK_DATA; cmp and sort read by mapping or by pieces.
    for name in &names[..4] {
        let copy = world.folder.path().join("copy");
        let copied = std::process::Command::new("cp")
            .args(["--sparse=always", "--reflink=never"])
            .arg(at.join(name))
            .arg(&copy)
            .status()
            .unwrap();
        assert!(copied.success());
        assert!(std::fs::read(&copy).unwrap() == world.layer.files[*name], "{name}");
    }
    let mut sendfile = File::open(at.join(names[5])).unwrap();
    let mut copy = tempfile::tempfile().unwrap();
    std::io::copy(&mut sendfile, &mut copy).unwrap();
    let mut got = vec![0; world.layer.files[names[5]].len()];
    copy.read_exact_at(&mut got, 0).unwrap();
    assert!(got == world.layer.files[names[5]]);
    let direct = errno_of_direct_open(&at.join(names[6]));
    assert_eq!(direct, Some(22), "O_DIRECT is refused with EINVAL");
}

/// The errno of an `O_DIRECT` open.
fn errno_of_direct_open(path: &Path) -> Option<i32> {
    use std::os::unix::fs::OpenOptionsExt;
    let opened = File::options().read(true).custom_flags(0o40000).open(path);
    opened.err().and_then(|error| error.raw_os_error())
}

#[test]
fn a_stop_without_a_drain_is_taken_over_like_a_crash() {
    let mut world = world();
    world.start().unwrap();
    let at = world.attach("a").unwrap();
    let keepers = world.stats().unwrap().keeper_pids;
    let pid = i32::try_from(world.fsd_pid().unwrap()).unwrap();
    let pidfd = sys::process::pidfd_open(pid).unwrap();
    sys::process::pidfd_signal(std::os::fd::AsFd::as_fd(&pidfd), 15, sys::process::Reach::Process)
        .unwrap();
    assert!(world.wait_end().unwrap().success());
    let reader = {
        let (path, expected) = world.layer.files.iter().next().unwrap();
        let (path, expected) = (at.join(path), expected.clone());
        std::thread::spawn(move || std::fs::read(path).unwrap() == expected)
    };
    std::thread::sleep(Duration::from_millis(100));
    assert!(!reader.is_finished(), "it waits for the next fsd");
    world.start().unwrap();
    assert!(reader.join().unwrap());
    assert_eq!(world.stats().unwrap().keeper_pids, keepers, "the same keepers");
    world.compare(&at).unwrap();
}

#[test]
fn a_bad_holder_or_an_unknown_layer_leaves_nothing_behind() {
    let mut world = world();
    world.start().unwrap();
    assert!(world.attach("").is_err());
    assert!(world.attach(&"/".repeat(300)).is_err());
    assert!(world.mounts().is_empty());
    assert!(world.stats().unwrap().layers.is_empty());
    world.layer.id = layer::LayerId([9; 32]);
    let error = world.attach("a").unwrap_err();
    assert!(format!("{error:#}").contains("not"), "{error:#}");
    assert!(world.stats().unwrap().layers.is_empty());
}

#[test]
fn many_attaches_of_one_layer_at_once_are_one_mount() {
    let mut world = world();
    world.start().unwrap();
    std::thread::scope(|scope| {
        for index in 0..12 {
            let world = &world;
            scope.spawn(move || world.attach(&format!("holder-{index}")).unwrap());
        }
    });
    assert_eq!(world.mounts().len(), 1);
    assert_eq!(world.stats().unwrap().layers[0].holders.len(), 12);
    std::thread::scope(|scope| {
        for index in 0..12 {
            let world = &world;
            scope.spawn(move || world.detach(&format!("holder-{index}")).unwrap());
        }
    });
    assert!(world.mounts().is_empty());
}

#[test]
fn when_nobody_held_the_group_only_a_complete_layer_is_served_on() {
    let mut world = world();
    for complete in [false, true] {
        world.start().unwrap();
        let at = world.attach("a").unwrap();
        if complete {
            world.complete().unwrap();
        } else {
            std::fs::read(at.join("file-0000")).unwrap();
        }
        world.kill_keeper(0).unwrap();
        world.kill_keeper(1).unwrap();
        world.kill_fsd().unwrap();
        // fsd may have started other keepers before it died.
        for index in 0..fsd::KEEPERS {
            if world.keeper_pid(index).is_some() {
                let _ = world.kill_keeper(index);
            }
        }
        wait_until("the end of the keepers", || (0..2).all(|i| world.keeper_pid(i).is_none()));
        world.start().unwrap();
        let layers = world.stats().unwrap().layers;
        if complete {
            assert_eq!(layers[0].holders, ["a"]);
            world.compare(&at).unwrap();
            assert!(world.detach("a").unwrap());
        } else {
            assert!(layers.is_empty() && world.log().contains("a mount is lost"));
        }
        assert!(world.mounts().is_empty());
        world.drain(false).unwrap();
        world.wait_end().unwrap();
    }
}
