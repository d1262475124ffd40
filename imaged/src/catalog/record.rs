//! What the catalog's bytes mean. Nothing here is a format that others read: a change raises
//! [`CATALOG_VERSION`], and a catalog of another version is made anew.

use layer::pack::{Codec, PackEntry};
use layer::{Error, LayerId, PackId, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The version of everything in this file.
pub(super) const CATALOG_VERSION: &str = "2";

/// Where a chunk lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkPlace {
    pub(crate) pack: PackId,
    /// Its number in the pack, from 0.
    pub(crate) ordinal: u32,
    pub(crate) offset: u64,
    pub(crate) stored_bytes: u32,
    pub(crate) plain_bytes: u32,
    pub(crate) codec: Codec,
}

impl ChunkPlace {
    const BYTES: usize = 37;

    pub(crate) fn new(pack: PackId, ordinal: u32, entry: &PackEntry) -> Self {
        let PackEntry { offset, stored_bytes, plain_bytes, codec, .. } = *entry;
        Self { pack, ordinal, offset, stored_bytes, plain_bytes, codec }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::BYTES);
        bytes.extend_from_slice(self.pack.as_bytes());
        bytes.extend_from_slice(&self.offset.to_le_bytes());
        bytes.extend_from_slice(&self.stored_bytes.to_le_bytes());
        bytes.extend_from_slice(&self.plain_bytes.to_le_bytes());
        bytes.push(self.codec.number());
        bytes.extend_from_slice(&self.ordinal.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let bytes: &[u8; Self::BYTES] =
            bytes.try_into().map_err(|_| Error::corrupt("catalog: place of a chunk"))?;
        let (pack, rest) = bytes.split_at(PackId::BYTES);
        let number = |range: std::ops::Range<usize>| {
            rest[range].iter().rev().fold(0_u64, |value, byte| value << 8 | u64::from(*byte))
        };
        Ok(Self {
            pack: PackId::from_slice(pack)?,
            ordinal: number(17..21) as u32,
            offset: number(0..8),
            stored_bytes: number(8..12) as u32,
            plain_bytes: number(12..16) as u32,
            codec: Codec::from_number(rest[16])?,
        })
    }
}

/// What a pack holds, as its footer says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PackRecord {
    pub(crate) chunks: u64,
    pub(crate) stored_bytes: u64,
}

impl PackRecord {
    pub(crate) fn of(entries: &[PackEntry]) -> Self {
        let stored_bytes = entries.iter().map(|entry| u64::from(entry.stored_bytes)).sum();
        Self { chunks: entries.len() as u64, stored_bytes }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        [self.chunks.to_le_bytes(), self.stored_bytes.to_le_bytes()].concat()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let (Some((chunks, rest)), true) = (bytes.split_first_chunk(), bytes.len() == 16) else {
            return Err(Error::corrupt("catalog: record of a pack"));
        };
        let stored_bytes = rest.first_chunk().copied().unwrap_or_default();
        Ok(Self {
            chunks: u64::from_le_bytes(*chunks),
            stored_bytes: u64::from_le_bytes(stored_bytes),
        })
    }
}

/// What a listing says about a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LayerRecord {
    pub(crate) id: LayerId,
    pub(crate) kind: String,
    pub(crate) files: u64,
    pub(crate) plain_bytes: u64,
    pub(crate) stored_bytes: u64,
    pub(crate) metadata_bytes: u64,
    pub(crate) chunks: u64,
    pub(crate) annotations: BTreeMap<String, String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_round_trip() {
        let place = ChunkPlace {
            pack: PackId([3; 16]),
            ordinal: 70_001,
            offset: 1 << 40 | 7,
            stored_bytes: 70_000,
            plain_bytes: 1 << 20,
            codec: Codec::Zstd,
        };
        assert_eq!(ChunkPlace::decode(&place.encode()).unwrap(), place);
        assert!(ChunkPlace::decode(&place.encode()[1..]).is_err());
    }
}
