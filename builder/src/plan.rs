//! Where everything goes: a pure function from what the files are to chunks of a data space.
//!
//! No I/O, no threads, no randomness: equal input and options give an equal plan. Files come in path
//! order. Rules:
//! - equal files share one place;
//! - a large file is cut at fixed offsets from its own start, whole zero units are holes;
//! - small files fill bundles; a bundle ends where a file's own digest says so, between two sizes;
//!   it takes its place in the data space when it ends;
//! - referenced chunks of lower layers are placed whole, each once.

use crate::content::{ChunkRange, Content, Place};
use crate::digest::{Facts, Identity};
use crate::options::ChunkingOptions;
use layer::chunk::{BLOCK_BYTES, Chunk};
use layer::tree::{Body, Extent};
use layer::{ChunkDigest, Error, ErrorKind, Result};
use std::collections::HashMap;
use std::ops::Range;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Where everything goes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The data space in order.
    pub chunks: Vec<PlannedChunk>,
    /// What the chunks are filled from.
    pub parts: Vec<Part>,
    /// One for each file, in the order they came.
    pub bodies: Vec<Body>,
    /// Length of the data space.
    pub data_blocks: u32,
}

impl Plan {
    /// The chunks that hold these blocks of the data space.
    pub(crate) fn chunks_of(&self, blocks: Range<u32>) -> Range<usize> {
        let ends_before = |chunk: &PlannedChunk| chunk.start_block + chunk.blocks <= blocks.start;
        let first = self.chunks.partition_point(ends_before);
        first..self.chunks.partition_point(|chunk| chunk.start_block < blocks.end)
    }
}

/// A chunk to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedChunk {
    /// First block in the data space.
    pub start_block: u32,
    /// Length.
    pub blocks: u32,
    /// What it is filled from.
    pub fill: Fill,
}

impl PlannedChunk {
    /// Length of its plain bytes.
    pub(crate) fn plain_bytes(&self) -> u64 {
        u64::from(self.blocks) * BLOCK
    }

    /// How many plain bytes have to be read for it.
    pub(crate) fn read_bytes(&self) -> u64 {
        match self.fill {
            Fill::Parts(_) => self.plain_bytes(),
            Fill::Known(_) => 0,
        }
    }

    /// What it becomes once its digest is known.
    pub(crate) fn finished(&self, digest: ChunkDigest) -> Chunk {
        Chunk { start_block: self.start_block, blocks: self.blocks, digest }
    }
}

/// What a chunk is filled from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fill {
    /// Bytes of files: a range of [`Plan::parts`]; what they leave is zero.
    Parts(Range<usize>),
    /// It exists already.
    Known(ChunkDigest),
}

/// Bytes of one file in one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    /// Which file.
    pub file: usize,
    /// Where in the file.
    pub offset: u64,
    /// How many.
    pub bytes: u32,
    /// Where in the chunk.
    pub at: u32,
}

/// Decides where each file goes. `contents` and `facts` are parallel, in path order; `order` is the order
/// in which they take their places.
pub(crate) fn plan(
    contents: &[&Content],
    facts: &[Facts],
    order: &[usize],
    chunking: &ChunkingOptions,
) -> Result<Plan> {
    let mut planner = Planner {
        chunking,
        plan: Plan { bodies: vec![Body::Extents(Vec::new()); contents.len()], ..Plan::default() },
        known: HashMap::new(),
        bundle: Vec::new(),
        bundle_blocks: 0,
    };
    let mut places: HashMap<(&Identity, u64), usize> = HashMap::new();
    let mut repeats = Vec::new();
    for &file in order {
        let (content, facts) = (contents[file], &facts[file]);
        match (facts, &content.place) {
            (Facts::Inline(bytes), _) => {
                if !bytes.is_empty() {
                    planner.plan.bodies[file] = Body::Inline(bytes.clone());
                }
            }
            (Facts::Referenced, Place::Chunks(ranges)) => planner.refer(file, ranges)?,
            (Facts::Referenced, _) => {
                return Err(Error::new(ErrorKind::Internal, "a file without facts"));
            }
            (Facts::Digested(identity), _) => match places.get(&(identity, content.size)) {
                Some(&first) => repeats.push((file, first)),
                None => {
                    places.insert((identity, content.size), file);
                    planner.place(file, content.size, identity)?;
                }
            },
        }
    }
    planner.close_bundle()?;
    let mut plan = planner.plan;
    for (file, first) in repeats {
        plan.bodies[file] = plan.bodies[first].clone();
    }
    Ok(plan)
}

struct Planner<'a> {
    chunking: &'a ChunkingOptions,
    plan: Plan,
    /// Where chunks of lower layers were placed.
    known: HashMap<(ChunkDigest, u32), u32>,
    /// The files of the open bundle.
    bundle: Vec<Bundled>,
    bundle_blocks: u32,
}

/// A small file in the open bundle.
struct Bundled {
    file: usize,
    /// First block in the bundle.
    block: u32,
    bytes: u32,
}

