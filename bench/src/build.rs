//! Building the base into a layer against `zstd -3` on its tar: wall time and memory.
//!
//! Both read a tar that is in the page cache. Ours also hashes, deduplicates, writes the metadata image
//! and makes everything durable before it answers; zstd does not even sync.

use crate::corpus::{self, Kind};
use crate::measure::Spread;
use crate::node::Lamella;
use crate::options::Options;
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use anyhow::{Context, bail};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;
use sys::measure::Usage;

/// `bench build`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let pieces = corpus::ready(options, &[Kind::Base])?;
    let piece = pieces.first().context("the base is a piece")?;
    let scratch = Scratch::create(&options.scratch)?;
    let tar = piece.tar();
    let tar = shell::text(&tar)?;
    let compressed = scratch.path().join("tree.tar.zst");
    let lamella = Lamella::at(&scratch.data())?;
    let (mut ours, mut zstd, mut both) = (Side::default(), Side::default(), Side::default());
    for round in 1..=options.rounds {
        say(format!("round {round} of {}", options.rounds));
        corpus::remove_tree(&lamella.data)?;
        settle(tar)?;
        ours.run(&mut lamella.command(&["build", tar, "-t", "base/debian:bench"]))?;
        ours.stored.push(crate::measure::allocated_bytes(&lamella.data.join("store"))? as f64);
        for (side, threads) in [(&mut zstd, "-T1"), (&mut both, "-T2")] {
            settle(tar)?;
            let mut words = shell::command(&["zstd", "-3", "-q", "-f", threads, tar, "-o"]);
            side.run(words.arg(&compressed))?;
            side.stored.push(std::fs::metadata(&compressed)?.len() as f64);
        }
    }
    let mut report = Report::new("build", options, &pieces)?;
    for (name, side) in [("lamella", &ours), ("zstd -3", &zstd), ("zstd -3 -T2", &both)] {
        report.figure("base", name, "time", Unit::Seconds, &side.time);
        report.figure("base", name, "processor time", Unit::Seconds, &side.processor);
        report.figure("base", name, "peak memory", Unit::Bytes, &side.memory);
        report.figure("base", name, "stored", Unit::Bytes, &side.stored);
    }
    let ratio = ours.time.median() / zstd.time.median();
    report.at_most("base is built, in the time of `zstd -3` on its tar,", ratio, 0.7, Unit::Times);
    let ratio = ours.stored.median() / zstd.stored.median();
    report.at_most("stored, of the bytes of that tar", ratio, 1.06, Unit::Times);
    let memory = ours.memory.max();
    report.at_most("peak memory of the build", memory, f64::from(128 << 20), Unit::Bytes);
    report.note("the tar is in the page cache; zstd does not sync, the build does");
    report.finish(options)
}

#[derive(Default)]
struct Side {
    time: Spread,
    processor: Spread,
    memory: Spread,
    stored: Spread,
}

impl Side {
    fn run(&mut self, command: &mut Command) -> anyhow::Result<()> {
        let shown = shell::shown(command);
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let start = Instant::now();
        let child = command.spawn().with_context(|| format!("cannot start `{shown}`"))?;
        let Usage { status, peak_rss_bytes, user, system } = sys::measure::wait_with_usage(child)?;
        let time = start.elapsed();
        if !status.success() {
            bail!("`{shown}` failed ({status}); run it by hand to see why");
        }
        self.time.push(time.as_secs_f64());
        self.processor.push((user + system).as_secs_f64());
        self.memory.push(peak_rss_bytes as f64);
        Ok(())
    }
}

/// Nothing to write back, and the tar in the page cache.
fn settle(tar: impl AsRef<Path>) -> anyhow::Result<()> {
    rustix::fs::sync();
    let mut file = std::fs::File::open(tar)?;
    std::io::copy(&mut file, &mut std::io::sink())?;
    Ok(())
}
