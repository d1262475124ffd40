//! The folder that a bench works in, and its removal.
//!
//! What survives a crash: the folder, perhaps with a node and mounts. The next bench on the same scratch
//! disk finds it unlocked, ends that node, unmounts and removes it.

use crate::corpus::remove_tree;
use crate::node::Lamella;
use crate::shell::say;
use anyhow::Context;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use sys::mount::Unmount;

const PREFIX: &str = "lamella-bench-";

/// A locked folder; dropping it ends what runs in it and removes it.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    _lock: File,
}

impl Scratch {
    /// Makes a folder below `root`, after sweeping those of benches that died.
    pub fn create(root: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(root)?;
        Self::sweep_dead(root)?;
        let path = root.join(format!("{PREFIX}{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let lock = File::create(path.join("lock"))?;
        lock.lock()?;
        Ok(Self { path, _lock: lock })
    }

    /// Removes the folders of benches that died, with what runs in them.
    pub fn sweep_dead(root: &Path) -> anyhow::Result<()> {
        for entry in fs::read_dir(root)?.filter_map(Result::ok) {
            let stale = entry.file_name().to_string_lossy().starts_with(PREFIX)
                && File::open(entry.path().join("lock")).is_ok_and(|lock| lock.try_lock().is_ok());
            if stale {
                say(format!("sweeping {}, left by a bench that died", entry.path().display()));
                sweep(&entry.path())?;
            }
        }
        Ok(())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the node of this bench keeps its data.
    pub fn data(&self) -> PathBuf {
        self.path.join("data")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = sweep(&self.path) {
            say(format!("cannot remove {}: {error:#}", self.path.display()));
        }
    }
}

fn sweep(path: &Path) -> anyhow::Result<()> {
    for data in fs::read_dir(path)?.filter_map(Result::ok).map(|entry| entry.path()) {
        if data.join("run/node.lock").exists() {
            // Without a node this fails, which is as well.
            let _ = Lamella::at(&data)?.run(&["down"]);
        }
    }
    let mounts = sys::mount::read_mounts()?;
    for mount in mounts.iter().rev().filter(|mount| mount.mount_point.starts_with(path)) {
        sys::mount::unmount(&mount.mount_point, Unmount::Lazy)?;
    }
    remove_tree(path)
}
