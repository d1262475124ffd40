//! The tree of a layer for planes that answer for names and inodes themselves: look-ups, listings, and
//! which bytes of a file lie where.
//!
//! Everything comes from the layer's own EROFS image, held in memory, so nothing here reads a file.
//! Numbers of inodes are those that the kernel's EROFS shows for the same layer.
//!
//! Locking: what was parsed is remembered for a while under one mutex a kind, held for look-ups only.

use layer::chunk::BLOCK_BYTES;
use layer::erofs::reader::{DirEntry, InodeRecord, Reader, Shape};
use layer::tree::{Body, FileData, Kind};
use layer::{Context, Error, Result};
use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Names of folders and extents of files that are remembered, each.
const REMEMBERED: usize = 256 << 10;

/// A folder as it is listed.
#[derive(Debug)]
pub struct Folder {
    /// The folder above; the root's is itself.
    pub parent: u64,
    /// Its names in order, without `.` and `..`.
    pub entries: Vec<DirEntry>,
}

/// Where bytes of a file come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// The layer's data space.
    Data {
        /// First byte in the data space.
        offset: u64,
        /// How many.
        bytes: u64,
    },
    /// The image.
    Inline(Vec<u8>),
    /// Nowhere: so many zeros.
    Hole(u64),
}

/// What a seek looks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seek {
    /// The next byte that is in no hole.
    Data,
    /// The next byte that is in one; the end of a file counts.
    Hole,
}

/// The tree of one layer.
#[derive(Debug)]
pub struct LayerTree {
    image: Vec<u8>,
    shape: Shape,
    files: Mutex<Recent<FileData>>,
    folders: Mutex<Recent<Folder>>,
}

impl LayerTree {
    /// Reads an image whose digest was checked. Fails with `Corrupt` or `Unsupported`.
    pub fn read(metadata: &Path) -> Result<Self> {
        let image = std::fs::read(metadata).context(|| format!("read {}", metadata.display()))?;
        Self::new(image)
    }

    /// The tree of this image.
    pub fn new(image: Vec<u8>) -> Result<Self> {
        let shape = Reader::parse(&image)?.shape();
        Ok(Self { image, shape, files: Mutex::default(), folders: Mutex::default() })
    }

    fn reader(&self) -> Reader<'_> {
        self.shape.reader(&self.image)
    }

    /// The number of the root.
    pub fn root(&self) -> u64 {
        self.reader().root()
    }

    /// How many inodes there are.
    pub fn inodes(&self) -> u64 {
        self.reader().inodes()
    }

    /// Blocks of image and data space, as `statfs` of EROFS counts them.
    pub fn blocks(&self) -> u64 {
        let image = (self.image.len() as u64).div_ceil(u64::from(BLOCK_BYTES));
        image + u64::from(self.reader().data_blocks())
    }

    /// One inode.
    pub fn inode(&self, number: u64) -> Result<InodeRecord> {
        self.reader().inode(number)
    }

    /// The inode that a folder names.
    pub fn lookup(&self, folder: u64, name: &[u8]) -> Result<Option<u64>> {
        self.reader().lookup(folder, name)
    }

    /// A folder's names.
    pub fn folder(&self, number: u64) -> Result<Arc<Folder>> {
        remembered(&self.folders, number, || {
            let reader = self.reader();
            let entries = reader.read_dir(number)?;
            // The image of a root may name no folder above it.
            let parent = reader.lookup(number, b"..")?.unwrap_or(number);
            let weight = entries.len();
            Ok((Folder { parent, entries }, weight))
        })
    }

    /// Where the content of a regular file is. `Invalid` for anything else.
    pub fn file(&self, number: u64) -> Result<Arc<FileData>> {
        remembered(&self.files, number, || match self.inode(number)?.inode.kind {
            Kind::Regular(file) => {
                let weight = match &file.body {
                    Body::Extents(extents) => extents.len(),
                    Body::Inline(bytes) => bytes.len() / size_of::<layer::tree::Extent>(),
                };
                Ok((file, weight))
            }
            _ => Err(Error::invalid(format!("inode {number} is no regular file"))),
        })
    }
}

