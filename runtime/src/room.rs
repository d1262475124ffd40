//! The room on the disk of the data directory. Sandboxes without a disk of their own share it, and one with its
//! own fills it too as its image grows. Before nothing is left for the node, whoever wrote most is stopped.
//!
//! A task looks at the free space, more often the less there is. Below the reserve no sandbox is started
//! and the largest writers end, as `disk_full`, until what they give back is enough. What others of the
//! host write is not ours to stop.

use crate::events::report;
use crate::node::Node;
use crate::sandbox::Sandbox;
use layer::{Context, Error, ErrorKind, Result};
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use sys::file::{FileKind, Folder};

/// Between two looks while there is room.
const CALM: Duration = Duration::from_millis(500);
/// Between two looks while the reserve is near.
const TENSE: Duration = Duration::from_millis(50);
/// Inodes that stay free.
const RESERVED_INODES: u64 = 4096;
/// Nobody is stopped for less.
const MIN_BYTES: u64 = 8 << 20;
const MIN_INODES: u64 = 1000;
/// A tree with more is known to be large; it is not counted to its end.
const MAX_COUNTED: u64 = 100_000;
/// Folders below each other that are looked into.
const MAX_DEPTH: usize = 100;

/// What a sandbox takes of the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Written {
    /// Bytes.
    pub bytes: u64,
    /// Files, folders and links, as far as they were counted.
    pub inodes: u64,
}

impl Written {
    /// Counts a tree that its owner changes at the same time, without following anything. Blocking.
    pub fn of_tree(path: &Path) -> Self {
        let mut found = Self::default();
        let counted = Folder::open(path).and_then(|folder| found.count(&folder, 0));
        if let Err(error) = counted {
            tracing::debug!(path = %path.display(), %error, "count what a sandbox wrote");
        }
        found
    }

    fn count(&mut self, folder: &Folder, depth: usize) -> std::io::Result<()> {
        folder.visit_until(&mut |entry| {
            // It may be gone by now, or be something else.
            if let Ok(stat) = folder.stat(&entry.name) {
                self.inodes += 1;
                self.bytes += stat.blocks_512 * 512;
            }
            if entry.kind == Some(FileKind::Directory)
                && depth < MAX_DEPTH
                && let Ok(below) = folder.open_folder(&entry.name)
            {
                self.count(&below, depth + 1)?;
            }
            let is_enough = self.inodes >= MAX_COUNTED;
            Ok(if is_enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })
    }
}

/// Watches one disk.
#[derive(Debug)]
pub struct Room {
    folder: PathBuf,
    reserve_bytes: u64,
    is_low: AtomicBool,
}

/// What is free.
#[derive(Debug, Clone, Copy)]
struct Free {
    bytes: u64,
    inodes: u64,
}

impl Room {
    /// Keeps `reserve_bytes` of the disk of this folder free: a hundredth of it unless told, at least
    /// 256 MiB and at most 4 GiB, on a small disk an eighth.
    pub fn new(folder: &Path, reserve_bytes: Option<u64>) -> Result<Self> {
        let total = file_system(folder)?.total_bytes;
        let usual = (total / 100).clamp(256 << 20, 4 << 30).min(total / 8);
        let reserve_bytes = reserve_bytes.unwrap_or(usual);
        Ok(Self { folder: folder.to_owned(), reserve_bytes, is_low: AtomicBool::new(false) })
    }

    /// NoSpace while the disk is below its reserve.
    pub fn admit(&self) -> Result<()> {
        if !self.is_low.load(Ordering::Relaxed) {
            return Ok(());
        }
        let text = format!(
            "the disk of the data directory has less than its reserve of {} MiB free",
            self.reserve_bytes >> 20
        );
        Err(Error::new(ErrorKind::NoSpace, text))
    }

    fn free(&self) -> Result<Free> {
        let now = file_system(&self.folder)?;
        Ok(Free { bytes: now.available_bytes, inodes: now.available_inodes })
    }

    fn is_short(&self, free: Free) -> bool {
        free.bytes < self.reserve_bytes || free.inodes < RESERVED_INODES
    }

