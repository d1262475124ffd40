//! The layer file: manifest, chunk table and metadata image of one layer in one object.
//!
//! The content is canonical, its compression is not: files of one layer differ at most in how the frames of
//! their metadata image are compressed. That part starts on a page border, so that it can be read without the rest.

use crate::chunk::{self, ChunkTable};
use crate::error::{Error, Result};
use crate::frames::{self, Frames, MAX_METADATA_BYTES};
use crate::id::{Digest, LayerId};
use crate::input::Input;
use crate::manifest::{self, Manifest};
use std::ops::Range;

const MAGIC: &[u8; 8] = b"LAMLAYR1";
const VERSION: u32 = 1;
/// No incompatible feature is assigned.
const NO_FEATURES: u32 = 0;
const FIELDS_BYTES: usize = 40;
const ALIGNMENT: u64 = 4096;

/// Bytes of the header; [`Layout::decode`] needs no more of the file.
pub const HEADER_BYTES: usize = 72;

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
}

impl Layout {
    fn new(manifest_bytes: u64, chunk_table_bytes: u64, metadata_bytes: u64) -> Result<Self> {
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
        Ok(Self { manifest, chunk_table, metadata })
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
        input.incompatible(NO_FEATURES)?;
        let lengths = [input.u64()?, input.u64()?, input.u64()?];
        let digest = input.array::<32>()?;
        if blake3::hash(&first[..FIELDS_BYTES]).as_bytes() != &digest {
            return Err(Error::corrupt("layer file: wrong header checksum"));
        }
        Self::new(lengths[0], lengths[1], lengths[2])
    }

    /// Where the table of the image's frames is.
    pub fn frame_table(&self, metadata_bytes: u64) -> Result<Range<u64>> {
        let start = self.metadata.start;
        Ok(start..start + frames::table_bytes(metadata_bytes, self.metadata.end - start)?)
    }

    /// The frames of the image from their table; their ranges count from [`Layout::metadata`]'s start.
    pub fn frames(&self, manifest: &Manifest, table: &[u8]) -> Result<Frames> {
        let stored = self.metadata.end - self.metadata.start;
        Frames::decode(table, manifest.metadata_bytes, &manifest.metadata_digest, stored)
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&NO_FEATURES.to_le_bytes());
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
        self.encode_with(&frames::encode(&self.metadata)?)
    }

    fn encode_with(&self, metadata: &[u8]) -> Result<Vec<u8>> {
        let manifest = self.manifest.canonical();
        let chunk_table = self.chunk_table.encode();
        let layout =
            Layout::new(manifest.len() as u64, chunk_table.len() as u64, metadata.len() as u64)
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
        let stored = part(&layout.metadata);
        let metadata = frames::decode(stored, manifest.metadata_bytes, &manifest.metadata_digest)?;
        let file = Self { manifest, chunk_table, metadata };
        file.check().map_err(Error::corrupt)?;
        Ok(file)
    }
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
            let table = layout.frame_table(file.manifest.metadata_bytes).unwrap();
            let table = &bytes[table.start as usize..table.end as usize];
            prop_assert!(layout.frames(&file.manifest, table).is_ok());
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
    fn an_image_is_compressed_and_a_file_that_stands_for_too_much_is_refused() {
        let words: Vec<u8> = (0..40_000_u32).flat_map(|at| (at / 7).to_le_bytes()).collect();
        let file = layer_file(3, words);
        let bytes = file.encode().unwrap();
        assert!(bytes.len() * 2 < file.metadata.len());
        assert_eq!(LayerFile::decode(&bytes).unwrap(), file);
        let mut bomb = layer_file(3, vec![0; 4096]);
        let small = frames::encode(&bomb.metadata).unwrap();
        bomb.manifest.metadata_bytes = 1 << 30;
        let lie = bomb.encode_with(&small).unwrap();
        assert_eq!(LayerFile::decode(&lie).unwrap_err().kind(), crate::ErrorKind::Corrupt);
    }
}
