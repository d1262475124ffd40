//! Mending a store: from what is left of it, and from another store that has the same digests.
//!
//! What is damaged is replaced under the same id, chunks go into new packs, and a damaged pack goes when all that
//! was sound in it lies elsewhere. Whatever is taken is compared with its digest first.
//!
//! // CRASH: each step leaves a store that is no worse; a repeated repair goes on.

use super::{Checked, check, tolerable};
use crate::upload::PACK_BYTES;
use layer::pack::{Codec, PackEntry};
use layer::reference::Target;
use layer::{ChunkDigest, Error, ErrorKind, LayerId, PackId, Result};
use std::collections::{BTreeSet, HashMap, HashSet};
use store::codec::verify_chunk;
use store::{Collectable, Collector, PackWriter, Stock, Store, signature_named};

/// Mending a layer can show that chunks are missing, and those a pack.
const ROUNDS: u32 = 4;

/// What was mended.
#[derive(Debug, Clone, Default)]
pub struct Repaired {
    /// Entries of references that were taken from the other store.
    pub entries: u64,
    /// Environments and layers that were written anew.
    pub documents: u64,
    /// Signatures that were taken from the other store.
    pub signatures: u64,
    /// Chunks that were written anew, and those that moved out of damaged packs.
    pub chunks: u64,
    /// Damaged packs that were removed.
    pub packs: u64,
    /// Layers that lacked something: their location hints have to be written anew.
    pub layers: BTreeSet<LayerId>,
    /// What is still wrong.
    pub left: Checked,
}

/// Mends `store` from what is left of it and, where there is one, from another store.
pub fn repair(store: &Store, from: Option<&Store>, read_data: bool) -> Result<Repaired> {
    let mut collector = store.collect_alone()?;
    let mended = Mender { store, from, index: None, hint: None, done: Repaired::default() }
        .run(&mut collector, read_data);
    if let Err(error) = collector.release() {
        tracing::warn!("the collector's lease ends by itself: {}", error.chain());
    }
    mended
}

struct Mender<'a> {
    store: &'a Store,
    from: Option<&'a Store>,
    /// Where the other store has its chunks.
    index: Option<Places>,
    /// Where one layer's hint says that its chunks lie.
    hint: Option<(LayerId, Places)>,
    done: Repaired,
}

/// Where chunks lie.
type Places = HashMap<ChunkDigest, (PackId, PackEntry)>;

/// A chunk in its stored form.
struct Found {
    codec: Codec,
    plain_bytes: u32,
    payload: Vec<u8>,
}

