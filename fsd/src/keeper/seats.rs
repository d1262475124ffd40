//! fsd's side of its keepers: finding those that live, starting those that do not, and giving each
//! everything that has to outlive fsd.
//!
//! ```text
//! seat: empty --connect or start--> taken --EOF seen by its watcher--> empty --start--> taken, and
//!       handed everything
//!       taken by another program --succeeded by this one's--> taken
//! ```
//!
//! A keeper that has died is replaced by fsd; one that is about to sit down where fsd looks for what its
//! predecessor left is waited for: it may be the only one that holds it.
//!
//! Locking: `held` (what every keeper has to hold) before a seat's mutex; a seat is locked for one
//! exchange. The watcher threads hold nothing while they wait.
// INVARIANT: a file is put into `held` before it is sent, so a keeper that is started meanwhile gets
// it with the rest.

mod reach;
mod renewal;

pub use reach::held_files;

use super::wire::{self, Key, Request, Response};
use super::{PATIENCE, cgroup};
use crate::config::{FsdConfig, KEEPERS, Paths};
use crate::fetch::spawn;
use layer::{Context, Error, ErrorKind, LayerId, Result};
use reach::{connect, reach};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use sys::socket::Seqpacket;

/// How long a new keeper may take to listen.
const START_PATIENCE: Duration = Duration::from_secs(10);
const START_POLL: Duration = Duration::from_millis(2);
/// Pause before a keeper that ended at once is started again.
const RESTART_PAUSE: Duration = Duration::from_millis(500);

/// What a dead fsd left with its keepers.
#[derive(Debug)]
pub struct Inheritance {
    /// The fanotify group.
    pub group: OwnedFd,
    /// The shared memory with the unanswered events.
    pub journal: OwnedFd,
    /// Data files that were opened before they were marked.
    pub files: BTreeMap<LayerId, OwnedFd>,
}

/// A living keeper.
#[derive(Debug)]
struct Seat {
    connection: Seqpacket,
    pid: u32,
    child: Option<Child>,
}

/// What every keeper has to hold.
#[derive(Debug)]
struct Held {
    group: OwnedFd,
    journal: OwnedFd,
    files: BTreeMap<Key, OwnedFd>,
}

/// The keepers of this fsd.
#[derive(Debug)]
pub struct Keepers {
    data_dir: PathBuf,
    paths: Paths,
    command: Vec<OsString>,
    held: Mutex<Option<Held>>,
    seats: [Mutex<Option<Seat>>; KEEPERS],
    leaving: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Keepers {
    /// Connects to keepers that live and takes what they hold; starts none. An error when nobody answers and
    /// somebody is there: with a new group its blocked readers would be let go.
    pub fn find(config: &FsdConfig) -> Result<(Arc<Self>, Option<Inheritance>)> {
        let keepers = Self {
            data_dir: config.data_dir.clone(),
            paths: config.paths()?,
            command: config.keeper_command.clone(),
            held: Mutex::new(None),
            seats: [const { Mutex::new(None) }; KEEPERS],
            leaving: AtomicBool::new(false),
        };
        let mut inheritance: Option<Inheritance> = None;
        let mut mute = None;
        for index in 0..KEEPERS {
            match reach(&keepers.paths, index) {
                Ok(None) => {}
                Ok(Some((connection, pid, found))) => {
                    *lock(&keepers.seats[index]) = Some(Seat { connection, pid, child: None });
                    // Either suffices; the fuller one knows the files of an attach that was cut off.
                    let files =
                        |of: &Option<Inheritance>| of.as_ref().map_or(0, |i| i.files.len() + 1);
                    if files(&found) > files(&inheritance) {
                        inheritance = found;
                    }
                }
                Err(error) => {
                    tracing::warn!(index, error = %error.chain(), "a keeper is mute");
                    mute = Some(error);
                }
            }
        }
        if let Some(error) = mute.filter(|_| inheritance.is_none()) {
            return Err(error);
        }
        Ok((Arc::new(keepers), inheritance))
    }

    /// From now on every keeper holds these; starts those that do not live, and watches all.
    pub fn hold(
        self: &Arc<Self>,
        group: BorrowedFd<'_>,
        journal: BorrowedFd<'_>,
        files: &BTreeMap<LayerId, BorrowedFd<'_>>,
    ) -> Result<()> {
        let own = |fd: BorrowedFd<'_>| {
            fd.try_clone_to_owned().context(|| "duplicate a descriptor for the keepers".to_owned())
        };
        let mut kept = BTreeMap::new();
        for (layer, file) in files {
            kept.insert(layer.0, own(*file)?);
        }
        *lock(&self.held) = Some(Held { group: own(group)?, journal: own(journal)?, files: kept });
        for index in 0..KEEPERS {
            self.seat(index)?;
            let keepers = Arc::clone(self);
            spawn(&format!("keeper-watch-{index}"), move || keepers.watch(index))?;
        }
        Ok(())
    }

