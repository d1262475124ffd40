//! All sandboxes of one node: creation, supervision, removal.
//!
//! Locking: a mutex over the table of sandboxes and one over the keys of repeated creates, held for
//! look-ups. Creation runs in its own task, so that a client that leaves does not tear it in the middle.

use crate::backends::container::{Container, ContainerConfig, UserNamespaces};
use crate::backends::{Backend, Instance};
use crate::disk::DiskSize;
use crate::events::{self, EventLog};
use crate::exec::{self, CommandStore};
use crate::fncall;
use crate::journal::Journal;
use crate::layers::Layers;
use crate::lifetimes::{self, Lifetimes};
use crate::meters::Meters;
use crate::network::Networks;
use crate::pack::LayerFiles;
use crate::plan::{self, PlannedLimits};
use crate::reclaim::OwnSwap;
use crate::record::{AskedLimits, RECORD_VERSION, Record, State};
use crate::room::{self, Room};
use crate::sandbox::Sandbox;
use crate::spec::{self, SandboxSpec};
use layer::environment::{Environment, RunConfig};
use layer::{Context, Digest, EnvId, Error, ErrorKind, LayerId, Result};
use proto::status::from_status;
use proto::v1;
use proto::v1::images_client::ImagesClient;
use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{Semaphore, watch};
use tonic::transport::Channel;

/// How a node runs.
#[derive(Debug, Clone)]
pub struct RuntimeConfig {
    /// The data directory; sandboxes lie in `sandboxes` below it.
    pub data_dir: PathBuf,
    /// The image daemon.
    pub images: Channel,
    /// The file system daemon.
    pub layerfs: Channel,
    /// Memory of a sandbox that asks for no limit.
    pub default_memory_bytes: u64,
    /// Tasks of a sandbox that asks for no limit.
    pub default_pids: u32,
    /// Bytes of the writable layer of a sandbox that asks for no limit; none: it shares the disk of the data
    /// directory, and is stopped when that runs full.
    pub default_disk_bytes: Option<u64>,
    /// Bytes of the disk of the data directory that stay free; none: as much as its size suggests.
    pub disk_reserve_bytes: Option<u64>,
    /// Descriptors of a process in a sandbox that asks for no limit.
    pub default_open_files: u32,
    /// Output of one command that is sent to its client; the rest is counted.
    pub default_output_bytes: u64,
    /// Bytes of compressed memory that become swap where the host has none, so that paused sandboxes take less.
    pub zram_bytes: Option<u64>,
    /// Whether sandboxes have users of their own.
    pub user_namespaces: UserNamespaces,
    /// How the network between sandboxes and node runs.
    pub network: netpolicy::NetworkConfig,
    /// How long a layer stays attached after its last sandbox.
    pub layer_linger: Duration,
    /// How much of the log of events is kept.
    pub events: events::Rotation,
    /// Resolves names without a call; without it the image daemon is called.
    pub names: Option<Arc<dyn Names>>,
    /// Reads published layers, for packing renamed directories; without it they cannot be packed.
    pub layer_files: Option<Arc<dyn LayerFiles>>,
}

impl RuntimeConfig {
    /// The defaults of a node.
    pub fn new(data_dir: PathBuf, images: Channel, layerfs: Channel) -> Self {
        Self {
            data_dir,
            images,
            layerfs,
            default_memory_bytes: 2 << 30,
            default_pids: 1024,
            default_disk_bytes: None,
            disk_reserve_bytes: None,
            default_open_files: 1 << 16,
            default_output_bytes: 1 << 30,
            zram_bytes: None,
            user_namespaces: UserNamespaces::default(),
            network: netpolicy::NetworkConfig::default(),
            layer_linger: Duration::from_secs(10),
            events: events::Rotation::default(),
            names: None,
            layer_files: None,
        }
    }

    pub(crate) fn folder(&self) -> PathBuf {
        self.data_dir.join("sandboxes")
    }
}

/// An image daemon in the same process.
pub trait Names: Send + Sync + std::fmt::Debug {
    /// What a name stands for now. Blocks.
    fn resolve(&self, name: &str) -> Result<v1::ResolveResponse>;

