//! Deleting what is due: say it, look at the uses once more, delete.
//!
//! INVARIANT: between the notice and the deletion every use that began before the notice is seen. Whoever
//! begins later sees the notice, and waits.

use super::Run;
use layer::{EnvId, LayerId, Result};
use std::collections::HashSet;
use store::{Collectable, Collector, Condemned};

/// Things deleted under one notice: whoever wants one of them waits that long.
const BATCH: usize = 2048;

impl Run<'_> {
    pub(super) fn sweep(&mut self, collector: &mut Collector) -> Result<()> {
        let due = self.due();
        let mut gone = HashSet::new();
        for batch in due.chunks(BATCH) {
            let swept = self.sweep_batch(collector, batch, &mut gone);
            // Also after a failure, while this is the collector: others wait for it.
            if collector.in_time().is_ok() {
                self.images.store.clear_doomed()?;
            }
            swept?;
        }
        if !gone.is_empty() {
            self.condemned.retain(|what, _| !gone.contains(what));
            collector.check()?;
            self.images.store.put_condemned(&self.condemned)?;
        }
        self.done.deleted = gone.len() as u64;
        self.count();
        Ok(())
    }

    fn sweep_batch(
        &mut self,
        collector: &mut Collector,
        batch: &[Collectable],
        gone: &mut HashSet<Collectable>,
    ) -> Result<()> {
        collector.check()?;
        let since = |what: &Collectable| self.condemned.get(what).copied().unwrap_or(0);
        let doomed: Condemned = batch.iter().map(|what| (*what, since(what))).collect();
        self.images.store.put_doomed(&doomed)?;
        self.look_again()?;
        let (free, used): (Vec<_>, Vec<_>) =
            batch.iter().partition(|what| self.is_over(what) && self.is_free(what));
        for what in used {
            tracing::info!("{what} is used again");
        }
        for what in &free {
            collector.in_time()?;
            self.done.freed_bytes += self.images.store.collect(what, &self.stock)?;
            self.done.note("deleted", what);
            gone.insert(*what);
        }
        self.images.catalog.drop_collected(&free.into_iter().collect())
    }

    /// Marks what came into use since. Leases are read first: whoever gives one back has written the name by
    /// then that the lists below show.
    fn look_again(&mut self) -> Result<()> {
        let found = self.roots.read(self.images)?;
        let store = &self.images.store;
        let environments: Vec<EnvId> = store.list_environments()?;
        let layers: Vec<LayerId> = store.list_layers()?;
        self.marks.mark(&found)?;
        let stock = &self.stock;
        let new = environments.into_iter().filter(|id| !stock.environments.contains(id));
        let new_environments: Vec<EnvId> = new.collect();
        let new = layers.into_iter().filter(|id| !stock.layers.contains(id));
        let new_layers: Vec<LayerId> = new.collect();
        self.marks.keep_environments(&new_environments)?;
        self.marks.keep_layers(&new_layers)?;
        self.keep_what_stays()?;
        if !self.stock.tars.is_empty() {
            self.stock.framings = store.framings()?;
            self.look_at_tars();
        }
        Ok(())
    }
}
