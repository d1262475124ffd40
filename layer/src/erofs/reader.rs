//! Reads EROFS metadata images of the kind that the writer makes.

use crate::error::{Error, ErrorKind, Result};
use crate::tree::{Inode, Tree};

/// An image whose superblock was checked.
#[derive(Debug)]
pub struct Reader<'a> {
    image: &'a [u8],
}

/// What `stat` and the content need of one inode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InodeRecord {
    /// The inode's number.
    pub number: u64,
    /// Link count.
    pub links: u32,
    /// Size in bytes as `stat` tells.
    pub size: u64,
    /// The inode; the entries of a directory are left empty, see [`Reader::read_dir`].
    pub inode: Inode,
}

/// One name in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// The name.
    pub name: Vec<u8>,
    /// The inode's number.
    pub number: u64,
    /// The kind of the inode, as `DT_*` of readdir(3).
    pub file_type: u8,
}

impl<'a> Reader<'a> {
    /// Checks the superblock. Inodes are read when they are asked for.
    pub fn parse(image: &'a [u8]) -> Result<Self> {
        Ok(Self { image })
    }

    fn missing<T>(&self) -> Result<T> {
        let _ = self.image;
        Err(Error::new(ErrorKind::Unsupported, "the reader of EROFS images is not finished"))
    }

    /// The number of the root directory.
    pub fn root(&self) -> u64 {
        0
    }

    /// Blocks of the data device.
    pub fn data_blocks(&self) -> u32 {
        0
    }

    /// One inode.
    pub fn inode(&self, _number: u64) -> Result<InodeRecord> {
        self.missing()
    }

    /// The inode that a directory names, by binary search.
    pub fn lookup(&self, _directory: u64, _name: &[u8]) -> Result<Option<u64>> {
        self.missing()
    }

    /// All names of a directory in order, without `.` and `..`.
    pub fn read_dir(&self, _directory: u64) -> Result<Vec<DirEntry>> {
        self.missing()
    }

    /// Visits every path (without a leading slash, parents first, names in order) with its inode.
    pub fn walk(&self, _visit: &mut dyn FnMut(&[u8], &InodeRecord) -> Result<()>) -> Result<()> {
        self.missing()
    }

    /// The whole tree; hard links become entries with one index.
    pub fn to_tree(&self) -> Result<Tree> {
        self.missing()
    }
}