    /// Has every keeper hold a file. An error when not even one does.
    pub fn put(&self, layer: &LayerId, file: BorrowedFd<'_>) -> Result<()> {
        let name = || format!("have data of layer {layer} kept");
        let file = file.try_clone_to_owned().context(name)?;
        let sent = file.try_clone().context(name)?;
        if let Some(held) = lock(&self.held).as_mut() {
            held.files.insert(layer.0, file);
        }
        let mut kept = 0;
        let mut last = None;
        for index in 0..KEEPERS {
            match self.exchange_or_seat(index, Request::Put(layer.0), &[sent.as_fd()]) {
                Ok(()) => kept += 1,
                Err(error) => last = Some(error),
            }
        }
        match last {
            Some(error) if kept == 0 => Err(error.context(name())),
            _ => Ok(()),
        }
    }

    /// Has every keeper let go of a file.
    pub fn forget(&self, layer: &LayerId) {
        if let Some(held) = lock(&self.held).as_mut() {
            held.files.remove(&layer.0);
        }
        for index in 0..KEEPERS {
            if let Err(error) = self.exchange_or_seat(index, Request::Forget(layer.0), &[]) {
                tracing::warn!(index, error = %error.chain(), "a keeper did not forget");
            }
        }
    }

    /// Process ids of the keepers that live.
    pub fn pids(&self) -> Vec<u32> {
        self.seats.iter().filter_map(|seat| lock(seat).as_ref().map(|seat| seat.pid)).collect()
    }

