//! Marks: from the roots to environments, layers, and one bit for every chunk in use.
//!
//! A chunk that lies in several packs is in use in the one that the catalog knows. `uses` says what the roots
//! reach, `keeps` what is reached from things that nothing uses and that stay for now.

use super::Collected;
use super::roots::Found;
use crate::catalog::{ChunkPlace, PackRecord};
use crate::images::Images;
use layer::chunk::ChunkTable;
use layer::environment::Environment;
use layer::reference::Target;
use layer::{ChunkDigest, Context, Digest, EnvId, Error, ErrorKind, LayerId, PackId, Result};
use std::collections::{HashMap, HashSet};
use std::thread;
use store::Collectable;

/// Chunk tables that are read at the same time: a distant store answers several at once.
const READERS: usize = 8;
/// Chunks looked up at once.
const LOOKUP: usize = 4096;

/// What to do about a layer of which nobody can say what it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Damage {
    /// It is in use: nothing is collected.
    Stops,
    /// It is not in use, and nobody can begin to use it.
    Passed,
}

/// The chunks of one pack that are in use.
#[derive(Debug, Default)]
struct Use {
    bits: Vec<u64>,
    chunks: u64,
    stored_bytes: u64,
}

impl Use {
    fn set(&mut self, ordinal: u32, stored_bytes: u32) {
        let (word, bit) = (ordinal as usize / 64, 1 << (ordinal % 64));
        if self.bits.len() <= word {
            self.bits.resize(word + 1, 0);
        }
        if self.bits[word] & bit == 0 {
            self.bits[word] |= bit;
            self.chunks += 1;
            self.stored_bytes += u64::from(stored_bytes);
        }
    }

    fn has(&self, ordinal: u32) -> bool {
        self.bits.get(ordinal as usize / 64).is_some_and(|word| word >> (ordinal % 64) & 1 == 1)
    }
}

pub(super) struct Marks<'a> {
    images: &'a Images,
    records: HashMap<PackId, PackRecord>,
    layers: HashSet<LayerId>,
    environments: HashSet<EnvId>,
    documents: HashSet<Digest>,
    packs: HashMap<PackId, Use>,
    pinned: HashSet<PackId>,
    kept_environments: HashSet<EnvId>,
    kept_layers: HashSet<LayerId>,
    kept_documents: HashSet<Digest>,
    kept_packs: HashSet<PackId>,
    missing_chunks: u64,
    /// Every footer was read again in this run, because a chunk was missing.
    reread: bool,
}

impl<'a> Marks<'a> {
    pub(super) fn new(images: &'a Images) -> Result<Self> {
        Ok(Self {
            images,
            records: images.catalog.pack_records()?,
            layers: HashSet::new(),
            environments: HashSet::new(),
            documents: HashSet::new(),
            packs: HashMap::new(),
            pinned: HashSet::new(),
            kept_environments: HashSet::new(),
            kept_layers: HashSet::new(),
            kept_documents: HashSet::new(),
            kept_packs: HashSet::new(),
            missing_chunks: 0,
            reread: false,
        })
    }

    /// Marks all that these roots reach.
    pub(super) fn mark(&mut self, found: &Found) -> Result<()> {
        self.pinned.extend(&found.packs);
        let mut layers = Vec::new();
        for (reference, target) in &found.current {
            let name = || format!("{reference} points to {target}; `lamella fsck` says more");
            match target {
                Target::Layer(id) => {
                    if !self.layers.contains(id) && !self.images.store.has_layer(id)? {
                        return Err(Error::corrupt(format!("{id} is lost")).context(name()));
                    }
                    layers.push(*id);
                }
                Target::Environment(id) => self.environment(id, &mut layers).context(name)?,
            }
        }
        for target in &found.former {
            match target {
                Target::Layer(id) => layers.push(*id),
                Target::Environment(id) => absent_is_fine(self.environment(id, &mut layers))?,
            }
        }
        for id in &found.leased {
            layers.push(LayerId(id.0));
            absent_is_fine(self.environment(&EnvId(id.0), &mut layers))?;
        }
        self.documents.extend(&found.leased);
        layers.sort_unstable();
        layers.dedup();
        layers.retain(|id| !self.layers.contains(id));
        self.each_table(&layers, Damage::Stops, |marks, id, table| {
            marks.layers.insert(id);
            marks.chunks(&table, Self::set)
        })
    }

