//! Keeping the catalog in step with the store, and finding chunks by both.
//!
//! What the catalog knows may be gone (a collection elsewhere), and what it does not know may be there (a publish
//! elsewhere). So a pack is looked for on the store before anything relies on it, and a miss makes the daemon list
//! the store's packs before it says no.

use crate::catalog::{ChunkPlace, LayerRecord};
use crate::images::{Images, locked};
use layer::chunk::ChunkTable;
use layer::location::{Locations, Placement};
use layer::manifest::Manifest;
use layer::{ChunkDigest, ErrorKind, LayerId, PackId, Result};
use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Threads that read footers: a distant store answers several at once.
const FOOTER_READERS: usize = 8;
/// Digests looked up at once.
const LOOKUP: usize = 4096;

/// What a full pass over the store found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Reindexed {
    pub(crate) packs: u64,
    pub(crate) chunks: u64,
    pub(crate) layers: u64,
    pub(crate) environments: u64,
    pub(crate) references: u64,
    /// Objects that are not what their names say; they are left out, and named in the log.
    pub(crate) damaged: u64,
}

impl Reindexed {
    /// What was read, or nothing where it is left out, which is counted.
    fn sound<T>(&mut self, read: Result<T>) -> Result<Option<T>> {
        match read {
            Ok(value) => Ok(Some(value)),
            Err(error) => {
                self.damaged += leave_out(error)?;
                Ok(None)
            }
        }
    }
}

/// Where the chunks of one layer lie.
#[derive(Debug)]
pub(crate) struct Located {
    /// Whole only when nothing is missing.
    pub(crate) locations: Locations,
    pub(crate) missing: Vec<ChunkDigest>,
    pub(crate) stored_bytes: u64,
}

impl Images {
    /// Enters packs that others published and forgets packs that are gone.
    pub(crate) fn refresh(&self) -> Result<()> {
        let _one = locked(&self.indexing);
        let listed = self.store.list_packs()?;
        let mut known = self.catalog.packs()?;
        let gone: HashSet<PackId> = {
            let listed: HashSet<&PackId> = listed.iter().collect();
            known.iter().filter(|pack| !listed.contains(pack)).copied().collect()
        };
        if !gone.is_empty() {
            tracing::warn!("{} packs are gone from the store", gone.len());
            self.catalog.forget_packs(&gone)?;
            known.clear();
        }
        let new: Vec<PackId> = listed.into_iter().filter(|pack| !known.contains(pack)).collect();
        self.enter_packs(&new).map(drop)
    }

    /// Reads the footers of all packs again: a chunk whose pack is gone may lie in another one that was entered
    /// before.
    pub(crate) fn reread_packs(&self) -> Result<()> {
        let _one = locked(&self.indexing);
        self.enter_packs(&self.store.list_packs()?).map(drop)
    }

    /// Rebuilds everything from the store alone. Calls that run meanwhile see the old or the new.
    pub(crate) fn reindex(&self) -> Result<Reindexed> {
        let one = locked(&self.indexing);
        let packs = self.store.list_packs()?;
        let mut found = Reindexed { damaged: self.enter_packs(&packs)?, ..Reindexed::default() };
        found.packs = packs.len() as u64 - found.damaged;
        drop(one);

        let layers = self.store.list_layers()?;
        for id in &layers {
            if let Some(record) = found.sound(self.read_layer_record(id))? {
                self.catalog.put_layer(&record)?;
                found.layers += 1;
            }
        }
        let environments = self.store.list_environments()?;
        for id in &environments {
            if let Some(environment) = found.sound(self.store.read_environment(id))? {
                self.catalog.put_environment(&environment)?;
                found.environments += 1;
            }
        }
        for (reference, number) in self.store.list_references(None)? {
            if let Some(entry) = found.sound(self.store.read_entry(&reference, number))? {
                self.catalog.put_entry(&reference, &entry)?;
                found.references += 1;
            }
        }
        let packs = packs.into_iter().collect();
        self.catalog.retain(
            &packs,
            &layers.into_iter().collect(),
            &environments.into_iter().collect(),
        )?;
        found.chunks = self.catalog.count_chunks()?;
        self.catalog.mark_complete(self.store.id())?;
        Ok(found)
    }

    /// Reads the footers of packs and enters them. Returns how many are damaged.
    fn enter_packs(&self, packs: &[PackId]) -> Result<u64> {
        let next = AtomicUsize::new(0);
        let outcome = Mutex::new((0, Ok(())));
        let work = || {
            while let Some(pack) = packs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let entered = match self.store.read_pack_footer(pack) {
                    Ok(entries) => self.catalog.put_pack(pack, &entries).map(|()| 0),
                    Err(error) => leave_out(error),
                };
                let mut outcome = locked(&outcome);
                match entered {
                    Ok(damaged) => outcome.0 += damaged,
                    Err(error) => {
                        outcome.1 = Err(error);
                        next.store(packs.len(), Ordering::Relaxed);
                    }
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..FOOTER_READERS.min(packs.len()) {
                scope.spawn(work);
            }
        });
        let (damaged, result) =
            outcome.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        result.map(|()| damaged)
    }

    /// Where these chunks lie as far as the catalog knows, without a look at the store.
    pub(crate) fn known_places(
        &self,
        digests: &[ChunkDigest],
    ) -> Result<HashMap<ChunkDigest, ChunkPlace>> {
        let mut places = HashMap::new();
        for part in digests.chunks(LOOKUP) {
            let found = self.catalog.places(part)?;
            places.extend(
                part.iter().zip(found).filter_map(|(digest, place)| Some((*digest, place?))),
            );
        }
        Ok(places)
    }

