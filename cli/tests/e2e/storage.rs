//! Commands that need no node: build, list, inspect, tree, history, tags, fsck, reindex; and bad input.

use crate::world::{World, finish, noise};
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStringExt;
use std::process::{Command, Stdio};

#[test]
fn a_directory_is_built_listed_and_described() {
    let world = World::new();
    world.build(&world.tree("tree"), "base/x:1");
    let list = world.line("ls").ok();
    assert!(list.out.contains("base/x:1"), "{}", list.out);
    let rows = world.line("ls base --json").ok().json();
    assert_eq!(rows[0]["reference"], "base/x:1");
    let id = rows[0]["layer"].as_str().unwrap().to_owned();
    assert_eq!(world.line("ls env --json").ok().json().as_array().unwrap().len(), 0);
    let layer = &world.line("inspect base/x:1 --json").ok().json()["layers"][0];
    assert_eq!(layer["id"], id.as_str());
    assert_eq!(layer["kind"], "base");
    let files = world.line(&format!("tree {id} --json")).ok().json();
    let paths: Vec<&str> =
        files.as_array().unwrap().iter().map(|file| file["path"].as_str().unwrap()).collect();
    assert_eq!(
        paths,
        ["/", "/hello", "/link", "/sub", "/sub/again", "/sub/big", "/sub/deep", "/sub/deep/zeros"]
    );
    let below = world.line("tree base/x:1 /sub/deep").ok();
    assert_eq!(below.out.lines().count(), 2);
    assert!(world.processes().is_empty(), "a storage command left a process");
    assert_eq!(fs::read_dir(world.data().join("store/leases/publish")).unwrap().count(), 0);
}

#[test]
fn the_same_tree_has_the_same_id_as_a_directory_and_as_a_tar() {
    let world = World::new();
    let tree = world.tree("tree");
    let tar = world.path("tree.tar.gz");
    let mut pack = Command::new("tar");
    pack.arg("--format=pax")
        .arg("--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime");
    pack.arg("-czf").arg(&tar).arg("-C").arg(&tree).arg(".");
    finish(pack).ok();
    world.build(&tree, "base/dir:1");
    world.build(&tar, "base/tar:1");
    let rows = world.line("ls --json").ok().json();
    assert_eq!(rows[0]["layer"], rows[1]["layer"], "{rows}");
}

#[test]
fn environments_stack_layers_and_show_what_a_sandbox_would_see() {
    let world = World::new();
    world.build(&world.tree("one"), "base/one:1");
    world.build(&world.addition("two"), "toolkit/two:1");
    world
        .line("env create both:1 --layer base/one:1 --layer toolkit/two:1 --env A=1 --cwd /sub --cmd sh -c x")
        .ok();
    let config = world.line("inspect both:1 --json").ok().json()["config"].clone();
    assert_eq!(config["env"][0], "A=1");
    assert_eq!(config["cmd"][2], "x");
    let tree = world.line("tree both:1 /sub").ok();
    assert!(tree.out.contains("/sub/new") && tree.out.contains("/sub/big"), "{}", tree.out);
    world.line("env create more:1 --layer both:1 --env A=2 --env B=3").ok();
    let config = world.line("inspect more:1 --json").ok().json()["config"].clone();
    assert_eq!(config["env"], serde_json::json!(["A=2", "B=3"]));
    assert_eq!(config["cwd"], "/sub");
}

#[test]
fn references_move_and_remember() {
    let world = World::new();
    world.build(&world.tree("tree"), "base/x:1");
    world.line("tag base/x:1 base/y:2").ok();
    world.line("untag base/y:2").ok();
    let history = world.line("history base/y:2 --json").ok().json();
    assert_eq!(history.as_array().unwrap().len(), 2);
    assert!(history[0]["layer"].is_null());
    let list = world.line("ls --json").ok().json();
    assert_eq!(list.as_array().unwrap().len(), 1);
    fs::remove_dir_all(world.data().join("catalog")).unwrap();
    assert_eq!(world.line("reindex --json").ok().json()["layers"], 1);
    world.line("tree base/x:1").ok();
}

#[test]
fn fsck_finds_a_flipped_bit_and_only_then_fails() {
    let world = World::new();
    world.build(&world.tree("tree"), "base/x:1");
    for line in ["fsck", "fsck base/x:1"] {
        let checked = world.line(line).ok();
        assert!(checked.out.contains("data not read (--read-data"), "{}", checked.out);
    }
    let whole = world.line("fsck base/x:1 --read-data --json").ok().json();
    assert_eq!(whole["damages"], 0);
    assert!(whole["bytes_read"].as_u64().unwrap() > 300_000);
    let mut packs = fs::read_dir(world.data().join("store/packs")).unwrap();
    let folder = packs.next().unwrap().unwrap().path();
    let pack = fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&pack).unwrap();
    bytes[100_000] ^= 1;
    let mut permissions = fs::metadata(&pack).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o600);
    fs::set_permissions(&pack, permissions).unwrap();
    fs::write(&pack, bytes).unwrap();
    let damaged = world.line("fsck base/x:1 --read-data").fails(1, "is damaged in 1 places");
    assert!(damaged.out.contains("chunk"), "{}", damaged.out);
}

