//! The process behind one vhost-user socket: takes one guest, and ends with it.
//!
//! Everything is opened before the guest is let in; then the process has no right beyond those of its
//! user. The virtiofs library ends the process on messages it cannot read, which is what we want of it
//! here.
//!
//! Locking: the library's. What survives a crash: nothing, there is nothing.

use super::TAG;
use super::tree_files::TreeFiles;
use crate::planes::tree::LayerTree;
use layer::{Context, Error, ErrorKind, Result};
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use sys::capability::CapabilitySet;
use vhost::vhost_user::{Error as VhostUserError, Listener};
use vhost_user_backend::{Error as BackendError, VhostUserDaemon};
use virtiofsd::vhost_user::VhostUserFsBackendBuilder;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

/// Threads that answer a guest. A read whose bytes are not here occupies one while they are fetched.
const THREADS: usize = 8;

/// Settings of one server process.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// The vhost-user socket, made by this process.
    pub socket: PathBuf,
    /// The layer's metadata image.
    pub metadata: PathBuf,
    /// The layer's exported data.
    pub data: PathBuf,
}

fn failed(doing: &str, error: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Internal, format!("{doing}: {error}"))
}

/// Serves one guest until it goes or fsd does. Blocks.
pub fn run(config: &ServerConfig) -> Result<()> {
    let tree = LayerTree::read(&config.metadata)?;
    let path = &config.data;
    let data = File::open(path).context(|| format!("open {}", path.display()))?;
    // Before there is a second thread, since rights are a thread's.
    give_up_rights()?;
    let files = TreeFiles::new(tree, data);
    let backend = VhostUserFsBackendBuilder::default()
        .set_thread_pool_size(THREADS)
        .set_tag(Some(TAG.to_owned()))
        .build(files)
        .map_err(|error| failed("make a virtiofs device", error))?;
    let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
    let mut daemon = VhostUserDaemon::new("lamella-virtiofs".to_owned(), Arc::new(backend), memory)
        .map_err(|error| failed("make a vhost-user daemon", error))?;
    let mut listener =
        Listener::new(&config.socket, true).map_err(|error| failed("listen for a guest", error))?;
    end_with_fsd()?;
    daemon.start(&mut listener).map_err(|error| failed("take a guest", error))?;
    match daemon.wait() {
        Ok(()) | Err(BackendError::HandleRequest(VhostUserError::Disconnected)) => Ok(()),
        Err(error) => Err(failed("serve a guest", error)),
    }
}

fn give_up_rights() -> Result<()> {
    let name = || "give up rights".to_owned();
    sys::process::set_undumpable().context(name)?;
    sys::process::set_no_new_privileges().context(name)?;
    sys::capability::limit_bounding_set(CapabilitySet::NONE).context(name)?;
    sys::capability::set(CapabilitySet::NONE).context(name)
}

/// fsd holds the other end of our standard input, and never writes.
fn end_with_fsd() -> Result<()> {
    crate::fetch::spawn("end-with-fsd", || {
        // Zero bytes or an error, either of which is the end.
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    })
}