    /// Whether that may run on this node. Blocks.
    fn admit(&self, _name: &str, _resolved: &v1::ResolveResponse) -> Result<()> {
        Ok(())
    }

    /// Keeps it on the store, since it is about to be attached. Blocks.
    fn hold(&self, _resolved: &v1::ResolveResponse) -> Result<()> {
        Ok(())
    }
}

/// Sandboxes that are made at once, for each core.
const LAUNCHES_PER_CORE: usize = 4;
/// Ended sandboxes that are remembered.
const MAX_ENDED: usize = 1000;

/// The node.
#[derive(Debug)]
pub struct Node {
    pub(crate) config: RuntimeConfig,
    pub(crate) container: Container,
    pub(crate) layers: Layers,
    pub(crate) networks: Networks,
    pub(crate) room: Room,
    pub(crate) images: ImagesClient<Channel>,
    pub(crate) sandboxes: Mutex<HashMap<String, Arc<Sandbox>>>,
    pub(crate) meters: Arc<Meters>,
    pub(crate) events: Arc<EventLog>,
    pub(crate) store: Arc<CommandStore>,
    pub(crate) watches: crate::files::Watches,
    pub(crate) lifetimes: Arc<Lifetimes>,
    pub(crate) functions: fncall::Functions,
    swap: OwnSwap,
    journal: Arc<Journal<Record>>,
    ended: Mutex<VecDeque<String>>,
    keys: Mutex<HashMap<String, String>>,
    pub(crate) launches: Semaphore,
    launches_at_once: usize,
    /// Clean-ups that are not finished.
    cleaning: watch::Sender<usize>,
}

impl Node {
    /// Opens the node and takes over what an earlier one left.
    pub async fn open(config: RuntimeConfig) -> Result<Arc<Self>> {
        let folder = config.folder();
        std::fs::create_dir_all(&folder).context(|| format!("make {}", folder.display()))?;
        let absolute =
            std::fs::canonicalize(&folder).context(|| format!("find {}", folder.display()))?;
        let container = Container::open(ContainerConfig {
            slots: folder.join("slots"),
            templates: folder.join("disks"),
            skeleton: folder.join("skeleton"),
            groups: Path::new("lamella").join(group_name(&absolute)),
            users: config.user_namespaces,
        })
        .await?;
        let (journal, records) = Journal::open(&folder)?;
        let (store, remembered) = CommandStore::open(&folder)?;
        let lifetimes = Lifetimes::open(&folder)?;
        crate::fork::sweep(&folder)?;
        let swap = own_swap(&folder, config.zram_bytes).await?;
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let node = Arc::new(Self {
            room: Room::new(&folder, config.disk_reserve_bytes)?,
            layers: Layers::new(config.layerfs.clone(), "runtime".to_owned()),
            images: ImagesClient::new(config.images.clone()),
            networks: Networks::new(config.network.clone()),
            container,
            journal: Arc::new(journal),
            store: Arc::new(store),
            watches: crate::files::Watches::default(),
            sandboxes: Mutex::default(),
            meters: Arc::default(),
            events: EventLog::open(config.data_dir.join(events::FOLDER), config.events)?,
            ended: Mutex::default(),
            keys: Mutex::default(),
            launches: Semaphore::new(cores * LAUNCHES_PER_CORE),
            launches_at_once: cores * LAUNCHES_PER_CORE,
            lifetimes: Arc::new(lifetimes),
            functions: fncall::Functions::default(),
            swap,
            cleaning: watch::channel(0).0,
            config,
        });
        crate::adopt::adopt(&node, records, remembered).await?;
        tokio::spawn(detach_idle_layers(Arc::downgrade(&node)));
        tokio::spawn(lifetimes::run(Arc::downgrade(&node)));
        tokio::spawn(room::watch(Arc::downgrade(&node)));
        tokio::spawn(fncall::shrink(Arc::downgrade(&node)));
        Ok(node)
    }

