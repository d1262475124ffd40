//! `fuse`: the layer's tree itself, answered by us over FUSE. For kernels without file-backed EROFS, and
//! for users without root in a user namespace of their own.
//!
//! Names, inodes and listings come from the layer's EROFS image in our memory, with the inode numbers
//! that the kernel's EROFS shows; content comes through the fetch engine. A layer never changes, so the
//! kernel may keep every answer for ever: what was read once costs nobody a request.
//!
//! Each mount is a connection with threads of its own.
//!
//! Locking: one mutex around the table of connections, held for look-ups.
//! What survives a crash: nothing; reads fail with ENOTCONN (closed, never zeros), and the next start
//! unmounts what is left.

pub mod attributes;
mod events;

use super::tree::LayerTree;
use super::{Plane, PlaneKind};
use crate::fetch::{self, Engine};
use crate::served::ServedLayer;
use events::TreeFiles;
use fuser::{Session, SessionACL};
use layer::{Context, LayerId, Result};
use rustix::event::{PollFd, PollFlags};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use sys::mount::Attributes;

/// Threads that take requests of one mount; a miss does not occupy one while it is fetched.
const THREADS: usize = 2;

/// The plane.
#[derive(Debug)]
pub struct Fuse {
    engine: Engine,
    connections: Mutex<HashMap<LayerId, Vec<Arc<Connection>>>>,
}

impl Fuse {
    /// Nothing is mounted yet.
    pub fn new(engine: Engine) -> Self {
        Self { engine, connections: Mutex::default() }
    }

    fn connections(&self) -> MutexGuard<'_, HashMap<LayerId, Vec<Arc<Connection>>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a detached mount that is answered from now on.
    fn connect(&self, layer: &Arc<ServedLayer>) -> Result<(sys::mount::MountFd, Arc<Connection>)> {
        let tree = LayerTree::read(&layer.fetch().cached().metadata_path())?;
        let name = || {
            "mount FUSE, which takes root: of the host, or of a user namespace with a mount namespace"
                .to_owned()
        };
        let (mount, device) =
            sys::mount::Fuse { name: "lamella" }.mount_detached(Attributes::LAYER).context(name)?;
        let connection = Arc::new(Connection::of(&device)?);
        let mut config = fuser::Config::default();
        config.n_threads = Some(THREADS);
        config.clone_fd = true;
        let files = TreeFiles::new(Arc::clone(layer), tree, self.engine.clone());
        let session = Session::from_fd(files, device, SessionACL::All, config)
            .context(|| "greet FUSE".to_owned())?;
        let (served, id) = (Arc::clone(&connection), layer.id());
        fetch::spawn("fuse", move || {
            if let Err(error) = session.run() {
                tracing::error!(%error, layer = %id, "a FUSE mount is lost");
            }
            served.end();
        })?;
        Ok((mount, connection))
    }
}

/// One mount's connection to the kernel, beside the session that answers it.
#[derive(Debug)]
struct Connection {
    /// Absent once the session has ended: a descriptor of ours would keep readers waiting for nobody.
    device: Mutex<Option<OwnedFd>>,
}

impl Connection {
    fn of(device: &OwnedFd) -> Result<Self> {
        let device = device.try_clone().context(|| "copy a descriptor of FUSE".to_owned())?;
        Ok(Self { device: Mutex::new(Some(device)) })
    }

    fn end(&self) {
        self.device.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Whether the superblock exists: the kernel reports an error once it is gone.
    fn is_alive(&self) -> Result<bool> {
        let device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(device) = device.as_ref() else { return Ok(false) };
        let mut asked = [PollFd::new(device, PollFlags::empty())];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut asked, Some(&now))
            .map_err(std::io::Error::from)
            .context(|| "ask whether a FUSE mount lives".to_owned())?;
        Ok(!asked[0].revents().contains(PollFlags::ERR))
    }
}

impl Plane for Fuse {
    fn kind(&self) -> PlaneKind {
        PlaneKind::Fuse
    }

    fn mount(&self, layer: &Arc<ServedLayer>, at: &Path) -> Result<()> {
        let (mount, connection) = self.connect(layer)?;
        // Without an attach the mount ends here, and with it its session.
        mount.attach(at).context(|| format!("attach FUSE at {}", at.display()))?;
        self.connections().entry(layer.id()).or_default().push(connection);
        Ok(())
    }

    fn survives(&self, _layer: &Arc<ServedLayer>) -> bool {
        false
    }

    fn lingers(&self, layer: &Arc<ServedLayer>) -> Result<bool> {
        for connection in self.connections().get(&layer.id()).into_iter().flatten() {
            if connection.is_alive()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn answers_reads(&self, _layer: &Arc<ServedLayer>) -> bool {
        true
    }

    fn release(&self, layer: &Arc<ServedLayer>) -> Result<()> {
        self.connections().remove(&layer.id());
        Ok(())
    }

    fn completed(&self, _layer: &Arc<ServedLayer>) -> Result<()> {
        Ok(())
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }
}