    /// Lets the keepers end. Only after the last unmount.
    pub fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
        *lock(&self.held) = None;
        for (index, seat) in self.seats.iter().enumerate() {
            let Some(mut seat) = lock(seat).take() else { continue };
            if let Err(error) = exchange(&seat.connection, Request::Leave, &[]) {
                tracing::warn!(index, error = %error.chain(), "a keeper did not leave");
                continue;
            }
            // Its end is the end of the connection; then nothing of it is left but a child to reap.
            let _ = seat.connection.wait(Some(PATIENCE));
            if let Some(child) = &mut seat.child {
                let _ = child.wait();
            }
            cgroup::remove(&self.data_dir, index);
        }
    }

    /// One exchange; with a keeper that turns out to be dead, a new one is started and handed
    /// everything, this request's file included.
    fn exchange_or_seat(
        &self,
        index: usize,
        request: Request,
        with: &[BorrowedFd<'_>],
    ) -> Result<()> {
        {
            let seat = lock(&self.seats[index]);
            if let Some(seat) = seat.as_ref() {
                match exchange(&seat.connection, request, with) {
                    Ok(_) => return Ok(()),
                    Err(error) => tracing::warn!(index, error = %error.chain(), "a keeper failed"),
                }
            }
        }
        self.seat(index)
    }

    /// Makes sure that a keeper sits here and holds everything.
    fn seat(&self, index: usize) -> Result<()> {
        let held = lock(&self.held);
        let Some(held) = held.as_ref() else { return Ok(()) };
        let mut seat = lock(&self.seats[index]);
        if let Some(living) = seat.as_ref()
            && hand_over(&living.connection, held).is_ok()
        {
            return Ok(());
        }
        if let Some(mut dead) = seat.take()
            && let Some(child) = &mut dead.child
        {
            // It cannot serve any more, whatever it does; without this it would stay a zombie.
            let _ = child.kill();
            let _ = child.wait();
        }
        let fresh = self.find_or_start(index, held)?;
        tracing::info!(index, pid = fresh.pid, "a keeper holds the group");
        *seat = Some(fresh);
        Ok(())
    }

    fn find_or_start(&self, index: usize, held: &Held) -> Result<Seat> {
        // One that lives and is only unknown to us.
        if let Some(mut seat) = self.connect(index)
            && let Ok(pid) = hand_over(&seat.connection, held)
        {
            seat.pid = pid;
            return Ok(seat);
        }
        self.start(index, held)
    }

    fn connect(&self, index: usize) -> Option<Seat> {
        let connection = connect(&self.paths, index).ok()?;
        Some(Seat { connection, pid: 0, child: None })
    }

    fn spawn(&self, index: usize) -> Result<Child> {
        let name = || format!("start keeper {index}");
        let Some((program, arguments)) = self.command.split_first() else {
            return Err(Error::invalid("no command to start a keeper"));
        };
        let log = File::create(self.paths.run.join(format!("keeper-{index}.log"))).context(name)?;
        let child = Command::new(program)
            .arg0("lamella")
            .args(arguments)
            .arg("--data")
            .arg(&self.data_dir)
            .arg("--index")
            .arg(index.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context(name)?;
        Ok(child)
    }

    /// Starts a keeper, in the place of whoever sits there; answers it when it holds everything.
    fn start(&self, index: usize, held: &Held) -> Result<Seat> {
        let mut child = self.spawn(index)?;
        let deadline = Instant::now() + START_PATIENCE;
        loop {
            if let Some(mut seat) = self.connect(index)
                // Another one that answers is being succeeded: to kill the child now could leave nobody.
                && offer(&seat.connection, held).is_ok_and(|pid| pid == child.id())
            {
                seat.pid = hand_over(&seat.connection, held)?;
                seat.child = Some(child);
                return Ok(seat);
            }
            let ended = child.try_wait().context(|| format!("start keeper {index}"))?;
            if ended.is_some() || Instant::now() > deadline {
                let _ = child.kill();
                let _ = child.wait();
                let how = ended.map_or("too slow".to_owned(), |status| status.to_string());
                let text = format!("keeper {index} did not come up: {how}");
                return Err(Error::new(ErrorKind::Unavailable, text));
            }
            std::thread::sleep(START_POLL);
        }
    }

    /// The body of a watcher: waits for the end of a keeper and seats another.
    fn watch(&self, index: usize) {
        while !self.leaving.load(Ordering::Acquire) {
            if let Some(watched) = self.connect(index) {
                // Nothing is ever sent on this connection: readable means closed.
                while !watched.connection.wait(None).unwrap_or(true) {}
            } else {
                std::thread::sleep(START_POLL);
            }
            if self.leaving.load(Ordering::Acquire) {
                return;
            }
            tracing::warn!(index, "a keeper has gone");
            if let Err(error) = self.seat(index) {
                tracing::error!(index, error = %error.chain(), "no keeper");
                std::thread::sleep(RESTART_PAUSE);
            }
        }
    }
}

/// One request and its `Done`; answers the keeper's pid.
pub(super) fn exchange(socket: &Seqpacket, what: Request, with: &[BorrowedFd<'_>]) -> Result<u32> {
    wire::send_request(socket, what, with)?;
    match wire::receive_response(socket)?.0 {
        Response::Done { pid } => Ok(pid),
        other => Err(Error::invalid(format!("keeper answered {other:?}"))),
    }
}

fn offer(socket: &Seqpacket, held: &Held) -> Result<u32> {
    exchange(socket, Request::Offer, &[held.group.as_fd(), held.journal.as_fd()])
}

fn hand_over(socket: &Seqpacket, held: &Held) -> Result<u32> {
    let pid = offer(socket, held)?;
    for (key, file) in &held.files {
        exchange(socket, Request::Put(*key), &[file.as_fd()])?;
    }
    Ok(pid)
}

/// Everything that a keeper holds, and its pid.
pub(super) fn take(socket: &Seqpacket) -> Result<(u32, Option<Inheritance>)> {
    wire::send_request(socket, Request::Take, &[])?;
    let (response, shared) = wire::receive_response(socket)?;
    let Response::Holds { files: count } = response else {
        return Err(Error::invalid(format!("keeper answered {response:?}")));
    };
    let mut files = BTreeMap::new();
    for _ in 0..count {
        let (response, mut descriptors) = wire::receive_response(socket)?;
        match (response, descriptors.pop()) {
            (Response::File(key), Some(file)) => files.insert(LayerId(key), file),
            (other, _) => return Err(Error::invalid(format!("keeper answered {other:?}"))),
        };
    }
    let (Response::Done { pid }, _) = wire::receive_response(socket)? else {
        return Err(Error::invalid("a keeper did not end its list"));
    };
    let mut shared = shared.into_iter();
    let inheritance = match (shared.next(), shared.next()) {
        (Some(group), Some(journal)) => Some(Inheritance { group, journal, files }),
        _ => None,
    };
    Ok((pid, inheritance))
}
