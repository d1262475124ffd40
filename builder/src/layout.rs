//! Laying out by an access profile: what a workload touches comes first, in the order of first touch.
//!
//! A profile names blocks of the layers it was recorded on; they are translated to paths and ranges of
//! files, which another version of the tree has too. Touched files come first in the data space, and the
//! touched chunks first in the packs, so that a prefetch is few large reads.
//!
//! INVARIANT: a layout changes where bytes lie and never which bytes a file has. Equal trees under equal
//! options and layouts give equal layer ids.

use crate::index::{Index, NodeIx, NodeKind};
use crate::plan::Plan;
use layer::erofs::reader::Reader;
use layer::layer_file::LayerFile;
use layer::profile::Profile;
use layer::tree::{Body, Kind};
use layer::{Digest, LayerId, Result};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

/// The annotation of a layer that was laid out by a profile: the profile's digest.
pub const ANNOTATION: &str = "lamella.layout-profile";

/// What comes first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    digest: Digest,
    touched: Vec<Touched>,
}

/// Some blocks of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Touched {
    /// Its path, without a leading slash.
    path: Vec<u8>,
    /// Which of its blocks.
    blocks: Range<u32>,
}

/// Where a piece of a file lies in a data space.
struct Piece {
    start_block: u32,
    blocks: u32,
    file_block: u32,
    path: usize,
}

/// All pieces of the files of one layer, by their place.
struct Pieces {
    paths: Vec<Vec<u8>>,
    sorted: Vec<Piece>,
}

impl Pieces {
    fn of(file: &LayerFile) -> Result<Self> {
        let (mut paths, mut sorted) = (Vec::new(), Vec::new());
        Reader::parse(&file.metadata)?.walk(&mut |path, record| {
            let Kind::Regular(data) = &record.inode.kind else { return Ok(()) };
            let Body::Extents(extents) = &data.body else { return Ok(()) };
            if extents.is_empty() {
                return Ok(());
            }
            for extent in extents {
                sorted.push(Piece {
                    start_block: extent.data_block,
                    blocks: extent.blocks,
                    file_block: extent.file_block,
                    path: paths.len(),
                });
            }
            paths.push(path.strip_prefix(b"/").unwrap_or(path).to_vec());
            Ok(())
        })?;
        // Stable: of files that share a place, the first in path order stands for all.
        sorted.sort_by_key(|piece| piece.start_block);
        Ok(Self { paths, sorted })
    }

    /// The pieces that a range of blocks meets; of those that share a place, the first.
    fn meeting(&self, blocks: Range<u32>) -> Vec<Touched> {
        let first = self.sorted.partition_point(|piece| piece.start_block < blocks.start);
        // A piece that starts before may reach into the range.
        let before = self.sorted[..first].iter().rev().take(1);
        let inside = self.sorted[first..].iter().take_while(|piece| piece.start_block < blocks.end);
        let mut last = None;
        let mut met = Vec::new();
        for piece in before.chain(inside) {
            let (from, to) = (
                piece.start_block.max(blocks.start),
                piece.start_block.saturating_add(piece.blocks).min(blocks.end),
            );
            if from >= to || last.replace(piece.start_block) == Some(piece.start_block) {
                continue;
            }
            let at = |block| piece.file_block.saturating_add(block - piece.start_block);
            met.push(Touched { path: self.paths[piece.path].clone(), blocks: at(from)..at(to) });
        }
        met
    }
}

impl Layout {
    /// Translates a profile with the layers that it was recorded on. A layer that `read` does not find
    /// is passed over.
    pub fn new(
        profile: &Profile,
        read: impl Fn(&LayerId) -> Result<Option<LayerFile>>,
    ) -> Result<Self> {
        let mut layers = BTreeMap::new();
        for id in profile.layers() {
            if let Some(file) = read(&id)? {
                layers.insert(id, Pieces::of(&file)?);
            }
        }
        let mut touched: Vec<Touched> = Vec::new();
        for step in profile.order() {
            let Some(pieces) = layers.get(&step.layer) else { continue };
            let end = step.start_block.saturating_add(step.blocks);
            touched.extend(pieces.meeting(step.start_block..end));
        }
        Ok(Self { digest: profile.digest(), touched })
    }

