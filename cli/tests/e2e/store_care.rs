//! What keeps a store in order: gc, fsck, repair, diff, copy-store, export, import; and the leases of a node.

use crate::world::World;
use std::fs;
use std::path::{Path, PathBuf};

fn objects(world: &World, class: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![world.data().join("store").join(class)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            match entry.file_type().unwrap().is_dir() {
                true => folders.push(entry.path()),
                false => found.push(entry.path()),
            }
        }
    }
    found.sort();
    found
}

/// As if the time of all leases were over.
fn end_leases(world: &World) {
    for lease in objects(world, "leases") {
        fs::remove_file(lease).unwrap();
    }
}

fn flip(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let at = bytes.len() / 3;
    bytes[at] ^= 1;
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_store_is_collected_checked_mended_compared_and_carried_from_the_command_line() {
    let world = World::new();
    let tree = world.tree("tree");
    world.build(&tree, "base/one:1");
    fs::write(tree.join("hello"), "other words\n").unwrap();
    fs::remove_file(tree.join("link")).unwrap();
    fs::write(tree.join("sub/new"), "new").unwrap();
    world.build(&tree, "base/two:1");
    world.line("env create both:1 --layer base/one:1 --layer base/two:1").ok();

    let changes = world.line("diff base/one:1 base/two:1 --json").ok().json();
    let paths: Vec<(&str, &str)> = changes["paths"]
        .as_array()
        .unwrap()
        .iter()
        .map(|path| (path["change"].as_str().unwrap(), path["path"].as_str().unwrap()))
        .filter(|(change, path)| *change != "changed" || path.ends_with("hello"))
        .collect();
    assert_eq!(paths, [("changed", "/hello"), ("removed", "/link"), ("added", "/sub/new")]);
    let text = world.line("diff base/one:1 base/two:1").ok().out;
    assert!(
        text.contains("M /hello (6 -> 12) [content") && text.contains("A /sub/new (3)"),
        "{text}"
    );
    assert!(!text.contains("sub/big"), "an unchanged file is no change: {text}");
    let none = world.line("diff both:1 both:1").ok().out;
    assert!(none.starts_with("0 added"), "{none}");

    let spare = world.path("spare");
    let copied =
        world.line(&format!("copy-store --all --to {} --json", spare.display())).ok().json();
    assert_eq!((&copied["references"], &copied["layers"]), (&3.into(), &2.into()), "{copied}");
    let again =
        world.line(&format!("copy-store both:1 --to {} --json", spare.display())).ok().json();
    assert_eq!(again["sent_chunks"], 0, "{again}");
    let file = world.path("both.lamella");
    world.line(&format!("export both:1 {}", file.display())).ok();
    world.line(&format!("export both:1 {}", file.display())).fails(1, "exists");

    world.line("fsck --read-data").ok();
    flip(&objects(&world, "packs")[0]);
    fs::remove_file(&objects(&world, "layers")[0]).unwrap();
    let damaged = world.line("fsck --read-data");
    assert_eq!(damaged.code, 1, "{damaged:?}");
    assert!(damaged.out.contains("env/both:1") && damaged.out.contains("is lost"), "{damaged:?}");
    let nothing = world.path("nothing");
    world.line(&format!("repair --from {}", nothing.display())).fails(1, "is no store");
    world.line(&format!("repair --from {}", spare.display())).ok();
    world.line("fsck --read-data").ok();
    world.line("fsck both:1 --read-data").ok();

    let other = World::new();
    other.line(&format!("import {}", file.display())).ok();
    other.line("fsck --read-data").ok();
    let ids = [&world, &other].map(|world| world.line("inspect both:1 --json").ok().json());
    assert_eq!(ids[0]["environment"], ids[1]["environment"]);

    world.line("untag both:1").ok();
    world.line("untag base/two:1").ok();
    end_leases(&world);
    let before = objects(&world, "layers").len();
    let dry = world.line("gc --dry-run --history 0s --json").ok().json();
    assert!(dry["condemned"].as_u64().unwrap() >= 2, "{dry}");
    let first = world.line("gc --history 0s --grace 0s").ok();
    assert!(first.out.contains("condemned layer") && first.out.contains("deleted: 0"), "{first:?}");
    assert_eq!(objects(&world, "layers").len(), before);
    world.line("gc --undo").ok();
    world.line("gc --history 0s --grace 0s").ok();
    let last = world.line("gc --history 0s --grace 0s --json").ok().json();
    assert!(last["deleted"].as_u64().unwrap() >= 2 && last["freed_bytes"].as_u64().unwrap() > 0);
    assert_eq!(objects(&world, "layers").len(), 1);
    world.line("fsck base/one:1 --read-data").ok();
    world.line("fsck --read-data").ok();
}

#[test]
fn what_a_node_has_mounted_is_never_collected() {
    let world = World::new();
    world.build(&world.tree("tree"), "base/one:1");
    let dir = world.mount_point();
    world.line(&format!("mount base/one:1 {}", dir.display())).ok();
    world.line("untag base/one:1").ok();
    for _ in 0..3 {
        world.line("gc --history 0s --grace 0s").ok();
    }
    assert_eq!(objects(&world, "layers").len(), 1);
    assert_eq!(fs::read(dir.join("sub/big")).unwrap().len(), 300_000);
    world.line(&format!("umount {}", dir.display())).ok();
    world.line("down").ok();
    end_leases(&world);
    for _ in 0..2 {
        world.line("gc --history 0s --grace 0s").ok();
    }
    assert!(objects(&world, "layers").is_empty());
    assert!(objects(&world, "packs").is_empty());
}

#[test]
fn a_mount_that_is_taken_back_keeps_nothing_on_the_store() {
    let world = World::new();
    world.build(&world.tree("tree"), "base/one:1");
    let dir = world.mount_point();
    let leases = || {
        let names = objects(&world, "leases").into_iter();
        names
            .filter(|path| fs::read_to_string(path).is_ok_and(|text| text.contains("mount-")))
            .count()
    };
    world.line(&format!("mount base/one:1 {}", dir.display())).ok();
    assert_eq!(leases(), 1);
    world.line(&format!("umount {}", dir.display())).ok();
    assert_eq!(leases(), 0);
    world
        .line(&format!("mount base/one:1 {} --plane direct", dir.display()))
        .fails(1, "lamella materialise");
    assert_eq!(leases(), 0);
    world.line("down").ok();
}
