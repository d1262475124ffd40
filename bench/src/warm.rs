//! Reads of a layer that the node holds completely, against mkfs.erofs's image of the same tree: the same
//! kernel file system, mounted the same way from a file on the same disk.

use crate::cases;
use crate::corpus::{self, Kind};
use crate::eager;
use crate::measure::{self, Spread};
use crate::node::Lamella;
use crate::options::Options;
use crate::pages::{PAGE_BYTES, Pages};
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use crate::walk;
use anyhow::Context;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;
use sys::mount::{Attributes, Erofs, Unmount};

const RANDOM_READS: usize = 4_000;
const SMALL_BYTES: u64 = 64 << 10;
/// The least share of the peer's rate.
const BAR: f64 = 0.9;
/// Many small files of the toolkit, and its one large file.
const SMALL: &str = "opt/toolkit/node";
const LARGE: &str = "opt/toolkit/large.bin";

/// One way to read a tree; answers how much it did, in its unit.
type Reading = fn(&Path) -> anyhow::Result<f64>;

const CASES: [(&str, Reading, Unit); 4] = [
    ("metadata", every_entry, Unit::PerSecond),
    ("small files", small_files, Unit::PerSecond),
    ("sequential", sequential, Unit::BytesPerSecond),
    ("random 4 KiB", random, Unit::PerSecond),
];

/// `bench warm`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let pieces = corpus::ready(options, &[Kind::Toolkit])?;
    let piece = pieces.first().context("the toolkit is a piece")?;
    let scratch = Scratch::create(&options.scratch)?;
    let lamella = Lamella::at(&scratch.data())?;
    let reference = cases::reference(piece);
    let tar = piece.tar();
    say("building the layer and mkfs.erofs's image");
    lamella.run(&["build", shell::text(&tar)?, "-t", &reference])?;
    let image = peer_image(&pieces, &scratch)?;
    let (ours, theirs) = (scratch.path().join("ours"), scratch.path().join("theirs"));
    fs::create_dir(&ours)?;
    fs::create_dir(&theirs)?;
    let node = lamella.up()?;
    lamella.run(&["mount", &reference, shell::text(&ours)?])?;
    node.complete(&reference)?;
    let peer = Erofs { metadata: &image, device: None }
        .mount_detached(Attributes::LAYER)
        .context("cannot mount mkfs.erofs's image")?;
    peer.attach(&theirs)?;
    drop(peer);
    let before = node.loaded()?;
    let mut report = measure_all(options, &pieces, [("lamella", &ours), ("mkfs.erofs", &theirs)])?;
    let after = node.loaded()?;
    sys::mount::unmount(&theirs, Unmount::Lazy)?;
    lamella.run(&["umount", shell::text(&ours)?])?;
    drop(node);
    let events = (after.events - before.events) as f64;
    report.at_most("events of a complete layer", events, 0.0, Unit::Count);
    report.finish(options)
}

fn peer_image(pieces: &[corpus::Piece], scratch: &Scratch) -> anyhow::Result<PathBuf> {
    let tree = scratch.path().join("tree");
    let pulled = eager::pull(pieces, "", &tree)?;
    let root = pulled.trees.first().context("one tree was unpacked")?;
    let image = scratch.path().join("peer.erofs");
    shell::run(&["mkfs.erofs", "--quiet", shell::text(&image)?, shell::text(root)?])?;
    corpus::remove_tree(&tree)?;
    Ok(image)
}

fn measure_all(
    options: &Options,
    pieces: &[corpus::Piece],
    sides: [(&str, &PathBuf); 2],
) -> anyhow::Result<Report> {
    let mut report = Report::new("warm", options, pieces)?;
    for (case, read, unit) in CASES {
        say(case);
        for page_cache in [true, false] {
            let name = if page_cache { case.to_owned() } else { format!("{case}, caches dropped") };
            let mut rates = [Spread::default(), Spread::default()];
            if page_cache {
                for (_, root) in sides {
                    read(root)?;
                }
            }
            for _ in 0..options.rounds {
                for ((_, root), rate) in sides.iter().zip(&mut rates) {
                    if !page_cache {
                        measure::drop_caches()?;
                    }
                    let start = Instant::now();
                    let amount = read(root)?;
                    rate.push(amount / start.elapsed().as_secs_f64());
                }
            }
            for ((side, _), rate) in sides.iter().zip(&rates) {
                report.figure(&name, side, "rate", unit, rate);
            }
            if page_cache {
                let ratio = rates[0].median() / rates[1].median();
                let promise = format!("warm {case}, of the rate of mkfs.erofs's image,");
                report.at_least(&promise, ratio, BAR, Unit::Times);
            }
        }
    }
    report.note("both are file-backed EROFS mounts; warm: everything in the page cache");
    report.note("caches dropped: read from the node's disk; under 1.3x is noise there, so no bar");
    Ok(report)
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
