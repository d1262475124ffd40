//! The catalog: an index of the store that answers quickly what the store would answer slowly.
//!
//! It is a cache. Whatever it holds was read from the store or has just been published there; losing it, or any
//! part of it, costs time and loses nothing. What it does not know is no proof that the store lacks it.
//!
//! Locking: none of its own; batches are atomic.
//!
//! // CRASH: a pack that was published and not yet entered here is found by the next refresh.

mod record;
mod rocks;

pub(crate) use record::{ChunkPlace, LayerRecord, PackRecord};

use layer::environment::Environment;
use layer::pack::PackEntry;
use layer::reference::{Reference, ReferenceEntry};
use layer::{ChunkDigest, EnvId, Error, ErrorKind, LayerId, PackId, Result};
use rocks::{Batch, Family, Rocks};
use std::collections::{HashMap, HashSet};
use std::path::Path;
use store::Collectable;

/// Changes gathered before a write, so that a pack of millions of chunks needs no giant batch.
const BATCH: usize = 32 << 10;

/// The key of what a complete catalog says of itself.
const IDENTITY: &[u8] = b"identity";

/// An index of one store.
#[derive(Debug)]
pub(crate) struct Catalog {
    rocks: Rocks,
}

impl Catalog {
    /// Opens the catalog in `directory` for the store of this id. True when it is new, or was made anew because
    /// it was of another store or version, or damaged.
    pub(crate) fn open(directory: &Path, store_id: &str) -> Result<(Self, bool)> {
        let catalog = Self { rocks: Rocks::open(directory)? };
        let found = catalog.rocks.get(Family::Meta, IDENTITY)?;
        if found.as_ref() == Some(&identity(store_id)) {
            return Ok((catalog, false));
        }
        if found.is_some() {
            tracing::warn!(
                "catalog {} is of another store or version and is made anew",
                directory.display()
            );
        }
        for family in Family::ALL {
            catalog.remove_where(family, &|_, _| true)?;
        }
        Ok((catalog, true))
    }

    /// Says that everything on the store is in: without it, the next open starts anew.
    pub(crate) fn mark_complete(&self, store_id: &str) -> Result<()> {
        let mut batch = Batch::default();
        batch.put(Family::Meta, IDENTITY, identity(store_id));
        self.rocks.write(batch)
    }

    /// One answer for each digest, in order.
    pub(crate) fn places(&self, digests: &[ChunkDigest]) -> Result<Vec<Option<ChunkPlace>>> {
        let found =
            self.rocks.get_many(Family::Chunks, digests.iter().map(ChunkDigest::as_bytes))?;
        found
            .into_iter()
            .map(|bytes| bytes.map(|bytes| ChunkPlace::decode(&bytes)).transpose())
            .collect()
    }

    /// Enters a pack that is on the store.
    ///
    /// INVARIANT: a pack is listed only when all its chunks are.
    pub(crate) fn put_pack(&self, pack: &PackId, entries: &[PackEntry]) -> Result<()> {
        let mut batch = Batch::default();
        for (ordinal, entry) in (0..).zip(entries) {
            let place = ChunkPlace::new(*pack, ordinal, entry);
            batch.put(Family::Chunks, entry.digest.0, place.encode());
            if batch.len() >= BATCH {
                self.rocks.write(std::mem::take(&mut batch))?;
            }
        }
        batch.put(Family::Packs, pack.0, PackRecord::of(entries).encode());
        self.rocks.write(batch)
    }

    /// Forgets packs that are not on the store any more. A chunk of theirs may lie in another pack that was
    /// entered earlier, so the list of packs is forgotten too: the next refresh reads all footers again.
    pub(crate) fn forget_packs(&self, gone: &HashSet<PackId>) -> Result<()> {
        self.remove_where(Family::Packs, &|_, _| true)?;
        self.remove_where(Family::Chunks, &|_, place| {
            ChunkPlace::decode(place).map_or(true, |place| gone.contains(&place.pack))
        })
    }

    /// All packs that are entered.
    pub(crate) fn packs(&self) -> Result<HashSet<PackId>> {
        let mut packs = HashSet::new();
        self.rocks.scan(Family::Packs, &mut |key, _| {
            packs.insert(PackId::from_slice(key)?);
            Ok(())
        })?;
        Ok(packs)
    }

