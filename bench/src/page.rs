//! Cold pages: single random reads and one sequential read of a large file that the node does not have, the
//! store in memory, so that what is measured is the fill path; of a file that compresses and of one that does not.
//!
//! Beside it, in the same run, what it is made of: the kernel's round trip as a minimal program pays it, and the
//! decoding and verifying of one chunk.

use crate::corpus::{self, Kind, Piece};
use crate::decoding::{self, Decoding};
use crate::measure::{self, Spread};
use crate::node::{Lamella, Node};
use crate::options::Options;
use crate::pages::{PAGE_BYTES, Pages};
use crate::probe::{Probe, Served};
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use anyhow::Context;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use sys::mount::{Attributes, Tmpfs, Unmount};

const READS: usize = 500;
/// The large file of the toolkit; it does not compress.
const LARGE: &str = "opt/toolkit/large.bin";
/// How much of the base's tar is the file that compresses: as much as the other one has.
const TEXT_BYTES: u64 = 384 << 20;
/// nydus 2.3 (zstd), 200 such reads, measured in November 2026: it is in no registry.
const NYDUS_READS_PER_SECOND: f64 = 190.0;
const REFERENCE: &str = "toolkit/large:bench";
/// The files, by their names in the tree and in the report.
const RANDOM_BYTES: &str = "incompressible";
const KINDS: [&str; 2] = [RANDOM_BYTES, "compressible"];

/// `bench page`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let pieces = corpus::ready(options, &[Kind::Base, Kind::Toolkit])?;
    let scratch = Scratch::create(&options.scratch)?;
    say("making the two files");
    let tree = tree(&pieces, &scratch)?;
    let place = Place::create(&scratch, &tree)?;
    let served = probed(&tree, &scratch, &place)?;
    let mut found: [Found; 2] = Default::default();
    let mut probe = Reads::default();
    for round in 1..=options.rounds {
        say(format!("round {round} of {}", options.rounds));
        for (kind, found) in KINDS.iter().zip(&mut found) {
            place.cold(|node, root| found.random(node, &root.join(kind)))?;
            place.cold(|_, root| sequential(&root.join(kind)).map(|rate| found.ours.push(rate)))?;
            found.decoding(decoding::measure(&tree.join(kind))?);
            measure::drop_caches()?;
            found.unpacked.push(sequential(&tree.join(kind))?);
        }
        measure::drop_caches()?;
        let bare = Probe::start(&served, &scratch.path().join("probe"))?;
        probe.take(&bare.path().join(RANDOM_BYTES))?;
    }
    report(options, &pieces, &found, &probe)?.finish(options)
}

/// A folder with the two files.
fn tree(pieces: &[Piece], scratch: &Scratch) -> anyhow::Result<PathBuf> {
    let [base, toolkit] = pieces else { anyhow::bail!("base and toolkit are the pieces") };
    let tree = scratch.path().join("tree");
    fs::create_dir(&tree)?;
    let (tar, from) = (toolkit.tar(), scratch.path());
    let words = ["tar", "--extract", "--file", shell::text(&tar)?, "--directory"];
    shell::run(&[&words[..], &[shell::text(from)?, "--no-anchored", LARGE]].concat())
        .context("find the large file in the toolkit's tar")?;
    fs::rename(from.join(LARGE), tree.join(KINDS[0]))?;
    let mut text = File::open(base.tar())?.take(TEXT_BYTES);
    let copied = std::io::copy(&mut text, &mut File::create(tree.join(KINDS[1]))?)?;
    anyhow::ensure!(copied == TEXT_BYTES, "the base's tar is too small");
    Ok(tree)
}

/// The probe's image: the file whose pages are all different.
fn probed(tree: &Path, scratch: &Scratch, place: &Place) -> anyhow::Result<Served> {
    let alone = scratch.path().join("alone");
    fs::create_dir(&alone)?;
    fs::hard_link(tree.join(RANDOM_BYTES), alone.join(RANDOM_BYTES))?;
    Served::make(&alone, scratch.path(), &place.memory)
}

/// A layer in a store on tmpfs, and a place to mount it at.
struct Place {
    lamella: Lamella,
    memory: PathBuf,
    at: PathBuf,
}

impl Place {
    fn create(scratch: &Scratch, tree: &Path) -> anyhow::Result<Self> {
        let memory = scratch.path().join("memory");
        fs::create_dir(&memory)?;
        let tmpfs = Tmpfs { name: "bench", mode: 0o755, size_bytes: None, inodes: None };
        tmpfs.mount_detached(Attributes::default())?.attach(&memory)?;
        let url = format!("file://{}", shell::text(&memory.join("store"))?);
        let lamella = Lamella::at(&scratch.data())?.with_store(&url);
        let at = scratch.path().join("mounted");
        fs::create_dir(&at)?;
        let place = Self { lamella, memory, at };
        say("building the layer into a store in memory");
        place.lamella.run(&["build", shell::text(tree)?, "-t", REFERENCE])?;
        Ok(place)
    }

    /// Runs `work` on a mount of which nothing is loaded.
    fn cold(&self, work: impl FnOnce(&Node, &Path) -> anyhow::Result<()>) -> anyhow::Result<()> {
        self.lamella.clear_cache()?;
        let node = self.lamella.up()?;
        anyhow::ensure!(self.lamella.cache_is_empty()?, "the node cache is not empty");
        let at = shell::text(&self.at)?;
        self.lamella.run(&["mount", REFERENCE, at])?;
        measure::drop_caches()?;
        let worked = work(&node, &self.at);
        self.lamella.run(&["umount", at])?;
        worked
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Err(error) = sys::mount::unmount(&self.memory, Unmount::Lazy) {
            say(format!("{} stays mounted: {error}", self.memory.display()));
        }
    }
}

