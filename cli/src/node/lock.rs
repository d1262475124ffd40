//! Who owns a data directory, and who uses its node.
//!
//! Files below `run/`, each locked with flock(2), which the kernel releases when its holder dies, however it
//! dies:
//! - `node.lock`: held by the one node process; its content is the node's pid and store.
//! - `catalog.lock`: held by the one process that has the catalog open, a node or an embedded command.
//! - `users.lock`: held *shared* by every command that talks to a node, for as long as it runs. A node
//!   that is to end with its last user takes it exclusively first, so that no command can find a node
//!   that is about to go.
//! - `mounts/<digest of a directory>.lock`: held by the one command that changes what is mounted there.
//!
//! What survives a crash: the files, with no lock on them. Their content is only read while the lock is
//! held by somebody.

use layer::{Context, Error, ErrorKind, Result};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// What a node writes about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// The process.
    pub pid: u32,
    /// The store it serves.
    pub store: String,
}

impl Owner {
    fn encode(&self) -> String {
        format!("{}\n{}\n", self.pid, self.store)
    }

    fn decode(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let pid = lines.next()?.parse().ok()?;
        Some(Self { pid, store: lines.next()?.to_owned() })
    }
}

/// An exclusive lock that is released when this is dropped.
#[derive(Debug)]
pub struct Exclusive {
    _file: File,
}

impl Exclusive {
    /// Leaves the lock to the end of the process, so that it outlives what other threads still close.
    pub fn keep_to_the_end(self) {
        std::mem::forget(self);
    }
}

/// A shared lock that is released when this is dropped.
#[derive(Debug)]
pub struct Shared {
    _file: File,
}

fn open(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .context(|| format!("open {}", path.display()))
}

/// Takes the lock and writes who holds it. `Ok(Err(owner))` when another process has it; the owner is
/// unknown for the moment between its lock and its write.
pub fn try_exclusive(path: &Path, owner: &Owner) -> Result<Result<Exclusive, Option<Owner>>> {
    let mut file = open(path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(Err(read_owner(&mut file))),
        Err(TryLockError::Error(error)) => {
            return Err(Error::io(format!("lock {}", path.display()), error));
        }
    }
    file.set_len(0)
        .and_then(|()| file.write_all(owner.encode().as_bytes()))
        .context(|| format!("write {}", path.display()))?;
    Ok(Ok(Exclusive { _file: file }))
}

/// Who holds the lock now; `None` when nobody does.
pub fn holder(path: &Path) -> Result<Option<Owner>> {
    let mut file = match OpenOptions::new().read(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(format!("open {}", path.display()), error)),
    };
    match file.try_lock_shared() {
        Ok(()) => Ok(None),
        Err(TryLockError::WouldBlock) => Ok(read_owner(&mut file)),
        Err(TryLockError::Error(error)) => {
            Err(Error::io(format!("lock {}", path.display()), error))
        }
    }
}

fn read_owner(file: &mut File) -> Option<Owner> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(8192).read_to_string(&mut text).ok()?;
    Owner::decode(&text)
}

/// Waits for a shared lock.
pub fn shared(path: &Path) -> Result<Shared> {
    let file = open(path)?;
    file.lock_shared().context(|| format!("lock {}", path.display()))?;
    Ok(Shared { _file: file })
}

/// Waits until no process has the lock, shared or exclusive, and takes it.
pub fn exclusive(path: &Path) -> Result<Exclusive> {
    let file = open(path)?;
    file.lock().context(|| format!("lock {}", path.display()))?;
    Ok(Exclusive { _file: file })
}

/// Takes the lock if no process has it, shared or exclusive.
pub fn try_sole(path: &Path) -> Result<Option<Exclusive>> {
    let file = open(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(Exclusive { _file: file })),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => {
            Err(Error::io(format!("lock {}", path.display()), error))
        }
    }
}

/// The refusal of a second node.
pub fn second_node(data: &Path, owner: Option<&Owner>) -> Error {
    let who =
        owner.map_or_else(|| "a process".to_owned(), |owner| format!("process {}", owner.pid));
    Error::new(ErrorKind::Busy, format!("a node is already running on {}: {who}", data.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_owner_learns_who_the_first_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("node.lock");
        assert_eq!(holder(&path).unwrap(), None);
        let owner = Owner { pid: 42, store: "file:///a b".to_owned() };
        let lock = try_exclusive(&path, &owner).unwrap().unwrap();
        assert_eq!(try_exclusive(&path, &owner).unwrap().unwrap_err(), Some(owner.clone()));
        assert_eq!(holder(&path).unwrap(), Some(owner.clone()));
        drop(lock);
        assert_eq!(holder(&path).unwrap(), None);
        let next = Owner { pid: 7, store: String::new() };
        let _lock = try_exclusive(&path, &next).unwrap().unwrap();
        assert_eq!(holder(&path).unwrap(), Some(next));
    }

    #[test]
    fn users_keep_the_sole_lock_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("users.lock");
        let (one, two) = (shared(&path).unwrap(), shared(&path).unwrap());
        assert!(try_sole(&path).unwrap().is_none());
        drop((one, two));
        assert!(try_sole(&path).unwrap().is_some());
    }
}
