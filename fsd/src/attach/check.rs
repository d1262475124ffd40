//! `fsck` of a node's cache: every layer on it, in use or not.
//!
//! Locking: a layer that nobody serves is held by its lock while it is checked, so that an attach waits;
//! one that is served goes on meanwhile.
// CRASH: a repair is an eviction, or the removal of a folder: both may be broken off anywhere.

use super::{Attachments, lock};
use crate::cache::check::Findings;
use crate::fetch::Class;
use crate::served::ServedLayer;
use layer::{Error, LayerId, Result};
use std::sync::Arc;

/// What was found in a layer, and what was done about it.
#[derive(Debug, Default)]
pub struct Checked {
    /// What was found.
    pub findings: Findings,
    /// How many damages are repaired.
    pub repaired: u64,
    /// Whether the layer is in use.
    pub served: bool,
}

impl Attachments {
    /// Verifies everything that the cache holds of a layer; drops what is wrong when `repair` says so.
    pub fn check(&self, id: &LayerId, repair: bool) -> Result<Checked> {
        let entry = self.entry(id);
        let state = lock(&entry);
        let cache = &self.parts.cache;
        if let Some(live) = state.as_ref() {
            let served = Arc::clone(&live.served);
            drop(state);
            return self.check_served(&served, repair);
        }
        if !cache.folder_of(id).exists() {
            return Err(Error::not_found(format!("layer {id} is not on this node")));
        }
        let mut checked = Checked { findings: cache.check_description(id), ..Checked::default() };
        let findings = &mut checked.findings;
        if !findings.ruined {
            let cached = cache.open_dormant(id)?;
            cached.check_chunks(findings);
            if repair && findings.damages > 0 {
                cached.evict(&findings.bad_chunks)?;
                // A presence file without a state gets one.
                cached.make_durable()?;
                checked.repaired = findings.damages;
            }
        } else if repair {
            cache.remove(id)?;
            checked.repaired = findings.damages;
        }
        Ok(checked)
    }

    fn check_served(&self, served: &Arc<ServedLayer>, repair: bool) -> Result<Checked> {
        let cached = served.fetch().cached();
        let findings = self.parts.cache.check_description(&served.id());
        let mut checked = Checked { findings, repaired: 0, served: true };
        let findings = &mut checked.findings;
        cached.check_chunks(findings);
        if !repair {
            return Ok(checked);
        }
        // The kernel may read this file by itself: its blocks stay, and are written over at once.
        cached.disown(&findings.bad_chunks)?;
        for chunk in &findings.bad_chunks {
            let fetched =
                self.parts.engine.ensure(served.fetch(), *chunk..*chunk + 1, Class::Demand);
            fetched.map_err(|failure| failure.to_error())?;
            checked.repaired += 1;
        }
        cached.make_durable()?;
        Ok(checked)
    }
}
