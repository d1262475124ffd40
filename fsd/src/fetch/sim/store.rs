//! A store that refuses, stalls, lies and loses packs, and the truth of what is in it.
//!
//! Every layer lies in two sets of packs. Its first hint leads to the first set, whose packs may be bad;
//! imaged, when it is asked, publishes the hint of the second.
//!
//! Locking: one mutex around what this history changed; the objects themselves are shared by all histories.

use super::fate::{Fate, Fault};
use crate::fetch::Locator;
use layer::chunk::{BLOCK_BYTES, Chunk, ChunkTable};
use layer::location::{Locations, Placement};
use layer::{ChunkDigest, Error, ErrorKind, LayerId, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use store::backend::memory::Memory;
use store::{Backend, Key, Store, Upload};

/// Chunks of each layer.
const CHUNKS: [usize; 3] = [14, 9, 6];
/// Contents from which chunks are made; layers share some of them.
const CONTENTS: u64 = 22;

/// A layer as it should be seen.
pub struct TrueLayer {
    /// Its id.
    pub id: LayerId,
    /// Its chunks.
    pub table: ChunkTable,
    /// Its whole data space.
    pub data: Vec<u8>,
    first: Locations,
    second_hint: String,
}

/// What is in the store.
pub struct Truth {
    memory: Memory,
    /// The layers.
    pub layers: Vec<TrueLayer>,
}

/// The bytes of a chunk: noise, or what compresses well; never the same in two blocks.
fn content(number: u64, blocks: u32) -> Vec<u8> {
    let words = u64::from(blocks * BLOCK_BYTES) / 8;
    let key = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let word = |at: u64| {
        if number.is_multiple_of(3) { key ^ (at / 64) } else { (key ^ at).wrapping_mul(key) }
    };
    (0..words).flat_map(|at| (word(at) | 1).to_le_bytes()).collect()
}

/// One pack for each half of the chunks.
fn write_packs(store: &Store, plain: &[Option<Vec<u8>>]) -> Locations {
    let (mut packs, mut placements) = (Vec::new(), Vec::new());
    for half in plain.chunks(plain.len().div_ceil(2)) {
        let mut writer = store.pack_writer().unwrap();
        for bytes in half.iter().flatten() {
            let (codec, payload) = store::codec::encode_chunk(bytes, 1);
            writer.append(ChunkDigest::of(bytes), codec, bytes.len() as u32, &payload).unwrap();
        }
        let sealed = writer.finish().unwrap();
        for bytes in half {
            let digest = bytes.as_ref().map(|bytes| ChunkDigest::of(bytes));
            let entry = sealed.entries.iter().find(|entry| Some(entry.digest) == digest);
            placements.push(entry.map(|entry| Placement {
                pack: packs.len() as u32,
                offset: entry.offset,
                stored_bytes: entry.stored_bytes,
                codec: entry.codec,
            }));
        }
        packs.push(sealed.id);
    }
    Locations { packs, placements }
}

fn publish(store: &Store, layer: usize) -> TrueLayer {
    let (mut chunks, mut plain, mut data) = (Vec::new(), Vec::new(), Vec::new());
    let mut start_block = 0;
    for index in 0..CHUNKS[layer] {
        let blocks = 1 + 2 * (index % 3 == 2) as u32;
        let zero = index % 7 == 5;
        let number = (index as u64 * (2 * layer as u64 + 1) + 3) % CONTENTS;
        // The number and the size make the content, so that equal digests are of equal size.
        let bytes = (!zero).then(|| content(number * 4 + u64::from(blocks), blocks));
        data.extend(bytes.clone().unwrap_or_else(|| vec![0; (blocks * BLOCK_BYTES) as usize]));
        let digest = bytes.as_ref().map_or(ChunkDigest::ZERO, |bytes| ChunkDigest::of(bytes));
        chunks.push(Chunk { start_block, blocks, digest });
        plain.push(bytes);
        start_block += blocks;
    }
    let id = LayerId([layer as u8 + 1; 32]);
    let first = write_packs(store, &plain);
    store.put_locations(&id, &first).unwrap();
    let prefix = format!("locations/{id}/");
    let before = store.backend().list(&prefix, None, 10).unwrap();
    store.put_locations(&id, &write_packs(store, &plain)).unwrap();
    let mut hints = store.backend().list(&prefix, None, 10).unwrap();
    hints.retain(|hint| !before.contains(hint));
    let second_hint = hints.pop().unwrap();
    TrueLayer { id, table: ChunkTable::new(chunks).unwrap(), data, first, second_hint }
}

impl Truth {
    /// Made once.
    pub fn get() -> &'static Self {
        static TRUTH: OnceLock<Truth> = OnceLock::new();
        TRUTH.get_or_init(|| {
            let memory = Memory::new();
            let store = Store::open(Arc::new(memory.clone())).unwrap();
            let layers = (0..CHUNKS.len()).map(|layer| publish(&store, layer)).collect();
            Self { memory, layers }
        })
    }
}

/// What is wrong with a pack.
#[derive(Debug, Clone, Copy)]
enum Damage {
    Missing,
    CutAt(u64),
    FlippedAt(u64),
}

#[derive(Debug, Default)]
struct State {
    damage: BTreeMap<String, Damage>,
    relocated: BTreeSet<LayerId>,
    away_until: Option<Instant>,
}

