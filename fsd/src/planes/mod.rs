//! Planes: the ways of giving a layer to this node's kernel.
//!
//! Every plane is a folder of the same shape: `mod.rs` holds the type that mounts and releases,
//! `events.rs` answers what the kernel asks. Fetching, caching and counting are not theirs.

pub mod direct;
pub mod erofs_fanotify;
pub mod erofs_fscache;
pub mod erofs_fuse;
pub mod fuse;
pub mod gather;
pub mod mounting;
pub mod tree;
pub mod virtiofs;

mod kind;
pub mod offers;

pub use kind::PlaneKind;

use crate::served::ServedLayer;
use layer::Result;
use std::path::Path;
use std::sync::Arc;

/// One way of giving a layer to the kernel.
pub trait Plane: Send + Sync {
    /// Which one.
    fn kind(&self) -> PlaneKind;

    /// Does what a mount needs and others need not wait for: mounts are made one at a time. Answers whether
    /// a mount that fails has to be followed by a release.
    fn prepare(&self, _layer: &Arc<ServedLayer>) -> Result<bool> {
        Ok(false)
    }

    /// Mounts the prepared layer at an existing folder. A layer that this plane serves already (its former
    /// mount lingers) is mounted once more.
    fn mount(&self, layer: &Arc<ServedLayer>, at: &Path) -> Result<()>;

    /// Whether a later fsd can serve what is mounted now. Where not, readers get errors meanwhile.
    fn survives(&self, layer: &Arc<ServedLayer>) -> bool;

    /// Whether what is mounted reads right without any fsd, also before the layer is complete here.
    fn stands_alone(&self) -> bool {
        false
    }

    /// Whether every read of the layer's data file is answered by fsd, through `reads`, so that parts of
    /// the file may be evicted while it is mounted. Not where the kernel reads the file by itself.
    fn answers_reads(&self, _layer: &Arc<ServedLayer>) -> bool {
        false
    }

    /// Whether a superblock of the layer exists, mounted, cloned elsewhere or lazily unmounted.
    fn lingers(&self, layer: &Arc<ServedLayer>) -> Result<bool> {
        mounting::has_superblock(&layer.fetch().cached().metadata_path())
    }

    /// Stops serving: no superblock of the layer exists any more.
    fn release(&self, layer: &Arc<ServedLayer>) -> Result<()>;

    /// The layer is complete and durable: from now on reads need nobody.
    fn completed(&self, layer: &Arc<ServedLayer>) -> Result<()>;

    /// Ends the plane, after the last release.
    fn close(&self) -> Result<()>;
}
