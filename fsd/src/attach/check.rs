//! `fsck` of a node's cache: every layer on it, in use or not.
//!
//! Locking: a layer that nobody serves is held by its lock while it is checked, so that an attach waits;
//! one that is served goes on meanwhile.
// CRASH: a repair is an eviction, or the removal of a folder: both may be broken off anywhere.

use super::{Attachments, lock};
use crate::cache::check::Checked;
use crate::fetch::Class;
use crate::served::ServedLayer;
use layer::{LayerId, Result};
use std::sync::Arc;

impl Attachments {
    /// Verifies everything that the cache holds of a layer; drops what is wrong when `repair` says so.
    pub fn check(&self, id: &LayerId, repair: bool) -> Result<Checked> {
        let entry = self.entry(id);
        let state = lock(&entry);
        match state.as_ref() {
            None => self.parts.cache.check_resting(id, repair),
            Some(live) => {
                let served = Arc::clone(&live.served);
                drop(state);
                self.check_served(&served, repair)
            }
        }
    }

    fn check_served(&self, served: &Arc<ServedLayer>, repair: bool) -> Result<Checked> {
        let cached = served.fetch().cached();
        let mut checked = self.parts.cache.check_description(&served.id());
        checked.served = true;
        let bad = cached.check_chunks(&mut checked);
        if !repair {
            return Ok(checked);
        }
        // The kernel may read this file by itself: its blocks stay, and are written over at once.
        cached.disown(&bad)?;
        for chunk in bad {
            let fetched = self.parts.engine.ensure(served.fetch(), chunk..chunk + 1, Class::Demand);
            fetched.map_err(|failure| failure.to_error())?;
            checked.repaired += 1;
        }
        cached.make_durable()?;
        Ok(checked)
    }
}