/// Where some bytes of a file come from, in their order; what lies behind its end is not in it.
pub fn parts(file: &FileData, offset: u64, bytes: u64) -> Vec<Part> {
    let end = offset.saturating_add(bytes).min(file.size);
    let mut parts = Vec::new();
    let mut at = offset;
    match &file.body {
        Body::Inline(content) => {
            let range = at.min(end) as usize..end as usize;
            parts.extend(content.get(range).filter(|part| !part.is_empty()).map(|part| {
                at = end;
                Part::Inline(part.to_vec())
            }));
        }
        Body::Extents(extents) => {
            let block = u64::from(BLOCK_BYTES);
            let first = extents.partition_point(|extent| {
                (u64::from(extent.file_block) + u64::from(extent.blocks)) * block <= at
            });
            for extent in extents.iter().skip(first) {
                let start = u64::from(extent.file_block) * block;
                if at >= end || start >= end {
                    break;
                }
                if at < start {
                    parts.push(Part::Hole(start - at));
                    at = start;
                }
                let until = (start + u64::from(extent.blocks) * block).min(end);
                let offset = u64::from(extent.data_block) * block + (at - start);
                parts.push(Part::Data { offset, bytes: until - at });
                at = until;
            }
        }
    }
    if at < end {
        parts.push(Part::Hole(end - at));
    }
    parts
}

/// Where the next data or hole is, from `offset` on; `None` behind the end, and where no data follows.
pub fn seek(file: &FileData, offset: u64, wanted: Seek) -> Option<u64> {
    if offset >= file.size {
        return None;
    }
    let block = u64::from(BLOCK_BYTES);
    let mut at = offset;
    if let Body::Extents(extents) = &file.body {
        let first = extents.partition_point(|extent| {
            (u64::from(extent.file_block) + u64::from(extent.blocks)) * block <= at
        });
        for extent in extents.iter().skip(first) {
            let start = u64::from(extent.file_block) * block;
            match wanted {
                Seek::Data => return Some(at.max(start)).filter(|found| *found < file.size),
                Seek::Hole if at < start => return Some(at),
                Seek::Hole => at = start + u64::from(extent.blocks) * block,
            }
        }
        return match wanted {
            Seek::Data => None,
            Seek::Hole => Some(at.min(file.size)),
        };
    }
    match wanted {
        Seek::Data => Some(offset),
        Seek::Hole => Some(file.size),
    }
}

/// What was parsed last, the oldest first, within a weight.
#[derive(Debug)]
struct Recent<T> {
    items: VecDeque<(u64, usize, Arc<T>)>,
    weight: usize,
}

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Self { items: VecDeque::new(), weight: 0 }
    }
}

impl<T> Recent<T> {
    /// Looked through from the youngest; few enough that no index is needed.
    const MAX_ITEMS: usize = 64;

    fn find(&self, number: u64) -> Option<Arc<T>> {
        let found = self.items.iter().rev().find(|(known, _, _)| *known == number);
        found.map(|(_, _, item)| Arc::clone(item))
    }

    fn add(&mut self, number: u64, weight: usize, item: &Arc<T>) {
        self.items.push_back((number, weight, Arc::clone(item)));
        self.weight += weight;
        // The youngest stays, however heavy.
        while self.items.len() > 1
            && (self.items.len() > Self::MAX_ITEMS || self.weight > REMEMBERED)
        {
            if let Some((_, weight, _)) = self.items.pop_front() {
                self.weight -= weight;
            }
        }
    }
}

