//! The layer file: manifest, chunk table and metadata image of one layer in one object.
//!
//! The content is canonical, its compression is not: files of one layer differ at most in how their
//! metadata image is stored. That part starts on a page border, so that it can be read without the rest.

use crate::chunk::{self, ChunkTable};
use crate::error::{Context, Error, Result};
use crate::id::{Digest, LayerId};
use crate::input::Input;
use crate::manifest::{self, Manifest};
use crate::pack::Codec;
use std::io::Read;
use std::ops::Range;

const MAGIC: &[u8; 8] = b"LAMLAYR1";
const VERSION: u32 = 1;
/// The metadata image is one zstd frame with the frame's digest behind it.
const COMPRESSED: u32 = 1;
const FIELDS_BYTES: usize = 40;
const DIGEST_BYTES: usize = 32;
const LEVEL: i32 = 3;
/// An image is at most this many times as long as its stored form, so that a small file cannot unpack
/// to more memory than anybody has.
const MAX_RATIO: u64 = 64;
const ALIGNMENT: u64 = 4096;

/// Bytes of the header; [`Layout::decode`] needs no more of the file.
pub const HEADER_BYTES: usize = 72;
/// The longest metadata image: what EROFS can address is far more than anybody should hold in memory.
pub const MAX_METADATA_BYTES: u64 = 1 << 36;

/// Everything that describes a layer, apart from its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerFile {
    /// Commits to the other two.
    pub manifest: Manifest,
    /// The data space cut into chunks.
    pub chunk_table: ChunkTable,
    /// The EROFS image.
    pub metadata: Vec<u8>,
}

/// Where the three parts of a layer file lie, in bytes from its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The canonical manifest.
    pub manifest: Range<u64>,
    /// The encoded chunk table.
    pub chunk_table: Range<u64>,
    /// The stored EROFS image; starts on a multiple of 4096 and ends the file.
    pub metadata: Range<u64>,
    /// How the image is stored.
    pub metadata_codec: Codec,
}

impl Layout {
    fn new(
        manifest_bytes: u64,
        chunk_table_bytes: u64,
        metadata_bytes: u64,
        metadata_codec: Codec,
    ) -> Result<Self> {
        if manifest_bytes > manifest::MAX_BYTES as u64
            || chunk_table_bytes > chunk::MAX_TABLE_BYTES
            || metadata_bytes > MAX_METADATA_BYTES
        {
            return Err(Error::corrupt("layer file: a part is longer than it can be"));
        }
        let manifest = HEADER_BYTES as u64..HEADER_BYTES as u64 + manifest_bytes;
        let chunk_table = manifest.end..manifest.end + chunk_table_bytes;
        let start = chunk_table.end.next_multiple_of(ALIGNMENT);
        let metadata = start..start + metadata_bytes;
        Ok(Self { manifest, chunk_table, metadata, metadata_codec })
    }

    /// Length of the whole file.
    pub fn file_bytes(&self) -> u64 {
        self.metadata.end
    }

    /// Reads the header from the first bytes of a layer file ([`HEADER_BYTES`] or more of them).
    pub fn decode(first: &[u8]) -> Result<Self> {
        let mut input = Input::new("layer file", first);
        input.magic(MAGIC)?;
        input.version(VERSION)?;
        let features = input.incompatible(COMPRESSED)?;
        let lengths = [input.u64()?, input.u64()?, input.u64()?];
        let digest = input.array::<32>()?;
        if blake3::hash(&first[..FIELDS_BYTES]).as_bytes() != &digest {
            return Err(Error::corrupt("layer file: wrong header checksum"));
        }
        let codec = if features & COMPRESSED == 0 { Codec::None } else { Codec::Zstd };
        Self::new(lengths[0], lengths[1], lengths[2], codec)
    }

    /// The plain image from its stored bytes. The caller takes no more of it than the manifest says and
    /// compares its digest.
    pub fn open_metadata<'a>(&self, stored: impl Read + 'a) -> Result<Box<dyn Read + 'a>> {
        match self.metadata_codec {
            Codec::None => Ok(Box::new(stored)),
            Codec::Zstd => {
                let plain = zstd::stream::read::Decoder::new(stored);
                Ok(Box::new(plain.context(|| "start zstd".to_owned())?.single_frame()))
            }
        }
    }

    /// `Corrupt` for an image that is longer than any stored form of this length may become.
    pub fn check_metadata_bytes(&self, metadata_bytes: u64) -> Result<()> {
        let stored = self.metadata.end - self.metadata.start;
        let fits = match self.metadata_codec {
            Codec::None => metadata_bytes == stored,
            Codec::Zstd => metadata_bytes <= stored * MAX_RATIO,
        };
        let text = || format!("layer file: {stored} bytes stand for an image of {metadata_bytes}");
        if fits { Ok(()) } else { Err(Error::corrupt(text())) }
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        let features = if self.metadata_codec == Codec::Zstd { COMPRESSED } else { 0 };
        bytes.extend_from_slice(&features.to_le_bytes());
        for part in [&self.manifest, &self.chunk_table, &self.metadata] {
            bytes.extend_from_slice(&(part.end - part.start).to_le_bytes());
        }
        let digest = blake3::hash(&bytes);
        bytes.extend_from_slice(digest.as_bytes());
        bytes
    }
}

