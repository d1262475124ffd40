//! Chunks: the runs of a layer's data space that are compressed, hashed and fetched as one.
//!
//! The table says what the plain bytes are, never where they lie: placement is `location`'s and the
//! packs' own business, so moving or recompressing data changes no layer id.

use crate::error::{Error, Result};
use crate::id::{ChunkDigest, Digest};
use crate::input::Input;
use std::ops::Range;

/// Bytes in one block of a data space.
pub const BLOCK_BYTES: u32 = 4096;
/// The most blocks that one chunk may have (16 MiB).
pub const MAX_CHUNK_BLOCKS: u32 = 4096;
/// The most plain bytes that one chunk may have.
pub const MAX_CHUNK_BYTES: u32 = MAX_CHUNK_BLOCKS * BLOCK_BYTES;

const MAGIC: &[u8; 8] = b"LAMCHNK1";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 36;
/// The longest stored table: one of 2^32-1 chunks of one block.
pub(crate) const MAX_TABLE_BYTES: u64 = (HEADER_BYTES + ENTRY_BYTES * u32::MAX as usize) as u64;

impl ChunkDigest {
    /// Marks a chunk of nothing but zeros, which lies in no pack. No content has this BLAKE3 digest.
    pub const ZERO: Self = Self([0; 32]);
}

/// One run of blocks of a data space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// First block in the data space.
    pub start_block: u32,
    /// Length in blocks, 1..=[`MAX_CHUNK_BLOCKS`].
    pub blocks: u32,
    /// BLAKE3 of the plain bytes (`blocks * 4096` of them, zero-padded tails included), or
    /// [`ChunkDigest::ZERO`].
    pub digest: ChunkDigest,
}

impl Chunk {
    /// True for a chunk that is all zeros by its mark and lies in no pack.
    pub fn is_zero(&self) -> bool {
        self.digest == ChunkDigest::ZERO
    }

    /// The length of the plain bytes.
    pub fn plain_bytes(&self) -> u32 {
        self.blocks * BLOCK_BYTES
    }

    /// Where the plain bytes start in the data space, in bytes.
    pub fn offset(&self) -> u64 {
        u64::from(self.start_block) * u64::from(BLOCK_BYTES)
    }

    /// The plain bytes' range in the data space, in bytes.
    pub fn byte_range(&self) -> Range<u64> {
        self.offset()..self.offset() + u64::from(self.plain_bytes())
    }
}

/// All chunks of a layer, in the order of the data space.
///
/// INVARIANT: the chunks are contiguous from block 0, each has 1..=[`MAX_CHUNK_BLOCKS`] blocks, and
/// together they have at most 2^32-1.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ChunkTable {
    chunks: Vec<Chunk>,
}

impl ChunkTable {
    /// Takes chunks in order and checks the invariant.
    pub fn new(chunks: Vec<Chunk>) -> Result<Self> {
        let mut next = 0_u32;
        for (index, chunk) in chunks.iter().enumerate() {
            let refuse = |why: &str| Error::invalid(format!("chunk {index}: {why}"));
            if chunk.start_block != next {
                return Err(refuse(&format!("starts at block {}, not {next}", chunk.start_block)));
            }
            if chunk.blocks == 0 || chunk.blocks > MAX_CHUNK_BLOCKS {
                return Err(refuse(&format!(
                    "has {} blocks, not 1 to {MAX_CHUNK_BLOCKS}",
                    chunk.blocks
                )));
            }
            next = next
                .checked_add(chunk.blocks)
                .ok_or_else(|| refuse("the data space ends above block 2^32-1"))?;
        }
        Ok(Self { chunks })
    }

    /// The chunks in order.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// The number of chunks.
    pub fn len(&self) -> usize {
        self.chunks.len()
    }

    /// True for a layer without data.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Blocks in the data space.
    pub fn data_blocks(&self) -> u32 {
        self.chunks.last().map_or(0, |chunk| chunk.start_block + chunk.blocks)
    }

    /// Bytes in the data space.
    pub fn data_bytes(&self) -> u64 {
        u64::from(self.data_blocks()) * u64::from(BLOCK_BYTES)
    }

    /// The index of the chunk that holds a block.
    pub fn find(&self, block: u32) -> Option<usize> {
        if block >= self.data_blocks() {
            return None;
        }
        Some(self.chunks.partition_point(|chunk| chunk.start_block <= block) - 1)
    }

    /// The indexes of the chunks that a range of bytes touches; what lies behind the end of the data
    /// space is ignored.
    pub fn covering(&self, offset_bytes: u64, len_bytes: u64) -> Range<usize> {
        let end = offset_bytes.saturating_add(len_bytes).min(self.data_bytes());
        if offset_bytes >= end {
            return 0..0;
        }
        let first = self.chunks.partition_point(|chunk| chunk.byte_range().end <= offset_bytes);
        let last = self.chunks.partition_point(|chunk| chunk.offset() < end);
        first..last
    }