    /// Lets go of everything that no living sandbox needs. Living sandboxes go on.
    pub async fn close(&self) {
        self.functions.close().await;
        let mut cleaning = self.cleaning.subscribe();
        let _watched = cleaning.wait_for(|count| *count == 0).await;
        self.detach_idle(Duration::ZERO).await;
        self.container.close().await;
        self.close_swap().await;
        let events = Arc::clone(&self.events);
        if let Err(error) = tokio::task::spawn_blocking(move || events.close()).await {
            tracing::error!(%error, "closing the log of events panicked");
        }
    }

    /// Takes our swap away, unless a sandbox lives on whose memory may lie in it.
    async fn close_swap(&self) {
        let swap = self.swap.clone();
        if !self.list(false).is_empty() {
            return;
        }
        match tokio::task::spawn_blocking(move || swap.close()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(error = %error.chain(), "our swap stays"),
            Err(error) => tracing::error!(%error, "taking our swap away panicked"),
        }
    }

    /// Where everything of it lies.
    pub(crate) fn folder(&self) -> PathBuf {
        self.config.folder()
    }

    /// How many sandboxes are made at once; more only wait for each other.
    pub(crate) fn launches_at_once(&self) -> usize {
        self.launches_at_once
    }

    /// A sandbox by its whole id.
    pub(crate) fn sandbox(&self, id: &str) -> Option<Arc<Sandbox>> {
        self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    async fn detach_idle(&self, linger: Duration) {
        // A sandbox that starts in between makes its layers used, and what it leaves is younger than they.
        self.container.let_go_of(self.layers.idle_places(linger).await).await;
        self.layers.detach_idle(linger).await;
    }

    pub(crate) fn journal(&self) -> Arc<Journal<Record>> {
        Arc::clone(&self.journal)
    }

    /// A sandbox by its id or an unambiguous prefix of it.
    pub fn find(&self, id: &str) -> Result<Arc<Sandbox>> {
        let sandboxes = self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sandbox) = sandboxes.get(id) {
            return Ok(Arc::clone(sandbox));
        }
        let mut matching = sandboxes.iter().filter(|(known, _)| known.starts_with(id));
        match (matching.next(), matching.next()) {
            (Some((_, sandbox)), None) if !id.is_empty() => Ok(Arc::clone(sandbox)),
            (Some(_), Some(_)) => {
                Err(Error::invalid(format!("several sandboxes begin with {id:?}")))
            }
            _ => Err(Error::not_found(format!("no sandbox {id:?}"))),
        }
    }

    /// All sandboxes, the oldest first; those that have ended only if `all`.
    pub fn list(&self, all: bool) -> Vec<Arc<Sandbox>> {
        let sandboxes = self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut list: Vec<_> =
            sandboxes.values().filter(|s| all || !s.state().is_over()).cloned().collect();
        drop(sandboxes);
        list.sort_by_key(|sandbox| sandbox.record().created_unix_ns);
        list
    }

    /// Makes a sandbox. A repeated key answers the sandbox that the first call made.
    pub async fn create(self: &Arc<Self>, request: v1::CreateRequest) -> Result<Arc<Sandbox>> {
        let spec = spec::sandbox(request)?;
        let id = self.fresh_id()?;
        if let Some(key) = &spec.idempotency_key {
            let known = {
                let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
                keys.get(key).cloned().or_else(|| {
                    keys.insert(key.clone(), id.clone());
                    None
                })
            };
            if let Some(known) = known {
                return self.created_before(&known).await;
            }
        }
        let begin = Instant::now();
        let (node, key) = (Arc::clone(self), spec.idempotency_key.clone());
        let created = tokio::spawn(async move { node.create_new(spec, id).await });
        let created = created.await.unwrap_or_else(|error| {
            Err(Error::new(ErrorKind::Internal, "creation panicked").with_source(error))
        });
        match created {
            Ok(_) => self.meters.creates.observe_since(begin),
            Err(_) => self.meters.create_failures.add(1),
        }
        if let (Err(_), Some(key)) = (&created, key) {
            self.keys.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        }
        created
    }

