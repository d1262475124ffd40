//! Container images in: OCI layouts and archives, what `docker save` writes, and registries; and what is
//! kept of them so that they can go out again as they came.
//!
//! - [`name`], [`registry`], [`auth`], [`credentials`]: images in a registry;
//! - [`layout`]: images in files;
//! - [`document`]: indexes, manifests and configurations, and the choice among several;
//! - [`assemble`]: the layers of an image become indexes, one for each or one for all; [`ahead`] brings them;
//! - [`originals`]: what is kept beside the layers; [`framing`] of their tars, [`stream`] of their compression.
//!
//! All of it is written by strangers: digests and sizes are compared before anything is believed, documents,
//! depths and counts are bounded.

mod ahead;
mod assemble;
mod auth;
mod credentials;
mod document;
pub(crate) mod framing;
mod layout;
mod name;
pub(crate) mod originals;
mod pull;
mod registry;
pub(crate) mod stream;

pub(crate) use assemble::DIFF_ID;
pub(crate) use document::run_config;
pub use document::{Platform, Referrer};
pub(crate) use layout::load;
pub use name::ImageName;
pub(crate) use name::PREFIX;
pub use originals::Documents;
pub(crate) use originals::Original;
pub(crate) use pull::pull;
pub use pull::referrers;
pub use registry::RegistryOptions;

use crate::source::blob::Hashing;
use layer::{Error, ErrorKind, Result};
use serde::Deserialize;

/// The most bytes of a document of an image.
const MAX_DOCUMENT_BYTES: u64 = 16 << 20;

/// Refuses what is no `sha256:` or `sha512:` digest in lower case: digests become paths and addresses.
pub(crate) fn check_digest(digest: &str) -> Result<()> {
    let hex_digits = |hex: &str, count: usize| {
        hex.len() == count
            && hex.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    };
    match digest.split_once(':') {
        Some(("sha256", hex)) if hex_digits(hex, 64) => Ok(()),
        Some(("sha512", hex)) if hex_digits(hex, 128) => Ok(()),
        _ => Err(Error::invalid(format!("{digest:?} is no sha256 or sha512 digest"))),
    }
}

/// Compares bytes with their digest.
fn verify(bytes: &[u8], digest: &str) -> Result<()> {
    Hashing::new(bytes, digest)?.finish(digest)
}

/// Compares a length with the one that a descriptor states.
fn check_size(name: &str, stated: u64, found: u64) -> Result<()> {
    if stated == found {
        return Ok(());
    }
    let text = format!("{name} has {found} bytes, its descriptor says {stated}");
    Err(Error::corrupt(text))
}

/// Reads a document of JSON; `name` is for messages.
fn parse<T: for<'de> Deserialize<'de>>(bytes: &[u8], name: &str) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| {
        Error::new(ErrorKind::Corrupt, format!("{name} is malformed")).with_source(error)
    })
}
