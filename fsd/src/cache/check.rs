//! Verifying what the cache holds against what it should be, and dropping what is not.
//!
//! A chunk that counts as present is read and hashed. Nothing is repaired in place: what is wrong is
//! dropped, in the order of an eviction, and fetched again when somebody wants it.

use super::entry::CachedLayer;
use super::{CHUNKS, CacheSettings, MANIFEST, METADATA, NodeCache, PRESENT, bring};
use crate::config::Paths;
use crate::keeper;
use crate::planes::mounting;
use layer::chunk::ChunkTable;
use layer::manifest::Manifest;
use layer::presence::Presence;
use layer::{ChunkDigest, Context, Error, ErrorKind, LayerId, Result};
use std::os::fd::OwnedFd;
use std::path::Path;

/// Damage beyond this is only counted.
const MAX_LISTED: usize = 200;

/// What was found in one layer, and what was done about it.
#[derive(Debug)]
pub struct Checked {
    /// The layer.
    pub id: LayerId,
    /// Chunks that were read.
    pub chunks: u64,
    /// Their plain bytes.
    pub bytes: u64,
    /// How many things are wrong.
    pub damages: u64,
    /// The first of them in words.
    pub listed: Vec<String>,
    /// How many of them are repaired.
    pub repaired: u64,
    /// Whether the layer is in use.
    pub served: bool,
    /// Whether the folder is of no use: its description is wrong.
    pub ruined: bool,
}

impl Checked {
    fn note(&mut self, what: String) {
        self.damages += 1;
        if self.listed.len() < MAX_LISTED {
            self.listed.push(what);
        }
    }
}

impl CachedLayer {
    /// Reads and hashes every chunk that counts as present. Answers those that are wrong.
    pub fn check_chunks(&self, checked: &mut Checked) -> Vec<usize> {
        let (mut plain, mut bad) = (Vec::new(), Vec::new());
        for (index, chunk) in self.table().chunks().iter().enumerate() {
            if chunk.is_zero() || !self.has(index) {
                continue;
            }
            plain.resize(chunk.plain_bytes() as usize, 0);
            match self.read(chunk.offset(), &mut plain) {
                Ok(()) if ChunkDigest::of(&plain) == chunk.digest => {}
                Ok(()) => {
                    bad.push(index);
                    checked.note(format!("chunk {index} has other bytes"));
                }
                // Evicted meanwhile.
                Err(error) if error.kind() == ErrorKind::Busy => continue,
                Err(error) => {
                    bad.push(index);
                    checked.note(error.chain());
                }
            }
            checked.chunks += 1;
            checked.bytes += u64::from(chunk.plain_bytes());
        }
        bad
    }
}

/// Verifies the cache of a data directory that no daemon has open, and tells of every layer. What is
/// mounted is left as it is: the next daemon repairs it.
pub fn check_cache(data: &Path, repair: bool, mut tell: impl FnMut(Checked)) -> Result<()> {
    let paths = Paths::new(data)?;
    let cache = NodeCache::open(&paths.cache, CacheSettings::default())?;
    // A daemon that was killed leaves its mounts, and their data files may be marked still: who opens one
    // and reads waits for the next daemon. What is marked, keepers hold, opened before it was.
    let mut quiet = keeper::held_files(&paths)?;
    for id in cache.layers()? {
        let mounted = mounting::has_superblock(&cache.folder_of(&id).join(METADATA))?;
        if mounted {
            tell(cache.check_mounted(&id, quiet.remove(&id))?);
        } else {
            tell(cache.check_resting(&id, repair)?);
        }
    }
    Ok(())
}

impl NodeCache {
    /// Verifies everything of a layer that nobody serves. Under the attachments' lock of that layer.
    pub fn check_resting(&self, id: &LayerId, repair: bool) -> Result<Checked> {
        if !self.folder_of(id).exists() {
            return Err(Error::not_found(format!("layer {id} is not on this node")));
        }
        let mut checked = self.check_description(id);
        if checked.ruined {
            if repair {
                self.remove(id)?;
                checked.repaired = checked.damages;
            }
            return Ok(checked);
        }
        let cached = self.open_dormant(id)?;
        let bad = cached.check_chunks(&mut checked);
        if repair && !bad.is_empty() && cached.is_exposed() {
            // Somebody may have it mapped: no block is taken from under him.
            drop(cached);
            self.remove(id)?;
            checked.repaired = checked.damages;
        } else if repair && checked.damages > 0 {
            cached.evict(&bad)?;
            // A presence file without a state gets one.
            cached.record()?;
            checked.repaired = checked.damages;
        }
        Ok(checked)
    }

    /// Verifies everything of a layer that a dead daemon left mounted, and changes nothing.
    fn check_mounted(&self, id: &LayerId, quiet: Option<OwnedFd>) -> Result<Checked> {
        let mut checked = Checked { served: true, ..self.check_description(id) };
        if !checked.ruined {
            let (cached, _) = self.open_files(id, &self.folder_of(id), quiet, None)?;
            cached.check_chunks(&mut checked);
        }
        Ok(checked)
    }

    /// Verifies manifest, chunk table, metadata image and presence file of a layer's folder.
    pub fn check_description(&self, id: &LayerId) -> Checked {
        let mut checked = Checked {
            id: *id,
            chunks: 0,
            bytes: 0,
            damages: 0,
            listed: Vec::new(),
            repaired: 0,
            served: false,
            ruined: false,
        };
        match self.check_parts(id) {
            Ok(None) => {}
            Ok(Some(what)) => checked.note(what),
            Err(error) => {
                checked.note(error.chain());
                checked.ruined = true;
            }
        }
        checked
    }

    /// An error ruins the folder; a text is damage that costs fetches only.
    fn check_parts(&self, id: &LayerId) -> Result<Option<String>> {
        let folder = self.folder_of(id);
        let read = |name: &str| {
            let path = folder.join(name);
            std::fs::read(&path).context(|| format!("read {}", path.display()))
        };
        let manifest = Manifest::decode(&read(MANIFEST)?)?;
        let table = ChunkTable::decode(&read(CHUNKS)?)?;
        if manifest.id() != *id || table.digest() != manifest.chunk_table_digest {
            return Err(Error::corrupt("manifest and chunk table are of another layer"));
        }
        bring::verify_file(&folder.join(METADATA), &manifest.metadata_digest)?;
        let path = folder.join(PRESENT);
        let lost = match std::fs::read(&path) {
            Ok(file) => Presence::newest(*id, table.len() as u32, &file).is_none(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
            Err(error) => return Err(Error::io(format!("read {}", path.display()), error)),
        };
        Ok(lost.then(|| "the presence file has no whole state: nothing is present".to_owned()))
    }
}
