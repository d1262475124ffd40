//! The layers that this node has open: a chunk that one of them holds is copied, not fetched again.
//!
//! Each layer has an index of its chunks by digest, four bytes a chunk; a look-up is a binary search in
//! every open layer. Copies are verified like anything else.
//!
//! Locking: the list of layers is read on every fill and written when a layer is opened.

use super::FetchLayer;
use layer::ChunkDigest;
use layer::chunk::ChunkTable;
use std::sync::{Arc, PoisonError, RwLock, Weak};

/// More open layers than this are not searched: fetching is cheaper then.
const MAX_SEARCHED: usize = 64;

/// The chunks of one layer by digest.
#[derive(Debug)]
pub struct DigestIndex {
    order: Vec<u32>,
}

impl DigestIndex {
    /// Sorts the chunks of a table.
    pub fn new(table: &ChunkTable) -> Self {
        let chunks = table.chunks();
        let mut order: Vec<u32> = (0..chunks.len() as u32).collect();
        order.sort_unstable_by_key(|index| chunks[*index as usize].digest);
        Self { order }
    }

    fn find(&self, table: &ChunkTable, digest: &ChunkDigest) -> Option<usize> {
        let chunks = table.chunks();
        let at = self.order.binary_search_by_key(digest, |index| chunks[*index as usize].digest);
        at.ok().map(|at| self.order[at] as usize)
    }
}

/// The open layers.
#[derive(Debug, Default)]
pub struct Siblings {
    layers: RwLock<Vec<Weak<FetchLayer>>>,
}

impl Siblings {
    /// One more layer whose chunks may be copied.
    pub fn add(&self, layer: &Arc<FetchLayer>) {
        let mut layers = self.layers.write().unwrap_or_else(PoisonError::into_inner);
        layers.retain(|layer| layer.strong_count() > 0);
        layers.push(Arc::downgrade(layer));
    }

    /// The verified plain bytes of a chunk that another open layer, or another place of the same one,
    /// has in its data file.
    pub fn copy(&self, digest: &ChunkDigest) -> Option<Vec<u8>> {
        let layers = self.layers.read().unwrap_or_else(PoisonError::into_inner);
        let found =
            layers.iter().rev().take(MAX_SEARCHED).filter_map(Weak::upgrade).find_map(|layer| {
                let chunk = layer.digests.find(layer.cached.table(), digest)?;
                layer.cached.has(chunk).then_some((layer, chunk))
            });
        drop(layers);
        let (layer, chunk) = found?;
        let entry = layer.cached.table().chunks()[chunk];
        let mut plain = vec![0; entry.plain_bytes() as usize];
        layer.cached.read(entry.offset(), &mut plain).ok()?;
        if ChunkDigest::of(&plain) == *digest {
            return Some(plain);
        }
        tracing::error!(layer = %layer.cached.id(), chunk, "a cached chunk has other bytes");
        None
    }
}
