//! Control groups of version 1, version 2 and hybrids of both, behind one small interface.
//!
//! For: finding which hierarchy carries which controller, groups with limits, freezing and killing a
//! group, moving the calling process into one, and counting what the OOM killer did. Not for: choosing
//! limits, systemd slices, device rules.
//!
//! Joining a version 1 group: a single-threaded process that writes "0" into `tasks` moves without the
//! lock over all forks of the machine, which `cgroup.procs` waits 10 to 20 ms for. For version 2 a process
//! is born in its group ([`crate::process::Fork`]).
//!
//! Groups are files: they survive a crash of their maker and are removed by name. No state, no locks.

mod meter;
mod reclaim;
mod shares;
mod usage;

pub use meter::{Meter, Metered};
pub use shares::Bandwidth;

use crate::mount;
use crate::process::{self, Pid, Reach};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where this machine's controllers are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchies {
    memory: Option<Place>,
    pids: Option<Place>,
    cpu: Option<Place>,
    cpuset: Option<Place>,
    io: Option<Place>,
    freezer: Option<PathBuf>,
    unified: Option<PathBuf>,
}

/// One controller: the mount point of its hierarchy and whose files it has.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    root: PathBuf,
    unified: bool,
}

impl Hierarchies {
    /// Reads the mount table.
    pub fn detect() -> io::Result<Self> {
        let mounts = mount::read_mounts()?;
        let unified =
            mounts.iter().find(|entry| entry.kind == "cgroup2").map(|e| e.mount_point.clone());
        let in_unified = match &unified {
            Some(root) => std::fs::read_to_string(root.join("cgroup.controllers"))?,
            None => String::new(),
        };
        let old = |name: &str| {
            let has = |entry: &&mount::MountEntry| {
                let options = entry.super_options.to_string_lossy();
                entry.kind == "cgroup" && options.split(',').any(|option| option == name)
            };
            mounts.iter().find(has).map(|entry| entry.mount_point.clone())
        };
        let find = |name: &str| match &unified {
            Some(root) if in_unified.split_whitespace().any(|word| word == name) => {
                Some(Place { root: root.clone(), unified: true })
            }
            // Version 1 has another name for it.
            _ => old(if name == "io" { "blkio" } else { name })
                .map(|root| Place { root, unified: false }),
        };
        Ok(Self {
            memory: find("memory"),
            pids: find("pids"),
            cpu: find("cpu"),
            cpuset: find("cpuset"),
            io: find("io"),
            freezer: if unified.is_some() { None } else { old("freezer") },
            unified,
        })
    }

    /// Which of the limits cannot be set on this machine.
    pub fn missing(&self) -> Vec<&'static str> {
        [("memory", &self.memory), ("pids", &self.pids), ("cpu", &self.cpu)]
            .into_iter()
            .filter_map(|(name, place)| place.is_none().then_some(name))
            .collect()
    }

    /// Whether a group can be frozen, and killed as a whole.
    pub fn can_freeze(&self) -> bool {
        self.unified.is_some() || self.freezer.is_some()
    }

    /// Mount points of the version 1 hierarchies that carry something we use, each once.
    pub fn version_1_roots(&self) -> Vec<&Path> {
        let places = [&self.memory, &self.pids, &self.cpu];
        let old = places.into_iter().flatten().filter(|place| !place.unified);
        let mut roots: Vec<&Path> =
            old.map(|place| place.root.as_path()).chain(self.freezer.as_deref()).collect();
        roots.sort_unstable();
        roots.dedup();
        roots
    }

    /// Mount point of the version 2 hierarchy.
    pub fn version_2_root(&self) -> Option<&Path> {
        self.unified.as_deref()
    }

    /// The group of this name in every hierarchy that we use. Makes nothing yet.
    pub fn group(&self, name: impl Into<PathBuf>) -> Group<'_> {
        Group { hierarchies: self, name: name.into() }
    }
}

/// A group of the same name in all hierarchies. Only a name: dropping it removes nothing.
#[derive(Debug, Clone)]
pub struct Group<'a> {
    hierarchies: &'a Hierarchies,
    name: PathBuf,
}

