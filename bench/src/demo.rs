//! The whole path on real input, as a person would walk it: build, publish, compose, start from metadata
//! alone, compute, pack the difference, start again from it; with the bytes and the time beside what
//! fetching and unpacking the same layers costs.
//!
//! It fails when the node cache is not empty at a start, or when half of the image or more was fetched.

use crate::cases::{self, Case, Cold, ENVIRONMENT, PYTHON, THROTTLE, TRUE};
use crate::corpus::{self, Kind, Piece};
use crate::eager::{self, Pulled};
use crate::measure::{self, Spread};
use crate::node::Lamella;
use crate::options::Options;
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use anyhow::{Context, bail};
use comfy_table::{CellAlignment, Table, presets};
use std::time::Duration;

const COMPUTE: &str = "import numpy; n = numpy.arange(1, 8); \
                       numpy.savetxt('/root/squares.txt', n * n, fmt='%d')";
const COMPUTED: &str = "1\n4\n9\n16\n25\n36\n49\n";
const DIFF: &str = "squares:1";
/// The most of an image that may be fetched for one command.
const MAX_SHARE: f64 = 0.5;

/// One line of the table.
struct Line {
    store: &'static str,
    case: &'static str,
    how: &'static str,
    time: Duration,
    fetched_bytes: u64,
    written_bytes: u64,
    share: f64,
}

/// `bench demo`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let pieces = corpus::ready(options, &[Kind::Base, Kind::SmallToolkit, Kind::Workspace])?;
    let scratch = Scratch::create(&options.scratch)?;
    let lamella = Lamella::at(&scratch.data())?;
    say("\nBuild three layers and compose an environment:");
    cases::publish(&lamella, &pieces, |words, time| {
        say(format!("  $ lamella {words}   # {}", seconds(time)));
    })?;
    let mut lines = Vec::new();
    for (store, speed) in [("local", ""), ("100 MB/s, 2 ms", THROTTLE)] {
        say(format!("\nRun on an empty node, {store} store:"));
        let url = format!("file://{}{speed}", shell::text(&lamella.data.join("store"))?);
        let slow = lamella.with_store(&url);
        for case in [TRUE, PYTHON] {
            let cold = cases::run_cold(&slow, case)?;
            say(format!(
                "  $ lamella run --rm {ENVIRONMENT} -- {}   # {}",
                shell::quoted(case.argv),
                seconds(cold.time)
            ));
            lines.push(lazy_line(store, case, cold)?);
        }
        lines.extend(eager_lines(store, speed, &pieces, &scratch)?);
    }
    difference(&lamella)?;
    say(table(&lines).to_string());
    say(
        "fetched: bytes read from the store, compressed data and whole metadata images. written: what the disk's own counter \
         (/proc/diskstats) shows up to and including the write-back. share: of the image's plain bytes.",
    );
    write_report(options, &pieces, &lines)
}

fn lazy_line(store: &'static str, case: Case, cold: Cold) -> anyhow::Result<Line> {
    let fetched_bytes = cold.loaded.store_bytes + cold.loaded.metadata_bytes;
    let share = cold.loaded.plain_bytes as f64 / cold.size.plain_bytes as f64;
    let stored = fetched_bytes as f64 / cold.size.stored_bytes as f64;
    let largest = share.max(stored);
    if largest.is_nan() || largest >= MAX_SHARE {
        bail!(
            "{} fetched {:.1} % of the image ({:.1} % of its compressed bytes); less than half is the point",
            case.name,
            share * 100.0,
            stored * 100.0
        );
    }
    Ok(Line {
        store,
        case: case.name,
        how: "on demand",
        time: cold.time,
        fetched_bytes,
        written_bytes: cold.written_bytes,
        share,
    })
}