    /// An id that no sandbox has, nor one that is remembered.
    fn fresh_id(&self) -> Result<String> {
        loop {
            let id = new_id()?;
            if self.sandbox(&id).is_none() {
                return Ok(id);
            }
        }
    }

    async fn created_before(&self, id: &str) -> Result<Arc<Sandbox>> {
        // The first call has taken the key but may not have entered the sandbox yet.
        const ROUNDS: u32 = 1000;
        for _ in 0..ROUNDS {
            if let Ok(sandbox) = self.find(id) {
                sandbox.wait_created().await;
                return Ok(sandbox);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Err(Error::new(ErrorKind::Busy, "an earlier create with this key is not finished"))
    }

    pub(crate) fn remember_key(&self, key: &str, id: &str) {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        keys.insert(key.to_owned(), id.to_owned());
    }

    async fn create_new(self: &Arc<Self>, spec: SandboxSpec, id: String) -> Result<Arc<Sandbox>> {
        self.lifetimes.claim(&spec.lifetime, spec.lease_ms)?;
        let resolved = self.resolve(&spec.environment).await?;
        self.make(spec, id, &resolved, None).await
    }

    /// Makes a sandbox like another one. `seed`: what its writable layer begins with.
    pub(crate) async fn create_from(
        self: &Arc<Self>,
        spec: SandboxSpec,
        resolved: &Arc<Resolved>,
        seed: Option<PathBuf>,
    ) -> Result<Arc<Sandbox>> {
        self.lifetimes.claim(&spec.lifetime, spec.lease_ms)?;
        let (begin, id) = (Instant::now(), self.fresh_id()?);
        let (node, resolved) = (Arc::clone(self), Arc::clone(resolved));
        // In a task of its own, as every creation.
        let made = tokio::spawn(async move { node.make(spec, id, &resolved, seed).await });
        let made = made.await.unwrap_or_else(|error| {
            Err(Error::new(ErrorKind::Internal, "creation panicked").with_source(error))
        });
        match &made {
            Ok(_) => self.meters.creates.observe_since(begin),
            Err(_) => self.meters.create_failures.add(1),
        }
        made
    }

    async fn make(
        self: &Arc<Self>,
        spec: SandboxSpec,
        id: String,
        resolved: &Resolved,
        seed: Option<PathBuf>,
    ) -> Result<Arc<Sandbox>> {
        let record = new_record(&spec, &id, resolved);
        let sandbox = Arc::new(Sandbox::new(record, self.journal(), &self.store, &self.events));
        // CRASH: from here on the journal says that something of this sandbox may exist.
        sandbox.update(|_| {})?;
        self.insert(&sandbox);
        let _permit = self.launches.acquire().await.map_err(|error| {
            Error::new(ErrorKind::Unavailable, "the node is closing").with_source(error)
        })?;
        self.lifetimes.watch(&sandbox);
        let launched = self.launch(&sandbox, &spec, resolved, seed).await;
        if let Err(error) = launched {
            let reason = error.chain();
            sandbox.update(|record| {
                record.state = State::Failed;
                record.reason = reason;
            })?;
            self.remember_ended(&id);
            return Err(error);
        }
        Ok(sandbox)
    }

    /// Of whom asks for none.
    pub(crate) fn default_limits(&self) -> PlannedLimits {
        let config = &self.config;
        PlannedLimits {
            memory_bytes: config.default_memory_bytes,
            pids: config.default_pids,
            disk: config.default_disk_bytes.map(|bytes| DiskSize { bytes, inodes: 0 }),
            open_files: Some(config.default_open_files),
            ..PlannedLimits::default()
        }
    }

    async fn launch(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        spec: &SandboxSpec,
        resolved: &Resolved,
        seed: Option<PathBuf>,
    ) -> Result<()> {
        self.room.admit()?;
        let layers = &resolved.layers[..];
        let mut plan = plan::launch(spec, &self.default_limits(), sandbox.id());
        plan.seed = seed;
        let mounts = self.layers.attach(layers, resolved.env_id.as_ref(), spec.plane).await?;
        let instance = self.container.launch(&plan, &mounts).await;
        let instance: Arc<dyn Instance> =
            instance.inspect_err(|_| self.layers.release(layers))?.into();
        let handle = instance.handle();
        sandbox.set_instance(Some(Arc::clone(&instance)));
        if let Err(error) = self.networks.begin(sandbox, &instance).await {
            self.supervise(sandbox, instance, layers.to_vec());
            sandbox.stop(Duration::ZERO).await?;
            return Err(error);
        }
        let main = if spec.argv.is_empty() {
            Ok(None)
        } else {
            exec::own::start(sandbox, &instance, &spec.argv).await.map(Some)
        };
        let main = match main {
            Ok(main) => main,
            Err(error) => {
                self.supervise(sandbox, instance, layers.to_vec());
                sandbox.stop(Duration::ZERO).await?;
                return Err(error);
            }
        };
        sandbox.update(|record| {
            // Unless its end was asked for already.
            if record.state == State::Creating {
                record.state = State::Running;
            }
            record.handle = Some(handle);
        })?;
        self.supervise(sandbox, Arc::clone(&instance), layers.to_vec());
        if let Some(main) = main {
            self.meters.starts.add(1);
            tokio::spawn(exec::own::follow(Arc::clone(sandbox), instance, main));
        }
        Ok(())
    }

    /// Watches a running sandbox to its end, and clears what it used.
    pub(crate) fn supervise(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        instance: Arc<dyn Instance>,
        layers: Vec<LayerId>,
    ) {
        let (node, sandbox) = (Arc::clone(self), Arc::clone(sandbox));
        tokio::spawn(async move {
            instance.ended().await;
            node.cleaning.send_modify(|count| *count += 1);
            let end = sandbox.final_end();
            sandbox.set_instance(None);
            let written = sandbox.update(|record| {
                record.state = State::Gone;
                record.end = Some(end);
            });
            if let Err(error) = written {
                tracing::error!(id = sandbox.id(), error = %error.chain(), "journal");
            }
            node.meters.sandbox_ended(end);
            node.layers.release(&layers);
            node.remember_ended(sandbox.id());
            node.networks.end(&sandbox).await;
            instance.release().await;
            node.cleaning.send_modify(|count| *count -= 1);
            drop(node);
            // The last of them ends when its client has read what it printed; nobody waits for that.
            sandbox.commands.retire().await;
        });
    }

    pub(crate) fn insert(&self, sandbox: &Arc<Sandbox>) {
        let mut sandboxes = self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner);
        sandboxes.insert(sandbox.id().to_owned(), Arc::clone(sandbox));
    }

    /// Keeps the number of ended sandboxes bounded.
    pub(crate) fn remember_ended(&self, id: &str) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.push_back(id.to_owned());
        let oldest = if ended.len() > MAX_ENDED { ended.pop_front() } else { None };
        drop(ended);
        if let Some(sandbox) = oldest.and_then(|id| self.find(&id).ok()) {
            self.forget(&sandbox);
        }
    }

