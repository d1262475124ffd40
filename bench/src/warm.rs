//! Reads of a layer that the node holds completely, against the unpacked tree on the node's own file system and
//! against what peers mount: mkfs.erofs's and mksquashfs's image of the same tree, and fuse-overlayfs over the
//! unpacked trees. The daemon must not notice any of it: no event, no processor time.

use crate::cases;
use crate::corpus::{self, Kind};
use crate::eager;
use crate::measure::{self, Spread};
use crate::node::Lamella;
use crate::options::Options;
use crate::pages::{PAGE_BYTES, Pages};
use crate::peers::{self, Mounted};
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use crate::walk;
use anyhow::Context;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::slice;
use std::time::Instant;

const RANDOM_READS: usize = 20_000;
const SMALL_BYTES: u64 = 64 << 10;
/// Many small files of the toolkit, and its one large file.
const SMALL: &str = "opt/toolkit/node";
const LARGE: &str = "opt/toolkit/large.bin";
/// Of the pieces, the one that is read.
const TOOLKIT: usize = 1;

/// One way to read a tree; answers how much it did, in its unit.
type Reading = fn(&Path) -> anyhow::Result<f64>;

/// What a way to read must reach, against the unpacked tree.
#[derive(Debug, Clone, Copy)]
enum Limit {
    /// The most time.
    Time(f64),
    /// The least rate.
    Rate(f64),
}

const CASES: [(&str, Reading, Unit, Limit); 4] = [
    ("metadata", every_entry, Unit::PerSecond, Limit::Time(1.0)),
    ("small files", small_files, Unit::PerSecond, Limit::Time(1.0)),
    ("sequential", sequential, Unit::BytesPerSecond, Limit::Rate(0.9)),
    ("random 4 KiB", random, Unit::PerSecond, Limit::Rate(0.95)),
];

/// A name and where its tree is; the first is ours, the second the unpacked tree.
type Side = (&'static str, PathBuf);

/// `bench warm`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let pieces = corpus::ready(options, &[Kind::Base, Kind::Toolkit, Kind::Workspace])?;
    let piece = pieces.get(TOOLKIT).context("the toolkit is a piece")?;
    let scratch = Scratch::create(&options.scratch)?;
    let lamella = Lamella::at(&scratch.data())?;
    let reference = cases::reference(piece);
    let tar = piece.tar();
    say("building the layer and unpacking the trees");
    lamella.run(&["build", shell::text(&tar)?, "-t", &reference])?;
    let trees = eager::pull(&pieces, "", &scratch.path().join("trees"))?.trees;
    let mut report = Report::new("warm", options, &pieces)?;
    let peers = peers(&trees, &scratch, &mut report)?;
    let ours = scratch.path().join("ours");
    fs::create_dir(&ours)?;
    let node = lamella.up()?;
    lamella.run(&["mount", &reference, shell::text(&ours)?])?;
    node.complete(&reference)?;
    let mut sides = vec![("lamella", ours.clone()), ("ext4", trees[TOOLKIT].clone())];
    sides.extend(peers.iter().map(|(name, mounted)| (*name, mounted.path().to_path_buf())));
    let daemon = node.daemon_pid()?;
    let before = node.loaded()?;
    let (busy, start) = (measure::processor_time(daemon)?, Instant::now());
    measure_all(options, &sides, &mut report)?;
    let busy = measure::processor_time(daemon)? - busy;
    let seconds = start.elapsed().as_secs_f64();
    let after = node.loaded()?;
    lamella.run(&["umount", shell::text(&ours)?])?;
    drop((node, peers));
    let events = (after.events - before.events) as f64;
    report.at_most("events of a complete layer", events, 0.0, Unit::Count);
    let promise = "processor time of the daemon, over all reads,";
    report.at_most(promise, busy.as_secs_f64(), 0.0, Unit::Seconds);
    report.note(&format!(
        "the daemon's time is utime + stime, in ticks of 10 ms, over the {seconds:.0} s of the reads"
    ));
    report.finish(options)
}

