//! Sandboxes of one node: life cycle, backends, exec, files, pack_diff.
//!
//! ```text
//! request -> spec (validated) -> plan (pure) -> sandbox (state machine, journal)
//!                                                  |
//!                     compose (overlay)   backends/container -> zygote -> init, commands
//! ```
//! What it does not do: it stores no layer (imaged) and serves none (fsd); it calls both.
//!
//! CRASH: sandboxes outlive this process. The journal of each says what it was; the next start adopts
//! the living ones and clears what the dead ones left.
#![forbid(unsafe_code)]

mod adopt;
mod apparmor;
mod backends;
mod compose;
mod disk;
mod events;
mod exec;
mod files;
mod fncall;
mod fork;
mod ids;
mod journal;
mod layers;
mod lifetimes;
mod many;
mod meters;
mod network;
mod node;
mod pack;
mod plan;
mod pool;
mod protect;
mod reclaim;
mod record;
mod room;
mod sandbox;
mod service;
mod spec;
mod stream;
mod usage;
mod zygote;

pub use backends::container::UserNamespaces;
pub use events::{
    Event, FOLDER as EVENTS_FOLDER, Filter as EventFilter, Reader as EventReader,
    Rotation as EventRotation,
};
pub use node::{Names, RuntimeConfig};
pub use pack::LayerFiles;
pub use service::Service;
