//! Collection and checking at scale: a store of a million chunks of which half is garbage, marked, condemned, swept,
//! checked and indexed anew by the command itself; time and peak memory.
//!
//! The chunks are real (each has its own bytes) but compress to almost nothing, so the numbers are those of the
//! bookkeeping and not of the disk.

use crate::measure::Spread;
use crate::node::Lamella;
use crate::options::Options;
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use anyhow::Context;
use layer::chunk::{BLOCK_BYTES, Chunk, ChunkTable};
use layer::layer_file::LayerFile;
use layer::manifest::{LayerKind, Manifest};
use layer::reference::Target;
use layer::tree::{Inode, Kind, Timestamp, Tree};
use layer::{ChunkDigest, LayerId};
use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Instant;
use store::Store;
use store::codec::encode_chunk;
use sys::measure::Usage;

/// Chunks on the store.
const CHUNKS: u32 = 1_000_000;
/// Chunks of one layer; it lies in a pack of its own.
const LAYER_CHUNKS: u32 = 10_000;
/// Every so many layers one has no name.
const GARBAGE_EVERY: u32 = 2;
/// Seconds for a million chunks.
const LIMIT_S: f64 = 60.0;
/// The image daemon's bound with a million chunks.
const LIMIT_BYTES: f64 = (128 << 20) as f64;

/// `bench gc`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let scratch = Scratch::create(&options.scratch)?;
    let lamella = Lamella::at(&scratch.data())?;
    say(format!("a store of {CHUNKS} chunks"));
    fill(&lamella)?;
    let mut report = Report::new("gc", options, &[])?;
    let gc = ["gc", "--grace", "0s", "--history", "0s"];
    let steps: [(&str, &[&str]); 6] = [
        ("index", &["reindex"]),
        ("mark and condemn", &gc),
        ("mark and sweep", &gc),
        ("mark, nothing to do", &gc),
        ("check", &["fsck"]),
        ("check every byte", &["fsck", "--read-data"]),
    ];
    for (name, words) in steps {
        say(name);
        let (seconds, bytes) = run(&lamella, words)?;
        report.figure(name, "lamella", "time", Unit::Seconds, &Spread::from_iter([seconds]));
        report.figure(name, "lamella", "peak memory", Unit::Bytes, &Spread::from_iter([bytes]));
        if name.starts_with("mark") {
            report.at_most(&format!("{name}: time"), seconds, LIMIT_S, Unit::Seconds);
            report.at_most(&format!("{name}: peak memory"), bytes, LIMIT_BYTES, Unit::Bytes);
        }
    }
    report.note(
        "every step is a process of its own that opens the catalog; half of the chunks are garbage",
    );
    report.finish(options)
}

fn run(lamella: &Lamella, words: &[&str]) -> anyhow::Result<(f64, f64)> {
    let begin = Instant::now();
    let mut command = lamella.command(words);
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
    let child = child.with_context(|| shell::shown(&command))?;
    let Usage { status, peak_rss_bytes, .. } = sys::measure::wait_with_usage(child)?;
    anyhow::ensure!(status.success(), "{} failed", shell::shown(&command));
    Ok((begin.elapsed().as_secs_f64(), peak_rss_bytes as f64))
}

fn fill(lamella: &Lamella) -> anyhow::Result<()> {
    let url = format!("file://{}", lamella.data.join("store").display());
    let store = Arc::new(Store::open(store::open(&url)?)?);
    for number in 0..CHUNKS / LAYER_CHUNKS {
        let id = publish(&store, number)?;
        if number % GARBAGE_EVERY == 0 {
            let reference = format!("base/layer{number}").parse()?;
            store.move_reference(&reference, Some(Target::Layer(id)), "bench", None)?;
        }
    }
    Ok(())
}

/// A layer of its own chunks, with its hint.
fn publish(store: &Store, number: u32) -> anyhow::Result<LayerId> {
    let mut writer = store.pack_writer()?;
    let mut table = Vec::new();
    for at in 0..LAYER_CHUNKS {
        let mut plain = vec![0; BLOCK_BYTES as usize];
        plain[..4].copy_from_slice(&(number * LAYER_CHUNKS + at + 1).to_le_bytes());
        let digest = ChunkDigest::of(&plain);
        let (codec, payload) = encode_chunk(&plain, 1);
        writer.append(digest, codec, BLOCK_BYTES, &payload)?;
        table.push(Chunk { start_block: at, blocks: 1, digest });
    }
    writer.finish()?;
    let chunk_table = ChunkTable::new(table)?;
    let root = Inode {
        mode: 0o755,
        uid: number,
        gid: 0,
        mtime: Timestamp::default(),
        xattrs: Vec::new(),
        kind: Kind::Directory(BTreeMap::new()),
    };
    let metadata = layer::erofs::writer::write(&Tree::new(root), chunk_table.data_blocks())?.bytes;
    let manifest = Manifest {
        directories: 1,
        plain_bytes: 0,
        ..Manifest::describing(LayerKind::Base, &chunk_table, &metadata)
    };
    let file = LayerFile { manifest, chunk_table, metadata };
    Ok(store.put_layer(&file.encode()?)?.0)
}