    /// The stored form.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.chunks.len() * ENTRY_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        // INVARIANT: every chunk has at least one block and there are at most 2^32-1 blocks.
        let count = u32::try_from(self.chunks.len()).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&count.to_le_bytes());
        for chunk in &self.chunks {
            bytes.extend_from_slice(&chunk.blocks.to_le_bytes());
            bytes.extend_from_slice(&chunk.digest.0);
        }
        bytes
    }

    /// The inverse of [`ChunkTable::encode`]; errors are `Corrupt` or `Unsupported`.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut input = Input::new("chunk table", bytes);
        input.magic(MAGIC)?;
        input.version(VERSION)?;
        let count = input.u32()? as usize;
        if input.left() / ENTRY_BYTES != count || !input.left().is_multiple_of(ENTRY_BYTES) {
            return Err(input.corrupt(format!("{count} chunks do not fill {} bytes", input.left())));
        }
        let mut start_block = 0_u32;
        let entries = input.take(input.left())?.as_chunks::<ENTRY_BYTES>().0.iter();
        let chunks = entries.map(|[a, b, c, d, digest @ ..]| {
            let (start, blocks) = (start_block, u32::from_le_bytes([*a, *b, *c, *d]));
            // An overflow leaves a start that `new` refuses.
            start_block = start.wrapping_add(blocks);
            Chunk { start_block: start, blocks, digest: ChunkDigest(*digest) }
        });
        Self::new(chunks.collect())
            .map_err(|error| Error::corrupt("chunk table").with_source(error))
    }

    /// BLAKE3 of the stored form; the manifest holds it.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.encode())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use proptest::prelude::*;

    fn table(lengths: &[u32]) -> ChunkTable {
        let mut start_block = 0;
        let chunks = lengths
            .iter()
            .map(|blocks| {
                let chunk = Chunk {
                    start_block,
                    blocks: *blocks,
                    digest: ChunkDigest::of(&start_block.to_le_bytes()),
                };
                start_block += blocks;
                chunk
            })
            .collect();
        ChunkTable::new(chunks).unwrap()
    }

    proptest! {
        #[test]
        fn tables_round_trip(lengths in prop::collection::vec(1..=MAX_CHUNK_BLOCKS, 0..50)) {
            let table = table(&lengths);
            prop_assert_eq!(ChunkTable::decode(&table.encode()).unwrap(), table);
        }

        #[test]
        fn hostile_bytes_never_panic(
            lengths in prop::collection::vec(1..9_u32, 0..9),
            at: usize,
            flip in 1..=255_u8,
            cut: usize,
        ) {
            let mut bytes = table(&lengths).encode();
            let at = at % bytes.len();
            bytes[at] ^= flip;
            let _ = ChunkTable::decode(&bytes);
            bytes.truncate(cut % (bytes.len() + 1));
            let _ = ChunkTable::decode(&bytes);
        }

        #[test]
        fn covering_is_what_a_scan_finds(
            lengths in prop::collection::vec(1..9_u32, 0..20),
            offset in 0..400_000_u64,
            len in 0..400_000_u64,
        ) {
            let table = table(&lengths);
            let scan: Vec<usize> = (0..table.len())
                .filter(|index| {
                    let range = table.chunks()[*index].byte_range();
                    len > 0 && range.start < offset + len && range.end > offset
                })
                .collect();
            prop_assert_eq!(table.covering(offset, len).collect::<Vec<_>>(), scan);
        }
    }

    #[test]
    fn find_knows_borders() {
        let table = table(&[2, 1, 5]);
        let found: Vec<_> = (0..9).map(|block| table.find(block)).collect();
        let wanted = [0, 0, 1, 2, 2, 2, 2, 2].map(Some);
        assert_eq!(found[..8], wanted);
        assert_eq!(found[8], None);
        assert_eq!(ChunkTable::default().find(0), None);
    }

    #[test]
    fn gaps_overlaps_empty_and_endless_chunks_are_refused() {
        let chunk = |start_block, blocks| Chunk { start_block, blocks, digest: ChunkDigest::ZERO };
        for bad in [
            vec![chunk(1, 1)],
            vec![chunk(0, 2), chunk(1, 1)],
            vec![chunk(0, 0)],
            vec![chunk(0, MAX_CHUNK_BLOCKS + 1)],
        ] {
            assert!(ChunkTable::new(bad).is_err());
        }
        let chunks = (0..=u32::MAX / MAX_CHUNK_BLOCKS)
            .map(|index| chunk(index * MAX_CHUNK_BLOCKS, MAX_CHUNK_BLOCKS))
            .collect();
        assert_eq!(ChunkTable::new(chunks).unwrap_err().kind(), ErrorKind::Invalid);
    }
}
