//! Putting fsd together: what is started in which order, and what a former fsd left is taken over.
//!
//! ```text
//! locks -> keepers found -> group and journal (theirs or new) -> engine -> reconcile -> keepers hold
//!       -> takeover answers what is owed -> event threads -> exports served again -> service
//!       -> keepers of another program replaced
//! ```
//! Stopping is the same as dying: threads simply end with the process, and the next fsd takes over.

use crate::attach::{AttachmentParts, Attachments};
use crate::cache::{CacheSettings, NodeCache, create_folder, lock_file};
use crate::completions::Completions;
use crate::config::FsdConfig;
use crate::exports::Exports;
use crate::fetch::{Engine, FetchSettings, Locator, MakeRoom, StoreCounters, spawn};
use crate::journal::{Journal, Outstanding};
use crate::keeper::{Inheritance, Keepers};
use crate::planes::direct::Direct;
use crate::planes::erofs_fanotify::ErofsFanotify;
use crate::planes::erofs_fanotify::events::{EventCounters, Events};
use crate::planes::erofs_fscache::ErofsFscache;
use crate::planes::erofs_fuse::ErofsFuse;
use crate::planes::fuse::Fuse;
use crate::planes::virtiofs::Servers;
use crate::planes::{Plane, PlaneKind, offers};
use crate::profile::Prefetcher;
use crate::served::Registry;
use crate::{reconcile, takeover};
use layer::{Context, LayerId, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use store::{Store, Trust};
use sys::fanotify::Group;

/// Event numbers are below this, whatever the host would allow: a successor answers each of them.
const MAX_NUMBERS: u64 = 65_536;

/// Between two evictions at least, and at most without any.
const EVICTION_PAUSE: Duration = Duration::from_millis(100);
const EVICTION_INTERVAL: Duration = Duration::from_secs(10);

/// A daemon that waits should not be as large as its start.
pub fn let_go_of_program() {
    if let Err(error) = sys::footprint::let_go_of_program() {
        tracing::debug!(%error, "let go of pages of the program");
    }
}

/// A running fsd.
pub struct Node {
    /// What is served for whom.
    pub attachments: Arc<Attachments>,
    /// Which layers are being loaded whole.
    pub completions: Arc<Completions>,
    /// What is exported to whom.
    pub exports: Arc<Exports>,
    /// Which layers are served to virtual machines.
    pub servers: Servers,
    /// The keepers; absent without fanotify.
    pub keepers: Option<Arc<Keepers>>,
    /// What the event threads did.
    pub event_counters: Arc<EventCounters>,
    _lock: File,
}

/// Raises the soft limit of descriptors; answers it.
pub fn raise_descriptor_limit() -> Result<u32> {
    let name = || "raise the descriptor limit".to_owned();
    let resource = sys::process::Resource::Descriptors;
    let (_, hard) = sys::process::limit_of(resource).context(name)?;
    let soft = hard.min(MAX_NUMBERS);
    sys::process::set_limit(resource, soft, hard).context(name)?;
    Ok(soft as u32)
}

/// The group, its journal, and what a dead fsd owed under it.
struct Notification {
    group: Group,
    journal: Arc<Journal>,
    inherited: Option<(Vec<Outstanding>, BTreeMap<LayerId, OwnedFd>)>,
}

impl Notification {
    fn open(inheritance: Option<Inheritance>) -> Result<Self> {
        match inheritance {
            Some(Inheritance { group, journal, files }) => {
                let group = Group::from_fd(group);
                match Journal::adopt(journal) {
                    Ok((journal, owed)) => {
                        Ok(Self { group, journal, inherited: Some((owed, files)) })
                    }
                    Err(error) => {
                        // Of another version: what was owed cannot be known, so all of it is an error.
                        tracing::error!(error = %error.chain(), "blocked readers get errors");
                        let journal = Journal::create()?;
                        journal.note_numbers(MAX_NUMBERS as u32)?;
                        Ok(Self { group, journal, inherited: Some((Vec::new(), files)) })
                    }
                }
            }
            None => {
                let group = Group::new().context(|| "make a fanotify group".to_owned())?;
                Ok(Self { group, journal: Journal::create()?, inherited: None })
            }
        }
    }
}

impl Node {
    /// Starts everything but the service. Blocks.
    pub fn start(config: &FsdConfig, locator: Arc<dyn Locator>) -> Result<Arc<Self>> {
        let paths = config.paths()?;
        create_folder(&paths.run)?;
        let lock =
            lock_file(&paths.lock(), &format!("data directory {}", config.data_dir.display()))?;
        let limit = raise_descriptor_limit()?;
        let cache = NodeCache::open(&paths.cache, CacheSettings::of(config))?;
        let store = Arc::new(Store::open(store::open(&config.store_url)?)?);
        let settings = FetchSettings {
            deadline: config.deadline,
            full_disk_deadline: config.full_disk_deadline.min(config.deadline),
            threads: config.fill_threads,
        };
        let engine = Engine::start(settings, cache.space().clone())?;
        let (keepers, inheritance) = Keepers::find(config)?;
        let registry = Arc::new(Registry::default());
        let event_counters = Arc::new(EventCounters::default());
        let offered = offers::probe(&paths.cache, inheritance.is_some());
        offers::check(&offered, config.plane)?;
        let notification = offered
            .contains(&PlaneKind::ErofsFanotify)
            .then(|| Notification::open(inheritance))
            .transpose()?;
        let fanotify = notification.as_ref().map(|notification| {
            let group = notification.group.clone();
            let plane = ErofsFanotify::new(group, Arc::clone(&keepers), Arc::clone(&registry));
            Arc::new(plane) as Arc<dyn Plane>
        });
        let fuse: Arc<dyn Plane> = Arc::new(ErofsFuse::new(&paths.fuse(), engine.clone())?);
        let mut planes: Vec<Arc<dyn Plane>> = fanotify.iter().map(Arc::clone).collect();
        planes.push(fuse);
        planes.push(Arc::new(Fuse::new(engine.clone())));
        let (fscache, counters) = (paths.fscache(), Arc::clone(&event_counters));
        planes.push(Arc::new(ErofsFscache::new(&fscache, engine.clone(), counters)));
        planes.push(Arc::new(Direct::new(Arc::clone(&store))));
        planes.retain(|plane| offered.contains(&plane.kind()));
        planes.sort_by_key(|plane| plane.kind());
        let prefetcher = Prefetcher::start(engine.clone(), Arc::clone(&store))?;
        let attachments = Attachments::new(AttachmentParts {
            planes,
            default_plane: config.plane,
            paths,
            cache,
            store,
            locator,
            store_counters: Arc::new(StoreCounters::default()),
            engine: engine.clone(),
            prefetcher,
            recorder: Arc::default(),
            trust: config.trusted_keys.clone().map(Trust::new),
        })?;
        engine.set_make_room(Arc::clone(&attachments) as Arc<dyn MakeRoom>);
        let paths = config.paths()?;
        let exports =
            Arc::new(Exports::new(&paths.exports(), &paths.exported(), Arc::clone(&attachments))?);
        let servers =
            Servers::new(&paths.virtiofs(), config.virtiofs_command.clone(), Arc::clone(&exports))?;
        let keepers_in_use = notification.is_some().then(|| Arc::clone(&keepers));
        let completions = Completions::open(&paths.completions(), config.prefetch_rate)?;
        let node = Arc::new(Self {
            attachments,
            completions: Arc::new(completions),
            exports,
            servers,
            keepers: keepers_in_use,
            event_counters,
            _lock: lock,
        });
        match notification {
            Some(notification) => node.begin(config, notification, &registry, &keepers, limit)?,
            None => reconcile::reconcile(&node.attachments, &registry, BTreeMap::new())?,
        }
        node.completions.resume(&node.attachments)?;
        node.servers.restore(node.exports.restore()?);
        node.start_upkeep(config)?;
        node.start_eviction()?;
        let_go_of_program();
        Ok(node)
    }

    /// Takes over what was left, then lets events in.
    fn begin(
        &self,
        config: &FsdConfig,
        notification: Notification,
        registry: &Arc<Registry>,
        keepers: &Arc<Keepers>,
        limit: u32,
    ) -> Result<()> {
        let Notification { group, journal, inherited } = notification;
        let engine = &self.attachments.parts().engine;
        let (owed, files) =
            inherited.map_or((None, BTreeMap::new()), |(owed, files)| (Some(owed), files));
        let known: BTreeSet<LayerId> = files.keys().copied().collect();
        reconcile::reconcile(&self.attachments, registry, files)?;
        let marked = registry.marked();
        for layer in &marked {
            // INVARIANT: what counts as marked is marked. The dead fsd may have died after it gave the file
            // to its keepers and before the mark, or between the end of the mark and of the file.
            let data = layer.fetch().cached().quiet_data();
            group.mark(data).context(|| format!("mark layer {}", layer.id()))?;
        }
        let held = marked
            .iter()
            .map(|layer| (layer.id(), layer.fetch().cached().quiet_data()))
            .collect::<BTreeMap<_, _>>();
        keepers.hold(std::os::fd::AsFd::as_fd(&group), journal.descriptor(), &held)?;
        for id in known.iter().filter(|id| !held.contains_key(*id)) {
            keepers.forget(id);
        }
        if let Some(owed) = owed {
            takeover::recover(&group, &journal, owed, registry, engine, &self.event_counters)?;
        }
        // INVARIANT: the bound is in the journal before the first number below it is given out.
        journal.note_numbers(limit)?;
        Events::start(
            group,
            journal,
            Arc::clone(registry),
            engine.clone(),
            Arc::clone(&self.event_counters),
            config.event_threads,
        )?;
        let keepers = Arc::clone(keepers);
        spawn("keeper-renewal", move || keepers.renew())
    }

    /// Keeps the cache below its limit, and learns what chunks are in it.
    fn start_eviction(&self) -> Result<()> {
        let attachments = Arc::clone(&self.attachments);
        spawn("eviction", move || {
            let cache = &attachments.parts().cache;
            if let Err(error) = cache.fill_shelf() {
                tracing::warn!(error = %error.chain(), "learn what is in the cache");
            }
            while cache.space().limit().is_some() {
                if let Err(error) = attachments.enforce_limit() {
                    tracing::error!(error = %error.chain(), "keep the cache below its limit");
                }
                // Not in a tight circle where all of the cache is in use.
                std::thread::sleep(EVICTION_PAUSE);
                cache.space().wait_over(EVICTION_INTERVAL);
            }
        })
    }

    /// Bytes filled and read so far: a sign of work.
    fn work_done(attachments: &Attachments) -> u64 {
        let parts = attachments.parts();
        let filled = parts.engine.counters().filled_bytes.load(Ordering::Relaxed);
        filled + parts.store_counters.bytes.load(Ordering::Relaxed) + parts.cache.brought_bytes()
    }

    fn start_upkeep(&self, config: &FsdConfig) -> Result<()> {
        let (attachments, interval) = (Arc::clone(&self.attachments), config.sync_interval);
        let exports = Arc::clone(&self.exports);
        spawn("upkeep", move || {
            let (mut done, mut trimmed) = (0, 0);
            loop {
                std::thread::sleep(interval);
                attachments.upkeep();
                exports.upkeep();
                let before = std::mem::replace(&mut done, Self::work_done(&attachments));
                // Work has come to a rest: what it needed is given back once.
                if done == before && done != trimmed {
                    sys::footprint::trim_allocator();
                    trimmed = done;
                }
            }
        })
    }
}

impl Node {
    /// Unmounts everything and lets the keepers go.
    pub fn drain(&self, force: bool) -> Result<()> {
        self.completions.break_off();
        self.servers.close(force)?;
        self.exports.close(force)?;
        self.attachments.drain(force)?;
        for plane in &self.attachments.parts().planes {
            plane.close()?;
        }
        Ok(())
    }
}
