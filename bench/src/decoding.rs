//! What decoding and verifying a file's chunks costs by itself, without store, disk or kernel.

use anyhow::Context;
use layer::ChunkDigest;
use layer::pack::Codec;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};
use store::codec::{DEFAULT_LEVEL, decode_chunk_into, encode_chunk};

/// Bytes of a chunk of a large file.
pub const CHUNK_BYTES: usize = 32 << 10;
/// Chunks that are measured; together they are larger than a processor's caches.
const CHUNKS: u64 = 2048;
const CORES: usize = 2;

/// What it costs.
#[derive(Debug, Clone, Copy)]
pub struct Decoding {
    /// The middle of all chunks.
    pub chunk: Duration,
    /// Plain bytes a second of two cores.
    pub rate: f64,
}

struct Stored {
    codec: Codec,
    payload: Vec<u8>,
    digest: ChunkDigest,
}

/// Measures chunks from all over a file.
pub fn measure(path: &Path) -> anyhow::Result<Decoding> {
    let chunks = stored(path)?;
    let mut plain = vec![0; CHUNK_BYTES];
    let mut times = Vec::with_capacity(chunks.len());
    for chunk in &chunks {
        let start = Instant::now();
        decode_chunk_into(&chunk.payload, chunk.codec, &chunk.digest, &mut plain)?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    let chunk = times.get(times.len() / 2).copied().context("there are chunks")?;
    let start = Instant::now();
    std::thread::scope(|scope| -> anyhow::Result<()> {
        let threads: Vec<_> = (0..CORES).map(|_| scope.spawn(|| decode_all(&chunks))).collect();
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a decoding thread panicked"))??;
        }
        Ok(())
    })?;
    let bytes = CORES * chunks.len() * CHUNK_BYTES;
    Ok(Decoding { chunk, rate: bytes as f64 / start.elapsed().as_secs_f64() })
}

fn decode_all(chunks: &[Stored]) -> anyhow::Result<()> {
    let mut plain = vec![0; CHUNK_BYTES];
    for chunk in chunks {
        decode_chunk_into(&chunk.payload, chunk.codec, &chunk.digest, &mut plain)?;
    }
    Ok(())
}

fn stored(path: &Path) -> anyhow::Result<Vec<Stored>> {
    let file = File::open(path)?;
    let whole = file.metadata()?.len() / CHUNK_BYTES as u64;
    anyhow::ensure!(whole >= CHUNKS, "the file is too small to measure its decoding");
    let mut plain = vec![0; CHUNK_BYTES];
    (0..CHUNKS)
        .map(|index| {
            file.read_exact_at(&mut plain, index * whole / CHUNKS * CHUNK_BYTES as u64)?;
            let (codec, payload) = encode_chunk(&plain, DEFAULT_LEVEL);
            Ok(Stored { codec, payload, digest: ChunkDigest::of(&plain) })
        })
        .collect()
}