    fn environment(&mut self, id: &EnvId, layers: &mut Vec<LayerId>) -> Result<()> {
        if self.environments.contains(id) {
            return Ok(());
        }
        let environment = self.images.store.read_environment(id)?;
        self.environments.insert(*id);
        self.documents.extend(environment.image);
        layers.extend(environment.layers);
        Ok(())
    }

    /// Keeps what environments need that stay though nothing uses them.
    pub(super) fn keep_environments(&mut self, ids: &[EnvId]) -> Result<()> {
        let mut layers = HashSet::new();
        for id in ids {
            if !self.kept_environments.insert(*id) {
                continue;
            }
            match self.images.store.read_environment(id) {
                Ok(Environment { layers: needed, image, .. }) => {
                    layers.extend(needed);
                    self.kept_documents.extend(image);
                }
                Err(error) => tolerable(error)?,
            }
        }
        let layers: Vec<_> = layers.into_iter().collect();
        self.keep_layers(&layers)
    }

    /// Keeps what layers need that stay though nothing uses them.
    pub(super) fn keep_layers(&mut self, ids: &[LayerId]) -> Result<()> {
        let is_new = |id: &&LayerId| !self.layers.contains(id) && !self.kept_layers.contains(id);
        let ids: Vec<LayerId> = ids.iter().filter(is_new).copied().collect();
        self.kept_layers.extend(&ids);
        self.each_table(&ids, Damage::Passed, |marks, _, table| {
            marks.chunks(&table, |marks, pack, _, _| _ = marks.kept_packs.insert(pack))
        })
    }

    /// Reads chunk tables, several at once. Layers that are absent are passed over.
    fn each_table(
        &mut self,
        ids: &[LayerId],
        damage: Damage,
        mut mark: impl FnMut(&mut Self, LayerId, ChunkTable) -> Result<()>,
    ) -> Result<()> {
        let store = &self.images.store;
        for part in ids.chunks(READERS) {
            let tables: Vec<_> = match part {
                [one] => vec![store.read_layer_tables(one)],
                _ => thread::scope(|scope| {
                    let readers: Vec<_> = part
                        .iter()
                        .map(|id| scope.spawn(move || store.read_layer_tables(id)))
                        .collect();
                    let died = || Err(Error::new(ErrorKind::Internal, "a reader died"));
                    readers
                        .into_iter()
                        .map(|reader| reader.join().unwrap_or_else(|_| died()))
                        .collect()
                }),
            };
            for (id, table) in part.iter().zip(tables) {
                // Once more, because a single bad read may be the reader's fault.
                let table = table.or_else(|_| store.read_layer_tables(id));
                match table {
                    Ok((_, table)) => mark(self, *id, table)?,
                    Err(error) if damage == Damage::Passed => tolerable(error)?,
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    Err(error) => {
                        return Err(
                            error.context("what it needs is not known; `lamella fsck` says more")
                        );
                    }
                }
            }
        }
        Ok(())
    }

    /// Calls `mark` for every chunk of a layer that lies in a pack.
    fn chunks(
        &mut self,
        table: &ChunkTable,
        mut mark: impl FnMut(&mut Self, PackId, u32, u32),
    ) -> Result<()> {
        let chunks = table.chunks();
        for part in chunks.chunks(LOOKUP) {
            let digests: Vec<ChunkDigest> =
                part.iter().filter(|chunk| !chunk.is_zero()).map(|chunk| chunk.digest).collect();
            for place in self.places(&digests)? {
                match place {
                    Some(place) => mark(self, place.pack, place.ordinal, place.stored_bytes),
                    None => self.missing_chunks += 1,
                }
            }
        }
        Ok(())
    }

