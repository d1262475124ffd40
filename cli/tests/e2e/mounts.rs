//! The node and mounts: starting, refusing, adopting, ending; lazy mounts and their cleaning up.

use crate::world::{Done, World, alive, eventually, kill};
use std::fs;
use std::path::{Path, PathBuf};

/// A world with a layer and a directory where it can be mounted.
struct Mountable {
    world: World,
    tree: PathBuf,
    dir: PathBuf,
}

impl Mountable {
    /// The layer is `base/x:1`.
    fn new() -> Self {
        let world = World::new();
        let tree = world.tree("tree");
        world.build(&tree, "base/x:1");
        let dir = world.mount_point();
        Self { world, tree, dir }
    }

    /// The same, mounted.
    fn mounted() -> Self {
        let this = Self::new();
        this.world.run(&["mount", "base/x:1", this.at()]).ok();
        this
    }

    fn at(&self) -> &str {
        self.dir.to_str().unwrap()
    }

    fn umount(&self) -> Done {
        self.world.run(&["umount", self.at()])
    }

    /// The largest file is there, byte for byte.
    #[track_caller]
    fn serves(&self) {
        let read = |root: &Path| fs::read(root.join("sub/big")).unwrap();
        assert_eq!(read(&self.dir), read(&self.tree));
    }

    fn fsd_pid(&self) -> u32 {
        self.world.line("stats --json").ok().json()["fsd_pid"].as_u64().unwrap() as u32
    }
}