    /// The digest of the profile.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Whether it names nothing.
    pub fn is_empty(&self) -> bool {
        self.touched.is_empty()
    }

    /// What of a tree was touched: numbers of files in `nodes`, and which of their blocks, in order.
    pub(crate) fn places(&self, index: &Index, nodes: &[NodeIx]) -> Result<Vec<Place>> {
        let mut wanted: HashMap<&[u8], Option<usize>> =
            self.touched.iter().map(|touched| (&touched.path[..], None)).collect();
        let numbers: HashMap<NodeIx, usize> =
            nodes.iter().enumerate().map(|(number, ix)| (*ix, number)).collect();
        index.walk(|path, ix| {
            if matches!(index.node(ix).kind, NodeKind::Regular(_))
                && let Some(found) = wanted.get_mut(path)
            {
                *found = numbers.get(&ix).copied();
            }
            Ok(())
        })?;
        let placed = self.touched.iter().filter_map(|touched| {
            let file = wanted.get(&touched.path[..]).copied().flatten()?;
            Some(Place { file, blocks: touched.blocks.clone() })
        });
        Ok(placed.collect())
    }
}

/// Some blocks of a file of the tree that is built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// The file's number in path order.
    pub file: usize,
    /// Which of its blocks.
    pub blocks: Range<u32>,
}

/// The order in which files take their place in the data space: touched ones first.
pub(crate) fn file_order(places: &[Place], files: usize) -> Vec<usize> {
    let touched = places.iter().map(|place| place.file);
    first_then_rest(touched, files)
}

/// The order in which chunks are uploaded, and so lie in packs: touched ones first, among themselves as
/// in the data space, so that neighbours there are neighbours in the pack.
pub(crate) fn chunk_order(places: &[Place], plan: &Plan) -> Vec<usize> {
    let touched = places.iter().flat_map(|place| {
        let extents = match &plan.bodies[place.file] {
            Body::Extents(extents) => &extents[..],
            Body::Inline(_) => &[],
        };
        extents.iter().flat_map(|extent| {
            let from = place.blocks.start.max(extent.file_block);
            let to = place.blocks.end.min(extent.file_block + extent.blocks);
            let at = |block: u32| extent.data_block + (block - extent.file_block);
            if from < to { plan.chunks_of(at(from)..at(to)) } else { 0..0 }
        })
    });
    let touched: BTreeSet<usize> = touched.collect();
    first_then_rest(touched.into_iter(), plan.chunks.len())
}

fn first_then_rest(first: impl Iterator<Item = usize>, count: usize) -> Vec<usize> {
    let mut taken = vec![false; count];
    let mut order: Vec<usize> =
        first.filter(|number| !std::mem::replace(&mut taken[*number], true)).collect();
    order.extend((0..count).filter(|number| !taken[*number]));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_first_is_there_once_and_all_is_there() {
        assert_eq!(first_then_rest([3, 1, 3].into_iter(), 5), [3, 1, 0, 2, 4]);
        assert_eq!(first_then_rest(std::iter::empty(), 3), [0, 1, 2]);
    }

    #[test]
    fn blocks_of_a_data_space_are_blocks_of_files() {
        let piece =
            |start_block, blocks, file_block, path| Piece { start_block, blocks, file_block, path };
        let pieces = Pieces {
            paths: vec![b"a".to_vec(), b"b".to_vec(), b"same".to_vec()],
            sorted: vec![
                piece(0, 4, 0, 0),
                piece(4, 2, 8, 1),
                piece(4, 2, 0, 2),
                piece(6, 9, 2, 0),
            ],
        };
        let met = pieces.meeting(2..8);
        let shape: Vec<_> =
            met.iter().map(|touched| (&touched.path[..], touched.blocks.clone())).collect();
        assert_eq!(shape, [(&b"a"[..], 2..4), (b"b", 8..10), (b"a", 2..4)]);
        assert!(pieces.meeting(100..200).is_empty());
    }
}
