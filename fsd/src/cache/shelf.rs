//! Which layer of the node has a chunk, in use or not: so that it is copied and never fetched twice.
//!
//! A hit is a hint; whoever follows it looks at the presence bit and verifies the bytes.
//!
//! Locking: one lock around the list; look-ups share it.

use super::index::ChunkIndex;
use layer::{ChunkDigest, LayerId};
use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// At most so many layers are named for one chunk.
const MAX_NAMED: usize = 4;

/// All layers of the node cache by their chunks.
#[derive(Debug, Default)]
pub struct Shelf {
    layers: RwLock<HashMap<LayerId, Arc<ChunkIndex>>>,
}

impl Shelf {
    fn read(&self) -> RwLockReadGuard<'_, HashMap<LayerId, Arc<ChunkIndex>>> {
        self.layers.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<LayerId, Arc<ChunkIndex>>> {
        self.layers.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this layer is known.
    pub fn knows(&self, id: &LayerId) -> bool {
        self.read().contains_key(id)
    }

    /// The index of a layer that is known.
    pub fn get(&self, id: &LayerId) -> Option<Arc<ChunkIndex>> {
        self.read().get(id).map(Arc::clone)
    }

    /// Takes a layer in.
    pub fn put(&self, id: &LayerId, index: Arc<ChunkIndex>) {
        self.write().insert(*id, index);
    }

    /// The layer has left.
    pub fn take(&self, id: &LayerId) {
        self.write().remove(id);
    }

    /// Layers that probably have this chunk, and where.
    pub fn find(&self, digest: &ChunkDigest) -> Vec<(LayerId, usize)> {
        let layers = self.read();
        let found = layers.iter().filter_map(|(id, index)| Some((*id, index.find(digest)?)));
        found.take(MAX_NAMED).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use layer::chunk::{Chunk, ChunkTable};

    #[test]
    fn chunks_are_found_in_every_layer_that_stays() {
        let table = |range: std::ops::Range<u32>| {
            let first = range.start;
            let chunk = |index: u32| Chunk {
                start_block: index - first,
                blocks: 1,
                digest: ChunkDigest::of(&index.to_le_bytes()),
            };
            let table = ChunkTable::new(range.map(chunk).collect()).unwrap();
            Arc::new(ChunkIndex::new(&table))
        };
        let shelf = Shelf::default();
        let (one, two) = (LayerId([1; 32]), LayerId([2; 32]));
        shelf.put(&one, table(0..100));
        shelf.put(&two, table(50..150));
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
