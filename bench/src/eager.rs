//! What on-demand loading replaces: fetch a whole compressed tar, unpack it to disk, then run.
//!
//! The eager side gets what helps it: fetching and unpacking overlap, the archive is read in large
//! pieces, nothing is synced, and what was unpacked stays in the page cache for the command.

use crate::container::{self, Bundle, Container};
use crate::corpus::Piece;
use crate::measure::DiskWrites;
use crate::shell;
use anyhow::{Context, bail};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};
use store::Key;
use store::backend::Backend;

/// Bytes of one request; large, so that latency costs the eager side nothing.
const REQUEST_BYTES: usize = 4 << 20;

/// Unpacked trees, and what it took.
#[derive(Debug)]
pub struct Pulled {
    /// One tree a piece, bottom first.
    pub trees: Vec<PathBuf>,
    /// From the first request to the last file.
    pub time: Duration,
    /// Compressed bytes fetched.
    pub fetched_bytes: u64,
    /// Bytes that reached the disk, after a sync that is not in `time`.
    pub written_bytes: u64,
}

/// Fetches the pieces through a store with these parameters (`bandwidth=...`, or none) and unpacks them
/// below `into`, one after another.
pub fn pull(pieces: &[Piece], speed: &str, into: &Path) -> anyhow::Result<Pulled> {
    fs::create_dir_all(into)?;
    let writes = DiskWrites::start(into)?;
    let start = Instant::now();
    let mut pulled =
        Pulled { trees: Vec::new(), time: Duration::ZERO, fetched_bytes: 0, written_bytes: 0 };
    for piece in pieces {
        let tree = into.join(&piece.record.piece);
        fs::create_dir(&tree)?;
        pulled.fetched_bytes += fetch_and_unpack(piece, speed, &tree)?;
        pulled.trees.push(tree);
    }
    pulled.time = start.elapsed();
    pulled.written_bytes = writes.finish()?;
    Ok(pulled)
}

fn fetch_and_unpack(piece: &Piece, speed: &str, tree: &Path) -> anyhow::Result<u64> {
    let url = format!("file://{}{speed}", shell::text(&piece.dir)?);
    let backend = store::open(&url)?;
    let mut tar = shell::command(&["tar", "--extract", "--zstd", "--numeric-owner", "-p"]);
    tar.arg("--directory").arg(tree).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = tar.spawn().context("cannot start tar")?;
    let mut input = child.stdin.take().context("tar has an input")?;
    let (sender, receiver) = sync_channel::<Vec<u8>>(2);
    let fetched = std::thread::scope(|scope| -> anyhow::Result<u64> {
        let fetcher = scope.spawn(move || fetch(&backend, &sender));
        for bytes in receiver {
            input.write_all(&bytes).context("tar ended early")?;
        }
        drop(input);
        fetcher.join().map_err(|_| anyhow::anyhow!("the fetching thread panicked"))?
    });
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("tar failed: {}", shell::tail(&String::from_utf8_lossy(&output.stderr)));
    }
    fetched
}

fn fetch(
    backend: &Arc<dyn Backend>,
    into: &std::sync::mpsc::SyncSender<Vec<u8>>,
) -> anyhow::Result<u64> {
    let key = Key::new("tree.tar.zst")?;
    let size = backend.size(&key)?;
    let mut offset = 0;
    while offset < size {
        let count = usize::try_from((size - offset).min(REQUEST_BYTES as u64))?;
        let mut bytes = vec![0; count];
        backend.read_at(&key, offset, &mut bytes)?;
        offset += count as u64;
        if into.send(bytes).is_err() {
            bail!("nobody unpacks any more");
        }
    }
    Ok(offset)
}

/// Runs a command in a container of crun over unpacked trees; answers its time, from before the overlay
/// is mounted until the container is gone, and its output.
pub fn run(
    trees: &[PathBuf],
    scratch: &Path,
    env: &[String],
    argv: &[&str],
) -> anyhow::Result<(Duration, String)> {
    container::apart(|| {
        let start = Instant::now();
        let bundle = Bundle::create(scratch, "eager", env, argv)?;
        let output = Container::mount(bundle, trees)?.run("crun")?;
        Ok((start.elapsed(), output))
    })
}
