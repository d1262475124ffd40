//! Cold pages: single random reads and one sequential read of a large file that the node does not have, the
//! store in memory, so that what is measured is the fill path.

use crate::cases;
use crate::corpus::{self, Kind, Piece};
use crate::eager;
use crate::measure::{self, Spread};
use crate::node::{Lamella, Node};
use crate::options::Options;
use crate::pages::{PAGE_BYTES, Pages};
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
/// nydus 2.3 (zstd), 200 such reads, measured in November 2026: it is in no registry.
const NYDUS_READS_PER_SECOND: f64 = 190.0;

/// `bench page`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let pieces = corpus::ready(options, &[Kind::Toolkit])?;
    let piece = pieces.first().context("the toolkit is a piece")?;
    let scratch = Scratch::create(&options.scratch)?;
    let place = Place::create(&scratch, piece)?;
    say("unpacking the tree");
    let trees = eager::pull(&pieces, "", &scratch.path().join("trees"))?.trees;
    let unpacked = trees.first().context("one tree was unpacked")?.join(LARGE);
    let mut found = Found::default();
    for round in 1..=options.rounds {
        say(format!("round {round} of {}", options.rounds));
        place.cold(|node, root| found.random(node, &root.join(LARGE)))?;
        place.cold(|_, root| sequential(&root.join(LARGE)).map(|rate| found.ours.push(rate)))?;
        measure::drop_caches()?;
        found.unpacked.push(sequential(&unpacked)?);
    }
    found.report(options, &pieces)?.finish(options)
}

/// A layer in a store on tmpfs, and a place to mount it at.
struct Place {
    lamella: Lamella,
    memory: PathBuf,
    at: PathBuf,
    reference: String,
}

impl Place {
    fn create(scratch: &Scratch, piece: &Piece) -> anyhow::Result<Self> {
        let memory = scratch.path().join("memory");
        fs::create_dir(&memory)?;
        let tmpfs = Tmpfs { name: "bench", mode: 0o755, size_bytes: None, inodes: None };
        tmpfs.mount_detached(Attributes::default())?.attach(&memory)?;
        let url = format!("file://{}", shell::text(&memory.join("store"))?);
        let lamella = Lamella::at(&scratch.data())?.with_store(&url);
        let at = scratch.path().join("mounted");
        fs::create_dir(&at)?;
        let reference = cases::reference(piece);
        let place = Self { lamella, memory, at, reference };
        say("building the layer into a store in memory");
        place.lamella.run(&["build", shell::text(&piece.tar())?, "-t", &place.reference])?;
        Ok(place)
    }

    /// Runs `work` on a mount of which nothing is loaded.
    fn cold(&self, work: impl FnOnce(&Node, &Path) -> anyhow::Result<()>) -> anyhow::Result<()> {
        self.lamella.clear_cache()?;
        let node = self.lamella.up()?;
        anyhow::ensure!(self.lamella.cache_is_empty()?, "the node cache is not empty");
        let at = shell::text(&self.at)?;
        self.lamella.run(&["mount", &self.reference, at])?;
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

#[derive(Default)]
struct Found {
    /// Rates of the sequential read.
    ours: Spread,
    unpacked: Spread,
    /// Of each round: reads a second, the middle and the 99th percentile of one read, fetched over asked.
    rate: Spread,
    middle: Spread,
    slow: Spread,
    fetched: Spread,
}

impl Found {
    fn random(&mut self, node: &Node, path: &Path) -> anyhow::Result<()> {
        let file = File::open(path)?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random)?;
        let before = node.loaded()?;
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
        let fetched = node.loaded()?.plain_bytes - before.plain_bytes;
        self.fetched.push(fetched as f64 / (READS * PAGE_BYTES) as f64);
        Ok(())
    }

    fn report(&self, options: &Options, pieces: &[Piece]) -> anyhow::Result<Report> {
        let mut report = Report::new("page", options, pieces)?;
        let case = "random 4 KiB";
        report.figure(case, "on demand", "rate", Unit::PerSecond, &self.rate);
        report.figure(case, "on demand", "p50", Unit::Seconds, &self.middle);
        report.figure(case, "on demand", "p99", Unit::Seconds, &self.slow);
        report.figure(case, "on demand", "fetched, of asked", Unit::Times, &self.fetched);
        report.figure("sequential", "on demand", "rate", Unit::BytesPerSecond, &self.ours);
        report.figure("sequential", "ext4", "rate", Unit::BytesPerSecond, &self.unpacked);
        let fetched = self.fetched.median();
        report.at_most("random 4 KiB reads fetch, of what they ask,", fetched, 32.0, Unit::Times);
        let rate = self.rate.median() / NYDUS_READS_PER_SECOND;
        report.at_least("random 4 KiB reads a second, of nydus's,", rate, 2.5, Unit::Times);
        let tail = self.slow.median() / self.middle.median();
        report.at_most("p99 of a random 4 KiB read, of its p50,", tail, 5.0, Unit::Times);
        let sequential = self.ours.median() / self.unpacked.median();
        report.at_least("cold sequential, of cold ext4's rate,", sequential, 0.6, Unit::Times);
        report.note("store on tmpfs; the file does not compress; every chunk is verified");
        report.note("nydus's rate is a constant of November 2026, from a store on a local disk");
        Ok(report)
    }
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