    /// Forgets a sandbox that has ended.
    pub fn forget(&self, sandbox: &Sandbox) {
        if let Err(error) = sandbox.forget() {
            tracing::warn!(id = sandbox.id(), error = %error.chain(), "journal");
        }
        let mut sandboxes = self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner);
        sandboxes.remove(sandbox.id());
        drop(sandboxes);
        if let Some(key) = sandbox.record().idempotency_key {
            self.keys.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        }
    }

    pub(crate) async fn resolve(&self, name: &str) -> Result<Resolved> {
        use v1::resolve_response::Target;
        let name = name.to_owned();
        let answer = if let Some(names) = self.config.names.clone() {
            let events = Arc::clone(&self.events);
            let resolving = tokio::task::spawn_blocking(move || {
                let resolved = names.resolve(&name)?;
                let admitted = names.admit(&name, &resolved);
                admitted.inspect_err(|error| events::report::unsigned(&events, &name, error))?;
                names.hold(&resolved)?;
                Ok(resolved)
            });
            resolving.await.unwrap_or_else(|error| {
                Err(Error::new(ErrorKind::Internal, "resolving panicked").with_source(error))
            })?
        } else {
            let request = v1::ResolveRequest { name };
            self.images.clone().resolve(request).await.map_err(from_status)?.into_inner()
        };
        match answer.target {
            Some(Target::EnvId(id)) => {
                let environment = Environment::decode(&answer.environment_document)?;
                let Environment { layers, config, image, .. } = environment;
                Ok(Resolved { env_id: Some(EnvId::from_slice(&id)?), layers, config, image })
            }
            Some(Target::LayerId(id)) => Ok(Resolved {
                env_id: None,
                layers: vec![LayerId::from_slice(&id)?],
                config: RunConfig::default(),
                image: None,
            }),
            None => Err(Error::not_found("the name points to nothing")),
        }
    }
}

