//! The pure formats of Lamella: bytes in, values out; no I/O, no threads, no unsafe code.
//!
//! The normative description of everything that is stored is `docs/format.md`.
#![forbid(unsafe_code)]

pub mod error;
pub mod id;

pub use error::{Context, Error, ErrorKind, Result};
pub use id::{ChunkDigest, Digest, EnvId, LayerId, PackId};
