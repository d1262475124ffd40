//! The layers that this node holds: a chunk that one of them has is taken from there, not fetched again.
//!
//! A look-up is a binary search in each layer that is served. Whoever owns the cache is asked for the
//! others. Where the file system shares blocks between files nothing is copied. What was copied or shared
//! is verified like anything else.
//!
//! Locking: the list of layers is read on every fill and written when a layer is opened.

use super::{FetchLayer, MakeRoom};
use crate::cache::CachedLayer;
use layer::ChunkDigest;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};

/// More open layers than this are not searched: fetching is cheaper then.
const MAX_SEARCHED: usize = 64;

/// A chunk from another layer of this node.
#[derive(Debug)]
pub enum Copied {
    /// It is in the data file already.
    Shared,
    /// Its verified plain bytes.
    Plain(Vec<u8>),
}

/// The layers that are served.
#[derive(Debug, Default)]
pub struct Siblings {
    layers: RwLock<Vec<Weak<FetchLayer>>>,
    cannot_share: AtomicBool,
}

impl Siblings {
    /// One more layer whose chunks may be copied.
    pub fn add(&self, layer: &Arc<FetchLayer>) {
        let mut layers = self.layers.write().unwrap_or_else(PoisonError::into_inner);
        layers.retain(|layer| layer.strong_count() > 0);
        layers.push(Arc::downgrade(layer));
    }

    /// A served layer, or another place of the same one, that has this chunk in its data file.
    fn find(&self, digest: &ChunkDigest) -> Option<(Arc<CachedLayer>, usize)> {
        let layers = self.layers.read().unwrap_or_else(PoisonError::into_inner);
        layers.iter().rev().take(MAX_SEARCHED).filter_map(Weak::upgrade).find_map(|layer| {
            let chunk = layer.cached.find(digest)?;
            layer.cached.has(chunk).then(|| (Arc::clone(&layer.cached), chunk))
        })
    }

    /// Takes a chunk from another layer of this node, if one has it.
    pub fn copy(
        &self,
        target: &CachedLayer,
        chunk: usize,
        owner: Option<&dyn MakeRoom>,
    ) -> Option<Copied> {
        let digest = target.table().chunks()[chunk].digest;
        let found = self.find(&digest).or_else(|| owner?.dormant(&digest));
        let (source, from) = found?;
        // Sharing bytes that are not written back would wait for the disk.
        if !self.cannot_share.load(Ordering::Relaxed) && source.has_durably(from) {
            match target.fill_shared(chunk, &source, from) {
                Ok(true) => return Some(Copied::Shared),
                Ok(false) => self.cannot_share.store(true, Ordering::Relaxed),
                Err(error) => tracing::warn!(error = %error.chain(), "share a chunk"),
            }
        }
        let entry = source.table().chunks()[from];
        let mut plain = vec![0; entry.plain_bytes() as usize];
        source.read(entry.offset(), &mut plain).ok()?;
        if ChunkDigest::of(&plain) == digest {
            return Some(Copied::Plain(plain));
        }
        tracing::error!(layer = %source.id(), chunk = from, "a cached chunk has other bytes");
        None
    }
}
