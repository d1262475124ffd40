//! The interface that containerd calls.
//!
//! Locking: one lock around the state, taken on threads that may block, never over a call to a daemon. A layer is
//! attached before the lock is taken and given back after it; what is on its way is noted as pending, so that a
//! clean-up leaves it alone.
//!
//! CRASH: see [`crate::record`], [`crate::folders`], [`crate::layers`]: every step leaves what the next start
//! removes, or what it finds whole.

mod rpc;

use crate::api::Mount;
use crate::api::snapshots::v1::snapshots_server::SnapshotsServer;
use crate::chains::Chains;
use crate::filter::Filters;
use crate::folders::{self, Folders};
use crate::labels::{Labels, SHOWN_LAYER, TARGET, WANTED_ENVIRONMENT, WANTED_LAYER};
use crate::layers::{self, Layers};
use crate::mounts;
use crate::record::{Kind, Shown, Snapshot, Usage};
use crate::state::{State, Wanted, measure};
use layer::{Context, EnvId, Error, ErrorKind, LayerId, Result};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tonic::service::Routes;
use tonic::transport::Channel;

/// How long until a node that is away is looked for again.
const NODE_PAUSE: Duration = Duration::from_secs(1);

/// What a snapshotter works with.
#[derive(Debug)]
pub struct Config {
    /// The directory of its snapshots, for it alone. On a file system that overlayfs takes as an upper one.
    pub root: PathBuf,
    /// The node's file-system daemon.
    pub layerfs: Channel,
    /// The node's image daemon.
    pub images: Channel,
}

/// A snapshotter.
#[derive(Debug, Clone)]
pub struct Service(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    folders: Folders,
    layers: Layers,
    chains: Chains,
    /// Layers that are attached for snapshots to come.
    pending: Mutex<HashMap<u64, LayerId>>,
    /// Options of every overlay.
    options: Vec<&'static str>,
    root: File,
    _lock: File,
}

impl Service {
    /// Reads what there is, and begins to mount the layers of it. `Busy` when another process has the root.
    ///
    /// Must be called in a tokio runtime. A node that is away is waited for in the background.
    pub async fn open(config: Config) -> Result<Self> {
        let Config { root, layerfs, images } = config;
        let layers = Layers::new(layerfs, &root);
        let opened = blocking(move || {
            let lock = folders::lock(&root)?;
            let state = State::open(&root)?;
            let root = File::open(&root).context(|| format!("open {}", root.display()))?;
            Ok((lock, state, root))
        });
        let (lock, state, root) = opened.await?;
        let service = Self(Arc::new(Inner {
            folders: state.folders().clone(),
            state: Mutex::new(state),
            layers,
            chains: Chains::new(images),
            pending: Mutex::default(),
            options: mounts::wanted_options(),
            root,
            _lock: lock,
        }));
        tokio::spawn(Self::restore(Arc::downgrade(&service.0)));
        Ok(service)
    }

    /// What to serve.
    pub fn routes(&self) -> Routes {
        Routes::new(SnapshotsServer::new(self.clone()))
    }