/// Of each round of random reads: how many a second, and the middle and the 99th percentile of one.
#[derive(Default)]
struct Reads {
    rate: Spread,
    middle: Spread,
    slow: Spread,
}

impl Reads {
    /// Reads pages all over a file.
    fn take(&mut self, path: &Path) -> anyhow::Result<()> {
        let file = File::open(path)?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random)?;
        let mut buffer = [0_u8; PAGE_BYTES];
        let mut times = Vec::with_capacity(READS);
        let start = Instant::now();
        for offset in Pages::of(&file)?.take(READS) {
            let begin = Instant::now();
            file.read_exact_at(&mut buffer, offset)?;
            times.push(begin.elapsed());
        }
        self.rate.push(READS as f64 / start.elapsed().as_secs_f64());
        times.sort_unstable();
        let at =
            |share: usize| times.get(times.len() * share / 100).copied().unwrap_or(Duration::ZERO);
        self.middle.push(at(50).as_secs_f64());
        self.slow.push(at(99).as_secs_f64());
        Ok(())
    }

    fn show(&self, report: &mut Report, case: &str, side: &str) {
        report.figure(case, side, "rate", Unit::PerSecond, &self.rate);
        report.figure(case, side, "p50", Unit::Seconds, &self.middle);
        report.figure(case, side, "p99", Unit::Seconds, &self.slow);
    }
}

/// What was found of one file.
#[derive(Default)]
struct Found {
    /// Rates of the sequential read.
    ours: Spread,
    unpacked: Spread,
    reads: Reads,
    /// Fetched over asked.
    fetched: Spread,
    /// Seconds to decode and verify a chunk, and bytes a second of two cores doing that.
    chunk: Spread,
    cores: Spread,
}

impl Found {
    fn random(&mut self, node: &Node, path: &Path) -> anyhow::Result<()> {
        let before = node.loaded()?;
        self.reads.take(path)?;
        let fetched = node.loaded()?.plain_bytes - before.plain_bytes;
        self.fetched.push(fetched as f64 / (READS * PAGE_BYTES) as f64);
        Ok(())
    }

    fn decoding(&mut self, measured: Decoding) {
        self.chunk.push(measured.chunk.as_secs_f64());
        self.cores.push(measured.rate);
    }

    fn show(&self, report: &mut Report, kind: &str) {
        let case = format!("random 4 KiB, {kind}");
        self.reads.show(report, &case, "on demand");
        report.figure(&case, "on demand", "fetched, of asked", Unit::Times, &self.fetched);
        report.figure(&case, "decode + verify", "one chunk", Unit::Seconds, &self.chunk);
        let case = format!("sequential, {kind}");
        report.figure(&case, "on demand", "rate", Unit::BytesPerSecond, &self.ours);
        report.figure(&case, "ext4", "rate", Unit::BytesPerSecond, &self.unpacked);
        report.figure(&case, "decode + verify, 2 cores", "rate", Unit::BytesPerSecond, &self.cores);
    }

    fn judge(&self, report: &mut Report, kind: &str, probe: f64) {
        let fetched = self.fetched.median();
        let promise = format!("random 4 KiB reads fetch, of what they ask, {kind},");
        report.at_most(&promise, fetched, 32.0, Unit::Times);
        let rate = self.reads.rate.median() / NYDUS_READS_PER_SECOND;
        let promise = format!("random 4 KiB reads a second, of nydus's, {kind},");
        report.at_least(&promise, rate, 2.5, Unit::Times);
        let limit = probe + 1.3 * self.chunk.median();
        let promise = format!("p50 of a cold page, {kind}, bar: probe + 1.3 chunks,");
        report.at_most(&promise, self.reads.middle.median(), limit, Unit::Seconds);
        let promise = format!("p99 of a cold page, {kind}, bar: 5 times that,");
        report.at_most(&promise, self.reads.slow.median(), 5.0 * limit, Unit::Seconds);
        let limit = (0.6 * self.unpacked.median()).min(0.8 * self.cores.median());
        let promise =
            format!("cold sequential, {kind}, bar: 0.6 of ext4 or 0.8 of two cores' decoding,");
        report.at_least(&promise, self.ours.median(), limit, Unit::BytesPerSecond);
    }
}

fn report(
    options: &Options,
    pieces: &[Piece],
    found: &[Found; 2],
    probe: &Reads,
) -> anyhow::Result<Report> {
    let mut report = Report::new("page", options, pieces)?;
    for (kind, found) in KINDS.iter().zip(found) {
        found.show(&mut report, kind);
        probe.show(&mut report, &format!("random 4 KiB, {kind}"), "bare program");
    }
    for (kind, found) in KINDS.iter().zip(found) {
        found.judge(&mut report, kind, probe.middle.median());
    }
    report.note("store on tmpfs; chunks of 32 KiB; every chunk is verified");
    report.note(
        "bare program: answers each event with a copy of the 4 KiB asked for, incompressible",
    );
    report.note("nydus's rate is a constant of November 2026, from a store on a local disk");
    Ok(report)
}

/// Reads a file from its start to its end; answers bytes a second.
fn sequential(path: &Path) -> anyhow::Result<f64> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0_u8; 1 << 20];
    let (mut total, start) = (0, Instant::now());
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(total as f64 / start.elapsed().as_secs_f64()),
            count => total += count,
        }
    }
}
