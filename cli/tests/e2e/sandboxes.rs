//! `run`, `create`, `exec` and their kin on a root file system of one static program.

use crate::world::{Done, World, alive, end_of, eventually, kill};
use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

const PROGRAMS: [&str; 16] = [
    "sh", "cat", "echo", "ls", "sleep", "rm", "mkdir", "mv", "true", "false", "id", "stat", "tr",
    "env", "stty", "test",
];

/// A root file system: busybox (Debian's busybox-static) under the names of its programs.
pub fn root(world: &World) -> PathBuf {
    let root = world.path("root");
    for folder in ["bin", "etc", "tmp", "proc", "sys", "dev", "data/sub", "old"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    fs::copy("/bin/busybox", root.join("bin/busybox")).unwrap();
    for program in PROGRAMS {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(program)).unwrap();
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0:root:/:/bin/sh\nann:x:1000:1000::/:/bin/sh\n")
        .unwrap();
    fs::write(root.join("etc/group"), "root:x:0:\nann:x:1000:\n").unwrap();
    fs::write(root.join("data/kept"), "kept\n").unwrap();
    fs::write(root.join("data/gone"), "gone\n").unwrap();
    fs::write(root.join("data/sub/deep"), "deep\n").unwrap();
    fs::write(root.join("old/file"), "old\n").unwrap();
    root
}

fn world() -> World {
    let world = World::new();
    world.build(&root(&world), "base/box:1");
    world.line("env create box:1 --layer base/box:1 --env PATH=/bin --cmd sh -c env").ok();
    world
}

/// `words`, then `-- sh -c script`.
fn shell(world: &World, words: &str, script: &str) -> Done {
    let mut line: Vec<&str> = words.split(' ').collect();
    line.extend(["--", "/bin/sh", "-c", script]);
    world.run(&line)
}

#[test]
fn run_rm_works_without_a_node_and_leaves_nothing() {
    let world = world();
    let done = shell(&world, "run --rm box:1", "echo out; echo err >&2; exit 7");
    assert_eq!((done.code, done.out.as_str()), (7, "out\n"), "{}", done.err);
    assert!(done.err.contains("err\n"), "{}", done.err);
    world.nothing_is_left();
    assert_eq!(world.line("ps -a --json").ok().json().as_array().unwrap().len(), 0);
    // A layer makes an implicit environment.
    let done = shell(&world, "run --rm base/box:1", "cat /data/kept").ok();
    assert_eq!(done.out, "kept\n");
    // An environment's own command.
    let done = world.line("run --rm -e X=1 box:1").ok();
    assert!(done.out.contains("X=1\n") && done.out.contains("PATH=/bin\n"), "{}", done.out);
    world.line("run --rm base/box:1").fails(2, "no command");
    world.line("run --rm base/nope:1 -- true").fails(1, "base/nope:1");
    world.nothing_is_left();
}

#[test]
fn a_command_that_is_not_there_is_127_and_a_killed_one_128_more() {
    let world = world();
    let id = world.line("create box:1").ok().out.trim().to_owned();
    let done = world.line(&format!("exec {id} -- /bin/nonsense"));
    assert_eq!(done.code, 127, "{}", done.err);
    assert!(done.err.contains("nonsense"), "{}", done.err);
    let done = shell(&world, &format!("exec {id}"), "kill -9 $$");
    assert_eq!(done.code, 137, "{}", done.err);
    world.line(&format!("exec {id} --timeout 200ms -- /bin/sleep 60")).fails(124, "time");
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn exec_has_streams_input_user_and_directory() {
    let world = world();
    let id = world.line("create box:1 --label purpose=test").ok().out.trim().to_owned();
    let listed = world.line("ps --json").ok().json();
    assert_eq!(listed[0]["id"], id.as_str());
    assert_eq!(listed[0]["state"], "running");
    assert_eq!(listed[0]["labels"]["purpose"], "test");
    let mut child = world
        .command(&["exec", "-i", &id, "--", "tr", "a-z", "A-Z"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let bytes = vec![b'a'; 1 << 20];
    let mut stdin = child.stdin.take().unwrap();
    let feeder = std::thread::spawn(move || stdin.write_all(&bytes));
    let mut out = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut out).unwrap();
    feeder.join().unwrap().unwrap();
    assert!(child.wait().unwrap().success());
    assert!(out.len() == 1 << 20 && out.iter().all(|&byte| byte == b'A'), "{}", out.len());
    let done = shell(&world, &format!("exec -w /data -u ann {id}"), "pwd; id -u").ok();
    assert_eq!(done.out, "/data\n1000\n");
    // The beginning of an id is enough; what is unknown is said.
    shell(&world, &format!("exec {}", &id[..id.len() - 2]), "true").ok();
    world.line("exec nonsense -- true").fails(1, "ps -a");
    world.line(&format!("pause {id}")).ok();
    assert_eq!(world.line("ps --json").ok().json()[0]["state"], "paused");
    world.line(&format!("resume {id}")).ok();
    world.line(&format!("rm {id}")).fails(1, "-f");
    world.line(&format!("stop {id} --grace 1s")).ok();
    world.line(&format!("rm {id}")).ok();
    assert_eq!(world.line("ps -a --json").ok().json().as_array().unwrap().len(), 0);
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn what_ran_is_listed_and_its_output_kept() {
    let world = world();
    let done = shell(&world, "run box:1", "echo kept; exit 3");
    assert_eq!(done.code, 3);
    let listed = world.line("ps -a --json").ok().json();
    assert_eq!(listed[0]["exit_code"], 3, "{listed}");
    let id = listed[0]["id"].as_str().unwrap().to_owned();
    assert_eq!(world.line(&format!("logs {id}")).ok().out, "kept\n");
    world.line(&format!("rm {id}")).ok();
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn files_are_copied_in_and_out() {
    let world = world();
    let id = world.line("create box:1").ok().out.trim().to_owned();
    let tree = world.tree("tree");
    let at = tree.to_str().unwrap();
    world.run(&["cp", &format!("{at}/sub/big"), &format!("{id}:/tmp/big")]).ok();
    world.run(&["cp", at, &format!("{id}:/tmp")]).ok();
    let done = shell(&world, &format!("exec {id}"), "cat /tmp/tree/hello; ls /tmp").ok();
    assert_eq!(done.out, "hello\nbig\ntree\n");
    let back = world.path("back");
    fs::create_dir(&back).unwrap();
    world.run(&["cp", &format!("{id}:/tmp/big"), back.to_str().unwrap()]).ok();
    assert_eq!(fs::read(back.join("big")).unwrap(), fs::read(tree.join("sub/big")).unwrap());
    world.run(&["cp", &format!("{id}:/tmp/tree"), back.to_str().unwrap()]).ok();
    assert_eq!(fs::read(back.join("tree/hello")).unwrap(), b"hello\n");
    assert_eq!(fs::read_link(back.join("tree/link")).unwrap(), PathBuf::from("hello"));
    world.run(&["cp", &format!("{id}:/nonsense"), "/tmp/x"]).fails(1, "nonsense");
    // A path in the sandbox never means one of the host.
    shell(&world, &format!("exec {id}"), "rm -r /tmp/tree; echo own > /tmp/own; true").ok();
    let done = shell(&world, &format!("exec {id}"), "mv /tmp/own /etc/hostname2; true").ok();
    assert_eq!(done.code, 0);
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn a_diff_holds_exactly_what_the_sandbox_saw() {
    let world = world();
    let id = world.line("create box:1").ok().out.trim().to_owned();
    let change = "rm /data/gone; echo new > /data/new; rm -r /old; mkdir /old; echo x > /old/x; \
                  mv /data/sub /data/moved; echo secret > /tmp/answer";
    shell(&world, &format!("exec {id}"), change).ok();
    let view = "cd /; ls data old data/moved; cat data/kept data/new old/x data/moved/deep; stat -c \
                '%n %a %u %Y' data/new old";
    let before = shell(&world, &format!("exec {id}"), view).ok().out;
    world.line(&format!("pack-diff {id} -t result:1 --exclude /tmp/answer")).ok();
    let packed = world.line("ls --json").ok().json();
    let names: Vec<&str> =
        packed.as_array().unwrap().iter().map(|row| row["reference"].as_str().unwrap()).collect();
    assert!(names.contains(&"diff/result:1") && names.contains(&"env/result:1"), "{names:?}");
    let after = shell(&world, "run --rm result:1", view).ok().out;
    assert_eq!(before, after);
    shell(&world, "run --rm result:1", "test ! -e /tmp/answer && test ! -e /data/gone").ok();
    let shown = world.line("tree result:1 /data").ok().out;
    assert!(shown.contains("/data/moved/deep") && !shown.contains("/data/gone"), "{shown}");
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn ctrl_c_stops_the_sandbox_and_a_killed_run_is_collected() {
    let world = world();
    for (signal, code) in [(2, Some(130)), (9, None)] {
        let mut child = world.spawn("run --rm box:1 -- sh -c echo\tup;exec\tsleep\t600");
        let mut first = [0; 3];
        child.stdout.take().unwrap().read_exact(&mut first).unwrap();
        assert_eq!(&first, b"up\n");
        kill(child.id(), signal);
        assert_eq!(child.wait().unwrap().code(), code);
        // The ephemeral node collects what its dead user left, then goes.
        world.nothing_is_left();
    }
    assert_eq!(world.line("ps -a --json").ok().json().as_array().unwrap().len(), 0);
}

#[test]
fn a_run_that_is_killed_while_its_node_starts_leaves_nothing() {
    let world = world();
    for delay in [5, 15, 30, 60, 100] {
        let child = world.spawn("run --rm box:1 -- sleep 600");
        std::thread::sleep(Duration::from_millis(delay));
        kill(child.id(), 9);
        end_of(child, "a killed run");
        world.nothing_is_left();
    }
}

#[test]
fn sandboxes_go_on_when_the_node_is_killed() {
    let world = world();
    let id = world.line("create box:1").ok().out.trim().to_owned();
    shell(&world, &format!("exec {id}"), "echo state > /tmp/state").ok();
    let node = world.node_pid().unwrap();
    kill(node, 9);
    eventually("the node dies", || !alive(node));
    let done = shell(&world, &format!("exec {id}"), "cat /tmp/state").ok();
    assert_eq!(done.out, "state\n");
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn a_node_that_is_killed_in_mid_call_is_named_with_the_remedy() {
    let world = world();
    let id = world.line("create box:1").ok().out.trim().to_owned();
    let words = ["exec", &id, "--", "/bin/sh", "-c", "echo begun; exec sleep 600"];
    let mut exec = world.command(&words);
    let mut exec = exec.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut begun = [0; 6];
    exec.stdout.as_mut().unwrap().read_exact(&mut begun).unwrap();
    kill(world.node_pid().unwrap(), 9);
    let done = end_of(exec, "an exec whose node is dead");
    let (data, socket) = (world.data(), world.data().join("run/node.sock"));
    let done = done.fails(1, &format!("the node of {} does not answer", data.display()));
    let remedy = format!("`lamella up --data {}`", data.display());
    assert!(done.err.contains(socket.to_str().unwrap()) && done.err.contains(&remedy));
    // The remedy is one.
    let mut node = world.spawn("up");
    eventually("the node comes up", || world.line("stats").code == 0);
    assert_eq!(shell(&world, &format!("exec {id}"), "echo again").ok().out, "again\n");
    let fsd = world.line("stats --json").ok().json()["fsd_pid"].as_u64().unwrap() as u32;
    // Stopped, so that nobody starts the daemon again.
    kill(node.id(), 19);
    kill(fsd, 9);
    let what = format!("the file-system daemon of {} does not answer", data.display());
    world.line("stats").fails(1, &what);
    kill(node.id(), 18);
    eventually("the daemon is back", || world.line("stats").code == 0);
    world.line("down").ok();
    node.wait().unwrap();
    world.nothing_is_left();
}

#[test]
fn two_runs_share_one_ephemeral_node() {
    let world = world();
    let line = "run --rm box:1 -- sh -c sleep\t1;echo\tdone";
    let children: Vec<_> = (0..3).map(|_| world.spawn(line)).collect();
    for child in children {
        let done = end_of(child, line);
        assert_eq!(done.out, "done\n", "{}", done.err);
    }
    world.nothing_is_left();
}

#[test]
fn other_backends_say_that_they_do_not_exist() {
    let world = world();
    for (backend, instead) in
        [("microvm", "container"), ("vm", "container"), ("fncall", "lamella call")]
    {
        let done = world.line(&format!("run --rm --backend {backend} box:1 -- true"));
        assert_eq!(done.code, 1, "{}", done.err);
        assert!(done.err.contains(instead), "{}", done.err);
    }
    world.nothing_is_left();
}

#[test]
fn a_terminal_is_forwarded_and_given_back_as_it_was() {
    let world = world();
    let pair = sys::pty::open(std::path::Path::new("/dev/pts/ptmx"))
        .or_else(|_| sys::pty::open(std::path::Path::new("/dev/ptmx")))
        .unwrap();
    sys::pty::resize(pair.master.as_fd(), 33, 101).unwrap();
    let before = rustix::termios::tcgetattr(&pair.slave).unwrap();
    let mut child = world
        .command(&["run", "--rm", "-it", "box:1", "--", "/bin/sh"])
        .stdin(pair.slave.try_clone().unwrap())
        .stdout(pair.slave.try_clone().unwrap())
        .stderr(pair.slave.try_clone().unwrap())
        .spawn()
        .unwrap();
    let mut master = fs::File::from(pair.master.try_clone().unwrap());
    let mut reader = fs::File::from(pair.master);
    // The terminal echoes what is typed: the answer must not be in the question.
    master.write_all(b"stty size; echo mar$((1))ker; exit 5\n").unwrap();
    let mut seen = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(30);
    while !String::from_utf8_lossy(&seen).contains("mar1ker") {
        let wait = Some(deadline.saturating_duration_since(Instant::now()));
        let ready = sys::wait_readable(reader.as_fd(), wait).unwrap();
        assert!(ready, "{}", String::from_utf8_lossy(&seen));
        let mut part = [0; 4096];
        let count = reader.read(&mut part).unwrap();
        seen.extend_from_slice(&part[..count]);
    }
    assert_eq!(child.wait().unwrap().code(), Some(5));
    assert!(
        String::from_utf8_lossy(&seen).contains("33 101"),
        "{}",
        String::from_utf8_lossy(&seen)
    );
    let after = rustix::termios::tcgetattr(&pair.slave).unwrap();
    assert_eq!(before.local_modes, after.local_modes);
    assert_eq!(before.input_modes, after.input_modes);
    world.nothing_is_left();
}

/// Control groups of this world's sandboxes: the runtime names them by the path of its folder.
fn groups(world: &World) -> Vec<PathBuf> {
    let folder = world.data().join("sandboxes");
    let folder = fs::canonicalize(&folder).unwrap_or(folder);
    // FNV-1a, as the runtime has it.
    let hash =
        folder.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
    let mut pending = vec![PathBuf::from("/sys/fs/cgroup")];
    let mut found = Vec::new();
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_folder && entry.file_name().to_string_lossy() == format!("{hash:016x}") {
                found.push(entry.path());
            } else if is_folder {
                pending.push(entry.path());
            }
        }
    }
    found
}

#[test]
fn whoever_is_killed_whenever_the_next_node_clears_up() {
    let world = world();
    for round in 0..6_u64 {
        let id = world.line("create box:1").ok().out.trim().to_owned();
        shell(&world, &format!("exec {id}"), "echo x > /data/x").ok();
        let node = world.node_pid().unwrap();
        let stats = world.line("stats --json").ok().json();
        let lines = [
            "create box:1".to_owned(),
            "run --rm box:1 -- true".to_owned(),
            format!("pack-diff {id} -t packed:{round}"),
            format!("exec {id} -- sleep 1"),
        ];
        let children = lines.each_ref().map(|line| world.spawn(line));
        std::thread::sleep(Duration::from_millis(5 + 23 * round));
        match round % 3 {
            0 => kill(node, 9),
            1 => children.iter().for_each(|child| kill(child.id(), 9)),
            _ => {
                kill(stats["fsd_pid"].as_u64().unwrap() as u32, 9);
                kill(node, 9);
            }
        }
        for (child, line) in children.into_iter().zip(&lines) {
            end_of(child, &format!("round {round}: {line}"));
        }
        // What was named is whole.
        for row in world.line("ls --json").ok().json().as_array().unwrap() {
            let reference = row["reference"].as_str().unwrap();
            world.line(&format!("fsck {reference} --read-data")).ok();
        }
        shell(&world, "run --rm box:1", "test ! -e /data/x").ok();
        world.line("down").ok();
        world.nothing_is_left();
        assert_eq!(groups(&world), Vec::<PathBuf>::new(), "control groups are left");
    }
}
