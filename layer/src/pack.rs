//! Pack framing: a header, the stored bytes of chunks back to back, a footer that lists them, and a
//! trailer of fixed size at the very end by which a reader finds the footer.
//!
//! A pack describes itself: its footer alone is enough to rebuild every index of it. Nothing here
//! compresses or reads; `store` does.

use crate::chunk::{BLOCK_BYTES, MAX_CHUNK_BYTES};
use crate::error::{Error, Result};
use crate::id::{ChunkDigest, PackId};
use crate::input::Input;

const HEADER_MAGIC: &[u8; 8] = b"LAMPACK1";
const TRAILER_MAGIC: &[u8; 8] = b"LAMPEND1";
const VERSION: u32 = 1;
const KNOWN_INCOMPATIBLE: u32 = 0;

/// Bytes before the first chunk.
pub const HEADER_BYTES: usize = 64;
/// Bytes of one chunk's line in the footer.
pub const ENTRY_BYTES: usize = 56;
/// Bytes after the footer, the last ones of the pack.
pub const TRAILER_BYTES: usize = 64;
/// The most chunks in one pack; bounds what a reader allocates for a footer (235 MB).
pub const MAX_ENTRIES: u32 = 1 << 22;

/// How the stored bytes of a chunk become its plain bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Codec {
    /// The stored bytes are the plain bytes.
    None,
    /// One zstd frame.
    Zstd,
}

impl Codec {
    /// The number that stands for the codec in every stored form.
    pub fn number(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Zstd => 1,
        }
    }

    /// The inverse of [`Codec::number`].
    pub fn from_number(number: u8) -> Result<Self> {
        match number {
            0 => Ok(Self::None),
            1 => Ok(Self::Zstd),
            _ => Err(Error::new(
                crate::ErrorKind::Unsupported,
                format!("codec {number} is not known"),
            )),
        }
    }

    /// Checks the sizes of one stored chunk before anything is allocated for it: plain bytes are
    /// whole blocks up to [`MAX_CHUNK_BYTES`], stored bytes are at least 1 and never more than them,
    /// and equal for [`Codec::None`].
    pub fn check_sizes(self, stored_bytes: u32, plain_bytes: u32) -> Result<()> {
        let plain_fits = plain_bytes > 0
            && plain_bytes <= MAX_CHUNK_BYTES
            && plain_bytes.is_multiple_of(BLOCK_BYTES);
        let stored_fits = match self {
            Self::None => stored_bytes == plain_bytes,
            Self::Zstd => stored_bytes > 0 && stored_bytes <= plain_bytes,
        };
        if plain_fits && stored_fits {
            return Ok(());
        }
        Err(Error::corrupt(format!(
            "a chunk of {plain_bytes} plain bytes in {stored_bytes} stored bytes ({self:?})"
        )))
    }
}

/// One chunk in a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackEntry {
    /// What the plain bytes are.
    pub digest: ChunkDigest,
    /// Where the stored bytes start, from the start of the pack.
    pub offset: u64,
    /// Length of the stored bytes.
    pub stored_bytes: u32,
    /// Length of the plain bytes.
    pub plain_bytes: u32,
    /// How the one becomes the other.
    pub codec: Codec,
}

/// The first [`HEADER_BYTES`] bytes of a pack.
pub fn encode_header(pack: PackId) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES);
    bytes.extend_from_slice(HEADER_MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&0_u32.to_le_bytes());
    bytes.extend_from_slice(pack.as_bytes());
    let digest = blake3::hash(&bytes);
    bytes.extend_from_slice(digest.as_bytes());
    bytes
}

/// Checks the first [`HEADER_BYTES`] bytes of a pack and returns the id that it was opened with.
pub fn decode_header(bytes: &[u8]) -> Result<PackId> {
    let mut input = Input::new("pack header", bytes);
    input.magic(HEADER_MAGIC)?;
    input.version(VERSION)?;
    input.incompatible(KNOWN_INCOMPATIBLE)?;
    let pack = PackId(input.array()?);
    let digest = input.array::<32>()?;
    input.end()?;
    if blake3::hash(&bytes[..32]).as_bytes() == &digest {
        Ok(pack)
    } else {
        Err(Error::corrupt("pack header: wrong checksum"))
    }
}

