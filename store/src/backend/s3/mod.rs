//! A store in a bucket of an S3 server.
//!
//! Objects are published by conditional requests (`If-None-Match: *` on the put, or on what completes a
//! multipart upload), so of many writers of one name one wins, and no object is replaced. Reads are ranged;
//! a long one is several ranges at once. Requests are tried again with growing pauses, each has a deadline.
//!
//! A server that ignores the condition would lose moves of references without a word, so [`S3::open`] asks:
//! it puts a marker that is there already and expects to be refused. A writer without the right to put is
//! taken for a reader.
//!
//! Credentials are where Amazon's tools look for them (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, ...).
//!
//! Locking: none here. // CRASH: see [`upload`].

mod address;
mod bridge;
mod conditional;
mod failure;
mod upload;

pub use address::Address;

use self::failure::failed;
use self::upload::S3Upload;
use super::{Backend, Upload, absent, taken, too_large, too_short};
use crate::key::{Key, check_prefix};
use layer::{Context, Error, ErrorKind, Result};
use object_store::ObjectStoreExt;
use object_store::aws::AmazonS3;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A longer read is several ranges of this size.
const RANGE_BYTES: usize = 8 << 20;
/// Ranges asked for at once.
const RANGES_AT_ONCE: usize = 4;
/// The most names that S3 gives in one answer.
const PAGE: usize = 1000;
/// The marker against which conditional puts are tried. No key can name it: keys do not start with a dot.
const MARKER: &str = ".conditional-puts";

/// Objects in a bucket, below a prefix.
#[derive(Clone)]
pub struct S3(Arc<Bucket>);

struct Bucket {
    client: AmazonS3,
    prefix: String,
    place: String,
}

impl Bucket {
    fn path(&self, key: &Key) -> Result<Path> {
        self.path_of(key.as_str())
    }

    fn path_of(&self, name: &str) -> Result<Path> {
        Path::parse(format!("{}{name}", self.prefix))
            .map_err(|error| Error::invalid(format!("object name {name:?}")).with_source(error))
    }
}

impl fmt::Debug for S3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "S3({})", self.0.place)
    }
}

fn taken_in(bucket: &Bucket, key: &Key) -> Error {
    taken(key, &bucket.place)
}

impl S3 {
    /// Opens the place and checks that the server refuses to replace. The bucket must exist.
    pub fn open(address: &Address) -> Result<Self> {
        let (client, place) = (address.client()?, address.place());
        let store = Self(Arc::new(Bucket { client, prefix: address.prefix.clone(), place }));
        store.check_conditions().context(|| format!("open store {}", store.0.place))?;
        Ok(store)
    }

