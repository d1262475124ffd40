//! Room for a node to start when its disk is full: a file that is given back before anything is opened
//! and taken again once the node is up.
//!
//! A catalog that opens without room fails deep inside, sometimes fatally; so a start that would still
//! lack it is refused with one clear line.
// CRASH: a node that dies between the two leaves no file; the next one goes without if it must.

use crate::quantity::show_bytes;
use crate::settings::Settings;
use layer::{Context, Error, ErrorKind, Result};
use rustix::fs::FallocateFlags;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// What is kept for the next start.
const KEPT_BYTES: u64 = 32 << 20;
/// What a start needs: logs, locks, sockets, and the catalog's own files.
const NEEDED_BYTES: u64 = 12 << 20;

/// The file of a data directory.
#[derive(Debug)]
pub struct Reserve {
    data: PathBuf,
}

impl Reserve {
    /// Of this node.
    pub fn of(settings: &Settings) -> Self {
        Self { data: settings.data().to_owned() }
    }

    fn path(&self) -> PathBuf {
        self.data.join("reserve")
    }

    /// Gives the room back. Nothing to give back is no error.
    pub fn release(&self) {
        if let Err(error) = std::fs::remove_file(self.path())
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(%error, "release the reserve");
        }
    }

    /// `NoSpace` when a node cannot start on what is free.
    pub fn check(&self) -> Result<()> {
        let name = || format!("statvfs {}", self.data.display());
        let found = rustix::fs::statvfs(&self.data).map_err(std::io::Error::from).context(name)?;
        let free = found.f_bavail * found.f_frsize;
        if free >= NEEDED_BYTES {
            return Ok(());
        }
        let text = format!(
            "the disk of {} has {} free, a node needs {} to start",
            self.data.display(),
            show_bytes(free),
            show_bytes(NEEDED_BYTES)
        );
        Err(Error::new(ErrorKind::NoSpace, text))
    }

    /// Takes the room for the next start. On a disk without it the node goes on all the same.
    pub fn take(&self) {
        let path = self.path();
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).mode(0o600).open(&path);
        let taken = file.and_then(|file| {
            let taken = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, KEPT_BYTES);
            taken.map_err(std::io::Error::from)
        });
        if let Err(error) = taken {
            tracing::warn!(%error, path = %path.display(), "no room is kept for the next start");
            self.release();
        }
    }
}
