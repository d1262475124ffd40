//! A layer whose chunks have known bytes: what tests of the cache and of the engine put on a store.

use layer::chunk::{BLOCK_BYTES, Chunk, ChunkTable};
use layer::layer_file::LayerFile;
use layer::location::{Locations, Placement};
use layer::manifest::{LayerKind, Manifest};
use layer::{ChunkDigest, LayerId};
use store::Store;

/// Blocks of each chunk.
pub const CHUNK_BLOCKS: u32 = 4;
/// Bytes of each chunk.
pub const CHUNK_BYTES: usize = (CHUNK_BLOCKS * BLOCK_BYTES) as usize;

/// The bytes of a chunk.
pub type Plain = fn(usize) -> Vec<u8>;

/// Other bytes for each chunk, none of them zeros.
pub fn pattern(index: usize) -> Vec<u8> {
    let word = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..CHUNK_BYTES as u64 / 8)
        .flat_map(|at| (word ^ at.wrapping_mul(word)).to_le_bytes())
        .collect()
}

/// Other bytes for each chunk, which no codec makes smaller.
pub fn noise(index: usize) -> Vec<u8> {
    let mut bytes = vec![0; CHUNK_BYTES];
    blake3::Hasher::new().update(&index.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Puts a layer of so many chunks on the store, without their data.
pub fn put_layer(store: &Store, chunks: usize, plain: Plain) -> LayerId {
    let chunk = |index: usize| Chunk {
        start_block: index as u32 * CHUNK_BLOCKS,
        blocks: CHUNK_BLOCKS,
        digest: ChunkDigest::of(&plain(index)),
    };
    let chunk_table = ChunkTable::new((0..chunks).map(chunk).collect()).unwrap();
    let metadata = vec![7; 4096];
    let manifest = Manifest {
        directories: 1,
        ..Manifest::describing(LayerKind::Base, &chunk_table, &metadata)
    };
    let file = LayerFile { manifest, chunk_table, metadata };
    store.put_layer(&file.encode().unwrap()).unwrap().0
}

/// Puts all chunks into one pack, in order.
pub fn put_pack(store: &Store, chunks: usize, plain: Plain) -> Locations {
    let mut writer = store.pack_writer().unwrap();
    for bytes in (0..chunks).map(plain) {
        let (codec, payload) = store::codec::encode_chunk(&bytes, 1);
        writer.append(ChunkDigest::of(&bytes), codec, bytes.len() as u32, &payload).unwrap();
    }
    let sealed = writer.finish().unwrap();
    let place = |entry: &layer::pack::PackEntry| {
        let (offset, stored_bytes, codec) = (entry.offset, entry.stored_bytes, entry.codec);
        Some(Placement { pack: 0, offset, stored_bytes, codec })
    };
    Locations { packs: vec![sealed.id], placements: sealed.entries.iter().map(place).collect() }
}