    /// `Unsupported` for a server that replaces where it must not.
    fn check_conditions(&self) -> Result<()> {
        match self.put_marker(false) {
            // The marker was there, and stays.
            Err(error) if error.kind() == ErrorKind::Exists => return Ok(()),
            Err(error) if error.kind() == ErrorKind::Denied => {
                tracing::info!("{}: only reading: {}", self.0.place, error.chain());
                return Ok(());
            }
            made => made?,
        }
        for in_parts in [false, true] {
            match self.put_marker(in_parts) {
                Err(error) if error.kind() == ErrorKind::Exists => {}
                Err(error) => return Err(error),
                Ok(()) => {
                    self.remove(self.0.path_of(MARKER)?, "marker".to_owned())?;
                    let how = if in_parts { "CompleteMultipartUpload" } else { "PutObject" };
                    return Err(Error::new(
                        ErrorKind::Unsupported,
                        format!(
                            "the server ignores `If-None-Match: *` in {how}: two writers could both win; it needs conditional writes"
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    fn put_marker(&self, in_parts: bool) -> Result<()> {
        let marker = Key::reserved(MARKER);
        let mut upload = S3Upload::new(self.0.clone(), &marker)?;
        if in_parts {
            upload = upload.in_parts()?;
        }
        upload.write(b"conditional puts work here\n")?;
        Box::new(upload).publish()
    }

    fn what(&self, doing: &str, key: &Key) -> String {
        format!("{doing} object {key} in {}", self.0.place)
    }

    /// The object's length, and its content when it has no more than `max_bytes`.
    fn get(&self, key: &Key, max_bytes: u64) -> Result<(u64, Option<Vec<u8>>)> {
        let (bucket, path) = (self.0.clone(), self.0.path(key)?);
        let (key, what) = (key.clone(), self.what("read", key));
        bridge::run(async move {
            let failure = |error| match error {
                object_store::Error::NotFound { .. } => absent(&key, &bucket.place),
                error => failed(what.clone(), &error),
            };
            let found = bucket.client.get(&path).await.map_err(failure)?;
            let size = found.meta.size;
            if size > max_bytes {
                return Ok((size, None));
            }
            let bytes = found.bytes().await.map_err(failure)?;
            Ok((size, Some(bytes.into())))
        })
    }

    fn get_ranges(&self, key: &Key, ranges: Vec<Range<u64>>, into: &mut [u8]) -> Result<()> {
        let mut rest = into;
        let mut flying = std::collections::VecDeque::new();
        let mut ranges = ranges.into_iter();
        loop {
            while flying.len() < RANGES_AT_ONCE
                && let Some(range) = ranges.next()
            {
                let (bucket, path) = (self.0.clone(), self.0.path(key)?);
                let asked = range.clone();
                let get = async move { bucket.client.get_range(&path, asked).await };
                flying.push_back((range, bridge::start(get)?));
            }
            let Some((range, pending)) = flying.pop_front() else { return Ok(()) };
            let length = (range.end - range.start) as usize;
            let bytes = pending.wait()?.map_err(|error| self.read_failure(key, &range, error))?;
            if bytes.len() != length {
                return Err(too_short(key, range.start, length));
            }
            let (now, later) = rest.split_at_mut(length);
            now.copy_from_slice(&bytes);
            rest = later;
        }
    }

    /// A range past the object's end is refused in many words; its length tells.
    fn read_failure(&self, key: &Key, range: &Range<u64>, error: object_store::Error) -> Error {
        let error = match error {
            object_store::Error::NotFound { .. } => return absent(key, &self.0.place),
            error => failed(self.what("read", key), &error),
        };
        match self.size(key) {
            Ok(size) if size < range.end => {
                too_short(key, range.start, (range.end - range.start) as usize).with_source(error)
            }
            _ => error,
        }
    }

    fn remove(&self, path: Path, what: String) -> Result<()> {
        let bucket = self.0.clone();
        bridge::run(async move {
            match bucket.client.delete(&path).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(failed(what, &error)),
            }
        })
    }

    /// One answer of the server: names below our prefix, and where the next answer begins.
    fn list_page(
        &self,
        prefix: &str,
        start_after: Option<&str>,
        limit: usize,
        page_token: Option<String>,
    ) -> Result<(Vec<String>, Option<String>)> {
        let bucket = self.0.clone();
        let whole = format!("{}{prefix}", bucket.prefix);
        let options = PaginatedListOptions {
            offset: start_after.map(|after| format!("{}{after}", bucket.prefix)),
            max_keys: Some(limit.min(PAGE)),
            page_token,
            ..Default::default()
        };
        let what = format!("list {prefix:?} in {}", bucket.place);
        bridge::run(async move {
            let asked = Some(whole.as_str()).filter(|whole| !whole.is_empty());
            let page = bucket.client.list_paginated(asked, options).await;
            let page = page.map_err(|error| failed(what, &error))?;
            let names = page.result.objects.into_iter().filter_map(|object| {
                object.location.as_ref().strip_prefix(&bucket.prefix).map(str::to_owned)
            });
            Ok((names.collect(), page.page_token))
        })
    }
}

impl Backend for S3 {
    fn read_at(&self, key: &Key, offset: u64, into: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(into.len() as u64);
        let Some(end) = end.filter(|end| i64::try_from(*end).is_ok()) else {
            return Err(too_short(key, offset, into.len()));
        };
        if into.is_empty() {
            return self.size(key).map(drop);
        }
        let starts = (offset..end).step_by(RANGE_BYTES);
        let ranges = starts.map(|start| start..end.min(start + RANGE_BYTES as u64)).collect();
        self.get_ranges(key, ranges, into)
    }

    fn read_all(&self, key: &Key, max_bytes: u64) -> Result<Vec<u8>> {
        let (size, bytes) = self.get(key, max_bytes)?;
        bytes.ok_or_else(|| too_large(key, size, max_bytes))
    }

    fn size(&self, key: &Key) -> Result<u64> {
        let (bucket, path) = (self.0.clone(), self.0.path(key)?);
        let (key, what) = (key.clone(), self.what("measure", key));
        bridge::run(async move {
            match bucket.client.head(&path).await {
                Ok(found) => Ok(found.size),
                Err(object_store::Error::NotFound { .. }) => Err(absent(&key, &bucket.place)),
                Err(error) => Err(failed(what, &error)),
            }
        })
    }

    fn create(&self, key: &Key) -> Result<Box<dyn Upload>> {
        Ok(Box::new(S3Upload::new(self.0.clone(), key)?))
    }

    fn list(&self, prefix: &str, start_after: Option<&str>, limit: usize) -> Result<Vec<String>> {
        check_prefix(prefix)?;
        let mut names = Vec::new();
        let mut token = None;
        while names.len() < limit {
            // One more than wanted, as the marker may be among them.
            let wanted = limit - names.len() + 1;
            let (page, next) = self.list_page(prefix, start_after, wanted, token)?;
            names.extend(page.into_iter().filter(|name| !name.starts_with('.')));
            token = next;
            if token.is_none() {
                break;
            }
        }
        names.truncate(limit);
        Ok(names)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.remove(self.0.path(key)?, self.what("delete", key))
    }

    fn describe(&self) -> String {
        self.0.place.clone()
    }
}
