//! Whether a whole store is sound: every digest and every pointer, on demand every byte; and which references a
//! damage hits.
//!
//! Works on the store alone, without a catalog, and changes nothing. Beside the ids of layers and environments it
//! holds one entry of 36 bytes for each chunk.
//!
//! A hint that is stale or missing is no damage: it is written anew when somebody needs it.

mod repair;

pub use repair::{Repaired, repair};

use layer::erofs::reader::Reader;
use layer::reference::{Reference, Target};
use layer::{ChunkDigest, EnvId, Error, ErrorKind, KeyId, LayerId, PackId, Result};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use store::codec::verify_chunk;
use store::{Store, signature_named};

/// Packs that are read at the same time.
const READERS: usize = 4;

/// One damage and what it hits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// What is wrong, and with what.
    pub what: String,
    /// References whose present target cannot be used whole because of it.
    pub references: Vec<String>,
}

/// What was looked at and found.
#[derive(Debug, Clone, Default)]
pub struct Checked {
    /// Entries of references.
    pub entries: u64,
    /// Environments.
    pub environments: u64,
    /// Layers.
    pub layers: u64,
    /// Packs.
    pub packs: u64,
    /// Chunks in packs.
    pub chunks: u64,
    /// Stored bytes that were read and compared with their digests.
    pub bytes_read: u64,
    /// Layers whose location hint is missing or points to what is not there; they read slower the first time.
    pub stale_hints: u64,
    /// Sound signatures, by whose they are.
    pub signers: BTreeMap<KeyId, u64>,
    /// All that is wrong.
    pub damages: Vec<Damage>,
    parts: Parts,
}

/// The same for machines: what repair has to mend.
#[derive(Debug, Clone, Default)]
struct Parts {
    /// Layers that are needed and missing or damaged.
    layers: BTreeSet<LayerId>,
    environments: BTreeSet<EnvId>,
    /// Packs whose footers cannot be read.
    unreadable: BTreeSet<PackId>,
    /// Chunks whose bytes are wrong, by pack.
    wrong: BTreeMap<PackId, HashSet<ChunkDigest>>,
    /// Chunks that layers need and no pack has sound.
    missing: HashMap<ChunkDigest, LayerId>,
    /// Layers that lack a chunk.
    hit: BTreeSet<LayerId>,
    /// Entries of references that cannot be read.
    entries: Vec<(Reference, u64)>,
    /// Names of signatures that are false, and why.
    signatures: BTreeMap<String, String>,
}

/// Looks at everything on a store; with `read_data` at every byte.
pub fn check(store: &Store, read_data: bool) -> Result<Checked> {
    let mut check = Check {
        store,
        done: Checked::default(),
        layers: BTreeMap::new(),
        environments: BTreeMap::new(),
    };
    let sound = check.packs(read_data)?;
    let found = check.layers(&sound, read_data)?;
    drop(sound);
    let environments = check.environments()?;
    check.signatures()?;
    let targets = check.references()?;
    check.leases()?;
    check.judge(&found, &environments, &targets);
    Ok(check.done)
}

struct Check<'a> {
    store: &'a Store,
    done: Checked,
    /// What is wrong with a layer.
    layers: BTreeMap<LayerId, Vec<String>>,
    environments: BTreeMap<EnvId, Vec<String>>,
}

/// Chunks that lie soundly in some pack, sorted.
type Sound = Vec<ChunkDigest>;

/// What one pack gave.
#[derive(Default)]
struct PackFound {
    sound: Vec<ChunkDigest>,
    wrong: HashSet<ChunkDigest>,
    bytes_read: u64,
}

