//! Presence: which chunks of a layer are whole in a node's cache, kept in a file of two slots.
//!
//! A state is written to the slot that does not hold the newest one, so a torn write loses at most
//! the newest state. A bit may be missing after a crash; it is never set without having been set.
//!
//! CRASH: the caller makes the chunk's bytes durable before it writes a state that has its bit; a
//! power cut between the two only costs another fetch.

use crate::id::LayerId;
use crate::input::{CHECKSUM_BYTES, Input, checked, put_checksum};

const MAGIC: &[u8; 8] = b"LAMPRES1";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 56;
const SLOT_ALIGNMENT: usize = 4096;

/// A set of chunks of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Presence {
    layer: LayerId,
    chunks: u32,
    generation: u64,
    /// INVARIANT: as many bytes as the bits need, and the bits behind the last chunk are zero.
    bits: Vec<u8>,
    count: u32,
}

/// One write that makes the present state durable: these bytes at this offset, then a flush.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotWrite {
    /// From the start of the file.
    pub offset: u64,
    /// What to write.
    pub bytes: Vec<u8>,
}

impl Presence {
    /// No chunk of `chunks` is present.
    pub fn new(layer: LayerId, chunks: u32) -> Self {
        let bits = vec![0; (chunks as usize).div_ceil(8)];
        Self { layer, chunks, generation: 0, bits, count: 0 }
    }

    /// Bytes of a presence file for this many chunks: two slots.
    pub fn file_bytes(chunks: u32) -> usize {
        2 * Self::slot_bytes(chunks)
    }

    fn slot_bytes(chunks: u32) -> usize {
        Self::used_bytes(chunks).next_multiple_of(SLOT_ALIGNMENT)
    }

    /// Bytes of a slot without the padding behind them.
    fn used_bytes(chunks: u32) -> usize {
        HEADER_BYTES + (chunks as usize).div_ceil(8) + CHECKSUM_BYTES
    }

    /// Where in the file the present generation lies.
    fn slot_offset(&self) -> usize {
        (self.generation % 2) as usize * Self::slot_bytes(self.chunks)
    }

    /// The layer.
    pub fn layer(&self) -> LayerId {
        self.layer
    }

    /// The number of chunks of the layer.
    pub fn chunks(&self) -> u32 {
        self.chunks
    }

    /// True where the chunk is present; false for an index that does not exist.
    pub fn get(&self, chunk: u32) -> bool {
        chunk < self.chunks && self.bits[chunk as usize / 8] & (1 << (chunk % 8)) != 0
    }

    /// Adds a chunk; true where it was not there before. An index that does not exist is ignored.
    pub fn set(&mut self, chunk: u32) -> bool {
        if chunk >= self.chunks || self.get(chunk) {
            return false;
        }
        self.bits[chunk as usize / 8] |= 1 << (chunk % 8);
        self.count += 1;
        true
    }

    /// Removes a chunk (it was evicted or found damaged); true where it was there.
    pub fn clear(&mut self, chunk: u32) -> bool {
        if !self.get(chunk) {
            return false;
        }
        self.bits[chunk as usize / 8] &= !(1 << (chunk % 8));
        self.count -= 1;
        true
    }

    /// How many chunks are present.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// True where every chunk is present.
    pub fn is_complete(&self) -> bool {
        self.count == self.chunks
    }

    /// The write that makes the present state the newest of the file. Each call counts the
    /// generation up and goes to the other slot.
    pub fn next_write(&mut self) -> SlotWrite {
        self.generation += 1;
        SlotWrite { offset: self.slot_offset() as u64, bytes: self.encode_slot() }
    }

    /// A whole new file with the present state in one slot and nothing in the other.
    pub fn encode(&self) -> Vec<u8> {
        let mut file = vec![0; Self::file_bytes(self.chunks)];
        let slot = self.encode_slot();
        let at = self.slot_offset();
        file[at..at + slot.len()].copy_from_slice(&slot);
        file
    }

