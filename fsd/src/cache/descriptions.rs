//! What this process knows of layers without reading it again: manifests and chunk tables, verified when they
//! were read, of layers that are in use or were lately.
//!
//! Locking: one lock around the list.
//! Nothing survives a crash: the folders have it all.

use layer::LayerId;
use layer::chunk::ChunkTable;
use layer::manifest::Manifest;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// At most so many chunks are kept, of all layers together: 40 bytes each.
const MAX_CHUNKS: usize = 1 << 17;
/// At most so many layers are kept.
const MAX_LAYERS: usize = 256;

/// Manifest and chunk table of one layer.
#[derive(Debug, Clone)]
pub(super) struct Description {
    pub(super) manifest: Manifest,
    pub(super) table: Arc<ChunkTable>,
}

/// Descriptions, the least recently used first.
#[derive(Debug, Default)]
pub(super) struct Descriptions {
    kept: Mutex<VecDeque<(LayerId, Description)>>,
}

impl Descriptions {
    fn kept(&self) -> MutexGuard<'_, VecDeque<(LayerId, Description)>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known of a layer.
    pub(super) fn get(&self, id: &LayerId) -> Option<Description> {
        let mut kept = self.kept();
        let at = kept.iter().position(|(known, _)| known == id)?;
        let found = kept.remove(at)?;
        kept.push_back(found.clone());
        Some(found.1)
    }

    /// Keeps one; what was used longest ago gives way.
    pub(super) fn put(&self, id: &LayerId, description: &Description) {
        self.forget(id);
        let mut kept = self.kept();
        kept.push_back((*id, description.clone()));
        let mut chunks: usize = kept.iter().map(|(_, known)| known.table.len()).sum();
        while chunks > MAX_CHUNKS || kept.len() > MAX_LAYERS {
            let Some((_, gone)) = kept.pop_front() else { break };
            chunks -= gone.table.len();
        }
    }

    /// The layer has left.
    pub(super) fn forget(&self, id: &LayerId) {
        self.kept().retain(|(known, _)| known != id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use layer::ChunkDigest;
    use layer::chunk::Chunk;
    use layer::manifest::LayerKind;

    #[test]
    fn what_was_used_longest_ago_gives_way() {
        let chunk = |index: usize| {
            let digest = ChunkDigest::of(&index.to_le_bytes());
            Chunk { start_block: index as u32, blocks: 1, digest }
        };
        let table = ChunkTable::new((0..MAX_CHUNKS / 3).map(chunk).collect()).unwrap();
        let manifest = Manifest::describing(LayerKind::Base, &table, &[]);
        let description = Description { manifest, table: Arc::new(table) };
        let known = Descriptions::default();
        let id = |number: u8| LayerId([number; 32]);
        (1..=3).for_each(|number| known.put(&id(number), &description));
        assert!(known.get(&id(1)).is_some());
        known.put(&id(4), &description);
        let kept = |number: u8| known.get(&id(number)).is_some();
        assert_eq!([1, 2, 3, 4].map(kept), [true, false, true, true]);
        known.forget(&id(3));
        assert!(!kept(3));
        let table = ChunkTable::new((0..=MAX_CHUNKS).map(chunk).collect()).unwrap();
        known.put(&id(5), &Description { table: Arc::new(table), ..description });
        assert_eq!([1, 4, 5].map(kept), [false; 3], "one that is too large is not kept");
    }
}
