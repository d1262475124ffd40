//! `virtiofs`: a layer's tree for one virtual machine, behind a vhost-user socket.
//!
//! Each socket has a process of its own ([`server::run`]). Whoever speaks to it is a guest's kernel, and
//! a message that it should not have sent ends the process: that must never be fsd, which serves all
//! others. The process reads the layer's exported files, so it needs no way to ask fsd for anything, and
//! gives up its rights before the guest's first message.
//!
//! ```text
//! guest's kernel --vhost-user--> server process --read--> exported data (FUSE) --> fsd
//! ```
//! A server ends with its guest, and the next one waits at the same socket.
//!
//! Locking: one mutex around the table of servers, one around the process of each. Order: table, process.
// CRASH: servers see the end of fsd at their standard input and end too. The next fsd starts new ones at the same
// sockets, by the exports that they held; a guest that was connected has to be connected anew.

pub mod server;
mod tree_files;

use crate::exports::Exports;
use crate::fetch::spawn;
use layer::{Context, Digest, Error, ErrorKind, LayerId, Result};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use sys::process::Reach;

/// The tag that a guest mounts.
pub const TAG: &str = "lamella";
/// How long a new server may take to listen.
const START_PATIENCE: Duration = Duration::from_secs(10);
const START_POLL: Duration = Duration::from_millis(5);
/// Pause before a server that ended is started again.
const RESTART_PAUSE: Duration = Duration::from_millis(100);
const SIGKILL: i32 = 9;

/// The process of one server, as far as it runs.
#[derive(Debug, Default)]
struct Process {
    ended: bool,
    pidfd: Option<OwnedFd>,
}

#[derive(Debug)]
struct Server {
    socket: PathBuf,
    process: Mutex<Process>,
}

/// All servers of the node.
pub struct Servers {
    folder: PathBuf,
    command: Vec<OsString>,
    exports: Arc<Exports>,
    servers: Mutex<BTreeMap<(LayerId, String), Arc<Server>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In front of the name of who holds the export that a server reads.
const EXPORT_HOLDER: &str = "virtiofs:";

/// Who holds the export that a server reads.
fn export_holder(holder: &str) -> String {
    format!("{EXPORT_HOLDER}{holder}")
}

impl Servers {
    /// Sockets are made in `folder`; `command` starts a server, its arguments are appended.
    pub fn new(folder: &Path, command: Vec<OsString>, exports: Arc<Exports>) -> Result<Self> {
        crate::cache::create_folder(folder)?;
        Ok(Self { folder: folder.to_owned(), command, exports, servers: Mutex::default() })
    }

    /// Starts to serve a layer to one machine; answers the socket. Idempotent for a holder.
    pub fn serve(&self, id: &LayerId, holder: &str) -> Result<PathBuf> {
        let mut servers = lock(&self.servers);
        let key = (*id, holder.to_owned());
        if let Some(server) = servers.get(&key) {
            return Ok(server.socket.clone());
        }
        let exported = self.exports.export(id, &export_holder(holder))?;
        let name = Digest::of(format!("{id} {holder}").as_bytes()).short();
        let server = Arc::new(Server {
            socket: self.folder.join(format!("{name}.sock")),
            process: Mutex::default(),
        });
        let started = self.start(&server, &exported.metadata, &exported.data);
        if started.is_err() {
            server.end();
            self.withdraw(id, holder);
        } else {
            servers.insert(key, Arc::clone(&server));
        }
        started.map(|()| server.socket.clone())
    }

    /// Serves again, at the same sockets, where one of these exports was a server's.
    pub fn restore(&self, exported: Vec<(LayerId, String)>) {
        for (id, holder) in exported {
            let Some(holder) = holder.strip_prefix(EXPORT_HOLDER) else { continue };
            match self.serve(&id, holder) {
                Ok(socket) => {
                    tracing::info!(layer = %id, socket = %socket.display(), "served again");
                }
                Err(error) => {
                    tracing::error!(layer = %id, error = %error.chain(), "a server is lost");
                }
            }
        }
    }

