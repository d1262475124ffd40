//! The keeper: a tiny process that outlives fsd and holds what must not be closed.
//!
//! It holds the fanotify group, so that blocked readers stay blocked while no fsd lives; the data
//! files, opened before they were marked; and the shared memory that says what the dead fsd still
//! owed. It knows nothing about any of them, reads no file of a layer, allocates nothing large, and
//! has nothing else to do: the less it does, the less can end it. Two run beside each fsd.
//!
//! A keeper ends only when it is told to: by fsd after the last unmount, or by a keeper that was started in
//! its place and holds everything. With its group it could be used to answer for fsd, so its
//! socket takes root only, and nothing that a sandbox can see ever holds a descriptor of it.
//!
//! Locking: one thread. What survives a crash: nothing of it; fsd starts another and hands it
//! everything.

mod cgroup;
mod seats;
mod succession;
pub(crate) mod wire;

pub use cgroup::{groups_of, remove_empty as remove_empty_groups};
pub(crate) use seats::{Inheritance, Keepers, held_files};

use crate::config::Paths;
use layer::{Context, Error, Result};
use rustix::event::{PollFd, PollFlags};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;
use succession::Seated;
use sys::socket::{Seqpacket, SeqpacketListener};
use wire::{Key, Request, Response};

/// Connections at once: fsd has two, its successor two more.
const MAX_CONNECTIONS: usize = 16;
/// How long fsd may take to read an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Settings of one keeper process.
#[derive(Debug, Clone)]
pub struct KeeperConfig {
    /// The node's data directory.
    pub data_dir: PathBuf,
    /// Which of the keepers this is, from 0.
    pub index: usize,
}

/// Everything that is kept.
#[derive(Debug, Default)]
struct Holdings {
    /// The group, then the journal.
    shared: Vec<OwnedFd>,
    files: BTreeMap<Key, OwnedFd>,
}

/// Runs until the keeper is let go. Where one sits already it is succeeded. Blocks; needs no runtime.
pub fn run(config: &KeeperConfig) -> Result<()> {
    let paths = Paths::new(&config.data_dir)?;
    let socket = paths.keeper_socket(config.index);
    let Seated { heir, lock: _lock, holdings } = succession::sit_down(&paths, config.index)?;
    settle_down(config);
    remove_socket(&socket)?;
    let listener =
        SeqpacketListener::bind(&socket).context(|| format!("listen on {}", socket.display()))?;
    drop(heir);
    let ended = serve(&listener, holdings);
    remove_socket(&socket)?;
    cgroup::leave(&config.data_dir, config.index);
    ended
}

/// Out of reach of what ends others: own session, own groups, no folder kept busy. Each is tried; a
/// host that allows less is no reason not to keep.
fn settle_down(config: &KeeperConfig) {
    if let Err(error) = sys::process::new_session() {
        tracing::debug!(%error, "own session");
    }
    if let Err(error) = std::env::set_current_dir("/") {
        tracing::debug!(%error, "leave the working directory");
    }
    cgroup::enter(&config.data_dir, config.index);
    // Only with CAP_SYS_RESOURCE.
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-1000") {
        tracing::debug!(%error, "lower the OOM score");
    }
    if let Err(error) = crate::raise_descriptor_limit() {
        tracing::debug!(error = %error.chain(), "raise the descriptor limit");
    }
    crate::let_go_of_program();
}

fn remove_socket(socket: &Path) -> Result<()> {
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(format!("remove {}", socket.display()), error))
        }
        _ => Ok(()),
    }
}

fn serve(listener: &SeqpacketListener, mut holdings: Holdings) -> Result<()> {
    let mut connections: Vec<Seqpacket> = Vec::new();
    loop {
        let (accept, ready) = wait(listener, &connections)?;
        let mut gone = Vec::new();
        for index in ready {
            match answer(&connections[index], &mut holdings) {
                Ok(Next::Stay) => {}
                Ok(Next::Leave) => return Ok(()),
                Ok(Next::Hangup) => gone.push(index),
                Err(error) => {
                    tracing::debug!(error = %error.chain(), "a connection failed");
                    gone.push(index);
                }
            }
        }
        for index in gone.into_iter().rev() {
            drop(connections.remove(index));
        }
        if accept && let Some(connection) = accept_root(listener) {
            if connections.len() == MAX_CONNECTIONS {
                drop(connections.remove(0));
            }
            connections.push(connection);
        }
    }
}

/// Whether somebody wants to connect, and which connections have something to say.
fn wait(listener: &SeqpacketListener, connections: &[Seqpacket]) -> Result<(bool, Vec<usize>)> {
    let fds: Vec<_> =
        std::iter::once(listener.as_fd()).chain(connections.iter().map(AsFd::as_fd)).collect();
    let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    loop {
        match rustix::event::poll(&mut polled, None) {
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::io("wait for fsd", error.into())),
        }
    }
    let ready = polled.iter().skip(1).enumerate();
    let ready = ready.filter(|(_, fd)| !fd.revents().is_empty()).map(|(index, _)| index).collect();
    Ok((!polled[0].revents().is_empty(), ready))
}

fn accept_root(listener: &SeqpacketListener) -> Option<Seqpacket> {
    let connection = listener.accept().ok()?;
    let peer = connection.peer().ok()?;
    let own = rustix::process::geteuid().as_raw();
    if peer.uid != 0 && peer.uid != own {
        tracing::warn!(?peer, "refused a connection of another user");
        return None;
    }
    connection.set_timeout(Some(PATIENCE)).ok()?;
    Some(connection)
}

enum Next {
    Stay,
    Hangup,
    Leave,
}

fn answer(connection: &Seqpacket, holdings: &mut Holdings) -> Result<Next> {
    let Some((request, mut descriptors)) = wire::receive_request(connection)? else {
        return Ok(Next::Hangup);
    };
    let done = Response::Done { pid: std::process::id() };
    match request {
        Request::Offer if descriptors.len() == 2 => {
            holdings.shared = descriptors;
        }
        Request::Put(key) if descriptors.len() == 1 => {
            holdings.files.extend(descriptors.pop().map(|file| (key, file)));
        }
        Request::Forget(key) if descriptors.is_empty() => {
            holdings.files.remove(&key);
        }
        Request::Take if descriptors.is_empty() => {
            let shared: Vec<_> = holdings.shared.iter().map(AsFd::as_fd).collect();
            let files = holdings.files.len() as u32;
            wire::send_response(connection, Response::Holds { files }, &shared)?;
            for (key, file) in &holdings.files {
                wire::send_response(connection, Response::File(*key), &[file.as_fd()])?;
            }
        }
        Request::Leave => {
            wire::send_response(connection, done, &[])?;
            return Ok(Next::Leave);
        }
        _ => return Err(Error::invalid("keeper request with the wrong descriptors")),
    }
    wire::send_response(connection, done, &[])?;
    Ok(Next::Stay)
}