    /// Whom to stop, of those who are known with what they wrote: the largest first, and no more than it
    /// takes to have twice the reserve.
    fn choose(&self, free: Free, mut known: Vec<(usize, Written)>) -> Vec<usize> {
        let mut wanted_bytes = 0;
        if free.bytes < self.reserve_bytes {
            wanted_bytes = (2 * self.reserve_bytes).saturating_sub(free.bytes);
        }
        let mut wanted_inodes = 0;
        if free.inodes < RESERVED_INODES {
            wanted_inodes = (2 * RESERVED_INODES).saturating_sub(free.inodes);
        }
        let mut chosen = Vec::new();
        known.sort_by_key(|(_, written)| std::cmp::Reverse(written.bytes));
        for (index, written) in &known {
            if wanted_bytes == 0 || written.bytes < MIN_BYTES {
                break;
            }
            wanted_bytes = wanted_bytes.saturating_sub(written.bytes);
            chosen.push(*index);
        }
        known.sort_by_key(|(_, written)| std::cmp::Reverse(written.inodes));
        for (index, written) in &known {
            if wanted_inodes == 0 || written.inodes < MIN_INODES {
                break;
            }
            wanted_inodes = wanted_inodes.saturating_sub(written.inodes);
            if !chosen.contains(index) {
                chosen.push(*index);
            }
        }
        chosen
    }
}

fn file_system(folder: &Path) -> Result<sys::file::space::FileSystem> {
    let look = || sys::file::space::file_system(std::fs::File::open(folder)?.as_fd());
    look().context(|| format!("look at the disk of {}", folder.display()))
}

/// Watches until the node is gone.
pub async fn watch(node: Weak<Node>) {
    let mut pause = CALM;
    loop {
        tokio::time::sleep(pause).await;
        let Some(node) = node.upgrade() else { return };
        pause = match look(&node).await {
            Ok(pause) => pause,
            Err(error) => {
                tracing::warn!(error = %error.chain(), "watch the disk of the data directory");
                CALM
            }
        };
    }
}

async fn look(node: &Arc<Node>) -> Result<Duration> {
    let room = &node.room;
    let free = room.free()?;
    let is_low = room.is_short(free);
    room.is_low.store(is_low, Ordering::Relaxed);
    if !is_low {
        let is_near = free.bytes < 8 * room.reserve_bytes || free.inodes < 8 * RESERVED_INODES;
        return Ok(if is_near { TENSE } else { CALM });
    }
    let running = node.list(false);
    let watched = Arc::clone(node);
    let stopped = tokio::task::spawn_blocking(move || make_room(&watched.room, &running)).await;
    let stopped = stopped.map_err(|error| {
        Error::new(ErrorKind::Internal, "making room panicked").with_source(error)
    })??;
    if stopped == 0 {
        tracing::warn!(
            free_bytes = free.bytes,
            free_inodes = free.inodes,
            "the disk of the data directory is nearly full, and not by sandboxes"
        );
        return Ok(CALM * 4);
    }
    Ok(TENSE)
}

/// Stops the largest writers; answers how many. Blocking.
fn make_room(room: &Room, running: &[Arc<Sandbox>]) -> Result<usize> {
    let instances: Vec<_> = running
        .iter()
        .filter_map(|sandbox| Some((sandbox, sandbox.instance()?)))
        .filter(|(_, instance)| !instance.is_stopped_for_room())
        .collect();
    for (_, instance) in &instances {
        instance.trim();
    }
    let free = room.free()?;
    if !room.is_short(free) {
        return Ok(instances.len());
    }
    let known = instances.iter().map(|(_, instance)| instance.written()).enumerate().collect();
    let chosen = room.choose(free, known);
    for index in &chosen {
        let (sandbox, instance) = &instances[*index];
        let written = instance.written();
        tracing::warn!(
            id = sandbox.id(),
            bytes = written.bytes,
            inodes = written.inodes,
            "stopped, since the disk of the data directory is nearly full"
        );
        let reason = format!(
            "stopped with {} MiB and {} files written, since the node's disk was nearly full",
            written.bytes >> 20,
            written.inodes
        );
        sandbox.update(|record| record.reason = reason)?;
        report::stopped_for_room(sandbox, written.bytes);
        instance.stop_for_room()?;
    }
    Ok(chosen.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_stopped_and_no_more_than_it_takes() {
        let folder = tempfile::tempdir().unwrap();
        let room = Room::new(folder.path(), Some(100 << 20)).unwrap();
        let bytes = |bytes: u64| Written { bytes: bytes << 20, inodes: 1 };
        let known = vec![(0, bytes(1)), (1, bytes(150)), (2, bytes(30)), (3, bytes(90))];
        let free = Free { bytes: 10 << 20, inodes: u64::MAX };
        assert_eq!(room.choose(free, known.clone()), [1, 3]);
        let plenty = Free { bytes: 500 << 20, inodes: u64::MAX };
        assert!(room.choose(plenty, known).is_empty());
        // Nobody is stopped for what others fill.
        assert!(room.choose(free, vec![(0, bytes(1))]).is_empty());
        let files = |inodes| Written { bytes: 0, inodes };
        let few = Free { bytes: u64::MAX, inodes: 10 };
        assert_eq!(room.choose(few, vec![(0, files(5)), (1, files(9000))]), [1]);
    }

    #[test]
    fn a_tree_is_counted_and_no_link_followed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        std::fs::create_dir(path.join("deep")).unwrap();
        std::fs::write(path.join("deep/file"), vec![1; 1 << 20]).unwrap();
        std::os::unix::fs::symlink("/", path.join("link")).unwrap();
        let written = Written::of_tree(path);
        assert_eq!(written.inodes, 3);
        assert!((1 << 20..2 << 20).contains(&written.bytes), "{written:?}");
    }
}