    fn start(&self, server: &Arc<Server>, metadata: &Path, data: &Path) -> Result<()> {
        remove_socket(&server.socket)?;
        let mut arguments = self.command.clone();
        for (name, value) in
            [("--socket", &*server.socket), ("--metadata", metadata), ("--layer-data", data)]
        {
            arguments.push(name.into());
            arguments.push(value.into());
        }
        let watched = Arc::clone(server);
        spawn("virtiofs", move || watched.keep_running(&arguments))?;
        let deadline = Instant::now() + START_PATIENCE;
        while !server.socket.exists() {
            if Instant::now() > deadline {
                let text = format!("no server listens at {}", server.socket.display());
                return Err(Error::new(ErrorKind::Timeout, text));
            }
            std::thread::sleep(START_POLL);
        }
        Ok(())
    }

    fn withdraw(&self, id: &LayerId, holder: &str) {
        if let Err(error) = self.exports.withdraw(id, &export_holder(holder)) {
            tracing::error!(layer = %id, error = %error.chain(), "end the export of a server");
        }
    }

    /// Ends a server; its guest gets no answers any more.
    pub fn end(&self, id: &LayerId, holder: &str) -> Result<()> {
        let ended = lock(&self.servers).remove(&(*id, holder.to_owned()));
        let Some(server) = ended else {
            return Err(Error::not_found(format!("layer {id} is not served to {holder:?}")));
        };
        server.end();
        self.withdraw(id, holder);
        remove_socket(&server.socket)
    }

    /// Ends all servers. `Busy` while there is one, unless forced.
    pub fn close(&self, force: bool) -> Result<()> {
        let keys: Vec<_> = lock(&self.servers).keys().cloned().collect();
        if let Some((id, holder)) = keys.first().filter(|_| !force) {
            let text = format!("layer {id} is served to {holder:?}");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        keys.iter().try_for_each(|(id, holder)| self.end(id, holder))
    }
}

impl Server {
    /// Runs one process after the other until the server ends.
    fn keep_running(&self, command: &[OsString]) {
        loop {
            let mut child = {
                let mut process = lock(&self.process);
                if process.ended {
                    return;
                }
                match start_process(command) {
                    Ok((child, pidfd)) => {
                        process.pidfd = Some(pidfd);
                        child
                    }
                    Err(error) => {
                        tracing::error!(error = %error.chain(), "start a virtiofs server");
                        drop(process);
                        std::thread::sleep(RESTART_PAUSE);
                        continue;
                    }
                }
            };
            // Held here, since waiting would close it and so end the process.
            let input = child.stdin.take();
            match child.wait() {
                Ok(status) => {
                    tracing::info!(%status, socket = %self.socket.display(), "a guest has gone");
                }
                Err(error) => tracing::error!(%error, "wait for a virtiofs server"),
            }
            drop(input);
            lock(&self.process).pidfd = None;
            std::thread::sleep(RESTART_PAUSE);
        }
    }

    fn end(&self) {
        let mut process = lock(&self.process);
        process.ended = true;
        if let Some(pidfd) = process.pidfd.take()
            && let Err(error) = sys::process::pidfd_signal(pidfd.as_fd(), SIGKILL, Reach::Process)
        {
            tracing::debug!(%error, "a virtiofs server had ended");
        }
    }
}

/// Its standard input stays open as long as this process lives.
fn start_process(command: &[OsString]) -> Result<(Child, OwnedFd)> {
    let name = || format!("start {command:?}");
    let (program, arguments) =
        command.split_first().ok_or_else(|| Error::invalid("no command for virtiofs servers"))?;
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .context(name)?;
    // Not reaped before it is waited for, so the number is still its own.
    let pidfd = sys::process::pidfd_open(child.id() as i32).context(name)?;
    Ok((child, pidfd))
}

fn remove_socket(socket: &Path) -> Result<()> {
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(format!("remove {}", socket.display()), error))
        }
        _ => Ok(()),
    }
}
