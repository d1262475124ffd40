//! The interface of containerd as Rust types: messages, the server of Snapshots, clients of what an image is
//! made known with.

#![allow(missing_docs, unreachable_pub, rust_2018_idioms, clippy::all, clippy::pedantic)]

include!(concat!(env!("OUT_DIR"), "/containerd.rs"));

pub use containerd::services::{content, images, leases, snapshots};
pub use containerd::types::{Descriptor, Mount};
