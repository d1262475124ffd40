//! What a store must be able to do, and the places that can do it.
//!
//! A backend holds immutable objects. An object is invisible until it is published, is complete when
//! it is visible, and is never replaced. A backend checks no content: digests are the business of
//! [`crate::Store`].
//!
//! All calls block; every method may be called from any thread at the same time.
//!
//! // CRASH: a writer that dies before `publish` leaves nothing visible; one that dies inside it
//! leaves either nothing or the whole object.

pub mod archive;
pub mod fault;
pub mod memory;
mod open_files;
pub mod posix;
pub mod s3;
pub mod threefs;
pub mod throttle;

use crate::key::Key;
use layer::{Error, Result};
use std::fmt::Debug;
use std::path::PathBuf;

/// Immutable objects under names.
pub trait Backend: Send + Sync + Debug {
    /// Fills `into` from `offset`. An object that ends before that is `Corrupt`, an absent one
    /// `NotFound`.
    fn read_at(&self, key: &Key, offset: u64, into: &mut [u8]) -> Result<()>;

    /// The whole object; one that is larger than `max_bytes` is `Corrupt` and is not read.
    fn read_all(&self, key: &Key, max_bytes: u64) -> Result<Vec<u8>>;

    /// The object's length in bytes.
    fn size(&self, key: &Key) -> Result<u64>;

    /// Starts an object. It has no name until [`Upload::publish`].
    fn create(&self, key: &Key) -> Result<Box<dyn Upload>>;

    /// At most `limit` names that start with `prefix` (empty, or whole components ending in `/`) and
    /// sort after `start_after`, in byte order.
    fn list(&self, prefix: &str, start_after: Option<&str>, limit: usize) -> Result<Vec<String>>;

    /// Removes an object; that it is absent already is success.
    fn delete(&self, key: &Key) -> Result<()>;

    /// The path at which this host's kernel finds the object as a plain file; none where there is no
    /// such path, or where reads must not go around this backend.
    fn local_path(&self, _key: &Key) -> Option<PathBuf> {
        None
    }

    /// Where this is, for people.
    fn describe(&self) -> String;
}

/// An object in the making. Dropping it abandons it: nothing becomes visible.
///
/// A write that failed poisons the upload: what follows fails too, and so does publishing.
pub trait Upload: Send {
    /// Appends bytes.
    fn write(&mut self, bytes: &[u8]) -> Result<()>;

    /// Makes the object durable and then visible, without replacing: `Exists` when the name is taken.
    fn publish(self: Box<Self>) -> Result<()>;
}

pub(crate) fn absent(key: &Key, place: &str) -> Error {
    Error::not_found(format!("no object {key} in {place}"))
}

pub(crate) fn taken(key: &Key, place: &str) -> Error {
    Error::new(layer::ErrorKind::Exists, format!("object {key} exists already in {place}"))
}

pub(crate) fn too_short(key: &Key, offset: u64, wanted: usize) -> Error {
    Error::corrupt(format!("object {key} ends before byte {offset}+{wanted}"))
}

pub(crate) fn too_large(key: &Key, size: u64, max_bytes: u64) -> Error {
    Error::corrupt(format!("object {key} has {size} bytes, more than the {max_bytes} allowed"))
}
