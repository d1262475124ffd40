//! Packs, stored chunks and the hints where they lie.

use crate::Target;
use crate::seal::{sealed, unsealed};
use layer::location::{Locations, Placement};
use layer::pack::{self, Codec, HEADER_BYTES, PackEntry, TRAILER_BYTES};
use layer::{ChunkDigest, PackId};

/// Header, footer and trailer of a pack. The input is the footer's entries, the fields of the trailer, and
/// the size that the pack has beside them.
pub const PACK: Target = Target {
    name: "pack",
    run: |data| {
        // The digest of a header ends it, and so seals it like any other file.
        let _ = pack::decode_header(&sealed(data));
        let Some((fields, rest)) = data.split_first_chunk::<32>() else { return };
        let Some((extra, footer)) = rest.split_first_chunk::<4>() else { return };
        let mut hasher = blake3::Hasher::new();
        hasher.update(fields).update(footer);
        let trailer = [&fields[..], hasher.finalize().as_bytes()].concat();
        let pack_bytes =
            footer.len() as u64 + TRAILER_BYTES as u64 + u64::from(u32::from_le_bytes(*extra));
        let Ok(trailer) = pack::decode_trailer(&trailer, pack_bytes) else { return };
        assert!(trailer.footer_offset + trailer.footer_bytes as u64 <= pack_bytes);
        if let Ok(entries) = pack::decode_footer(&trailer, footer) {
            let end = entries.iter().fold(HEADER_BYTES as u64, |at, entry| {
                assert_eq!(entry.offset, at, "chunks lie back to back");
                at + u64::from(entry.stored_bytes)
            });
            assert_eq!(end, trailer.footer_offset);
            assert_eq!(pack::encode_footer(&entries)[..footer.len()], *footer);
        }
    },
    seeds: || {
        let entry = |offset, stored_bytes, plain_bytes, codec| PackEntry {
            digest: ChunkDigest([7; 32]),
            offset,
            stored_bytes,
            plain_bytes,
            codec,
        };
        let start = HEADER_BYTES as u64;
        let lists = [
            vec![],
            vec![entry(start, 100, 8192, Codec::Zstd), entry(start + 100, 4096, 4096, Codec::None)],
        ];
        let seed = |entries: Vec<PackEntry>| {
            let tail = pack::encode_footer(&entries);
            let (footer, trailer) = tail.split_at(tail.len() - TRAILER_BYTES);
            let data: u32 = entries.iter().map(|entry| entry.stored_bytes).sum();
            [&trailer[..32], &(HEADER_BYTES as u32 + data).to_le_bytes(), footer].concat()
        };
        let header = unsealed(pack::encode_header(PackId([7; 16])));
        lists.into_iter().map(seed).chain([header]).collect()
    },
};

/// A stored chunk: the codec, the blocks that it should become, its stored bytes.
pub const CHUNK: Target = Target {
    name: "chunk",
    run: |data| {
        let Some(([codec, blocks], payload)) = data.split_first_chunk::<2>() else { return };
        let codec = if codec & 1 == 0 { Codec::None } else { Codec::Zstd };
        let plain_bytes = (u32::from(*blocks) + 1) * layer::chunk::BLOCK_BYTES;
        let digest = ChunkDigest::of(payload);
        if let Ok(plain) = store::codec::decode_chunk(payload, codec, plain_bytes, &digest) {
            assert_eq!(ChunkDigest::of(&plain), digest, "nothing unverified is given out");
        }
    },
    seeds: || {
        let text: Vec<u8> = (0..8192_u32).map(|at| (at / 97) as u8).collect();
        let seed = |plain: &[u8]| {
            let (codec, payload) = store::codec::encode_chunk(plain, 3);
            let codec = u8::from(codec == Codec::Zstd);
            [&[codec, (plain.len() / 4096 - 1) as u8], &payload[..]].concat()
        };
        vec![seed(&text), seed(&[0; 4096])]
    },
};

/// The hint where a layer's chunks lie.
pub const LOCATIONS: Target = Target {
    name: "locations",
    run: |data| {
        if let Ok(locations) = Locations::decode(&sealed(data)) {
            for (pack, _) in
                (0..locations.placements.len()).filter_map(|chunk| locations.get(chunk))
            {
                assert!(locations.packs.contains(&pack));
            }
            let encoded = locations.encode().expect("what was decoded can be encoded");
            assert_eq!(Locations::decode(&encoded).ok(), Some(locations));
        }
    },
    seeds: || {
        let placement =
            |pack, offset| Placement { pack, offset, stored_bytes: 4096, codec: Codec::None };
        let locations = Locations {
            packs: vec![PackId([1; 16]), PackId([2; 16])],
            placements: vec![
                Some(placement(0, 64)),
                None,
                Some(placement(1, 1 << 33)),
                Some(placement(0, 4160)),
            ],
        };
        locations.encode().map(unsealed).into_iter().collect()
    },
};
