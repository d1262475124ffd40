//! A keeper that is started where another one sits succeeds it: it takes what that one holds, and only then
//! has it leave.
//!
//! ```text
//! started -> lock free? ---yes---> sits, holding what it took (or nothing, for fsd to hand over)
//!              | no
//!              v
//!            connect -> take everything -> tell the other to leave -> wait for the lock
//! ```
//! That is how an upgrade replaces the keepers: the old program needs to know nothing of it.
// INVARIANT: the other keeper is told to leave only by who holds everything already, so a `kill -9` of either,
// at any moment, leaves one of them with everything, beside the second keeper and fsd.
// CRASH: this one dies before the other is told: that one sits on. It dies later: the lock is free, and fsd, or
// the next fsd, starts another and hands it what the second keeper holds.

use super::seats::{exchange, take};
use super::wire::Request;
use super::{Holdings, PATIENCE};
use crate::cache::lock_file;
use crate::config::Paths;
use layer::{ErrorKind, Result};
use std::fs::File;
use std::time::{Duration, Instant};
use sys::socket::Seqpacket;

/// How long the other keeper may take to end.
const END_PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(1);

/// Takes the seat of keeper `index`. `Busy` where the other one holds on to it.
pub fn sit_down(paths: &Paths, index: usize) -> Result<(File, Holdings)> {
    let deadline = Instant::now() + END_PATIENCE;
    let what = format!("keeper {index}");
    let mut holdings = None;
    loop {
        match lock_file(&paths.keeper_lock(index), &what) {
            Ok(lock) => return Ok((lock, holdings.unwrap_or_default())),
            Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < deadline => {}
            Err(error) => return Err(error),
        }
        if holdings.is_none() {
            // One that has the lock and does not listen yet, or not any more, is asked again.
            holdings = succeed(paths, index).unwrap_or_else(|error| {
                tracing::debug!(index, error = %error.chain(), "succeed a keeper");
                None
            });
        }
        std::thread::sleep(POLL);
    }
}

/// What the keeper that sits there held; it leaves.
fn succeed(paths: &Paths, index: usize) -> Result<Option<Holdings>> {
    let Ok(other) = Seqpacket::connect(&paths.keeper_socket(index)) else { return Ok(None) };
    let waited = other.set_timeout(Some(PATIENCE));
    waited.map_err(|error| layer::Error::io("limit the wait for a keeper", error))?;
    let (pid, held) = take(&other)?;
    let mut holdings = Holdings::default();
    if let Some(held) = held {
        holdings.shared = vec![held.group, held.journal];
        holdings.files = held.files.into_iter().map(|(layer, file)| (layer.0, file)).collect();
    }
    // Where it has died meanwhile, its lock is free and what it held is here.
    if let Err(error) = exchange(&other, Request::Leave, &[]) {
        tracing::debug!(index, pid, error = %error.chain(), "a keeper is gone already");
    }
    tracing::info!(index, pid, files = holdings.files.len(), "succeeds a keeper");
    Ok(Some(holdings))
}