    fn encode_slot(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::used_bytes(self.chunks));
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&self.chunks.to_le_bytes());
        bytes.extend_from_slice(&self.generation.to_le_bytes());
        bytes.extend_from_slice(&self.layer.0);
        bytes.extend_from_slice(&self.bits);
        put_checksum(&mut bytes);
        bytes
    }

    /// The newest whole state in a file. A file that is torn, foreign, of another layer or of another
    /// length gives the empty set.
    pub fn decode(layer: LayerId, chunks: u32, file: &[u8]) -> Self {
        Self::newest(layer, chunks, file).unwrap_or_else(|| Self::new(layer, chunks))
    }

    /// The newest whole state in a file, if it has one.
    pub fn newest(layer: LayerId, chunks: u32, file: &[u8]) -> Option<Self> {
        let slot_bytes = Self::slot_bytes(chunks);
        let used = Self::used_bytes(chunks);
        let slot = |index: usize| {
            let start = index * slot_bytes;
            let state = Self::decode_slot(layer, chunks, file.get(start..start + used)?)?;
            (state.generation % 2 == index as u64).then_some(state)
        };
        [slot(0), slot(1)].into_iter().flatten().max_by_key(|state| state.generation)
    }

    fn decode_slot(layer: LayerId, chunks: u32, slot: &[u8]) -> Option<Self> {
        let mut input = Input::new("presence", checked("presence", slot).ok()?);
        input.magic(MAGIC).ok()?;
        input.version(VERSION).ok()?;
        if input.u32().ok()? != chunks {
            return None;
        }
        let generation = input.u64().ok()?;
        if input.array().ok()? != layer.0 {
            return None;
        }
        let bits = input.take(input.left()).ok()?.to_vec();
        let spare = bits.len() * 8 - chunks as usize;
        if spare > 0 && bits.last()?.leading_zeros() < spare as u32 {
            return None;
        }
        let count = bits.iter().map(|byte| byte.count_ones()).sum();
        Some(Self { layer, chunks, generation, bits, count })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const LAYER: LayerId = LayerId([9; 32]);

    fn set_of(presence: &Presence) -> BTreeSet<u32> {
        (0..presence.chunks() + 9).filter(|chunk| presence.get(*chunk)).collect()
    }

    fn apply(file: &mut [u8], write: &SlotWrite, bytes: usize) {
        let start = write.offset as usize;
        file[start..start + bytes].copy_from_slice(&write.bytes[..bytes]);
    }

    proptest! {
        #[test]
        fn a_torn_write_gives_the_state_before_or_after_it(
            chunks in 1..40_000_u32,
            first in prop::collection::btree_set(any::<u32>(), 0..50),
            second in prop::collection::btree_set(any::<u32>(), 0..50),
            generations in 1..4,
            cut: usize,
        ) {
            let mut presence = Presence::new(LAYER, chunks);
            let mut file = presence.encode();
            for chunk in first {
                presence.set(chunk % chunks);
            }
            for _ in 0..generations {
                let write = presence.next_write();
                apply(&mut file, &write, write.bytes.len());
            }
            let before = set_of(&presence);
            prop_assert_eq!(&Presence::decode(LAYER, chunks, &file), &presence);
            for chunk in second {
                presence.set(chunk % chunks);
            }
            let write = presence.next_write();
            apply(&mut file, &write, cut % (write.bytes.len() + 1));
            let found = set_of(&Presence::decode(LAYER, chunks, &file));
            prop_assert!(found == before || found == set_of(&presence));
        }

        #[test]
        fn flipped_bytes_never_set_a_bit(chunks in 0..500_u32, at: usize, flip in 1..=255_u8) {
            let mut presence = Presence::new(LAYER, chunks);
            presence.set(chunks / 2);
            let mut file = presence.encode();
            let at = at % file.len();
            file[at] ^= flip;
            let found = Presence::decode(LAYER, chunks, &file);
            prop_assert!(set_of(&found).is_subset(&set_of(&presence)));
            let _ = Presence::decode(LAYER, chunks, &file[..at]);
        }
    }

    #[test]
    fn counts_and_completeness() {
        let mut presence = Presence::new(LAYER, 9);
        for chunk in 0..9 {
            assert!(!presence.is_complete());
            assert!(presence.set(chunk));
            assert!(!presence.set(chunk));
        }
        assert!(!presence.set(9));
        assert!(presence.is_complete());
        assert!(presence.clear(3));
        assert!(!presence.clear(3));
        assert_eq!(presence.count(), 8);
        assert!(Presence::new(LAYER, 0).is_complete());
    }

    #[test]
    fn foreign_files_are_empty_sets() {
        let mut presence = Presence::new(LAYER, 9);
        presence.set(1);
        let file = presence.encode();
        assert_eq!(Presence::decode(LayerId([8; 32]), 9, &file).count(), 0);
        assert_eq!(Presence::decode(LAYER, 10, &file).count(), 0);
        assert_eq!(Presence::decode(LAYER, 9, b"").count(), 0);
    }
}
