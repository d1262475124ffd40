//! Commands in the background, commands across an upgrade, and the files of a sandbox, from the command line.

use crate::sandboxes::root;
use crate::world::{World, end_of, eventually};
use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

fn world() -> (World, String) {
    let world = World::new();
    world.build(&root(&world), "base/box:1");
    world.line("env create box:1 --layer base/box:1 --env PATH=/bin").ok();
    let id = world.line("create box:1").ok().out.trim().to_owned();
    (world, id)
}

fn shell(world: &World, words: &str, script: &str) -> crate::world::Done {
    let mut line: Vec<&str> = words.split(' ').collect();
    line.extend(["--", "/bin/sh", "-c", script]);
    world.run(&line)
}

#[test]
fn a_command_in_the_background_is_listed_followed_signalled_and_waited_for() {
    let (world, id) = world();
    let script =
        "echo one; echo oh >&2; while test ! -e /go; do sleep 0.05; done; echo two; exit 7";
    let command = shell(&world, &format!("exec --background {id}"), script).ok().out;
    let command = command.trim();
    let known = world.line(&format!("commands {id} --json")).ok().json();
    assert_eq!((&known[0]["id"], &known[0]["state"]), (&command.into(), &"running".into()));
    eventually("it prints", || world.line(&format!("tail {id} {command}")).ok().out == "one\n");
    let follower = world.spawn(&format!("tail -f {id} {command}"));
    let attached = world.spawn(&format!("attach {id} {}", &command[..5]));
    shell(&world, &format!("exec {id}"), "echo > /go").ok();
    let done = end_of(attached, "attach");
    assert_eq!((done.code, done.out.as_str()), (7, "one\ntwo\n"), "{}", done.err);
    assert!(done.err.contains("oh\n"), "{}", done.err);
    assert_eq!(end_of(follower, "tail").ok().out, "one\ntwo\n");
    let waited = world.line(&format!("wait {id} {command} --json"));
    assert_eq!((waited.code, &waited.json()["end"]), (7, &"exited(7)".into()));
    assert_eq!(world.line(&format!("tail {id} {command} -c 3")).ok().out, "wo\n");

    let sleeper = shell(&world, &format!("exec -b {id}"), "sleep 1000 & sleep 1000").ok().out;
    let sleeper = sleeper.trim();
    world.line(&format!("signal {id} {sleeper} -s INT")).ok();
    assert_eq!(world.line(&format!("wait {id} {sleeper}")).code, 130);
    world.line(&format!("signal {id} {sleeper}")).fails(1, "has ended");
    world.line(&format!("attach {id} nonsense")).fails(1, "lamella commands");
    world.line(&format!("signal {id} {sleeper} -s NONE")).fails(2, "signal");
    let missing = world.line(&format!("exec -b {id} -- nonsense")).ok().out;
    assert_eq!(world.line(&format!("wait {id} {}", missing.trim())).code, 127);
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn a_signal_passes_input_that_waits() {
    let (world, id) = world();
    let mut child = world
        .command(&[
            "exec",
            "-i",
            &id,
            "--",
            "/bin/sh",
            "-c",
            "trap 'exit 9' INT; echo up; sleep 1000 & wait",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap();
    let pid = child.id();
    let mut stdin = child.stdin.take().unwrap();
    // More than every pipe on the way holds, and the command reads none of it.
    let feeder = std::thread::spawn(move || stdin.write_all(&vec![b'x'; 64 << 20]));
    eventually("the command runs", || {
        let known = world.line(&format!("commands {id} --json")).ok().json();
        known.as_array().is_some_and(|known| !known.is_empty())
    });
    let done = std::thread::spawn(move || end_of(child, "exec"));
    eventually("the signal arrives", || {
        crate::world::kill(pid, 2);
        std::thread::sleep(std::time::Duration::from_millis(100));
        done.is_finished()
    });
    assert_eq!(done.join().unwrap().code, 9);
    drop(feeder.join().unwrap());
    world.line("down").ok();
    world.nothing_is_left();
}

/// The built program where an upgrade finds it.
fn install(at: &Path) {
    let fresh = at.with_extension("fresh");
    fs::copy(env!("CARGO_BIN_EXE_lamella"), &fresh).unwrap();
    fs::rename(&fresh, at).unwrap();
}

fn up(world: &World, program: &Path) -> Child {
    let mut command = Command::new(program);
    command.env_remove("LAMELLA_DATA").env_remove("LAMELLA_STORE");
    command.arg("--data").arg(world.data()).arg("up").stdin(Stdio::null());
    let node = command.spawn().unwrap();
    eventually("the node comes up", || world.line("stats").code == 0);
    node
}

#[test]
fn commands_go_on_through_an_upgrade_and_a_killed_node_and_their_clients_with_them() {
    let (world, _) = world();
    world.line("down").ok();
    let program = world.path("lamella");
    install(&program);
    let mut node = up(&world, &program);
    let id = world.line("create box:1").ok().out.trim().to_owned();
    let script =
        "n=0; while test ! -e /stop; do n=$((n+1)); echo $n; sleep 0.01; done; echo end; exit 5";
    let fore = world
        .command(&["exec", &id, "--", "/bin/sh", "-c", script])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let back = shell(&world, &format!("exec -b {id}"), script).ok().out;
    let back = back.trim();
    let follower = world.spawn(&format!("attach {id} {back}"));
    install(&program);
    world.line("upgrade").ok();
    let other = world.line(&format!("exec {id} -- /bin/echo here")).ok().out;
    assert_eq!(other, "here\n");
    // Now without a word.
    crate::world::kill(node.id(), 9);
    node.wait().unwrap();
    let mut node = up(&world, &program);
    shell(&world, &format!("exec {id}"), "echo > /stop").ok();
    for (child, what) in [(fore, "exec"), (follower, "attach")] {
        let done = end_of(child, what);
        assert_eq!(done.code, 5, "{what}: {}", done.err);
        let mut lines: Vec<&str> = done.out.lines().collect();
        assert_eq!(lines.pop(), Some("end"), "{what}");
        let numbers: Vec<u32> = lines.iter().map(|line| line.parse().unwrap()).collect();
        let expected: Vec<u32> = (1..=numbers.len() as u32).collect();
        assert_eq!(numbers, expected, "{what}: something is missing or came twice");
    }
    assert_eq!(world.line(&format!("wait {id} {back}")).code, 5);
    world.line("down").ok();
    assert!(node.wait().unwrap().success());
    world.nothing_is_left();
}

#[test]
fn files_of_a_sandbox_are_called_by_the_command_line() {
    let (world, id) = world();
    let files = |words: &str| world.line(&format!("files {words}"));
    let write = |words: &str, bytes: &[u8]| {
        let line = format!("files write {words}");
        let mut child = world
            .command(&line.split(' ').collect::<Vec<_>>())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(bytes).unwrap();
        end_of(child, "write")
    };
    write(&format!("{id}:/new/a -p -m 600 --owner 1000:1000"), b"0123\xff\n").ok();
    write(&format!("{id}:/new/a --append"), b"more").ok();
    let done = world.command(&["files", "cat", &format!("{id}:/new/a"), "--offset", "4"]).output();
    assert_eq!(done.unwrap().stdout, b"\xff\nmore");
    let listed = files(&format!("ls {id}:/new --json")).ok().json();
    let entry = &listed[0];
    assert_eq!(
        (&entry["path"], &entry["mode"], &entry["uid"]),
        (&"a".into(), &"0600".into(), &1000.into())
    );
    assert_eq!(entry["size_bytes"], 10);
    files(&format!("mkdir {id}:/new/d/e -p -m 700")).ok();
    files(&format!("mv {id}:/new/a /new/d/b")).ok();
    files(&format!("chmod {id}:/new/d/b -m 640 --owner 0:5")).ok();
    let stat = files(&format!("stat {id}:/new/d/b --json")).ok().json();
    assert_eq!(
        (&stat["mode"], &stat["gid"], &stat["kind"]),
        (&"0640".into(), &5.into(), &"regular".into())
    );
    let all = files(&format!("ls {id}:/new -d 5 --json")).ok().json();
    assert_eq!(all.as_array().unwrap().len(), 3);
    files(&format!("rm {id}:/new")).fails(1, "remove");
    let watched = world.spawn(&format!("files watch -r {id}:/new"));
    std::thread::sleep(std::time::Duration::from_millis(300));
    eventually("the watch tells", || {
        write(&format!("{id}:/new/x"), b"x").ok();
        files(&format!("rm -r {id}:/new")).code == 0
    });
    let done = end_of(watched, "watch").ok();
    assert!(done.out.starts_with("ready"), "{}", done.out);
    assert!(done.out.contains("moved_to x\n") && done.out.ends_with("gone \n"), "{}", done.out);
    files(&format!("rm {id}:/new")).fails(1, "no such file");
    files(&format!("rm -f {id}:/new")).ok();
    files(&format!("cat {id}:/data")).fails(1, "directory");
    files("ls nonsense").fails(2, "ID:PATH");
    world.line("down").ok();
    world.nothing_is_left();
}
