//! The layers that snapshots show: attached at the node's file-system daemon, one holder for each snapshot.
//!
//! A snapshot that shows a layer holds it as long as it exists, mounted or not: so the node keeps a lease on the
//! layer, and no collection takes it from the store.
//!
//! CRASH: a layer is attached before the snapshot has a record and detached after it has none; the holders that no
//! snapshot answers for are found by their name at the next start and at each clean-up.

use crate::record::Shown;
use layer::{Digest, ErrorKind, LayerId, Result};
use proto::status::from_status;
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::{AttachRequest, DetachRequest, Plane, StatsRequest};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tonic::transport::Channel;

/// How often a daemon that is being restarted is asked.
const TRIES: u32 = 50;
/// How long between two of them.
const PAUSE: Duration = Duration::from_millis(100);

/// What the name of every holder of a snapshotter begins with.
pub const HOLDER_PREFIX: &str = "containerd-";

/// The daemon, as the snapshots of one root see it.
#[derive(Debug, Clone)]
pub struct Layers {
    client: LayerFsClient<Channel>,
    prefix: String,
}

impl Layers {
    /// `root` tells the snapshots of one root from those of others.
    pub fn new(channel: Channel, root: &Path) -> Self {
        let key = Digest::of(root.as_os_str().as_bytes()).short();
        Self { client: LayerFsClient::new(channel), prefix: format!("{HOLDER_PREFIX}{key}-") }
    }

    fn holder(&self, id: u64) -> String {
        format!("{}{id}", self.prefix)
    }

    /// Mounts a layer for snapshot `id`, or finds it mounted. `NotFound` when the store has none such.
    pub async fn attach(&self, id: u64, shown: &Shown) -> Result<PathBuf> {
        let request = AttachRequest {
            layer_id: shown.layer.as_bytes().to_vec(),
            holder: self.holder(id),
            plane: Plane::Auto.into(),
            env_id: shown.environment.map(|id| id.as_bytes().to_vec()).unwrap_or_default(),
        };
        let what = || format!("attach layer {}", shown.layer.short());
        for left in (0..TRIES).rev() {
            match self.client.clone().attach(request.clone()).await.map_err(from_status) {
                Ok(answer) => return Ok(PathBuf::from(answer.into_inner().mount_path)),
                Err(error) if error.kind() == ErrorKind::Unavailable && left > 0 => {
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(error.context(what())),
            }
        }
        Err(layer::Error::new(ErrorKind::Unavailable, what()))
    }

    /// Takes back what [`Layers::attach`] did. One that holds nothing is no error.
    pub async fn detach(&self, id: u64, layer: &LayerId) -> Result<()> {
        let (layer_id, holder) = (layer.as_bytes().to_vec(), self.holder(id));
        let request = DetachRequest { layer_id, holder };
        match self.client.clone().detach(request).await.map_err(from_status) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error.context(format!("detach layer {}", layer.short())))
            }
            _ => Ok(()),
        }
    }

    /// What is held under our name: for which snapshot, and which layer.
    pub async fn held(&self) -> Result<Vec<(u64, LayerId)>> {
        let stats = self.client.clone().stats(StatsRequest {}).await.map_err(from_status)?;
        let mut held = Vec::new();
        for stats in stats.into_inner().layers {
            let layer = LayerId::from_slice(&stats.layer_id)?;
            let numbers = stats.holders.iter().filter_map(|it| it.strip_prefix(&self.prefix));
            held.extend(numbers.filter_map(|id| id.parse().ok()).map(|id| (id, layer)));
        }
        Ok(held)
    }

    /// Bytes that the node's cache holds of a layer that is attached.
    pub async fn disk_bytes(&self, layer: &LayerId) -> Result<u64> {
        let stats = self.client.clone().stats(StatsRequest {}).await.map_err(from_status)?;
        let layers = stats.into_inner().layers;
        let found = layers.iter().find(|stats| stats.layer_id == layer.as_bytes());
        Ok(found.map_or(0, |stats| stats.disk_bytes))
    }
}

/// Whether something is mounted where this link leads.
pub fn is_mounted(link: &Path) -> bool {
    let device = |path: &Path| std::fs::metadata(path).ok().map(|metadata| metadata.dev());
    let Ok(place) = std::fs::read_link(link) else { return false };
    let outside = place.parent().and_then(device);
    outside.is_some() && device(&place).is_some_and(|inside| Some(inside) != outside)
}
