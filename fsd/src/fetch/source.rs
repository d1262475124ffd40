//! Where a layer's chunks come from: the location hint, the packs, and what to do when a hint is stale.
//!
//! Locking: one mutex around the hint in use; it is held while a new hint is read, so that many
//! readers of a stale one ask once.

use layer::location::Locations;
use layer::{Error, LayerId, PackId, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use store::Store;

/// Asks imaged for a fresh hint.
pub trait Locator: Send + Sync {
    /// Has a new hint for this layer written to the store.
    fn locate(&self, layer: &LayerId) -> Result<()>;
}

/// What was read from the store.
#[derive(Debug, Default)]
pub struct StoreCounters {
    /// Bytes, as stored.
    pub bytes: AtomicU64,
    /// Reads.
    pub reads: AtomicU64,
}

/// The chunks of one layer on the store.
pub struct Source {
    layer: LayerId,
    chunks: usize,
    store: Arc<Store>,
    locator: Arc<dyn Locator>,
    counters: Arc<StoreCounters>,
    hint: Mutex<Option<Arc<Locations>>>,
}

impl Source {
    /// Nothing is read yet.
    pub fn new(
        layer: LayerId,
        chunks: usize,
        store: Arc<Store>,
        locator: Arc<dyn Locator>,
        counters: Arc<StoreCounters>,
    ) -> Self {
        Self { layer, chunks, store, locator, counters, hint: Mutex::new(None) }
    }

    /// The hint in use; read from the store at the first call.
    pub fn locations(&self) -> Result<Arc<Locations>> {
        let mut hint = self.hint.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*hint {
            return Ok(Arc::clone(known));
        }
        let found = match self.read_hint()? {
            Some(found) => found,
            None => {
                self.locator.locate(&self.layer)?;
                self.read_hint()?.ok_or_else(|| {
                    Error::not_found(format!("no locations for layer {}", self.layer))
                })?
            }
        };
        *hint = Some(Arc::clone(&found));
        Ok(found)
    }

    /// Reads the hint if the store has one.
    pub fn look_ahead(&self) {
        let mut hint = self.hint.lock().unwrap_or_else(PoisonError::into_inner);
        if hint.is_none() {
            match self.read_hint() {
                Ok(found) => *hint = found,
                Err(error) => tracing::debug!(error = %error.chain(), "no locations ahead"),
            }
        }
    }

    /// A hint other than `stale`, which led nowhere.
    pub fn relocate(&self, stale: &Arc<Locations>) -> Result<Arc<Locations>> {
        let mut hint = self.hint.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*hint
            && !Arc::ptr_eq(known, stale)
        {
            return Ok(Arc::clone(known));
        }
        let on_store = self.read_hint()?.filter(|found| **found != **stale);
        let found = match on_store {
            Some(found) => found,
            None => {
                self.locator.locate(&self.layer)?;
                self.read_hint()?.filter(|found| **found != **stale).ok_or_else(|| {
                    let text = format!("the locations of layer {} are right", self.layer);
                    Error::not_found(text)
                })?
            }
        };
        tracing::info!(layer = %self.layer, "a fresh location hint replaces a stale one");
        *hint = Some(Arc::clone(&found));
        Ok(found)
    }

    fn read_hint(&self) -> Result<Option<Arc<Locations>>> {
        let Some(found) = self.store.read_locations(&self.layer)? else { return Ok(None) };
        if found.placements.len() != self.chunks {
            let text = format!(
                "locations of layer {} name {} chunks, it has {}",
                self.layer,
                found.placements.len(),
                self.chunks
            );
            return Err(Error::corrupt(text));
        }
        Ok(Some(Arc::new(found)))
    }

    /// Reads stored bytes of one pack.
    pub fn read(&self, pack: &PackId, offset: u64, payload: &mut [u8]) -> Result<()> {
        self.store.read_pack(pack, offset, payload)?;
        self.counters.reads.fetch_add(1, Ordering::Relaxed);
        self.counters.bytes.fetch_add(payload.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").field("layer", &self.layer).finish_non_exhaustive()
    }
}