    /// Where these chunks lie, in packs that are on the store now. `sound` holds packs that were looked for
    /// already and gets those that were found.
    pub(crate) fn sound_places(
        &self,
        digests: &[ChunkDigest],
        sound: &mut HashSet<PackId>,
    ) -> Result<HashMap<ChunkDigest, ChunkPlace>> {
        for last_try in [false, true] {
            let places = self.known_places(digests)?;
            let mut gone = HashSet::new();
            for pack in places.values().map(|place| place.pack) {
                if sound.contains(&pack) || gone.contains(&pack) {
                    continue;
                }
                let found = if self.store.has_pack(&pack)? { &mut *sound } else { &mut gone };
                found.insert(pack);
            }
            if gone.is_empty() {
                return Ok(places);
            }
            if last_try {
                return Ok(places
                    .into_iter()
                    .filter(|(_, place)| !gone.contains(&place.pack))
                    .collect());
            }
            self.refresh()?;
        }
        Ok(HashMap::new())
    }

    /// Where the chunks of a layer lie; the store is listed before any is called missing.
    pub(crate) fn locate(&self, table: &ChunkTable) -> Result<Located> {
        let digests: HashSet<ChunkDigest> = stored_digests(table).collect();
        let digests: Vec<ChunkDigest> = digests.into_iter().collect();
        // Every pack is looked for anew, whatever was seen before.
        let mut sound = HashSet::new();
        let mut places = self.sound_places(&digests, &mut sound)?;
        if places.len() < digests.len() {
            self.refresh()?;
            places = self.sound_places(&digests, &mut sound)?;
        }
        Ok(placed(table, &places))
    }

    /// What is known of a layer that is on the store now; the catalog may not know yet that it was collected.
    pub(crate) fn describe(&self, id: &LayerId) -> Result<LayerRecord> {
        match self.catalog.layer(id)? {
            Some(record) if self.store.has_layer(id)? => Ok(record),
            _ => self.layer_record_from_store(id),
        }
    }

    /// What a listing says about a layer, from the catalog or the store.
    pub(crate) fn layer_record(&self, id: &LayerId) -> Result<LayerRecord> {
        if let Some(record) = self.catalog.layer(id)? {
            return Ok(record);
        }
        self.layer_record_from_store(id)
    }

    fn layer_record_from_store(&self, id: &LayerId) -> Result<LayerRecord> {
        let record = self.read_layer_record(id)?;
        self.catalog.put_layer(&record)?;
        Ok(record)
    }

    fn read_layer_record(&self, id: &LayerId) -> Result<LayerRecord> {
        let (manifest, table) = self.store.read_layer_tables(id)?;
        let digests: Vec<ChunkDigest> = stored_digests(&table).collect();
        let places = self.known_places(&digests)?;
        Ok(layer_record(*id, &manifest, placed(&table, &places).stored_bytes))
    }
}

pub(crate) fn layer_record(id: LayerId, manifest: &Manifest, stored_bytes: u64) -> LayerRecord {
    LayerRecord {
        id,
        kind: manifest.kind.to_string(),
        files: manifest.files,
        plain_bytes: manifest.plain_bytes,
        stored_bytes,
        metadata_bytes: manifest.metadata_bytes,
        chunks: manifest.chunks,
        annotations: manifest.annotations.clone(),
    }
}

/// The digests of the chunks that lie in packs; a chunk that repeats repeats here.
fn stored_digests(table: &ChunkTable) -> impl Iterator<Item = ChunkDigest> {
    table.chunks().iter().filter(|chunk| !chunk.is_zero()).map(|chunk| chunk.digest)
}

/// A place whose plain size is not the table's cannot hold the chunk, whatever its digest says.
fn placed(table: &ChunkTable, places: &HashMap<ChunkDigest, ChunkPlace>) -> Located {
    let mut located =
        Located { locations: Locations::default(), missing: Vec::new(), stored_bytes: 0 };
    let mut indexes: HashMap<PackId, u32> = HashMap::new();
    let mut missing = HashSet::new();
    for chunk in table.chunks() {
        let place =
            places.get(&chunk.digest).filter(|place| place.plain_bytes == chunk.plain_bytes());
        let Some(place) = place.filter(|_| !chunk.is_zero()) else {
            if !chunk.is_zero() && missing.insert(chunk.digest) {
                located.missing.push(chunk.digest);
            }
            located.locations.placements.push(None);
            continue;
        };
        let packs = &mut located.locations.packs;
        let pack = *indexes.entry(place.pack).or_insert_with(|| {
            packs.push(place.pack);
            packs.len() as u32 - 1
        });
        located.stored_bytes += u64::from(place.stored_bytes);
        let ChunkPlace { offset, stored_bytes, codec, .. } = *place;
        located.locations.placements.push(Some(Placement { pack, offset, stored_bytes, codec }));
    }
    located
}

/// A damaged or vanished object is left out and counted; a store that does not answer is an error.
fn leave_out(error: layer::Error) -> Result<u64> {
    match error.kind() {
        ErrorKind::Corrupt | ErrorKind::Unsupported => {
            tracing::warn!("left out of the catalog: {}", error.chain());
            Ok(1)
        }
        ErrorKind::NotFound => Ok(0),
        _ => Err(error),
    }
}
