//! A small file system of its own for a test: a loop mount that goes with the value.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Which file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskKind {
    Ext4,
    Xfs,
    Btrfs,
}

impl DiskKind {
    /// Whether files of it can share blocks.
    pub fn shares(self) -> bool {
        self != Self::Ext4
    }

    fn maker(self) -> &'static [&'static str] {
        match self {
            Self::Ext4 => &["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal"],
            Self::Xfs => &["mkfs.xfs", "-q", "-f"],
            Self::Btrfs => &["mkfs.btrfs", "-q", "-f"],
        }
    }
}

/// A file system in a file, mounted; unmounted when dropped.
pub struct Disk {
    at: PathBuf,
}

impl Disk {
    pub fn mount(kind: DiskKind, at: &Path, image: &Path, mebibytes: u64) -> Self {
        std::fs::create_dir_all(at).unwrap();
        std::fs::File::create(image).unwrap().set_len(mebibytes << 20).unwrap();
        let run = |words: &[&str], last: &[&Path]| {
            let status = Command::new(words[0]).args(&words[1..]).args(last).status().unwrap();
            assert!(status.success(), "{words:?}");
        };
        run(kind.maker(), &[image]);
        run(&["mount", "-o", "loop"], &[image, at]);
        Self { at: at.to_owned() }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        for _ in 0..100 {
            match sys::mount::unmount(&self.at, sys::mount::Unmount::Now) {
                Ok(()) => return,
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
        let _ = sys::mount::unmount(&self.at, sys::mount::Unmount::Lazy);
    }
}
