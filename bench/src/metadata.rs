//! The size of a metadata image, against that of mkfs.erofs for the same tree with its data on another
//! device.

use crate::cases;
use crate::corpus::{self, Kind};
use crate::eager;
use crate::measure::Spread;
use crate::node::Lamella;
use crate::options::Options;
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use std::fs;

/// The most, of the peer's.
const LIMIT: f64 = 1.1;

/// `bench metadata`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let pieces = corpus::ready(options, &[Kind::Base, Kind::Toolkit, Kind::Workspace])?;
    let scratch = Scratch::create(&options.scratch)?;
    let lamella = Lamella::at(&scratch.data())?;
    say("building the layers and the peer's images");
    cases::publish(&lamella, &pieces, |_, _| {})?;
    let trees = eager::pull(&pieces, "", &scratch.path().join("trees"))?.trees;
    let node = lamella.up()?;
    let mut report = Report::new("metadata", options, &pieces)?;
    for (piece, tree) in pieces.iter().zip(&trees) {
        let name = piece.record.piece.as_str();
        let ours = node.size(&cases::reference(piece))?.metadata_bytes as f64;
        let image = scratch.path().join(format!("{name}.erofs"));
        let blobs = scratch.path().join(format!("{name}.blobs"));
        let blob = format!("--blobdev={}", shell::text(&blobs)?);
        let words = [
            "mkfs.erofs",
            "--quiet",
            "--chunksize=1048576",
            &blob,
            shell::text(&image)?,
            shell::text(tree)?,
        ];
        shell::run(&words)?;
        let theirs = fs::metadata(&image)?.len() as f64;
        fs::remove_file(&blobs)?;
        report.figure(name, "lamella", "metadata", Unit::Bytes, &Spread::from_iter([ours]));
        report.figure(name, "mkfs.erofs", "metadata", Unit::Bytes, &Spread::from_iter([theirs]));
        let promise = format!("metadata of the {name}, of mkfs.erofs's,");
        report.at_most(&promise, ours / theirs, LIMIT, Unit::Times);
    }
    drop(node);
    report.note("mkfs.erofs with chunks of 1 MiB on another device: its smallest metadata");
    report.finish(options)
}