impl Check<'_> {
    fn packs(&mut self, read_data: bool) -> Result<Sound> {
        let packs = self.store.list_packs()?;
        self.done.packs = packs.len() as u64;
        let next = AtomicUsize::new(0);
        let found = Mutex::new((Vec::new(), Vec::new()));
        let store = self.store;
        let work = || {
            while let Some(pack) = packs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let result = check_pack(store, pack, read_data);
                let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                match result {
                    Ok(one) => found.0.push((*pack, one)),
                    Err(error) => found.1.push((*pack, error)),
                }
            }
        };
        thread::scope(|scope| (0..READERS.min(packs.len())).for_each(|_| _ = scope.spawn(work)));
        let (sound, failed) = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (pack, error) in failed {
            tolerable(&error).then_some(()).ok_or(error).or_else(|error| match error.kind() {
                ErrorKind::NotFound => Ok(()), // collected meanwhile
                _ => Err(error),
            })?;
            self.done.parts.unreadable.insert(pack);
        }
        let mut all = Vec::new();
        for (pack, one) in sound {
            self.done.chunks += (one.sound.len() + one.wrong.len()) as u64;
            self.done.bytes_read += one.bytes_read;
            all.extend(one.sound);
            if !one.wrong.is_empty() {
                self.done.parts.wrong.insert(pack, one.wrong);
            }
        }
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }

    /// Returns the packs that the hints of layers name which lack a chunk.
    fn layers(
        &mut self,
        sound: &Sound,
        read_data: bool,
    ) -> Result<BTreeMap<LayerId, HashSet<PackId>>> {
        let mut hinted = BTreeMap::new();
        for id in self.store.list_layers()? {
            self.done.layers += 1;
            let file = match self.store.read_layer(&id) {
                Ok(file) => file,
                Err(error) if tolerable(&error) => {
                    self.layers.entry(id).or_default().push(error.chain());
                    self.done.parts.layers.insert(id);
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            if let Err(error) = Reader::parse(&file.metadata).and_then(|image| image.to_tree()) {
                self.layers
                    .entry(id)
                    .or_default()
                    .push(format!("metadata image: {}", error.chain()));
            }
            let chunks = file.chunk_table.chunks().iter().filter(|chunk| !chunk.is_zero());
            let lacking: Vec<ChunkDigest> = chunks
                .map(|chunk| chunk.digest)
                .filter(|digest| sound.binary_search(digest).is_err())
                .collect();
            let hint = self.store.read_locations(&id)?;
            let names_gone = match &hint {
                Some(hint) => hint
                    .packs
                    .iter()
                    .map(|pack| self.store.has_pack(pack))
                    .collect::<Result<Vec<_>>>()?
                    .contains(&false),
                None => !file.chunk_table.is_empty(),
            };
            self.done.stale_hints += u64::from(names_gone);
            if let Some(first) = lacking.first() {
                let what = format!("{} of its chunks are lost (first {first})", lacking.len());
                self.layers.entry(id).or_default().push(what);
                self.done.parts.hit.insert(id);
                let packs = hint.map(|hint| hint.packs.into_iter().collect()).unwrap_or_default();
                hinted.insert(id, packs);
            }
            self.done.parts.missing.extend(lacking.into_iter().map(|digest| (digest, id)));
            self.space(&id, &file.chunk_table, read_data)?;
        }
        Ok(hinted)
    }

    fn space(
        &mut self,
        id: &LayerId,
        table: &layer::chunk::ChunkTable,
        read_data: bool,
    ) -> Result<()> {
        let damages = match self.store.space(id)? {
            None => return Ok(()),
            Some(space) if space.bytes != table.data_bytes() => {
                vec![store::wrong_length(id, space.bytes, table.data_bytes())]
            }
            Some(_) if read_data => {
                self.done.bytes_read += table.data_bytes();
                self.store.check_space(id, table)?
            }
            Some(_) => return Ok(()),
        };
        self.layers.entry(*id).or_default().extend(damages);
        Ok(())
    }

    fn environments(&mut self) -> Result<BTreeMap<EnvId, Vec<LayerId>>> {
        let mut found = BTreeMap::new();
        for id in self.store.list_environments()? {
            self.done.environments += 1;
            match self.store.read_environment(&id) {
                Ok(environment) => {
                    for layer in &environment.layers {
                        if !self.store.has_layer(layer)? {
                            self.layers.entry(*layer).or_default().push("it is lost".to_owned());
                            self.done.parts.layers.insert(*layer);
                        }
                    }
                    found.insert(id, environment.layers);
                }
                Err(error) if tolerable(&error) => {
                    self.environments.entry(id).or_default().push(error.chain());
                    self.done.parts.environments.insert(id);
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Every signature, whoever made it: whether one trusts its key is another question.
    fn signatures(&mut self) -> Result<()> {
        for name in self.store.signature_names()? {
            match self.store.read_signature_at(&name) {
                Ok(signature) => {
                    *self.done.signers.entry(signature.statement.key).or_default() += 1;
                }
                Err(error) if tolerable(&error) => {
                    self.done.parts.signatures.insert(name, error.chain());
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Where every reference points now.
    fn references(&mut self) -> Result<Vec<(Reference, Target)>> {
        let mut targets = Vec::new();
        for (reference, newest) in self.store.list_references(None)? {
            for number in self.store.history_numbers(&reference)? {
                self.done.entries += 1;
                let entry = match self.store.read_entry(&reference, number) {
                    Ok(entry) => entry,
                    Err(error) if tolerable(&error) => {
                        let references = match number == newest {
                            true => vec![reference.to_string()],
                            false => Vec::new(),
                        };
                        self.done.damages.push(Damage { what: error.chain(), references });
                        self.done.parts.entries.push((reference.clone(), number));
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                let Some(target) = entry.target.filter(|_| number == newest) else { continue };
                match target {
                    Target::Layer(id) if !self.store.has_layer(&id)? => {
                        self.layers.entry(id).or_default().push("it is lost".to_owned());
                        self.done.parts.layers.insert(id);
                    }
                    Target::Environment(id) if !self.store.has_environment(&id)? => {
                        self.environments.entry(id).or_default().push("it is lost".to_owned());
                        self.done.parts.environments.insert(id);
                    }
                    _ => {}
                }
                targets.push((reference.clone(), target));
            }
        }
        Ok(targets)
    }

    fn leases(&mut self) -> Result<()> {
        for id in self.store.list_lease_ids()? {
            match self.store.read_lease(&id) {
                Err(error) if tolerable(&error) => {
                    let what =
                        format!("{}; nothing is collected until it is removed", error.chain());
                    self.done.damages.push(Damage { what, references: Vec::new() });
                }
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Says of each damage which references it hits.
    fn judge(
        &mut self,
        hinted: &BTreeMap<LayerId, HashSet<PackId>>,
        environments: &BTreeMap<EnvId, Vec<LayerId>>,
        targets: &[(Reference, Target)],
    ) {
        let hits = |layers: &dyn Fn(&LayerId) -> bool, env: Option<&EnvId>| -> Vec<String> {
            let is_hit = |target: &Target| match target {
                Target::Layer(id) => layers(id),
                Target::Environment(id) => {
                    env == Some(id)
                        || environments.get(id).is_some_and(|stack| stack.iter().any(layers))
                }
            };
            let hit = targets.iter().filter(|(_, target)| is_hit(target));
            let names: BTreeSet<String> = hit.map(|(reference, _)| reference.to_string()).collect();
            names.into_iter().collect()
        };
        let mut damages = Vec::new();
        let parts = &self.done.parts;
        for pack in &parts.unreadable {
            let uses = |id: &LayerId| hinted.get(id).is_some_and(|packs| packs.contains(pack));
            let what = format!("pack {pack}: its footer cannot be read");
            damages.push(Damage { what, references: hits(&uses, None) });
        }
        for (pack, wrong) in &parts.wrong {
            let lost: HashSet<LayerId> = parts
                .missing
                .iter()
                .filter(|(digest, _)| wrong.contains(digest))
                .map(|(_, layer)| *layer)
                .collect();
            let uses = |id: &LayerId| {
                lost.contains(id) || hinted.get(id).is_some_and(|packs| packs.contains(pack))
            };
            let what =
                format!("pack {pack}: {} chunks are not what their digests say", wrong.len());
            damages.push(Damage { what, references: hits(&uses, None) });
        }
        for (id, whats) in &self.layers {
            for what in whats {
                let what = format!("layer {id}: {what}");
                damages.push(Damage { what, references: hits(&|layer| layer == id, None) });
            }
        }
        for (id, whats) in &self.environments {
            for what in whats {
                let what = format!("environment {id}: {what}");
                damages.push(Damage { what, references: hits(&|_| false, Some(id)) });
            }
        }
        for (name, what) in &parts.signatures {
            let references = match signature_named(name) {
                Some((Target::Layer(id), _)) => hits(&|layer| *layer == id, None),
                Some((Target::Environment(id), _)) => hits(&|_| false, Some(&id)),
                None => Vec::new(),
            };
            damages.push(Damage { what: what.clone(), references });
        }
        self.done.damages.extend(damages);
    }
}

fn check_pack(store: &Store, pack: &PackId, read_data: bool) -> Result<PackFound> {
    let entries = store.read_pack_footer(pack)?;
    let mut found = PackFound::default();
    let mut payload = Vec::new();
    for entry in entries {
        let right = !read_data || {
            payload.resize(entry.stored_bytes as usize, 0);
            found.bytes_read += u64::from(entry.stored_bytes);
            let read = store.read_pack(pack, entry.offset, &mut payload).and_then(|()| {
                verify_chunk(&payload, entry.codec, entry.plain_bytes, &entry.digest)
            });
            match read {
                Ok(()) => true,
                Err(error) if tolerable(&error) => false,
                Err(error) => return Err(error),
            }
        };
        if right {
            found.sound.push(entry.digest);
        } else {
            found.wrong.insert(entry.digest);
        }
    }
    Ok(found)
}

/// Damage of an object, as opposed to a store that does not answer.
fn tolerable(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported | ErrorKind::Invalid)
}
