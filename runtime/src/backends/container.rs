//! The container backend: namespaces, a cgroup, an overlay, a filter, made by the zygote.
//!
//! Locking: a read-write lock over which zygote is in use, held across its restart only.
//! CRASH: an instance is its init and the group of its slot; both are found by number.

use super::groups::{CommandGroups, CommandTree};
use super::{Backend, Command, Handle, Instance, Started, Tree};
use crate::compose;
use crate::disk;
use crate::ids::Ids;
use crate::plan::LaunchPlan;
use crate::pool::{Pool, Slot, Users};
use crate::protect::ProtectedPath;
use crate::room::Written;
use crate::zygote::former::Former;
use crate::zygote::{CommandStart, Process, Zygote};
use async_trait::async_trait;
use layer::{Context, Error, ErrorKind, Result};
use proto::launch::{Exec, Launch};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use sys::cgroup::Hierarchies;
use sys::mount::MountFd;
use tokio::sync::{RwLock, watch};

/// Beside the folder of writable layers: what zygotes leave to later runtimes.
const ZYGOTES: &str = "zygotes";

/// Where the backend keeps what it makes.
#[derive(Debug, Clone)]
pub struct ContainerConfig {
    /// Folder of writable layers.
    pub slots: PathBuf,
    /// Folder of empty disks, one of each size that was asked for.
    pub templates: PathBuf,
    /// Folder of the empty places under all layers.
    pub skeleton: PathBuf,
    /// Name of our group in every hierarchy.
    pub groups: PathBuf,
    /// Whether sandboxes have users of their own.
    pub users: UserNamespaces,
}

/// Whether sandboxes have users of their own, so that their root is not root of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UserNamespaces {
    /// All have, where kernel and file system can do it.
    #[default]
    Auto,
    /// All have, or the node does not start.
    Required,
    /// None has.
    Off,
}

/// The backend.
#[derive(Debug)]
pub struct Container {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: ContainerConfig,
    hierarchies: Arc<Hierarchies>,
    pool: Pool,
    /// Whether the profiles of AppArmor are loaded.
    apparmor: bool,
    boot: String,
    zygote: RwLock<Option<Arc<Zygote>>>,
    former: Arc<Former>,
    /// Where ranges of users begin; none: sandboxes have no users of their own.
    users: Option<u64>,
}

