//! What the log of events says of a sandbox's life, what it survives, and `top`.

use crate::sandboxes::root;
use crate::world::{World, eventually, kill};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::time::Duration;

fn world() -> World {
    let world = World::new();
    world.build(&root(&world), "base/box:1");
    world
}

/// What `events` prints with these words.
#[track_caller]
fn events(world: &World, words: &str) -> Vec<Value> {
    let out = world.line(format!("events --json {words}").trim_end()).ok().out;
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["kind"].as_str().unwrap()).collect()
}

fn numbers(events: &[Value]) -> Vec<u64> {
    events.iter().map(|event| event["seq"].as_u64().unwrap()).collect()
}

#[test]
fn the_life_of_a_sandbox_is_told_in_its_order_and_nothing_else() {
    let world = world();
    let id = world.line("create base/box:1 --label job=7").ok().out.trim().to_owned();
    world.run(&["exec", &id, "-u", "ann", "--", "/bin/sh", "-c", "echo a\u{1b}[2J\nexit 3"]);
    world.line(&format!("exec {id} -- /bin/nonsense")).fails(127, "nonsense");
    world.line(&format!("exec {id} --output-limit 1000 -- /bin/cat /bin/busybox"));
    let file = world.path("file");
    fs::write(&file, vec![7; 300_000]).unwrap();
    world.line(&format!("cp {} {id}:/tmp/file", file.display())).ok();
    world.line(&format!("cp {id}:/tmp/file {}", world.path("back").display())).ok();
    world.line(&format!("files mkdir {id}:/tmp/new")).ok();
    world.line(&format!("pause {id}")).ok();
    world.line(&format!("resume {id}")).ok();
    world.line(&format!("pack-diff {id} -t packed:1")).ok();
    world.line(&format!("stop {id}")).ok();
    let told = events(&world, &id);
    let expected = [
        "creating",
        "running",
        "exec_start",
        "exec_end",
        "exec_start",
        "exec_end",
        "exec_start",
        "limit",
        "exec_end",
        "file_transfer",
        "file_transfer",
        "file_change",
        "paused",
        "resumed",
        "pack_diff",
        "stopping",
        "gone",
    ];
    assert_eq!(kinds(&told), expected);
    assert_eq!(told[0]["environment"], "base/box:1");
    assert_eq!(told[0]["labels"]["job"], "7");
    assert_eq!(told[2]["argv"][2], "echo a\u{1b}[2J\nexit 3");
    assert_eq!((&told[2]["user"], &told[3]["exit_code"]), (&"ann".into(), &3.into()));
    assert_eq!(told[3]["command"], told[2]["command"]);
    assert_eq!(told[3]["end"], serde_json::json!({ "how": "exited", "code": 3 }));
    assert!(told[3]["output_bytes"].as_u64().unwrap() > 5);
    assert_eq!(told[5]["exit_code"], 127);
    assert_eq!(told[7]["limit"], "output");
    assert_eq!(told[7]["count"], told[8]["truncated_bytes"]);
    assert_eq!((&told[9]["direction"], &told[9]["bytes"]), (&"in".into(), &300_000.into()));
    assert_eq!((&told[10]["direction"], &told[10]["bytes"]), (&"out".into(), &300_000.into()));
    assert_eq!((&told[10]["path"], &told[10]["result"]), (&"/tmp/file".into(), &"ok".into()));
    assert_eq!(told[14]["result"], "ok");
    assert_eq!(told[16]["end"]["how"], "killed");
    // For people: one line each, and none that a terminal acts on.
    let text = world.line(&format!("events {id} -k exec_start")).ok().out;
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    world.line("events -k nonsense").fails(1, "exec_end");
    world.line("down").ok();
    // Without a node from the files, and the same.
    assert_eq!(events(&world, &id), told);
    let all = events(&world, "");
    assert_eq!(numbers(&all), (1..=all.len() as u64).collect::<Vec<_>>());
    assert_eq!((kinds(&all)[0], *kinds(&all).last().unwrap()), ("node_started", "node_ended"));
    world.line("events -f").fails(1, "no node");
    world.nothing_is_left();
}

