//! The stored form of a metadata image: parts of one size, each compressed by itself, behind a table.
//!
//! The table has the digest of every part, as a node of BLAKE3's tree. So it is checked against the
//! image's digest before any part is there, and then each part against the table: several threads can
//! take an image from the store to where it belongs, in any order, and no byte is hashed twice.
//!
//! Values only: who reads what, and on which thread, is the caller's business.

use crate::error::{Context, Error, Result};
use crate::id::Digest;
use crate::input::Input;
use blake3::hazmat::{self, ChainingValue, HasherExt, Mode};
use std::ops::Range;
use zstd::bulk::{Compressor, Decompressor};

/// Bytes of each part of an image but the last: what is decompressed at a time.
pub const PART_BYTES: usize = 256 << 10;
/// The longest metadata image: what EROFS can address is far more than anybody should hold in memory.
pub const MAX_METADATA_BYTES: u64 = 1 << 36;

const DIGEST_BYTES: usize = 32;
const ENTRY_BYTES: u64 = 4 + DIGEST_BYTES as u64;
/// Images are small and read whole by everybody: a tenth less than with the level of packs, and opened no slower.
const LEVEL: i32 = 8;
/// An image is at most this many times as long as its stored form, so that a small file cannot unpack
/// to more memory than anybody has.
const MAX_RATIO: u64 = 64;

/// One part of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Its stored bytes, in the stored image: as they are where they have the plain length, else zstd.
    pub stored: Range<u64>,
    /// Its plain bytes, in the image.
    pub plain: Range<u64>,
    digest: ChainingValue,
    /// Whether it is the whole image.
    alone: bool,
}

/// Where the parts of one stored image are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frames {
    frames: Vec<Frame>,
}

/// The number of parts.
fn parts(metadata_bytes: u64) -> u64 {
    metadata_bytes.div_ceil(PART_BYTES as u64)
}

/// Bytes of the table in front of an image of this length. `Corrupt` where so many stored bytes cannot
/// stand for it.
pub fn table_bytes(metadata_bytes: u64, stored_bytes: u64) -> Result<u64> {
    let bytes = parts(metadata_bytes.min(MAX_METADATA_BYTES)) * ENTRY_BYTES;
    let fits = metadata_bytes <= MAX_METADATA_BYTES
        && metadata_bytes <= stored_bytes.saturating_mul(MAX_RATIO)
        && bytes + DIGEST_BYTES as u64 <= stored_bytes;
    if fits {
        return Ok(bytes);
    }
    let text = format!("layer file: {stored_bytes} bytes stand for an image of {metadata_bytes}");
    Err(Error::corrupt(text))
}

impl Frames {
    /// Reads the table of an image. `Corrupt` where its digests are not those of the image with this one.
    pub fn decode(
        table: &[u8],
        metadata_bytes: u64,
        metadata_digest: &Digest,
        stored_bytes: u64,
    ) -> Result<Self> {
        let expected = table_bytes(metadata_bytes, stored_bytes)?;
        let mut input = Input::new("table of a metadata image", table);
        if table.len() as u64 != expected {
            return Err(input.corrupt(format!("{} bytes, not {expected}", table.len())));
        }
        let mut frames = Vec::with_capacity(parts(metadata_bytes) as usize);
        let (mut plain_at, mut stored_at) = (0, expected);
        while plain_at < metadata_bytes {
            let plain = plain_at..metadata_bytes.min(plain_at + PART_BYTES as u64);
            let bytes = u64::from(input.u32()?);
            if bytes == 0 || bytes > plain.end - plain.start {
                let text = format!("{bytes} bytes stand for {}", plain.end - plain.start);
                return Err(input.corrupt(text));
            }
            let alone = metadata_bytes <= PART_BYTES as u64;
            let stored = stored_at..stored_at + bytes;
            (plain_at, stored_at) = (plain.end, stored.end);
            frames.push(Frame { stored, plain, digest: input.array()?, alone });
        }
        if stored_at + DIGEST_BYTES as u64 != stored_bytes {
            return Err(input.corrupt(format!("its frames do not fill {stored_bytes} bytes")));
        }
        let digests: Vec<ChainingValue> = frames.iter().map(|frame| frame.digest).collect();
        if root(&digests) != metadata_digest.0 {
            return Err(input.corrupt("not of the image that the manifest names"));
        }
        Ok(Self { frames })
    }

    /// All parts, in order.
    pub fn list(&self) -> &[Frame] {
        &self.frames
    }
}

/// The digest of an image from those of its parts.
fn root(parts: &[ChainingValue]) -> [u8; 32] {
    match parts {
        [] => *blake3::hash(&[]).as_bytes(),
        [alone] => *alone,
        _ => {
            let (left, right) = halves(parts);
            *hazmat::merge_subtrees_root(&node(left), &node(right), Mode::Hash).as_bytes()
        }
    }
}

