//! The plane `direct` as a person uses it: laid out, mounted without a daemon in the way, checked.

use crate::world::World;
use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;

/// The plain data space of the only layer.
fn space(world: &World) -> PathBuf {
    let mut spaces = fs::read_dir(world.data().join("store/spaces")).unwrap();
    let path = spaces.next().unwrap().unwrap().path();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    path
}

#[test]
fn a_materialised_layer_is_mounted_directly() {
    let world = World::new();
    let tree = world.tree("tree");
    world.build(&tree, "base/x:1");
    let dir = world.mount_point();
    let at = dir.to_str().unwrap();
    world.run(&["mount", "base/x:1", at, "--plane", "direct"]).fails(1, "lamella materialise");
    let made = world.line("materialise base/x:1 --json").ok().json();
    assert_eq!(made["layers"][0]["existed"], false);
    assert_eq!(made["layers"][0]["bytes"], fs::metadata(space(&world)).unwrap().len());
    assert!(world.line("materialise base/x:1").ok().out.contains("whole already"));
    world.run(&["mount", "base/x:1", at, "--plane", "direct"]).ok();
    let stats = world.line("stats --json").ok().json();
    assert_eq!(stats["layers"][0]["plane"], "direct");
    assert_eq!(fs::read(dir.join("sub/big")).unwrap(), fs::read(tree.join("sub/big")).unwrap());
    assert_eq!(world.line("stats --json").ok().json()["store_reads"], stats["store_reads"]);
    world.run(&["umount", at]).ok();
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn fsck_finds_a_damaged_data_space_and_materialise_makes_it_again() {
    let world = World::new();
    world.build(&world.tree("tree"), "base/x:1");
    world.line("materialise base/x:1").ok();
    world.line("fsck base/x:1 --read-data").ok();
    let file = OpenOptions::new().read(true).write(true).open(space(&world)).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 5000).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 5000).unwrap();
    let damaged = world.line("fsck base/x:1 --read-data").fails(1, "is damaged in 1 places");
    assert!(damaged.out.contains("in the plain data space of layer"), "{}", damaged.out);
    assert!(world.line("materialise base/x:1").ok().out.contains("made and verified"));
    world.line("fsck base/x:1 --read-data").ok();
    // A cut is seen without reading.
    OpenOptions::new().write(true).open(space(&world)).unwrap().set_len(4096).unwrap();
    let cut = world.line("fsck base/x:1").fails(1, "is damaged in 1 places");
    assert!(cut.out.contains("has 4096 bytes, not"), "{}", cut.out);
}

#[test]
fn doctor_says_of_every_plane_whether_it_can_be_used() {
    let world = World::new();
    let planes = world.line("doctor --json").ok().json()["planes"].clone();
    for name in ["erofs-fanotify", "erofs-fuse", "fuse", "erofs-fscache", "direct"] {
        let plane = planes.as_array().unwrap().iter().find(|plane| plane["name"] == name);
        let plane = plane.unwrap_or_else(|| panic!("{name} is not in {planes}"));
        let why_not = plane["why_not"].as_str().unwrap_or_default();
        assert_eq!(plane["available"].as_bool().unwrap(), why_not.is_empty(), "{plane}");
        assert!(!why_not.contains("not in this version"), "{plane}");
    }
    let text = world.line("--store memory:x doctor").ok().out;
    assert!(text.contains("the store memory:x is no directory"), "{text}");
}