#[test]
fn a_layer_is_mounted_lazily_and_taken_back() {
    let mount = Mountable::new();
    let (world, dir, at) = (&mount.world, &mount.dir, mount.at());
    let mounted = world.run(&["mount", "base/x:1", at]).ok();
    assert!(mounted.err.contains("started a node"), "{}", mounted.err);
    let before = world.line("stats --json").ok().json();
    assert_eq!(before["layers"][0]["present_bytes"], 0, "a mount loads no data");
    assert_eq!(fs::read(dir.join("hello")).unwrap(), b"hello\n");
    mount.serves();
    assert_eq!(fs::read(dir.join("sub/deep/zeros")).unwrap(), vec![0; 100_000]);
    assert!(fs::write(dir.join("new"), "x").is_err(), "a layer is read-only");
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = table.lines().find(|line| line.contains(at)).unwrap();
    assert!(line.contains("nosuid,nodev"), "what a sandbox packed is harmless: {line}");
    let after = world.line("stats --json").ok().json();
    assert!(after["fetched_bytes"].as_u64().unwrap() > 300_000);
    world.run(&["mount", "base/x:1", at]).fails(1, "is mounted");
    mount.umount().ok();
    mount.umount().fails(1, "is no mount");
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn an_environment_is_mounted_writable_and_its_writes_are_thrown_away() {
    let world = World::new();
    world.build(&world.tree("one"), "base/one:1");
    world.build(&world.addition("two"), "toolkit/two:1");
    world.line("env create both:1 --layer base/one:1 --layer toolkit/two:1").ok();
    let dir = world.mount_point();
    let at = dir.to_str().unwrap();
    for plane in [&[][..], &["--plane", "erofs-fanotify"], &["--plane", "erofs-fuse"]] {
        world.run(&[&["mount", "both:1", at, "--rw"], plane].concat()).ok();
        assert_eq!(fs::read(dir.join("sub/new")).unwrap(), b"new", "{plane:?}");
        assert_eq!(fs::read(dir.join("hello")).unwrap(), b"hello\n");
        fs::write(dir.join("written"), "x").unwrap();
        fs::remove_file(dir.join("hello")).unwrap();
        world.run(&["umount", at]).ok();
    }
    world.run(&["mount", "both:1", at]).ok();
    assert!(!dir.join("written").exists() && dir.join("hello").exists());
    // `down` takes back what is mounted still.
    world.line("down").ok();
    world.nothing_is_left();
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
}

#[test]
fn mount_errors_are_clear() {
    let world = World::new();
    let dir = world.mount_point();
    let at = dir.to_str().unwrap();
    world.run(&["mount", "base/nope:1", at]).fails(1, "base/nope:1");
    world.run(&["mount", "base/nope:1", "/nonexistent/dir"]).fails(1, "/nonexistent/dir");
    world.line("down").ok();
    world.line("stats").fails(1, "no node is running");
    world.nothing_is_left();
}

#[test]
fn a_second_node_is_refused_with_the_pid_of_the_first() {
    let world = World::new();
    let mut first = world.spawn("up");
    eventually("the node comes up", || world.line("stats").code == 0);
    let pid = first.id();
    let refused = world.line("up").fails(1, &format!("process {pid}"));
    assert!(refused.err.contains("lamella down"), "{}", refused.err);
    world.line("up --cache-size 10M --cache-low 20M").fails(2, "--cache-low");
    world.line("--store /tmp/elsewhere ls").fails(1, "serves the store");
    world.line("ls").ok();
    world.line("down").ok();
    assert!(first.wait().unwrap().success());
    let idle = world.line("down").ok();
    assert!(idle.out.contains("no node is running"), "{}", idle.out);
    world.nothing_is_left();
}

#[test]
fn the_next_node_adopts_what_a_killed_one_left() {
    let mount = Mountable::mounted();
    let world = &mount.world;
    let fsd = mount.fsd_pid();
    let node = world.node_pid().unwrap();
    kill(node, 9);
    eventually("the node dies", || !alive(node));
    mount.serves();
    mount.umount().ok();
    assert!(alive(fsd) || world.node_pid().is_none());
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn fsd_is_started_again_when_it_dies() {
    let mount = Mountable::mounted();
    let world = &mount.world;
    for _ in 0..3 {
        let pid = mount.fsd_pid();
        kill(pid, 9);
        eventually("fsd comes back", || {
            let stats = world.line("stats --json");
            stats.code == 0 && stats.json()["fsd_pid"].as_u64() != Some(u64::from(pid))
        });
    }
    mount.serves();
    mount.umount().ok();
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn down_keep_leaves_mounts_to_the_next_node() {
    let mount = Mountable::mounted();
    let world = &mount.world;
    world.line("down --keep").ok();
    assert_eq!(world.node_pid(), None);
    mount.serves();
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn down_names_the_mount_that_keeps_the_daemon() {
    let mount = Mountable::mounted();
    let world = &mount.world;
    let elsewhere = world.path("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let how = sys::mount::Attributes::default();
    sys::mount::bind(&mount.dir, &elsewhere, how, sys::mount::Recursive::No).unwrap();
    let fsd = mount.fsd_pid();
    for _ in 0..2 {
        let refused = world.line("down").fails(1, elsewhere.to_str().unwrap());
        assert!(refused.err.contains(&format!("process {fsd}")), "{}", refused.err);
        assert!(alive(fsd) && world.node_pid().is_none());
    }
    assert_eq!(fs::read(elsewhere.join("hello")).unwrap(), b"hello\n");
    sys::mount::unmount(&elsewhere, sys::mount::Unmount::Now).unwrap();
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn commands_that_race_for_a_directory_take_turns() {
    let mount = Mountable::mounted();
    let (world, at) = (&mount.world, mount.at());
    std::thread::scope(|scope| {
        for racer in 0..4 {
            scope.spawn(move || {
                for round in 0..4 {
                    let arguments: &[&str] = match (racer + round) % 2 {
                        0 => &["umount", at],
                        _ => &["mount", "base/x:1", at],
                    };
                    let done = world.run(arguments);
                    let known = ["is mounted", "is no mount of"];
                    let refused = known.iter().any(|text| done.err.contains(text));
                    assert!(done.code == 0 || refused, "{}", done.err);
                }
            });
        }
    });
    let _ = world.run(&["mount", "base/x:1", at]);
    mount.serves();
    mount.umount().ok();
    assert_eq!(fs::read_dir(&mount.dir).unwrap().count(), 0, "a mount is left below");
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn logs_in_files_have_no_colours() {
    let mount = Mountable::mounted();
    kill(mount.fsd_pid(), 9);
    let log = || fs::read_to_string(mount.world.data().join("run/node.log")).unwrap();
    eventually("the node tells of the death", || log().contains("fsd died"));
    assert!(!log().contains('\x1b'), "{}", log());
    mount.serves();
    mount.umount().ok();
}

#[test]
fn doctor_says_what_this_host_can_do_and_why_not_more() {
    let world = World::new();
    let text = world.line("doctor").ok().out;
    for word in ["erofs-fanotify", "erofs-fuse", "container", "microvm", "remedy"] {
        assert!(text.contains(word), "{word} is not in {text}");
    }
    let json = world.line("doctor --json").ok().json();
    assert_eq!(json["planes"][0]["name"], "erofs-fanotify");
    assert!(json["capabilities"].as_array().unwrap().len() > 20);
    assert!(!world.data().exists(), "doctor makes nothing");
    world.nothing_is_left();
}

#[test]
fn a_node_that_cannot_come_up_says_why_and_leaves_no_daemon() {
    let world = World::new();
    // The sandboxes' folder cannot be made: the runtime fails after fsd was started.
    fs::create_dir_all(world.data()).unwrap();
    fs::write(world.data().join("sandboxes"), "in the way").unwrap();
    world.line("create base/nope:1").fails(1, "sandboxes");
    world.line("up").fails(1, "sandboxes");
    world.nothing_is_left();
}

#[test]
fn ctrl_c_on_a_node_in_the_foreground_ends_everything() {
    let mount = Mountable::new();
    let world = &mount.world;
    let mut node = world.spawn("up");
    eventually("the node comes up", || world.line("stats").code == 0);
    world.run(&["mount", "base/x:1", mount.at()]).ok();
    kill(node.id(), 2);
    assert!(node.wait().unwrap().success());
    world.nothing_is_left();
}

#[test]
fn a_node_on_another_store_does_not_take_over_the_fsd_of_the_first() {
    let mount = Mountable::mounted();
    let (world, at) = (&mount.world, mount.at());
    world.line("down --keep").ok();
    let other = format!("{}?latency_ms=1", world.data().join("store").display());
    world.run(&["--store", &other, "mount", "base/x:1", at]).fails(1, "another store");
    world.line("down").ok();
    world.run(&["--store", &other, "mount", "base/x:1", at]).ok();
    mount.umount().ok();
    world.run(&["--store", &other, "down"]).ok();
    world.nothing_is_left();
}

/// Kills everything of the node, the keepers too, and takes the mounts back by hand.
fn kill_everything(world: &World) {
    let mut pids = world.processes();
    // The node first: it would start the others again.
    pids.sort_by_key(|pid| Some(*pid) != world.node_pid());
    for pid in pids {
        kill(pid, 9);
    }
    for point in world.mounts() {
        sys::mount::unmount(&point, sys::mount::Unmount::Lazy).unwrap();
    }
}

#[test]
fn groups_of_killed_keepers_are_taken_away_by_whoever_comes_next() {
    let mount = Mountable::mounted();
    let world = &mount.world;
    let groups = || fsd::keeper::groups_of(&world.data());
    if groups().is_empty() {
        // A host whose control groups are closed to us.
        return;
    }
    kill_everything(world);
    // A group is empty once its process is reaped, which init does in its own time.
    eventually("the groups go", || {
        world.line("doctor").ok();
        groups().is_empty()
    });
    mount.umount();
    world.run(&["mount", "base/x:1", mount.at()]).ok();
    assert!(!groups().is_empty());
    // What `down` ends has no keeper any more that could leave by itself.
    let stats = world.line("stats --json").ok().json();
    let keepers = stats["keeper_pids"].as_array().unwrap();
    keepers.iter().for_each(|pid| kill(pid.as_u64().unwrap() as u32, 9));
    world.line("down").ok();
    eventually("the groups go", || groups().is_empty());
    world.nothing_is_left();
}
