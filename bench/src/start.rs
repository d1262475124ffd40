//! Commands on a node that has nothing but warm daemons, the store on the local disk, against the same
//! commands over the unpacked trees with their page cache dropped.
//!
//! Both sides pay for a container: ours through the node, the peer's by crun. And what it takes to attach the
//! three layers, new to the node or known to it, against bare mounts of the same images.

use crate::cases::{self, Case, GCC, GIT_STATUS, PYTHON, TRUE};
use crate::corpus::{self, Kind, Piece};
use crate::eager;
use crate::measure::{self, Spread};
use crate::node::Lamella;
use crate::options::Options;
use crate::peers;
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::say;
use std::fs;
use std::path::Path;
use std::time::Duration;
use sys::mount::{Attributes, Erofs, Unmount};

/// A command and the most that it may take, of the time over the unpacked trees.
const CASES: [(Case, f64); 4] = [(TRUE, 1.5), (PYTHON, 1.10), (GCC, 1.4), (GIT_STATUS, 0.3)];

/// The part that attaches without running anything.
const ATTACH: &str = "attach";
/// The most that it may take, of the bare mounts.
const ATTACH_LIMIT: f64 = 1.5;

/// `bench start`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let pieces = corpus::ready(options, &[Kind::Base, Kind::Toolkit, Kind::Workspace])?;
    let scratch = Scratch::create(&options.scratch)?;
    let lamella = Lamella::at(&scratch.data())?;
    say("building the layers and unpacking the trees");
    cases::publish(&lamella, &pieces, |_, _| {})?;
    let trees = eager::pull(&pieces, "", &scratch.path().join("trees"))?.trees;
    let mut report = Report::new("start", options, &pieces)?;
    let peers = peers::images(&trees, scratch.path(), &mut report)?;
    for (case, limit) in CASES {
        if !options.wants(case.name) {
            continue;
        }
        let mut ours = Spread::default();
        let mut theirs = Spread::default();
        let mut fetched = Spread::default();
        let mut others = vec![Spread::default(); peers.len()];
        for round in 1..=options.rounds {
            say(format!("{}, round {round} of {}", case.name, options.rounds));
            let cold = cases::run_cold(&lamella, case)?;
            ours.push(cold.time.as_secs_f64());
            fetched.push(cold.loaded.plain_bytes as f64);
            measure::drop_caches()?;
            let (time, _) = eager::run(&trees, scratch.path(), &cases::environment(), case.argv)?;
            theirs.push(time.as_secs_f64());
            for (images, times) in peers.iter().zip(&mut others) {
                measure::drop_caches()?;
                let time = images.run(scratch.path(), &cases::environment(), case.argv)?;
                times.push(time.as_secs_f64());
            }
        }
        report.figure(case.name, "on demand", "time", Unit::Seconds, &ours);
        report.figure(case.name, "unpacked", "time", Unit::Seconds, &theirs);
        for (images, times) in peers.iter().zip(&others) {
            report.figure(case.name, images.name(), "time", Unit::Seconds, times);
        }
        report.figure(case.name, "on demand", "plain bytes", Unit::Bytes, &fetched);
        let promise = format!("`{}` on an empty node, of the time over unpacked trees,", case.name);
        report.at_most(&promise, ours.median() / theirs.median(), limit, Unit::Times);
    }
    if options.wants(ATTACH) {
        attach(&mut report, options, &lamella, &pieces, &scratch)?;
    }
    report.note("store on the local disk, node cache empty, page cache dropped on all sides");
    report.note(
        "peers: images of the three trees, mounted and run by crun as the unpacked trees are",
    );
    report.finish(options)
}

fn attach(
    report: &mut Report,
    options: &Options,
    lamella: &Lamella,
    pieces: &[Piece],
    scratch: &Scratch,
) -> anyhow::Result<()> {
    let references: Vec<String> = pieces.iter().map(cases::reference).collect();
    let (mut new, mut known, mut bare) = <(Spread, Spread, Spread)>::default();
    for round in 1..=options.rounds {
        say(format!("{ATTACH}, round {round} of {}", options.rounds));
        lamella.clear_cache()?;
        let node = lamella.up()?;
        for times in [&mut new, &mut known] {
            measure::drop_caches()?;
            times.push(node.attach_together(&references, ATTACH)?.as_secs_f64());
            node.detach(&references, ATTACH)?;
        }
        drop(node);
        bare.push(bare_mounts(&lamella.data.join("cache"), scratch)?.as_secs_f64());
    }
    report.figure(ATTACH, "new to the node", "time", Unit::Seconds, &new);
    report.figure(ATTACH, "known to the node", "time", Unit::Seconds, &known);
    report.figure(ATTACH, "bare mounts", "time", Unit::Seconds, &bare);
    for (what, times) in [("new", &new), ("known", &known)] {
        let promise = format!("attach of three layers {what} to the node, of three bare mounts,");
        let ratio = times.median() / bare.median();
        report.at_most(&promise, ratio, ATTACH_LIMIT, Unit::Times);
    }
    Ok(())
}

/// Mounts the images of all cached layers as they lie there, from a dropped page cache.
fn bare_mounts(cache: &Path, scratch: &Scratch) -> anyhow::Result<Duration> {
    let mut images = Vec::new();
    for entry in fs::read_dir(cache)? {
        let folder = entry?.path();
        let at = scratch.path().join(format!("bare-{}", images.len()));
        if folder.join("meta.erofs").exists() {
            fs::create_dir_all(&at)?;
            images.push((folder.join("meta.erofs"), folder.join("data"), at));
        }
    }
    anyhow::ensure!(images.len() == 3, "{} layers lie in the node cache", images.len());
    measure::drop_caches()?;
    let (time, ()) = measure::timed(|| -> anyhow::Result<()> {
        for (metadata, data, at) in &images {
            let mount = Erofs { metadata, device: Some(data) };
            mount.mount_detached(Attributes::LAYER)?.attach(at)?;
        }
        Ok(())
    })?;
    for (_, _, at) in &images {
        sys::mount::unmount(at, Unmount::Now)?;
    }
    Ok(time)
}