fn node(parts: &[ChainingValue]) -> ChainingValue {
    match parts {
        [alone] => *alone,
        _ => {
            let (left, right) = halves(parts);
            hazmat::merge_subtrees_non_root(&node(left), &node(right), Mode::Hash)
        }
    }
}

/// BLAKE3's tree: on the left the most whole parts that are a power of two and leave something.
fn halves(parts: &[ChainingValue]) -> (&[ChainingValue], &[ChainingValue]) {
    parts.split_at(parts.len().next_power_of_two() / 2)
}

/// What a part is in the tree of its image.
fn part_digest(plain: &[u8], offset: u64, alone: bool) -> ChainingValue {
    if alone {
        return *blake3::hash(plain).as_bytes();
    }
    let mut hasher = blake3::Hasher::new();
    hasher.set_input_offset(offset).update(plain);
    hasher.finalize_non_root()
}

/// Opens frames one after another, into the same memory.
pub struct FrameReader {
    zstd: Decompressor<'static>,
    plain: Vec<u8>,
}

impl FrameReader {
    /// Fails where zstd has no memory.
    pub fn new() -> Result<Self> {
        let zstd = Decompressor::new().context(|| "start zstd".to_owned())?;
        Ok(Self { zstd, plain: Vec::new() })
    }

    /// The plain bytes of a part from its stored ones. `Corrupt` for all but the right ones.
    pub fn open<'a>(&'a mut self, frame: &Frame, stored: &'a [u8]) -> Result<&'a [u8]> {
        let name =
            || format!("bytes {} to {} of a metadata image", frame.plain.start, frame.plain.end);
        let plain_bytes = (frame.plain.end - frame.plain.start) as usize;
        let plain = if stored.len() == plain_bytes {
            stored
        } else {
            self.plain.clear();
            self.plain.reserve_exact(plain_bytes);
            let opened = self.zstd.decompress_to_buffer(stored, &mut self.plain);
            opened.map_err(|error| Error::corrupt(name()).with_source(error))?;
            &self.plain
        };
        let right = plain.len() == plain_bytes
            && part_digest(plain, frame.plain.start, frame.alone) == frame.digest;
        let text = || format!("{}: wrong digest", name());
        if right { Ok(plain) } else { Err(Error::corrupt(text())) }
    }
}

/// The stored form: table, frames, and the digest of both.
pub(crate) fn encode(image: &[u8]) -> Result<Vec<u8>> {
    let mut zstd = Compressor::new(LEVEL).context(|| "start zstd".to_owned())?;
    let mut frames = Vec::new();
    for plain in image.chunks(PART_BYTES) {
        let stored = zstd.compress(plain).context(|| "compress a metadata image".to_owned())?;
        frames.push(if stored.len() < plain.len() { stored } else { plain.to_vec() });
    }
    let table_bytes = frames.len() * ENTRY_BYTES as usize;
    let mut bytes = table_bytes + DIGEST_BYTES + frames.iter().map(Vec::len).sum::<usize>();
    // What is compressed too well is stored as it is, as far as the limit demands it.
    for (frame, plain) in frames.iter_mut().zip(image.chunks(PART_BYTES)) {
        if bytes as u64 * MAX_RATIO >= image.len() as u64 {
            break;
        }
        bytes = bytes - frame.len() + plain.len();
        *frame = plain.to_vec();
    }
    let mut stored = Vec::with_capacity(bytes);
    for (frame, (index, plain)) in frames.iter().zip(image.chunks(PART_BYTES).enumerate()) {
        // INVARIANT: a frame is at most as long as a part.
        stored.extend_from_slice(&(frame.len() as u32).to_le_bytes());
        let offset = (index * PART_BYTES) as u64;
        stored.extend_from_slice(&part_digest(plain, offset, image.len() <= PART_BYTES));
    }
    frames.iter().for_each(|frame| stored.extend_from_slice(frame));
    let digest = blake3::hash(&stored);
    stored.extend_from_slice(digest.as_bytes());
    Ok(stored)
}

