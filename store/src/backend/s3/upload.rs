//! An object on its way to S3: one put when it is small, parts of a multipart upload when it is not.
//!
//! Memory is bounded: one part is being gathered and at most [`IN_FLIGHT`] are on their way. Parts are small
//! at first and grow, so that ten thousand of them reach eight terabytes.
//!
//! Every object carries a random word in its metadata. An answer that was lost, or a retry that met its own
//! first try, is settled by asking the store whose word the object of that name carries.
//!
//! // CRASH: parts of an upload that is not completed are no object. Dropping an upload aborts it; one whose
//! process died stays, invisible, until the bucket's lifecycle rule for incomplete uploads removes it.

use super::bridge::{self, Pending};
use super::failure::{failed, kind_of};
use super::{Bucket, taken_in};
use crate::backend::Upload;
use crate::key::Key;
use layer::{Context, Error, ErrorKind, Result};
use object_store::multipart::{MultipartStore, PartId};
use object_store::{
    Attribute, Attributes, GetOptions, ObjectStore, PutMode, PutMultipartOptions, PutOptions,
    PutPayload,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// The first parts have this size. No less than the 5 MiB that S3 asks for.
const PART_BYTES: usize = 8 << 20;
/// After so many parts their size doubles.
const PARTS_OF_A_SIZE: usize = 1000;
/// Parts on their way at once.
const IN_FLIGHT: usize = 3;
/// Tries of a publish that met nobody's object and did not succeed either.
const MAX_ATTEMPTS: u32 = 3;
/// What an abort may take before it is left to the bucket's lifecycle rule.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Under which name the random word stands in an object's metadata.
const WORD: &str = "lamella-upload";

pub(super) struct S3Upload {
    bucket: Arc<Bucket>,
    key: Key,
    word: String,
    buffer: Vec<u8>,
    parts: Option<Parts>,
    failed: bool,
}

/// A multipart upload that was begun.
struct Parts {
    id: String,
    sent: usize,
    flying: VecDeque<Pending<object_store::Result<PartId>>>,
    done: Vec<PartId>,
}

impl S3Upload {
    pub(super) fn new(bucket: Arc<Bucket>, key: &Key) -> Result<Self> {
        let word = crate::objects::random_hex()?;
        let buffer = Vec::new();
        Ok(Self { bucket, key: key.clone(), word, buffer, parts: None, failed: false })
    }

    /// A publish of an empty object in one part, to ask a server what it does with it.
    pub(super) fn in_parts(mut self) -> Result<Self> {
        self.begin()?;
        Ok(self)
    }

    fn attributes(&self) -> Attributes {
        [(Attribute::Metadata(WORD.into()), self.word.clone())].into_iter().collect()
    }

    fn what(&self, doing: &str) -> String {
        format!("{doing} object {} in {}", self.key, self.bucket.place)
    }

    fn part_bytes(&self) -> usize {
        let sent = self.parts.as_ref().map_or(0, |parts| parts.sent);
        PART_BYTES << (sent / PARTS_OF_A_SIZE).min(16)
    }

    fn begin(&mut self) -> Result<()> {
        let (bucket, path) = (self.bucket.clone(), self.bucket.path(&self.key)?);
        let options = PutMultipartOptions { attributes: self.attributes(), ..Default::default() };
        let what = self.what("begin");
        let begun = bridge::run(async move {
            let begun = bucket.client.create_multipart_opts(&path, options).await;
            begun.map_err(|error| failed(what, &error))
        });
        let parts = Parts { id: begun?, sent: 0, flying: VecDeque::new(), done: Vec::new() };
        self.parts = Some(parts);
        Ok(())
    }

    /// Sends what was gathered as the next part.
    fn send_part(&mut self) -> Result<()> {
        if self.parts.is_none() {
            self.begin()?;
        }
        let payload = PutPayload::from(std::mem::take(&mut self.buffer));
        let (bucket, path) = (self.bucket.clone(), self.bucket.path(&self.key)?);
        let what = self.what("write a part of");
        let Some(parts) = &mut self.parts else { return Ok(()) };
        if parts.flying.len() >= IN_FLIGHT {
            parts.land(&what)?;
        }
        let (id, number) = (parts.id.clone(), parts.sent);
        parts.sent += 1;
        parts.flying.push_back(bridge::start(async move {
            bucket.client.put_part(&path, &id, number, payload).await
        })?);
        Ok(())
    }

    /// Makes the object visible, or learns that the name is taken.
    fn settle(&mut self) -> Result<()> {
        if self.parts.is_some() && (!self.buffer.is_empty()) {
            self.send_part()?;
        }
        let what = self.what("write a part of");
        while self.parts.as_ref().is_some_and(|parts| !parts.flying.is_empty()) {
            self.parts.as_mut().map_or(Ok(()), |parts| parts.land(&what))?;
        }
        let payload = PutPayload::from(std::mem::take(&mut self.buffer));
        let mut last = None;
        for _ in 0..MAX_ATTEMPTS {
            let Err(error) = self.try_once(payload.clone())? else { return Ok(()) };
            let kind = kind_of(&error);
            if matches!(kind, ErrorKind::Denied | ErrorKind::Invalid | ErrorKind::Unsupported) {
                return Err(failed(self.what("publish"), &error));
            }
            // Whatever the answer was: the object that is there tells whether this upload made it.
            match self.owner().context(|| self.what("publish"))? {
                Owner::This => return Ok(()),
                Owner::Other => return Err(taken_in(&self.bucket, &self.key)),
                Owner::Nobody => last = Some(failed(self.what("publish"), &error)),
            }
        }
        let gone = || Error::new(ErrorKind::Unavailable, self.what("publish"));
        Err(match last {
            // There is no such bucket, or the parts are gone, or somebody deleted what was in the way.
            Some(error) if matches!(error.kind(), ErrorKind::Exists | ErrorKind::NotFound) => {
                gone().with_source(error)
            }
            last => last.unwrap_or_else(gone),
        })
    }

    fn try_once(&self, payload: PutPayload) -> Result<object_store::Result<()>> {
        let (bucket, path) = (self.bucket.clone(), self.bucket.path(&self.key)?);
        let attributes = self.attributes();
        let parts = self.parts.as_ref().map(|parts| (parts.id.clone(), parts.done.clone()));
        let trying = bridge::start(async move {
            let result = match parts {
                Some((id, done)) => bucket.client.complete_multipart(&path, &id, done).await,
                None => {
                    let mode = PutMode::Create;
                    let options = PutOptions { mode, attributes, ..Default::default() };
                    bucket.client.put_opts(&path, payload, options).await
                }
            };
            result.map(drop)
        });
        trying?.wait()
    }

    fn owner(&self) -> Result<Owner> {
        let (bucket, path) = (self.bucket.clone(), self.bucket.path(&self.key)?);
        let (word, what) = (self.word.clone(), self.what("look at"));
        bridge::run(async move {
            let options = GetOptions { head: true, ..Default::default() };
            match bucket.client.get_opts(&path, options).await {
                Ok(found) => {
                    let theirs = found.attributes.get(&Attribute::Metadata(WORD.into()));
                    let own = theirs.is_some_and(|theirs| theirs.as_ref() == word);
                    Ok(if own { Owner::This } else { Owner::Other })
                }
                Err(object_store::Error::NotFound { .. }) => Ok(Owner::Nobody),
                Err(error) => Err(failed(what, &error)),
            }
        })
    }
}

/// Whose object has the name.
enum Owner {
    This,
    Other,
    Nobody,
}

impl Parts {
    /// Waits for the oldest part on its way.
    fn land(&mut self, what: &str) -> Result<()> {
        let Some(oldest) = self.flying.pop_front() else { return Ok(()) };
        self.done.push(oldest.wait()?.map_err(|error| failed(what.to_owned(), &error))?);
        Ok(())
    }
}

impl Upload for S3Upload {
    fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        if self.failed {
            return Err(poisoned(&self.what("write")));
        }
        while !bytes.is_empty() {
            let room = self.part_bytes() - self.buffer.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.buffer.extend_from_slice(now);
            bytes = later;
            if self.buffer.len() == self.part_bytes() {
                self.failed = true;
                self.send_part()?;
                self.failed = false;
            }
        }
        Ok(())
    }

    fn publish(mut self: Box<Self>) -> Result<()> {
        if self.failed {
            return Err(poisoned(&self.what("publish")));
        }
        self.settle()?;
        self.parts = None;
        Ok(())
    }
}

fn poisoned(what: &str) -> Error {
    Error::new(ErrorKind::Unavailable, format!("{what}: an earlier write failed"))
}

impl Drop for S3Upload {
    fn drop(&mut self) {
        let Some(parts) = self.parts.take() else { return };
        let Ok(path) = self.bucket.path(&self.key) else { return };
        // A part that arrives after the abort would stay.
        for flying in parts.flying {
            let _ = flying.wait_at_most(ABORT_TIMEOUT);
        }
        let (bucket, id) = (self.bucket.clone(), parts.id);
        let aborting =
            bridge::start(async move { bucket.client.abort_multipart(&path, &id).await });
        let aborted = aborting.ok().and_then(|aborting| aborting.wait_at_most(ABORT_TIMEOUT));
        match aborted {
            // The upload may be complete, by a try whose answer was lost, and then is no more.
            Some(Ok(()) | Err(object_store::Error::NotFound { .. })) => {}
            Some(Err(error)) => tracing::warn!("{}: {error}", self.what("abort the upload of")),
            None => tracing::warn!("{}: no answer", self.what("abort the upload of")),
        }
    }
}
