//! A mount that behaves as one of 3FS does.

use super::double::library;
use super::slow_names::Shared;
use fuser::BackgroundSession;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// A mounted 3FS of tests.
pub struct ThreeFsMount {
    session: Option<BackgroundSession>,
    directory: tempfile::TempDir,
    next: AtomicU32,
}

impl ThreeFsMount {
    /// One client of a tree.
    pub fn of(tree: &Shared) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let session = Some(tree.mount(directory.path()));
        let mount = Self { session, directory, next: AtomicU32::new(0) };
        let _ = std::fs::create_dir(mount.path().join("3fs-virt"));
        mount
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// A place that nobody else has, read by the double.
    pub fn url(&self) -> String {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        format!("3fs://{}/store-{number}?library={}", self.path().display(), library().display())
    }
}

impl Drop for ThreeFsMount {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            let _ = session.umount_and_join();
        }
    }
}