/// The store of one history.
pub struct SimStore {
    truth: &'static Truth,
    fate: Arc<Fate>,
    state: Mutex<State>,
}

impl std::fmt::Debug for SimStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SimStore")
    }
}

impl SimStore {
    /// Some packs of the first sets are bad, as fate has it.
    pub fn new(truth: &'static Truth, fate: &Arc<Fate>) -> Arc<Self> {
        let mut damage = BTreeMap::new();
        for layer in &truth.layers {
            for (index, pack) in layer.first.packs.iter().enumerate() {
                if fate.strikes(Fault::BadPack) {
                    let places = layer.first.placements.iter().flatten();
                    let places: Vec<_> =
                        places.filter(|place| place.pack == index as u32).collect();
                    let place = places[fate.below(places.len() as u64) as usize];
                    let at = place.offset + fate.below(u64::from(place.stored_bytes));
                    let kinds = [Damage::Missing, Damage::CutAt(at), Damage::FlippedAt(at)];
                    damage.insert(pack.to_string(), kinds[fate.below(3) as usize]);
                }
            }
        }
        let state = Mutex::new(State { damage, ..State::default() });
        Arc::new(Self { truth, fate: Arc::clone(fate), state })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everything is there again.
    pub fn repair(&self) {
        let mut state = self.lock();
        state.damage.clear();
        state.away_until = None;
    }

    /// What happens to a read before it does anything. Others run meanwhile where nothing is locked:
    /// hints are read under the lock of their layer's source.
    fn before(&self, key: &str) -> Result<()> {
        if key == "FORMAT" {
            // Read when the world is made, before anything is simulated.
            return Ok(());
        }
        if key.starts_with("packs/") {
            self.fate.interrupt();
        }
        let refused = |what: &str| Err(Error::new(ErrorKind::Unavailable, what.to_owned()));
        if self.fate.is_dead() {
            return refused("the process is dead");
        }
        if self.fate.strikes(Fault::StoreSlow) {
            self.fate.pass(Duration::from_millis(self.fate.below(3000)));
        }
        if self.fate.strikes(Fault::StoreAway) {
            let until = crate::clock::Clock::now(&*self.fate)
                + Duration::from_millis(self.fate.below(8000));
            self.lock().away_until = Some(until);
        }
        let now = crate::clock::Clock::now(&*self.fate);
        if self.lock().away_until.is_some_and(|until| now < until) {
            return refused("the store is away");
        }
        if self.fate.strikes(Fault::StoreRefuses) {
            return refused("the store refuses");
        }
        Ok(())
    }

    fn spoil(&self, bytes: &mut [u8]) -> Result<()> {
        if self.fate.strikes(Fault::BitFlip) && !bytes.is_empty() {
            let at = self.fate.below(bytes.len() as u64 * 8) as usize;
            bytes[at / 8] ^= 1 << (at % 8);
        }
        if self.fate.strikes(Fault::ShortRead) {
            return Err(Error::corrupt("the read ended early"));
        }
        Ok(())
    }
}

impl Backend for SimStore {
    fn read_at(&self, key: &Key, offset: u64, into: &mut [u8]) -> Result<()> {
        self.before(key.as_str())?;
        let pack = key.as_str().rsplit('/').next().unwrap_or_default();
        let damage = self.lock().damage.get(pack).copied();
        let end = offset + into.len() as u64;
        match damage {
            Some(Damage::Missing) => return Err(Error::not_found("the pack is gone")),
            Some(Damage::CutAt(at)) if end > at => return Err(Error::corrupt("the pack is cut")),
            _ => {}
        }
        self.truth.memory.read_at(key, offset, into)?;
        if let Some(Damage::FlippedAt(at)) = damage
            && (offset..end).contains(&at)
        {
            into[(at - offset) as usize] ^= 0x10;
        }
        self.spoil(into)?;
        if key.as_str().starts_with("packs/") {
            self.fate.interrupt();
        }
        Ok(())
    }

    fn read_all(&self, key: &Key, max_bytes: u64) -> Result<Vec<u8>> {
        self.before(key.as_str())?;
        self.truth.memory.read_all(key, max_bytes)
    }

    fn size(&self, key: &Key) -> Result<u64> {
        self.truth.memory.size(key)
    }

    fn create(&self, key: &Key) -> Result<Box<dyn Upload>> {
        Err(Error::new(ErrorKind::Unsupported, format!("nothing is written, also not {key}")))
    }

    fn list(&self, prefix: &str, start_after: Option<&str>, limit: usize) -> Result<Vec<String>> {
        self.before(prefix)?;
        let mut names = self.truth.memory.list(prefix, start_after, limit)?;
        let state = self.lock();
        for layer in self.truth.layers.iter().filter(|layer| !state.relocated.contains(&layer.id)) {
            names.retain(|name| *name != layer.second_hint);
        }
        Ok(names)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, format!("nothing is deleted, also not {key}")))
    }

    fn describe(&self) -> String {
        "a simulated store".to_owned()
    }
}

impl Locator for SimStore {
    fn locate(&self, layer: &LayerId) -> Result<()> {
        self.before("imaged")?;
        self.lock().relocated.insert(*layer);
        Ok(())
    }
}