/// Every peer that runs here, mounted.
fn peers(
    trees: &[PathBuf],
    scratch: &Scratch,
    report: &mut Report,
) -> anyhow::Result<Vec<(&'static str, Mounted)>> {
    let toolkit = trees.get(TOOLKIT).context("the toolkit was unpacked")?;
    let mut found = Vec::new();
    for images in peers::images(slice::from_ref(toolkit), scratch.path(), report)? {
        let at = scratch.path().join(format!("at-{}", images.name()));
        found.extend(images.mount(&at)?.into_iter().map(|mounted| (images.name(), mounted)));
    }
    let name = "fuse-overlayfs";
    match peers::merge(trees, &scratch.path().join("at-merged")) {
        Ok(mounted) => found.push((name, mounted)),
        Err(error) => peers::left_out(report, name, &error),
    }
    Ok(found)
}

fn measure_all(options: &Options, sides: &[Side], report: &mut Report) -> anyhow::Result<()> {
    for (case, read, unit, limit) in CASES {
        if !options.wants(case) {
            continue;
        }
        say(case);
        for page_cache in [true, false] {
            let name = if page_cache { case.to_owned() } else { format!("{case}, caches dropped") };
            let rates = alternate(options.rounds, sides, read, page_cache)?;
            for ((side, _), rate) in sides.iter().zip(&rates) {
                report.figure(&name, side, "rate", unit, rate);
            }
            if let (true, [ours, unpacked, ..]) = (page_cache, &rates[..]) {
                judge(report, case, ours.median() / unpacked.median(), limit);
            }
        }
    }
    report
        .note("ext4 is the unpacked tree on the scratch disk; images and node cache are there too");
    report.note(
        "warm: everything in the page cache; caches dropped: read from the node's disk, no bar",
    );
    report.note("squashfs: zstd -3, through a loop device; fuse-overlayfs: the three trees merged");
    Ok(())
}

fn judge(report: &mut Report, case: &str, rate: f64, limit: Limit) {
    match limit {
        Limit::Time(most) => {
            let promise = format!("warm {case}, of the time of ext4,");
            report.at_most(&promise, 1.0 / rate, most, Unit::Times);
        }
        Limit::Rate(least) => {
            let promise = format!("warm {case}, of the rate of ext4,");
            report.at_least(&promise, rate, least, Unit::Times);
        }
    }
}

/// The rates of each side, measured in turns.
fn alternate(
    rounds: u32,
    sides: &[Side],
    read: Reading,
    page_cache: bool,
) -> anyhow::Result<Vec<Spread>> {
    let mut rates = vec![Spread::default(); sides.len()];
    if page_cache {
        for (_, root) in sides {
            read(root)?;
        }
    }
    for _ in 0..rounds {
        for ((_, root), rate) in sides.iter().zip(&mut rates) {
            if !page_cache {
                measure::drop_caches()?;
            }
            let start = Instant::now();
            let amount = read(root)?;
            rate.push(amount / start.elapsed().as_secs_f64());
        }
    }
    Ok(rates)
}

/// Every entry's attributes; answers entries.
fn every_entry(root: &Path) -> anyhow::Result<f64> {
    let mut count = 0;
    walk::entries(&root.join(SMALL), &mut |_, _| {
        count += 1;
        Ok(())
    })?;
    Ok(f64::from(count))
}

/// Every small file, whole; answers files.
fn small_files(root: &Path) -> anyhow::Result<f64> {
    let mut count = 0;
    let mut buffer = vec![0_u8; SMALL_BYTES as usize];
    walk::entries(&root.join(SMALL), &mut |path, metadata| {
        if metadata.is_file() && metadata.len() <= SMALL_BYTES {
            let mut file = File::open(path)?;
            while file.read(&mut buffer)? > 0 {}
            count += 1;
        }
        Ok(())
    })?;
    Ok(f64::from(count))
}

/// The large file from its start to its end; answers bytes.
fn sequential(root: &Path) -> anyhow::Result<f64> {
    let mut file = File::open(large(root))?;
    let mut buffer = vec![0_u8; 1 << 20];
    let mut total = 0;
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(total as f64),
            count => total += count,
        }
    }
}

/// Single pages of the large file, everywhere, the same ones each time; answers reads.
fn random(root: &Path) -> anyhow::Result<f64> {
    let file = File::open(large(root))?;
    let mut buffer = [0_u8; PAGE_BYTES];
    for offset in Pages::of(&file)?.take(RANDOM_READS) {
        file.read_exact_at(&mut buffer, offset)?;
    }
    Ok(RANDOM_READS as f64)
}

fn large(root: &Path) -> PathBuf {
    root.join(LARGE)
}
