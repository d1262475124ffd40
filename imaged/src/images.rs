//! What the parts of the daemon share: the store, the catalog and what is being published at the moment.
//!
//! Locking: `indexing` serialises refreshes of the catalog, so that a burst of misses lists the store once after
//! another and not all at once; `publishes` and `swept` guard small tables and are never held over I/O.

use crate::catalog::Catalog;
use crate::meters::Meters;
use crate::publish::Publish;
use layer::Result;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use store::Store;
use tokio::sync::Semaphore;

/// Upload streams at the same time; more wait. Each holds at most `upload::IN_FLIGHT_BYTES`.
const MAX_UPLOADS: usize = 8;

#[derive(Debug)]
pub(crate) struct Images {
    pub(crate) store: Arc<Store>,
    pub(crate) catalog: Catalog,
    pub(crate) indexing: Mutex<()>,
    pub(crate) publishes: Mutex<HashMap<String, Arc<Publish>>>,
    pub(crate) swept: Mutex<Option<Instant>>,
    pub(crate) uploads: Arc<Semaphore>,
    pub(crate) meters: Meters,
}

impl Images {
    pub(crate) fn open(store: Arc<Store>, catalog_directory: &Path) -> Result<Self> {
        let (catalog, new) = Catalog::open(catalog_directory, store.id())?;
        let images = Self {
            store,
            catalog,
            indexing: Mutex::default(),
            publishes: Mutex::default(),
            swept: Mutex::default(),
            uploads: Arc::new(Semaphore::new(MAX_UPLOADS)),
            meters: Meters::new(),
        };
        if new {
            let found = images.reindex()?;
            tracing::info!("catalog filled from the store: {found:?}");
        }
        Ok(images)
    }
}

pub(crate) fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