impl LayerFile {
    /// The id of the layer.
    pub fn id(&self) -> LayerId {
        self.manifest.id()
    }

    /// The stored form, the image compressed where that saves something. Fails with `Invalid` where the
    /// manifest does not fit the other two parts.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check().map_err(Error::invalid)?;
        match compress(&self.metadata)? {
            Some(compressed) => self.encode_with(&compressed, Codec::Zstd),
            None => self.encode_with(&self.metadata, Codec::None),
        }
    }

    fn encode_with(&self, metadata: &[u8], codec: Codec) -> Result<Vec<u8>> {
        let manifest = self.manifest.canonical();
        let chunk_table = self.chunk_table.encode();
        let layout = Layout::new(
            manifest.len() as u64,
            chunk_table.len() as u64,
            metadata.len() as u64,
            codec,
        )
        .map_err(|error| Error::invalid("layer file").with_source(error))?;
        let mut bytes = layout.encode();
        bytes.reserve_exact(layout.file_bytes() as usize - bytes.len());
        bytes.extend_from_slice(&manifest);
        bytes.extend_from_slice(&chunk_table);
        bytes.resize(layout.metadata.start as usize, 0);
        bytes.extend_from_slice(metadata);
        Ok(bytes)
    }

    fn check(&self) -> std::result::Result<(), String> {
        let table = &self.chunk_table;
        let manifest = &self.manifest;
        let facts = [
            ("version", manifest.version == manifest::VERSION),
            ("chunks", manifest.chunks == table.len() as u64),
            ("data_blocks", manifest.data_blocks == table.data_blocks()),
            ("chunk_table_digest", manifest.chunk_table_digest == table.digest()),
            ("metadata_bytes", manifest.metadata_bytes == self.metadata.len() as u64),
            ("metadata_digest", manifest.metadata_digest == Digest::of(&self.metadata)),
        ];
        match facts.iter().find(|(_, holds)| !holds) {
            None => Ok(()),
            Some((field, _)) => Err(format!("layer file: the manifest's {field} is wrong")),
        }
    }

    /// The inverse of [`LayerFile::encode`]: checks every digest and refuses every other form.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let layout = Layout::decode(bytes)?;
        if layout.file_bytes() != bytes.len() as u64 {
            return Err(Error::corrupt(format!(
                "layer file: {} bytes, its header says {}",
                bytes.len(),
                layout.file_bytes()
            )));
        }
        let part = |range: &Range<u64>| &bytes[range.start as usize..range.end as usize];
        let manifest = Manifest::decode(part(&layout.manifest))?;
        let chunk_table = ChunkTable::decode(part(&layout.chunk_table))?;
        if part(&(layout.chunk_table.end..layout.metadata.start)).iter().any(|byte| *byte != 0) {
            return Err(Error::corrupt("layer file: padding is not zero"));
        }
        let metadata = decompress(&layout, part(&layout.metadata), manifest.metadata_bytes)?;
        let file = Self { manifest, chunk_table, metadata };
        file.check().map_err(Error::corrupt)?;
        Ok(file)
    }
}

/// One zstd frame and its digest; nothing where that saves nothing.
fn compress(plain: &[u8]) -> Result<Option<Vec<u8>>> {
    let mut stored =
        zstd::bulk::compress(plain, LEVEL).context(|| "compress a metadata image".to_owned())?;
    let digest = blake3::hash(&stored);
    stored.extend_from_slice(digest.as_bytes());
    let (stored_bytes, plain_bytes) = (stored.len() as u64, plain.len() as u64);
    let pays = stored_bytes < plain_bytes && stored_bytes * MAX_RATIO >= plain_bytes;
    Ok(pays.then_some(stored))
}

