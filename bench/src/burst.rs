//! Many sandboxes of many environments at once on a node that has nothing, from a throttled store, against
//! fetching and unpacking what they need.
//!
//! The environments share the base, the toolkit and the workspace, and each has one small layer of its own.
//! The eager side fetches each layer once, and starts its containers when all are there.

use crate::cases::{self, THROTTLE};
use crate::corpus::{self, Kind, Piece};
use crate::eager;
use crate::measure::{self, DiskWrites, Spread};
use crate::node::Lamella;
use crate::options::Options;
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use anyhow::Context;
use std::fs;
use std::time::{Duration, Instant};

const ENVIRONMENTS: usize = 16;
const SANDBOXES: usize = 64;
/// Own bytes of an environment; they do not compress.
const OWN_BYTES: usize = 1 << 20;
/// Where an environment keeps what only it has.
const OWN_FILE: &str = "task/input";

/// `bench burst`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let pieces = corpus::ready(options, &[Kind::Base, Kind::Toolkit, Kind::Workspace])?;
    let scratch = Scratch::create(&options.scratch)?;
    let lamella = Lamella::at(&scratch.data())?;
    say("building the layers");
    cases::publish(&lamella, &pieces, |_, _| {})?;
    publish_environments(&lamella, &pieces, &scratch)?;
    let url = format!("file://{}{THROTTLE}", shell::text(&lamella.data.join("store"))?);
    let slow = lamella.with_store(&url);
    let mut times = [Spread::default(), Spread::default()];
    let mut written = [Spread::default(), Spread::default()];
    let mut first = Spread::default();
    for round in 1..=options.rounds {
        say(format!("round {round} of {}", options.rounds));
        let burst = on_demand(&slow)?;
        times[0].push(burst.last.as_secs_f64());
        first.push(burst.first.as_secs_f64());
        written[0].push(burst.written_bytes as f64);
        let (time, bytes) = eagerly(&pieces, &scratch)?;
        times[1].push(time.as_secs_f64());
        written[1].push(bytes as f64);
    }
    let mut report = Report::new("burst", options, &pieces)?;
    let case = format!("{SANDBOXES} sandboxes of {ENVIRONMENTS} environments");
    for (side, (time, bytes)) in ["on demand", "eager"].iter().zip(times.iter().zip(&written)) {
        report.figure(&case, side, "last one ready", Unit::Seconds, time);
        report.figure(&case, side, "written", Unit::Bytes, bytes);
    }
    report.figure(&case, "on demand", "first one ready", Unit::Seconds, &first);
    let faster = times[1].median() / times[0].median();
    report.at_least("the last of a burst is ready faster than eager by", faster, 5.0, Unit::Times);
    let share = written[0].median() / written[1].median();
    report.at_most("a burst writes, of what eager writes,", share, 0.15, Unit::Times);
    report.note("ready: `cksum` of a file of 1 MiB that only its environment has was answered");
    report.note("store throttled to 100 MB/s and 2 ms a request; daemons up, node cache empty");
    report.note(
        "eager: every layer fetched and unpacked once; its own container starts are left out",
    );
    report.finish(options)
}

fn own_reference(index: usize) -> String {
    format!("env/burst-{index}:1")
}

fn publish_environments(
    lamella: &Lamella,
    pieces: &[Piece],
    scratch: &Scratch,
) -> anyhow::Result<()> {
    for index in 0..ENVIRONMENTS {
        let tree = scratch.path().join(format!("own-{index}"));
        let file = tree.join(OWN_FILE);
        fs::create_dir_all(file.parent().context("the file is in a folder")?)?;
        fs::write(&file, noise(index))?;
        let layer = format!("workspace/burst-{index}:1");
        lamella.run(&["build", shell::text(&tree)?, "-t", &layer])?;
        let own = own_reference(index);
        let mut words = vec!["env", "create", own.trim_start_matches("env/")];
        let references: Vec<String> = pieces.iter().map(cases::reference).collect();
        for reference in references.iter().chain([&layer]) {
            words.extend(["--layer", reference]);
        }
        lamella.run(&words)?;
    }
    Ok(())
}

/// Bytes of an environment's own file, the same in every run.
fn noise(index: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ index as u64;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(OWN_BYTES / 8).flatten().collect()
}

struct Burst {
    first: Duration,
    last: Duration,
    written_bytes: u64,
}

fn on_demand(lamella: &Lamella) -> anyhow::Result<Burst> {
    lamella.clear_cache()?;
    let node = lamella.up()?;
    anyhow::ensure!(lamella.cache_is_empty()?, "the node cache is not empty at the start");
    measure::drop_caches()?;
    let writes = DiskWrites::start(&lamella.data)?;
    let start = Instant::now();
    let mut ready = std::thread::scope(|scope| -> anyhow::Result<Vec<Duration>> {
        let threads: Vec<_> = (0..SANDBOXES)
            .map(|index| {
                scope.spawn(move || {
                    let own = own_reference(index % ENVIRONMENTS);
                    let file = format!("/{OWN_FILE}");
                    lamella.run(&["run", "--rm", &own, "--", "cksum", &file])?;
                    Ok(start.elapsed())
                })
            })
            .collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(ready) => ready,
            Err(_) => Err(anyhow::anyhow!("a sandbox's thread panicked")),
        });
        joined.collect()
    })?;
    ready.sort_unstable();
    let written_bytes = writes.finish()?;
    drop(node);
    let at = |place: Option<&Duration>| place.copied().context("there are sandboxes");
    Ok(Burst { first: at(ready.first())?, last: at(ready.last())?, written_bytes })
}

fn eagerly(pieces: &[Piece], scratch: &Scratch) -> anyhow::Result<(Duration, u64)> {
    measure::drop_caches()?;
    let into = scratch.path().join("eager");
    let pulled = eager::pull(pieces, THROTTLE, &into)?;
    let own_bytes = (ENVIRONMENTS * OWN_BYTES) as u64;
    let own = Duration::from_secs_f64(own_bytes as f64 / 100e6);
    corpus::remove_tree(&into)?;
    Ok((pulled.time + own, pulled.written_bytes + own_bytes))
}
