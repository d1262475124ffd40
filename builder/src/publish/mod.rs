//! Where a build sends what it made: the seam between the builder and the image daemon.

mod images;

pub use images::ImagesPublisher;

use layer::pack::Codec;
use layer::{ChunkDigest, EnvId, LayerId, Result};

/// A chunk, compressed where that helped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedChunk {
    /// BLAKE3 of the plain bytes.
    pub digest: ChunkDigest,
    /// How `payload` is encoded.
    pub codec: Codec,
    /// Length of the plain bytes.
    pub plain_bytes: u32,
    /// The encoded bytes.
    pub payload: Vec<u8>,
}

/// Takes chunks, layers and environments. Called from several threads at once.
///
/// The order of a publish: [`missing`](Self::missing) and [`upload`](Self::upload) in any mixture,
/// then [`flush`](Self::flush), then the layer, then the environment. What was uploaded and never
/// named by a layer is invisible and collected later.
pub trait Publisher: Send + Sync {
    /// Which of these chunks does the store lack? One answer each, in order.
    fn missing(&self, digests: &[ChunkDigest]) -> Result<Vec<bool>>;
    /// Hands a chunk over; it may still be on its way when this returns.
    fn upload(&self, chunk: EncodedChunk) -> Result<()>;
    /// Returns when every uploaded chunk is safe on the store.
    fn flush(&self) -> Result<()>;
    /// Names a layer. `file` is an encoded layer file; all its chunks must have been flushed. `NotFound` when
    /// the publish has ended meanwhile, or chunks are gone: [`reopen`](Self::reopen) and upload them again.
    fn commit_layer(&self, file: &[u8]) -> Result<LayerId>;
    /// Begins anew where the publish may have ended (nobody spoke to the store for hours, a suspended
    /// machine). What was said to be on the store before counts no more; what is there still is found.
    fn reopen(&self) -> Result<()> {
        Ok(())
    }
    /// Names an environment by its canonical document.
    fn commit_environment(&self, document: &[u8]) -> Result<EnvId>;
}
