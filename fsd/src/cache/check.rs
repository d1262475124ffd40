//! Verifying what the cache holds against what it should be, and dropping what is not.
//!
//! A chunk that counts as present is read and hashed. Nothing is repaired in place: what is wrong is
//! dropped, in the order of an eviction, and fetched again when somebody wants it.

use super::entry::CachedLayer;
use super::{CHUNKS, MANIFEST, METADATA, NodeCache, PRESENT, bring};
use layer::chunk::ChunkTable;
use layer::manifest::Manifest;
use layer::presence::Presence;
use layer::{ChunkDigest, Context, ErrorKind, LayerId, Result};

/// Damage beyond this is only counted.
const MAX_LISTED: usize = 200;

/// What was found in one layer.
#[derive(Debug, Default)]
pub struct Findings {
    /// Chunks that were read.
    pub chunks: u64,
    /// Their plain bytes.
    pub bytes: u64,
    /// How many things are wrong.
    pub damages: u64,
    /// The first of them in words.
    pub listed: Vec<String>,
    /// Chunks that are wrong.
    pub bad_chunks: Vec<usize>,
    /// Whether the folder is of no use: its description is wrong.
    pub ruined: bool,
}

impl Findings {
    fn note(&mut self, what: String) {
        self.damages += 1;
        if self.listed.len() < MAX_LISTED {
            self.listed.push(what);
        }
    }

    fn ruin(&mut self, what: String) {
        self.note(what);
        self.ruined = true;
    }
}

impl CachedLayer {
    /// Reads and hashes every chunk that counts as present.
    pub fn check_chunks(&self, findings: &mut Findings) {
        let mut plain = Vec::new();
        for (index, chunk) in self.table().chunks().iter().enumerate() {
            if chunk.is_zero() || !self.has(index) {
                continue;
            }
            plain.resize(chunk.plain_bytes() as usize, 0);
            match self.read(chunk.offset(), &mut plain) {
                Ok(()) if ChunkDigest::of(&plain) == chunk.digest => {}
                Ok(()) => {
                    findings.bad_chunks.push(index);
                    findings.note(format!("chunk {index} has other bytes"));
                }
                // Evicted meanwhile.
                Err(error) if error.kind() == ErrorKind::Busy => continue,
                Err(error) => {
                    findings.bad_chunks.push(index);
                    findings.note(error.chain());
                }
            }
            findings.chunks += 1;
            findings.bytes += u64::from(chunk.plain_bytes());
        }
    }
}

impl NodeCache {
    /// Verifies manifest, chunk table, metadata image and presence file of a layer's folder.
    pub fn check_description(&self, id: &LayerId) -> Findings {
        let mut findings = Findings::default();
        match self.check_parts(id) {
            Ok(None) => {}
            Ok(Some(what)) => findings.note(what),
            Err(error) => findings.ruin(error.chain()),
        }
        findings
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
            return Err(layer::Error::corrupt("manifest and chunk table are of another layer"));
        }
        bring::verify_file(&folder.join(METADATA), &manifest.metadata_digest)?;
        let path = folder.join(PRESENT);
        let lost = match std::fs::read(&path) {
            Ok(file) => Presence::newest(*id, table.len() as u32, &file).is_none(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
            Err(error) => return Err(layer::Error::io(format!("read {}", path.display()), error)),
        };
        Ok(lost.then(|| "the presence file has no whole state: nothing is present".to_owned()))
    }
}