impl Planner<'_> {
    fn place(&mut self, file: usize, size: u64, identity: &Identity) -> Result<()> {
        if identity.zeros == [(0, size)] {
            return Ok(());
        }
        if size < u64::from(self.chunking.bundle_file_bytes) {
            self.bundle(file, size, identity)
        } else {
            self.cut(file, size, identity)
        }
    }

    fn bundle(&mut self, file: usize, size: u64, identity: &Identity) -> Result<()> {
        let blocks = size.div_ceil(BLOCK) as u32;
        if self.bundle_blocks + blocks > self.chunking.bundle_max_bytes / BLOCK_BYTES {
            self.close_bundle()?;
        }
        // INVARIANT: a file in a bundle is shorter than `bundle_file_bytes`, so 32 bits count it.
        self.bundle.push(Bundled { file, block: self.bundle_blocks, bytes: size as u32 });
        self.bundle_blocks += blocks;
        let [a, b, c, d, ..] = identity.digest;
        let word = u32::from_le_bytes([a, b, c, d]);
        if self.bundle_blocks >= self.chunking.bundle_min_bytes.div_ceil(BLOCK_BYTES)
            && word.is_multiple_of(self.chunking.border_one_in)
        {
            self.close_bundle()?;
        }
        Ok(())
    }

    fn close_bundle(&mut self) -> Result<()> {
        if self.bundle.is_empty() {
            return Ok(());
        }
        let first_part = self.plan.parts.len();
        let files = std::mem::take(&mut self.bundle);
        let blocks = std::mem::take(&mut self.bundle_blocks);
        for &Bundled { file, block, bytes } in &files {
            self.plan.parts.push(Part { file, offset: 0, bytes, at: block * BLOCK_BYTES });
        }
        let start = self.chunk(blocks, Fill::Parts(first_part..self.plan.parts.len()))?;
        for Bundled { file, block, bytes } in files {
            self.plan.bodies[file] = Body::Extents(vec![Extent {
                file_block: 0,
                blocks: bytes.div_ceil(BLOCK_BYTES),
                data_block: start + block,
            }]);
        }
        Ok(())
    }

    fn cut(&mut self, file: usize, size: u64, identity: &Identity) -> Result<()> {
        let mut extents = Vec::new();
        for run in data_runs(size, &identity.zeros, self.chunking.hole_bytes(size)) {
            let data_block = self.plan.data_blocks;
            let mut offset = run.start;
            while offset < run.end {
                let bytes = (run.end - offset).min(u64::from(self.chunking.chunk_bytes)) as u32;
                let first = self.plan.parts.len();
                self.plan.parts.push(Part { file, offset, bytes, at: 0 });
                self.chunk(bytes.div_ceil(BLOCK_BYTES), Fill::Parts(first..first + 1))?;
                offset += u64::from(bytes);
            }
            extents.push(Extent {
                file_block: file_block(run.start)?,
                blocks: self.plan.data_blocks - data_block,
                data_block,
            });
        }
        self.plan.bodies[file] = Body::Extents(extents);
        Ok(())
    }

    fn refer(&mut self, file: usize, ranges: &[ChunkRange]) -> Result<()> {
        let mut extents: Vec<Extent> = Vec::new();
        for range in ranges {
            let chunk = &range.chunk;
            if range.chunk_block.checked_add(range.blocks).is_none_or(|end| end > chunk.blocks) {
                return Err(Error::corrupt("a file of a lower layer ends outside its chunk"));
            }
            let start = match self.known.get(&(chunk.digest, chunk.blocks)) {
                Some(&start) => start,
                None => {
                    let start = self.chunk(chunk.blocks, Fill::Known(chunk.digest))?;
                    self.known.insert((chunk.digest, chunk.blocks), start);
                    start
                }
            };
            let data_block = start + range.chunk_block;
            let extent = Extent { file_block: range.file_block, blocks: range.blocks, data_block };
            if !extents.last_mut().is_some_and(|last| last.absorb(&extent)) {
                extents.push(extent);
            }
        }
        self.plan.bodies[file] = Body::Extents(extents);
        Ok(())
    }

    fn chunk(&mut self, blocks: u32, fill: Fill) -> Result<u32> {
        let start_block = self.plan.data_blocks;
        self.plan.data_blocks = start_block.checked_add(blocks).ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "a layer of more than 2^32-1 blocks (16 TiB) of data",
            )
        })?;
        self.plan.chunks.push(PlannedChunk { start_block, blocks, fill });
        Ok(start_block)
    }
}

fn file_block(offset: u64) -> Result<u32> {
    u32::try_from(offset / BLOCK)
        .map_err(|_| Error::new(ErrorKind::Unsupported, "a file of more than 2^32 blocks (16 TiB)"))
}

/// What of a file is no hole: runs of units that are not wholly zero.
fn data_runs(size: u64, zeros: &[(u64, u64)], unit: u64) -> Vec<Range<u64>> {
    let mut runs = Vec::new();
    let mut start = 0;
    for &(offset, bytes) in zeros {
        let end = offset + bytes;
        let hole_start = offset.next_multiple_of(unit);
        let hole_end = if end == size { size } else { end / unit * unit };
        if hole_start < hole_end {
            if start < hole_start {
                runs.push(start..hole_start);
            }
            start = hole_end;
        }
    }
    if start < size {
        runs.push(start..size);
    }
    runs
}
