//! Lazily loaded layers as snapshots of containerd: a remote snapshotter.
//!
//! containerd asks for snapshots, one for each layer of an image, each on the one below it. Where a layer is
//! known here, its snapshot is there at once, and containerd neither fetches nor unpacks anything: the snapshot
//! *shows* what the node's file-system daemon mounts. Other layers are unpacked into directories here, as
//! containerd's own overlayfs snapshotter has it, and so is what containers write. Both mix in one stack.
//!
//! - [`service`]: the interface; [`state`]: what there is, [`record`] and [`folders`]: how it lies on disk;
//! - [`layers`]: attaching and detaching; [`chains`]: which layer containerd means;
//! - [`mounts`], [`filter`], [`labels`]: small pure parts;
//! - [`api`]: the messages; [`register`]: makes an environment an image of containerd.
#![forbid(unsafe_code)]

pub mod api;
mod chains;
mod filter;
mod folders;
mod labels;
mod layers;
mod mounts;
mod record;
pub mod register;
mod service;
mod state;

pub use labels::{chain_id, pointer, sha256};
pub use layers::HOLDER_PREFIX;
pub use service::{Config, Service};
