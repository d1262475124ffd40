//! How long sandboxes live, and many of them at once, from the command line.

use crate::sandboxes::root;
use crate::world::{World, eventually};

fn ids(out: &str) -> Vec<String> {
    out.lines().map(str::to_owned).collect()
}

#[test]
fn many_sandboxes_are_created_forked_found_by_label_and_ended_with_their_owner() {
    let world = World::new();
    world.build(&root(&world), "base/box:1");
    world.line("env create box:1 --layer base/box:1 --env PATH=/bin").ok();
    let create = "create --count 3 --label job=a --owner me --lease 1h --ttl 2h box:1";
    let made = ids(&world.line(create).ok().out);
    assert_eq!(made.len(), 3);
    let exec = |id: &str, script: &str| world.run(&["exec", id, "--", "/bin/sh", "-c", script]);
    exec(&made[0], "echo mine > /file").ok();
    let forks = ids(&world.line(&format!("fork {} -n 2", made[0])).ok().out);
    assert_eq!(forks.len(), 2);
    for fork in &forks {
        assert_eq!(exec(fork, "cat /file").ok().out, "mine\n");
    }
    let other = world.line("create box:1 --label job=b --idle-timeout 1s").ok().out;
    let listed = world.line("ps --label job=a --json").ok().json();
    let listed = listed.as_array().unwrap();
    assert_eq!(listed.len(), 5);
    for sandbox in listed {
        assert_eq!(sandbox["owner"], "me");
        assert!(sandbox["expires"].is_string());
    }
    eventually("nobody uses it", || {
        world.line("ps --label job=b --json").ok().json()[0]["state"] == "paused"
    });
    assert_eq!(exec(other.trim(), "echo awake").ok().out, "awake\n");
    let renewed = world.line("renew-owner me --lease 0s --json").ok().json();
    assert_eq!(renewed["sandboxes"], 5);
    eventually("they are ended", || {
        world.line("ps --label job=a --json").ok().json().as_array().unwrap().is_empty()
    });
    let ended = world.line("ps -a --label job=a --json").ok().json();
    assert!(ended[0]["reason"].as_str().unwrap().contains("owner me"), "{ended}");
    world.line("create --count 2 box:1 --owner nobody").fails(1, "lease");
    world.line("create --count 0 box:1").fails(2, "count");
    world.line("create --lease 1h box:1").fails(2, "owner");
    world.line("fork nonsense").fails(1, "no sandbox");
    world.line("down").ok();
    world.nothing_is_left();
}