    /// Where chunks lie; the store is looked at before one is called missing.
    fn places(&mut self, digests: &[ChunkDigest]) -> Result<Vec<Option<ChunkPlace>>> {
        let catalog = &self.images.catalog;
        let places = catalog.places(digests)?;
        if places.iter().all(Option::is_some) {
            return Ok(places);
        }
        // Published elsewhere a moment ago.
        self.images.refresh()?;
        let places = catalog.places(digests)?;
        if self.reread || places.iter().all(Option::is_some) {
            return Ok(places);
        }
        // Or in a pack that was entered before another copy of it was collected elsewhere.
        self.reread = true;
        self.images.reread_packs()?;
        self.records.extend(catalog.pack_records()?);
        catalog.places(digests)
    }

    fn set(&mut self, pack: PackId, ordinal: u32, stored_bytes: u32) {
        self.packs.entry(pack).or_default().set(ordinal, stored_bytes);
    }

    /// Whether the roots reach it.
    pub(super) fn uses(&self, what: &Collectable) -> bool {
        match what {
            Collectable::Environment(id) => self.environments.contains(id),
            Collectable::Image(id) => self.documents.contains(id),
            Collectable::Layer(id) => self.layers.contains(id),
            Collectable::Pack(id) => self.packs.contains_key(id) || self.pinned.contains(id),
            Collectable::Tar(_) => false,
        }
    }

    /// Whether something that stays needs it.
    pub(super) fn keeps(&self, what: &Collectable) -> bool {
        match what {
            Collectable::Image(id) => self.kept_documents.contains(id),
            Collectable::Layer(id) => self.kept_layers.contains(id),
            Collectable::Pack(id) => self.kept_packs.contains(id),
            Collectable::Environment(_) | Collectable::Tar(_) => false,
        }
    }

    /// Of packs whose contents are not known nobody can say that they are of no use.
    pub(super) fn may_judge(&self, what: &Collectable) -> bool {
        !matches!(what, Collectable::Pack(id) if !self.records.contains_key(id))
    }

    pub(super) fn layers(&self) -> &HashSet<LayerId> {
        &self.layers
    }

    pub(super) fn stored_bytes(&self, pack: &PackId) -> u64 {
        self.records.get(pack).map_or(0, |record| record.stored_bytes)
    }

    /// Packs with chunks in use, and how many bytes of them are; without those that leases or things that
    /// stay keep as they are.
    pub(super) fn movable(&self) -> impl Iterator<Item = (PackId, u64)> {
        self.packs
            .iter()
            .filter(|(id, _)| !self.pinned.contains(id) && !self.kept_packs.contains(id))
            .map(|(id, live)| (*id, live.stored_bytes))
    }

    /// Whether this chunk of a pack is in use.
    pub(super) fn has(&self, pack: &PackId, ordinal: u32) -> bool {
        self.packs.get(pack).is_some_and(|live| live.has(ordinal))
    }

    pub(super) fn count(&self, done: &mut Collected) {
        done.live_environments = self.environments.len() as u64;
        done.live_layers = self.layers.len() as u64;
        done.live_packs = self.packs.len() as u64;
        done.live_chunks = self.packs.values().map(|live| live.chunks).sum();
        done.live_bytes = self.packs.values().map(|live| live.stored_bytes).sum();
        done.missing_chunks = self.missing_chunks;
    }
}

/// A lease or the history may name what is not there, or not yet.
fn absent_is_fine(read: Result<()>) -> Result<()> {
    match read {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// What stays without a use and is damaged needs nothing any more: nobody can use it.
fn tolerable(error: Error) -> Result<()> {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::Corrupt | ErrorKind::Unsupported => {
            tracing::warn!("passed over: {}", error.chain());
            Ok(())
        }
        _ => Err(error),
    }
}