#[test]
fn a_sandbox_neither_sees_nor_reaches_the_events() {
    let world = world();
    let id = world.line("create base/box:1").ok().out.trim().to_owned();
    let place = world.data().join("events");
    assert!(fs::read_dir(&place).unwrap().count() > 0);
    let script = format!(
        "/bin/busybox find / -name '*.jsonl' -o -name events -path '*lamella*'; \
         ls {0}; cat {0}/*; cat /proc/*/root{0}/*; cat /proc/1/mountinfo | /bin/busybox grep {0}; true",
        place.display()
    );
    let done = world.run(&["exec", &id, "--", "/bin/sh", "-c", &script]);
    assert_eq!(done.out, "", "{}", done.err);
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn what_is_refused_is_told() {
    let world = world();
    let create = "create base/box:1 --allow tcp:203.0.113.10:7";
    let id = world.line(create).ok().out.trim().to_owned();
    let reach =
        "/bin/busybox nc -w 20 203.0.113.9 80 </dev/null; /bin/busybox nslookup no.evil.com";
    world.run(&["exec", &id, "--", "/bin/sh", "-c", reach]);
    let told = events(&world, &format!("{id} -k denied -k network"));
    assert_eq!(
        (&told[0]["kind"], &told[0]["allow"][0]),
        (&"network".into(), &"tcp:203.0.113.10:7".into())
    );
    let refused = |what: &str, is: &str| {
        told.iter().any(|event| {
            event[what].as_str().unwrap_or_default().starts_with(is) && event["by"] == "network"
        })
    };
    assert!(refused("address", "203.0.113.9") && refused("name", "no.evil.com"), "{told:?}");
    world.line("down").ok();
    let key = world.path("key");
    world.line(&format!("key generate {}", key.display())).ok();
    let trusted = world.data().join("trusted-keys");
    fs::create_dir(&trusted).unwrap();
    fs::copy(key.with_extension("pub"), trusted.join("key.pub")).unwrap();
    world.line("create base/box:1").fails(1, "not signed");
    let told = events(&world, "-k denied");
    let last = told.last().unwrap();
    assert_eq!((&last["by"], &last["name"]), (&"signature".into(), &"base/box:1".into()));
    world.line("down").ok();
    world.nothing_is_left();
}

#[test]
fn a_node_killed_while_it_writes_leaves_whole_events() {
    let world = world();
    let id = world.line("create base/box:1").ok().out.trim().to_owned();
    for round in 0..3 {
        std::thread::scope(|scope| {
            let busy: Vec<_> = (0..3)
                .map(|_| scope.spawn(|| world.line(&format!("files mkdir -p {id}:/tmp/x"))))
                .collect();
            std::thread::sleep(Duration::from_millis(40 * round));
            if let Some(node) = world.node_pid() {
                kill(node, 9);
            }
            for one in busy {
                let _whatever = one.join();
            }
        });
        let told = events(&world, "");
        assert_eq!(numbers(&told), (1..=told.len() as u64).collect::<Vec<_>>());
        world.line(&format!("exec {id} -- /bin/true")).ok();
    }
    world.line("down").ok();
    let told = events(&world, "");
    assert_eq!(numbers(&told), (1..=told.len() as u64).collect::<Vec<_>>());
    let count = |kind: &str| kinds(&told).iter().filter(|known| **known == kind).count();
    assert!(count("node_started") > count("node_ended"), "{:?}", kinds(&told));
    world.nothing_is_left();
}

#[test]
fn a_follower_hears_what_happens_across_small_files() {
    let world = world();
    let mut node = world
        .command(&["up", "--event-file-size", "512", "--event-files", "500"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    eventually("the node comes up", || world.line("stats").code == 0);
    let id = world.line("create base/box:1").ok().out.trim().to_owned();
    let mut follower = world.spawn(&format!("events --json -f {id}"));
    let lines = BufReader::new(follower.stdout.take().unwrap()).lines();
    for _ in 0..20 {
        world.line(&format!("files mkdir -p {id}:/tmp/x")).ok();
    }
    world.line(&format!("stop {id}")).ok();
    let mut heard = Vec::new();
    for line in lines {
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        heard.push(event["kind"].as_str().unwrap().to_owned());
        if heard.last().unwrap() == "gone" {
            break;
        }
    }
    kill(follower.id(), 15);
    follower.wait().unwrap();
    assert_eq!(heard.iter().filter(|kind| *kind == "file_change").count(), 20, "{heard:?}");
    assert!(fs::read_dir(world.data().join("events")).unwrap().count() > 2);
    world.line("down").ok();
    node.wait().unwrap();
    world.nothing_is_left();
}

#[test]
fn top_shows_what_is_used_and_gives_the_terminal_back() {
    let world = world();
    world.line("top").fails(1, "lamella up");
    let busy = "while true; do true; done";
    let id = world.run(&["create", "base/box:1", "--", "/bin/sh", "-c", busy]).ok().out;
    let (id, idle) = (id.trim(), world.line("create base/box:1").ok().out.trim().to_owned());
    let json = world.line("top --json").ok().json();
    assert_eq!(json["sandboxes"]["running"], 2);
    let rows = json["rows"].as_array().unwrap();
    assert_eq!((&rows[0]["id"], &rows[1]["id"]), (&id.into(), &idle.as_str().into()));
    assert!(rows[0]["cpu_percent"].as_f64().unwrap() > rows[1]["cpu_percent"].as_f64().unwrap());
    assert_eq!((&rows[0]["commands"], &rows[0]["tasks"]), (&1.into(), &2.into()));
    assert!(rows[0]["memory_bytes"].as_u64().unwrap() > 0 && rows[0]["written_bytes"].is_u64());
    assert!(
        json["host_memory_bytes"].as_u64().unwrap()
            > json["host_memory_used_bytes"].as_u64().unwrap()
    );
    let once = world.line("top --once -n 1").ok().out;
    assert!(once.starts_with("sandboxes  2 running") && once.lines().count() == 6, "{once}");
    assert!(!once.contains('\u{1b}'), "{once:?}");

    let pair = sys::pty::open(std::path::Path::new("/dev/ptmx")).unwrap();
    use std::os::fd::AsFd;
    sys::pty::resize(pair.master.as_fd(), 8, 40).unwrap();
    let own = || Stdio::from(pair.slave.try_clone().unwrap());
    let mut command = world.command(&["top", "--every", "100ms"]);
    let mut top = command.stdin(own()).stdout(own()).stderr(Stdio::piped()).spawn().unwrap();
    drop((command, pair.slave));
    let (sender, drawn) = std::sync::mpsc::channel();
    let mut terminal = fs::File::from(pair.master.try_clone().unwrap());
    std::thread::spawn(move || {
        let mut part = [0; 4096];
        while let Ok(count) = terminal.read(&mut part) {
            if count == 0 || sender.send(part[..count].to_vec()).is_err() {
                return;
            }
        }
    });
    let mut seen = String::new();
    let mut until = |what: &str, holds: &dyn Fn(&str) -> bool| {
        eventually(what, || {
            for part in drawn.try_iter() {
                seen.push_str(&String::from_utf8_lossy(&part));
            }
            holds(&seen)
        });
        std::mem::take(&mut seen)
    };
    let first = until("a table is drawn", &|seen: &str| seen.matches(id).count() > 1);
    assert!(first.starts_with("\u{1b}[?1049h"), "{first:?}");
    assert!(!first.contains("ENVIRONMENT"), "cut to the terminal: {first:?}");
    sys::pty::resize(pair.master.as_fd(), 30, 120).unwrap();
    kill(top.id(), 28);
    until("the larger table is drawn", &|seen: &str| seen.contains("ENVIRONMENT"));
    kill(top.id(), 2);
    let last = until("the terminal is given back", &|seen: &str| seen.contains("\u{1b}[?1049l"));
    assert!(last.contains("\u{1b}[?25h"), "{last:?}");
    assert!(top.wait().unwrap().success());
    world.line("down").ok();
    world.nothing_is_left();
}
