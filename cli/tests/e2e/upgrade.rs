//! A node that becomes another program while sandboxes run and files are read.

use crate::world::{World, alive, end_of, eventually, noise};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const FILES: u64 = 16;
const FILE_BYTES: usize = 200_000;
const PIECE: usize = 8192;

/// Installs the program as a file of its own, atomically, as a package manager does.
fn install(at: &Path) {
    let fresh = at.with_extension("fresh");
    fs::copy(env!("CARGO_BIN_EXE_lamella"), &fresh).unwrap();
    fs::rename(&fresh, at).unwrap();
}

/// A node in the foreground, of that program, on a store that takes its time.
fn up(world: &World, program: &Path) -> Child {
    let store = format!("{}?latency_ms=40", world.data().join("store").display());
    let mut command = Command::new(program);
    command.env_remove("LAMELLA_DATA").env_remove("LAMELLA_STORE").arg("--data").arg(world.data());
    command.args(["--store", &store, "up"]).stdin(Stdio::null());
    let node = command.spawn().unwrap();
    eventually("the node comes up", || world.line("stats").code == 0);
    node
}

fn box_world() -> World {
    let world = World::new();
    let root = world.path("root");
    for folder in ["bin", "tmp", "proc", "sys", "dev", "big"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    fs::copy("/bin/busybox", root.join("bin/busybox")).unwrap();
    std::os::unix::fs::symlink("busybox", root.join("bin/sh")).unwrap();
    for seed in 0..FILES {
        fs::write(root.join(format!("big/{seed}")), noise(FILE_BYTES, 77 + seed)).unwrap();
    }
    world.build(&root, "base/box:1");
    world.line("env create box:1 --layer base/box:1 --env PATH=/bin").ok();
    world
}

/// Reads files that are open already, piece by piece; says which bytes were wrong and what failed.
fn read_all(files: Vec<File>, pieces: &AtomicUsize) -> Vec<String> {
    let mut complaints = Vec::new();
    for (seed, file) in files.into_iter().enumerate() {
        let expected = noise(FILE_BYTES, 77 + seed as u64);
        for (index, right) in expected.chunks(PIECE).enumerate() {
            let mut got = vec![0; right.len()];
            match file.read_exact_at(&mut got, (index * PIECE) as u64) {
                Ok(()) if got == right => {}
                Ok(()) => complaints.push(format!("{seed}:{index} differs")),
                Err(error) => complaints.push(format!("{seed}:{index}: {error}")),
            }
            pieces.fetch_add(1, Ordering::Relaxed);
        }
    }
    complaints
}

#[test]
fn an_upgrade_in_place_keeps_sandboxes_open_files_and_mounts() {
    let world = box_world();
    let program: PathBuf = world.path("lamella");
    install(&program);
    let mut node = up(&world, &program);
    let id = world.line("create box:1").ok().out.trim().to_owned();
    let sandbox = |script: &str| world.run(&["exec", &id, "--", "/bin/sh", "-c", script]).ok().out;
    sandbox(
        "echo state > /tmp/state; (while :; do echo x >> /tmp/count; busybox sleep 0.05; done) >/dev/null 2>&1 &",
    );
    let mount = world.path("mnt");
    fs::create_dir(&mount).unwrap();
    world.run(&["mount", "base/box:1", mount.to_str().unwrap()]).ok();
    let open = (0..FILES).map(|seed| File::open(mount.join(format!("big/{seed}"))).unwrap());
    let (open, pieces) = (open.collect(), Arc::new(AtomicUsize::new(0)));
    let reader = std::thread::spawn({
        let pieces = Arc::clone(&pieces);
        move || read_all(open, &pieces)
    });
    eventually("somebody reads", || pieces.load(Ordering::Relaxed) > 4);

    install(&program);
    let old_fsd = world.line("stats --json").ok().json()["fsd_pid"].as_u64().unwrap() as u32;
    let read_before = pieces.load(Ordering::Relaxed);
    let upgraded = world.line("upgrade --json").ok().json();
    assert_eq!(upgraded["changed"], true);
    assert_eq!(upgraded["pid"], node.id(), "in place");
    assert_ne!(upgraded["fsd_pid"], old_fsd);
    assert!(!alive(old_fsd), "the old fsd goes on");
    assert!(!PathBuf::from(format!("/proc/{old_fsd}")).exists(), "the old fsd was not reaped");
    let installed = fs::metadata(&program).unwrap().ino();
    let keepers = upgraded["keeper_pids"].as_array().unwrap();
    assert_eq!(keepers.len(), 2);
    let processes = keepers.iter().chain([&upgraded["pid"], &upgraded["fsd_pid"]]);
    for pid in processes.map(|pid| pid.as_u64().unwrap()) {
        assert_eq!(fs::metadata(format!("/proc/{pid}/exe")).unwrap().ino(), installed);
    }
    assert!(read_before < FILES as usize * FILE_BYTES.div_ceil(PIECE), "nobody read meanwhile");
    assert_eq!(reader.join().unwrap(), Vec::<String>::new());

    assert_eq!(sandbox("busybox cat /tmp/state"), "state\n");
    let count = || sandbox("busybox wc -l < /tmp/count").trim().parse::<u64>().unwrap();
    let before = count();
    eventually("the command of the sandbox goes on", || count() > before);
    let sums = sandbox("busybox md5sum /big/* | busybox wc -l");
    assert_eq!(sums.trim().parse::<u64>().unwrap(), FILES);
    assert_eq!(world.line("upgrade --json").ok().json()["changed"], false);
    world.line("down").ok();
    assert!(node.wait().unwrap().success());
    world.nothing_is_left();
}

#[test]
fn a_program_that_does_not_run_is_no_upgrade() {
    let world = box_world();
    let program = world.path("lamella");
    install(&program);
    let mut node = up(&world, &program);
    world.line("upgrade --json").ok();
    let broken = world.path("broken");
    fs::write(&broken, "no program").unwrap();
    fs::rename(&broken, &program).unwrap();
    world.line("upgrade").fails(1, "try ");
    assert!(alive(node.id()));
    world.line("stats").ok();
    world.line("down").ok();
    assert!(node.wait().unwrap().success());
    world.nothing_is_left();
}

#[test]
fn the_fsd_of_another_program_makes_way_for_that_of_the_next_node() {
    let world = box_world();
    let program = world.path("lamella");
    install(&program);
    let mut node = up(&world, &program);
    let mount = world.path("mnt");
    fs::create_dir(&mount).unwrap();
    world.run(&["mount", "base/box:1", mount.to_str().unwrap()]).ok();
    let old_fsd = world.line("stats --json").ok().json()["fsd_pid"].as_u64().unwrap() as u32;
    let held = File::open(mount.join("big/3")).unwrap();
    world.line("down --keep").ok();
    assert!(node.wait().unwrap().success());
    install(&program);
    let mut node = up(&world, &program);
    let fsd = world.line("stats --json").ok().json()["fsd_pid"].as_u64().unwrap() as u32;
    assert!(fsd != old_fsd && !alive(old_fsd));
    let mut got = vec![0; FILE_BYTES];
    held.read_exact_at(&mut got, 0).unwrap();
    assert!(got == noise(FILE_BYTES, 80));
    drop(held);
    world.line("down").ok();
    assert!(node.wait().unwrap().success());
    world.nothing_is_left();
}

#[test]
fn down_ends_a_node_whose_clients_keep_their_connections() {
    let world = box_world();
    world.line("create box:1").ok();
    let run = world.data().join("run");
    let held = ["node.sock", "fsd.sock"]
        .map(|name| std::os::unix::net::UnixStream::connect(run.join(name)).unwrap());
    let id = world.line("ps --json").ok().json()[0]["id"].as_str().unwrap().to_owned();
    let command = world.spawn(&format!("exec {id} -- busybox sleep 1000"));
    world.line("down").ok();
    drop(held);
    let done = end_of(command, "a client of a node that ended");
    assert_ne!(done.code, 0, "it is told");
    world.nothing_is_left();
}

#[test]
fn a_down_after_a_down_that_kept_everything_leaves_no_process() {
    let world = box_world();
    let mount = world.mount_point();
    for _ in 0..3 {
        let id = world.line("create box:1").ok().out.trim().to_owned();
        world.run(&["mount", "base/box:1", mount.to_str().unwrap()]).ok();
        assert_eq!(fs::read(mount.join("big/0")).unwrap(), noise(FILE_BYTES, 77));
        world.line("down --keep").ok();
        assert!(world.node_pid().is_none());
        assert_eq!(fs::read(mount.join("big/1")).unwrap(), noise(FILE_BYTES, 78));
        world.line(&format!("exec {id} -- busybox true")).ok();
        world.line("down --keep").ok();
        world.line("down").ok();
        world.nothing_is_left();
    }
}
