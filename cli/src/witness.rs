//! A publisher that remembers why it failed.
//!
//! Several threads upload into one stream. When the store refuses, one of them learns why and the others
//! learn only that the stream has ended; a build reports whichever comes first. This one keeps the cause
//! for the report.
//!
//! Locking: one mutex around what was seen, taken on failures only.

use builder::{EncodedChunk, Publisher};
use layer::{ChunkDigest, EnvId, Error, ErrorKind, LayerId, Result};
use std::sync::{Mutex, PoisonError};

/// Passes everything on and looks at the failures.
pub struct Witness<P> {
    inner: P,
    cause: Mutex<Option<Error>>,
}

impl<P: Publisher> Witness<P> {
    /// Nothing has failed yet.
    pub fn new(inner: P) -> Self {
        Self { inner, cause: Mutex::new(None) }
    }

    fn see<T>(&self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            if error.kind() != ErrorKind::Unavailable {
                let mut cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
                cause.get_or_insert_with(|| Error::new(error.kind(), error.chain()));
            }
        })
    }

    /// The cause behind `error`, if one was seen that says more.
    pub fn explain(&self, error: Error) -> Error {
        let mut cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        match cause.take() {
            Some(cause) if error.kind() == ErrorKind::Unavailable => cause,
            _ => error,
        }
    }
}

impl<P: Publisher> Publisher for Witness<P> {
    fn missing(&self, digests: &[ChunkDigest]) -> Result<Vec<bool>> {
        self.see(self.inner.missing(digests))
    }

    fn upload(&self, chunk: EncodedChunk) -> Result<()> {
        self.see(self.inner.upload(chunk))
    }

    fn flush(&self) -> Result<()> {
        self.see(self.inner.flush())
    }

    fn commit_layer(&self, file: &[u8]) -> Result<LayerId> {
        self.see(self.inner.commit_layer(file))
    }

    fn commit_environment(&self, document: &[u8]) -> Result<EnvId> {
        self.see(self.inner.commit_environment(document))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flushes fail with the cause, uploads only with the end of the stream.
    struct Full;

    impl Publisher for Full {
        fn missing(&self, digests: &[ChunkDigest]) -> Result<Vec<bool>> {
            Ok(vec![true; digests.len()])
        }
        fn upload(&self, _chunk: EncodedChunk) -> Result<()> {
            Err(Error::new(ErrorKind::Unavailable, "the stream ended"))
        }
        fn flush(&self) -> Result<()> {
            Err(Error::new(ErrorKind::NoSpace, "the store is full"))
        }
        fn commit_layer(&self, _file: &[u8]) -> Result<LayerId> {
            Err(Error::invalid("not asked"))
        }
        fn commit_environment(&self, _document: &[u8]) -> Result<EnvId> {
            Err(Error::invalid("not asked"))
        }
    }

    #[test]
    fn the_cause_is_told_and_not_the_consequence() {
        let witness = Witness::new(Full);
        witness.flush().unwrap_err();
        let chunk = EncodedChunk {
            digest: ChunkDigest([1; 32]),
            codec: layer::pack::Codec::None,
            plain_bytes: 1,
            payload: vec![0],
        };
        let error = witness.upload(chunk).unwrap_err();
        assert_eq!(witness.explain(error).kind(), ErrorKind::NoSpace);
        let own = witness.explain(Error::corrupt("the source"));
        assert_eq!(own.kind(), ErrorKind::Corrupt);
    }
}
