//! Where the chunks of one layer lie in packs: a replaceable hint, parallel to the chunk table.
//!
//! It is no part of a layer's identity. A reader that finds it stale asks imaged; whatever it says,
//! the digest in the chunk table decides whether bytes are right.

use crate::chunk::MAX_CHUNK_BYTES;
use crate::error::{Error, Result};
use crate::id::PackId;
use crate::input::{Input, checked, put_checksum, put_varint};
use crate::pack::Codec;

const MAGIC: &[u8; 8] = b"LAMLOCS1";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 20;

/// The tag of a placement that lies right behind the one before it, in the same pack.
const FOLLOWS: u8 = 1;
/// The tag of a placement that names its pack and offset.
const SOMEWHERE: u8 = 2;

/// Where one chunk's stored bytes lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Index into [`Locations::packs`].
    pub pack: u32,
    /// Where the stored bytes start, from the start of the pack.
    pub offset: u64,
    /// Length of the stored bytes, 1..=[`MAX_CHUNK_BYTES`].
    pub stored_bytes: u32,
    /// How they become plain bytes.
    pub codec: Codec,
}

/// The places of all chunks of one layer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Locations {
    /// The packs that are named, without order.
    pub packs: Vec<PackId>,
    /// One per chunk, in the order of the chunk table; `None` for chunks that lie nowhere (zeros).
    pub placements: Vec<Option<Placement>>,
}

impl Locations {
    /// The pack and place of chunk `index`, when it lies in one.
    pub fn get(&self, index: usize) -> Option<(PackId, Placement)> {
        let placement = (*self.placements.get(index)?)?;
        Some((*self.packs.get(placement.pack as usize)?, placement))
    }

