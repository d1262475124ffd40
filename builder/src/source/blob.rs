//! A run of bytes of a file, and the digests that container images give for such runs.

use layer::{Context, Error, ErrorKind, Result};
use sha2::Digest as _;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;

const BUFFER_BYTES: usize = 256 << 10;

/// A run of bytes of a file.
#[derive(Debug)]
pub(crate) struct Region {
    /// The file.
    pub file: File,
    /// Where the run starts.
    pub start: u64,
    /// Its length.
    pub length: u64,
    /// How users call it.
    pub name: String,
}

impl Region {
    /// A whole file.
    pub(crate) fn whole(file: File, name: String) -> Result<Self> {
        let length = file.metadata().context(|| format!("stat {name}"))?.len();
        Ok(Self { file, start: 0, length, name })
    }

    /// The same run once more.
    pub(crate) fn another(&self) -> Result<Self> {
        let file = self.file.try_clone().context(|| format!("open {}", self.name))?;
        Ok(Self { file, start: self.start, length: self.length, name: self.name.clone() })
    }

    /// Its first bytes, eight at most.
    pub(crate) fn first(&self) -> Result<Vec<u8>> {
        self.bytes_at_most(8)
    }

    /// So many of its first bytes, or as many as there are.
    pub(crate) fn bytes_at_most(&self, most: usize) -> Result<Vec<u8>> {
        self.beginning(self.length.min(most as u64) as usize)
    }

    /// All of it, when it has at most `most` bytes.
    pub(crate) fn bytes(&self, most: u64) -> Result<Vec<u8>> {
        if self.length > most {
            let text = format!("{}: {} bytes (at most {most})", self.name, self.length);
            return Err(Error::invalid(text));
        }
        self.beginning(self.length as usize)
    }

    fn beginning(&self, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        let read = self.file.read_exact_at(&mut bytes, self.start);
        read.context(|| format!("read {}", self.name))?;
        Ok(bytes)
    }

    /// Reads it from its start.
    pub(crate) fn reader(&self) -> RegionReader<'_> {
        RegionReader { region: self, position: 0 }
    }

    /// Compares all bytes with a digest.
    pub(crate) fn verify(&self, digest: &str) -> Result<()> {
        let mut hashing = Hashing::new(self.reader(), digest)?;
        hashing.finish(&self.name)
    }
}

/// See [`Region::reader`].
pub(crate) struct RegionReader<'a> {
    region: &'a Region,
    position: u64,
}

impl Read for RegionReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let left = self.region.length - self.position;
        let length = left.min(buffer.len() as u64) as usize;
        let length =
            self.region.file.read_at(&mut buffer[..length], self.region.start + self.position)?;
        if length == 0 && left > 0 && !buffer.is_empty() {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        self.position += length as u64;
        Ok(length)
    }
}

/// Computes one of the digests that container images use.
pub(crate) enum Hasher {
    Sha256(sha2::Sha256),
    Sha512(sha2::Sha512),
}

impl Hasher {
    /// The one that images use where they have the choice.
    pub(crate) fn sha256() -> Self {
        Self::Sha256(sha2::Sha256::new())
    }

    /// The one of a digest: `sha256:<hex>` or `sha512:<hex>`.
    pub(crate) fn of(digest: &str) -> Result<Self> {
        match digest.split_once(':') {
            Some(("sha256", hex)) if hex.len() == 64 => Ok(Self::sha256()),
            Some(("sha512", hex)) if hex.len() == 128 => Ok(Self::Sha512(sha2::Sha512::new())),
            _ => {
                let text = format!("{digest:?} is no sha256 or sha512 digest");
                Err(Error::new(ErrorKind::Unsupported, text))
            }
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::Sha512(hasher) => hasher.update(bytes),
        }
    }

    /// The digest of what came so far.
    pub(crate) fn digest(&self) -> String {
        match self {
            Self::Sha256(hasher) => hex("sha256:", &hasher.clone().finalize()),
            Self::Sha512(hasher) => hex("sha512:", &hasher.clone().finalize()),
        }
    }
}

/// The refusal of bytes that are others than their digest says.
pub(crate) fn wrong_digest(name: &str, expected: &str, actual: &str) -> Error {
    Error::corrupt(format!(
        "{name} is not what its digest says: expected {expected}, found {actual}"
    ))
}

/// Computes the digest of everything that is read through it.
pub(crate) struct Hashing<R> {
    inner: R,
    hasher: Hasher,
    expected: String,
}

impl<R: Read> Hashing<R> {
    /// `digest` is `sha256:<hex>` or `sha512:<hex>`.
    pub(crate) fn new(inner: R, digest: &str) -> Result<Self> {
        Ok(Self { inner, hasher: Hasher::of(digest)?, expected: digest.to_owned() })
    }

    /// Reads what is left and compares.
    pub(crate) fn finish(&mut self, name: &str) -> Result<()> {
        let mut buffer = vec![0; BUFFER_BYTES];
        while self.read(&mut buffer).context(|| format!("read {name}"))? > 0 {}
        let actual = self.hasher.digest();
        if actual != self.expected {
            return Err(wrong_digest(name, &self.expected, &actual));
        }
        Ok(())
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let length = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..length]);
        Ok(length)
    }
}

/// A digest in hexadecimal, behind the name of its kind.
pub(crate) fn hex(prefix: &str, bytes: &[u8]) -> String {
    bytes.iter().fold(prefix.to_owned(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
