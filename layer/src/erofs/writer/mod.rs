//! Writes a tree as an EROFS metadata image with one data device.
//!
//! Three steps, each pure: `plan` checks the tree and decides the form of every inode, `place` gives
//! each a place, `encode` writes. Nothing depends on hash order, time or threads, so the same tree
//! gives the same bytes.
//!
//! ```text
//! block 0: 1024 zero bytes | superblock | device slot | inodes ... (slots of 32 bytes)
//! blocks:  inodes, each with its xattrs and then its inline tail or chunk array
//!          shared xattrs, right behind the last inode
//!          whole blocks of directories, long targets and inlined contents
//! from `blocks` on, only in address space: the data device
//! ```

mod content;
mod directory;
mod encode;
mod place;
mod plan;
mod xattr;

use crate::error::{Error, Result};
use crate::tree::{InodeIx, Tree, display_path};

/// A finished metadata image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// The image; a whole number of 4096-byte blocks.
    pub bytes: Vec<u8>,
    /// The number (`st_ino`) of each inode of the tree, by its index; 0 for inodes that are not part
    /// of the tree.
    pub inode_numbers: Vec<u64>,
}

/// Writes a tree whose data space has `data_blocks` blocks. The same tree gives the same bytes.
///
/// Fails with `Invalid`, naming the path, where the tree is malformed or holds what EROFS cannot.
pub fn write(tree: &Tree, data_blocks: u32) -> Result<Image> {
    let plan = plan::Plan::new(tree, data_blocks)?;
    let places = place::Places::new(&plan)?;
    encode::encode(&plan, &places)
}

/// An error about one inode of a tree.
fn refuse(tree: &Tree, inode: InodeIx, why: impl AsRef<str>) -> Error {
    Error::invalid(format!("{}: {}", display_path(&tree.path_of(inode)), why.as_ref()))
}

#[cfg(test)]
mod tests;
