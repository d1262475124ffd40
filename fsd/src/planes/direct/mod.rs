//! `direct`: EROFS reads its data from the layer's plain data space on a mounted store. No daemon takes
//! part in a read: what is mounted goes on when fsd dies, and the store's own client is what answers.
//!
//! The plane is opt-in by layer: somebody made `spaces/<layer id>` with `lamella materialise`. Its length
//! is compared at every mount. Its bytes are verified when it is made and by `fsck --data`, not by a read;
//! that they do not change meanwhile is the store's promise. There are no events, hence no `events.rs`.
//!
//! Locking: none; attach and detach of one layer are serialised by their caller.
//! What survives a crash: the mount, with everything that it reads.

use super::{Plane, PlaneKind, mounting};
use crate::served::ServedLayer;
use layer::{Context, Error, ErrorKind, LayerId, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use store::Store;

/// The plane.
#[derive(Debug)]
pub struct Direct {
    store: Arc<Store>,
}

impl Direct {
    /// Mounts what lies on this store.
    pub fn new(store: Arc<Store>) -> Self {
        Self { store }
    }

    /// The file with the data space, of the right length.
    fn data(&self, id: &LayerId, bytes: u64) -> Result<PathBuf> {
        let space = self.store.space(id)?.ok_or_else(|| {
            let text = format!(
                "layer {id} has no plain data space on the store; `lamella materialise` makes one"
            );
            Error::not_found(text)
        })?;
        if space.bytes != bytes {
            return Err(Error::corrupt(store::wrong_length(id, space.bytes, bytes)));
        }
        space.path.ok_or_else(|| {
            let place = self.store.backend().describe();
            let text = format!("{place} is no mounted directory that the kernel could read");
            Error::new(ErrorKind::Unsupported, text)
        })
    }
}

impl Plane for Direct {
    fn kind(&self) -> PlaneKind {
        PlaneKind::Direct
    }

    fn mount(&self, layer: &Arc<ServedLayer>, at: &Path) -> Result<()> {
        let cached = layer.fetch().cached();
        let data = self.data(&layer.id(), cached.table().data_bytes())?;
        mounting::mount_erofs(&cached.metadata_path(), &data, at)
            .context(|| format!("with the data in {}", data.display()))
    }

    fn survives(&self, _layer: &Arc<ServedLayer>) -> bool {
        true
    }

    fn answers_reads(&self, _layer: &Arc<ServedLayer>) -> bool {
        // Nobody reads the data file in the cache.
        true
    }

    fn stands_alone(&self) -> bool {
        true
    }

    fn release(&self, _layer: &Arc<ServedLayer>) -> Result<()> {
        Ok(())
    }

    fn completed(&self, _layer: &Arc<ServedLayer>) -> Result<()> {
        Ok(())
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }
}
