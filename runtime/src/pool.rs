//! Slots: what a sandbox needs from the host and what is slow to make, prepared ahead and used again: a
//! cgroup with its limits, the two folders of a writable layer, and the overlay over them.
//!
//! Locking: one mutex over the list of free slots, held for a push or a pop. Making and cleaning happen
//! on blocking threads. CRASH: slots are named by number below folders of ours, so the next start finds
//! and clears whatever is left of them.

use crate::disk::{self, DiskSize, Disks};
use crate::ids::Ids;
use crate::plan::PlannedLimits;
use layer::{Context, Error, ErrorKind, Result};
use proto::meter::Counter;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use sys::cgroup::{Bandwidth, Group, Hierarchies};
use sys::mount::{MountFd, Recursive};

/// A prepared place for one sandbox.
///
/// Its group is never used again after `cgroup.kill`: a process that clone3 puts into a group that was
/// once killed this way is killed at its birth (seen on Linux 6.18). So a sandbox is ended by its init,
/// and a slot in which a group had to be killed is removed.
#[derive(Debug)]
pub struct Slot {
    /// Its number, unique below one data directory.
    pub number: u32,
    /// Folder of the two below, on one file system with them.
    pub folder: PathBuf,
    /// Folder for what the sandbox writes.
    pub upper: PathBuf,
    /// Scratch folder of overlayfs.
    pub work: PathBuf,
    /// The size of a disk of its own.
    disk: Option<DiskSize>,
    /// The limits that its group has now.
    limits: Mutex<Option<PlannedLimits>>,
    /// OOM kills of former users.
    oom_before: AtomicU64,
    /// Groups for single commands that exist below its group.
    command_groups: AtomicU32,
    is_spoiled: AtomicBool,
    /// The network namespace of the last user, for the next one.
    network: Mutex<Option<OwnedFd>>,
    /// The user namespace of all its users, once one needed it.
    users: OnceLock<Users>,
    /// The overlay over its folders, while nothing was written into them.
    root: Mutex<Option<Root>>,
}

/// A user namespace and the numbers of its ids on the host. Whoever had it before left nothing in it: what
/// it counts are processes, files and sockets, and those are gone.
#[derive(Debug)]
pub struct Users {
    /// The numbers.
    pub ids: Ids,
    /// The namespace.
    pub namespace: OwnedFd,
}

/// An overlay over the folders of a slot. Mounting one costs more than anything else that a launch does on
/// a disk, so a sandbox that wrote nothing leaves it to the next one with the same layers.
#[derive(Debug)]
struct Root {
    mount: MountFd,
    /// Whether it shows owners as the slot's users.
    is_shifted: bool,
    /// Mount points of its layers, bottom first.
    layers: Vec<PathBuf>,
    /// When the upper folder was changed last, just after the mount.
    upper_changed: Timestamp,
}

impl Slot {
    /// Name of the folder for what the sandbox writes.
    pub const UPPER: &str = "upper";
    /// Name of the scratch folder of overlayfs.
    pub const WORK: &str = "work";

    /// OOM kills before the present user.
    pub fn oom_before(&self) -> u64 {
        self.oom_before.load(Ordering::Relaxed)
    }

    /// The slot cannot be used again.
    pub fn spoil(&self) {
        self.is_spoiled.store(true, Ordering::Relaxed);
    }