impl Container {
    /// Makes folders and groups, and starts the zygote.
    pub async fn open(config: ContainerConfig) -> Result<Self> {
        let hierarchies =
            Arc::new(Hierarchies::detect().context(|| "find the cgroup hierarchies".into())?);
        if let missing @ [_, ..] = hierarchies.missing().as_slice() {
            let text = format!("no cgroup controller for {}", missing.join(", "));
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let ours = hierarchies.group(&config.groups);
        // Once more, since another node may just remove the folder that all nodes share.
        ours.create()
            .or_else(|_| ours.create())
            .context(|| format!("make group {}", config.groups.display()))?;
        if let Some(above) = config.groups.parent() {
            hierarchies.group(above).delegate().context(|| "delegate controllers".into())?;
        }
        ours.delegate().context(|| "delegate controllers".into())?;
        std::fs::create_dir_all(&config.slots)
            .context(|| format!("make {}", config.slots.display()))?;
        compose::make_skeleton(&config.skeleton)?;
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .context(|| "read the boot id".into())?;
        let former = Arc::new(Former::open(&config.slots.with_file_name(ZYGOTES))?);
        // Few sandboxes are in these, so the kernel may lack them.
        let _rare = ours.create_rare();
        let (groups, slots) = (config.groups.clone(), config.slots.clone());
        let pool = Pool::new(Arc::clone(&hierarchies), groups, slots, config.templates.clone());
        let seed = crate::node::name_hash(&config.groups);
        let mut shared = Shared {
            config,
            users: None,
            hierarchies,
            pool,
            apparmor: crate::apparmor::load(),
            boot: boot.trim().to_owned(),
            zygote: RwLock::new(None),
            former,
        };
        shared.zygote().await?;
        if shared.config.users != UserNamespaces::Off {
            match shared.try_users(seed).await {
                Ok(()) => shared.users = Some(seed),
                Err(error) if shared.config.users == UserNamespaces::Required => return Err(error),
                Err(error) => {
                    let error = error.chain();
                    tracing::warn!(%error, "root of a sandbox is root of the host to the kernel");
                }
            }
        }
        Ok(Self { shared: Arc::new(shared) })
    }

    /// What the zygotes of earlier runtimes left.
    pub fn former(&self) -> &Arc<Former> {
        &self.shared.former
    }

    /// Keeps nothing mounted on these layers but what living sandboxes use.
    pub async fn let_go_of(&self, layers: Vec<PathBuf>) {
        let shared = Arc::clone(&self.shared);
        let done = tokio::task::spawn_blocking(move || shared.pool.let_go_of(&layers)).await;
        if let Err(error) = done {
            tracing::error!(%error, "letting go of layers panicked");
        }
    }

    /// How many slots are free, and how many were made.
    pub fn slots(&self) -> (u64, u64) {
        self.shared.pool.counts()
    }

    /// Lets the zygote end, removes free slots and our groups. Sandboxes that live go on.
    pub async fn close(&self) {
        if let Some(zygote) = self.shared.zygote.write().await.take() {
            zygote.close();
        }
        let shared = Arc::clone(&self.shared);
        if let Err(error) = tokio::task::spawn_blocking(move || shared.pool.close()).await {
            tracing::error!(%error, "removing slots panicked");
        }
    }
}

impl Shared {
    /// The zygote, a new one when the last has died.
    async fn zygote(&self) -> Result<Arc<Zygote>> {
        if let Some(zygote) = self.zygote.read().await.as_ref().filter(|zygote| !zygote.is_lost()) {
            return Ok(Arc::clone(zygote));
        }
        let mut place = self.zygote.write().await;
        if let Some(zygote) = place.as_ref().filter(|zygote| !zygote.is_lost()) {
            return Ok(Arc::clone(zygote));
        }
        let mut descriptors = Vec::new();
        let version_2 = self.hierarchies.version_2_root();
        for root in self.hierarchies.version_1_roots().into_iter().chain(version_2) {
            let folder = root.join(&self.config.groups);
            let opened = sys::cgroup::open_directory(&folder);
            descriptors.push(opened.context(|| format!("open {}", folder.display()))?);
        }
        let zygotes = self.config.slots.with_file_name(ZYGOTES);
        let zygote =
            Zygote::start(&zygotes, &descriptors, version_2.is_some(), self.apparmor).await?;
        *place = Some(Arc::clone(&zygote));
        Ok(zygote)
    }

    /// Whether the kernel makes user namespaces and shifts owners of the file system of writable layers.
    async fn try_users(&self, seed: u64) -> Result<()> {
        let ids = Ids::of_slot(0, seed)?;
        let namespace = self.zygote().await?.users(ids).await?;
        compose::show(&self.config.slots, Some(&Users { ids, namespace })).map(drop)
    }

    /// Gives a slot its user namespace, if it is to have one and does not.
    async fn give_users(&self, slot: &Slot) -> Result<()> {
        let Some(seed) = self.users.filter(|_| slot.users().is_none()) else { return Ok(()) };
        let ids = Ids::of_slot(slot.number, seed)?;
        let namespace = self.zygote().await?.users(ids).await?;
        slot.keep_users(Users { ids, namespace });
        Ok(())
    }

    /// The overlay, and whether it shows owners as the slot's users. Where a layer's file system cannot,
    /// the sandbox has no users of its own, unless they are required.
    fn mount(
        &self,
        layers: &[PathBuf],
        slot: &Slot,
        seed: Option<&Path>,
    ) -> Result<(MountFd, bool)> {
        let skeleton = &self.config.skeleton;
        if let Some(users) = slot.users() {
            match compose::overlay(skeleton, layers, slot, Some(users), seed) {
                Err(error)
                    if error.kind() == ErrorKind::Unsupported
                        && self.config.users != UserNamespaces::Required =>
                {
                    let error = error.chain();
                    tracing::warn!(%error, "root of a sandbox is root of the host to the kernel");
                }
                mounted => return Ok((mounted?, true)),
            }
        }
        Ok((compose::overlay(skeleton, layers, slot, None, seed)?, false))
    }

