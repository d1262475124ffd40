//! The file `.git/index`, versions 2, 3 and 4: where its entries keep what `stat` told, and how that is
//! exchanged.
//!
//! The fields have a fixed size, so nothing moves: names, flags, padding and extensions stay as they are
//! byte for byte, and only the digest at the end is computed anew (where git wrote one; with
//! `index.skipHash` it writes zeros). An index that is not understood to its last byte is left alone:
//! `parse` gives `None`, never an error.

use super::blob::Algorithm;
use layer::tree::Timestamp;
use std::ops::Range;

const HEADER_BYTES: usize = 12;
/// From an entry's start to its object name: ten numbers of 32 bits.
const STAT_BYTES: usize = 40;
const FLAG_EXTENDED: u16 = 0x4000;
const FLAGS_STAGE: u16 = 0x3000;
const FLAGS_NAME: u16 = 0x0fff;
/// Of the extended flags: the entry says only that somebody wants to add the file.
const INTENT_TO_ADD: u16 = 0x2000;
const TYPE_MASK: u32 = 0o170_000;

/// What an entry stands for, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tracked {
    File,
    Symlink,
    /// A submodule, a directory of a sparse index, a side of a conflict, a file that is not added yet.
    Other,
}

/// One entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Where it starts.
    at: usize,
    /// Path below the work tree.
    pub path: Vec<u8>,
    /// What it stands for.
    pub tracked: Tracked,
    /// Seconds of the modification time, as git cuts them.
    pub mtime_secs: u32,
    /// Length of the file, as git cuts it. 0 with another content than the empty one means: look into it.
    pub size: u32,
    /// The name of the content.
    pub object: Vec<u8>,
}

/// What a file shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shown {
    pub mtime: Timestamp,
    pub inode: u64,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
}

/// An index that was understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IndexFile {
    bytes: Vec<u8>,
    /// What names objects and ends the file.
    pub algorithm: Algorithm,
    pub entries: Vec<Entry>,
}

impl IndexFile {
    /// Understands the bytes of an index.
    pub(crate) fn parse(bytes: Vec<u8>) -> Option<Self> {
        let (algorithm, entries) = Algorithm::ALL
            .into_iter()
            .filter(|algorithm| is_sealed(&bytes, *algorithm))
            .find_map(|algorithm| Some((algorithm, Parser::new(&bytes, algorithm)?.parse()?)))?;
        Some(Self { bytes, algorithm, entries })
    }

    /// Writes what a file shows into an entry.
    pub(crate) fn refresh(&mut self, entry: usize, shown: &Shown) {
        let Entry { at, .. } = self.entries[entry];
        // As git cuts them: it compares the lower 32 bits. It compares no device numbers.
        let seconds = shown.mtime.secs as u32;
        let words = [seconds, shown.mtime.nanos, seconds, shown.mtime.nanos, 0, shown.inode as u32];
        self.put(at, &words);
        self.put(at + 28, &[shown.uid, shown.gid, cut_size(shown.size)]);
    }

    /// Makes git look into the file, whatever `stat` says, as git itself does with an entry that it
    /// cannot trust.
    pub(crate) fn distrust(&mut self, entry: usize) {
        let Entry { at, .. } = self.entries[entry];
        self.put(at + 36, &[0]);
    }

    fn put(&mut self, at: usize, words: &[u32]) {
        for (word, place) in words.iter().zip(self.bytes[at..].chunks_exact_mut(4)) {
            place.copy_from_slice(&word.to_be_bytes());
        }
    }

    /// The file, sealed as it was.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        let mut bytes = self.bytes;
        let end = bytes.len() - self.algorithm.bytes();
        if bytes[end..].iter().any(|byte| *byte != 0) {
            let digest = self.algorithm.digest(&bytes[..end]);
            bytes[end..].copy_from_slice(&digest);
        }
        bytes
    }
}

/// A length as git keeps it: 32 bits, and never 0 for what is not empty.
pub(crate) fn cut_size(size: u64) -> u32 {
    match (size, size as u32) {
        (1.., 0) => 0x8000_0000,
        (_, cut) => cut,
    }
}

/// Whether the end is the digest of all before, or zeros.
fn is_sealed(bytes: &[u8], algorithm: Algorithm) -> bool {
    let Some(end) = bytes.len().checked_sub(algorithm.bytes()) else { return false };
    let seal = &bytes[end..];
    seal.iter().all(|byte| *byte == 0) || algorithm.digest(&bytes[..end]) == seal
}

