//! What a backend is: the ways to run an environment, behind two traits.
//!
//! The trait is written for four: `container` exists; `fncall`, `microvm` and `vm` answer Unsupported
//! until they do. A backend makes an [`Instance`]; everything above it (life cycle, journal, streams,
//! files, packing) is the same for all.

pub mod container;
mod groups;

use crate::ids::Ids;
use crate::plan::LaunchPlan;
use crate::room::Written;
use crate::zygote::CommandStart;
use async_trait::async_trait;
use layer::Result;
use serde::{Deserialize, Serialize};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

/// What finds an instance again after a restart of the runtime; part of the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handle {
    /// Which prepared slot it uses.
    pub slot: u32,
    /// Process id of its init (or of its virtual machine) on the host.
    pub pid: i32,
    /// The kernel's number for that process, never used again until the machine starts anew.
    pub process_number: u64,
    /// Which start of the machine that was.
    pub boot: String,
    /// Number of the profile of its commands.
    #[serde(default)]
    pub profile: u32,
}

/// A command, ready to be started.
#[derive(Debug, Clone, Default)]
pub struct Command {
    /// The command and its arguments.
    pub argv: Vec<String>,
    /// The whole environment.
    pub env: Vec<String>,
    /// Working directory.
    pub cwd: String,
    /// User, as names or numbers of the sandbox.
    pub user: String,
    /// Rows and columns of a terminal of its own, or streams.
    pub terminal: Option<(u32, u32)>,
    /// The sandbox ends with it, so it needs no group of its own.
    pub is_main: bool,
    /// What it prints is kept readable for a later runtime, until [`Instance::forget_streams`].
    pub is_held: bool,
}

/// A started command and the processes that come from it.
#[derive(Debug)]
pub struct Started {
    /// How the start went.
    pub start: CommandStart,
    /// Its tree; none when it was refused.
    pub tree: Option<Box<dyn Tree>>,
}

/// The processes that come from one command.
pub trait Tree: Send + Sync + std::fmt::Debug {
    /// Kills all of them, however they detached themselves.
    fn kill(&self) -> Result<()>;

    /// Sends a signal to all of them, however they detached themselves.
    fn signal(&self, signal: i32) -> Result<()>;

    /// Finds it again after a restart; none where it cannot be found.
    fn number(&self) -> Option<u32>;

    /// Whether a process is left in it.
    fn is_populated(&self) -> bool;
}

/// One way to run environments.
#[async_trait]
pub trait Backend: Send + Sync + std::fmt::Debug {
    /// Starts an instance over these layers (mount points, bottom first). Answers when it can run
    /// commands.
    async fn launch(&self, plan: &LaunchPlan, layers: &[PathBuf]) -> Result<Box<dyn Instance>>;

    /// Takes over an instance that an earlier runtime started. `None`: it does not live any more.
    async fn adopt(&self, handle: &Handle) -> Result<Option<Box<dyn Instance>>>;

    /// Clears everything that belongs to no instance of the list. Only before the first launch.
    async fn sweep(&self, keep: &[Handle]) -> Result<()>;
}

/// A running sandbox, as its backend sees it.
#[async_trait]
pub trait Instance: Send + Sync + std::fmt::Debug {
    /// For the journal.
    fn handle(&self) -> Handle;

    /// Starts a command. `streams`: input, output, error; empty with a terminal.
    async fn exec(&self, command: Command, streams: &[BorrowedFd<'_>]) -> Result<Started>;

    /// Nothing of what this command prints needs to be held for a later runtime any more.
    async fn forget_streams(&self, pid: sys::process::Pid, process_number: u64);

    /// The tree of a command that an earlier runtime started.
    fn adopt_tree(&self, number: u32) -> Option<Box<dyn Tree>>;

    /// Whether what it writes has no room any more.
    fn is_disk_full(&self) -> bool {
        sys::file::space::is_full(&self.upper())
    }

    /// What it takes of the disk of the data directory. Blocking.
    fn written(&self) -> Written {
        Written::of_tree(&self.upper())
    }

    /// Gives back what it has deleted, if that is not so at once. Blocking.
    fn trim(&self) {}

    /// Ends everything in it, since there is no room for what it writes.
    fn stop_for_room(&self) -> Result<()>;

    /// Whether it was ended this way.
    fn is_stopped_for_room(&self) -> bool;

    /// Sends a signal to every process but the init.
    fn signal_all(&self, signal: i32) -> Result<()>;

    /// Ends everything in it, at once.
    fn kill(&self) -> Result<()>;

    /// Stops every process. Timeout, and all go on, when one does not stop until the deadline.
    async fn freeze(&self, deadline: Duration) -> Result<()>;

    /// Lets every process go on.
    fn thaw(&self) -> Result<()>;

    /// Gives the memory of a frozen sandbox back to the kernel, as far as that takes it. Blocking.
    fn reclaim(&self) -> Result<()>;

    /// Asks for what of it lies in swap. Blocking.
    fn bring_back(&self) -> Result<()>;

    /// Counts what it uses from now on.
    fn meter(&self) -> Option<sys::cgroup::Meter> {
        None
    }

    /// How many processes the kernel has ended for lack of memory.
    fn oom_kills(&self) -> u64;

    /// How many forks the kernel has refused for the limit of tasks.
    fn refused_forks(&self) -> u64;

    /// Bytes in use now.
    fn memory_in_use(&self) -> u64;

    /// Processor time in microseconds since its group was made, which may be before it began.
    fn cpu_us(&self) -> u64;

    /// Processes and threads now, its init included.
    fn tasks(&self) -> u64;

    /// A descriptor of its root, for file transfer.
    fn root(&self) -> Result<OwnedFd>;

    /// The folder that holds what it wrote, with the owners that it knows.
    fn upper(&self) -> PathBuf;

    /// Who its users are on the host.
    fn ids(&self) -> Ids;

    /// Its network namespace.
    fn network(&self) -> Result<OwnedFd>;

    /// Completes when it has ended, also when asked later.
    async fn ended(&self);

    /// After its end: gives back what it used. Must be called once.
    async fn release(&self);
}