/// The inverse of [`encode`], which checks all of it. No more is allocated than the stored bytes may stand for.
pub(crate) fn decode(stored: &[u8], metadata_bytes: u64, digest: &Digest) -> Result<Vec<u8>> {
    let table = table_bytes(metadata_bytes, stored.len() as u64)? as usize;
    let (sealed, seal) = stored.split_at(stored.len() - DIGEST_BYTES);
    if blake3::hash(sealed).as_bytes() != seal {
        return Err(Error::corrupt("layer file: wrong digest of the image"));
    }
    let frames = Frames::decode(&stored[..table], metadata_bytes, digest, stored.len() as u64)?;
    let mut reader = FrameReader::new()?;
    let mut image = Vec::with_capacity(metadata_bytes as usize);
    for frame in frames.list() {
        let bytes = &stored[frame.stored.start as usize..frame.stored.end as usize];
        image.extend_from_slice(reader.open(frame, bytes)?);
    }
    Ok(image)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    /// Compressible, and no part like another.
    fn image(bytes: usize) -> Vec<u8> {
        (0..bytes.div_ceil(4) as u32).flat_map(|at| (at / 7).to_le_bytes()).take(bytes).collect()
    }

    fn table(stored: &[u8], image: &[u8]) -> Result<Frames> {
        let (plain, all) = (image.len() as u64, stored.len() as u64);
        let table = &stored[..table_bytes(plain, all)? as usize];
        Frames::decode(table, plain, &Digest::of(image), all)
    }

    #[test]
    fn parts_are_opened_in_any_order_and_are_the_image() {
        for parts in [0, 1, 2, 3, 4, 5, 8, 9] {
            for bytes in [parts * PART_BYTES, parts * PART_BYTES + 4096, parts * PART_BYTES + 1] {
                let image = image(bytes);
                let stored = encode(&image).unwrap();
                let frames = table(&stored, &image).unwrap();
                assert_eq!(frames.list().len(), bytes.div_ceil(PART_BYTES));
                let mut reader = FrameReader::new().unwrap();
                for frame in frames.list().iter().rev() {
                    let range = frame.stored.start as usize..frame.stored.end as usize;
                    let plain = reader.open(frame, &stored[range]).unwrap();
                    let at = frame.plain.start as usize..frame.plain.end as usize;
                    assert!(plain == &image[at], "{bytes} bytes");
                }
                assert!(decode(&stored, bytes as u64, &Digest::of(&image)).unwrap() == image);
            }
        }
    }

    #[test]
    fn a_table_that_lies_is_refused_before_anything_is_allocated() {
        let image = image(3 * PART_BYTES);
        let stored = encode(&image).unwrap();
        let refused = |stored: &[u8]| {
            assert_eq!(table(stored, &image).unwrap_err().kind(), ErrorKind::Corrupt);
        };
        for length in [0, u32::MAX, PART_BYTES as u32 + 1] {
            let mut bytes = stored.clone();
            bytes[36..40].copy_from_slice(&length.to_le_bytes());
            refused(&bytes);
        }
        let mut bytes = stored.clone();
        bytes[50] ^= 1;
        refused(&bytes);
        // One byte more in one frame and one less in the next: each part says so.
        let length = |bytes: &[u8], at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let (first, second) = (length(&stored, 0), length(&stored, 36));
        let mut bytes = stored.clone();
        bytes[..4].copy_from_slice(&(first + 1).to_le_bytes());
        bytes[36..40].copy_from_slice(&(second - 1).to_le_bytes());
        let frames = table(&bytes, &image).unwrap();
        let frame = &frames.list()[0];
        let range = frame.stored.start as usize..frame.stored.end as usize;
        assert!(FrameReader::new().unwrap().open(frame, &bytes[range]).is_err());
        for (plain, all) in [(u64::MAX, u64::MAX), (1 << 40, 1 << 38), (1 << 30, 1000), (4096, 60)]
        {
            assert_eq!(table_bytes(plain, all).unwrap_err().kind(), ErrorKind::Corrupt);
        }
    }

    #[test]
    fn a_part_with_other_bytes_is_named() {
        let image = image(3 * PART_BYTES);
        let stored = encode(&image).unwrap();
        let frames = table(&stored, &image).unwrap();
        let mut reader = FrameReader::new().unwrap();
        let bytes_of =
            |frame: &Frame| stored[frame.stored.start as usize..frame.stored.end as usize].to_vec();
        let [first, second, _] = frames.list() else { panic!("three parts") };
        let mut other = image[PART_BYTES..2 * PART_BYTES].to_vec();
        other[1000] ^= 1;
        let right = zstd::bulk::compress(&other, LEVEL).unwrap();
        let long = zstd::bulk::compress(&[other.clone(), vec![0]].concat(), LEVEL).unwrap();
        for wrong in [bytes_of(first), other, right, long, b"no frame".to_vec(), Vec::new()] {
            let error = reader.open(second, &wrong).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            assert!(
                error.chain().to_string().contains("bytes 262144 to 524288"),
                "{}",
                error.chain()
            );
        }
        assert!(reader.open(second, &bytes_of(second)).is_ok());
    }

    #[test]
    fn an_image_of_zeros_is_no_bomb() {
        let image = vec![0; 20 * PART_BYTES];
        let stored = encode(&image).unwrap();
        assert!(stored.len() as u64 * MAX_RATIO >= image.len() as u64);
        assert!(stored.len() < image.len() / 10);
        assert!(table(&stored, &image).is_ok());
    }
}
