//! What a bench leaves when it is ended in the middle: nothing.

use crate::world::{World, end_of, eventually, finish, kill};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// A bench at work in a scratch folder of its own.
fn begun(world: &World) -> (std::process::Child, PathBuf) {
    let scratch = world.path("scratch");
    let bench = world.spawn(&format!("bench gc --scratch {}", scratch.display()));
    let mut folder = None;
    eventually("the bench begins", || {
        let entries = fs::read_dir(&scratch).into_iter().flatten().flatten();
        folder = entries.map(|entry| entry.path()).find(|path| path.join("data/store").exists());
        folder.is_some()
    });
    (bench, folder.unwrap())
}

#[test]
fn a_bench_that_is_ended_from_outside_leaves_no_node_mount_process_or_file() {
    let world = World::new();
    let tree = world.tree("tree");
    for signal in [2, 15] {
        let (bench, folder) = begun(&world);
        // What benches make in there: nodes with mounts, other file systems.
        let data = folder.join("other");
        let at = |name: &str| {
            let at = folder.join(name);
            fs::create_dir(&at).unwrap();
            at.display().to_string()
        };
        let (mounted, memory) = (at("mounted"), at("memory"));
        let inside = |words: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_lamella"));
            command.arg("--data").arg(&data).args(words).env("LAMELLA_CONFIG", "/dev/null");
            finish(command).ok();
        };
        inside(&["build", tree.to_str().unwrap(), "-t", "base/x:1"]);
        inside(&["mount", "base/x:1", &mounted]);
        let tmpfs = Command::new("mount").args(["-t", "tmpfs", "none", &memory]).status().unwrap();
        assert!(tmpfs.success());
        assert!(world.mounts().len() >= 2);
        kill(bench.id(), signal);
        let done = end_of(bench, "a bench that was told to end");
        assert_eq!(done.code, 128 + signal, "{} {}", done.out, done.err);
        assert!(!folder.exists(), "{}", done.out);
        world.nothing_is_left();
        assert_eq!(fsd::keeper::groups_of(&data), Vec::<PathBuf>::new());
    }
}

#[test]
fn what_a_bench_says_and_how_it_ends_comes_through() {
    let world = World::new();
    let help = world.line("bench gc --help").ok();
    assert!(help.out.contains("--scratch"), "{}", help.out);
    world.line("bench gc --nonsense").fails(1, "nonsense");
    let wrong = world.line("bench gc --scratch /proc/nowhere");
    assert_eq!(wrong.code, 1, "{wrong:?}");
    assert_eq!(wrong.err.lines().count(), 1, "{}", wrong.err);
}
