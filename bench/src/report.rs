//! What a bench found: a table for people, JSON for machines, bars with PASS or FAIL.
//!
//! Every figure carries its spread, and every report says on which machine, when and with which input
//! it was made.

use crate::corpus::{Piece, Record};
use crate::measure::Spread;
use crate::options::Options;
use crate::plot;
use crate::shell::{self, say};
use anyhow::{Context, bail};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use std::fs;

/// A unit, which decides how a figure is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
    /// Events per second.
    PerSecond,
    /// Bytes per second.
    BytesPerSecond,
    /// How many times.
    Times,
    /// A share between 0 and 1.
    Share,
    /// A number of things.
    Count,
}

impl Unit {
    /// What a reader of a plot wants to know of it.
    pub fn direction(self) -> &'static str {
        match self {
            Self::PerSecond | Self::BytesPerSecond => "more is better",
            Self::Seconds | Self::Bytes | Self::Times | Self::Share | Self::Count => {
                "less is better"
            }
        }
    }

    /// A figure in this unit, short.
    pub fn show(self, value: f64) -> String {
        match self {
            Self::Seconds if value < 0.001 => format!("{:.1} us", value * 1e6),
            Self::Seconds if value < 1.0 => format!("{:.1} ms", value * 1e3),
            Self::Seconds => format!("{value:.2} s"),
            Self::Bytes => bytes(value),
            Self::PerSecond if value >= 10_000.0 => format!("{:.1} k/s", value / 1e3),
            Self::PerSecond => format!("{value:.1} /s"),
            Self::BytesPerSecond => format!("{}/s", bytes(value)),
            Self::Times => format!("{value:.2}x"),
            Self::Share => format!("{:.1} %", value * 100.0),
            Self::Count => format!("{value:.0}"),
        }
    }
}

fn bytes(value: f64) -> String {
    match value {
        value if value >= 1e9 => format!("{:.2} GB", value / 1e9),
        value if value >= 1e6 => format!("{:.1} MB", value / 1e6),
        value if value >= 1e3 => format!("{:.1} kB", value / 1e3),
        value => format!("{value:.0} B"),
    }
}

/// One measured quantity of one side.
#[derive(Debug, Clone, Serialize)]
pub struct Figure {
    /// What was done, for instance `python`.
    pub case: String,
    /// Who did it, for instance `lamella` or `crun`.
    pub side: String,
    /// What was measured, for instance `time`.
    pub quantity: String,
    /// In what it is counted.
    pub unit: Unit,
    /// The middle.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// Everything, in order.
    pub samples: Vec<f64>,
}

/// A promise and what became of it.
#[derive(Debug, Clone, Serialize)]
pub struct Bar {
    /// What is promised, in words.
    pub promise: String,
    /// What was measured.
    pub value: f64,
    /// Where the bar is.
    pub limit: f64,
    /// Whether more is better.
    pub at_least: bool,
    /// In what both are counted.
    pub unit: Unit,
    /// Whether it holds.
    pub holds: bool,
}

#[derive(Debug, Clone, Serialize)]
struct Machine {
    processor: String,
    cores: usize,
    memory_bytes: u64,
    kernel: String,
    system: String,
    scratch: String,
    /// Load average of the last minute, before the report was made: more than the cores is a busy machine.
    load: f64,
}

/// Everything that one bench found.
#[derive(Debug, Serialize)]
pub struct Report {
    bench: String,
    date: String,
    machine: Machine,
    program: String,
    build: &'static str,
    rounds: u32,
    corpus: Vec<Record>,
    figures: Vec<Figure>,
    bars: Vec<Bar>,
    notes: Vec<String>,
}

impl Report {
    /// An empty report of a bench.
    pub fn new(bench: &str, options: &Options, corpus: &[Piece]) -> anyhow::Result<Self> {
        let build = if cfg!(debug_assertions) { "debug" } else { "release" };
        let mut report = Self {
            bench: bench.to_owned(),
            date: shell::run(&["date", "--utc", "+%Y-%m-%dT%H:%M:%SZ"])?.trim().to_owned(),
            machine: machine(options)?,
            program: format!("lamella {}", env!("CARGO_PKG_VERSION")),
            build,
            rounds: options.rounds,
            corpus: corpus.iter().map(|piece| piece.record.clone()).collect(),
            figures: Vec::new(),
            bars: Vec::new(),
            notes: Vec::new(),
        };
        if build == "debug" {
            report.note("DEBUG BUILD: these figures say nothing about speed");
        }
        Ok(report)
    }

    /// Keeps a measured quantity.
    pub fn figure(&mut self, case: &str, side: &str, quantity: &str, unit: Unit, spread: &Spread) {
        self.figures.push(Figure {
            case: case.to_owned(),
            side: side.to_owned(),
            quantity: quantity.to_owned(),
            unit,
            median: spread.median(),
            min: spread.min(),
            max: spread.max(),
            samples: spread.samples().to_vec(),
        });
    }

