//! `--plane` on everything that takes it: what is asked for serves, or the command says what does.

use crate::world::{World, finish};
use std::fs;

const SERVED: [&str; 3] = ["erofs-fanotify", "erofs-fuse", "fuse"];

/// A layer whose only program is `bin/sh`.
fn world() -> World {
    let world = World::new();
    let root = world.path("root");
    for folder in ["bin", "proc", "sys", "dev", "etc", "tmp"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    fs::copy("/bin/busybox", root.join("bin/sh")).unwrap();
    fs::write(root.join("etc/word"), "a word\n").unwrap();
    world.build(&root, "base/box:1");
    world
}

#[test]
fn a_mount_and_a_sandbox_have_the_plane_that_is_asked_for() {
    let world = world();
    let at = world.mount_point();
    let at = at.to_str().unwrap();
    for plane in SERVED {
        world.run(&["mount", "base/box:1", at, "--plane", plane]).ok();
        let stats = world.line("stats --json").ok().json();
        assert_eq!(stats["layers"][0]["plane"], plane);
        assert_eq!(fs::read_to_string(format!("{at}/etc/word")).unwrap(), "a word\n");
        // One layer has one plane at a time.
        let other = if plane == "fuse" { "erofs-fuse" } else { "fuse" };
        let word = ["--", "/bin/sh", "-c", "read word </etc/word; echo $word"];
        let run = |plane: &str| {
            world.run(&[&["run", "--rm", "--plane", plane, "base/box:1"][..], &word].concat())
        };
        run(other).fails(1, "is served by");
        assert_eq!(run(plane).ok().out, "a word\n");
        world.run(&["umount", at]).ok();
        world.line("down").ok();
        assert_eq!(run(plane).ok().out, "a word\n", "{plane}, cold");
        world.nothing_is_left();
    }
    world.run(&["mount", "base/box:1", at, "--plane", "magic"]).fails(2, "erofs-fanotify");
}

#[test]
fn a_node_that_is_to_have_a_missing_plane_says_so() {
    let world = world();
    let planes = world.line("doctor --json").ok().json()["planes"].clone();
    let missing = planes.as_array().unwrap().iter().find(|plane| plane["available"] == false);
    // `direct` hangs on the store and is no node's plane.
    let Some(missing) =
        missing.and_then(|plane| plane["name"].as_str()).filter(|name| *name != "direct")
    else {
        return;
    };
    let said = format!("this host has no plane {missing}");
    world.run(&["up", "--plane", missing]).fails(1, &said);
    world.nothing_is_left();
}

#[test]
fn a_node_has_the_plane_that_its_environment_names() {
    let world = world();
    let at = world.mount_point();
    let at = at.to_str().unwrap();
    let mut mount = world.command(&["mount", "base/box:1", at, "--json"]);
    mount.env("LAMELLA_PLANE", "fuse");
    assert_eq!(finish(mount).ok().json()["plane"], "fuse");
    assert_eq!(fs::read_to_string(format!("{at}/etc/word")).unwrap(), "a word\n");
    world.run(&["umount", at]).ok();
    world.line("down").ok();
    world.nothing_is_left();
}