    /// All packs that are entered, with what they hold.
    pub(crate) fn pack_records(&self) -> Result<HashMap<PackId, PackRecord>> {
        let mut packs = HashMap::new();
        self.rocks.scan(Family::Packs, &mut |key, value| {
            packs.insert(PackId::from_slice(key)?, PackRecord::decode(value)?);
            Ok(())
        })?;
        Ok(packs)
    }

    /// Removes what a collection has deleted. The chunks that are in use lie in other packs, which are
    /// entered.
    pub(crate) fn drop_collected(&self, gone: &HashSet<Collectable>) -> Result<()> {
        let mut batch = Batch::default();
        let mut packs = HashSet::new();
        for what in gone {
            match what {
                Collectable::Environment(id) => batch.delete(Family::Environments, id.0),
                Collectable::Layer(id) => batch.delete(Family::Layers, id.0),
                Collectable::Pack(id) => {
                    batch.delete(Family::Packs, id.0);
                    packs.insert(*id);
                }
                Collectable::Image(_) | Collectable::Tar(_) => {}
            }
        }
        self.rocks.write(batch)?;
        if packs.is_empty() {
            return Ok(());
        }
        self.remove_where(Family::Chunks, &|_, place| {
            ChunkPlace::decode(place).map_or(true, |place| packs.contains(&place.pack))
        })
    }

    pub(crate) fn layer(&self, id: &LayerId) -> Result<Option<LayerRecord>> {
        self.document(Family::Layers, id.as_bytes())
    }

    pub(crate) fn put_layer(&self, record: &LayerRecord) -> Result<()> {
        self.put_document(Family::Layers, record.id.as_bytes(), record)
    }

    pub(crate) fn environment(&self, id: &EnvId) -> Result<Option<Environment>> {
        let found = self.rocks.get(Family::Environments, id.as_bytes())?;
        found.map(|bytes| Environment::decode(&bytes)).transpose()
    }

    pub(crate) fn put_environment(&self, environment: &Environment) -> Result<()> {
        let mut batch = Batch::default();
        batch.put(Family::Environments, environment.id().0, environment.canonical());
        self.rocks.write(batch)
    }

    /// An entry of a reference; entries never change, so one that is here is right.
    pub(crate) fn entry(
        &self,
        reference: &Reference,
        number: u64,
    ) -> Result<Option<ReferenceEntry>> {
        let found = self.rocks.get(Family::References, &entry_key(reference, number))?;
        found.map(|bytes| ReferenceEntry::decode(&bytes)).transpose()
    }

    pub(crate) fn put_entry(&self, reference: &Reference, entry: &ReferenceEntry) -> Result<()> {
        let mut batch = Batch::default();
        batch.put(Family::References, entry_key(reference, entry.number), entry.encode());
        self.rocks.write(batch)
    }

    /// Keeps only what is on the store.
    pub(crate) fn retain(
        &self,
        packs: &HashSet<PackId>,
        layers: &HashSet<LayerId>,
        environments: &HashSet<EnvId>,
    ) -> Result<()> {
        self.remove_where(Family::Chunks, &|_, place| {
            ChunkPlace::decode(place).map_or(true, |place| !packs.contains(&place.pack))
        })?;
        self.remove_where(Family::Packs, &|key, _| {
            PackId::from_slice(key).map_or(true, |id| !packs.contains(&id))
        })?;
        self.remove_where(Family::Layers, &|key, _| {
            LayerId::from_slice(key).map_or(true, |id| !layers.contains(&id))
        })?;
        self.remove_where(Family::Environments, &|key, _| {
            EnvId::from_slice(key).map_or(true, |id| !environments.contains(&id))
        })
    }

    /// The number of chunks that are entered.
    pub(crate) fn count_chunks(&self) -> Result<u64> {
        let mut count = 0;
        self.rocks.scan(Family::Chunks, &mut |_, _| {
            count += 1;
            Ok(())
        })?;
        Ok(count)
    }

    fn remove_where(&self, family: Family, unwanted: &dyn Fn(&[u8], &[u8]) -> bool) -> Result<()> {
        let mut batch = Batch::default();
        self.rocks.scan(family, &mut |key, value| {
            if unwanted(key, value) {
                batch.delete(family, key);
            }
            if batch.len() >= BATCH {
                self.rocks.write(std::mem::take(&mut batch))?;
            }
            Ok(())
        })?;
        self.rocks.write(batch)
    }