    /// A slot and its overlay. They come in one blocking step when the slot has users already.
    async fn compose(self: &Arc<Self>, plan: &LaunchPlan, layers: &[PathBuf]) -> Result<Composed> {
        let (shared, layers, limits) = (Arc::clone(self), layers.to_vec(), plan.limits.clone());
        let mut slot = None;
        loop {
            let (shared, layers, known) = (Arc::clone(&shared), layers.clone(), slot.take());
            let (limits, seed) = (limits.clone(), plan.seed.clone());
            let step = move || {
                let slot = known.map_or_else(|| shared.pool.take(&limits, &layers), Ok)?;
                if shared.users.is_some() && slot.users().is_none() {
                    return Ok((slot, None));
                }
                if seed.is_some() {
                    slot.drop_root();
                }
                match slot.root(&layers, || shared.mount(&layers, &slot, seed.as_deref())) {
                    Ok(root) => Ok((slot, Some(root))),
                    Err(error) => {
                        shared.pool.give_back(slot);
                        Err(error)
                    }
                }
            };
            match tokio::task::spawn_blocking(step).await.map_err(panicked)?? {
                (slot, Some((root, is_shifted))) => {
                    let users = slot.users().filter(|_| is_shifted);
                    let ids = users.map_or(Ids::OF_HOST, |users| users.ids);
                    return Ok(Composed { slot, root, ids });
                }
                (new, None) => {
                    if let Err(error) = self.give_users(&new).await {
                        let shared = Arc::clone(self);
                        tokio::task::spawn_blocking(move || shared.pool.give_back(new));
                        return Err(error);
                    }
                    slot = Some(new);
                }
            }
        }
    }
}

/// What a launch begins with.
struct Composed {
    slot: Slot,
    root: MountFd,
    ids: Ids,
}

#[async_trait]
impl Backend for Container {
    async fn launch(&self, plan: &LaunchPlan, layers: &[PathBuf]) -> Result<Box<dyn Instance>> {
        let Composed { slot, root, ids } = self.shared.compose(plan, layers).await?;
        let launch = Launch {
            group: Pool::group_name(slot.number),
            hostname: plan.hostname.clone(),
            hosts: plan.hosts.clone(),
            resolv_conf: plan.resolv_conf.clone(),
            shm_bytes: plan.shm_bytes,
            first_id: ids.first(),
            open_files: plan.limits.open_files.unwrap_or(0),
            protected: plan.protected.iter().map(ProtectedPath::wire).collect(),
            ..Launch::default()
        };
        let launched = match self.shared.zygote().await {
            Ok(zygote) => {
                let network = slot.take_network();
                let users = slot.users().filter(|_| ids.are_shifted());
                let users = users.map(|users| users.namespace.as_fd());
                let network = network.as_ref().map(AsFd::as_fd);
                zygote.launch(launch, root.as_fd(), users, network).await
            }
            Err(error) => Err(error),
        };
        // INVARIANT: only the sandbox's namespace and its slot hold the overlay from here on. The slot lets
        // go of it before its layers are detached.
        drop(root);
        match launched {
            Ok(init) => {
                // Older kernels do not hand it out; every sandbox gets a new one there.
                if let Ok(network) = sys::process::network_namespace_of(init.pidfd.as_fd()) {
                    slot.keep_network(network);
                }
                let inner = Inner { ids, profile: plan.profile.number(), is_adopted: false };
                Ok(Box::new(ContainerInstance::new(&self.shared, slot, init, inner)))
            }
            Err(error) => {
                let shared = Arc::clone(&self.shared);
                tokio::task::spawn_blocking(move || shared.pool.give_back(slot));
                Err(error)
            }
        }
    }

