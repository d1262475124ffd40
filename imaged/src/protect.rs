//! Making sure that what is about to be used is not being deleted.
//!
//! Whoever begins to use something writes the use down first (a lease), and asks here afterwards. A collector
//! does it the other way round: it says first what it deletes, and looks at the uses afterwards. So one of the
//! two sees the other; nothing depends on clocks (docs/decisions/0011).

use crate::images::Images;
use layer::{Error, ErrorKind, Result};
use std::time::Duration;
use store::{Collectable, Lease};

/// How long a deletion is waited for before the caller is told to come again.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often it is looked for meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long a name takes to be written at most.
const NAMING_TTL_MS: u64 = 10 * 60 * 1000;

impl Images {
    /// Returns when nothing that is `wanted` is being deleted. True when that took waiting: then what was known
    /// of it before is worth nothing.
    pub(crate) fn await_deletions(&self, wanted: impl Fn(&Collectable) -> bool) -> Result<bool> {
        let clock = self.store.clock();
        let begin = clock.now_unix_ns();
        let mut waited = false;
        loop {
            let doomed = match self.store.doomed() {
                Ok(doomed) => doomed.keys().any(&wanted),
                // It may be anything.
                Err(error) if error.kind() == ErrorKind::Corrupt => true,
                Err(error) => return Err(error),
            };
            if !doomed {
                return Ok(waited);
            }
            waited = true;
            match self.store.collect_alone() {
                // Who said that is dead, and deletes nothing any more.
                Ok(collector) => {
                    self.store.clear_doomed()?;
                    collector.release()?;
                }
                Err(error) if error.kind() == ErrorKind::Busy => clock.sleep(LOOK_EVERY),
                Err(error) => return Err(error),
            }
            let patience = u64::try_from(PATIENCE.as_nanos()).unwrap_or(u64::MAX);
            if clock.now_unix_ns().saturating_sub(begin) > patience {
                return Err(Error::new(
                    ErrorKind::Busy,
                    "what is asked for is just being collected; try again in a minute",
                ));
            }
        }
    }

    /// Protects `what` for as long as it takes to name it. The lease ends by [`Images::release_lease`], or by time.
    pub(crate) fn protect(&self, what: Collectable) -> Result<Lease> {
        let ids = match what {
            Collectable::Layer(id) => vec![layer::Digest(id.0)],
            Collectable::Environment(id) => vec![layer::Digest(id.0)],
            Collectable::Image(id) => vec![id],
            Collectable::Pack(_) | Collectable::Tar(_) => Vec::new(),
        };
        let lease = self.put_lease("naming", ids, "a name is being written", NAMING_TTL_MS)?;
        match self.await_deletions(|doomed| *doomed == what) {
            Ok(_) => Ok(lease),
            Err(error) => {
                self.give_back(&lease.id);
                Err(error)
            }
        }
    }

    /// Ends a lease that nobody needs any more; it would end by itself.
    pub(crate) fn give_back(&self, id: &str) {
        if let Err(error) = self.release_lease(id) {
            tracing::debug!("lease {id} ends by itself: {}", error.chain());
        }
    }
}