    /// A network namespace to use again; the init looks whether it may.
    pub fn take_network(&self) -> Option<OwnedFd> {
        self.network.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Its user namespace, if it has one yet.
    pub fn users(&self) -> Option<&Users> {
        self.users.get()
    }

    /// Lets go of the overlay that the last user left, if there is one.
    pub fn drop_root(&self) {
        if self.lock_root().is_some() {
            drop_root(self);
        }
    }

    /// Gives it a user namespace for good.
    pub fn keep_users(&self, users: Users) {
        self.users.get_or_init(|| users);
    }

    /// Keeps a network namespace for the next user.
    pub fn keep_network(&self, network: OwnedFd) {
        *self.network.lock().unwrap_or_else(PoisonError::into_inner) = Some(network);
    }

    /// A copy of the overlay of these layers over the slot's folders; made by `mount` unless the last user
    /// left it. The sandbox gets the copy, so that the overlay outlives it. Also answers whether it shows
    /// owners as the slot's users.
    pub fn root(
        &self,
        layers: &[PathBuf],
        mount: impl FnOnce() -> Result<(MountFd, bool)>,
    ) -> Result<(MountFd, bool)> {
        let mut root = self.lock_root();
        let kept = match root.take() {
            Some(kept) => kept,
            None => {
                let (mount, is_shifted) = mount()?;
                let upper_changed = changed(&self.upper)?;
                Root { mount, is_shifted, layers: layers.to_vec(), upper_changed }
            }
        };
        let copy =
            kept.mount.try_clone_tree(Recursive::No).context(|| "copy the overlay".into())?;
        let is_shifted = kept.is_shifted;
        *root = Some(kept);
        Ok((copy, is_shifted))
    }

    fn lock_root(&self) -> MutexGuard<'_, Option<Root>> {
        self.root.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it keeps an overlay of these layers.
    fn has_root_of(&self, layers: &[PathBuf]) -> bool {
        self.lock_root().as_ref().is_some_and(|root| root.layers == layers)
    }

    /// Whether its overlay, if it keeps one, needs a layer that is mounted here.
    fn needs(&self, layers: &[PathBuf]) -> bool {
        let needs = |root: &Root| root.layers.iter().any(|layer| layers.contains(layer));
        self.lock_root().as_ref().is_some_and(needs)
    }

    /// Whether its overlay is as good as new: nothing was ever made, removed or changed in its upper folder.
    /// Every change below a folder of a layer begins with a copy of that folder in there.
    fn is_root_unused(&self) -> bool {
        let unchanged = |root: &Root| changed(&self.upper).is_ok_and(|at| at == root.upper_changed);
        self.lock_root().as_ref().is_some_and(unchanged) && is_untouched(&self.upper)
    }

    /// How many groups for commands exist already, empty.
    pub fn command_groups(&self) -> u32 {
        self.command_groups.load(Ordering::Relaxed)
    }

    /// Remembers groups for commands that were added.
    pub fn note_command_groups(&self, count: u32) {
        self.command_groups.fetch_max(count, Ordering::Relaxed);
    }
}

/// The slots of one data directory.
#[derive(Debug)]
pub struct Pool {
    hierarchies: Arc<Hierarchies>,
    groups: PathBuf,
    folder: PathBuf,
    disks: Disks,
    free: Mutex<Vec<Slot>>,
    next: AtomicU32,
    made: Counter,
}

/// Free slots beyond this are removed rather than kept.
const MAX_FREE: usize = 64;
/// Memory that a group may keep charged between users, mostly page cache of layers.
const MAX_KEPT_BYTES: u64 = 32 << 20;

impl Pool {
    /// `groups`: our group's name in every hierarchy; `folder`: where the writable layers lie; `templates`:
    /// where empty disks lie.
    pub fn new(
        hierarchies: Arc<Hierarchies>,
        groups: PathBuf,
        folder: PathBuf,
        templates: PathBuf,
    ) -> Self {
        let (free, next) = (Mutex::new(Vec::new()), AtomicU32::new(0));
        let disks = Disks::new(templates);
        Self { hierarchies, groups, folder, disks, free, next, made: Counter::default() }
    }

    /// How many slots are free, and how many were made.
    pub fn counts(&self) -> (u64, u64) {
        (self.lock_free().len() as u64, self.made.get())
    }

    /// Name of a slot's group, below ours.
    pub fn group_name(number: u32) -> String {
        format!("s{number}")
    }

    /// The group of a slot.
    pub fn group(&self, number: u32) -> Group<'_> {
        self.hierarchies.group(self.groups.join(Self::group_name(number)))
    }

    /// A slot with these limits, for a sandbox with these layers. Blocking.
    pub fn take(&self, limits: &PlannedLimits, layers: &[PathBuf]) -> Result<Slot> {
        let slot = match self.take_free(limits.disk, layers) {
            Some(slot) => slot,
            None => self.make(self.next.fetch_add(1, Ordering::Relaxed), limits.disk)?,
        };
        match self.apply(&slot, limits) {
            Ok(()) => Ok(slot),
            Err(error) => {
                self.give_back(slot);
                Err(error)
            }
        }
    }