    async fn adopt(&self, handle: &Handle) -> Result<Option<Box<dyn Instance>>> {
        if handle.boot != self.shared.boot {
            return Ok(None);
        }
        let Ok(pidfd) = sys::process::pidfd_open(handle.pid) else { return Ok(None) };
        let number = sys::process::pidfd_number(pidfd.as_fd()).unwrap_or(0);
        if sys::wait_readable(pidfd.as_fd(), Some(Duration::ZERO)).unwrap_or(true) {
            return Ok(None);
        }
        let in_group = self.shared.pool.group(handle.slot).pids().unwrap_or_default();
        if number != handle.process_number || !in_group.contains(&handle.pid) {
            return Ok(None);
        }
        let slot = self.shared.pool.adopt(handle.slot);
        let ids = Ids::of_process(handle.pid)?;
        let init = Process::adopted(handle.pid, pidfd, Arc::clone(&self.shared.former));
        let inner = Inner { ids, profile: handle.profile, is_adopted: true };
        Ok(Some(Box::new(ContainerInstance::new(&self.shared, slot, init, inner))))
    }

    async fn sweep(&self, keep: &[Handle]) -> Result<()> {
        let in_use: Vec<u32> = keep.iter().map(|handle| handle.slot).collect();
        let shared = Arc::clone(&self.shared);
        tokio::task::spawn_blocking(move || shared.pool.sweep(&in_use)).await.map_err(panicked)?
    }
}

fn panicked(error: tokio::task::JoinError) -> Error {
    Error::new(ErrorKind::Internal, "a blocking step panicked").with_source(error)
}

/// What is known of an instance beside its slot and its init.
#[derive(Clone, Copy)]
struct Inner {
    ids: Ids,
    profile: u32,
    is_adopted: bool,
}

#[derive(Debug)]
struct ContainerInstance {
    shared: Arc<Shared>,
    /// Taken out by the release.
    slot: Mutex<Option<Slot>>,
    number: u32,
    upper: PathBuf,
    ids: Ids,
    /// Groups that only some sandboxes have; commands join them.
    rare_groups: Vec<OwnedFd>,
    is_stopped_for_room: AtomicBool,
    oom_before: u64,
    pidfd: Arc<OwnedFd>,
    handle: Handle,
    ended: watch::Receiver<bool>,
    groups: Arc<CommandGroups>,
}

impl ContainerInstance {
    fn new(shared: &Arc<Shared>, slot: Slot, mut init: Process, inner: Inner) -> Self {
        let Inner { ids, profile, is_adopted } = inner;
        let pidfd = Arc::clone(&init.pidfd);
        let process_number = sys::process::pidfd_number(pidfd.as_fd()).unwrap_or(0);
        let (pid, boot) = (init.pid, shared.boot.clone());
        let handle = Handle { slot: slot.number, pid, process_number, boot, profile };
        let rare_groups = shared.pool.group(slot.number).open_rare().unwrap_or_else(|error| {
            tracing::error!(%error, "commands run without the rare limits of their sandbox");
            Vec::new()
        });
        let (tell, ended) = watch::channel(false);
        tokio::spawn(async move {
            init.wait().await;
            let _nobody_listens = tell.send(true);
        });
        let root = shared.hierarchies.version_2_root();
        let name = Pool::group_name(slot.number);
        let folder = root.map(|root| root.join(&shared.config.groups).join(&name));
        let groups = CommandGroups::new(name, folder, slot.command_groups(), is_adopted);
        Self {
            shared: Arc::clone(shared),
            number: slot.number,
            upper: slot.upper.clone(),
            ids,
            rare_groups,
            is_stopped_for_room: AtomicBool::new(false),
            oom_before: slot.oom_before(),
            slot: Mutex::new(Some(slot)),
            pidfd,
            handle,
            ended,
            groups,
        }
    }

    /// Whether nothing is left to signal.
    fn is_dead(&self) -> bool {
        let reach = sys::process::Reach::Process;
        let error = sys::process::pidfd_signal(self.pidfd.as_fd(), 0, reach).err();
        const ESRCH: i32 = 3;
        error.and_then(|error| error.raw_os_error()) == Some(ESRCH)
    }