impl Group<'_> {
    /// The name below each hierarchy's root.
    pub fn name(&self) -> &Path {
        &self.name
    }

    fn directories(&self) -> impl Iterator<Item = PathBuf> + '_ {
        let roots = self.hierarchies.version_1_roots();
        roots
            .into_iter()
            .chain(self.hierarchies.version_2_root())
            .map(|root| root.join(&self.name))
            .collect::<Vec<_>>()
            .into_iter()
    }

    /// Makes the group where it does not exist, its parents too.
    pub fn create(&self) -> io::Result<()> {
        for directory in self.directories() {
            std::fs::create_dir_all(directory)?;
        }
        Ok(())
    }

    /// Lets groups below this one have limits: needed where version 2 carries the controllers.
    pub fn delegate(&self) -> io::Result<()> {
        let Some(root) = self.hierarchies.version_2_root() else { return Ok(()) };
        let places = [
            ("+memory", &self.hierarchies.memory),
            ("+pids", &self.hierarchies.pids),
            ("+cpu", &self.hierarchies.cpu),
            ("+cpuset", &self.hierarchies.cpuset),
            ("+io", &self.hierarchies.io),
        ];
        for (word, place) in places {
            if place.as_ref().is_some_and(|place| place.unified) {
                for directory in [root.to_path_buf(), root.join(&self.name)] {
                    std::fs::write(directory.join("cgroup.subtree_control"), word)?;
                }
            }
        }
        Ok(())
    }

    /// Removes the group and the groups below it. EBUSY while a process is in one of them.
    pub fn remove(&self) -> io::Result<()> {
        let mut all = self.directories().chain(self.rare_directories());
        all.try_for_each(|directory| remove_tree(&directory))
    }

    /// Removes the group where it has neither processes nor groups below it.
    pub fn remove_if_empty(&self) -> io::Result<()> {
        for directory in self.directories().chain(self.rare_directories()) {
            match std::fs::remove_dir(directory) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
        }
        Ok(())
    }

    /// Whether the group exists anywhere.
    pub fn exists(&self) -> bool {
        !self.rare_directories().is_empty() || self.directories().any(|group| group.exists())
    }

    /// A descriptor of the version 2 directory, for a process to be born in it.
    pub fn open_version_2(&self) -> io::Result<Option<OwnedFd>> {
        let Some(root) = self.hierarchies.version_2_root() else { return Ok(None) };
        open_directory(&root.join(&self.name)).map(Some)
    }

    fn file(&self, place: &Option<Place>, old: &str, new: &str) -> io::Result<PathBuf> {
        let place = place.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        Ok(place.root.join(&self.name).join(if place.unified { new } else { old }))
    }

    /// Bounds memory, swap included where it is accounted. `None` takes the bound away.
    pub fn set_memory(&self, bytes: Option<u64>) -> io::Result<()> {
        let place = &self.hierarchies.memory;
        let is_unified = place.as_ref().is_some_and(|place| place.unified);
        let limit = self.file(place, "memory.limit_in_bytes", "memory.max")?;
        let none = if is_unified { "max" } else { "-1" };
        let text = bytes.map_or(none.to_owned(), |bytes| bytes.to_string());
        if is_unified {
            std::fs::write(limit, &text)?;
            let swap = self.file(place, "", "memory.swap.max")?;
            return allow_absent(std::fs::write(swap, if bytes.is_some() { "0" } else { "max" }));
        }
        // Memory plus swap is never below memory alone, so the order depends on the direction.
        let both = self.file(place, "memory.memsw.limit_in_bytes", "")?;
        if std::fs::write(&limit, &text).is_err() {
            allow_absent(std::fs::write(&both, &text))?;
            std::fs::write(&limit, &text)?;
        }
        allow_absent(std::fs::write(&both, &text))
    }

    /// Bounds the number of tasks. `None` takes the bound away.
    pub fn set_pids(&self, count: Option<u32>) -> io::Result<()> {
        let file = self.file(&self.hierarchies.pids, "pids.max", "pids.max")?;
        std::fs::write(file, count.map_or("max".to_owned(), |count| count.to_string()))
    }

    /// Bounds CPU time to thousandths of a core. `None` takes the bound away.
    pub fn set_cpu(&self, millis: Option<u32>) -> io::Result<()> {
        const PERIOD_US: u64 = 100_000;
        let place = &self.hierarchies.cpu;
        let quota = millis.map(|millis| (u64::from(millis) * PERIOD_US / 1000).max(1000));
        let file = self.file(place, "cpu.cfs_quota_us", "cpu.max")?;
        let text = match (quota, place.as_ref().is_some_and(|place| place.unified)) {
            (Some(quota), true) => format!("{quota} {PERIOD_US}"),
            (None, true) => format!("max {PERIOD_US}"),
            (Some(quota), false) => quota.to_string(),
            (None, false) => "-1".to_owned(),
        };
        std::fs::write(file, text)
    }

    /// Bytes in use now, page cache included.
    pub fn memory_in_use(&self) -> io::Result<u64> {
        let file =
            self.file(&self.hierarchies.memory, "memory.usage_in_bytes", "memory.current")?;
        number(std::fs::read_to_string(file)?.trim())
    }

    /// Asks the kernel to give back what it can of the group's memory.
    pub fn drop_memory(&self) -> io::Result<()> {
        let place = &self.hierarchies.memory;
        if place.as_ref().is_some_and(|place| place.unified) {
            return Ok(());
        }
        std::fs::write(self.file(place, "memory.force_empty", "")?, "0")
    }

    /// How many processes the OOM killer has ended in this group since it was made.
    pub fn oom_kills(&self) -> io::Result<u64> {
        let file = self.file(&self.hierarchies.memory, "memory.oom_control", "memory.events")?;
        let text = std::fs::read_to_string(file)?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")).map_or(Ok(0), number)
    }

    /// Stops every process of the group and of groups below it, or lets them go on. Returns at once;
    /// see [`Group::wait_frozen`].
    pub fn freeze(&self, frozen: bool) -> io::Result<()> {
        if let Some(root) = self.hierarchies.version_2_root() {
            let file = root.join(&self.name).join("cgroup.freeze");
            return std::fs::write(file, if frozen { "1" } else { "0" });
        }
        let root = self.hierarchies.freezer.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let file = root.join(&self.name).join("freezer.state");
        std::fs::write(file, if frozen { "FROZEN" } else { "THAWED" })
    }

    /// Whether every process of the group has stopped.
    pub fn is_frozen(&self) -> io::Result<bool> {
        if let Some(root) = self.hierarchies.version_2_root() {
            let events = std::fs::read_to_string(root.join(&self.name).join("cgroup.events"))?;
            return Ok(events.lines().any(|line| line == "frozen 1"));
        }
        let root = self.hierarchies.freezer.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let state = std::fs::read_to_string(root.join(&self.name).join("freezer.state"))?;
        Ok(state.trim() == "FROZEN")
    }

    /// Waits until every process has stopped; false when the time is over first, as it is while one
    /// waits uninterruptibly for a disk or a cold page.
    pub fn wait_frozen(&self, deadline: Duration) -> io::Result<bool> {
        let end = Instant::now() + deadline;
        let mut pause = Duration::from_micros(50);
        while !self.is_frozen()? {
            if Instant::now() >= end {
                return Ok(false);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(2));
        }
        Ok(true)
    }

    /// Kills every process of the group and of groups below it, also those that are being forked.
    pub fn kill(&self) -> io::Result<()> {
        if let Some(root) = self.hierarchies.version_2_root() {
            let killed = std::fs::write(root.join(&self.name).join("cgroup.kill"), "1");
            if !matches!(&killed, Err(error) if error.kind() == io::ErrorKind::NotFound) {
                return killed;
            }
        }
        // Without cgroup.kill: stop forking first, then signal what is there until nothing is left.
        const ROUNDS: usize = 100;
        for _ in 0..ROUNDS {
            let pids = self.pids()?;
            if pids.is_empty() {
                break;
            }
            self.signal_all(libc::SIGKILL)?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Sends a signal to every process that is in the group now.
    pub fn signal_all(&self, signal: i32) -> io::Result<()> {
        for pid in self.pids()? {
            // A process that ended meanwhile needs no signal; the pidfd keeps a recycled pid out.
            let Ok(pidfd) = process::pidfd_open(pid) else { continue };
            if self.pids()?.contains(&pid) {
                let _ended = process::pidfd_signal(pidfd.as_fd(), signal, Reach::Process);
            }
        }
        Ok(())
    }

    /// The processes of the group and of groups below it.
    pub fn pids(&self) -> io::Result<Vec<Pid>> {
        let first = self.hierarchies.version_2_root().map(|root| root.join(&self.name));
        let Some(directory) = first.or_else(|| self.directories().next()) else {
            return Ok(Vec::new());
        };
        let mut pids = Vec::new();
        collect_pids(&directory, &mut pids)?;
        Ok(pids)
    }

    /// The processes in any hierarchy's group of this name, for removal after a crash.
    pub fn pids_anywhere(&self) -> io::Result<Vec<Pid>> {
        let mut pids = Vec::new();
        for directory in self.directories().filter(|directory| directory.exists()) {
            collect_pids(&directory, &mut pids)?;
        }
        pids.sort_unstable();
        pids.dedup();
        Ok(pids)
    }

    /// Names of the groups directly below this one, in any hierarchy.
    pub fn children(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for directory in self.directories() {
            for child in subdirectories(&directory)? {
                names.extend(child.file_name().and_then(|name| name.to_str()).map(str::to_owned));
            }
        }
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }
}

/// Opens a directory of a hierarchy for [`join_version_1`] or for a birth in it.
pub fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// The directory of a group below an open directory of its hierarchy.
pub fn open_directory_at(hierarchy: BorrowedFd<'_>, name: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(hierarchy, name, flags, Mode::empty())?)
}

/// Moves the calling process, which must have one thread only, into a version 1 group.
pub fn join_version_1(hierarchy: BorrowedFd<'_>, name: &Path) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let tasks = rustix::fs::openat(hierarchy, name.join("tasks"), flags, Mode::empty())?;
    rustix::io::write(&tasks, b"0")?;
    Ok(())
}

fn number(text: &str) -> io::Result<u64> {
    text.parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidData, format!("number {text:?}")))
}

