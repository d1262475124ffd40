//! The files of the log: `<number of the first event>.jsonl`, oldest first, one event a line, the last one grows.
//!
//! Bounded: so many files of about so many bytes; the oldest go, and an `expired` event says through which number.
//! CRASH: see [`open`].

use layer::{Context, Result};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Ending of every file.
const ENDING: &str = ".jsonl";

/// How much is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rotation {
    /// A file that has this length is the last no more.
    pub file_bytes: u64,
    /// Files that are kept.
    pub files: usize,
}

impl Default for Rotation {
    fn default() -> Self {
        Self { file_bytes: 16 << 20, files: 16 }
    }
}

/// The file that grows.
#[derive(Debug)]
pub struct Current {
    /// Opened for appending.
    pub file: File,
    /// Its length: whole lines only.
    pub bytes: u64,
    /// Number of the next event.
    pub next: u64,
}

/// Path of the file that begins with this event.
pub fn path_of(folder: &Path, first: u64) -> PathBuf {
    folder.join(format!("{first:020}{ENDING}"))
}

/// Numbers of the first event of each file, the oldest first.
pub fn list(folder: &Path) -> Result<Vec<u64>> {
    let context = || format!("list {}", folder.display());
    let mut firsts = Vec::new();
    for entry in std::fs::read_dir(folder).context(context)? {
        let name = entry.context(context)?.file_name();
        let first = name.to_str().and_then(|name| name.strip_suffix(ENDING)?.parse::<u64>().ok());
        firsts.extend(first);
    }
    firsts.sort_unstable();
    Ok(firsts)
}

/// Bytes of all files.
pub fn total_bytes(folder: &Path) -> u64 {
    let length =
        |first: u64| std::fs::metadata(path_of(folder, first)).map_or(0, |file| file.len());
    list(folder).unwrap_or_default().into_iter().map(length).sum()
}

/// Goes on with the last file, or begins the first. Nobody else writes there: the node is the only one on its data
/// directory.
///
/// CRASH: what follows the last newline is a torn line, which nobody has seen; it is cut off.
pub fn open(folder: &Path) -> Result<Current> {
    let context = || format!("open {}", folder.display());
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).context(context)?;
    let Some(first) = list(folder)?.pop() else { return begin(folder, 1) };
    let path = path_of(folder, first);
    let context = || format!("open {}", path.display());
    let file = File::options().read(true).append(true).open(&path).context(context)?;
    let length = file.metadata().context(context)?.len();
    let (bytes, last) = last_event(&file).context(context)?;
    if bytes < length {
        tracing::warn!(bytes = length - bytes, "a torn event is cut off");
        file.set_len(bytes).context(context)?;
    }
    Ok(Current { file, bytes, next: last.map_or(first, |last| last + 1) })
}

/// Where the last line that is an event ends, and its number.
fn last_event(file: &File) -> std::io::Result<(u64, Option<u64>)> {
    let (mut at, mut found) = (0, (0, None));
    let (mut reader, mut line) = (BufReader::new(file), Vec::new());
    loop {
        line.clear();
        let count = reader.read_until(b'\n', &mut line)?;
        if count == 0 {
            return Ok(found);
        }
        at += count as u64;
        if let Some(number) = line.strip_suffix(b"\n").and_then(number_of) {
            found = (at, Some(number));
        }
    }
}

/// The number of the event on a line.
pub fn number_of(line: &[u8]) -> Option<u64> {
    let rest = line.strip_prefix(b"{\"seq\":")?;
    let digits = rest.iter().position(|byte| !byte.is_ascii_digit())?;
    let whole = rest.last() == Some(&b'}');
    std::str::from_utf8(&rest[..digits]).ok()?.parse().ok().filter(|_| whole)
}

/// Begins the file whose first event has this number.
pub fn begin(folder: &Path, first: u64) -> Result<Current> {
    let path = path_of(folder, first);
    let file = File::options().append(true).create(true).mode(0o600).open(&path);
    let file = file.context(|| format!("make {}", path.display()))?;
    let bytes = file.metadata().context(|| format!("look at {}", path.display()))?.len();
    Ok(Current { file, bytes, next: first })
}

/// Removes the oldest files beyond so many; answers the number of the last event that went.
pub fn expire(folder: &Path, keep: usize) -> Result<Option<u64>> {
    let firsts = list(folder)?;
    let gone = firsts.len().saturating_sub(keep.max(2));
    for first in &firsts[..gone] {
        let path = path_of(folder, *first);
        std::fs::remove_file(&path).context(|| format!("remove {}", path.display()))?;
    }
    Ok((gone > 0).then(|| firsts[gone] - 1))
}
