//! What git calls a content: the digest of `blob SIZE`, a zero byte, and the bytes.

use sha2::Digest as _;
use std::fmt;

/// What a repository names its objects with, and what ends its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Algorithm {
    /// 20 bytes.
    Sha1,
    /// 32 bytes.
    Sha256,
}

impl Algorithm {
    /// Both.
    pub(crate) const ALL: [Self; 2] = [Self::Sha1, Self::Sha256];

    /// Length of a digest.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
        }
    }

    /// The digest of some bytes.
    pub(crate) fn digest(self, bytes: &[u8]) -> Vec<u8> {
        let mut hasher = Hasher::new(self);
        hasher.update(bytes);
        hasher.finish()
    }

    /// The name of a blob that is at hand.
    pub(crate) fn blob(self, bytes: &[u8]) -> Vec<u8> {
        let mut hasher = Hasher::blob(self, bytes.len() as u64);
        hasher.update(bytes);
        hasher.finish()
    }
}

/// Computes a digest piece by piece.
#[derive(Clone)]
pub(crate) enum Hasher {
    Sha1(sha1::Sha1),
    Sha256(sha2::Sha256),
}

impl fmt::Debug for Hasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sha1(_) => "Hasher::Sha1",
            Self::Sha256(_) => "Hasher::Sha256",
        })
    }
}

impl Hasher {
    fn new(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::Sha1 => Self::Sha1(sha1::Sha1::new()),
            Algorithm::Sha256 => Self::Sha256(sha2::Sha256::new()),
        }
    }

    /// Begins the name of a blob of so many bytes.
    pub(crate) fn blob(algorithm: Algorithm, size: u64) -> Self {
        let mut hasher = Self::new(algorithm);
        hasher.update(format!("blob {size}\0").as_bytes());
        hasher
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha1(hasher) => hasher.update(bytes),
            Self::Sha256(hasher) => hasher.update(bytes),
        }
    }

    /// Goes on with so many zero bytes.
    pub(crate) fn update_zeros(&mut self, bytes: u64) {
        let zeros = [0; 4096];
        for _ in 0..bytes / zeros.len() as u64 {
            self.update(&zeros);
        }
        self.update(&zeros[..(bytes % zeros.len() as u64) as usize]);
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        match self {
            Self::Sha1(hasher) => hasher.finalize().to_vec(),
            Self::Sha256(hasher) => hasher.finalize().to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn blobs_are_called_as_git_calls_them() {
        // `git hash-object --stdin` of nothing and of "hello\n".
        assert_eq!(hex(&Algorithm::Sha1.blob(b"")), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        assert_eq!(
            hex(&Algorithm::Sha1.blob(b"hello\n")),
            "ce013625030ba8dba906f756967f9e9ca394464a"
        );
        assert_eq!(
            hex(&Algorithm::Sha256.blob(b"hello\n")),
            "2cf8d83d9ee29543b34a87727421fdecb7e3f3a183d337639025de576db9ebb4"
        );
        let mut pieces = Hasher::blob(Algorithm::Sha1, 10_000);
        pieces.update_zeros(9_000);
        pieces.update(&[0; 1_000]);
        assert_eq!(pieces.finish(), Algorithm::Sha1.blob(&[0; 10_000]));
    }
}