fn remembered<T>(
    recent: &Mutex<Recent<T>>,
    number: u64,
    parse: impl FnOnce() -> Result<(T, usize)>,
) -> Result<Arc<T>> {
    let lock = || recent.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = lock().find(number) {
        return Ok(found);
    }
    let (item, weight) = parse()?;
    let item = Arc::new(item);
    lock().add(number, weight, &item);
    Ok(item)
}

#[cfg(test)]
mod tests {
    use super::*;
    use layer::tree::Extent;

    const BLOCK: u64 = BLOCK_BYTES as u64;

    fn sparse() -> FileData {
        let extents = vec![
            Extent { file_block: 1, blocks: 2, data_block: 10 },
            Extent { file_block: 3, blocks: 1, data_block: 40 },
            Extent { file_block: 6, blocks: 1, data_block: 5 },
        ];
        FileData { size: 7 * BLOCK + 100, body: Body::Extents(extents) }
    }

    #[test]
    fn parts_follow_extents_and_holes_and_end_with_the_file() {
        let file = sparse();
        let data = |offset, bytes| Part::Data { offset, bytes };
        assert_eq!(parts(&file, BLOCK + 1, 10), [data(10 * BLOCK + 1, 10)]);
        assert_eq!(
            parts(&file, 0, u64::MAX),
            [
                Part::Hole(BLOCK),
                data(10 * BLOCK, 2 * BLOCK),
                data(40 * BLOCK, BLOCK),
                Part::Hole(2 * BLOCK),
                data(5 * BLOCK, BLOCK),
                Part::Hole(100),
            ]
        );
        assert_eq!(parts(&file, 7 * BLOCK + 90, 50), [Part::Hole(10)]);
        assert_eq!(parts(&file, 8 * BLOCK, 50), []);
        assert_eq!(parts(&file, u64::MAX, 50), []);
        let inline = FileData { size: 3, body: Body::Inline(b"abc".to_vec()) };
        assert_eq!(parts(&inline, 1, 50), [Part::Inline(b"bc".to_vec())]);
        assert_eq!(parts(&inline, 3, 50), []);
        assert_eq!(parts(&inline, 9, 50), []);
    }

    #[test]
    fn seeks_find_the_borders_of_holes() {
        let file = sparse();
        for (from, data, hole) in [
            (0, Some(BLOCK), Some(0)),
            (BLOCK, Some(BLOCK), Some(4 * BLOCK)),
            (3 * BLOCK + 7, Some(3 * BLOCK + 7), Some(4 * BLOCK)),
            (5 * BLOCK, Some(6 * BLOCK), Some(5 * BLOCK)),
            (6 * BLOCK, Some(6 * BLOCK), Some(7 * BLOCK)),
            (7 * BLOCK, None, Some(7 * BLOCK)),
            (7 * BLOCK + 100, None, None),
        ] {
            assert_eq!(seek(&file, from, Seek::Data), data, "data from {from}");
            assert_eq!(seek(&file, from, Seek::Hole), hole, "hole from {from}");
        }
        let inline = FileData { size: 3, body: Body::Inline(b"abc".to_vec()) };
        assert_eq!(seek(&inline, 1, Seek::Data), Some(1));
        assert_eq!(seek(&inline, 1, Seek::Hole), Some(3));
        assert_eq!(seek(&inline, 3, Seek::Hole), None);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let recent: Mutex<Recent<u64>> = Mutex::default();
        for number in 0..1000 {
            let item = remembered(&recent, number, || Ok((number, 1))).unwrap();
            assert_eq!(*item, number);
        }
        assert_eq!(recent.lock().unwrap().items.len(), Recent::<u64>::MAX_ITEMS);
        remembered(&recent, 5000, || Ok((0, REMEMBERED * 2))).unwrap();
        assert_eq!(recent.lock().unwrap().items.len(), 1);
        let again = remembered(&recent, 5000, || Err(Error::invalid("parsed twice"))).unwrap();
        assert_eq!(*again, 0);
    }
}
