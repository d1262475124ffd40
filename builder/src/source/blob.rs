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

    /// Its first bytes, eight at most.
    pub(crate) fn first(&self) -> Result<Vec<u8>> {
        self.beginning(self.length.min(8) as usize)
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

enum Hasher {
    Sha256(sha2::Sha256),
    Sha512(sha2::Sha512),
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
        let hasher = match digest.split_once(':') {
            Some(("sha256", hex)) if hex.len() == 64 => Hasher::Sha256(sha2::Sha256::new()),
            Some(("sha512", hex)) if hex.len() == 128 => Hasher::Sha512(sha2::Sha512::new()),
            _ => {
                let text = format!("{digest:?} is no sha256 or sha512 digest");
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
        };
        Ok(Self { inner, hasher, expected: digest.to_owned() })
    }

    /// Reads what is left and compares.
    pub(crate) fn finish(&mut self, name: &str) -> Result<()> {
        let mut buffer = vec![0; BUFFER_BYTES];
        while self.read(&mut buffer).context(|| format!("read {name}"))? > 0 {}
        let actual = match &self.hasher {
            Hasher::Sha256(hasher) => hex("sha256:", &hasher.clone().finalize()),
            Hasher::Sha512(hasher) => hex("sha512:", &hasher.clone().finalize()),
        };
        if actual != self.expected {
            return Err(Error::corrupt(format!(
                "{name} is not what its digest says: expected {}, found {actual}",
                self.expected
            )));
        }
        Ok(())
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let length = self.inner.read(buffer)?;
        match &mut self.hasher {
            Hasher::Sha256(hasher) => hasher.update(&buffer[..length]),
            Hasher::Sha512(hasher) => hasher.update(&buffer[..length]),
        }
        Ok(length)
    }
}

fn hex(prefix: &str, bytes: &[u8]) -> String {
    bytes.iter().fold(prefix.to_owned(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
