//! The container backend: namespaces, a cgroup, an overlay, a filter, made by the zygote.
//!
//! Locking: a read-write lock over which zygote is in use, held across its restart only.
//! CRASH: an instance is its init and the group of its slot; both are found by number.

use super::{Backend, Command, Handle, Instance, Started, Tree};
use crate::compose;
use crate::plan::LaunchPlan;
use crate::pool::{Pool, Slot};
use crate::zygote::{CommandStart, Process, Zygote};
use async_trait::async_trait;
use layer::{Context, Error, ErrorKind, Result};
use proto::launch::{Exec, Launch};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use sys::cgroup::Hierarchies;
use tokio::sync::{RwLock, watch};

/// Where the backend keeps what it makes.
#[derive(Debug, Clone)]
pub struct ContainerConfig {
    /// Folder of writable layers.
    pub slots: PathBuf,
    /// Folder of the empty places under all layers.
    pub skeleton: PathBuf,
    /// Name of our group in every hierarchy.
    pub groups: PathBuf,
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
    filter: Vec<u8>,
    boot: String,
    zygote: RwLock<Option<Arc<Zygote>>>,
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
        let pool = Pool::new(Arc::clone(&hierarchies), config.groups.clone(), config.slots.clone());
        let shared = Shared {
            config,
            hierarchies,
            pool,
            filter: sys::seccomp::Filter::sandbox().to_bytes(),
            boot: boot.trim().to_owned(),
            zygote: RwLock::new(None),
        };
        shared.zygote().await?;
        Ok(Self { shared: Arc::new(shared) })
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
        let zygote = Zygote::start(&descriptors, version_2.is_some(), self.filter.clone()).await?;
        *place = Some(Arc::clone(&zygote));
        Ok(zygote)
    }
}

