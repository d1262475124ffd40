//! The image daemon: what is published, under which names, and who is using it.
//!
//! ```text
//!  rpc ── wire types in, wire types out; moves blocking work to threads that may block
//!   │
//!  images ── publish · names · leases · index: the rules, on inner types
//!   │                   │
//!  store (the truth)   catalog (a cache of it, RocksDB)
//! ```
//!
//! All durable truth is on the store. The catalog can be deleted at any time; several daemons may share one store,
//! each with its own catalog.
//!
//! // CRASH: the order of a publish is packs, then the location hint, then the layer, then the reference. Whatever
//! is cut off leaves packs that no layer names: a repeated publish finds and uses them.
#![forbid(unsafe_code)]

mod catalog;
mod images;
mod index;
mod leases;
mod names;
mod publish;
mod rpc;
mod upload;
mod wire;

use layer::Result;
use std::path::PathBuf;
use std::sync::Arc;
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

    /// The gRPC routes of this daemon.
    pub fn routes(&self) -> tonic::service::Routes {
        rpc::routes(self.images.clone())
    }
}