/// What a name stands for.
#[derive(Debug)]
pub(crate) struct Resolved {
    pub env_id: Option<EnvId>,
    pub layers: Vec<LayerId>,
    pub config: RunConfig,
    pub image: Option<Digest>,
}

fn new_record(spec: &SandboxSpec, id: &str, resolved: &Resolved) -> Record {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Record {
        version: RECORD_VERSION,
        id: id.to_owned(),
        state: State::Creating,
        reason: String::new(),
        environment: spec.environment.clone(),
        env_id: resolved.env_id.map(|id| id.to_string()).unwrap_or_default(),
        layers: resolved.layers.iter().map(LayerId::to_string).collect(),
        created_unix_ns: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
        labels: spec.labels.clone(),
        idempotency_key: spec.idempotency_key.clone(),
        limits: AskedLimits {
            memory_bytes: spec.memory_bytes.unwrap_or(0),
            cpu_millis: spec.cpu_millis.unwrap_or(0),
            pids: spec.pids.unwrap_or(0),
            writable_bytes: spec.disk_bytes.unwrap_or(0),
            inodes: spec.inodes.unwrap_or(0),
            open_files: spec.open_files.unwrap_or(0),
            read_bytes_per_s: spec.bandwidth.read.unwrap_or(0),
            write_bytes_per_s: spec.bandwidth.write.unwrap_or(0),
            cpu_weight: spec.cpu_weight.unwrap_or(0),
            cpuset: spec.processors.clone().unwrap_or_default(),
        },
        argv: spec.argv.clone(),
        defaults: plan::command_defaults(spec, &resolved.config),
        config: resolved.config.clone(),
        network: spec.network.clone(),
        profile: spec.profile.to_string(),
        protected: spec.protected.clone(),
        lifetime: spec.lifetime.begun(),
        image: resolved.image,
        end: None,
        handle: None,
    }
}

async fn own_swap(folder: &Path, bytes: Option<u64>) -> Result<OwnSwap> {
    let folder = folder.to_owned();
    let opened = tokio::task::spawn_blocking(move || OwnSwap::open(&folder, bytes)).await;
    opened.unwrap_or_else(|error| {
        Err(Error::new(ErrorKind::Internal, "making swap panicked").with_source(error))
    })
}

async fn detach_idle_layers(node: std::sync::Weak<Node>) {
    const EVERY: Duration = Duration::from_secs(1);
    loop {
        tokio::time::sleep(EVERY).await;
        let Some(node) = node.upgrade() else { return };
        node.detach_idle(node.config.layer_linger).await;
    }
}

/// 12 hexadecimal digits.
pub(crate) fn new_id() -> Result<String> {
    let mut bytes = [0; 6];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::new(ErrorKind::Internal, format!("random numbers: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The same for the same folder, so that a later node on it finds the groups of an earlier one.
fn group_name(folder: &Path) -> String {
    format!("{:016x}", name_hash(folder))
}

/// A number for a path: FNV-1a.
pub(crate) fn name_hash(path: &Path) -> u64 {
    use std::os::unix::ffi::OsStrExt;
    path.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
