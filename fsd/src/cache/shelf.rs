//! Which layer of the node has a chunk, in use or not: so that it is copied and never fetched twice.
//!
//! Twelve bytes a chunk: a part of its digest and its index, sorted. A hit is a hint; whoever follows it
//! looks at the presence bit and verifies the bytes.
//!
//! Locking: one lock around the list; look-ups share it.

use layer::chunk::ChunkTable;
use layer::{ChunkDigest, LayerId};
use std::collections::HashMap;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// At most so many layers are named for one chunk.
const MAX_NAMED: usize = 4;

/// The chunks of one layer by the beginning of their digest.
#[derive(Debug)]
struct Index {
    beginnings: Vec<u64>,
    chunks: Vec<u32>,
}

fn beginning(digest: &ChunkDigest) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&digest.as_bytes()[..8]);
    u64::from_be_bytes(bytes)
}

/// All layers of the node cache by their chunks.
#[derive(Debug, Default)]
pub struct Shelf {
    layers: RwLock<HashMap<LayerId, Index>>,
}

impl Shelf {
    fn read(&self) -> RwLockReadGuard<'_, HashMap<LayerId, Index>> {
        self.layers.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<LayerId, Index>> {
        self.layers.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this layer is known.
    pub fn knows(&self, id: &LayerId) -> bool {
        self.read().contains_key(id)
    }

    /// Takes a layer in.
    pub fn put(&self, id: &LayerId, table: &ChunkTable) {
        let chunks = table.chunks().iter().enumerate().filter(|(_, chunk)| !chunk.is_zero());
        let mut pairs: Vec<(u64, u32)> =
            chunks.map(|(index, chunk)| (beginning(&chunk.digest), index as u32)).collect();
        pairs.sort_unstable();
        let (beginnings, chunks) = pairs.into_iter().unzip();
        self.write().insert(*id, Index { beginnings, chunks });
    }

    /// The layer has left.
    pub fn take(&self, id: &LayerId) {
        self.write().remove(id);
    }

    /// Layers that probably have this chunk, and where.
    pub fn find(&self, digest: &ChunkDigest) -> Vec<(LayerId, usize)> {
        let wanted = beginning(digest);
        let layers = self.read();
        let found = layers.iter().filter_map(|(id, index)| {
            let at = index.beginnings.binary_search(&wanted).ok()?;
            Some((*id, index.chunks[at] as usize))
        });
        found.take(MAX_NAMED).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use layer::chunk::Chunk;

    #[test]
    fn chunks_are_found_in_every_layer_that_stays() {
        let table = |range: std::ops::Range<u32>| {
            let first = range.start;
            let chunk = |index: u32| Chunk {
                start_block: index - first,
                blocks: 1,
                digest: ChunkDigest::of(&index.to_le_bytes()),
            };
            ChunkTable::new(range.map(chunk).collect()).unwrap()
        };
        let shelf = Shelf::default();
        let (one, two) = (LayerId([1; 32]), LayerId([2; 32]));
        shelf.put(&one, &table(0..100));
        shelf.put(&two, &table(50..150));
        let found = |index: u32| {
            let mut found = shelf.find(&ChunkDigest::of(&index.to_le_bytes()));
            found.sort();
            found
        };
        assert_eq!(found(10), [(one, 10)]);
        assert_eq!(found(60), [(one, 60), (two, 10)]);
        assert!(found(1000).is_empty());
        shelf.take(&one);
        assert_eq!(found(60), [(two, 10)]);
        assert!(shelf.knows(&two) && !shelf.knows(&one));
    }
}