#[async_trait]
impl Backend for Container {
    async fn launch(&self, plan: &LaunchPlan, layers: &[PathBuf]) -> Result<Box<dyn Instance>> {
        let (shared, layers, limits) = (Arc::clone(&self.shared), layers.to_vec(), plan.limits);
        let composed = tokio::task::spawn_blocking(move || {
            let slot = shared.pool.take(&limits, &layers)?;
            let mount = || compose::overlay(&shared.config.skeleton, &layers, &slot);
            match slot.root(&layers, mount) {
                Ok(root) => Ok((slot, root)),
                Err(error) => {
                    shared.pool.give_back(slot);
                    Err(error)
                }
            }
        });
        let (slot, root) = composed.await.map_err(panicked)??;
        let launch = Launch {
            group: Pool::group_name(slot.number),
            hostname: plan.hostname.clone(),
            hosts: plan.hosts.clone(),
            resolv_conf: plan.resolv_conf.clone(),
            shm_bytes: plan.shm_bytes,
            ..Launch::default()
        };
        let launched = match self.shared.zygote().await {
            Ok(zygote) => {
                let network = slot.take_network();
                zygote.launch(launch, root.as_fd(), network.as_ref().map(AsFd::as_fd)).await
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
                Ok(Box::new(ContainerInstance::new(&self.shared, slot, init)))
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
        let init = Process::adopted(handle.pid, pidfd);
        Ok(Some(Box::new(ContainerInstance::new(&self.shared, slot, init))))
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

#[derive(Debug)]
struct ContainerInstance {
    shared: Arc<Shared>,
    /// Taken out by the release.
    slot: Mutex<Option<Slot>>,
    number: u32,
    upper: PathBuf,
    oom_before: u64,
    pidfd: Arc<OwnedFd>,
    handle: Handle,
    ended: watch::Receiver<bool>,
    groups: Arc<CommandGroups>,
}

impl ContainerInstance {
    fn new(shared: &Arc<Shared>, slot: Slot, mut init: Process) -> Self {
        let pidfd = Arc::clone(&init.pidfd);
        let process_number = sys::process::pidfd_number(pidfd.as_fd()).unwrap_or(0);
        let handle =
            Handle { slot: slot.number, pid: init.pid, process_number, boot: shared.boot.clone() };
        let (tell, ended) = watch::channel(false);
        tokio::spawn(async move {
            init.wait().await;
            let _nobody_listens = tell.send(true);
        });
        let root = shared.hierarchies.version_2_root();
        let groups = CommandGroups {
            folder: root
                .map(|root| root.join(&shared.config.groups).join(Pool::group_name(slot.number))),
            name: Pool::group_name(slot.number),
            state: Mutex::new(GroupNumbers {
                free: (0..slot.command_groups()).collect(),
                next: slot.command_groups(),
            }),
            is_spoiled: AtomicBool::new(false),
        };
        Self {
            shared: Arc::clone(shared),
            number: slot.number,
            upper: slot.upper.clone(),
            oom_before: slot.oom_before(),
            slot: Mutex::new(Some(slot)),
            pidfd,
            handle,
            ended,
            groups: Arc::new(groups),
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
            group: self.groups.name.clone(),
            own_group: tree.as_ref().map_or(&self.groups.name, |tree| &tree.name).clone(),
            argv: bytes(command.argv),
            env: bytes(command.env),
            cwd: command.cwd.into_bytes(),
            user: command.user,
            terminal: command.terminal.is_some(),
            rows,
            columns,
        };
        let zygote = self.shared.zygote().await?;
        let start = zygote.exec(exec, self.pidfd.as_fd(), streams).await?;
        let tree = match &start {
            CommandStart::Started(_) => tree.map(|tree| Box::new(tree) as Box<dyn Tree>),
            CommandStart::Refused(..) => None,
        };
        Ok(Started { start, tree })
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

    fn oom_kills(&self) -> u64 {
        self.group().oom_kills().unwrap_or(0).saturating_sub(self.oom_before)
    }

    fn memory_in_use(&self) -> u64 {
        self.group().memory_in_use().unwrap_or(0)
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

    async fn ended(&self) {
        let mut ended = self.ended.clone();
        // An error means that the watching task is gone, which happens at the runtime's own end only.
        let _watching = ended.wait_for(|ended| *ended).await;
    }

    async fn release(&self) {
        let slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(slot) = slot else { return };
        slot.note_command_groups(self.groups.made());
        if self.groups.is_spoiled.load(Ordering::Relaxed) {
            slot.spoil();
        }
        let shared = Arc::clone(&self.shared);
        let cleaned = tokio::task::spawn_blocking(move || shared.pool.give_back(slot));
        if let Err(error) = cleaned.await {
            tracing::error!(%error, "cleaning a slot panicked");
        }
    }
}

/// The groups that single commands of one sandbox run in, below the sandbox's own.
#[derive(Debug)]
struct CommandGroups {
    /// The sandbox's version 2 group; without one, commands run in the sandbox's own groups.
    folder: Option<PathBuf>,
    name: String,
    state: Mutex<GroupNumbers>,
    /// A command was killed by its group, which then takes no new process.
    is_spoiled: AtomicBool,
}

#[derive(Debug)]
struct GroupNumbers {
    free: BTreeSet<u32>,
    next: u32,
}

impl CommandGroups {
    fn made(&self) -> u32 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).next
    }
}

/// The group of one command. Dropping it keeps the group for the next command when it is empty, and
/// leaves it alone while background processes are in it.
#[derive(Debug)]
struct CommandTree {
    groups: Arc<CommandGroups>,
    name: String,
    number: u32,
    folder: Option<PathBuf>,
    is_killed: AtomicBool,
}

impl CommandTree {
    fn make(groups: &Arc<CommandGroups>) -> Result<Self> {
        let Some(above) = &groups.folder else {
            let (groups, name) = (Arc::clone(groups), groups.name.clone());
            return Ok(Self {
                groups,
                name,
                number: 0,
                folder: None,
                is_killed: AtomicBool::new(false),
            });
        };
        let (number, is_new) = {
            let mut state = groups.state.lock().unwrap_or_else(PoisonError::into_inner);
            match state.free.pop_first() {
                Some(number) => (number, false),
                None => {
                    state.next += 1;
                    (state.next - 1, true)
                }
            }
        };
        let folder = above.join(format!("e{number}"));
        if is_new {
            match std::fs::create_dir(&folder) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                made => made.context(|| "make the group of a command".into())?,
            }
        }
        let name = format!("{}/e{number}", groups.name);
        Ok(Self {
            groups: Arc::clone(groups),
            name,
            number,
            folder: Some(folder),
            is_killed: AtomicBool::new(false),
        })
    }
}

impl Tree for CommandTree {
    fn kill(&self) -> Result<()> {
        let Some(folder) = &self.folder else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "no cgroup version 2 to kill a tree by",
            ));
        };
        self.is_killed.store(true, Ordering::Relaxed);
        self.groups.is_spoiled.store(true, Ordering::Relaxed);
        std::fs::write(folder.join("cgroup.kill"), "1")
            .context(|| "kill the processes of a command".into())
    }
}

impl Drop for CommandTree {
    fn drop(&mut self) {
        let Some(folder) = &self.folder else { return };
        if self.is_killed.load(Ordering::Relaxed) {
            return;
        }
        let events = std::fs::read_to_string(folder.join("cgroup.events")).unwrap_or_default();
        if events.lines().any(|line| line == "populated 0") {
            let mut state = self.groups.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.free.insert(self.number);
        }
    }
}

#[cfg(test)]
mod tests;
