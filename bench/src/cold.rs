//! The first command on a node that has nothing: on demand against fetch-and-unpack, from a throttled
//! store, without a profile and with one; and how much is fetched beside what the command touches.

use crate::cases::{self, Case, Cold, ENVIRONMENT, GCC, PYTHON, THROTTLE, TRUE};
use crate::corpus::{self, Kind, Piece};
use crate::eager;
use crate::measure::{self, Spread};
use crate::node::Lamella;
use crate::options::Options;
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use crate::touched::{self, WithoutReadahead};

/// A command and its bars.
#[derive(Debug, Clone, Copy)]
struct Bars {
    case: Case,
    /// Times faster than eager at least.
    faster: f64,
    /// What nydus 2.3 (zstd) put into its cache for it, in bytes: it is in no registry, so its figures are
    /// constants of November 2026.
    nydus: f64,
    /// The most that is fetched, of what the command touches; where there is such a bar.
    touched: Option<f64>,
}

const BARS: [Bars; 3] = [
    Bars { case: TRUE, faster: 50.0, nydus: 10e6, touched: Some(2.5) },
    Bars { case: PYTHON, faster: 5.0, nydus: 180e6, touched: Some(2.5) },
    Bars { case: GCC, faster: 15.0, nydus: 93e6, touched: None },
];

/// What one side of one command took.
#[derive(Default)]
struct Side {
    time: Spread,
    plain: Spread,
    stored: Spread,
    metadata: Spread,
    reads: Spread,
    events: Spread,
    asked: Spread,
    written: Spread,
}

impl Side {
    fn push(&mut self, cold: &Cold) {
        self.time.push(cold.time.as_secs_f64());
        self.plain.push(cold.loaded.plain_bytes as f64);
        self.stored.push(cold.loaded.store_bytes as f64);
        self.metadata.push(cold.loaded.metadata_bytes as f64);
        self.reads.push(cold.loaded.store_reads as f64);
        self.events.push(cold.loaded.events as f64);
        self.asked.push(cold.asked_bytes as f64);
        self.written.push(cold.written_bytes as f64);
    }

    fn show(&self, report: &mut Report, case: &str, side: &str) {
        report.figure(case, side, "time", Unit::Seconds, &self.time);
        report.figure(case, side, "asked", Unit::Bytes, &self.asked);
        report.figure(case, side, "plain bytes", Unit::Bytes, &self.plain);
        report.figure(case, side, "fetched data", Unit::Bytes, &self.stored);
        report.figure(case, side, "fetched metadata", Unit::Bytes, &self.metadata);
        report.figure(case, side, "store requests", Unit::Count, &self.reads);
        report.figure(case, side, "events", Unit::Count, &self.events);
        report.figure(case, side, "written", Unit::Bytes, &self.written);
    }
}

#[derive(Default)]
struct Series {
    lazy: Side,
    profiled: Side,
    eager_time: Spread,
    eager_written: Spread,
    touched: f64,
}

/// `bench cold`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let bars: Vec<Bars> = BARS.into_iter().filter(|bars| options.wants(bars.case.name)).collect();
    let pieces = corpus::ready(options, &[Kind::Base, Kind::Toolkit, Kind::Workspace])?;
    let scratch = Scratch::create(&options.scratch)?;
    let lamella = Lamella::at(&scratch.data())?;
    say("building the layers");
    cases::publish(&lamella, &pieces, |_, _| {})?;
    let url = format!("file://{}{THROTTLE}", shell::text(&lamella.data.join("store"))?);
    let slow = lamella.with_store(&url);
    let mut series: Vec<Series> = bars.iter().map(|_| Series::default()).collect();
    measure_touched(&pieces, &scratch, &bars, &mut series)?;
    for round in 1..=options.rounds {
        say(format!("round {round} of {}", options.rounds));
        for (Bars { case, .. }, series) in bars.iter().zip(&mut series) {
            series.lazy.push(&cases::run_cold(&slow, *case)?);
            record(&lamella, *case)?;
            series.profiled.push(&cases::run_cold(&slow, *case)?);
            forget(&lamella)?;
        }
        eager_round(&pieces, &scratch, &bars, &mut series)?;
    }
    let mut report = Report::new("cold", options, &pieces)?;
    for (bars, series) in bars.iter().zip(&series) {
        judge(&mut report, bars, series);
    }
    report.note("store throttled to 100 MB/s and 2 ms a request; daemons up, node cache empty");
    report.note("eager overlaps fetching (4 MiB requests) with unpacking and keeps the page cache");
    report.note("touched: mincore of the unpacked trees after the command, readahead off");
    report.note("written: /proc/diskstats up to and including the write-back");
    report.note("with a profile: recorded before by one run of the same command on a fresh node");
    report.finish(options)
}

