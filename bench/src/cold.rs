//! The first command on a node that has nothing: on demand against fetch-and-unpack, from a throttled
//! store; and how much is fetched beside what the command touches.

use crate::cases::{self, Case, PYTHON, THROTTLE, TRUE};
use crate::corpus::{self, Kind, Piece};
use crate::eager;
use crate::measure::{self, Spread};
use crate::node::Lamella;
use crate::options::Options;
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use crate::touched::{self, WithoutReadahead};

/// A command, its bar against eager, and what nydus 2.3 (zstd) put into its cache for it, in bytes: it is
/// in no registry, so its figures are constants of November 2026.
const CASES: [(Case, f64, f64); 2] = [(TRUE, 20.0, 10e6), (PYTHON, 3.0, 180e6)];

#[derive(Default)]
struct Series {
    lazy_time: Spread,
    eager_time: Spread,
    plain: Spread,
    stored: Spread,
    metadata: Spread,
    reads: Spread,
    events: Spread,
    asked: Spread,
    lazy_written: Spread,
    eager_written: Spread,
    touched: f64,
}

/// `bench cold`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let pieces = corpus::ready(options, &[Kind::Base, Kind::Toolkit, Kind::Workspace])?;
    let scratch = Scratch::create(&options.scratch)?;
    let lamella = Lamella::at(&scratch.data())?;
    say("building the layers");
    cases::publish(&lamella, &pieces, |_, _| {})?;
    let url = format!("file://{}{THROTTLE}", shell::text(&lamella.data.join("store"))?);
    let slow = lamella.with_store(&url);
    let mut series: Vec<Series> = CASES.iter().map(|_| Series::default()).collect();
    measure_touched(&pieces, &scratch, &mut series)?;
    for round in 1..=options.rounds {
        say(format!("round {round} of {}", options.rounds));
        for ((case, _, _), series) in CASES.iter().zip(&mut series) {
            let cold = cases::run_cold(&slow, *case)?;
            series.lazy_time.push(cold.time.as_secs_f64());
            series.plain.push(cold.loaded.plain_bytes as f64);
            series.stored.push(cold.loaded.store_bytes as f64);
            series.metadata.push(cold.loaded.metadata_bytes as f64);
            series.reads.push(cold.loaded.store_reads as f64);
            series.events.push(cold.loaded.events as f64);
            series.asked.push(cold.asked_bytes as f64);
            series.lazy_written.push(cold.written_bytes as f64);
        }
        eager_round(&pieces, &scratch, &mut series)?;
    }
    let mut report = Report::new("cold", options, &pieces)?;
    for ((case, faster, nydus), series) in CASES.iter().zip(&series) {
        judge(&mut report, case.name, series, *faster, *nydus);
    }
    report.note("store throttled to 100 MB/s and 2 ms a request; daemons up, node cache empty");
    report.note("eager overlaps fetching (4 MiB requests) with unpacking and keeps the page cache");
    report.note("touched: mincore of the unpacked trees after the command, readahead off");
    report.note("written: /proc/diskstats up to and including the write-back");
    report.finish(options)
}

/// One pull serves all commands; each is charged with all of it.
fn eager_round(pieces: &[Piece], scratch: &Scratch, series: &mut [Series]) -> anyhow::Result<()> {
    measure::drop_caches()?;
    let into = scratch.path().join("eager");
    let pulled = eager::pull(pieces, THROTTLE, &into)?;
    for ((case, _, _), series) in CASES.iter().zip(series) {
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
    series: &mut [Series],
) -> anyhow::Result<()> {
    say("measuring what the commands touch");
    let into = scratch.path().join("eager");
    let pulled = eager::pull(pieces, "", &into)?;
    let off = WithoutReadahead::below(&into)?;
    for ((case, _, _), series) in CASES.iter().zip(series) {
        measure::drop_caches()?;
        eager::run(&pulled.trees, scratch.path(), &cases::environment(), case.argv)?;
        let bytes = touched::resident_bytes(&into)?;
        series.touched = bytes as f64;
    }
    drop(off);
    corpus::remove_tree(&into)
}

fn judge(report: &mut Report, case: &str, series: &Series, faster: f64, nydus: f64) {
    let touched = Spread::from_iter([series.touched]);
    report.figure(case, "on demand", "time", Unit::Seconds, &series.lazy_time);
    report.figure(case, "eager", "time", Unit::Seconds, &series.eager_time);
    report.figure(case, "touched", "plain bytes", Unit::Bytes, &touched);
    report.figure(case, "asked", "plain bytes", Unit::Bytes, &series.asked);
    report.figure(case, "on demand", "plain bytes", Unit::Bytes, &series.plain);
    report.figure(case, "on demand", "fetched data", Unit::Bytes, &series.stored);
    report.figure(case, "on demand", "fetched metadata", Unit::Bytes, &series.metadata);
    report.figure(case, "on demand", "store requests", Unit::Count, &series.reads);
    report.figure(case, "on demand", "events", Unit::Count, &series.events);
    report.figure(case, "on demand", "written", Unit::Bytes, &series.lazy_written);
    report.figure(case, "eager", "written", Unit::Bytes, &series.eager_written);
    let ratio = series.eager_time.median() / series.lazy_time.median();
    let promise = format!("`{case}` on demand is faster than eager by");
    report.at_least(&promise, ratio, faster, Unit::Times);
    let promise = format!("`{case}` fetches, of the bytes that it touches,");
    report.at_most(&promise, series.plain.median() / series.touched, 2.5, Unit::Times);
    let promise = format!("`{case}` fetches, of what nydus fetches,");
    report.at_most(&promise, series.plain.median() / nydus, 0.8, Unit::Times);
}
