//! Where the chunks of one layer are, by digest: one index for whoever looks for a chunk on this node.
//!
//! Twelve bytes a chunk: the beginning of its digest and its place, sorted. It is made once in the life of
//! a process, as sorting the chunks of a large layer takes longer than mounting it.

use layer::ChunkDigest;
use layer::chunk::ChunkTable;

/// The chunks of one layer, those of zeros left out.
#[derive(Debug, Default)]
pub struct ChunkIndex {
    beginnings: Vec<u64>,
    chunks: Vec<u32>,
}

fn beginning(digest: &ChunkDigest) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = digest.0;
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

impl ChunkIndex {
    /// Sorts the chunks of a table.
    pub fn new(table: &ChunkTable) -> Self {
        let chunks = table.chunks().iter().enumerate().filter(|(_, chunk)| !chunk.is_zero());
        let mut pairs: Vec<(u64, u32)> =
            chunks.map(|(place, chunk)| (beginning(&chunk.digest), place as u32)).collect();
        pairs.sort_unstable();
        let (beginnings, chunks) = pairs.into_iter().unzip();
        Self { beginnings, chunks }
    }

    /// Where a chunk with this digest probably is: only the beginning was compared.
    pub fn find(&self, digest: &ChunkDigest) -> Option<usize> {
        let at = self.beginnings.binary_search(&beginning(digest)).ok()?;
        self.chunks.get(at).map(|place| *place as usize)
    }
}
