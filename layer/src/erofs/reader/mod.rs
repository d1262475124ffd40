//! Reads EROFS metadata images: those of our writer, and of mkfs.erofs where they use no compression.
//!
//! The bytes are foreign. Every offset is checked before it is used, what is allocated is bounded by
//! the image's own size, directories that contain themselves are found. Nothing here is a judge of
//! the writer: the kernel and erofs-utils are.

mod directory;
mod inode;
mod superblock;
mod whole;
mod xattr;

use crate::erofs::format::{BLOCK, Superblock};
use crate::error::{Error, Result};
use crate::tree::{Inode, Tree};

/// An image whose superblock was checked.
#[derive(Debug)]
pub struct Reader<'a> {
    image: &'a [u8],
    superblock: Superblock,
    data_blocks: u32,
    /// Where the data device starts in the address space; 0 where it has no place in it.
    data_address: u32,
}

/// What the superblock of an image says: with the image, a [`Reader`] again at no cost. For those who
/// own the bytes and cannot keep a reader that borrows them.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    superblock: Superblock,
    data_blocks: u32,
    data_address: u32,
}

impl Shape {
    /// A reader of the image that this is the shape of. Of another image it reads nonsense or fails, as
    /// of any foreign bytes.
    pub fn reader(self, image: &[u8]) -> Reader<'_> {
        let Self { superblock, data_blocks, data_address } = self;
        Reader { image, superblock, data_blocks, data_address }
    }
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
    ///
    /// Fails with `Corrupt`, or with `Unsupported` for features that layers do not use.
    pub fn parse(image: &'a [u8]) -> Result<Self> {
        superblock::parse(image)
    }

    /// What the superblock says, without the image.
    pub fn shape(&self) -> Shape {
        let Self { superblock, data_blocks, data_address, .. } = *self;
        Shape { superblock, data_blocks, data_address }
    }

    /// The number of the root directory.
    pub fn root(&self) -> u64 {
        u64::from(self.superblock.root)
    }

    /// Blocks of the data device.
    pub fn data_blocks(&self) -> u32 {
        self.data_blocks
    }

    /// The number of inodes that the superblock tells.
    pub fn inodes(&self) -> u64 {
        self.superblock.inodes
    }

    /// One inode with its xattrs, link target, inlined content or extents.
    pub fn inode(&self, number: u64) -> Result<InodeRecord> {
        self.raw_inode(number)?.record()
    }

    /// The inode that a directory names, by binary search; `None` where it names none. `NotFound` is
    /// never the answer; a number that is no directory is `Invalid`.
    pub fn lookup(&self, directory: u64, name: &[u8]) -> Result<Option<u64>> {
        self.directory(directory)?.find(name)
    }

    /// All names of a directory in order, without `.` and `..`.
    pub fn read_dir(&self, directory: u64) -> Result<Vec<DirEntry>> {
        self.directory(directory)?.entries()
    }

    /// Visits every path (without a leading slash, the root's is empty) with its inode: a directory
    /// before what is in it, names in order. An inode with two names is visited twice.
    pub fn walk(&self, visit: &mut dyn FnMut(&[u8], &InodeRecord) -> Result<()>) -> Result<()> {
        whole::walk(self, visit)
    }

    /// The whole tree; hard links become entries with one index.
    pub fn to_tree(&self) -> Result<Tree> {
        whole::to_tree(self)
    }

    /// Reads every inode once and keeps nothing: whether the image is sound and made for a data space of
    /// this many blocks. Time and memory are bounded by the image's size.
    ///
    /// Fails with `Corrupt` or `Unsupported`, naming what is wrong.
    pub fn check(&self, data_blocks: u32) -> Result<()> {
        if self.data_blocks != data_blocks {
            return Err(Error::corrupt(format!(
                "EROFS image: its data device has {} blocks, the data space {data_blocks}",
                self.data_blocks
            )));
        }
        whole::check(self)
    }

    /// Bytes of the image, checked.
    fn bytes(&self, offset: u64, len: u64) -> Result<&'a [u8]> {
        usize::try_from(offset)
            .ok()
            .zip(usize::try_from(len).ok())
            .and_then(|(start, len)| self.image.get(start..start.checked_add(len)?))
            .ok_or_else(|| {
                Error::corrupt(format!("EROFS image: {len} bytes at {offset} lie outside of it"))
            })
    }

    fn blocks(&self, address: u32, count: u64) -> Result<&'a [u8]> {
        let bytes = count.checked_mul(BLOCK as u64).ok_or_else(|| {
            Error::corrupt(format!("EROFS image: {count} blocks at {address} lie outside of it"))
        })?;
        self.bytes(u64::from(address) * BLOCK as u64, bytes)
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// Bytes of a structure whose length was checked; zeros for what lies outside.
fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..at + N).and_then(|field| field.try_into().ok()).unwrap_or([0; N])
}

#[cfg(test)]
mod tests;
