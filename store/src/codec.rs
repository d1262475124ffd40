//! Chunks between their plain and their stored form.
//!
//! Each thread keeps one compressor and one decompressor, because making a zstd context costs more than a
//! small chunk. Nothing is trusted: the sizes are checked before anything is allocated, the output never
//! grows beyond the plain size that the caller knows, and the digest decides.

use layer::pack::Codec;
use layer::{ChunkDigest, Error, ErrorKind, Result};
use std::cell::RefCell;
use zstd::bulk::{Compressor, Decompressor};

/// The zstd level of packs: for chunks of 32 KiB it is 3 with matches from four bytes on, 1.5 % smaller.
pub const DEFAULT_LEVEL: i32 = 4;

/// Compression that saves less than one part in these many is not worth its decompression.
const MIN_SAVING_PARTS: usize = 32;

thread_local! {
    static ENCODER: RefCell<Option<Encoder>> = const { RefCell::new(None) };
    static DECODER: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
    static PLAIN: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

struct Encoder {
    level: i32,
    zstd: Compressor<'static>,
    scratch: Vec<u8>,
}

/// The stored form of `plain`: compressed where that saves something, else as it is.
pub fn encode_chunk(plain: &[u8], level: i32) -> (Codec, Vec<u8>) {
    let compressed = ENCODER.with_borrow_mut(|slot| compress(slot, plain, level));
    match compressed {
        Some(payload) => (Codec::Zstd, payload),
        None => (Codec::None, plain.to_vec()),
    }
}

/// Nothing when it does not pay; a failure of zstd is no more than that either.
fn compress(slot: &mut Option<Encoder>, plain: &[u8], level: i32) -> Option<Vec<u8>> {
    if slot.as_ref().is_none_or(|encoder| encoder.level != level) {
        *slot = Some(Encoder { level, zstd: Compressor::new(level).ok()?, scratch: Vec::new() });
    }
    let Encoder { zstd, scratch, .. } = slot.as_mut()?;
    // A buffer of the size that pays makes zstd stop as soon as it does not.
    let room = plain.len() - plain.len() / MIN_SAVING_PARTS;
    scratch.clear();
    scratch.reserve(room);
    let stored = zstd.compress_to_buffer(plain, scratch).ok()?;
    (stored < room).then(|| scratch[..stored].to_vec())
}

/// The plain form of a stored chunk, checked against its digest.
pub fn decode_chunk(
    payload: &[u8],
    codec: Codec,
    plain_bytes: u32,
    digest: &ChunkDigest,
) -> Result<Vec<u8>> {
    check_stored(payload, codec, plain_bytes)?;
    let mut plain = vec![0; plain_bytes as usize];
    decode_chunk_into(payload, codec, digest, &mut plain)?;
    Ok(plain)
}

/// Like [`decode_chunk`], into a buffer of exactly the plain size. What the buffer holds after an error is
/// undefined and must not be used.
pub fn decode_chunk_into(
    payload: &[u8],
    codec: Codec,
    digest: &ChunkDigest,
    plain: &mut [u8],
) -> Result<()> {
    let plain_bytes = u32::try_from(plain.len()).unwrap_or(u32::MAX);
    check_stored(payload, codec, plain_bytes)?;
    match codec {
        Codec::None => plain.copy_from_slice(payload),
        Codec::Zstd => {
            let written = DECODER.with_borrow_mut(|slot| decompress(slot, payload, plain))?;
            if written != plain.len() {
                return Err(Error::corrupt(format!(
                    "chunk {}: {written} bytes after decompression, not {}",
                    digest.short(),
                    plain.len()
                )));
            }
        }
    }
    if ChunkDigest::of(plain) != *digest {
        return Err(Error::corrupt(format!("chunk {}: wrong digest", digest.short())));
    }
    Ok(())
}

/// Whether a stored chunk decodes to its digest; keeps the plain bytes to itself, in a buffer of the thread.
pub fn verify_chunk(
    payload: &[u8],
    codec: Codec,
    plain_bytes: u32,
    digest: &ChunkDigest,
) -> Result<()> {
    check_stored(payload, codec, plain_bytes)?;
    PLAIN.with_borrow_mut(|plain| {
        plain.resize(plain.len().max(plain_bytes as usize), 0);
        decode_chunk_into(payload, codec, digest, &mut plain[..plain_bytes as usize])
    })
}

fn check_stored(payload: &[u8], codec: Codec, plain_bytes: u32) -> Result<()> {
    codec.check_sizes(u32::try_from(payload.len()).unwrap_or(u32::MAX), plain_bytes)
}

/// INVARIANT: zstd writes no further than the end of `plain`, whatever the frame says.
fn decompress(
    slot: &mut Option<Decompressor<'static>>,
    payload: &[u8],
    plain: &mut [u8],
) -> Result<usize> {
    let zstd = match slot {
        Some(zstd) => zstd,
        empty => empty.insert(Decompressor::new().map_err(|error| {
            Error::new(ErrorKind::Internal, "make a zstd context").with_source(error)
        })?),
    };
    zstd.decompress_to_buffer(payload, plain)
        .map_err(|error| Error::corrupt("decompress a chunk").with_source(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use layer::chunk::BLOCK_BYTES;
    use proptest::prelude::*;

    fn noise(len: usize, mut state: u64) -> Vec<u8> {
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn chunks_round_trip_and_any_flipped_bit_is_found(
            blocks in 1..20_u32,
            random_part in 0..=100_usize,
            seed: u64,
            level in 1..6,
            at: usize,
        ) {
            let size = (blocks * BLOCK_BYTES) as usize;
            let mut plain = noise(size * random_part / 100, seed);
            plain.resize(size, b'a');
            let digest = ChunkDigest::of(&plain);
            let (codec, mut payload) = encode_chunk(&plain, level);
            prop_assert!(payload.len() <= plain.len());
            let decode = |payload: &[u8]| decode_chunk(payload, codec, blocks * BLOCK_BYTES, &digest);
            prop_assert_eq!(&decode(&payload).unwrap(), &plain);
            verify_chunk(&payload, codec, blocks * BLOCK_BYTES, &digest).unwrap();
            let at = at % (payload.len() * 8);
            payload[at / 8] ^= 1 << (at % 8);
            // A bit that changes nothing (a reserved one of the frame) still gives the right bytes.
            let verified = verify_chunk(&payload, codec, blocks * BLOCK_BYTES, &digest);
            prop_assert_eq!(verified.is_ok(), decode(&payload).is_ok());
            if let Ok(other) = decode(&payload) {
                prop_assert_eq!(other, plain);
            }
        }
    }

    #[test]
    fn noise_is_stored_as_it_is() {
        let plain = noise(65_536, 1);
        assert_eq!(encode_chunk(&plain, 3), (Codec::None, plain));
    }

    #[test]
    fn a_decompression_bomb_is_refused_at_the_size_it_claimed() {
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 3).unwrap();
        let digest = ChunkDigest::of(&[0; 8192]);
        let error = decode_chunk(&bomb, Codec::Zstd, 8192, &digest).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        let small = zstd::bulk::compress(&[0; 4096], 3).unwrap();
        let error = decode_chunk(&small, Codec::Zstd, 8192, &digest).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        for absurd in [0, 5000, u32::MAX - 4095] {
            assert!(decode_chunk(&small, Codec::Zstd, absurd, &digest).is_err());
        }
    }
}
