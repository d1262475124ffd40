//! The layers that this node's sandboxes use: attached once, counted here, let go after a while.
//!
//! One holder for the whole runtime, so that a create whose layers are attached costs no call at all.
//! Locking: the table's mutex is held for look-ups; a layer's own asynchronous mutex orders its attach
//! and its detach. CRASH: fsd keeps what the holder held; [`Layers::reconcile`] gives back the rest.

use layer::{EnvId, Error, ErrorKind, LayerId, Result};
use proto::status::from_status;
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::{AttachRequest, DetachRequest, Plane, PrefetchRequest, StatsRequest};
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tonic::transport::Channel;

/// Where a layer is mounted, and by what.
#[derive(Debug, Clone)]
struct Place {
    path: PathBuf,
    plane: Plane,
}

impl Place {
    /// Its path, for one who wants this plane.
    fn path_for(&self, layer: &LayerId, wanted: Plane) -> Result<PathBuf> {
        if wanted == Plane::Auto || wanted == self.plane {
            return Ok(self.path.clone());
        }
        let (served, wanted) = (self.plane.as_str_name(), wanted.as_str_name());
        let text = format!("layer {} is served by {served}, not {wanted}", layer.short());
        Err(Error::new(ErrorKind::Busy, text))
    }
}

/// Where a layer is mounted, once it is; locked while it is attached or detached.
type Noted = Arc<tokio::sync::Mutex<Option<Place>>>;

#[derive(Debug)]
struct Entry {
    place: Noted,
    users: usize,
    idle_since: Instant,
}

impl Entry {
    fn is_idle(&self, linger: Duration) -> bool {
        self.users == 0 && self.idle_since.elapsed() >= linger
    }
}

/// Environments that are remembered as told about; then all are forgotten.
const MAX_TOLD: usize = 4096;

/// The attached layers.
#[derive(Debug)]
pub struct Layers {
    client: LayerFsClient<Channel>,
    holder: String,
    entries: Mutex<HashMap<LayerId, Entry>>,
    /// Environments whose profile fsd has been told about since the last detach.
    told: Mutex<HashSet<EnvId>>,
}

impl Layers {
    /// `holder` is what fsd knows this runtime by, the same after a restart.
    pub fn new(channel: Channel, holder: String) -> Self {
        Self {
            client: LayerFsClient::new(channel),
            holder,
            entries: Mutex::default(),
            told: Mutex::default(),
        }
    }

    /// Attaches a stack, bottom first, for one user; answers the mount points in the same order. The
    /// environment, where there is one, tells fsd what will be read.
    pub async fn attach(
        &self,
        layers: &[LayerId],
        environment: Option<&EnvId>,
        plane: Plane,
    ) -> Result<Vec<PathBuf>> {
        if let Some(environment) = environment {
            self.tell(layers, environment);
        }
        // Side by side: a layer that is new to the node takes its time, on other cores and links than the next.
        let mut attaching = JoinSet::new();
        let mut found = Vec::with_capacity(layers.len());
        for (index, layer) in layers.iter().enumerate() {
            let place = self.take(layer);
            if let Some(known) = place.try_lock().ok().as_ref().and_then(|known| known.as_ref()) {
                found.push((index, known.path_for(layer, plane)));
                continue;
            }
            let request = self.request(layer, environment, plane);
            let (client, layer) = (self.client.clone(), *layer);
            attaching
                .spawn(async move { (index, attach_at(&place, client, &layer, request).await) });
        }
        while let Some(attached) = attaching.join_next().await {
            match attached {
                Ok(attached) => found.push(attached),
                Err(error) => {
                    found.push((0, Err(Error::new(ErrorKind::Internal, error.to_string()))));
                }
            }
        }
        found.sort_unstable_by_key(|(index, _)| *index);
        let places: Result<Vec<PathBuf>> = found.into_iter().map(|(_, place)| place).collect();
        if places.is_err() {
            self.release(layers);
        }
        places
    }