    /// The free slot with such a disk that fits best: one with the overlay of these layers, or without any.
    fn take_free(&self, disk: Option<DiskSize>, layers: &[PathBuf]) -> Option<Slot> {
        let mut free = self.lock_free();
        let last = |fits: &dyn Fn(&Slot) -> bool| {
            free.iter().rposition(|slot| slot.disk == disk && fits(slot))
        };
        let fitting = last(&|slot| slot.has_root_of(layers));
        let bare = || last(&|slot| slot.lock_root().is_none());
        let chosen = fitting.or_else(bare).or_else(|| last(&|_| true))?;
        let slot = free.swap_remove(chosen);
        drop(free);
        if fitting.is_none() && slot.lock_root().is_some() {
            drop_root(&slot);
        }
        Some(slot)
    }

    fn lock_free(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets go of every overlay in a free slot that needs a layer mounted here, so that the layer can be
    /// unmounted. Blocking.
    pub fn let_go_of(&self, layers: &[PathBuf]) {
        let mut free = self.lock_free();
        for slot in free.iter_mut().filter(|slot| slot.needs(layers)) {
            drop_root(slot);
        }
    }

    /// A slot that a living sandbox of an earlier runtime uses.
    pub fn adopt(&self, number: u32) -> Slot {
        self.next.fetch_max(number + 1, Ordering::Relaxed);
        let slot = self.describe(number);
        let known = self.group(number).children().map_or(0, |names| names.len());
        // Some of them may be in use; the next one made is beyond all of them.
        slot.note_command_groups(known as u32);
        slot
    }

    /// The folder of a slot, which holds its image, too, if it has a disk.
    pub fn home(&self, number: u32) -> PathBuf {
        self.folder.join(Self::group_name(number))
    }

    fn describe(&self, number: u32) -> Slot {
        let home = self.home(number);
        let (folder, disk) =
            disk::of_slot(&home).map_or((home, None), |(place, size)| (place, Some(size)));
        Slot {
            number,
            disk,
            upper: folder.join(Slot::UPPER),
            work: folder.join(Slot::WORK),
            folder,
            limits: Mutex::new(None),
            oom_before: AtomicU64::new(0),
            command_groups: AtomicU32::new(0),
            is_spoiled: AtomicBool::new(false),
            network: Mutex::new(None),
            users: OnceLock::new(),
            root: Mutex::new(None),
        }
    }

    fn make(&self, number: u32, disk: Option<DiskSize>) -> Result<Slot> {
        let made = self.try_make(number, disk);
        if made.is_err() {
            self.remove(number);
        }
        made
    }

    fn try_make(&self, number: u32, disk: Option<DiskSize>) -> Result<Slot> {
        self.group(number).create().context(|| format!("make the groups of slot {number}"))?;
        if let Some(size) = disk {
            let home = self.home(number);
            make_folder(&home)?;
            self.disks.make(&home, size)?;
        }
        let slot = self.describe(number);
        for folder in [&slot.upper, &slot.work] {
            make_folder(folder)?;
        }
        self.made.add(1);
        Ok(slot)
    }

    fn apply(&self, slot: &Slot, limits: &PlannedLimits) -> Result<()> {
        let mut applied = slot.limits.lock().unwrap_or_else(PoisonError::into_inner);
        let before = applied.take();
        if before.as_ref() != Some(limits) {
            self.set(slot.number, before.as_ref(), limits)?;
        }
        *applied = Some(limits.clone());
        Ok(())
    }

    /// Sets what differs.
    fn set(&self, number: u32, before: Option<&PlannedLimits>, now: &PlannedLimits) -> Result<()> {
        let group = self.group(number);
        if before.map(|limits| limits.memory_bytes) != Some(now.memory_bytes) {
            group.set_memory(Some(now.memory_bytes)).context(|| "limit memory".into())?;
        }
        if before.map(|limits| limits.pids) != Some(now.pids) {
            group.set_pids(Some(now.pids)).context(|| "limit pids".into())?;
        }
        if before.map(|limits| limits.cpu_millis) != Some(now.cpu_millis) {
            group.set_cpu(now.cpu_millis).context(|| "limit cpu".into())?;
        }
        if before.map(|limits| limits.cpu_weight) != Some(now.cpu_weight) {
            group.set_cpu_weight(now.cpu_weight).context(|| "weigh cpu".into())?;
        }
        // Of the user that an earlier runtime had in it nothing is known.
        let had_rare = before.map_or_else(|| group.is_rare(), PlannedLimits::are_rare);
        if now.are_rare() || had_rare {
            self.set_rare(&group, now)?;
        }
        Ok(())
    }

    fn set_rare(&self, group: &Group<'_>, now: &PlannedLimits) -> Result<()> {
        if now.processors.is_some() && !self.hierarchies.can_pin() {
            return Err(Error::new(ErrorKind::Unsupported, "no cgroup controller cpuset"));
        }
        let is_throttled = now.bandwidth != Bandwidth::default();
        if is_throttled && !self.hierarchies.can_throttle() {
            let text = "no cgroup controller for the bandwidth of disks";
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        group.create_rare().context(|| "make groups for rare limits".into())?;
        if self.hierarchies.can_pin() {
            group
                .set_processors(now.processors.as_deref())
                .context(|| format!("bind to processors {:?}", now.processors))?;
        }
        if self.hierarchies.can_throttle() {
            let folder = std::fs::File::open(&self.folder).context(|| "open the slots".into())?;
            let limited = sys::loop_device::disk_of(folder.as_fd())
                .and_then(|disk| group.set_bandwidth(disk, now.bandwidth));
            match limited {
                Err(error) if !is_throttled => tracing::debug!(%error, "no bandwidth to free"),
                limited => limited.context(|| "bound the bandwidth of the disk".into())?,
            }
        }
        Ok(())
    }

    /// Cleans a slot whose sandbox has ended, and keeps it for the next one. Blocking.
    pub fn give_back(&self, slot: Slot) {
        if slot.is_spoiled.load(Ordering::Relaxed) {
            self.remove(slot.number);
            return;
        }
        if let Err(error) = self.clean(&slot) {
            tracing::warn!(slot = slot.number, error = %error.chain(), "a slot cannot be used again");
            self.remove(slot.number);
            return;
        }
        let mut free = self.lock_free();
        free.push(slot);
        // The oldest goes, or disks of one size would keep all places.
        let oldest = if free.len() > MAX_FREE { Some(free.remove(0)) } else { None };
        drop(free);
        if let Some(oldest) = oldest {
            oldest.lock_root().take();
            self.remove(oldest.number);
        }
    }

    fn clean(&self, slot: &Slot) -> Result<()> {
        let group = self.group(slot.number);
        if !group.pids().context(|| "list the group".into())?.is_empty() {
            return Err(Error::new(ErrorKind::Busy, "a process is left in the group"));
        }
        let oom = group.oom_kills().unwrap_or(0);
        slot.oom_before.store(oom, Ordering::Relaxed);
        if group.memory_in_use().is_ok_and(|bytes| bytes > MAX_KEPT_BYTES) {
            // What cannot be given back now stays charged and is reclaimed under pressure.
            let _partly = group.drop_memory();
        }
        if slot.is_root_unused() {
            return Ok(());
        }
        slot.lock_root().take();
        refresh(slot)?;
        disk::trim(&self.home(slot.number))
    }

    /// Removes a slot for good, with every process that is still in its group. Blocking.
    pub fn remove(&self, number: u32) {
        let group = self.group(number);
        let removed = group.kill().and_then(|()| {
            const ROUNDS: u32 = 200;
            for _ in 0..ROUNDS {
                if group.remove().is_ok() {
                    return Ok(());
                }
                // A killed process leaves its group a moment after the signal.
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            group.remove()
        });
        if let Err(error) = removed {
            tracing::warn!(slot = number, %error, "a group stays behind");
        }
        let home = self.home(number);
        disk::unmount(&home);
        if let Err(error) = remove_folder(&home) {
            tracing::warn!(slot = number, error = %error.chain(), "a folder stays behind");
        }
    }

    /// Removes every slot that is not in use, known to this process or left by an earlier one.
    /// Blocking.
    pub fn sweep(&self, in_use: &[u32]) -> Result<()> {
        self.lock_free().clear();
        let ours = self.hierarchies.group(&self.groups);
        let mut names = ours.children().context(|| "list our groups".into())?;
        for entry in std::fs::read_dir(&self.folder).context(|| "list slots".into())? {
            let entry = entry.context(|| "list slots".into())?;
            names.extend(entry.file_name().into_string());
        }
        names.sort_unstable();
        names.dedup();
        for name in names {
            let number = name.strip_prefix('s').and_then(|text| text.parse::<u32>().ok());
            if let Some(number) = number.filter(|number| !in_use.contains(number)) {
                self.remove(number);
            }
        }
        Ok(())
    }

    /// Removes our own group when nothing is left in it. Blocking.
    pub fn close(&self) {
        let free = std::mem::take(&mut *self.lock_free());
        for slot in free {
            self.remove(slot.number);
        }
        // It stays while a sandbox lives on in it.
        let _in_use = self.hierarchies.group(&self.groups).remove();
        if let Some(above) = self.groups.parent() {
            // Shared with the nodes of other data directories.
            let _in_use = self.hierarchies.group(above).remove_if_empty();
        }
    }
}

/// Unmounts the overlay of a slot whose user wrote nothing.
fn drop_root(slot: &Slot) {
    slot.lock_root().take();
    if let Err(error) = refresh(slot) {
        // The next mount says it again, and then the slot goes.
        tracing::warn!(slot = slot.number, error = %error.chain(), "clear a slot");
    }
}

/// Makes the folders of a slot fit for another overlay.
fn refresh(slot: &Slot) -> Result<()> {
    if is_untouched(&slot.upper) && clear_scratch(&slot.work) {
        return Ok(());
    }
    for folder in [&slot.upper, &slot.work] {
        remove_folder(folder)?;
        make_folder(folder)?;
    }
    Ok(())
}

/// Seconds and nanoseconds.
type Timestamp = (i64, i64);

fn changed(folder: &Path) -> Result<Timestamp> {
    use std::os::unix::fs::MetadataExt;
    let now = std::fs::metadata(folder).context(|| format!("look at {}", folder.display()))?;
    Ok((now.ctime(), now.ctime_nsec()))
}

/// Whether nothing was written into an upper folder, not even onto itself: overlayfs's own notes are the
/// only xattrs. Owner and mode are set anew for every user.
fn is_untouched(upper: &Path) -> bool {
    const NOTES: [&[u8]; 3] =
        [b"trusted.overlay.uuid", b"trusted.overlay.origin", b"trusted.overlay.impure"];
    let is_note = |name: &Vec<u8>| NOTES.contains(&name.as_slice());
    is_empty(upper) && sys::file::xattr::list(upper).is_ok_and(|names| names.iter().all(is_note))
}

/// Makes a work folder fit for the next mount, if nothing but what overlayfs makes itself is in it: its
/// scratch folder, and in there the note of a volatile mount, which it refuses to meet again.
fn clear_scratch(work: &Path) -> bool {
    let scratch = work.join("work");
    let incompatible = scratch.join("incompat");
    let note = incompatible.join("volatile");
    std::fs::remove_file(note.join("dirty"))
        .and_then(|()| std::fs::remove_dir(&note))
        .and_then(|()| std::fs::remove_dir(&incompatible))
        // The folders go only when they are empty.
        .and_then(|()| std::fs::remove_dir(&scratch))
        .is_ok()
        && is_empty(work)
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none())
}

fn make_folder(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).context(|| format!("make {}", path.display()))
}

/// Removes a tree that a sandbox wrote: whatever it contains, nothing outside of it is touched.
pub fn remove_folder(path: &Path) -> Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
    let parent = match sys::file::Folder::open(parent) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        parent => parent.context(|| format!("open {}", parent_of(path)))?,
    };
    parent.remove_tree(name.as_bytes()).map(drop).context(|| format!("remove {}", path.display()))
}

fn parent_of(path: &Path) -> String {
    path.parent().map(|parent| parent.display().to_string()).unwrap_or_default()
}
