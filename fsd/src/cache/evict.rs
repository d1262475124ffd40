//! Dropping chunks of a layer, in an order that no crash and no reader can see through.
//!
//! ```text
//! durable bits cleared and flushed -> readers kept out -> bits in memory cleared, blocks given back
//! ```
//! Only where every reader of the data file comes through [`CachedLayer::read`]: what the kernel reads
//! by itself is never punched, because it reads after it was let go, without a barrier. Nor is what a
//! virtual machine may have mapped.
//!
//! Locking: the durable state's mutex throughout, so that no flush sets a durable bit in between; the
//! access lock exclusively for the last step.
// CRASH: after the first step the chunk counts as absent while its bytes are still there. They are
// written over when it is fetched again, and given back when the layer is opened.

use super::entry::CachedLayer;
use layer::{Context, Result};
use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// Between which steps an eviction is, for whoever wants to break it off there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evicting {
    /// Nothing is done yet.
    Begun,
    /// The durable bits are cleared.
    Forgotten,
    /// The blocks of the first chunk are given back.
    Punched,
}

impl CachedLayer {
    /// Drops those of these chunks that are present. Answers the plain bytes that this freed.
    pub fn evict(&self, chunks: &[usize]) -> Result<u64> {
        self.evict_stepwise(chunks, |_| Ok(()))
    }

    /// These chunks count as absent from now on; their blocks stay as they are, for a kernel that reads
    /// the file by itself.
    pub fn disown(&self, chunks: &[usize]) -> Result<()> {
        self.drop_chunks(chunks, false, |_| Ok(())).map(|_| ())
    }

    /// As [`CachedLayer::evict`]; an error of `step` breaks it off there, as a crash would.
    pub(super) fn evict_stepwise(
        &self,
        chunks: &[usize],
        step: impl FnMut(Evicting) -> Result<()>,
    ) -> Result<u64> {
        self.drop_chunks(chunks, true, step)
    }

    fn drop_chunks(
        &self,
        chunks: &[usize],
        punch: bool,
        mut step: impl FnMut(Evicting) -> Result<()>,
    ) -> Result<u64> {
        let name = || format!("evict chunks of layer {}", self.id());
        let mut durable = self.durable.lock().unwrap_or_else(PoisonError::into_inner);
        if durable.retired || (punch && self.is_exposed()) {
            return Ok(0);
        }
        let table = self.table().chunks();
        let is_held = |chunk: &usize| self.has(*chunk) && !table[*chunk].is_zero();
        let held: Vec<usize> = chunks.iter().copied().filter(is_held).collect();
        if held.is_empty() {
            return Ok(0);
        }
        step(Evicting::Begun)?;
        self.durably_complete.store(false, Ordering::Release);
        let mut cleared = held.clone();
        cleared.retain(|chunk| durable.presence.clear(*chunk as u32));
        if !cleared.is_empty()
            && let Err(error) = self.write_presence(&mut durable)
        {
            // INVARIANT: what the disk may still say is not forgotten, or the next eviction would punch
            // without saying so first.
            for chunk in cleared {
                durable.presence.set(chunk as u32);
            }
            self.dirty.store(true, Ordering::Release);
            return Err(error).context(name);
        }
        step(Evicting::Forgotten)?;
        let mut freed = 0;
        let _alone = self.access.write().unwrap_or_else(PoisonError::into_inner);
        self.losses.fetch_add(1, Ordering::AcqRel);
        for chunk in &held {
            self.bits.clear(*chunk);
        }
        if !punch {
            return Ok(0);
        }
        for run in runs(held.iter().map(|chunk| table[*chunk].byte_range())) {
            // INVARIANT: no durable bit, no bit in memory and no reader before the bytes go.
            freed += run.end - run.start;
            self.files.punch(run).context(name)?;
            step(Evicting::Punched)?;
        }
        self.counters.evicted_bytes.fetch_add(freed, Ordering::Relaxed);
        Ok(freed)
    }

    /// Writes the durable state once more: where the file has lost it.
    pub(super) fn record(&self) -> Result<()> {
        self.write_presence(&mut self.durable.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Gives back the blocks of chunks that are not present: what a crash left behind a cleared bit, or
    /// before a bit that was not durable yet. Only before anybody reads or fills.
    pub(super) fn give_back_absent(&self) -> Result<()> {
        let chunks = self.table().chunks().iter().enumerate();
        let absent = chunks.filter(|(index, _)| !self.has(*index));
        for run in runs(absent.map(|(_, chunk)| chunk.byte_range())) {
            let name = || format!("give back blocks of layer {}", self.id());
            self.files.punch(run).context(name)?;
        }
        Ok(())
    }
}

/// Ranges in order, neighbours united.
pub(super) fn runs(ranges: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match runs.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => runs.push(range),
        }
    }
    runs
}
