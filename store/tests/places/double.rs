//! The double of 3FS's library, and a plain directory that it takes for a 3FS.

#![allow(dead_code)] // Each suite uses a part of it.

use super::folder::in_folder;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../store/tests/places/hf3fs_double.c");

/// The double of 3FS's library, compiled once for this process.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        in_folder("libhf3fs_double.so", |path| {
            let compiled = Command::new("cc")
                .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
                .arg(path)
                .args([SOURCE, "-lpthread"])
                .status()
                .unwrap();
            assert!(compiled.success());
        })
    })
}

/// A plain directory with what the double looks for at the top of a 3FS.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("3fs-virt")).unwrap();
        Self(directory)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn url(&self) -> String {
        format!("3fs://{}/store?library={}", self.path().display(), library().display())
    }

    /// Tells the double how to behave.
    pub fn tell(&self, settings: &str) {
        std::fs::write(self.path().join("3fs-virt/double"), settings).unwrap();
    }

    /// Rings that were made, and answers that were given.
    pub fn counts(&self) -> (usize, usize) {
        let text = std::fs::read(self.path().join("3fs-virt/count")).unwrap_or_default();
        let count = |letter| text.iter().filter(|found| **found == letter).count();
        (count(b'R'), count(b'r'))
    }
}
