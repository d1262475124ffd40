//! What this node uses is kept on the store: a lease on every layer that is attached or about to be.
//!
//! A layer is leased before it is attached for the first time, and as long as fsd has it attached or somebody
//! asked for it lately. Leases outlive this process by hours, so that mounts that go on without a node keep
//! what they read.
//!
//! A store that cannot be written, or is away, stops nobody from starting what the node has: it is told, and
//! tried again every minute. The grace of a collection is longer than that.
//!
//! Locking: one lock around the table, not held over I/O.

use layer::{Digest, ErrorKind, LayerId, Result};
use proto::v1::StatsRequest;
use proto::v1::layer_fs_client::LayerFsClient;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tonic::transport::Channel;

/// How long a lease lasts.
const TTL: Duration = Duration::from_secs(6 * 3600);
/// When it is renewed at the latest.
const RENEW_AFTER: Duration = Duration::from_secs(2 * 3600);
/// How often fsd is asked.
const TICK: Duration = Duration::from_secs(60);
/// For how long a layer is kept that somebody asked for and that is not attached.
const LINGER: Duration = Duration::from_secs(15 * 60);

#[derive(Debug, Default)]
struct State {
    /// Layers under a lease, and when somebody asked for them.
    held: HashMap<LayerId, Instant>,
    leases: Vec<String>,
    /// The leases before, for listings that run while new ones are put.
    before: Vec<String>,
    renewed: Option<Instant>,
}

/// The leases of one node.
#[derive(Debug, Clone)]
pub struct NodeLeases {
    images: imaged::Service,
    holder: String,
    state: Arc<Mutex<State>>,
}

impl NodeLeases {
    /// `data` tells the nodes of one host apart.
    pub fn new(images: imaged::Service, data: &Path) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let name = Digest::of(format!("{host} {}", data.display()).as_bytes()).short();
        Self { images, holder: format!("node-{name}"), state: Arc::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps these from now on. `NotFound` when one of them is gone. Blocks where one is new.
    pub fn hold(&self, layers: &[LayerId]) -> Result<()> {
        let new: Vec<LayerId> = {
            let mut state = self.state();
            let now = Instant::now();
            let is_new = |id: &&LayerId| match state.held.get_mut(*id) {
                Some(asked) => {
                    *asked = now;
                    false
                }
                None => true,
            };
            layers.iter().filter(is_new).copied().collect()
        };
        if new.is_empty() {
            return Ok(());
        }
        match self.images.pin(&self.holder, &new, TTL) {
            Ok(lease) => {
                let mut state = self.state();
                state.leases.push(lease);
                state.held.extend(new.into_iter().map(|id| (id, Instant::now())));
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Err(error),
            Err(error) => {
                tracing::warn!(error = error.chain(), "layers in use are not leased yet");
                Ok(())
            }
        }
    }

    /// Brings the leases in step with what is attached, for ever.
    pub async fn keep(self, layerfs: Channel) {
        loop {
            match attached(&layerfs).await {
                Ok(layers) => {
                    let this = self.clone();
                    let renewed = tokio::task::spawn_blocking(move || this.renew(&layers)).await;
                    if let Ok(Err(error)) = renewed {
                        tracing::warn!(error = error.chain(), "leases are not renewed");
                    }
                }
                Err(error) => {
                    tracing::debug!(error = error.chain(), "what is attached is not known");
                }
            }
            tokio::time::sleep(TICK).await;
        }
    }

    fn renew(&self, attached: &HashSet<LayerId>) -> Result<()> {
        let layers: Vec<LayerId> = {
            let mut state = self.state();
            let lingers = |asked: &Instant| asked.elapsed() < LINGER;
            let wanted = state.held.iter().filter(|(_, asked)| lingers(asked)).map(|(id, _)| *id);
            let wanted: HashSet<LayerId> = wanted.chain(attached.iter().copied()).collect();
            let in_time = state.renewed.is_some_and(|at| at.elapsed() < RENEW_AFTER);
            if in_time && wanted.len() == state.held.len() && state.leases.len() <= 16 {
                // No listing is as old as the last round.
                let before = std::mem::take(&mut state.before);
                drop(state);
                return before.iter().try_for_each(|lease| self.images.unpin(lease));
            }
            let old = Instant::now().checked_sub(LINGER).unwrap_or_else(Instant::now);
            let asked = |id: &LayerId| state.held.get(id).copied().unwrap_or(old);
            state.held = wanted.iter().map(|id| (*id, asked(id))).collect();
            wanted.into_iter().collect()
        };
        let leases = self.images.pin_again(&self.holder, &layers, TTL)?;
        let ended = {
            let mut state = self.state();
            state.renewed = Some(Instant::now());
            let last = std::mem::replace(&mut state.leases, leases);
            std::mem::replace(&mut state.before, last)
        };
        ended.iter().try_for_each(|lease| self.images.unpin(lease))
    }

    /// Ends them: nothing of this node is in use any more.
    pub fn release(&self) {
        let state = std::mem::take(&mut *self.state());
        for lease in state.leases.iter().chain(&state.before) {
            if let Err(error) = self.images.unpin(lease) {
                tracing::debug!(error = error.chain(), "a lease ends by itself");
            }
        }
    }
}

async fn attached(layerfs: &Channel) -> Result<HashSet<LayerId>> {
    let mut client = LayerFsClient::new(layerfs.clone());
    let stats = client.stats(StatsRequest {}).await.map_err(proto::status::from_status)?;
    let layers = stats.into_inner().layers.into_iter();
    let held = layers
        .filter(|layer| layer.pinned || !layer.holders.is_empty() || !layer.exported_to.is_empty());
    held.map(|layer| LayerId::from_slice(&layer.layer_id)).collect()
}
