//! `erofs-fanotify`: EROFS reads its data from a sparse file of the node cache; before the kernel
//! reads a part of it, an event asks us to fill that part.
//!
//! Order of a mount: quiet descriptor open -> keepers hold it -> mark -> mount. Order of the end: last
//! superblock gone -> mark dropped -> keepers forget. A complete and durable layer needs no mark.
//!
//! Locking: none here; attach and detach of one layer are serialised by their caller.
// INVARIANT: the mark is set before the mount, because the kernel decides at open whether a file asks.
// INVARIANT: a marked file has a quiet descriptor with the keepers, so any successor can fill it.

pub mod events;
mod turn;

use super::{Plane, PlaneKind, mounting};
use crate::keeper::Keepers;
use crate::served::{Registry, ServedLayer};
use layer::{Context, Result};
use std::path::Path;
use std::sync::Arc;
use sys::fanotify::Group;

/// The plane.
#[derive(Debug)]
pub struct ErofsFanotify {
    group: Group,
    keepers: Arc<Keepers>,
    registry: Arc<Registry>,
}

impl ErofsFanotify {
    /// Serves events of `group`, which the keepers hold too.
    pub fn new(group: Group, keepers: Arc<Keepers>, registry: Arc<Registry>) -> Self {
        Self { group, keepers, registry }
    }

    fn arm(&self, layer: &Arc<ServedLayer>) -> Result<()> {
        let cached = layer.fetch().cached();
        self.keepers.put(&cached.id(), cached.quiet_data())?;
        self.registry.insert(layer);
        self.group
            .mark(cached.quiet_data())
            .context(|| format!("mark {}", cached.data_path().display()))?;
        layer.set_marked(true);
        Ok(())
    }

    fn disarm(&self, layer: &Arc<ServedLayer>) -> Result<()> {
        let cached = layer.fetch().cached();
        if layer.is_marked() {
            match self.group.unmark(cached.quiet_data()) {
                // A former fsd died between setting or dropping the mark and telling the keepers.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                other => {
                    other.context(|| format!("unmark {}", cached.data_path().display()))?;
                }
            }
            layer.set_marked(false);
        }
        self.keepers.forget(&cached.id());
        Ok(())
    }
}

impl Plane for ErofsFanotify {
    fn kind(&self) -> PlaneKind {
        PlaneKind::ErofsFanotify
    }

    fn prepare(&self, layer: &Arc<ServedLayer>) -> Result<bool> {
        if layer.is_marked() || !layer.needs_events() {
            return Ok(false);
        }
        if let Err(error) = self.arm(layer) {
            self.release(layer)?;
            return Err(error);
        }
        Ok(true)
    }

    fn mount(&self, layer: &Arc<ServedLayer>, at: &Path) -> Result<()> {
        let cached = layer.fetch().cached();
        mounting::mount_erofs(&cached.metadata_path(), &cached.data_path(), at)
    }

    fn survives(&self, _layer: &Arc<ServedLayer>) -> bool {
        true
    }

    fn release(&self, layer: &Arc<ServedLayer>) -> Result<()> {
        self.disarm(layer)?;
        self.registry.remove(layer.fetch().cached().key());
        Ok(())
    }

    fn completed(&self, layer: &Arc<ServedLayer>) -> Result<()> {
        // The registry keeps it: events that wait already still name it.
        if layer.is_marked() { self.disarm(layer) } else { Ok(()) }
    }

    fn close(&self) -> Result<()> {
        // INVARIANT: nothing is mounted any more, so nobody can read zeros through a closed group.
        self.keepers.leave();
        Ok(())
    }
}
