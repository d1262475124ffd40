//! fsd: gives layers to kernels and fetches their blocks when somebody touches them.
//!
//! [`run`] is the daemon; [`keeper::run`] is the small process beside it that keeps readers waiting
//! while no fsd lives. Code map: [`FsdConfig`] and paths in `config`; `cache` (the node cache),
//! `fetch` (one engine under all planes), `planes`, `exports` (layers as files for virtual machines), `journal` and `takeover` (what survives a
//! `kill -9` with readers blocked), `attach` and `reconcile` (who holds what), `completions` (what is
//! loaded whole), `service`.
#![forbid(unsafe_code)]

mod attach;
mod cache;
mod clock;
mod completions;
mod config;
mod exports;
mod fetch;
mod holders;
mod incidents;
mod journal;
pub mod keeper;
#[cfg(test)]
mod known_layer;
mod locate;
mod made_files;
pub mod metrics;
mod node;
mod planes;
mod profile;
mod ranges;
mod readahead;
mod reads;
mod reconcile;
mod served;
mod service;
mod stats;
mod streams;
mod takeover;

pub use cache::check::{Checked, check_cache};
pub use config::{CacheLimit, FsdConfig, KEEPERS, Paths};
pub use journal::count_unanswered;
pub(crate) use node::{let_go_of_program, raise_descriptor_limit};
pub use planes::PlaneKind;
pub use planes::virtiofs::server as virtiofs;

use layer::{Error, ErrorKind, Result};
use std::future::Future;
use std::sync::Arc;
use tokio::sync::Notify;

/// Runs the daemon until `shutdown` resolves or a `Drain` ends it.
///
/// After a return the process should end: threads may still take events, which the next fsd takes
/// over. Mounts stay, and so do the keepers, unless it was drained.
pub async fn run(config: FsdConfig, shutdown: impl Future<Output = ()> + Send) -> Result<()> {
    let paths = config.paths()?;
    let locator = Arc::new(locate::NodeLocator::new(&paths.node_socket()));
    let metrics = config.metrics;
    let started = tokio::task::spawn_blocking(move || {
        keeper::remove_empty_groups();
        node::Node::start(&config, locator)
    });
    let node = started.await.map_err(|error| {
        Error::new(ErrorKind::Internal, "the start of fsd died").with_source(error)
    })??;
    if let Some(address) = metrics {
        metrics::serve(address, metrics::of_node(Arc::clone(&node)));
    }
    let drained = Arc::new(Notify::new());
    let service = service::Service::new(Arc::clone(&node), Arc::clone(&drained));
    tracing::info!(socket = %paths.socket().display(), "fsd serves");
    let completions = Arc::clone(&node.completions);
    let ended = async move {
        tokio::select! {
            () = shutdown => {}
            () = drained.notified() => {}
        }
        // Their callers would be waited for.
        completions.break_off();
    };
    proto::connect::serve_unix(&paths.socket(), service.routes(), ended).await?;
    let flush = tokio::task::spawn_blocking(move || {
        node.attachments.finish();
        keeper::remove_empty_groups();
    });
    flush
        .await
        .map_err(|error| Error::new(ErrorKind::Internal, "the last flush died").with_source(error))
}