/// Footer and trailer of a pack with these chunks, to be appended after the last one.
///
/// INVARIANT (checked by [`decode_footer`]): the entries are in the order of their offsets and lie
/// back to back from [`HEADER_BYTES`].
pub fn encode_footer(entries: &[PackEntry]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(entries.len() * ENTRY_BYTES + TRAILER_BYTES);
    for entry in entries {
        bytes.extend_from_slice(&entry.digest.0);
        bytes.extend_from_slice(&entry.offset.to_le_bytes());
        bytes.extend_from_slice(&entry.stored_bytes.to_le_bytes());
        bytes.extend_from_slice(&entry.plain_bytes.to_le_bytes());
        bytes.push(entry.codec.number());
        bytes.extend_from_slice(&[0; 7]);
    }
    let footer_offset = entries
        .last()
        .map_or(HEADER_BYTES as u64, |last| last.offset + u64::from(last.stored_bytes));
    let count = u32::try_from(entries.len()).unwrap_or(u32::MAX);
    let footer_bytes = bytes.len();
    bytes.extend_from_slice(TRAILER_MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&0_u32.to_le_bytes());
    bytes.extend_from_slice(&footer_offset.to_le_bytes());
    bytes.extend_from_slice(&count.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    let digest = footer_digest(&bytes[footer_bytes..], &bytes[..footer_bytes]);
    bytes.extend_from_slice(&digest);
    bytes
}

fn footer_digest(trailer: &[u8], footer: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(trailer);
    hasher.update(footer);
    *hasher.finalize().as_bytes()
}

/// Where the footer of a pack lies; from its last [`TRAILER_BYTES`] bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trailer {
    /// Where the footer starts, from the start of the pack.
    pub footer_offset: u64,
    /// Length of the footer.
    pub footer_bytes: usize,
    /// The number of chunks.
    pub entries: u32,
    fields: [u8; 32],
    digest: [u8; 32],
}

/// Reads the last [`TRAILER_BYTES`] bytes of a pack of `pack_bytes` bytes. What it says fits the
/// pack's size, so the footer can be allocated and read.
pub fn decode_trailer(bytes: &[u8], pack_bytes: u64) -> Result<Trailer> {
    let mut input = Input::new("pack trailer", bytes);
    input.magic(TRAILER_MAGIC)?;
    input.version(VERSION)?;
    input.incompatible(KNOWN_INCOMPATIBLE)?;
    let footer_offset = input.u64()?;
    let entries = input.u32()?;
    input.zeros(4)?;
    let digest = input.array()?;
    input.end()?;
    let footer_bytes = entries as usize * ENTRY_BYTES;
    let end = footer_offset.checked_add(footer_bytes as u64 + TRAILER_BYTES as u64);
    if entries > MAX_ENTRIES || footer_offset < HEADER_BYTES as u64 || end != Some(pack_bytes) {
        return Err(Error::corrupt(format!(
            "pack trailer: {entries} entries from {footer_offset} do not fit {pack_bytes} bytes"
        )));
    }
    let mut fields = [0; 32];
    fields.copy_from_slice(&bytes[..32]);
    Ok(Trailer { footer_offset, footer_bytes, entries, fields, digest })
}

