//! Finding the keepers that are there, and taking what they hold, without starting any.
//!
//! One that holds everything may be unable to answer for a moment: its predecessor has left and it does not
//! listen yet. It is waited for; a new group beside it would be the end of every mount.

use super::{Inheritance, KEEPERS, PATIENCE, START_POLL, take};
use crate::config::Paths;
use crate::keeper::succession;
use layer::{Context, Error, ErrorKind, LayerId, Result};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use sys::socket::Seqpacket;

/// How long one that is about to sit down, or to end, may be without an answer.
const REACH_PATIENCE: Duration = Duration::from_secs(10);

/// A connection to whoever listens there.
pub(super) fn connect(paths: &Paths, index: usize) -> Result<Seqpacket> {
    let name = || format!("connect to keeper {index}");
    let connection = Seqpacket::connect(&paths.keeper_socket(index)).context(name)?;
    connection.set_timeout(Some(PATIENCE)).context(name)?;
    Ok(connection)
}

/// The keeper that sits there, or is about to, and what it holds; nothing where there is none.
pub(super) fn reach(
    paths: &Paths,
    index: usize,
) -> Result<Option<(Seqpacket, u32, Option<Inheritance>)>> {
    let deadline = Instant::now() + REACH_PATIENCE;
    let mut failed = Error::new(ErrorKind::Unavailable, "it does not sit down");
    loop {
        // INVARIANT: held while we ask, so that nobody succeeds the one that we take from.
        if let Some(_heir) = succession::look_at(paths, index)? {
            match connect(paths, index).and_then(|keeper| Ok((take(&keeper)?, keeper))) {
                Ok(((pid, held), keeper)) => return Ok(Some((keeper, pid, held))),
                Err(_) if !succession::is_taken(paths, index)? => return Ok(None),
                Err(error) => failed = error,
            }
        }
        if Instant::now() > deadline {
            return Err(failed.context(format!("ask keeper {index}, which is there")));
        }
        std::thread::sleep(START_POLL);
    }
}

/// What keepers of a data directory without a daemon hold: data files that were opened before they were
/// marked. Empty where no keeper lives; an error when one does and does not answer.
pub fn held_files(paths: &Paths) -> Result<BTreeMap<LayerId, OwnedFd>> {
    let mut failed = None;
    if !paths.run.exists() {
        return Ok(BTreeMap::new());
    }
    for index in 0..KEEPERS {
        match reach(paths, index) {
            Ok(None | Some((_, _, None))) => {}
            Ok(Some((_, _, Some(held)))) => return Ok(held.files),
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or_else(|| Ok(BTreeMap::new()), Err)
}