    /// Gives back what an earlier process held in vain, and mounts what snapshots show.
    async fn restore(inner: Weak<Inner>) {
        let mut told = false;
        // A service that nobody has any more waits for nobody.
        while let Some(service) = inner.upgrade().map(Self) {
            match service.give_back().await {
                Ok(()) => return service.mount_all().await,
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::warn!(error = error.chain(), "waiting for the node");
                    }
                }
                Err(error) => {
                    tracing::error!(error = error.chain(), "what was held in vain stays held");
                    return service.mount_all().await;
                }
            }
            drop(service);
            tokio::time::sleep(NODE_PAUSE).await;
        }
    }

    async fn mount_all(&self) {
        let all: Vec<Snapshot> = self.state().all().cloned().collect();
        for snapshot in all {
            // One that cannot be mounted concerns nobody else.
            if let Err(error) = self.mount(&snapshot).await {
                tracing::error!(error = error.chain(), "snapshot {:?}", snapshot.name);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pending(&self) -> MutexGuard<'_, HashMap<u64, LayerId>> {
        self.0.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the state, on a thread that may block.
    async fn locked<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut State) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let service = self.clone();
        blocking(move || work(&mut service.state())).await
    }

    /// Detaches what is held for no snapshot.
    async fn give_back(&self) -> Result<()> {
        let held = self.0.layers.held().await?;
        // Looked at afterwards: who was attached before has a record by now, or is pending, or is gone.
        let mut known: HashSet<(u64, LayerId)> =
            self.pending().iter().map(|(&id, &layer)| (id, layer)).collect();
        let shown = |it: &Snapshot| it.shown.as_ref().map(|shown| (it.id, shown.layer));
        known.extend(self.state().all().filter_map(shown));
        for (id, layer) in held.iter().filter(|held| !known.contains(held)) {
            self.0.layers.detach(*id, layer).await?;
        }
        Ok(())
    }

    /// Mounts the layer that a snapshot shows, if it shows one and that is not mounted.
    async fn mount(&self, snapshot: &Snapshot) -> Result<()> {
        let Some(shown) = &snapshot.shown else { return Ok(()) };
        let (id, folders) = (snapshot.id, self.0.folders.clone());
        if layers::is_mounted(&folders.link(id)) {
            return Ok(());
        }
        let path = self.0.layers.attach(id, shown).await?;
        blocking(move || folders.point(id, &path)).await
    }

    /// A snapshot of a layer that is known, for whoever prepares a ChainID. False where it is not known.
    async fn show(&self, key: &str, parent: &str, chain: &str, labels: &Labels) -> Result<bool> {
        let known = {
            let state = self.state();
            if state.get(key).is_ok() {
                return Err(Error::new(ErrorKind::Exists, format!("snapshot {key:?} exists")));
            }
            state.check_parent(parent)?;
            if state.targets(chain).any(|it| it.parent == parent) {
                return Ok(true);
            }
            state.targets(chain).find_map(|it| it.shown.clone())
        };
        let wanted = wanted(labels)?;
        let is_guess = wanted.is_none() && known.is_none();
        let found = match wanted.or(known) {
            Some(shown) => Some(shown),
            None => self.0.chains.find(chain).await?,
        };
        let Some(shown) = found else { return Ok(false) };
        let id = self.state().next_id();
        self.pending().insert(id, shown.layer);
        let done = self.show_at(id, &shown, parent, chain, labels).await;
        if !matches!(done, Ok(true)) {
            self.let_go(id, Some(shown.layer)).await;
        }
        self.pending().remove(&id);
        match done {
            Err(error) if error.kind() == ErrorKind::NotFound && is_guess => {
                tracing::warn!(error = error.chain(), "{chain} has to be unpacked");
                self.0.chains.forget(chain).await;
                Ok(false)
            }
            done => done.map(|_| true),
        }
    }

    /// False when somebody else was faster.
    async fn show_at(
        &self,
        id: u64,
        shown: &Shown,
        parent: &str,
        chain: &str,
        labels: &Labels,
    ) -> Result<bool> {
        let path = self.0.layers.attach(id, shown).await?;
        let mut labels = labels.clone();
        labels.retain(|name, _| name != WANTED_LAYER && name != WANTED_ENVIRONMENT);
        labels.insert(SHOWN_LAYER.to_owned(), shown.layer.to_string());
        let (chain, parent, shown) = (chain.to_owned(), parent.to_owned(), Some(shown.clone()));
        self.locked(move |state| {
            if state.targets(&chain).any(|it| it.parent == parent) {
                return Ok(false);
            }
            state.folders().point(id, &path)?;
            let name = state.name_for(&chain, id);
            let wanted = Wanted { name, parent, kind: Kind::Committed, labels, shown };
            state.create(id, wanted).map(|_| true)
        })
        .await
    }

    /// Gives back what a snapshot that is no more had. What fails is left to a clean-up.
    async fn let_go(&self, id: u64, layer: Option<LayerId>) {
        if let Some(layer) = layer
            && let Err(error) = self.0.layers.detach(id, &layer).await
        {
            tracing::warn!(error = error.chain(), "held until the next clean-up");
        }
        let folders = self.0.folders.clone();
        if let Err(error) = blocking(move || folders.remove(id)).await {
            tracing::warn!(error = error.chain(), "left until the next clean-up");
        }
    }

    /// An empty snapshot on `parent`.
    async fn make(
        &self,
        kind: Kind,
        key: String,
        parent: String,
        labels: Labels,
    ) -> Result<Vec<Mount>> {
        let line = {
            let state = self.state();
            state.check_parent(&parent)?;
            state.line(&parent)?
        };
        for below in &line {
            self.mount(below).await?;
        }
        let service = self.clone();
        let made = self.locked(move |state| {
            let id = state.next_id();
            let wanted = Wanted { name: key, parent, kind, labels, shown: None };
            let made = state.create(id, wanted)?;
            service.mounts_of(&made, &line).inspect_err(|_| {
                // Nobody has heard of it.
                if let Err(error) = state.remove(&made.name) {
                    tracing::warn!(error = error.chain(), "undo a snapshot");
                }
            })
        });
        made.await
    }

    fn mounts_of(&self, snapshot: &Snapshot, below: &[Snapshot]) -> Result<Vec<Mount>> {
        mounts::of(snapshot, below, &self.0.folders, &self.0.options)
    }

    async fn prepare(&self, key: String, parent: String, labels: Labels) -> Result<Vec<Mount>> {
        crate::labels::check(&labels)?;
        if let Some(chain) = labels.get(TARGET).filter(|chain| !chain.is_empty())
            && self.show(&key, &parent, chain, &labels).await?
        {
            let text = format!("snapshot {chain:?} is there");
            return Err(Error::new(ErrorKind::Exists, text));
        }
        self.make(Kind::Active, key, parent, labels).await
    }

    async fn mounts(&self, key: &str) -> Result<Vec<Mount>> {
        let (snapshot, below) = {
            let state = self.state();
            let snapshot = state.get(key)?.clone();
            let below = state.below(&snapshot)?;
            (snapshot, below)
        };
        if snapshot.kind == Kind::Committed {
            let text = format!("snapshot {key:?} is committed, so others stand on it");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        for it in &below {
            self.mount(it).await?;
        }
        self.mounts_of(&snapshot, &below)
    }

    async fn commit(&self, key: String, name: String, labels: Labels) -> Result<()> {
        let service = self.clone();
        blocking(move || {
            let upper = {
                let state = service.state();
                let active = state.committable(&key, &name)?;
                state.folders().upper(active.id)
            };
            // Whoever finds the record after a crash of the machine finds the files too.
            rustix::fs::syncfs(&service.0.root)
                .map_err(|error| Error::io("flush a snapshot", error.into()))?;
            let usage = folders::usage(&upper)?;
            service.state().commit(&key, &name, labels, usage)
        })
        .await
    }

    async fn remove(&self, key: String) -> Result<()> {
        let removed = self.locked(move |state| state.remove(&key)).await?;
        self.let_go(removed.id, removed.shown.map(|shown| shown.layer)).await;
        Ok(())
    }

    async fn usage(&self, key: &str) -> Result<Usage> {
        let snapshot = self.state().get(key)?.clone();
        match &snapshot.shown {
            // What the node holds of it; other snapshots may show the same.
            Some(shown) => {
                Ok(Usage { bytes: self.0.layers.disk_bytes(&shown.layer).await?, inodes: 0 })
            }
            None => {
                let folders = self.0.folders.clone();
                blocking(move || measure(&folders, &snapshot)).await
            }
        }
    }

    fn list(&self, filters: &[String]) -> Result<Vec<Snapshot>> {
        let filters = Filters::parse(filters)?;
        Ok(self.state().all().filter(|snapshot| filters.want(snapshot)).cloned().collect())
    }

    async fn cleanup(&self) -> Result<()> {
        self.locked(|state| state.remove_leftovers()).await?;
        self.give_back().await
    }
}

/// The layer that labels ask for.
fn wanted(labels: &Labels) -> Result<Option<Shown>> {
    let Some(layer) = labels.get(WANTED_LAYER) else { return Ok(None) };
    let environment = labels.get(WANTED_ENVIRONMENT);
    let environment = environment.map(|id| id.parse::<EnvId>()).transpose()?;
    Ok(Some(Shown { layer: layer.parse::<LayerId>()?, environment }))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Error::new(ErrorKind::Internal, "a thread died").with_source(error))?
}

#[cfg(test)]
mod tests;