/// Reads the footer that a trailer points to, and checks it.
pub fn decode_footer(trailer: &Trailer, footer: &[u8]) -> Result<Vec<PackEntry>> {
    if footer.len() != trailer.footer_bytes
        || footer_digest(&trailer.fields, footer) != trailer.digest
    {
        return Err(Error::corrupt("pack footer: wrong checksum"));
    }
    let mut input = Input::new("pack footer", footer);
    let mut entries = Vec::with_capacity(trailer.entries as usize);
    let mut next = HEADER_BYTES as u64;
    for _ in 0..trailer.entries {
        let digest = ChunkDigest(input.array()?);
        let offset = input.u64()?;
        let stored_bytes = input.u32()?;
        let plain_bytes = input.u32()?;
        let codec = Codec::from_number(input.u8()?)?;
        input.zeros(7)?;
        codec.check_sizes(stored_bytes, plain_bytes)?;
        if offset != next {
            return Err(input.corrupt(format!("a chunk lies at {offset}, not {next}")));
        }
        next += u64::from(stored_bytes);
        entries.push(PackEntry { digest, offset, stored_bytes, plain_bytes, codec });
    }
    if next != trailer.footer_offset {
        return Err(input.corrupt(format!("the chunks end at {next}, not at the footer")));
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entries(sizes: &[(u32, u32)]) -> Vec<PackEntry> {
        let mut offset = HEADER_BYTES as u64;
        sizes
            .iter()
            .map(|(blocks, stored)| {
                let plain_bytes = blocks * BLOCK_BYTES;
                let codec = if *stored == 0 { Codec::None } else { Codec::Zstd };
                let stored_bytes = if *stored == 0 { plain_bytes } else { *stored };
                let entry = PackEntry {
                    digest: ChunkDigest::of(&offset.to_le_bytes()),
                    offset,
                    stored_bytes,
                    plain_bytes,
                    codec,
                };
                offset += u64::from(stored_bytes);
                entry
            })
            .collect()
    }

    fn decode(pack_bytes: u64, tail: &[u8]) -> Result<Vec<PackEntry>> {
        let cut = tail.len().saturating_sub(TRAILER_BYTES);
        let trailer = decode_trailer(&tail[cut..], pack_bytes)?;
        if trailer.footer_bytes != cut {
            return Err(Error::corrupt("cut"));
        }
        decode_footer(&trailer, &tail[..cut])
    }

    proptest! {
        #[test]
        fn footers_round_trip_and_any_flipped_bit_is_found(
            sizes in prop::collection::vec((1..5000_u32, 0..4096_u32), 0..20),
            at: usize,
            flip in 1..=255_u8,
        ) {
            let sizes: Vec<_> = sizes.into_iter().map(|(b, s)| (b.min(4096), s)).collect();
            let entries = entries(&sizes);
            let data: u64 = entries.iter().map(|entry| u64::from(entry.stored_bytes)).sum();
            let mut tail = encode_footer(&entries);
            let pack_bytes = HEADER_BYTES as u64 + data + tail.len() as u64;
            prop_assert_eq!(decode(pack_bytes, &tail).unwrap(), entries);
            let at = at % tail.len();
            tail[at] ^= flip;
            prop_assert!(decode(pack_bytes, &tail).is_err());
        }
    }

    #[test]
    fn header_keeps_the_id_and_its_checksum() {
        let mut header = encode_header(PackId([7; 16]));
        assert_eq!(header.len(), HEADER_BYTES);
        assert_eq!(decode_header(&header).unwrap(), PackId([7; 16]));
        header[20] ^= 1;
        assert!(decode_header(&header).is_err());
    }

    #[test]
    fn bogus_sizes_are_refused_before_anything_is_allocated() {
        for (codec, stored, plain) in [
            (Codec::None, 4095, 4096),
            (Codec::Zstd, 0, 4096),
            (Codec::Zstd, 4097, 4096),
            (Codec::Zstd, 10, 0),
            (Codec::Zstd, 10, 5000),
            (Codec::Zstd, 10, MAX_CHUNK_BYTES + BLOCK_BYTES),
        ] {
            assert!(codec.check_sizes(stored, plain).is_err(), "{codec:?} {stored} {plain}");
        }
        let tail = encode_footer(&[]);
        assert!(decode_trailer(&tail, u64::MAX).is_err());
        assert!(decode_trailer(&tail[1..], 128).is_err());
        assert_eq!(decode(128, &tail).unwrap(), []);
    }
}
