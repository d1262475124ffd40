//! Leases on layers and environments: kept on the store, ended by time.

use crate::images::{Images, locked};
use layer::{Digest, EnvId, Error, LayerId, Result};
use std::time::{Duration, Instant};
use store::{Collectable, Lease, MAX_CLOCK_SKEW};

/// How long a lease lasts when nobody says, in milliseconds.
pub(crate) const DEFAULT_TTL_MS: u64 = 10 * 60 * 1000;
/// The longest lease, in milliseconds: what a dead holder can pin at most.
const MAX_TTL_MS: u64 = 7 * 24 * 3600 * 1000;
/// How often leases that have ended are cleared away.
const SWEEP_EVERY: Duration = Duration::from_secs(600);

impl Images {
    /// Pins layers and environments, all of which must exist.
    pub(crate) fn acquire_lease(
        &self,
        holder: &str,
        ids: Vec<Digest>,
        ttl_ms: u64,
    ) -> Result<Lease> {
        let lease = self.put_lease(holder, ids, "pin", ttl_ms)?;
        match self.check_pinned(&lease.ids) {
            Ok(()) => Ok(lease),
            Err(error) => {
                self.give_back(&lease.id);
                Err(error)
            }
        }
    }

    /// Whether everything that a lease was put on is there and stays.
    fn check_pinned(&self, ids: &[Digest]) -> Result<()> {
        self.await_deletions(|doomed| match doomed {
            Collectable::Layer(id) => ids.contains(&Digest(id.0)),
            Collectable::Environment(id) => ids.contains(&Digest(id.0)),
            _ => false,
        })?;
        for id in ids {
            if !self.store.has_layer(&LayerId(id.0))?
                && !self.store.has_environment(&EnvId(id.0))?
            {
                return Err(Error::not_found(format!(
                    "{id} is neither a layer nor an environment of this store; `lamella ls` lists what there is"
                )));
            }
        }
        Ok(())
    }

    pub(crate) fn put_lease(
        &self,
        holder: &str,
        ids: Vec<Digest>,
        purpose: &str,
        ttl_ms: u64,
    ) -> Result<Lease> {
        let ttl_ms = checked_ttl(ttl_ms)?;
        self.sweep_leases();
        let lease = self.store.put_lease(holder, ids, purpose, ttl_ms)?;
        self.meters.leases.add(1);
        Ok(lease)
    }

    /// Ends a lease; one that ended already is fine.
    pub(crate) fn release_lease(&self, id: &str) -> Result<()> {
        self.store.delete_lease(id)?;
        self.meters.leases_ended.add(1);
        Ok(())
    }

    /// Clears leases of dead holders away, now and then. Only space is at stake, so a failure is told and no more.
    fn sweep_leases(&self) {
        {
            let mut swept = locked(&self.swept);
            if swept.is_some_and(|at| at.elapsed() < SWEEP_EVERY) {
                return;
            }
            *swept = Some(Instant::now());
        }
        let sweep = || -> Result<()> {
            let skew = u64::try_from(MAX_CLOCK_SKEW.as_nanos()).unwrap_or(u64::MAX);
            let ended = self.now().saturating_sub(skew);
            let leases = self.store.list_leases()?;
            for lease in leases.iter().filter(|lease| lease.has_expired(ended)) {
                self.release_lease(&lease.id)?;
            }
            Ok(())
        };
        if let Err(error) = sweep() {
            tracing::warn!("ended leases stay: {}", error.chain());
        }
    }
}

fn checked_ttl(ttl_ms: u64) -> Result<u64> {
    match ttl_ms {
        0 => Ok(DEFAULT_TTL_MS),
        1..=MAX_TTL_MS => Ok(ttl_ms),
        _ => Err(Error::invalid(format!(
            "a lease of {ttl_ms} ms; at most {MAX_TTL_MS} ms, renew it instead"
        ))),
    }
}