    /// Keeps a promise that holds from `limit` upwards.
    pub fn at_least(&mut self, promise: &str, value: f64, limit: f64, unit: Unit) {
        self.bar(promise, value, true, limit, unit);
    }

    /// Keeps a promise that holds up to `limit`.
    pub fn at_most(&mut self, promise: &str, value: f64, limit: f64, unit: Unit) {
        self.bar(promise, value, false, limit, unit);
    }

    fn bar(&mut self, promise: &str, value: f64, at_least: bool, limit: f64, unit: Unit) {
        // What could not be measured (a division by zero) holds nothing.
        let holds = value.is_finite() && if at_least { value >= limit } else { value <= limit };
        self.bars.push(Bar { promise: promise.to_owned(), value, limit, at_least, unit, holds });
    }

    /// Keeps a word on how something was measured.
    pub fn note(&mut self, text: &str) {
        self.notes.push(text.to_owned());
    }

    /// Prints everything, writes what the options ask for, and judges.
    ///
    /// # Errors
    /// With `--check`, a bar that does not hold; files that cannot be written.
    pub fn finish(&self, options: &Options) -> anyhow::Result<()> {
        say(self.text());
        self.write(options)?;
        let missed = self.bars.iter().filter(|bar| !bar.holds).count();
        if options.check && missed > 0 {
            bail!("{missed} of {} bars of {} do not hold", self.bars.len(), self.bench);
        }
        Ok(())
    }

    /// Writes the files that the options ask for.
    pub fn write(&self, options: &Options) -> anyhow::Result<()> {
        if let Some(path) = &options.json {
            fs::write(path, serde_json::to_vec_pretty(self)?)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        if let Some(path) = &options.plot {
            fs::write(path, plot::draw(&self.bench, &self.caption(), &self.figures))
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    fn caption(&self) -> String {
        let Machine { processor, cores, kernel, load, .. } = &self.machine;
        let (date, build) = (&self.date, self.build);
        format!("{date}, {cores} cores of {processor}, Linux {kernel}, load {load}, {build} build")
    }

    fn text(&self) -> String {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        table.set_header(["case", "side", "quantity", "median", "min", "max"]);
        for figure in &self.figures {
            let Figure { case, side, quantity, unit, median, min, max, .. } = figure;
            let shown = [*median, *min, *max].map(|value| unit.show(value));
            let [median, min, max] = shown;
            table.add_row([case.clone(), side.clone(), quantity.clone(), median, min, max]);
        }
        for column in table.column_iter_mut().skip(3) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let mut text = format!("\n{}: {}\n{table}", self.bench, self.caption());
        for note in &self.notes {
            text.push_str(&format!("\nnote: {note}"));
        }
        for bar in &self.bars {
            let verdict = if bar.holds { "PASS" } else { "FAIL" };
            let side = if bar.at_least { "at least" } else { "at most" };
            let (value, limit) = (bar.unit.show(bar.value), bar.unit.show(bar.limit));
            text.push_str(&format!("\n{verdict}  {}: {value}, bar {side} {limit}", bar.promise));
        }
        text
    }
}

fn machine(options: &Options) -> anyhow::Result<Machine> {
    let field = |file: &str, key: &str| -> anyhow::Result<String> {
        let text = fs::read_to_string(file)?;
        let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default();
        let value = line.trim_start_matches(key).trim_matches([' ', '\t', ':', '=', '"']);
        Ok(value.to_owned())
    };
    let memory = field("/proc/meminfo", "MemTotal")?;
    let memory: u64 = memory.split(' ').next().unwrap_or_default().parse().unwrap_or(0);
    let scratch = shell::text(&options.scratch)?;
    let load = fs::read_to_string("/proc/loadavg")?;
    Ok(Machine {
        load: load.split(' ').next().unwrap_or_default().parse().unwrap_or(0.0),
        processor: field("/proc/cpuinfo", "model name")?,
        cores: std::thread::available_parallelism()?.get(),
        memory_bytes: memory * 1024,
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned(),
        system: field("/etc/os-release", "PRETTY_NAME")?,
        scratch: shell::run(&["stat", "--file-system", "--format", "%T", scratch])?
            .trim()
            .to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        assert_eq!(Unit::Seconds.show(0.0123), "12.3 ms");
        assert_eq!(Unit::Seconds.show(12.3), "12.30 s");
        assert_eq!(Unit::Bytes.show(473e6), "473.0 MB");
        assert_eq!(Unit::PerSecond.show(939_098.6), "939.1 k/s");
        assert_eq!(Unit::Share.show(0.125), "12.5 %");
    }
}