    /// Has fsd fetch ahead what this environment touches of layers that are attached already, once. It is
    /// advice, so nobody waits for it.
    fn tell(&self, layers: &[LayerId], environment: &EnvId) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.len() == MAX_TOLD {
            told.clear();
        }
        if !told.insert(*environment) {
            return;
        }
        drop(told);
        let request = PrefetchRequest {
            env_id: environment.as_bytes().to_vec(),
            layer_ids: layers.iter().map(|layer| layer.as_bytes().to_vec()).collect(),
        };
        let mut client = self.client.clone();
        tokio::spawn(async move {
            if let Err(status) = client.prefetch(request).await {
                tracing::debug!(%status, "nothing is fetched ahead");
            }
        });
    }

    /// Counts one more user of a layer; answers where its place is noted.
    fn take(&self, layer: &LayerId) -> Noted {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.entry(*layer).or_insert_with(|| Entry {
            place: Arc::default(),
            users: 0,
            idle_since: Instant::now(),
        });
        entry.users += 1;
        Arc::clone(&entry.place)
    }

    fn request(&self, layer: &LayerId, environment: Option<&EnvId>, plane: Plane) -> AttachRequest {
        AttachRequest {
            layer_id: layer.as_bytes().to_vec(),
            holder: self.holder.clone(),
            plane: plane.into(),
            env_id: environment.map(|id| id.as_bytes().to_vec()).unwrap_or_default(),
        }
    }

    /// Takes one user off each.
    pub fn release(&self, layers: &[LayerId]) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        for layer in layers {
            if let Some(entry) = entries.get_mut(layer) {
                entry.users = entry.users.saturating_sub(1);
                entry.idle_since = Instant::now();
            }
        }
    }

    /// Where those layers are mounted that nobody has used for this long.
    pub async fn idle_places(&self, linger: Duration) -> Vec<PathBuf> {
        let mut places = Vec::new();
        for (_, place) in self.idle(linger) {
            places.extend(place.lock().await.as_ref().map(|place| place.path.clone()));
        }
        places
    }

    fn idle(&self, linger: Duration) -> Vec<(LayerId, Noted)> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let found = entries.iter().filter(|(_, entry)| entry.is_idle(linger));
        found.map(|(layer, entry)| (*layer, Arc::clone(&entry.place))).collect()
    }

    /// Detaches what nobody has used for this long.
    pub async fn detach_idle(&self, linger: Duration) {
        for (layer, place) in self.idle(linger) {
            let mut place = place.lock().await;
            {
                let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
                // Once more, since it may have been used meanwhile.
                if !entries.get(&layer).is_some_and(|entry| entry.is_idle(linger)) {
                    continue;
                }
                if place.is_none() {
                    entries.remove(&layer);
                    continue;
                }
            }
            // Whoever wants the layer now waits for `place`, and attaches it anew.
            if let Err(error) = self.detach(&layer).await {
                tracing::warn!(layer = %layer.short(), error = %error.chain(), "detach");
            }
            *place = None;
        }
    }

    async fn detach(&self, layer: &LayerId) -> Result<()> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let request =
            DetachRequest { layer_id: layer.as_bytes().to_vec(), holder: self.holder.clone() };
        self.client.clone().detach(request).await.map(drop).map_err(from_status)
    }

    /// After a restart: gives back what an earlier runtime held and nobody here uses.
    pub async fn reconcile(&self) -> Result<()> {
        let stats = self.client.clone().stats(StatsRequest {}).await.map_err(from_status)?;
        let held = stats.into_inner().layers.into_iter();
        let held = held.filter(|stats| stats.holders.contains(&self.holder));
        let held = held.map(|stats| LayerId::from_slice(&stats.layer_id));
        let held = held.collect::<Result<HashSet<_>, Error>>()?;
        for layer in held {
            let is_used = {
                let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
                entries.contains_key(&layer)
            };
            if !is_used {
                self.detach(&layer).await?;
            }
        }
        Ok(())
    }
}

/// Attaches a layer unless somebody else has meanwhile.
async fn attach_at(
    place: &Noted,
    mut client: LayerFsClient<Channel>,
    layer: &LayerId,
    request: AttachRequest,
) -> Result<PathBuf> {
    let mut place = place.lock().await;
    if let Some(place) = place.as_ref() {
        return place.path_for(layer, request.plane());
    }
    let answer = client
        .attach(request)
        .await
        .map_err(|status| from_status(status).context(format!("attach layer {}", layer.short())))?;
    let answer = answer.into_inner();
    let (path, plane) = (PathBuf::from(&answer.mount_path), answer.plane());
    *place = Some(Place { path: path.clone(), plane });
    Ok(path)
}

#[cfg(test)]
mod tests;
