//! From runs to one order: a pure function, the same on every machine.
//!
//! Runs cut the data space differently (readahead windows differ), so it is cut at all their borders
//! first. A piece's rank is the median of its ranks in the runs that touched it; pieces that less than
//! half of the runs touched come after all others.

use super::Run;
use crate::id::LayerId;
use std::collections::BTreeMap;

/// Some neighbouring blocks to fetch together; steps come in the order in which they are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Whose blocks.
    pub layer: LayerId,
    /// First block in the layer's data space.
    pub start_block: u32,
    /// How many.
    pub blocks: u32,
    /// The median of their place in the runs.
    pub rank: u32,
    /// The median of when they were touched, in milliseconds since a run began.
    pub at_ms: u32,
    /// How many runs touched them.
    pub runs: u32,
}

/// Ranks and times of one piece, one for each run that touched it.
type Seen = Vec<(u32, u32)>;

pub(super) fn order(runs: &[Run]) -> Vec<Step> {
    let mut borders: BTreeMap<LayerId, Vec<u32>> = BTreeMap::new();
    for run in runs {
        for touch in run.touches() {
            let of_layer = borders.entry(run.layers()[touch.layer as usize]).or_default();
            of_layer.extend([touch.start_block, touch.start_block + touch.blocks]);
        }
    }
    for of_layer in borders.values_mut() {
        of_layer.sort_unstable();
        of_layer.dedup();
    }
    let mut pieces: BTreeMap<(LayerId, u32), (u32, Seen)> = BTreeMap::new();
    for run in runs {
        for (rank, touch) in run.touches().iter().enumerate() {
            let layer = run.layers()[touch.layer as usize];
            let of_layer = borders.get(&layer).map_or(&[][..], Vec::as_slice);
            let first = of_layer.partition_point(|border| *border < touch.start_block);
            let end = touch.start_block + touch.blocks;
            for pair in of_layer[first..].windows(2).take_while(|pair| pair[0] < end) {
                let (_, seen) = pieces
                    .entry((layer, pair[0]))
                    .or_insert_with(|| (pair[1] - pair[0], Vec::new()));
                seen.push((rank as u32, touch.at_ms));
            }
        }
    }
    let mut steps: Vec<Step> = pieces
        .into_iter()
        .map(|((layer, start_block), (blocks, mut seen))| {
            seen.sort_unstable();
            let (rank, at_ms) = seen[(seen.len() - 1) / 2];
            Step { layer, start_block, blocks, rank, at_ms, runs: seen.len() as u32 }
        })
        .collect();
    let is_rare = |step: &Step| step.runs as usize * 2 < runs.len();
    // Stable: equal ranks stay in the order of layer and block.
    steps.sort_by_key(|step| (is_rare(step), step.rank, step.layer, step.start_block));
    join(steps)
}

/// Joins what follows itself.
fn join(steps: Vec<Step>) -> Vec<Step> {
    let mut joined: Vec<Step> = Vec::with_capacity(steps.len());
    for step in steps {
        match joined.last_mut() {
            Some(last)
                if last.layer == step.layer
                    && last.rank == step.rank
                    && last.runs == step.runs
                    && last.start_block + last.blocks == step.start_block =>
            {
                last.blocks += step.blocks;
            }
            _ => joined.push(step),
        }
    }
    joined
}
