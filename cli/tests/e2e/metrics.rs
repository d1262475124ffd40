//! The page of metrics of a living node, and what the documentation says of it.

use crate::sandboxes::root;
use crate::world::{World, eventually, kill};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

/// The page, once the node serves it.
fn scrape(address: SocketAddr) -> String {
    let mut connected = None;
    eventually("metrics are served", || {
        connected = TcpStream::connect(address).ok();
        connected.is_some()
    });
    let mut stream = connected.unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, page) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    page.to_owned()
}

/// The value of a line that begins with this.
#[track_caller]
fn value(page: &str, line: &str) -> f64 {
    let found = page.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("no {line} in {page}")).parse().unwrap()
}

fn served(page: &str) -> BTreeSet<String> {
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types.map(|line| line.split(' ').next().unwrap().to_owned()).collect()
}

fn documented() -> BTreeSet<String> {
    let text = include_str!("../../../docs/metrics.md");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `lamella_")?.split_once('`'));
    rows.map(|(name, _)| format!("lamella_{name}")).collect()
}

#[test]
fn a_node_serves_the_numbers_of_all_its_daemons_and_the_documentation_names_each() {
    let world = World::new();
    // A port that was free a moment ago.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut node = world.spawn(&format!("up --metrics {address}"));
    eventually("the node comes up", || world.line("stats").code == 0);
    let tree = root(&world);
    world.build(&tree, "base/box:1");
    world.build(&tree, "base/again:1");
    let id = world.line("create base/box:1 -- sleep 600").ok().out.trim().to_owned();
    world.line(&format!("exec {id} -- /bin/true")).ok();
    world.line(&format!("exec {id} -- /bin/nonsense")).fails(127, "nonsense");
    world.line(&format!("exec {id} --timeout 200ms -- /bin/sleep 60")).fails(124, "time");
    world.line(&format!("pack-diff {id} -t packed:1")).ok();
    world.line("inspect base/nope:1").fails(1, "base/nope:1");
    world.line("gc").ok();
    let page = scrape(address);
    assert_eq!(served(&page), documented());
    for (line, least) in [
        ("lamella_fsd_up", 1.0),
        ("lamella_layers_in_use", 1.0),
        ("lamella_publishes_total", 3.0),
        ("lamella_layers_published_total", 3.0),
        ("lamella_layers_known_total", 1.0),
        ("lamella_uploaded_bytes_total", 100_000.0),
        ("lamella_reused_bytes_total", 100_000.0),
        ("lamella_reference_moves_total", 4.0),
        ("lamella_leases_total", 3.0),
        ("lamella_gc_marked_chunks", 1.0),
        ("lamella_gc_seconds_count", 1.0),
        ("lamella_sandboxes{state=\"running\"}", 1.0),
        ("lamella_create_seconds_count", 1.0),
        ("lamella_create_seconds_bucket{le=\"+Inf\"}", 1.0),
        ("lamella_starts_total", 1.0),
        ("lamella_execs_total", 3.0),
        ("lamella_exec_ends_total{end=\"exited\"}", 1.0),
        ("lamella_exec_ends_total{end=\"refused\"}", 1.0),
        ("lamella_exec_ends_total{end=\"timeout\"}", 1.0),
        ("lamella_slots_made_total", 1.0),
        ("lamella_pack_diff_seconds_count", 1.0),
        ("lamella_rpc_seconds_count{service=\"Sandboxes\",method=\"Create\"}", 1.0),
        ("lamella_rpc_errors_total{service=\"Images\",method=\"Resolve\"}", 1.0),
    ] {
        assert!(value(&page, line) >= least, "{line} is {}", value(&page, line));
    }
    world.line(&format!("stop {id}")).ok();
    let fsd = world.line("stats --json").ok().json()["fsd_pid"].as_u64().unwrap() as u32;
    kill(fsd, 9);
    // Without it too, and again with the next one.
    eventually("fsd is back", || value(&scrape(address), "lamella_fsd_up") == 1.0);
    let ends = ["exited", "signal", "oom", "timeout", "killed"];
    let ended = |page: &str| {
        let end = |end: &&str| value(page, &format!("lamella_sandbox_ends_total{{end=\"{end}\"}}"));
        ends.iter().map(end).sum::<f64>()
    };
    assert_eq!(ended(&scrape(address)), 1.0);
    world.line("down").ok();
    node.wait().unwrap();
    world.nothing_is_left();
}
