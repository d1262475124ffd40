//! The files of a published layer, read from the store.
//!
//! Chunks are verified as they are read; some stay in memory, since small files share them.

use crate::oci::framing::Contents;
use crate::path;
use layer::chunk::{BLOCK_BYTES, ChunkTable};
use layer::erofs::reader::Reader;
use layer::layer_file::LayerFile;
use layer::location::Locations;
use layer::tree::{Body, FileData, InodeIx, Kind, Tree};
use layer::{Context, Error, LayerId, Result};
use std::collections::VecDeque;
use store::Store;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// What the chunks in memory have together, at most, apart from the newest.
const CACHE_BYTES: usize = 16 << 20;

/// A layer whose files can be read.
pub(super) struct LayerData<'a> {
    tree: Tree,
    /// The regular files in path order.
    files: Vec<InodeIx>,
    chunks: Chunks<'a>,
}

impl<'a> LayerData<'a> {
    pub(super) fn open(store: &'a Store, id: LayerId, file: LayerFile) -> Result<Self> {
        let tree = Reader::parse(&file.metadata)?.to_tree().context(|| format!("layer {id}"))?;
        let locations = match store.read_locations(&id)? {
            Some(locations) => locations,
            None if file.chunk_table.is_empty() => Locations::default(),
            None => return Err(Error::not_found(format!("no locations of layer {id}"))),
        };
        let mut files = Vec::new();
        let mut seen = vec![false; tree.inodes.len()];
        walk(&tree, |_, ix| {
            let is_file = matches!(tree.inodes[ix.index()].kind, Kind::Regular(_));
            if is_file && !std::mem::replace(&mut seen[ix.index()], true) {
                files.push(ix);
            }
            Ok(())
        })?;
        let chunks = Chunks {
            store,
            layer: id,
            table: file.chunk_table,
            locations,
            cached: VecDeque::new(),
            bytes: 0,
        };
        Ok(Self { tree, files, chunks })
    }

    pub(super) fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Fills `buffer` from `offset` of a file.
    pub(super) fn read(&mut self, file: InodeIx, offset: u64, buffer: &mut [u8]) -> Result<()> {
        match self.tree.inodes.get(file.index()).map(|inode| &inode.kind) {
            Some(Kind::Regular(data)) => self.chunks.read_file(data, offset, buffer),
            _ => Err(Error::corrupt("a file that the layer does not hold")),
        }
    }
}

impl Contents for LayerData<'_> {
    fn read_at(&mut self, file: u64, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let inode = usize::try_from(file).ok().and_then(|file| self.files.get(file).copied());
        let inode = inode.ok_or_else(|| Error::corrupt("a file that the layer does not hold"))?;
        self.read(inode, offset, buffer)
    }
}

/// Calls `visit` for every name of a layer's tree, in path order.
pub(super) fn walk(tree: &Tree, visit: impl FnMut(&[u8], InodeIx) -> Result<()>) -> Result<()> {
    path::walk(InodeIx(0), |ix| tree.entries(ix), visit)
}

/// The data space of a layer.
struct Chunks<'a> {
    store: &'a Store,
    layer: LayerId,
    table: ChunkTable,
    locations: Locations,
    /// The number of a chunk and its plain bytes, the newest first.
    cached: VecDeque<(usize, Vec<u8>)>,
    bytes: usize,
}

impl Chunks<'_> {
    fn read_file(&mut self, file: &FileData, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(buffer.len() as u64).filter(|end| *end <= file.size);
        let end = end.ok_or_else(|| Error::corrupt("a range that the file does not hold"))?;
        buffer.fill(0);
        match &file.body {
            Body::Inline(bytes) => {
                // The size of an inline file is that of its bytes.
                let bytes = bytes.get(offset as usize..end as usize);
                buffer.copy_from_slice(bytes.ok_or_else(|| Error::corrupt("an inline file"))?);
            }
            Body::Extents(extents) => {
                let first = extents.partition_point(|extent| {
                    (u64::from(extent.file_block) + u64::from(extent.blocks)) * BLOCK <= offset
                });
                for extent in &extents[first..] {
                    let begins = u64::from(extent.file_block) * BLOCK;
                    if begins >= end {
                        break;
                    }
                    let start = begins.max(offset);
                    let stop = (begins + u64::from(extent.blocks) * BLOCK).min(end);
                    let at = u64::from(extent.data_block) * BLOCK + (start - begins);
                    let into = (start - offset) as usize..(stop - offset) as usize;
                    self.read_space(at, &mut buffer[into])?;
                }
            }
        }
        Ok(())
    }

    /// Fills `buffer` from the data space.
    fn read_space(&mut self, mut at: u64, mut buffer: &mut [u8]) -> Result<()> {
        while !buffer.is_empty() {
            let outside = || Error::corrupt(format!("layer {}: a block outside", self.layer));
            let block = u32::try_from(at / BLOCK).map_err(|_| outside())?;
            let index = self.table.find(block).ok_or_else(outside)?;
            let chunk = self.table.chunks()[index];
            let from = (at - chunk.offset()) as usize;
            let length = buffer.len().min(chunk.plain_bytes() as usize - from);
            let (part, rest) = buffer.split_at_mut(length);
            if chunk.is_zero() {
                part.fill(0);
            } else {
                part.copy_from_slice(&self.chunk(index)?[from..from + length]);
            }
            at += length as u64;
            buffer = rest;
        }
        Ok(())
    }

    fn chunk(&mut self, index: usize) -> Result<&[u8]> {
        match self.cached.iter().position(|(cached, _)| *cached == index) {
            Some(0) => {}
            Some(at) => {
                if let Some(found) = self.cached.remove(at) {
                    self.cached.push_front(found);
                }
            }
            None => {
                let plain = self.load(index)?;
                self.bytes += plain.len();
                self.cached.push_front((index, plain));
                while self.bytes > CACHE_BYTES && self.cached.len() > 1 {
                    self.bytes -= self.cached.pop_back().map_or(0, |(_, plain)| plain.len());
                }
            }
        }
        Ok(self.cached.front().map_or(&[], |(_, plain)| plain))
    }

    fn load(&self, index: usize) -> Result<Vec<u8>> {
        let what = || format!("chunk {index} of layer {}", self.layer);
        let (pack, placement) = self
            .locations
            .get(index)
            .ok_or_else(|| Error::not_found(format!("{} is not located", what())))?;
        let mut payload = vec![0; placement.stored_bytes as usize];
        self.store.read_pack(&pack, placement.offset, &mut payload).context(what)?;
        let chunk = self.table.chunks()[index];
        let codec = placement.codec;
        store::codec::decode_chunk(&payload, codec, chunk.plain_bytes(), &chunk.digest)
            .context(what)
    }
}