    /// The stored form. Fails with `Invalid` where a placement names a pack that is not listed or
    /// has a length that no chunk can have.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let count = |len: usize| {
            u32::try_from(len).map_err(|_| Error::invalid("locations: too many chunks or packs"))
        };
        let mut bytes = Vec::with_capacity(
            HEADER_BYTES + self.packs.len() * PackId::BYTES + self.placements.len() * 4,
        );
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&count(self.packs.len())?.to_le_bytes());
        bytes.extend_from_slice(&count(self.placements.len())?.to_le_bytes());
        for pack in &self.packs {
            bytes.extend_from_slice(&pack.0);
        }
        let mut before = None;
        for placement in &self.placements {
            let Some(placement) = placement else {
                bytes.push(0);
                continue;
            };
            self.check(placement).map_err(|why| Error::invalid(format!("locations: {why}")))?;
            let codec = placement.codec.number() << 4;
            if before == Some((placement.pack, placement.offset)) {
                bytes.push(FOLLOWS | codec);
            } else {
                bytes.push(SOMEWHERE | codec);
                put_varint(&mut bytes, u64::from(placement.pack));
                put_varint(&mut bytes, placement.offset);
            }
            put_varint(&mut bytes, u64::from(placement.stored_bytes));
            before = Some((placement.pack, placement.offset + u64::from(placement.stored_bytes)));
        }
        put_checksum(&mut bytes);
        Ok(bytes)
    }

    fn check(&self, placement: &Placement) -> std::result::Result<(), String> {
        if placement.pack as usize >= self.packs.len() {
            return Err(format!("pack {} of {}", placement.pack, self.packs.len()));
        }
        if placement.stored_bytes == 0 || placement.stored_bytes > MAX_CHUNK_BYTES {
            return Err(format!("a chunk of {} stored bytes", placement.stored_bytes));
        }
        if placement.offset > u64::MAX - u64::from(placement.stored_bytes) {
            return Err(format!("a chunk at {}", placement.offset));
        }
        Ok(())
    }

    /// The inverse of [`Locations::encode`]; errors are `Corrupt` or `Unsupported`.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut input = Input::new("locations", checked("locations", bytes)?);
        input.magic(MAGIC)?;
        input.version(VERSION)?;
        let packs = input.u32()? as usize;
        let placements = input.u32()? as usize;
        // Each pack takes 16 bytes and each placement at least one: no allocation beyond the input.
        if packs > input.left() / PackId::BYTES || placements > input.left() {
            return Err(input.corrupt(format!("{packs} packs and {placements} chunks do not fit")));
        }
        let mut locations =
            Self { packs: Vec::with_capacity(packs), placements: Vec::with_capacity(placements) };
        for _ in 0..packs {
            locations.packs.push(PackId(input.array()?));
        }
        let mut before = None;
        for _ in 0..placements {
            let placement = Self::decode_placement(&mut input, before)?;
            if let Some(placement) = &placement {
                locations.check(placement).map_err(|why| input.corrupt(why))?;
                let end = placement.offset + u64::from(placement.stored_bytes);
                before = Some((placement.pack, end));
            }
            locations.placements.push(placement);
        }
        input.end()?;
        Ok(locations)
    }

    fn decode_placement(
        input: &mut Input<'_>,
        before: Option<(u32, u64)>,
    ) -> Result<Option<Placement>> {
        let small = |input: &mut Input<'_>| {
            let value = input.varint()?;
            u32::try_from(value).map_err(|_| input.corrupt(format!("{value} is above 32 bits")))
        };
        let tag = input.u8()?;
        if tag == 0 {
            return Ok(None);
        }
        let codec = Codec::from_number(tag >> 4)?;
        let (pack, offset) = match (tag & 15, before) {
            (FOLLOWS, Some(place)) => place,
            (SOMEWHERE, _) => (small(input)?, input.varint()?),
            _ => return Err(input.corrupt(format!("tag {tag:#x}"))),
        };
        let stored_bytes = small(input)?;
        Ok(Some(Placement { pack, offset, stored_bytes, codec }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn placement() -> impl Strategy<Value = Option<Placement>> {
        let some = (0..3_u32, any::<u32>(), 1..=MAX_CHUNK_BYTES, any::<bool>()).prop_map(
            |(pack, offset, stored_bytes, zstd)| Placement {
                pack,
                offset: u64::from(offset) << 20,
                stored_bytes,
                codec: if zstd { Codec::Zstd } else { Codec::None },
            },
        );
        prop::option::of(some)
    }

    proptest! {
        #[test]
        fn locations_round_trip(
            mut placements in prop::collection::vec(placement(), 0..40),
            run in any::<bool>(),
        ) {
            if run {
                for index in 1..placements.len() {
                    if let (Some(before), Some(this)) = (placements[index - 1], &mut placements[index]) {
                        this.pack = before.pack;
                        this.offset = before.offset + u64::from(before.stored_bytes);
                    }
                }
            }
            let packs = (0..3).map(|byte| PackId([byte; 16])).collect();
            let locations = Locations { packs, placements };
            prop_assert_eq!(Locations::decode(&locations.encode().unwrap()).unwrap(), locations);
        }

        #[test]
        fn hostile_bytes_never_panic(mut body in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut head = MAGIC.to_vec();
            head.extend_from_slice(&VERSION.to_le_bytes());
            for counted in [Vec::new(), head] {
                let mut bytes = counted;
                bytes.append(&mut body.clone());
                let checksum = blake3::hash(&bytes);
                bytes.extend_from_slice(checksum.as_bytes());
                let _ = Locations::decode(&bytes);
            }
            body.truncate(30);
            prop_assert!(Locations::decode(&body).is_err());
        }
    }

    #[test]
    fn a_run_of_chunks_costs_few_bytes() {
        let placement = |index: u64| Placement {
            pack: 0,
            offset: 64 + index * 1000,
            stored_bytes: 1000,
            codec: Codec::Zstd,
        };
        let placements = (0..1000).map(|index| Some(placement(index))).collect();
        let locations = Locations { packs: vec![PackId([1; 16])], placements };
        assert!(locations.encode().unwrap().len() < 3100);
    }

    #[test]
    fn a_pack_that_is_not_listed_is_refused() {
        let lost = Placement { pack: 1, offset: 0, stored_bytes: 1, codec: Codec::Zstd };
        let locations = Locations { packs: vec![PackId([1; 16])], placements: vec![Some(lost)] };
        assert!(locations.encode().is_err());
    }
}