    fn group(&self) -> sys::cgroup::Group<'_> {
        self.shared.pool.group(self.number)
    }
}

#[async_trait]
impl Instance for ContainerInstance {
    fn handle(&self) -> Handle {
        self.handle.clone()
    }

    async fn exec(&self, command: Command, streams: &[BorrowedFd<'_>]) -> Result<Started> {
        let tree = if command.is_main { None } else { Some(CommandTree::make(&self.groups)?) };
        let bytes = |list: Vec<String>| list.into_iter().map(String::into_bytes).collect();
        let (rows, columns) = command.terminal.unwrap_or_default();
        let exec = Exec {
            request: 0,
            group: self.groups.name().to_owned(),
            own_group: tree.as_ref().map_or(self.groups.name(), CommandTree::name).to_owned(),
            argv: bytes(command.argv),
            env: bytes(command.env),
            cwd: command.cwd.into_bytes(),
            user: command.user,
            terminal: command.terminal.is_some(),
            rows,
            columns,
            hold: command.is_held,
            first_id: self.ids.first(),
            rare_groups: self.rare_groups.len() as u32,
            profile: self.handle.profile,
        };
        let zygote = self.shared.zygote().await?;
        let rare = self.rare_groups.iter().map(AsFd::as_fd);
        let streams: Vec<_> = streams.iter().copied().chain(rare).collect();
        let start = zygote.exec(exec, self.pidfd.as_fd(), &streams).await?;
        if let CommandStart::Started(started) = &start
            && let Some(terminal) = &started.terminal
        {
            // Without it the command would not survive this process with its terminal, and no worse.
            let _it_has_died = zygote.hold(started.process.pid, terminal.as_fd()).await;
        }
        let tree = match &start {
            CommandStart::Started(_) => tree.map(|tree| Box::new(tree) as Box<dyn Tree>),
            CommandStart::Refused(..) => None,
        };
        Ok(Started { start, tree })
    }

    async fn forget_streams(&self, pid: sys::process::Pid, process_number: u64) {
        // A zygote that has died holds nothing.
        if let Ok(zygote) = self.shared.zygote().await {
            let _it_has_died = zygote.release(pid, process_number).await;
        }
    }

    fn adopt_tree(&self, number: u32) -> Option<Box<dyn Tree>> {
        let tree = CommandTree::adopt(&self.groups, number)?;
        Some(Box::new(tree))
    }

    fn written(&self) -> Written {
        let home = self.shared.pool.home(self.number);
        match disk::allocated(&home) {
            Some(bytes) => Written { bytes, inodes: 1 },
            None => Written::of_tree(&self.upper),
        }
    }

    fn trim(&self) {
        if let Err(error) = disk::trim(&self.shared.pool.home(self.number)) {
            tracing::warn!(error = %error.chain(), "trim a disk");
        }
    }

    fn stop_for_room(&self) -> Result<()> {
        self.is_stopped_for_room.store(true, Ordering::Relaxed);
        self.kill()
    }

    fn is_stopped_for_room(&self) -> bool {
        self.is_stopped_for_room.load(Ordering::Relaxed)
    }

    fn signal_all(&self, signal: i32) -> Result<()> {
        // The init blocks every signal that could reach it.
        self.group().signal_all(signal).context(|| format!("signal {signal} to the sandbox"))
    }

    fn kill(&self) -> Result<()> {
        // With its init, the kernel ends everything in the namespace. Not by cgroup.kill: see `Slot`.
        let reach = sys::process::Reach::Process;
        match sys::process::pidfd_signal(self.pidfd.as_fd(), 9, reach) {
            Err(_) if *self.ended.borrow() || self.is_dead() => Ok(()),
            other => other.context(|| "kill the sandbox".into()),
        }
    }

    async fn freeze(&self, deadline: Duration) -> Result<()> {
        self.group().freeze(true).context(|| "freeze the sandbox".into())?;
        let (shared, number) = (Arc::clone(&self.shared), self.number);
        let waited =
            tokio::task::spawn_blocking(move || shared.pool.group(number).wait_frozen(deadline));
        let frozen = waited.await.map_err(panicked)?;
        match frozen.context(|| "freeze the sandbox".into()) {
            Ok(true) => Ok(()),
            Ok(false) => {
                self.thaw()?;
                let text = "a process does not stop: it waits for a disk or for a cold page";
                Err(Error::new(ErrorKind::Timeout, text))
            }
            Err(error) => {
                self.thaw()?;
                Err(error)
            }
        }
    }

    fn thaw(&self) -> Result<()> {
        self.group().freeze(false).context(|| "thaw the sandbox".into())
    }

    fn reclaim(&self) -> Result<()> {
        self.group().reclaim_memory().context(|| "give back memory".into())
    }

    fn bring_back(&self) -> Result<()> {
        let context = || "ask for memory".to_owned();
        self.group().keep_memory().context(context)?;
        if !sys::swap::is_any() {
            return Ok(());
        }
        for pid in self.group().pids_anywhere().context(context)? {
            // One that has ended meanwhile needs nothing.
            let Ok(pidfd) = sys::process::pidfd_open(pid) else { continue };
            if sys::swap::swapped_bytes(pid).unwrap_or(0) > 0 {
                sys::swap::bring_back(pid, pidfd.as_fd()).context(context)?;
            }
        }
        Ok(())
    }

    fn meter(&self) -> Option<sys::cgroup::Meter> {
        Some(self.group().meter())
    }

    fn oom_kills(&self) -> u64 {
        self.group().oom_kills().unwrap_or(0).saturating_sub(self.oom_before)
    }

    fn refused_forks(&self) -> u64 {
        self.group().refused_forks().unwrap_or(0)
    }

    fn memory_in_use(&self) -> u64 {
        self.group().memory_in_use().unwrap_or(0)
    }

    fn cpu_us(&self) -> u64 {
        self.group().cpu_us().unwrap_or(0)
    }

    fn tasks(&self) -> u64 {
        self.group().tasks().unwrap_or(0)
    }

    fn root(&self) -> Result<OwnedFd> {
        let path = format!("/proc/{}/root", self.handle.pid);
        let root = sys::mount::open_place(Path::new(&path))
            .context(|| "open the root of the sandbox".into())?;
        // The name was that of a pid; only a living init keeps it from being another's.
        if *self.ended.borrow() {
            return Err(Error::not_found("the sandbox has ended"));
        }
        Ok(root)
    }

    fn upper(&self) -> PathBuf {
        self.upper.clone()
    }

    fn ids(&self) -> Ids {
        self.ids
    }

    fn network(&self) -> Result<OwnedFd> {
        let network = sys::process::network_namespace_of(self.pidfd.as_fd());
        // Older kernels do not hand it out.
        let network = network.or_else(|_| {
            let path = format!("/proc/{}/ns/net", self.handle.pid);
            std::fs::File::open(path).map(OwnedFd::from)
        });
        let network = network.context(|| "open the network of the sandbox".into())?;
        // The name was that of a pid; only a living init keeps it from being another's.
        if *self.ended.borrow() {
            return Err(Error::not_found("the sandbox has ended"));
        }
        Ok(network)
    }

    async fn ended(&self) {
        let mut ended = self.ended.clone();
        // An error means that the watching task is gone, which happens at the runtime's own end only.
        let _watching = ended.wait_for(|ended| *ended).await;
    }

    async fn release(&self) {
        let slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(slot) = slot else { return };
        slot.note_command_groups(self.groups.made());
        if self.groups.is_spoiled() {
            slot.spoil();
        }
        let shared = Arc::clone(&self.shared);
        let cleaned = tokio::task::spawn_blocking(move || shared.pool.give_back(slot));
        if let Err(error) = cleaned.await {
            tracing::error!(%error, "cleaning a slot panicked");
        }
    }
}

#[cfg(test)]
mod tests;