struct Parser<'a> {
    /// Without the digest at the end.
    bytes: &'a [u8],
    at: usize,
    algorithm: Algorithm,
    version: u32,
    count: u32,
}

impl<'a> Parser<'a> {
    fn new(bytes: &'a [u8], algorithm: Algorithm) -> Option<Self> {
        let end = bytes.len().checked_sub(algorithm.bytes())?;
        let mut parser = Self { bytes: &bytes[..end], at: 0, algorithm, version: 0, count: 0 };
        let header = parser.take(HEADER_BYTES)?;
        (parser.version, parser.count) = (word(header, 4), word(header, 8));
        (header.starts_with(b"DIRC") && (2..=4).contains(&parser.version)).then_some(parser)
    }

    fn parse(mut self) -> Option<Vec<Entry>> {
        let smallest = STAT_BYTES + self.algorithm.bytes() + 3;
        if self.count as usize > self.bytes.len() / smallest {
            return None;
        }
        let mut entries: Vec<Entry> = Vec::with_capacity(self.count as usize);
        for _ in 0..self.count {
            let before = entries.last().map_or(&b""[..], |entry| &entry.path);
            entries.push(self.entry(before)?);
        }
        while self.at < self.bytes.len() {
            self.extension()?;
        }
        Some(entries)
    }

    fn entry(&mut self, before: &[u8]) -> Option<Entry> {
        let at = self.at;
        let stat = self.take(STAT_BYTES)?;
        let object = self.take(self.algorithm.bytes())?.to_vec();
        let flags = self.short()?;
        let extended = match flags & FLAG_EXTENDED {
            0 => 0,
            _ if self.version == 2 => return None,
            _ => self.short()?,
        };
        let path = match self.version {
            4 => self.suffix(before)?,
            _ => self.padded(at)?,
        };
        if usize::from(flags & FLAGS_NAME) != path.len().min(usize::from(FLAGS_NAME)) {
            return None;
        }
        let tracked = match word(stat, 24) & TYPE_MASK {
            _ if flags & FLAGS_STAGE != 0 || extended & INTENT_TO_ADD != 0 => Tracked::Other,
            0o100_000 => Tracked::File,
            0o120_000 => Tracked::Symlink,
            _ => Tracked::Other,
        };
        let (mtime_secs, size) = (word(stat, 8), word(stat, 36));
        Some(Entry { at, path, tracked, mtime_secs, size, object })
    }

    /// A name of version 2 or 3: one to eight zeros behind it make the entry a multiple of eight.
    fn padded(&mut self, start: usize) -> Option<Vec<u8>> {
        let path = self.until_zero()?;
        let bytes = (self.at - start).next_multiple_of(8);
        let padding = self.take(start + bytes - self.at)?;
        padding.iter().all(|byte| *byte == 0).then_some(path)
    }

    /// A name of version 4: how much of the name before falls away, and what comes instead.
    fn suffix(&mut self, before: &[u8]) -> Option<Vec<u8>> {
        let mut removed: usize = 0;
        loop {
            let byte = *self.take(1)?.first()?;
            removed = removed.checked_add(usize::from(byte & 0x7f))?;
            if byte & 0x80 == 0 {
                break;
            }
            removed = removed.checked_add(1)?.checked_mul(128)?;
        }
        let kept = before.len().checked_sub(removed)?;
        let rest = self.until_zero()?;
        Some([&before[..kept], &rest].concat())
    }

    fn extension(&mut self) -> Option<()> {
        let header = self.take(8)?;
        self.take(word(header, 4) as usize)?;
        // Capital letters mark what may be passed over. Of the others a sparse index changes nothing
        // for the entries that files have; a split one keeps some entries elsewhere.
        (header[0].is_ascii_uppercase() || header.starts_with(b"sdir")).then_some(())
    }

    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let range: Range<usize> = self.at..self.at.checked_add(bytes)?;
        let taken = self.bytes.get(range.clone())?;
        self.at = range.end;
        Some(taken)
    }

    fn short(&mut self) -> Option<u16> {
        let bytes = self.take(2)?;
        Some(u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    fn until_zero(&mut self) -> Option<Vec<u8>> {
        let length = self.bytes.get(self.at..)?.iter().position(|byte| *byte == 0)?;
        let path = self.take(length)?.to_vec();
        self.take(1)?;
        Some(path)
    }
}

/// A number of 32 bits inside bytes that are there.
fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests;
