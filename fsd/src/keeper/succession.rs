//! A keeper that is started where another one sits succeeds it: it takes what that one holds, and only then
//! has it leave.
//!
//! ```text
//! started -> heir -> lock free? ---yes---> sits, holding what it took (or nothing, for fsd to hand over)
//!                     | no                   | listens: no heir any more
//!                     v
//!                   connect -> take everything -> tell the other to leave -> wait for the lock
//! ```
//! That is how an upgrade replaces the keepers: the old program needs to know nothing of it.
//!
//! Locking: the heir's lock (a file) before the seat's; one heir at a time. Whoever holds the heir's lock finds
//! either a keeper that listens, or one that is ending, or nobody: that is how a new fsd looks for keepers.
// INVARIANT: the other keeper is told to leave only by who holds everything already, so a `kill -9` of either,
// at any moment, leaves one of them with everything, beside the second keeper and fsd.
// INVARIANT: between the other's end and its own first answer a successor holds everything and cannot be asked.
// It has the heir's lock all that while, so a fsd that needs what it holds waits for it.
// CRASH: this one dies before the other is told: that one sits on. It dies later: the lock is free, and fsd, or
// the next fsd, starts another and hands it what the second keeper holds. Its fsd dies: it carries on, unless it
// is no heir yet; then it ends, so that the next fsd has nobody to reckon with whom it cannot see.

use super::seats::{exchange, take};
use super::wire::Request;
use super::{Holdings, PATIENCE};
use crate::cache::lock_file;
use crate::config::Paths;
use layer::{Context, Error, ErrorKind, Result};
use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};
use sys::socket::Seqpacket;

/// How long the other keeper may take to end, and another heir to sit down.
const END_PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(1);

/// A keeper in its seat.
pub struct Seated {
    /// To be closed when it listens.
    pub heir: File,
    /// Its seat, as long as it lives.
    pub lock: File,
    /// What it took from the one that sat there.
    pub holdings: Holdings,
}

/// What was taken from the other keeper.
struct Estate {
    holdings: Holdings,
    /// It has said that it ends.
    vacated: bool,
}

/// Takes the seat of keeper `index`. `Busy` where the other one holds on to it.
pub fn sit_down(paths: &Paths, index: usize) -> Result<Seated> {
    let what = format!("keeper {index}");
    let heir = become_heir(paths, index, &what)?;
    let deadline = Instant::now() + END_PATIENCE;
    let mut estate: Option<Estate> = None;
    loop {
        match lock_file(&paths.keeper_lock(index), &what) {
            Ok(lock) => {
                let holdings = estate.map(|estate| estate.holdings).unwrap_or_default();
                return Ok(Seated { heir, lock, holdings });
            }
            // The other one is ending, and nobody but this one holds what it held.
            Err(_) if estate.as_ref().is_some_and(|estate| estate.vacated) => {}
            Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < deadline => {}
            Err(error) => return Err(error),
        }
        if estate.is_none() {
            if !is_wanted(paths) {
                return Err(Error::new(ErrorKind::Busy, format!("{what}: its fsd is dead")));
            }
            // One that has the lock and does not listen yet, or not any more, is asked again.
            estate = succeed(paths, index).unwrap_or_else(|error| {
                tracing::debug!(index, error = %error.chain(), "succeed a keeper");
                None
            });
        }
        std::thread::sleep(POLL);
    }
}

fn become_heir(paths: &Paths, index: usize, what: &str) -> Result<File> {
    let deadline = Instant::now() + END_PATIENCE;
    loop {
        match lock_file(&paths.keeper_heir(index), what) {
            Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < deadline => {}
            other => return other,
        }
        std::thread::sleep(POLL);
    }
}

/// Whether the fsd that started this process is still the one of the data directory.
fn is_wanted(paths: &Paths) -> bool {
    let parent = std::os::unix::process::parent_id().to_string();
    std::fs::read_to_string(paths.lock()).is_ok_and(|pid| pid.trim() == parent)
}

/// The heir's lock of a seat, for somebody who only looks; nothing while a keeper is about to sit down.
pub fn look_at(paths: &Paths, index: usize) -> Result<Option<File>> {
    try_lock(&paths.keeper_heir(index))
}

/// Whether a keeper has the seat. Only while the heir's lock is held.
pub fn is_taken(paths: &Paths, index: usize) -> Result<bool> {
    Ok(try_lock(&paths.keeper_lock(index))?.is_none())
}

fn try_lock(path: &Path) -> Result<Option<File>> {
    let name = || format!("lock {}", path.display());
    let mut options = File::options();
    let file = options.write(true).create(true).truncate(false).open(path).context(name)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error).context(name),
    }
}

/// What the keeper that sits there held; it leaves.
fn succeed(paths: &Paths, index: usize) -> Result<Option<Estate>> {
    let Ok(other) = Seqpacket::connect(&paths.keeper_socket(index)) else { return Ok(None) };
    let waited = other.set_timeout(Some(PATIENCE));
    waited.map_err(|error| Error::io("limit the wait for a keeper", error))?;
    let (pid, held) = take(&other)?;
    let mut holdings = Holdings::default();
    if let Some(held) = held {
        holdings.shared = vec![held.group, held.journal];
        holdings.files = held.files.into_iter().map(|(layer, file)| (layer.0, file)).collect();
    }
    let left = exchange(&other, Request::Leave, &[]);
    // Where it has died meanwhile, its lock is free and what it held is here.
    if let Err(error) = &left {
        tracing::debug!(index, pid, error = %error.chain(), "a keeper is gone already");
    }
    tracing::info!(index, pid, files = holdings.files.len(), "succeeds a keeper");
    Ok(Some(Estate { holdings, vacated: left.is_ok() }))
}
