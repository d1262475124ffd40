//! What the daemons cost while they do little: memory of the file-system daemon with three layers and with
//! a hundred, the time of an attach, and of a stack of five layers mounted and composed; memory of the node
//! process, which is the image daemon's, with a million chunks in the catalog.

use crate::cases;
use crate::catalog::{self, Resident};
use crate::corpus::{self, Kind};
use crate::measure::{self, Spread};
use crate::node::{Lamella, Node};
use crate::options::Options;
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};
use sys::mount::{Attributes, Overlay, OverlayLower, Unmount};

const SMALL_LAYERS: usize = 100;
/// Layers of the stack that is composed.
const STACK: usize = 5;
const MIB: f64 = 1_048_576.0;
/// Attaches of one round.
const ATTACHES: usize = 20;

/// `bench daemon`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let kinds = [Kind::Base, Kind::Toolkit, Kind::Workspace];
    let pieces = corpus::ready(options, &kinds)?;
    let scratch = Scratch::create(&options.scratch)?;
    let lamella = Lamella::at(&scratch.data())?;
    say("building the layers");
    cases::publish(&lamella, &pieces, |_, _| {})?;
    let small = small_layers(&lamella, &scratch)?;
    let large: Vec<String> = pieces.iter().map(cases::reference).collect();
    let (mut few, mut many) = (Spread::default(), Spread::default());
    let (mut attach, mut compose) = (Spread::default(), Spread::default());
    for round in 1..=options.rounds {
        say(format!("round {round} of {}", options.rounds));
        let node = lamella.up()?;
        node.attach(&large, "few")?;
        few.push(node.resident_bytes("fsd.sock")?);
        node.attach(&small, "many")?;
        many.push(node.resident_bytes("fsd.sock")?);
        node.detach(&small, "many")?;
        node.detach(&large, "few")?;
        attach.push(attach_time(&node, &large)?);
        compose.push(compose_time(&node, &small, &scratch)?);
    }
    let large_catalog = Lamella::at(&scratch.path().join("catalog"))?;
    let (digests, mut node) = (catalog::fill(&large_catalog)?, Resident::default());
    for _ in 0..options.rounds {
        catalog::measure(&large_catalog, &digests, &mut node)?;
    }
    let mut report = Report::new("daemon", options, &pieces)?;
    report.figure("3 layers", "fsd", "resident", Unit::Bytes, &few);
    report.figure("103 layers", "fsd", "resident", Unit::Bytes, &many);
    report.figure("80,000 files", "fsd", "attach", Unit::Seconds, &attach);
    report.figure("5 layers", "lamella mount", "mounted and composed", Unit::Seconds, &compose);
    report.figure("1 M chunks", "node", "resident, started", Unit::Bytes, &node.started);
    report.figure("1 M chunks", "node", "resident, asked for each", Unit::Bytes, &node.asked);
    report.at_most("fsd with three layers", few.median(), 24.0 * MIB, Unit::Bytes);
    report.at_most("fsd with a hundred layers", many.median(), 48.0 * MIB, Unit::Bytes);
    report.at_most(
        "attach of a large layer that the node knows",
        attach.median(),
        5e-3,
        Unit::Seconds,
    );
    report.at_most("five layers mounted and composed", compose.median(), 10e-3, Unit::Seconds);
    report.at_most("node with a million chunks", node.asked.median(), 128.0 * MIB, Unit::Bytes);
    report.note("resident: VmRSS of the daemon after the attaches, nothing read");
    report
        .note("node: the process of imaged and runtimed, started on a catalog that a publish made");
    report.note(
        "attach and composition: calls to a daemon that is up; the layers were attached before",
    );
    report.finish(options)
}

/// Publishes layers with one small file each; answers their references.
fn small_layers(lamella: &Lamella, scratch: &Scratch) -> anyhow::Result<Vec<String>> {
    let mut references = Vec::new();
    for index in 0..SMALL_LAYERS {
        let tree = scratch.path().join(format!("small-{index}"));
        fs::create_dir(&tree)?;
        fs::write(tree.join(format!("file-{index}")), format!("{index}\n").repeat(1000))?;
        let reference = format!("toolkit/small-{index}:1");
        lamella.run(&["build", shell::text(&tree)?, "-t", &reference])?;
        references.push(reference);
    }
    Ok(references)
}

/// The middle of some attaches of the largest layer.
fn attach_time(node: &Node, large: &[String]) -> anyhow::Result<f64> {
    let toolkit = large.get(1).map(std::slice::from_ref).context("the toolkit is the second")?;
    let mut times = Spread::default();
    for _ in 0..ATTACHES {
        times.push(node.attach(toolkit, "timed")?.time.as_secs_f64());
        node.detach(toolkit, "timed")?;
    }
    Ok(times.median())
}

/// The middle of some mounts of a stack, from the first attach to the overlay.
fn compose_time(node: &Node, small: &[String], scratch: &Scratch) -> anyhow::Result<f64> {
    let stack = small.get(..STACK).context("there are enough layers")?;
    let at = scratch.path().join("composed");
    fs::create_dir_all(&at)?;
    let mut times = Spread::default();
    for _ in 0..ATTACHES {
        let attached = node.attach(stack, "timed")?;
        let (composed, ()) = measure::timed(|| overlay(&attached.places, &at))?;
        times.push((attached.time + composed).as_secs_f64());
        sys::mount::unmount(&at, Unmount::Now)?;
        node.detach(stack, "timed")?;
    }
    Ok(times.median())
}

fn overlay(places: &[PathBuf], at: &Path) -> anyhow::Result<()> {
    let lowers: Vec<_> =
        places.iter().rev().map(|place| OverlayLower::Path(place.as_path())).collect();
    let overlay = Overlay { name: "bench", lowers: &lowers, upper: None, volatile: false };
    Ok(overlay.mount_detached(Attributes::default())?.attach(at)?)
}
