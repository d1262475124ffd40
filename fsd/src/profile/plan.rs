//! From the steps of a profile to chunks of a layer: pure.

use layer::LayerId;
use layer::chunk::{BLOCK_BYTES, ChunkTable};
use layer::profile::Step;
use std::ops::Range;

/// Chunks of one layer, and their place among everything that is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Want {
    /// The lowest is wanted first.
    pub place: u32,
    /// Which chunks.
    pub chunks: Range<usize>,
}

/// The chunks of a layer that the steps name, each once, where it is named first. Blocks behind the end
/// of the layer are of another one or of none: they are passed over.
pub fn wants(steps: &[Step], layer: &LayerId, table: &ChunkTable) -> Vec<Want> {
    let block = u64::from(BLOCK_BYTES);
    let mut taken = vec![false; table.len()];
    let mut wants: Vec<Want> = Vec::new();
    for (place, step) in steps.iter().enumerate().filter(|(_, step)| step.layer == *layer) {
        let place = place as u32;
        let (offset, bytes) = (u64::from(step.start_block) * block, u64::from(step.blocks) * block);
        for chunk in table.covering(offset, bytes) {
            if std::mem::replace(&mut taken[chunk], true) {
                continue;
            }
            match wants.last_mut() {
                Some(last) if last.place == place && last.chunks.end == chunk => {
                    last.chunks.end += 1;
                }
                _ => wants.push(Want { place, chunks: chunk..chunk + 1 }),
            }
        }
    }
    wants
}

#[cfg(test)]
mod tests {
    use super::*;
    use layer::ChunkDigest;
    use layer::chunk::Chunk;

    #[test]
    fn each_chunk_is_wanted_once_and_strange_blocks_never() {
        let chunk = |index: u32| Chunk {
            start_block: index * 4,
            blocks: 4,
            digest: ChunkDigest([index as u8 + 1; 32]),
        };
        let table = ChunkTable::new((0..4).map(chunk).collect()).unwrap();
        let own = LayerId([1; 32]);
        let step = |layer, start_block, blocks| Step {
            layer,
            start_block,
            blocks,
            rank: 0,
            at_ms: 0,
            runs: 1,
        };
        let steps = [
            step(own, 9, 2),
            step(LayerId([2; 32]), 0, 16),
            step(own, 3, 7),
            step(own, 1000, 5),
            step(own, u32::MAX - 1, 1),
        ];
        let found = wants(&steps, &own, &table);
        assert_eq!(found, [Want { place: 0, chunks: 2..3 }, Want { place: 2, chunks: 0..2 }]);
    }
}
