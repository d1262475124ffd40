//! The image daemon: what is published, under which names, and who is using it.
//!
//! ```text
//!  rpc ── wire types in, wire types out; moves blocking work to threads that may block
//!   │
//!  images ── publish · names · leases · index · gc: the rules, on inner types
//!   │                   │
//!  store (the truth)   catalog (a cache of it, RocksDB)
//! ```
//!
//! All durable truth is on the store. The catalog can be deleted at any time; several daemons may share one store,
//! each with its own catalog.
//!
//! // CRASH: the order of a publish is packs, then the location hint, then the layer, then the reference. Whatever
//! is cut off leaves packs that no layer names: a repeated publish finds and uses them, or `gc` deletes them.
#![forbid(unsafe_code)]

mod catalog;
pub mod fsck;
mod gc;
mod images;
mod index;
mod leases;
mod meters;
mod names;
mod protect;
mod publish;
mod rpc;
#[cfg(test)]
mod sim;
mod upload;
mod wire;

pub use gc::{CollectOptions, Collected};

use layer::{Digest, LayerId, Result};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use store::Store;

/// What the daemon needs.
#[derive(Debug, Clone)]
pub struct ImagedConfig {
    /// Where everything is published.
    pub store: Arc<Store>,
    /// Where the catalog lies; created when it is absent.
    pub catalog_dir: PathBuf,
}

/// The image daemon. Cheap to clone; the catalog is closed with the last clone and the last running call.
#[derive(Debug, Clone)]
pub struct Service {
    images: Arc<images::Images>,
}

impl Service {
    /// Opens the catalog, and fills it from the store when it is new. Blocks.
    ///
    /// `Busy` when another process has the catalog.
    pub fn open(config: ImagedConfig) -> Result<Self> {
        Ok(Self { images: Arc::new(images::Images::open(config.store, &config.catalog_dir)?) })
    }

    /// What the call `Resolve` answers, for a caller in the same process. Blocks.
    pub fn resolve(&self, name: &str) -> Result<proto::v1::ResolveResponse> {
        self.images.resolve(name).map(wire::resolved)
    }

    /// Deletes what nothing uses; see [`CollectOptions`]. Blocks. `Busy` when another collector is at work on the
    /// store.
    pub fn collect(&self, options: &CollectOptions) -> Result<Collected> {
        self.images.collect(options)
    }

    /// Pins layers for a node until the lease ends; those that are gone are `NotFound`. Blocks. Returns the lease.
    pub fn pin(&self, holder: &str, layers: &[LayerId], ttl: Duration) -> Result<String> {
        let ids = layers.iter().map(|id| Digest(id.0)).collect();
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        self.images.acquire_lease(holder, ids, ttl_ms).map(|lease| lease.id)
    }

    /// Pins again what is pinned already, whatever has become of it. Blocks. Returns the leases.
    pub fn pin_again(
        &self,
        holder: &str,
        layers: &[LayerId],
        ttl: Duration,
    ) -> Result<Vec<String>> {
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let parts = layers.chunks(store::MAX_LEASE_IDS);
        let leases = parts.map(|part| {
            let ids = part.iter().map(|id| Digest(id.0)).collect();
            self.images.put_lease(holder, ids, "in use on a node", ttl_ms).map(|lease| lease.id)
        });
        leases.collect()
    }

    /// Ends a lease; one that has ended is fine. Blocks.
    pub fn unpin(&self, lease: &str) -> Result<()> {
        self.images.release_lease(lease)
    }

    /// The gRPC routes of this daemon.
    pub fn routes(&self) -> tonic::service::Routes {
        self.calls().measure(rpc::routes(self.images.clone()))
    }

    /// What is measured of its calls.
    pub fn calls(&self) -> &Arc<proto::meter::calls::Calls> {
        &self.images.meters.calls
    }

    /// Writes down what it counts, but for the calls.
    pub fn write_meters(&self, page: &mut proto::meter::Page) {
        self.images.write_meters(page);
    }
}