/// The plain image. No more is allocated than the stored bytes may stand for.
fn decompress(layout: &Layout, stored: &[u8], metadata_bytes: u64) -> Result<Vec<u8>> {
    layout.check_metadata_bytes(metadata_bytes)?;
    let frame = match layout.metadata_codec {
        Codec::None => return Ok(stored.to_vec()),
        Codec::Zstd => stored.len().checked_sub(DIGEST_BYTES).map(|at| stored.split_at(at)),
    };
    let frame = frame.filter(|(frame, digest)| blake3::hash(frame).as_bytes() == *digest);
    let (frame, _) =
        frame.ok_or_else(|| Error::corrupt("layer file: wrong digest of the image"))?;
    let mut plain = Vec::new();
    layout
        .open_metadata(frame)?
        .take(metadata_bytes + 1)
        .read_to_end(&mut plain)
        .map_err(|error| Error::corrupt("layer file: the image's frame").with_source(error))?;
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::Chunk;
    use crate::id::ChunkDigest;
    use crate::manifest::LayerKind;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn layer_file(chunks: u32, metadata: Vec<u8>) -> LayerFile {
        let chunk = |index: u32| Chunk {
            start_block: index * 2,
            blocks: 2,
            digest: ChunkDigest::of(&index.to_le_bytes()),
        };
        let chunk_table = ChunkTable::new((0..chunks).map(chunk).collect()).unwrap();
        let manifest = Manifest {
            annotations: BTreeMap::from([("made by".into(), "a test".into())]),
            directories: 1,
            files: 3,
            plain_bytes: 9,
            ..Manifest::describing(LayerKind::Base, &chunk_table, &metadata)
        };
        LayerFile { manifest, chunk_table, metadata }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn layer_files_round_trip_and_any_flipped_byte_is_found(
            chunks in 0..200_u32,
            noise in prop::collection::vec(any::<u8>(), 0..9000),
            repeats in 1..12_usize,
            at: usize,
            flip in 1..=255_u8,
        ) {
            // Noise is stored as it is, repeated noise compressed.
            let file = layer_file(chunks, noise.repeat(repeats));
            let mut bytes = file.encode().unwrap();
            prop_assert_eq!(&LayerFile::decode(&bytes).unwrap(), &file);
            let layout = Layout::decode(&bytes[..HEADER_BYTES]).unwrap();
            prop_assert_eq!(layout.metadata.start % 4096, 0);
            let mut plain = Vec::new();
            let stored = &bytes[layout.metadata.start as usize..];
            layout.open_metadata(stored).unwrap().read_to_end(&mut plain).unwrap();
            prop_assert_eq!(&plain, &file.metadata);
            let at = at % bytes.len();
            bytes[at] ^= flip;
            match LayerFile::decode(&bytes) {
                Err(_) => {}
                // A changed annotation or count gives another valid layer, under another id.
                Ok(other) => prop_assert_ne!(other.id(), file.id()),
            }
            bytes.truncate(at);
            prop_assert!(LayerFile::decode(&bytes).is_err());
        }
    }

    #[test]
    fn a_manifest_that_lies_about_a_part_is_not_encoded() {
        let mut file = layer_file(3, vec![1; 10]);
        file.metadata.push(0);
        assert!(file.encode().is_err());
        let mut file = layer_file(3, vec![1; 10]);
        file.manifest.data_blocks += 1;
        assert!(file.encode().is_err());
    }

    #[test]
    fn an_image_is_compressed_where_it_pays_and_both_forms_are_one_layer() {
        let words: Vec<u8> = (0..40_000_u32).flat_map(|at| (at / 7).to_le_bytes()).collect();
        let file = layer_file(3, words);
        let (small, plain) =
            (file.encode().unwrap(), file.encode_with(&file.metadata, Codec::None).unwrap());
        assert!(small.len() * 2 < plain.len());
        for bytes in [&small, &plain] {
            assert_eq!(LayerFile::decode(bytes).unwrap(), file);
        }
        assert_eq!(Layout::decode(&small).unwrap().metadata_codec, Codec::Zstd);
        // A bomb is stored as it is, and refused in the other form.
        let bomb = layer_file(3, vec![0; 1 << 20]);
        assert_eq!(Layout::decode(&bomb.encode().unwrap()).unwrap().metadata_codec, Codec::None);
        let mut stored = zstd::bulk::compress(&bomb.metadata, LEVEL).unwrap();
        let digest = blake3::hash(&stored);
        stored.extend_from_slice(digest.as_bytes());
        let lie = bomb.encode_with(&stored, Codec::Zstd).unwrap();
        assert_eq!(LayerFile::decode(&lie).unwrap_err().kind(), crate::ErrorKind::Corrupt);
    }
}