#[test]
fn bad_input_is_one_clear_line_and_exit_code_one() {
    let world = World::new();
    world.line("inspect base/nope:1").fails(1, "base/nope:1");
    world.line(&format!("inspect {}", "ab".repeat(32))).fails(1, "abab");
    world.line("history base/nope:1").fails(1, "base/nope:1");
    world.line("untag base/nope:1").fails(1, "base/nope:1");
    world.line("tree nope").fails(1, "env/nope:latest");
    world.line("build /nonexistent.tar -t base/x:1").fails(1, "/nonexistent.tar");
    world.line("build /etc -t bad").fails(2, "base/bad, workspace/bad, toolkit/bad");
    world.line("build docker://127.0.0.1:1/repo -t base/x:1").fails(1, "docker://127.0.0.1:1/repo");
    world.line("env create e:1 --layer base/nope:1").fails(1, "base/nope:1");
    world.line("--store ftp://host/x ls").fails(1, "ftp");
    world.line("--store /proc/nothing/here ls").fails(1, "/proc/nothing/here");
    world.line("build /etc/hosts -t base/x:1").fails(1, "no archive that is known");
    fs::create_dir(world.path("layout")).unwrap();
    let layout = format!("oci:{}", world.path("layout").display());
    world.line(&format!("build {layout} -t base/x:1")).fails(1, "index.json");
    world.line(&format!("pull {layout} -t x:1")).fails(1, "index.json");
    for (name, bytes) in [
        ("empty.tar", Vec::new()),
        ("garbage.tar", noise(20_000, 3)),
        ("short.tar.gz", vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 1, 2, 3]),
    ] {
        let path = world.path(name);
        fs::write(&path, bytes).unwrap();
        world.run(&["build", path.to_str().unwrap(), "-t", "base/x:1"]).fails(1, name);
    }
    let tree = world.tree("tree");
    let cut = world.path("cut.tar");
    let mut pack = Command::new("tar");
    pack.arg("-cf").arg(&cut).arg("-C").arg(&tree).arg(".");
    finish(pack).ok();
    let bytes = fs::read(&cut).unwrap();
    fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
    world.run(&["build", cut.to_str().unwrap(), "-t", "base/x:1"]).fails(1, "cut.tar");
    assert_eq!(world.line("ls --json").ok().json().as_array().unwrap().len(), 0);
}

#[test]
fn wrong_usage_is_exit_code_two() {
    let world = World::new();
    for line in ["", "nonsense", "build", "ls nonsense", "inspect", "inspect UPPER", "untag a:b:c"]
    {
        assert_eq!(world.line(line).code, 2, "{line:?}");
    }
    world.line("cp a b").fails(2, "ID:PATH");
    world.line("bench nonsense").fails(2, "nonsense");
    assert!(!world.line("--json").err.contains("keeper"));
    let help = world.line("--help").ok();
    assert!(!help.out.contains("keeper") && help.out.contains("pack-diff"), "{}", help.out);
}

#[test]
fn errors_are_json_for_programs_and_have_a_chain_for_people() {
    let world = World::new();
    let done = world.line("--json inspect base/nope:1");
    let error: serde_json::Value = serde_json::from_str(&done.err).unwrap();
    assert_eq!(error["error"]["kind"], "not_found");
    let done = world.line("-v --store /proc/nothing/here ls");
    assert_eq!(done.code, 1);
    assert!(done.err.contains("because"), "{}", done.err);
}

#[test]
fn names_cannot_drive_the_terminal() {
    let world = World::new();
    let root = world.path("evil");
    fs::create_dir(&root).unwrap();
    let name = std::ffi::OsString::from_vec(b"a\x1b[31m\x9b\xffb\n".to_vec());
    fs::write(root.join(name), "x").unwrap();
    world.build(&root, "base/evil:1");
    for line in ["tree base/evil:1", "tree base/evil:1 --json"] {
        let done = world.line(line).ok();
        assert!(!done.out.contains('\x1b') && !done.out.contains('\u{9b}'), "{:?}", done.out);
    }
    assert_eq!(world.line("tree base/evil:1").ok().out.lines().count(), 2);
}

