//! Compaction: what is in use of packs that are mostly waste, and of many small packs, moves to new packs.
//!
//! The copies are entered in the catalog and in fresh location hints; the old packs are condemned like
//! everything else without a use, so readers with old hints have the whole grace to notice.
//!
//! // CRASH: copies that nobody has entered yet are found by every daemon's next look at the store, or condemned.

use super::Run;
use crate::upload::PACK_BYTES;
use layer::{ErrorKind, PackId, Result};
use std::collections::{BTreeSet, HashSet};
use store::codec::verify_chunk;
use store::{Collectable, Collector, PackWriter};

/// A pack below this is small.
const SMALL_BYTES: u64 = 8 << 20;
/// Small packs are put together when they make a whole one of this, or are that many.
const WORTHWHILE_BYTES: u64 = 64 << 20;
const WORTHWHILE_PACKS: usize = 64;

impl Run<'_> {
    /// Copies what is worth it. Returns the packs that nothing needs any more.
    pub(super) fn compact(&mut self, collector: &mut Collector) -> Result<BTreeSet<Collectable>> {
        let chosen = self.chosen();
        if chosen.is_empty() {
            return Ok(BTreeSet::new());
        }
        let mut moved = BTreeSet::new();
        let mut waiting: Vec<PackId> = Vec::new();
        let mut writer: Option<PackWriter> = None;
        for pack in chosen {
            collector.check()?;
            match self.copy_pack(&pack, &mut writer) {
                Ok(()) => waiting.push(pack),
                Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => {
                    tracing::warn!("pack {pack} stays as it is: {}", error.chain());
                }
                Err(error) => return Err(error),
            }
            if writer.as_ref().is_some_and(|writer| writer.stored_bytes() >= PACK_BYTES) {
                self.seal(writer.take())?;
                moved.extend(waiting.drain(..).map(Collectable::Pack));
            }
        }
        self.seal(writer.take())?;
        moved.extend(waiting.into_iter().map(Collectable::Pack));
        self.done.compacted_packs = moved.len() as u64;
        self.refresh_hints(collector, &moved)?;
        Ok(moved)
    }

    /// The packs to copy, those with the least in use first.
    fn chosen(&self) -> Vec<PackId> {
        let percent = u64::from(self.options.compact_below_percent);
        if percent == 0 {
            return Vec::new();
        }
        let mut chosen: Vec<(u64, PackId)> = Vec::new();
        let mut small: Vec<(u64, PackId)> = Vec::new();
        let here = |pack: &PackId| self.stock.packs.contains(pack);
        for (pack, live) in self.marks.movable().filter(|(pack, _)| here(pack)) {
            let all = self.marks.stored_bytes(&pack);
            if live * 100 < all * percent {
                chosen.push((live, pack));
            } else if all < SMALL_BYTES {
                small.push((live, pack));
            }
        }
        let bytes: u64 = small.iter().map(|(live, _)| live).sum();
        if bytes >= WORTHWHILE_BYTES || small.len() >= WORTHWHILE_PACKS {
            chosen.append(&mut small);
        }
        chosen.sort_unstable();
        chosen.into_iter().map(|(_, pack)| pack).collect()
    }

    fn copy_pack(&mut self, pack: &PackId, writer: &mut Option<PackWriter>) -> Result<()> {
        let store = &self.images.store;
        let mut payload = Vec::new();
        for (ordinal, entry) in (0..).zip(store.read_pack_footer(pack)?) {
            if !self.marks.has(pack, ordinal) {
                continue;
            }
            payload.resize(entry.stored_bytes as usize, 0);
            store.read_pack(pack, entry.offset, &mut payload)?;
            verify_chunk(&payload, entry.codec, entry.plain_bytes, &entry.digest)?;
            let mut open = match writer.take() {
                Some(open) => open,
                None => store.pack_writer()?,
            };
            open.append(entry.digest, entry.codec, entry.plain_bytes, &payload)?;
            *writer = Some(open);
            self.done.copied_bytes += u64::from(entry.stored_bytes);
        }
        Ok(())
    }

    fn seal(&mut self, writer: Option<PackWriter>) -> Result<()> {
        let Some(writer) = writer.filter(|writer| !writer.is_empty()) else { return Ok(()) };
        let sealed = writer.finish()?;
        self.images.catalog.put_pack(&sealed.id, &sealed.entries)
    }

    /// Writes the hints of layers anew whose hints name a pack that is about to go.
    fn refresh_hints(
        &self,
        collector: &mut Collector,
        moved: &BTreeSet<Collectable>,
    ) -> Result<()> {
        let gone: HashSet<PackId> = moved
            .iter()
            .filter_map(|what| match what {
                Collectable::Pack(id) => Some(*id),
                _ => None,
            })
            .collect();
        for layer in self.marks.layers() {
            let hint = self.images.store.read_locations(layer)?;
            if hint.is_some_and(|hint| hint.packs.iter().any(|pack| gone.contains(pack))) {
                collector.check()?;
                self.images.write_locations(layer)?;
            }
        }
        Ok(())
    }
}