impl Mender<'_> {
    fn run(mut self, collector: &mut Collector, read_data: bool) -> Result<Repaired> {
        for _ in 0..ROUNDS {
            let checked = check(self.store, read_data)?;
            let sum = |done: &Repaired| done.entries + done.documents + done.chunks + done.packs;
            let before = sum(&self.done);
            collector.check()?;
            self.entries(&checked)?;
            self.documents(&checked)?;
            self.chunks(&checked, collector)?;
            let done = sum(&self.done) == before;
            self.done.left = checked;
            if done {
                break;
            }
        }
        if self.signatures()? {
            self.done.left = check(self.store, read_data)?;
        }
        Ok(self.done)
    }

    /// Takes entries of references from the other store, unless it tells another history: then its entry of that
    /// number is another move.
    fn entries(&mut self, checked: &Checked) -> Result<()> {
        let Some(from) = self.from else { return Ok(()) };
        for (reference, number) in &checked.parts.entries {
            let Some(entry) = there(from.read_entry(reference, *number))? else { continue };
            let mut is_same = true;
            for beside in [number.saturating_sub(1), number.saturating_add(1)] {
                let here = there(self.store.read_entry(reference, beside))?;
                let other = there(from.read_entry(reference, beside))?;
                is_same &= here.is_none() || other.is_none() || here == other;
            }
            if is_same && self.store.restore_entry(reference, &entry)? {
                self.done.entries += 1;
            }
        }
        Ok(())
    }

    fn documents(&mut self, checked: &Checked) -> Result<()> {
        let Some(from) = self.from else { return Ok(()) };
        for id in &checked.parts.environments {
            if let Some(environment) = there(from.read_environment(id))? {
                self.store.put_environment(&environment.canonical())?;
                self.done.documents += 1;
            }
        }
        for id in &checked.parts.layers {
            if let Some(file) = there(from.read_layer(id))? {
                self.store.put_layer(&file.encode()?)?;
                self.done.documents += 1;
                self.done.layers.insert(*id);
            }
        }
        Ok(())
    }

    /// Takes the signatures of what is here that the other store has sound, and this one has not. Whether there were
    /// any.
    fn signatures(&mut self) -> Result<bool> {
        let Some(from) = self.from else { return Ok(false) };
        for name in from.signature_names()? {
            let Some((subject, _)) = signature_named(&name) else { continue };
            let is_here = match subject {
                Target::Layer(id) => self.store.has_layer(&id)?,
                Target::Environment(id) => self.store.has_environment(&id)?,
            };
            if is_here
                && let Some(signature) = there(from.read_signature_at(&name))?
                && !self.store.put_signature(&signature)?
            {
                self.done.signatures += 1;
            }
        }
        Ok(self.done.signatures > 0)
    }

    /// Writes anew what is missing and what was sound in packs with damage, and removes those packs.
    fn chunks(&mut self, checked: &Checked, collector: &mut Collector) -> Result<()> {
        let parts = &checked.parts;
        self.done.layers.extend(&parts.hit);
        let mut writer: Option<PackWriter> = None;
        let mut lost: HashSet<ChunkDigest> = HashSet::new();
        let mut missing: Vec<_> = parts.missing.iter().collect();
        missing.sort_unstable_by_key(|(_, layer)| **layer);
        for (digest, layer) in missing {
            collector.in_time().or_else(|_| collector.check())?;
            match self.find(digest, layer)? {
                Some(found) => self.write(&mut writer, digest, &found)?,
                None => _ = lost.insert(*digest),
            }
        }
        let mut emptied: Vec<PackId> = Vec::new();
        for (pack, wrong) in &parts.wrong {
            collector.check()?;
            if wrong.is_disjoint(&lost) {
                for entry in self.store.read_pack_footer(pack)? {
                    if !wrong.contains(&entry.digest)
                        && let Some(found) = there(read(self.store, pack, &entry))?
                    {
                        self.write(&mut writer, &entry.digest, &found)?;
                    }
                }
                emptied.push(*pack);
            }
        }
        if let Some(writer) = writer {
            writer.finish()?;
        }
        // Without a footer nobody finds anything in a pack, except by hints, and those were followed.
        if lost.is_empty() {
            emptied.extend(&parts.unreadable);
        }
        for pack in emptied {
            collector.in_time()?;
            self.store.collect(&Collectable::Pack(pack), &Stock::default())?;
            self.done.packs += 1;
        }
        Ok(())
    }

    fn write(
        &mut self,
        writer: &mut Option<PackWriter>,
        digest: &ChunkDigest,
        found: &Found,
    ) -> Result<()> {
        let mut open = match writer.take() {
            Some(open) => open,
            None => self.store.pack_writer()?,
        };
        open.append(*digest, found.codec, found.plain_bytes, &found.payload)?;
        self.done.chunks += 1;
        if open.stored_bytes() >= PACK_BYTES {
            open.finish()?;
        } else {
            *writer = Some(open);
        }
        Ok(())
    }

    /// A chunk by the layer's hint, which may know more than a damaged footer; else from the other store.
    fn find(&mut self, digest: &ChunkDigest, layer: &LayerId) -> Result<Option<Found>> {
        if let Some(found) = self.by_hint(digest, layer)? {
            return Ok(Some(found));
        }
        let Some(from) = self.from else { return Ok(None) };
        if self.index.is_none() {
            let mut index = Places::new();
            for pack in from.list_packs()? {
                for entry in there(from.read_pack_footer(&pack))?.unwrap_or_default() {
                    index.insert(entry.digest, (pack, entry));
                }
            }
            self.index = Some(index);
        }
        let place = self.index.as_ref().and_then(|index| index.get(digest));
        place.map_or(Ok(None), |(pack, entry)| there(read(from, pack, entry)))
    }

    fn by_hint(&mut self, digest: &ChunkDigest, layer: &LayerId) -> Result<Option<Found>> {
        if self.hint.as_ref().is_none_or(|(of, _)| of != layer) {
            self.hint = Some((*layer, self.read_hint(layer)?));
        }
        let place = self.hint.as_ref().and_then(|(_, places)| places.get(digest));
        place.map_or(Ok(None), |(pack, entry)| there(read(self.store, pack, entry)))
    }

    /// Where the newest readable hint of a layer says that its chunks lie.
    fn read_hint(&self, layer: &LayerId) -> Result<Places> {
        let Some(hint) = self.store.read_locations(layer)? else { return Ok(Places::new()) };
        let Some((_, table)) = there(self.store.read_layer_tables(layer))? else {
            return Ok(Places::new());
        };
        let places = table.chunks().iter().enumerate().filter_map(|(at, chunk)| {
            let (pack, place) = hint.get(at)?;
            let entry = PackEntry {
                digest: chunk.digest,
                offset: place.offset,
                stored_bytes: place.stored_bytes,
                plain_bytes: chunk.plain_bytes(),
                codec: place.codec,
            };
            Some((chunk.digest, (pack, entry)))
        });
        Ok(places.collect())
    }
}

fn read(store: &Store, pack: &PackId, entry: &PackEntry) -> Result<Found> {
    let mut payload = vec![0; entry.stored_bytes as usize];
    store.read_pack(pack, entry.offset, &mut payload)?;
    verify_chunk(&payload, entry.codec, entry.plain_bytes, &entry.digest)?;
    Ok(Found { codec: entry.codec, plain_bytes: entry.plain_bytes, payload })
}

/// What is absent or damaged is not there.
fn there<T>(read: Result<T>) -> Result<Option<T>> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_gone(error: &Error) -> bool {
    error.kind() == ErrorKind::NotFound || tolerable(error)
}
