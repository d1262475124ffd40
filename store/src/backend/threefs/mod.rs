//! A store in a directory of 3FS: names and writes through its mount, long reads by USRBIO where the host has
//! 3FS's library.
//!
//! The mount is a POSIX directory that lacks what [`super::posix`] does not use either: renames that do not
//! replace, xattrs, fallocate, locks, a flush of directories. What differs is time: another client's new name
//! may be taken for absent for some seconds, because the kernel remembers that it was. So a name that is
//! absent but is listed in its directory, which is not remembered, is waited for.
//!
//! Without the library (or with `usrbio=off`) every read goes through the mount; `lamella doctor` says so. A
//! ring that fails is made again, with the file opened again, and the read tried once more; then the read
//! goes through the mount, and rings rest for some seconds. Whatever is read is checked against digests
//! above.
//!
//! Locking: see [`rings`]. // CRASH: as in [`super::posix`].

mod rings;

use self::rings::Rings;
use super::posix::Posix;
use super::{Backend, Upload, too_short};
use crate::key::Key;
use layer::{Context, Error, ErrorKind, Result};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// The directory by which a 3FS mount is known, at its top.
const VIRTUAL: &str = "3fs-virt";
/// For how long a 3FS client may believe that a name is absent, and a little more.
const BELIEVED_ABSENT: Duration = Duration::from_secs(6);
/// Pause between two looks for a name.
const LOOK_PAUSE: Duration = Duration::from_millis(50);
/// Shorter reads go through the mount: they gain nothing from a ring.
const MIN_RING_BYTES: usize = 16 << 10;

/// How to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Usrbio {
    /// By USRBIO where the loader finds 3FS's library.
    IfThere,
    /// By USRBIO with this library; without it, opening fails.
    Library(PathBuf),
    /// Through the mount.
    Off,
}

/// Objects in a directory of 3FS.
#[derive(Debug)]
pub struct ThreeFs {
    posix: Posix,
    rings: Option<Rings>,
}

impl ThreeFs {
    /// Opens or creates the directory. The mount's top is `Invalid`: 3FS has a directory of its own there.
    pub fn open(root: &Path, usrbio: &Usrbio) -> Result<Self> {
        if root.join(VIRTUAL).is_dir() {
            let text = format!(
                "{} is the top of a 3FS; name a directory below it, as 3fs://{}/lamella",
                root.display(),
                root.display()
            );
            return Err(Error::invalid(text));
        }
        let posix = Posix::open(root)?;
        let rings = match Rings::open(posix.root(), usrbio) {
            Ok(rings) => rings,
            Err(error) if *usrbio == Usrbio::IfThere => {
                tracing::warn!(
                    "{}: reading through the mount: {}",
                    posix.root().display(),
                    error.chain()
                );
                None
            }
            Err(error) => return Err(error),
        };
        Ok(Self { posix, rings })
    }

    /// Does something that a remembered absence may spoil.
    fn looking<T>(&self, key: &Key, attempt: impl Fn() -> Result<T>) -> Result<T> {
        let until = Instant::now() + BELIEVED_ABSENT;
        loop {
            match attempt() {
                Err(error)
                    if error.kind() == ErrorKind::NotFound
                        && Instant::now() < until
                        && self.is_listed(key)
                        && !self.is_directory(key) =>
                {
                    thread::sleep(LOOK_PAUSE);
                }
                other => return other,
            }
        }
    }

    fn is_directory(&self, key: &Key) -> bool {
        self.posix.root().join(key.as_str()).is_dir()
    }

    /// Whether the directory of the object has its name.
    fn is_listed(&self, key: &Key) -> bool {
        is_listed(self.posix.root(), &self.posix.root().join(key.as_str()))
    }
}

/// Whether a name stands in its directory; of a directory that seems absent itself, whether that does.
fn is_listed(root: &Path, path: &Path) -> bool {
    let Some((parent, name)) = path.parent().zip(path.file_name()) else { return false };
    match fs::read_dir(parent) {
        Ok(mut entries) => entries.any(|entry| entry.is_ok_and(|entry| entry.file_name() == name)),
        Err(error) if error.kind() == io::ErrorKind::NotFound && parent != root => {
            is_listed(root, parent)
        }
        Err(_) => false,
    }
}

/// What a store at this place would read by: the mount point that 3FS's library tells, or why there is none.
/// Nothing is made.
pub fn probe(root: &Path, usrbio: &Usrbio) -> Result<PathBuf> {
    let there = root.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"));
    let (_, mount_point) = rings::load(there, usrbio)?;
    Ok(mount_point)
}

impl Backend for ThreeFs {
    fn read_at(&self, key: &Key, offset: u64, into: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(into.len() as u64);
        if end.is_none_or(|end| i64::try_from(end).is_err()) {
            return Err(too_short(key, offset, into.len()));
        }
        if let Some(rings) = self.rings.as_ref().filter(|_| into.len() >= MIN_RING_BYTES) {
            let open = || self.looking(key, || self.posix.open_object(key));
            if rings.read(key, open, offset, into)? {
                return Ok(());
            }
        }
        // A closure that is called again writes to the same bytes.
        let into = std::cell::RefCell::new(into);
        let read = || self.looking(key, || self.posix.read_at(key, offset, &mut into.borrow_mut()));
        match read() {
            // A file that was opened before the 3FS daemon was restarted is dead; a new one is not.
            Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {
                self.posix.forget(key);
                read()
            }
            other => other,
        }
    }

    fn read_all(&self, key: &Key, max_bytes: u64) -> Result<Vec<u8>> {
        self.looking(key, || self.posix.read_all(key, max_bytes))
    }

    fn size(&self, key: &Key) -> Result<u64> {
        self.looking(key, || self.posix.size(key))
    }

    fn create(&self, key: &Key) -> Result<Box<dyn Upload>> {
        self.posix.create(key)
    }

    fn list(&self, prefix: &str, start_after: Option<&str>, limit: usize) -> Result<Vec<String>> {
        self.posix.list(prefix, start_after, limit)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        if let Some(rings) = &self.rings {
            rings.forget(key);
        }
        self.posix.delete(key).context(|| format!("delete from {}", self.describe()))
    }

    fn local_path(&self, key: &Key) -> Option<PathBuf> {
        self.posix.local_path(key)
    }

    fn describe(&self) -> String {
        format!("3fs://{}", self.posix.root().display())
    }
}
