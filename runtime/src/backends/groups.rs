//! The control groups that single commands of one sandbox run in, below the sandbox's own: they find every
//! process that comes from a command, however it detached itself.
//!
//! Locking: one mutex over which numbers are free. CRASH: a group is found again by its number.

use super::Tree;
use layer::{Context, Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use sys::process::{Pid, Reach};

/// Groups with leftover processes that are looked at when a new one would be made.
const LOOKED_AT: usize = 4;
/// How long processes may take to stop for a signal.
const FREEZE_DEADLINE: Duration = Duration::from_millis(500);

/// The groups of one sandbox.
#[derive(Debug)]
pub struct CommandGroups {
    /// The sandbox's version 2 group; without one, commands run in the sandbox's own groups.
    folder: Option<PathBuf>,
    name: String,
    numbers: Mutex<Numbers>,
    /// A command was killed by its group, which then takes no new process.
    is_spoiled: AtomicBool,
}

#[derive(Debug)]
struct Numbers {
    free: BTreeSet<u32>,
    /// Commands have ended and left processes behind.
    left: BTreeSet<u32>,
    next: u32,
}

impl CommandGroups {
    /// `made`: how many there are below `folder` already. After an adoption nobody knows which of them are in
    /// use or were killed, so none of them is given out.
    pub fn new(name: String, folder: Option<PathBuf>, made: u32, is_adopted: bool) -> Arc<Self> {
        let free = if is_adopted { BTreeSet::new() } else { (0..made).collect() };
        let numbers = Mutex::new(Numbers { free, left: BTreeSet::new(), next: made });
        Arc::new(Self { folder, name, numbers, is_spoiled: AtomicBool::new(false) })
    }

    /// The sandbox's own group.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many groups there are.
    pub fn made(&self) -> u32 {
        self.lock().next
    }

    /// Whether one of them cannot be used again.
    pub fn is_spoiled(&self) -> bool {
        self.is_spoiled.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Numbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number, and whether its group is to be made.
    fn take(&self, above: &Path) -> (u32, bool) {
        let mut numbers = self.lock();
        if let Some(number) = numbers.free.pop_first() {
            return (number, false);
        }
        let empty = |number: &u32| !is_populated(&folder_of(above, *number));
        if let Some(number) = numbers.left.iter().take(LOOKED_AT).copied().find(empty) {
            numbers.left.remove(&number);
            return (number, false);
        }
        numbers.next += 1;
        (numbers.next - 1, true)
    }
}

fn folder_of(above: &Path, number: u32) -> PathBuf {
    above.join(format!("e{number}"))
}

fn is_populated(folder: &Path) -> bool {
    let events = std::fs::read_to_string(folder.join("cgroup.events")).unwrap_or_default();
    !events.lines().any(|line| line == "populated 0")
}

/// The group of one command. Dropping it keeps the group for the next command when it is empty, and
/// leaves it alone while background processes are in it.
#[derive(Debug)]
pub struct CommandTree {
    groups: Arc<CommandGroups>,
    name: String,
    /// With its folder; none without version 2.
    place: Option<(u32, PathBuf)>,
    is_killed: AtomicBool,
}

impl CommandTree {
    /// A group for a new command.
    pub fn make(groups: &Arc<CommandGroups>) -> Result<Self> {
        let Some(above) = &groups.folder else {
            return Ok(Self::at(groups, groups.name.clone(), None));
        };
        let (number, is_new) = groups.take(above);
        let folder = folder_of(above, number);
        if is_new {
            match std::fs::create_dir(&folder) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                made => made.context(|| "make the group of a command".into())?,
            }
        }
        Ok(Self::at(groups, format!("{}/e{number}", groups.name), Some((number, folder))))
    }

    /// The group of a command that an earlier runtime started.
    pub fn adopt(groups: &Arc<CommandGroups>, number: u32) -> Option<Self> {
        let folder = folder_of(groups.folder.as_ref()?, number);
        let exists = folder.is_dir();
        exists
            .then(|| Self::at(groups, format!("{}/e{number}", groups.name), Some((number, folder))))
    }

    fn at(groups: &Arc<CommandGroups>, name: String, place: Option<(u32, PathBuf)>) -> Self {
        Self { groups: Arc::clone(groups), name, place, is_killed: AtomicBool::new(false) }
    }

    /// Its name below our own group.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn folder(&self) -> Result<&Path> {
        let without =
            || Error::new(ErrorKind::Unsupported, "no cgroup version 2 to find a tree by");
        self.place.as_ref().map(|(_, folder)| folder.as_path()).ok_or_else(without)
    }
}

impl Tree for CommandTree {
    fn kill(&self) -> Result<()> {
        let folder = self.folder()?;
        self.is_killed.store(true, Ordering::Relaxed);
        self.groups.is_spoiled.store(true, Ordering::Relaxed);
        std::fs::write(folder.join("cgroup.kill"), "1")
            .context(|| "kill the processes of a command".into())
    }

    fn signal(&self, signal: i32) -> Result<()> {
        let folder = self.folder()?;
        let context = || format!("signal {signal} to the processes of a command");
        // Nobody forks past the signal while all are stopped. One that cannot stop now forks nothing either.
        std::fs::write(folder.join("cgroup.freeze"), "1").context(context)?;
        let _thaw = Thaw(folder);
        wait_frozen(folder);
        let found: Vec<_> = pids(folder)
            .into_iter()
            .filter_map(|pid| Some((pid, sys::process::pidfd_open(pid).ok()?)))
            .collect();
        // One that ended in between had its pid used again, perhaps; one that is still here did not.
        let still = pids(folder);
        for (_, pidfd) in found.iter().filter(|(pid, _)| still.contains(pid)) {
            match sys::process::pidfd_signal(pidfd.as_fd(), signal, Reach::Process) {
                Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => {
                    return Err(Error::invalid(format!("there is no signal {signal}")));
                }
                // It has ended meanwhile.
                _ => {}
            }
        }
        Ok(())
    }

    fn number(&self) -> Option<u32> {
        self.place.as_ref().map(|(number, _)| *number)
    }

    fn is_populated(&self) -> bool {
        self.place.as_ref().is_some_and(|(_, folder)| is_populated(folder))
    }
}

/// Lets the processes of a group go on.
struct Thaw<'a>(&'a Path);

impl Drop for Thaw<'_> {
    fn drop(&mut self) {
        if let Err(error) = std::fs::write(self.0.join("cgroup.freeze"), "0") {
            tracing::warn!(%error, "the processes of a command stay frozen");
        }
    }
}

fn wait_frozen(folder: &Path) {
    let end = Instant::now() + FREEZE_DEADLINE;
    let is_frozen = || {
        let events = std::fs::read_to_string(folder.join("cgroup.events")).unwrap_or_default();
        events.lines().any(|line| line == "frozen 1")
    };
    while !is_frozen() && Instant::now() < end {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// The processes of a group. A thread's group is listed by its process; a dead leader's too.
fn pids(folder: &Path) -> Vec<Pid> {
    let text = std::fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

impl Drop for CommandTree {
    fn drop(&mut self) {
        let Some((number, folder)) = &self.place else { return };
        if self.is_killed.load(Ordering::Relaxed) {
            return;
        }
        let is_populated = is_populated(folder);
        let mut numbers = self.groups.lock();
        if is_populated {
            numbers.left.insert(*number);
        } else {
            numbers.free.insert(*number);
        }
    }
}
