//! Attachments: which layers are served, by which plane, for whom.
//!
//! ```text
//! (absent) --attach--> mounted --last detach--> lingering --superblock gone--> (absent)
//!                         ^                         |
//!                         |---------attach----------|
//! ```
//! A layer lingers while somebody still has a clone of its mount: it is served until that is gone.
//! `complete` and exports pin a layer without mounting it.
//!
//! Locking: the map's mutex is held for look-ups; each layer has its own mutex, held across its mount
//! or unmount, so layers do not wait for each other. Order: map, then layer.
// CRASH: a mount without a holder file is unmounted by the next start, a holder file without a mount is
// removed; a client that got no answer repeats its call.

mod check;
mod room;

use crate::cache::NodeCache;
use crate::config::Paths;
use crate::fetch::{Engine, FetchLayer, Locator, Source, StoreCounters};
use crate::holders::Holders;
use crate::planes::mounting;
use crate::planes::{Plane, PlaneKind};
use crate::profile::{Prefetcher, Recorder};
use crate::readahead::{BackingDevice, BackingDevices};
use crate::served::ServedLayer;
use layer::{Context, EnvId, Error, ErrorKind, LayerId, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use store::{Store, Trust};

/// A layer that is served.
pub struct Live {
    /// What is served.
    pub served: Arc<ServedLayer>,
    /// By what; absent for a layer that is only being completed.
    pub plane: Option<Arc<dyn Plane>>,
    /// Whether it is mounted at its mount point.
    pub mounted: bool,
    /// Who holds it.
    pub holders: BTreeSet<String>,
    /// Completions that run, and whether it is exported.
    pub pins: usize,
}

type Entry = Arc<Mutex<Option<Live>>>;

/// What an attach found or made.
#[derive(Debug)]
pub struct Attached {
    /// Where it is mounted.
    pub mount_path: PathBuf,
    /// By which plane.
    pub plane: PlaneKind,
    /// Whether reads need no fetch any more.
    pub complete: bool,
}

/// What attachments are made of.
pub struct AttachmentParts {
    /// Where everything is.
    pub paths: Paths,
    /// The node cache.
    pub cache: NodeCache,
    /// Where layers come from.
    pub store: Arc<Store>,
    /// Who finds chunks whose hint is stale.
    pub locator: Arc<dyn Locator>,
    /// What was read from the store.
    pub store_counters: Arc<StoreCounters>,
    /// The fetch engine.
    pub engine: Engine,
    /// The planes of this host, the best first.
    pub planes: Vec<Arc<dyn Plane>>,
    /// Which one serves an attach that leaves it open; the first where this does too.
    pub default_plane: Option<PlaneKind>,
    /// Who fetches ahead what profiles name.
    pub prefetcher: Prefetcher,
    /// What is recorded.
    pub recorder: Arc<Recorder>,
    /// Whose signatures are required, if any are.
    pub trust: Option<Trust>,
}

/// All attachments of the node.
pub struct Attachments {
    parts: AttachmentParts,
    holders: Holders,
    devices: BackingDevices,
    layers: Mutex<BTreeMap<LayerId, Entry>>,
    evicting: Mutex<()>,
    barren_until: Mutex<Option<Instant>>,
    evicted_bytes: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Attachments {
    /// No layer is served yet.
    pub fn new(parts: AttachmentParts) -> Result<Arc<Self>> {
        crate::cache::create_folder(&parts.paths.mounts())?;
        let holders = Holders::open(&parts.paths.holders())?;
        Ok(Arc::new(Self {
            parts,
            holders,
            devices: BackingDevices::default(),
            layers: Mutex::default(),
            evicting: Mutex::default(),
            barren_until: Mutex::default(),
            evicted_bytes: AtomicU64::new(0),
        }))
    }

    /// What the attachments are made of.
    pub fn parts(&self) -> &AttachmentParts {
        &self.parts
    }

    /// The files that say who holds what.
    pub fn holders(&self) -> &Holders {
        &self.holders
    }

    fn entry(&self, id: &LayerId) -> Entry {
        Arc::clone(lock(&self.layers).entry(*id).or_default())
    }

    fn plane(&self, wanted: Option<PlaneKind>) -> Result<&Arc<dyn Plane>> {
        let mut planes = self.parts.planes.iter();
        let wanted = wanted.or(self.parts.default_plane);
        let found = match wanted {
            Some(kind) => planes.find(|plane| plane.kind() == kind),
            None => planes.find(|plane| plane.kind().serves_every_layer()),
        };
        found.ok_or_else(|| {
            let wanted = wanted.map_or_else(String::new, |kind| format!(" {kind}"));
            let text = format!("this host has no plane{wanted}; `lamella doctor` says why");
            Error::new(ErrorKind::Unsupported, text)
        })
    }

    /// Opens a layer of the cache, or brings it to the node.
    pub fn open(&self, id: &LayerId, quiet_data: Option<OwnedFd>) -> Result<Arc<ServedLayer>> {
        let cached = Arc::new(self.open_cached(id, quiet_data)?);
        let source = Source::new(
            *id,
            cached.table().len(),
            Arc::clone(&self.parts.store),
            Arc::clone(&self.parts.locator),
            Arc::clone(&self.parts.store_counters),
        );
        let fetch = FetchLayer::new(cached, source);
        self.parts.engine.add_sibling(&fetch);
        if !fetch.cached().is_complete() {
            fetch.locate_ahead();
        }
        Ok(ServedLayer::new(fetch, false, Arc::clone(&self.parts.recorder)))
    }

    /// Takes in a layer that a former fsd served.
    pub fn adopt(&self, live: Live) {
        let id = live.served.id();
        let device = self.holders.device(&id).and_then(|name| self.devices.known(&name));
        live.served.set_device(device);
        let entry = self.entry(&id);
        *lock(&entry) = Some(live);
    }

    /// Refuses a layer that nobody who is trusted vouches for, where that is required.
    pub fn admit(&self, id: &LayerId, environment: Option<&EnvId>) -> Result<()> {
        match &self.parts.trust {
            Some(trust) => trust.admit_layer(&self.parts.store, id, environment),
            None => Ok(()),
        }
    }

    /// Mounts a layer, or counts one more holder of it. Idempotent for a holder. `environment` is what
    /// the holder wants it for, if it knows.
    pub fn attach(
        &self,
        id: &LayerId,
        holder: &str,
        wanted: Option<PlaneKind>,
        environment: Option<EnvId>,
    ) -> Result<Attached> {
        let entry = self.entry(id);
        let mut state = lock(&entry);
        // Who holds it already was let in before.
        if !state.as_ref().is_some_and(|live| live.holders.contains(holder)) {
            self.admit(id, environment.as_ref())?;
        }
        let served = match state.as_ref() {
            Some(live) => Arc::clone(&live.served),
            None => self.open(id, None)?,
        };
        let live = state.get_or_insert_with(|| Live {
            served,
            plane: None,
            mounted: false,
            holders: BTreeSet::new(),
            pins: 0,
        });
        if !live.holders.contains(holder) {
            self.parts.prefetcher.attached(live.served.fetch(), environment);
        }
        let attached = self.attach_live(live, holder, wanted);
        if attached.is_err() {
            if live.holders.is_empty() {
                self.unmount(live)?;
            }
            self.release_if_unused(&mut state)?;
        }
        attached.map_err(|error| error.context(format!("attach layer {id}")))
    }

    fn attach_live(
        &self,
        live: &mut Live,
        holder: &str,
        wanted: Option<PlaneKind>,
    ) -> Result<Attached> {
        let id = live.served.id();
        let plane = match &live.plane {
            Some(plane) if wanted.is_none_or(|kind| kind == plane.kind()) => Arc::clone(plane),
            Some(plane) => {
                let text = format!("layer {id} is served by plane {:?}", plane.kind());
                return Err(Error::new(ErrorKind::Busy, text));
            }
            None => Arc::clone(self.plane(wanted)?),
        };
        if plane.kind() == PlaneKind::Direct && self.parts.trust.is_some() {
            let text =
                "plane direct compares nothing with digests, and signatures are required here";
            return Err(Error::invalid(text));
        }
        let mount_path = self.parts.paths.mount(&id);
        if !live.mounted {
            self.mount(live, &plane, &mount_path)?;
        }
        self.holders.add(&id, holder)?;
        live.holders.insert(holder.to_owned());
        let complete = plane.stands_alone() || live.served.fetch().cached().is_complete();
        Ok(Attached { mount_path, plane: plane.kind(), complete })
    }

    fn mount(&self, live: &mut Live, plane: &Arc<dyn Plane>, at: &std::path::Path) -> Result<()> {
        let id = live.served.id();
        crate::cache::create_folder(at)?;
        let prepared = plane.prepare(&live.served)?;
        let mounted = self.devices.around(|| plane.mount(&live.served, at));
        if mounted.is_err() && prepared {
            plane.release(&live.served)?;
        }
        let device = mounted?;
        // What needs nobody is none of ours to slow down.
        let device = device.filter(|_| !plane.stands_alone());
        self.holders.set_device(&id, device.as_ref().map(BackingDevice::name))?;
        live.served.set_device(device);
        live.plane = Some(Arc::clone(plane));
        live.mounted = true;
        self.holders.set_mortal(&id, !plane.survives(&live.served))?;
        self.holders.set_alone(&id, plane.stands_alone())?;
        self.parts.cache.touch(&id);
        tracing::info!(layer = %id, plane = ?plane.kind(), "mounted");
        Ok(())
    }

    /// Takes back one attach; the last one unmounts. Answers whether it did.
    pub fn detach(&self, id: &LayerId, holder: &str) -> Result<bool> {
        let entry = self.entry(id);
        let mut state = lock(&entry);
        let Some(live) = state.as_mut() else {
            return Err(Error::not_found(format!("layer {id} is not attached")));
        };
        if !live.holders.contains(holder) {
            return Err(Error::not_found(format!("{holder:?} does not hold layer {id}")));
        }
        if live.holders.len() == 1 {
            self.unmount(live)?;
        }
        self.holders.remove(id, holder)?;
        live.holders.remove(holder);
        let unmounted = live.holders.is_empty();
        if unmounted {
            self.parts.prefetcher.forget(id);
        }
        self.release_if_unused(&mut state)?;
        Ok(unmounted)
    }

    fn unmount(&self, live: &mut Live) -> Result<()> {
        if live.mounted {
            let at = self.parts.paths.mount(&live.served.id());
            mounting::unmount(&at)?;
            std::fs::remove_dir(&at).context(|| format!("remove {}", at.display()))?;
            live.mounted = false;
        }
        Ok(())
    }

    /// Unmounts a layer that nobody holds.
    pub fn unmount_unheld(&self, id: &LayerId) -> Result<()> {
        let entry = self.entry(id);
        let mut state = lock(&entry);
        if let Some(live) = state.as_mut().filter(|live| live.holders.is_empty()) {
            self.unmount(live)?;
        }
        self.release_if_unused(&mut state)
    }

    /// Ends the service of a layer that is not mounted, whose superblock is gone and that nobody
    /// completes.
    fn release_if_unused(&self, state: &mut Option<Live>) -> Result<()> {
        let Some(live) = state.as_mut() else { return Ok(()) };
        if live.mounted || live.pins > 0 {
            return Ok(());
        }
        let lingers = match &live.plane {
            Some(plane) => plane.lingers(&live.served)?,
            None => mounting::has_superblock(&live.served.fetch().cached().metadata_path())?,
        };
        if lingers {
            return Ok(());
        }
        let id = live.served.id();
        if let Some(plane) = live.plane.take() {
            plane.release(&live.served)?;
        }
        live.served.fetch().cached().make_durable()?;
        self.holders.clear(&id)?;
        live.served.fetch().cached().retire();
        self.parts.cache.touch(&id);
        *state = None;
        tracing::info!(layer = %id, "released");
        Ok(())
    }

    /// Serves a layer without mounting it, until as many [`Attachments::unpin`].
    pub fn pin(&self, id: &LayerId) -> Result<Arc<ServedLayer>> {
        let entry = self.entry(id);
        let mut state = lock(&entry);
        let served = match state.as_ref() {
            Some(live) => Arc::clone(&live.served),
            None => self.open(id, None)?,
        };
        let live = state.get_or_insert_with(|| Live {
            served: Arc::clone(&served),
            plane: None,
            mounted: false,
            holders: BTreeSet::new(),
            pins: 0,
        });
        live.pins += 1;
        Ok(served)
    }

    /// Takes back one pin.
    pub fn unpin(&self, id: &LayerId) -> Result<()> {
        let entry = self.entry(id);
        let mut state = lock(&entry);
        if let Some(live) = state.as_mut() {
            live.pins -= 1;
            finish_completed(live)?;
        }
        self.release_if_unused(&mut state)
    }

    /// Whether somebody holds this layer.
    pub fn is_held(&self, id: &LayerId) -> bool {
        let entry = lock(&self.layers).get(id).map(Arc::clone);
        entry
            .is_some_and(|entry| lock(&entry).as_ref().is_some_and(|live| !live.holders.is_empty()))
    }

    /// Loads a whole layer, at most so many plain bytes a second (0 is no limit), as long as `goes_on` says
    /// so, and waits until what came is durable. Answers the plain bytes that came meanwhile, and whether
    /// all is there.
    pub fn complete(
        &self,
        id: &LayerId,
        rate: u64,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<(u64, bool)> {
        let served = self.pin(id)?;
        let fetched = self
            .parts
            .engine
            .complete(served.fetch(), rate, goes_on)
            .and_then(|fetched| served.fetch().cached().make_durable().map(|_| fetched));
        let whole = served.fetch().cached().is_complete();
        drop(served);
        self.unpin(id)?;
        Ok((fetched?, whole))
    }

    /// Unmounts everything. `Busy` while somebody holds a layer, unless forced.
    pub fn drain(&self, force: bool) -> Result<()> {
        let entries: Vec<_> =
            lock(&self.layers).iter().map(|(id, entry)| (*id, Arc::clone(entry))).collect();
        if !force {
            for (id, entry) in &entries {
                if let Some(live) = lock(entry).as_ref()
                    && let Some(holder) = live.holders.first()
                {
                    let text = format!("layer {id} is held by {holder:?}");
                    return Err(Error::new(ErrorKind::Busy, text));
                }
            }
        }
        for (id, entry) in &entries {
            let mut state = lock(entry);
            let Some(live) = state.as_mut() else { continue };
            self.unmount(live)?;
            live.holders.clear();
            self.release_if_unused(&mut state)?;
            // One that is being loaded is let go of by the end of the process.
            if state.as_ref().is_some_and(|live| live.pins == 0 || live.mounted) {
                let text = format!("layer {id} is mounted by others still");
                return Err(Error::new(ErrorKind::Busy, text));
            }
        }
        Ok(())
    }

    /// One round of upkeep: makes durable what was filled and has come to a rest, drops marks that are not needed any more,
    /// releases what lingered.
    pub fn upkeep(&self) {
        for (id, entry) in self.snapshot() {
            let served = lock(&entry).as_ref().map(|live| Arc::clone(&live.served));
            let Some(served) = served else { continue };
            // The flush may take long: not under the lock of the layer.
            if !served.is_restless() {
                write_back(&served);
            }
            let mut state = lock(&entry);
            let kept = match state.as_mut() {
                Some(live) => finish_completed(live),
                None => Ok(()),
            };
            if let Err(error) = kept.and_then(|()| self.release_if_unused(&mut state)) {
                tracing::error!(layer = %id, error = %error.chain(), "upkeep");
            }
        }
        lock(&self.layers).retain(|_, entry| {
            Arc::strong_count(entry) > 1 || entry.try_lock().map_or(true, |state| state.is_some())
        });
    }

    /// The last round: makes durable what was filled, come to a rest or not.
    pub fn finish(&self) {
        for (_, entry) in self.snapshot() {
            let served = lock(&entry).as_ref().map(|live| Arc::clone(&live.served));
            served.iter().for_each(|served| write_back(served));
        }
        self.upkeep();
    }

    /// Begins to record what is touched of these layers. Answers those whose reads are not all seen,
    /// because they are mounted already.
    pub fn record(
        &self,
        name: &str,
        layers: &[LayerId],
        environment: Option<EnvId>,
    ) -> Result<Vec<LayerId>> {
        self.parts.recorder.begin(name, layers, environment)?;
        let mut warm = Vec::new();
        self.each(|live| {
            if live.mounted && layers.contains(&live.served.id()) {
                warm.push(live.served.id());
            }
        });
        Ok(warm)
    }

    /// Fetches ahead what profiles name of those of these layers that are attached.
    pub fn prefetch(&self, layers: &[LayerId], environment: Option<EnvId>) {
        self.each(|live| {
            if layers.contains(&live.served.id()) {
                self.parts.prefetcher.attached(live.served.fetch(), environment);
            }
        });
    }

    fn snapshot(&self) -> Vec<(LayerId, Entry)> {
        lock(&self.layers).iter().map(|(id, entry)| (*id, Arc::clone(entry))).collect()
    }

    /// Shows every served layer to `look`.
    pub fn each(&self, mut look: impl FnMut(&Live)) {
        for (_, entry) in self.snapshot() {
            if let Some(live) = lock(&entry).as_ref() {
                look(live);
            }
        }
    }
}

/// Makes durable what was filled; a failure costs the next start its fetches, and is logged.
fn write_back(served: &ServedLayer) {
    if let Err(error) = served.fetch().cached().make_durable() {
        tracing::error!(layer = %served.id(), error = %error.chain(), "write-back failed");
    }
}

/// Tells the plane once a layer is complete and durable.
fn finish_completed(live: &Live) -> Result<()> {
    match &live.plane {
        Some(plane) if live.served.is_marked() && !live.served.needs_events() => {
            plane.completed(&live.served)?;
            live.served.adapt_readahead();
            tracing::info!(layer = %live.served.id(), "complete: its mark is dropped");
            Ok(())
        }
        _ => Ok(()),
    }
}