    fn document<T: serde::de::DeserializeOwned>(
        &self,
        family: Family,
        key: &[u8],
    ) -> Result<Option<T>> {
        let found = self.rocks.get(family, key)?;
        let parsed = found.map(|bytes| serde_json::from_slice(&bytes)).transpose();
        parsed.map_err(|error| Error::corrupt("catalog: document").with_source(error))
    }

    fn put_document(
        &self,
        family: Family,
        key: &[u8],
        document: &impl serde::Serialize,
    ) -> Result<()> {
        let bytes = serde_json::to_vec(document).map_err(|error| {
            Error::new(ErrorKind::Internal, "catalog: document").with_source(error)
        })?;
        let mut batch = Batch::default();
        batch.put(family, key, bytes);
        self.rocks.write(batch)
    }
}

/// What a complete catalog of this version and store says of itself.
fn identity(store_id: &str) -> Vec<u8> {
    format!("{} {store_id}", record::CATALOG_VERSION).into_bytes()
}

fn entry_key(reference: &Reference, number: u64) -> Vec<u8> {
    let mut key = reference.to_string().into_bytes();
    key.push(0);
    key.extend_from_slice(&number.to_be_bytes());
    key
}

#[cfg(test)]
mod tests {
    use super::*;
    use layer::pack::Codec;

    fn entry(byte: u8) -> PackEntry {
        let digest = ChunkDigest([byte; 32]);
        PackEntry { digest, offset: 64, stored_bytes: 9, plain_bytes: 4096, codec: Codec::Zstd }
    }

    #[test]
    fn a_catalog_that_was_not_completed_starts_anew_and_a_complete_one_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let pack = PackId([1; 16]);
        for complete in [false, true] {
            let (catalog, new) = Catalog::open(directory.path(), "a").unwrap();
            assert!(new);
            catalog.put_pack(&pack, &[entry(1)]).unwrap();
            if complete {
                catalog.mark_complete("a").unwrap();
            }
        }
        let (catalog, new) = Catalog::open(directory.path(), "a").unwrap();
        assert!(!new);
        assert_eq!(catalog.packs().unwrap(), HashSet::from([pack]));
        let busy = Catalog::open(directory.path(), "a").unwrap_err();
        assert_eq!(busy.kind(), ErrorKind::Busy, "{busy:?}");
        drop(catalog);
        let (catalog, new) = Catalog::open(directory.path(), "another store").unwrap();
        assert!(new);
        assert_eq!(catalog.places(&[ChunkDigest([1; 32])]).unwrap(), [None]);
    }

    #[test]
    fn a_damaged_catalog_is_made_anew() {
        let directory = tempfile::tempdir().unwrap();
        let (catalog, _) = Catalog::open(directory.path(), "a").unwrap();
        catalog.mark_complete("a").unwrap();
        drop(catalog);
        for entry in std::fs::read_dir(directory.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_str().unwrap().starts_with("MANIFEST") {
                std::fs::write(path, b"this is no manifest at all, and never was one").unwrap();
            }
        }
        assert!(Catalog::open(directory.path(), "a").unwrap().1);
    }

    #[test]
    fn packs_that_are_gone_take_their_chunks_with_them() {
        let directory = tempfile::tempdir().unwrap();
        let (catalog, _) = Catalog::open(directory.path(), "a").unwrap();
        let [one, two] = [PackId([1; 16]), PackId([2; 16])];
        catalog.put_pack(&one, &[entry(1), entry(2)]).unwrap();
        catalog.put_pack(&two, &[entry(2), entry(3)]).unwrap();
        assert_eq!(catalog.count_chunks().unwrap(), 3);
        catalog.forget_packs(&HashSet::from([two])).unwrap();
        let digests = [1, 2, 3].map(|byte| ChunkDigest([byte; 32]));
        let known: Vec<bool> =
            catalog.places(&digests).unwrap().iter().map(Option::is_some).collect();
        assert_eq!(known, [true, false, false]);
        assert!(catalog.packs().unwrap().is_empty(), "footers have to be read again");
    }
}