/// Records what a command touches, on a node that has nothing.
fn record(lamella: &Lamella, case: Case) -> anyhow::Result<()> {
    lamella.clear_cache()?;
    let node = lamella.up()?;
    lamella.run(&[&["profile", "record", ENVIRONMENT, "--"], case.argv].concat())?;
    drop(node);
    Ok(())
}

/// Removes what was recorded.
fn forget(lamella: &Lamella) -> anyhow::Result<()> {
    let node = lamella.up()?;
    lamella.run(&["profile", "rm", ENVIRONMENT])?;
    drop(node);
    Ok(())
}

/// One pull serves all commands; each is charged with all of it.
fn eager_round(
    pieces: &[Piece],
    scratch: &Scratch,
    bars: &[Bars],
    series: &mut [Series],
) -> anyhow::Result<()> {
    measure::drop_caches()?;
    let into = scratch.path().join("eager");
    let pulled = eager::pull(pieces, THROTTLE, &into)?;
    for (Bars { case, .. }, series) in bars.iter().zip(series) {
        let environment = cases::environment();
        let (run, _) = eager::run(&pulled.trees, scratch.path(), &environment, case.argv)?;
        series.eager_time.push((pulled.time + run).as_secs_f64());
        series.eager_written.push(pulled.written_bytes as f64);
    }
    corpus::remove_tree(&into)
}

fn measure_touched(
    pieces: &[Piece],
    scratch: &Scratch,
    bars: &[Bars],
    series: &mut [Series],
) -> anyhow::Result<()> {
    say("measuring what the commands touch");
    let into = scratch.path().join("eager");
    let pulled = eager::pull(pieces, "", &into)?;
    let off = WithoutReadahead::below(&into)?;
    for (Bars { case, .. }, series) in bars.iter().zip(series) {
        measure::drop_caches()?;
        eager::run(&pulled.trees, scratch.path(), &cases::environment(), case.argv)?;
        let bytes = touched::resident_bytes(&into)?;
        series.touched = bytes as f64;
    }
    drop(off);
    corpus::remove_tree(&into)
}

fn judge(report: &mut Report, bars: &Bars, series: &Series) {
    let Series { lazy, profiled, .. } = series;
    let case = bars.case.name;
    let touched = Spread::from_iter([series.touched]);
    report.figure(case, "eager", "time", Unit::Seconds, &series.eager_time);
    report.figure(case, "eager", "written", Unit::Bytes, &series.eager_written);
    report.figure(case, "touched", "plain bytes", Unit::Bytes, &touched);
    lazy.show(report, case, "on demand");
    profiled.show(report, case, "with a profile");
    let mut at_least = |what: &str, value: f64, limit: f64| {
        report.at_least(&format!("`{case}` {what}"), value, limit, Unit::Times);
    };
    let faster = series.eager_time.median() / lazy.time.median();
    at_least("on demand is faster than eager by", faster, bars.faster);
    let gained = lazy.time.median() / profiled.time.median();
    at_least("with a profile is faster than without by", gained, 1.5);
    let mut at_most = |what: &str, value: f64, limit: f64| {
        report.at_most(&format!("`{case}` {what}"), value, limit, Unit::Times);
    };
    let fetched = lazy.plain.median();
    if let Some(limit) = bars.touched {
        at_most("fetches, of the bytes that it touches,", fetched / series.touched, limit);
    }
    at_most("fetches, of the bytes asked for,", fetched / lazy.asked.median(), 2.5);
    let ahead = profiled.plain.median() / profiled.asked.median();
    at_most("with a profile fetches, of the bytes asked for,", ahead, 1.6);
    at_most("fetches, of what nydus fetches,", fetched / bars.nydus, 0.7);
    let written = lazy.written.median() / series.eager_written.median();
    at_most("writes, of what eager writes,", written, 0.15);
}
