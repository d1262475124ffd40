//! Sandboxes with a network, from the command line, and a node that is killed while they live.

use crate::sandboxes;
use crate::world::{World, eventually, kill};

const INTERFACES: &str = "while read name rest; do echo $name; done < /proc/net/dev";

#[test]
fn a_network_is_shown_changed_and_reported_and_a_killed_node_closes_it() {
    let world = World::new();
    world.build(&sandboxes::root(&world), "base/box:1");
    let rules = world.path("rules");
    std::fs::write(&rules, "# what the task needs\ntcp:203.0.113.10:7\n\n").unwrap();
    let net = format!("create base/box:1 --net {} --allow *.example.org:443", rules.display());
    let id = world.line(&net).ok().out.trim().to_owned();
    let exec = |script: &str| world.run(&["exec", &id, "--", "/bin/sh", "-c", script]);
    assert!(exec(INTERFACES).ok().out.contains("eth0:"));
    let shown = world.line(&format!("net {id} --json")).ok().json();
    assert_eq!(shown["allow"][1], "*.example.org:443");
    let address = shown["address"].as_str().unwrap().to_owned();
    // Nothing is there, and nobody is asked.
    assert_ne!(exec("/bin/busybox nc -w 20 203.0.113.9 80 </dev/null").code, 0);
    assert_ne!(exec("/bin/busybox nslookup secret.evil.com").code, 0);
    let denied = world.line(&format!("net {id} denials")).ok().out;
    assert!(denied.contains("203.0.113.9:80") && denied.contains("secret.evil.com"), "{denied}");
    world.line(&format!("net {id} add nonsense")).fails(1, "no preset");
    let added = world.line(&format!("net {id} add pypi,before=2025-01-01")).ok().out;
    assert!(added.contains("allow pypi,before=2025-01-01"), "{added}");
    assert!(exec("env").ok().out.contains("PIP_INDEX_URL=http://198.18.0.1/pypi/simple/"));

    let init = world.line("ps --json").ok().json()[0]["init_pid"].as_u64().unwrap();
    kill(world.node_pid().unwrap(), 9);
    let interfaces = || std::fs::read_to_string(format!("/proc/{init}/net/dev")).unwrap();
    eventually("the cable is gone with the node", || !interfaces().contains("eth0"));
    // The next command starts a node, which connects what lives.
    let shown = world.line(&format!("net {id} show --json")).ok().json();
    assert_eq!(shown["address"], address.as_str());
    assert!(interfaces().contains("eth0"));
    let emptied = world.line(&format!("net {id} set")).ok().out;
    assert!(!emptied.contains("allow"), "{emptied}");
    assert!(!exec("env").ok().out.contains("PIP_INDEX_URL"));
    world.line("create base/box:1 --publish 99999").fails(1, "99999");
    world
        .line(&format!("create base/box:1 --net {}", world.path("none").display()))
        .fails(1, "none");
    world.line("down").ok();
    world.nothing_is_left();
}
