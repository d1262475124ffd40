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
    /// Sorts the chunks of a table. Digests are spread evenly: a few pairs at most begin with the same bits,
    /// and most are in their place after one distribution.
    pub fn new(table: &ChunkTable) -> Self {
        let chunks = table.chunks().iter().enumerate().filter(|(_, chunk)| !chunk.is_zero());
        let pairs = chunks.map(|(place, chunk)| (beginning(&chunk.digest), place as u32));
        let bits = usize::BITS - table.len().leading_zeros();
        let bucket = |beginning: u64| (beginning >> (u64::BITS - bits.max(1))) as usize;
        let mut ends = vec![0_u32; 1 << bits.max(1)];
        pairs.clone().for_each(|(beginning, _)| ends[bucket(beginning)] += 1);
        let mut end = 0;
        for count in &mut ends {
            end += std::mem::replace(count, end);
        }
        let mut sorted = vec![(0, 0); end as usize];
        for (beginning, place) in pairs {
            let at = &mut ends[bucket(beginning)];
            sorted[*at as usize] = (beginning, place);
            *at += 1;
        }
        // Whatever the digests are, this is right; with these it has next to nothing to do.
        let mut start = 0;
        for end in ends {
            sorted[start..end as usize].sort_unstable();
            start = end as usize;
        }
        let (beginnings, chunks) = sorted.into_iter().unzip();
        Self { beginnings, chunks }
    }

    /// Where a chunk with this digest probably is: only the beginning was compared.
    pub fn find(&self, digest: &ChunkDigest) -> Option<usize> {
        let at = self.beginnings.binary_search(&beginning(digest)).ok()?;
        self.chunks.get(at).map(|place| *place as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use layer::chunk::Chunk;

    fn spread(index: u32) -> ChunkDigest {
        ChunkDigest::of(&index.to_le_bytes())
    }

    #[test]
    fn chunks_are_found_whatever_their_digests_are() {
        let crowded = |index: u32| {
            let mut digest = ChunkDigest([1; 32]);
            digest.0[4..8].copy_from_slice(&(u32::MAX - index).to_be_bytes());
            digest
        };
        let some_zeros =
            |index: u32| if index.is_multiple_of(3) { ChunkDigest::ZERO } else { spread(index) };
        for digest in [spread as fn(u32) -> ChunkDigest, crowded, some_zeros] {
            for count in [0, 1, 2, 3, 64, 1000] {
                let chunk = |index| Chunk { start_block: index, blocks: 1, digest: digest(index) };
                let table = ChunkTable::new((0..count).map(chunk).collect()).unwrap();
                let index = ChunkIndex::new(&table);
                for (place, chunk) in table.chunks().iter().enumerate() {
                    let found = index.find(&chunk.digest);
                    assert_eq!(found, (!chunk.is_zero()).then_some(place), "of {count}");
                }
                assert_eq!(index.find(&spread(5000)), None);
            }
        }
    }
}
