//! What ten versions of a tree take on a store, against chunks at fixed places, programs that cut by
//! content, and an image for each version.
//!
//! Bytes are the same in every round and on every machine, so there is one round.

use crate::corpus::{self, Kind, Piece};
use crate::measure::Spread;
use crate::options::Options;
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use builder::{BuildOptions, ChunkingOptions, EncodedChunk, Publisher, Silent, Source};
use layer::manifest::LayerKind;
use layer::{ChunkDigest, EnvId, LayerId};
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

const KINDS: [Kind; 3] = [Kind::SourceVersions, Kind::ToolkitVersions, Kind::DebianVersions];
/// The most, of chunks of 1 MiB for each file.
const OF_FIXED: f64 = 0.5;
/// The most, of the peer that cuts by content.
const OF_PEER: f64 = 1.15;

/// `bench dedup`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let kinds: Vec<Kind> = KINDS.into_iter().filter(|kind| options.wants(kind.name())).collect();
    let pieces = corpus::ready(options, &kinds)?;
    let scratch = Scratch::create(&options.scratch)?;
    let mut report = Report::new("dedup", &Options { rounds: 1, ..options.clone() }, &pieces)?;
    for piece in &pieces {
        sequence(piece, scratch.path(), &mut report)?;
    }
    report.note("everything counts: data, layer files or images, and what the peers keep about it");
    report.note(
        "restic and borg compress with zstd at their levels `auto` and 3, mkfs.erofs with lz4hc",
    );
    report.finish(options)
}

fn sequence(piece: &Piece, scratch: &Path, report: &mut Report) -> anyhow::Result<()> {
    let name = piece.record.piece.as_str();
    say(format!("{name}: unpacking"));
    let tree = scratch.join(name);
    fs::create_dir(&tree)?;
    let mut unpack = shell::command(&["tar", "--extract", "--directory"]);
    shell::output(unpack.arg(&tree).arg("--file").arg(piece.tar()))?;
    let folders = corpus::folders(&tree);
    let fixed = ChunkingOptions {
        chunk_bytes: 1 << 20,
        bundle_file_bytes: 0,
        inline_bytes: 0,
        ..ChunkingOptions::default()
    };
    say(format!("{name}: storing ten versions in five ways"));
    let ours = layers(&folders, ChunkingOptions::default())?;
    let first = layers(&folders[..1], ChunkingOptions::default())?;
    let fixed = layers(&folders, fixed)?;
    let restic = restic(&folders, &scratch.join("restic"))?;
    let sides = [
        ("lamella", ours),
        ("1 MiB chunks of each file", fixed),
        ("restic", restic),
        ("borg", borg(&folders, &scratch.join("borg"))?),
        ("mkfs.erofs", images(&folders, &scratch.join("image"))?),
    ];
    report.figure(name, "lamella", "the first version", Unit::Bytes, &Spread::from_iter([first]));
    for (side, bytes) in sides {
        report.figure(name, side, "stored", Unit::Bytes, &Spread::from_iter([bytes]));
    }
    let what = format!("ten versions of {name}, of what");
    let of_fixed = format!("{what} chunks of 1 MiB for each file take,");
    report.at_most(&of_fixed, ours / fixed, OF_FIXED, Unit::Times);
    report.at_most(&format!("{what} restic takes,"), ours / restic, OF_PEER, Unit::Times);
    corpus::remove_tree(&tree)
}

/// A store that only counts.
#[derive(Default)]
struct Counted {
    chunks: Mutex<HashSet<ChunkDigest>>,
    bytes: Mutex<u64>,
}

impl Counted {
    fn count(&self, bytes: usize) {
        *self.bytes.lock().unwrap_or_else(PoisonError::into_inner) += bytes as u64;
    }
}

impl Publisher for Counted {
    fn missing(&self, digests: &[ChunkDigest]) -> layer::Result<Vec<bool>> {
        let chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(digests.iter().map(|digest| !chunks.contains(digest)).collect())
    }

    fn upload(&self, chunk: EncodedChunk) -> layer::Result<()> {
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        if chunks.insert(chunk.digest) {
            self.count(chunk.payload.len());
        }
        Ok(())
    }

    fn flush(&self) -> layer::Result<()> {
        Ok(())
    }

    fn commit_layer(&self, file: &[u8]) -> layer::Result<LayerId> {
        self.count(file.len());
        Ok(layer::layer_file::LayerFile::decode(file)?.id())
    }

    fn commit_environment(&self, document: &[u8]) -> layer::Result<EnvId> {
        Ok(layer::environment::Environment::decode(document)?.id())
    }
}

fn layers(folders: &[PathBuf], chunking: ChunkingOptions) -> anyhow::Result<f64> {
    let store = Counted::default();
    let options = BuildOptions { chunking, ..BuildOptions::new(LayerKind::Base) };
    for folder in folders {
        builder::build(&Source::Directory(folder.clone()), &store, &options, &Silent)?;
    }
    let bytes = *store.bytes.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(bytes as f64)
}

fn restic(folders: &[PathBuf], repository: &Path) -> anyhow::Result<f64> {
    let restic = |words: &[&str]| -> anyhow::Result<Command> {
        let mut command = shell::command(&["restic", "--quiet", "--no-cache", "--repo"]);
        command.arg(shell::text(repository)?).args(words).env("RESTIC_PASSWORD", "bench");
        Ok(command)
    };
    shell::output(&mut restic(&["init"])?)?;
    for folder in folders {
        shell::output(restic(&["backup", "."])?.current_dir(folder))?;
    }
    taken(repository)
}

fn borg(folders: &[PathBuf], repository: &Path) -> anyhow::Result<f64> {
    let home = repository.with_extension("home");
    let borg = |words: &[&str]| {
        let mut command = shell::command(&["borg"]);
        command.args(words).env("BORG_BASE_DIR", &home);
        command.env("BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK", "yes");
        command
    };
    let place = shell::text(repository)?;
    shell::output(&mut borg(&["init", "--encryption", "none", place]))?;
    for (number, folder) in folders.iter().enumerate() {
        let archive = format!("{place}::{number}");
        let words = ["create", "--compression", "zstd,3", &archive, "."];
        shell::output(borg(&words).current_dir(folder))?;
    }
    corpus::remove_tree(&home)?;
    taken(repository)
}

fn images(folders: &[PathBuf], image: &Path) -> anyhow::Result<f64> {
    let mut bytes = 0;
    for folder in folders {
        let (image, folder) = (shell::text(image)?, shell::text(folder)?);
        shell::run(&["mkfs.erofs", "--quiet", "-zlz4hc", image, folder])?;
        bytes += fs::metadata(image)?.len();
        fs::remove_file(image)?;
    }
    Ok(bytes as f64)
}

/// Bytes of all files below a folder, which is then removed.
fn taken(folder: &Path) -> anyhow::Result<f64> {
    let mut bytes = 0;
    let mut open = vec![folder.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            match entry.metadata()? {
                metadata if metadata.is_dir() => open.push(entry.path()),
                metadata => bytes += metadata.len(),
            }
        }
    }
    corpus::remove_tree(folder)?;
    Ok(bytes as f64)
}