#[test]
fn a_full_store_is_one_clear_line_and_nothing_is_half_done() {
    let world = World::new();
    let disk = world.path("disk");
    fs::create_dir(&disk).unwrap();
    let small =
        sys::mount::Tmpfs { name: "small", mode: 0o700, size_bytes: Some(2 << 20), inodes: None };
    small.mount_detached(sys::mount::Attributes::default()).unwrap().attach(&disk).unwrap();
    let tree = world.path("large");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("noise"), noise(8 << 20, 5)).unwrap();
    let (store, tree) = (disk.to_str().unwrap(), tree.to_str().unwrap());
    let full = world.run(&["--store", store, "build", tree, "-t", "base/x:1"]);
    assert_eq!(full.code, 1, "{}", full.err);
    assert!(full.err.contains("space"), "{}", full.err);
    let list = world.run(&["--store", store, "ls", "--json"]).ok().json();
    assert_eq!(list.as_array().unwrap().len(), 0);
    let used = fs::read_dir(disk.join(".tmp")).map_or(0, Iterator::count);
    assert_eq!(used, 0, "temporary files are left");
}

#[test]
fn two_builds_at_once_both_succeed() {
    let world = World::new();
    let tree = world.tree("tree");
    let tree = tree.to_str().unwrap();
    let builds: Vec<_> =
        (0..3).map(|n| world.spawn(&format!("build {tree} -t base/x:{n}"))).collect();
    for build in builds {
        let output = build.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let list = world.line("ls --json").ok().json();
    assert_eq!(list.as_array().unwrap().len(), 3);
}

#[test]
fn a_killed_or_interrupted_build_leaves_nothing_visible() {
    let world = World::new();
    let tree = world.path("large");
    fs::create_dir(&tree).unwrap();
    for n in 0..20 {
        fs::write(tree.join(format!("f{n}")), noise(1 << 20, n + 1)).unwrap();
    }
    let line = format!("build {} -t base/x:1", tree.display());
    for round in 0..6_u64 {
        let child = world.spawn(&line);
        std::thread::sleep(std::time::Duration::from_millis(20 + 25 * round));
        crate::world::kill(child.id(), if round % 2 == 0 { 9 } else { 2 });
        let output = child.wait_with_output().unwrap();
        // Before the build begins a signal ends the process as any other.
        if output.status.code() == Some(130) {
            let left = fs::read_dir(world.data().join("store/.tmp")).map_or(0, Iterator::count);
            assert_eq!(left, 0, "Ctrl-C left temporary files");
        }
        for row in world.line("ls --json").ok().json().as_array().unwrap() {
            assert_eq!(row["reference"], "base/x:1");
            world.line("fsck base/x:1 --read-data").ok();
        }
    }
    world.line(&line).ok();
    world.line("fsck base/x:1 --read-data").ok();
}

#[test]
fn a_reader_that_goes_away_ends_a_listing_quietly() {
    let world = World::new();
    let root = world.path("many");
    fs::create_dir(&root).unwrap();
    for n in 0..3000 {
        fs::write(root.join(format!("a-file-with-a-long-name-{n}")), "").unwrap();
    }
    world.build(&root, "base/many:1");
    let mut child = world
        .command(&["tree", "base/many:1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 10];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(141));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_configuration_file_is_read_and_what_is_wrong_in_it_is_named() {
    let world = World::new();
    let file = world.path("lamella.toml");
    let elsewhere = world.path("elsewhere");
    let text = format!("# where images lie\nstore = {elsewhere:?}\ncache-size = \"10M\"\n");
    fs::write(&file, &text).unwrap();
    let words = |line: &str| format!("--config {} {line}", file.display());
    let tree = world.tree("tree");
    world.line(&words(&format!("build {} -t base/x:1", tree.display()))).ok();
    assert!(elsewhere.join("FORMAT").exists() && !world.data().join("store").exists());
    // A node that another command starts has it too.
    let at = world.mount_point();
    world.line(&words(&format!("mount base/x:1 {}", at.display()))).ok();
    let stats = world.line("stats --json").ok().json();
    assert_eq!(stats["cache_limit_bytes"], 10 << 20);
    world.line(&words("down")).ok();
    // The environment counts more, and the command line most.
    let mut ls = world.command(&["--config", file.to_str().unwrap(), "ls", "--json"]);
    ls.env("LAMELLA_STORE", world.path("third"));
    assert_eq!(crate::world::finish(ls).ok().json().as_array().unwrap().len(), 0);
    let fourth = world.path("fourth");
    let listed = world.line(&words(&format!("--store {} ls --json", fourth.display()))).ok();
    assert_eq!(listed.json().as_array().unwrap().len(), 0);

    fs::write(&file, text.replace("cache-size", "cache-sice")).unwrap();
    let named = format!("{}:3: cache-sice: there is no such setting", file.display());
    let refused = world.line(&words("ls")).fails(1, &named);
    assert!(refused.err.contains("--config"), "{}", refused.err);
    world.line("--config /nowhere/x.toml ls").fails(1, "/nowhere/x.toml");
    world.nothing_is_left();
}
