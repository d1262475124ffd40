//! The pure formats of Lamella: bytes in, values out; no I/O, no threads, no unsafe code.
//!
//! The normative description of everything that is stored is `docs/format.md`.
#![forbid(unsafe_code)]

pub mod chunk;
pub mod environment;
pub mod erofs;
pub mod error;
pub mod frames;
pub mod id;
mod input;
mod json;
pub mod layer_file;
pub mod location;
pub mod manifest;
pub mod pack;
pub mod presence;
pub mod profile;
pub mod reference;
pub mod signature;
pub mod tree;
mod words;

pub use error::{Context, Error, ErrorKind, Result};
pub use id::{ChunkDigest, Digest, EnvId, KeyId, LayerId, PackId, SignatureBytes};