/// One pull serves both commands, each of which is charged with all of it.
fn eager_lines(
    store: &'static str,
    speed: &str,
    pieces: &[Piece],
    scratch: &Scratch,
) -> anyhow::Result<Vec<Line>> {
    measure::drop_caches()?;
    let into = scratch.path().join("eager");
    let Pulled { trees, time, fetched_bytes, written_bytes } = eager::pull(pieces, speed, &into)?;
    say(format!("  fetch and unpack the same three layers instead   # {}", seconds(time)));
    let mut lines = Vec::new();
    for case in [TRUE, PYTHON] {
        let (run, _) = eager::run(&trees, scratch.path(), &cases::environment(), case.argv)?;
        lines.push(Line {
            store,
            case: case.name,
            how: "eager",
            time: time + run,
            fetched_bytes,
            written_bytes,
            share: 1.0,
        });
    }
    corpus::remove_tree(&into)?;
    Ok(lines)
}

/// Computes a file in a sandbox, packs what the sandbox wrote, and reads the file in a new sandbox on an
/// empty node.
fn difference(lamella: &Lamella) -> anyhow::Result<()> {
    say("\nCompute something, keep it as a layer, start again from it:");
    let step = |words: &[&str]| -> anyhow::Result<String> {
        let (time, output) = measure::timed(|| lamella.run(words))?;
        say(format!("  $ lamella {}   # {}", shell::quoted(words), seconds(time)));
        Ok(output)
    };
    let node = lamella.up()?;
    let created = step(&["create", ENVIRONMENT])?;
    let id = created.split_whitespace().last().context("create printed no id")?;
    step(&["exec", id, "--", "python3", "-c", COMPUTE])?;
    step(&["pack-diff", id, "-t", DIFF])?;
    step(&["rm", "--force", id])?;
    drop(node);
    lamella.clear_cache()?;
    let node = lamella.up()?;
    let environment = format!("env/{DIFF}");
    let read = step(&["run", "--rm", &environment, "--", "cat", "/root/squares.txt"])?;
    drop(node);
    if read != COMPUTED {
        bail!("the sandbox that started from the diff shows {read:?} instead of {COMPUTED:?}");
    }
    say(format!("  {}\n", read.trim().replace('\n', " ")));
    Ok(())
}

fn table(lines: &[Line]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header([
        "store",
        "command",
        "",
        "time",
        "fetched",
        "written",
        "share",
        "on demand is",
    ]);
    for line in lines {
        let eager = lines
            .iter()
            .find(|other| (other.store, other.case, other.how) == (line.store, line.case, "eager"));
        let verdict = match eager {
            Some(eager) if line.how != "eager" => format!(
                "{:.1}x faster, 1/{:.0} written",
                eager.time.as_secs_f64() / line.time.as_secs_f64(),
                eager.written_bytes as f64 / line.written_bytes.max(1) as f64
            ),
            _ => String::new(),
        };
        table.add_row([
            line.store.to_owned(),
            line.case.to_owned(),
            line.how.to_owned(),
            seconds(line.time),
            Unit::Bytes.show(line.fetched_bytes as f64),
            Unit::Bytes.show(line.written_bytes as f64),
            Unit::Share.show(line.share),
            verdict,
        ]);
    }
    for column in table.column_iter_mut().skip(3).take(4) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn seconds(time: Duration) -> String {
    Unit::Seconds.show(time.as_secs_f64())
}

fn write_report(options: &Options, pieces: &[Piece], lines: &[Line]) -> anyhow::Result<()> {
    let mut report = Report::new("demo", options, pieces)?;
    for line in lines {
        let case = format!("{}, {} store", line.case, line.store);
        for (quantity, unit, value) in [
            ("time", Unit::Seconds, line.time.as_secs_f64()),
            ("fetched", Unit::Bytes, line.fetched_bytes as f64),
            ("written", Unit::Bytes, line.written_bytes as f64),
            ("share", Unit::Share, line.share),
        ] {
            report.figure(&case, line.how, quantity, unit, &Spread::from_iter([value]));
        }
    }
    report.write(options)
}