/// An optional file of the kernel may be missing.
fn allow_absent(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::PermissionDenied
                    | io::ErrorKind::Unsupported
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}

fn subdirectories(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

fn collect_pids(directory: &Path, pids: &mut Vec<Pid>) -> io::Result<()> {
    let text = std::fs::read_to_string(directory.join("cgroup.procs"))?;
    pids.extend(text.lines().filter_map(|line| line.parse::<Pid>().ok()));
    subdirectories(directory)?.iter().try_for_each(|below| collect_pids(below, pids))
}

fn remove_tree(directory: &Path) -> io::Result<()> {
    for below in subdirectories(directory)? {
        remove_tree(&below)?;
    }
    match std::fs::remove_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Removed<'a>(Group<'a>);
    impl Drop for Removed<'_> {
        fn drop(&mut self) {
            let _gone = self.0.kill();
            let _gone = self.0.remove();
        }
    }

    #[test]
    fn limits_kill_and_removal_work_on_this_machine() {
        let hierarchies = Hierarchies::detect().unwrap();
        let name = format!("lamella-sys-test-{}", std::process::id());
        let group = Removed(hierarchies.group(&name));
        group.0.create().unwrap();
        group.0.set_memory(Some(64 << 20)).unwrap();
        group.0.set_memory(Some(128 << 20)).unwrap();
        group.0.set_memory(None).unwrap();
        group.0.set_pids(Some(10)).unwrap();
        group.0.set_cpu(Some(500)).unwrap();
        assert_eq!(group.0.oom_kills().unwrap(), 0);
        assert!(group.0.pids().unwrap().is_empty());
        let Some(root) = hierarchies.version_2_root() else { return };
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let procs = root.join(&name).join("cgroup.procs");
        std::fs::write(procs, child.id().to_string()).unwrap();
        assert_eq!(group.0.pids().unwrap(), [child.id() as Pid]);
        group.0.freeze(true).unwrap();
        assert!(group.0.wait_frozen(Duration::from_secs(10)).unwrap());
        group.0.freeze(false).unwrap();
        group.0.kill().unwrap();
        assert!(!child.wait().unwrap().success());
        group.0.remove().unwrap();
        assert!(!group.0.exists());
    }
}
