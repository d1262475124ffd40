//! A file tree as values: what an image writer is given and what a reader of images gives back.
//!
//! It holds no content but inlined bytes; where content lies in the data space is said by extents.
//! Names, targets and values are bytes, as in the kernel.

use crate::chunk::BLOCK_BYTES;
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The index of an inode in its [`Tree`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InodeIx(pub u32);

impl InodeIx {
    /// The root of every tree.
    pub const ROOT: Self = Self(0);

    /// As an index into [`Tree::inodes`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Seconds and nanoseconds since 1970; the nanoseconds always count forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp {
    /// Seconds, negative before 1970.
    pub secs: i64,
    /// 0..1_000_000_000.
    pub nanos: u32,
}

/// One extended attribute.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Xattr {
    /// The full name, `user.comment`; any bytes but zero.
    pub name: Vec<u8>,
    /// Any bytes.
    pub value: Vec<u8>,
}

/// The numbers of a device node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rdev {
    /// 12 bits.
    pub major: u32,
    /// 20 bits.
    pub minor: u32,
}

impl Rdev {
    /// A character device with these numbers is overlayfs's whiteout.
    pub const WHITEOUT: Self = Self { major: 0, minor: 0 };
}

/// A run of a file's blocks that lies contiguously in the data space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    /// First block in the file.
    pub file_block: u32,
    /// Length in blocks, at least 1.
    pub blocks: u32,
    /// First block in the data space.
    pub data_block: u32,
}

impl Extent {
    /// Takes `next` in where it goes on right behind this one, in the file and in the data space; false
    /// where it does not.
    pub fn absorb(&mut self, next: &Self) -> bool {
        let behind = |start: u32| u64::from(start) + u64::from(self.blocks);
        let goes_on = behind(self.file_block) == u64::from(next.file_block)
            && behind(self.data_block) == u64::from(next.data_block);
        if goes_on {
            self.blocks += next.blocks;
        }
        goes_on
    }
}

/// Where a regular file's content is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Body {
    /// In the image itself; as long as the file.
    Inline(Vec<u8>),
    /// In the data space. Ordered by `file_block`, without overlaps; gaps are holes.
    Extents(Vec<Extent>),
}

/// A regular file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FileData {
    /// Bytes, as `stat` tells.
    pub size: u64,
    /// Where the content is.
    pub body: Body,
}

/// What an inode is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// Names (without `.` and `..`) and their inodes.
    Directory(BTreeMap<Vec<u8>, InodeIx>),
    /// A file with content.
    Regular(FileData),
    /// The target.
    Symlink(Vec<u8>),
    /// A character device.
    CharDevice(Rdev),
    /// A block device.
    BlockDevice(Rdev),
    /// A named pipe.
    Fifo,
    /// A Unix socket.
    Socket,
}

/// One inode. Its link count is derived from the directories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inode {
    /// Permission, setuid, setgid and sticky bits: 0..=0o7777.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last change of the content.
    pub mtime: Timestamp,
    /// Extended attributes, each name once.
    pub xattrs: Vec<Xattr>,
    /// What it is.
    pub kind: Kind,
}

/// The extended attribute by which overlayfs lets a directory hide what lies below it.
pub const OPAQUE_XATTR: &[u8] = b"trusted.overlay.opaque";

impl Inode {
    /// True for a directory that hides what lower layers have at its path.
    pub fn is_opaque(&self) -> bool {
        self.xattrs.iter().any(|xattr| xattr.name == OPAQUE_XATTR && xattr.value == b"y")
    }

    /// True for overlayfs's whiteout.
    pub fn is_whiteout(&self) -> bool {
        self.kind == Kind::CharDevice(Rdev::WHITEOUT)
    }
}

/// A file tree: inode 0 is the root directory; a hard link is a second entry with the same index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    /// All inodes; those that no directory names are not part of the tree.
    pub inodes: Vec<Inode>,
}

impl Tree {
    /// A tree with only a root.
    pub fn new(root: Inode) -> Self {
        Self { inodes: vec![root] }
    }

    /// Adds an inode that no directory names yet. Fails above 2^32-1 inodes.
    pub fn add(&mut self, inode: Inode) -> Result<InodeIx> {
        let index = u32::try_from(self.inodes.len())
            .map_err(|_| Error::invalid("a tree has more than 2^32-1 inodes"))?;
        self.inodes.push(inode);
        Ok(InodeIx(index))
    }

    /// Names an inode in a directory; gives back what had the name before. Fails where `directory`
    /// is none.
    pub fn link(
        &mut self,
        directory: InodeIx,
        name: Vec<u8>,
        inode: InodeIx,
    ) -> Result<Option<InodeIx>> {
        match self.inodes.get_mut(directory.index()).map(|inode| &mut inode.kind) {
            Some(Kind::Directory(entries)) => Ok(entries.insert(name, inode)),
            _ => Err(Error::invalid(format!("inode {} is no directory", directory.0))),
        }
    }

    /// One inode.
    pub fn get(&self, index: InodeIx) -> Option<&Inode> {
        self.inodes.get(index.index())
    }

    /// The entries of a directory; `None` for everything else.
    pub fn entries(&self, index: InodeIx) -> Option<&BTreeMap<Vec<u8>, InodeIx>> {
        match &self.get(index)?.kind {
            Kind::Directory(entries) => Some(entries),
            _ => None,
        }
    }

    /// The inode at a path of names separated by `/`; symbolic links are not followed.
    pub fn find(&self, path: &[u8]) -> Option<InodeIx> {
        path.split(|byte| *byte == b'/')
            .filter(|name| !name.is_empty())
            .try_fold(InodeIx::ROOT, |at, name| self.entries(at)?.get(name).copied())
    }

    /// Checks the shape and derives the link counts, one per inode; 0 for inodes that the root does
    /// not reach. Directories count as in the kernel: 2, and one for each directory in them.
    ///
    /// Fails with `Invalid` where the root is no directory, an index does not exist, or a directory
    /// has two names or is its own ancestor.
    pub fn link_counts(&self) -> Result<Vec<u32>> {
        if !matches!(self.inodes.first().map(|root| &root.kind), Some(Kind::Directory(_))) {
            return Err(Error::invalid("the root of a tree is no directory"));
        }
        let mut links = vec![0_u32; self.inodes.len()];
        links[0] = 2;
        let mut pending = vec![InodeIx::ROOT];
        while let Some(directory) = pending.pop() {
            for child in self.entries(directory).into_iter().flat_map(BTreeMap::values) {
                let Some(inode) = self.get(*child) else {
                    return Err(Error::invalid(format!(
                        "{}: inode {} does not exist",
                        display_path(&self.path_of(directory)),
                        child.0
                    )));
                };
                if matches!(inode.kind, Kind::Directory(_)) {
                    if links[child.index()] != 0 {
                        return Err(Error::invalid(format!(
                            "directory {} has two names",
                            display_path(&self.path_of(*child))
                        )));
                    }
                    links[child.index()] = 2;
                    links[directory.index()] += 1;
                    pending.push(*child);
                } else {
                    links[child.index()] += 1;
                }
            }
        }
        Ok(links)
    }

    /// One path of an inode, for messages: a search through the tree. Empty for the root and for
    /// inodes that are not reached.
    pub fn path_of(&self, wanted: InodeIx) -> Vec<u8> {
        let mut parents = vec![None; self.inodes.len()];
        let mut pending = vec![InodeIx::ROOT];
        while let Some(directory) = pending.pop() {
            for (name, child) in self.entries(directory).into_iter().flatten() {
                let Some(parent) = parents.get_mut(child.index()) else { continue };
                if parent.is_none() && *child != InodeIx::ROOT {
                    *parent = Some((directory, name));
                    pending.push(*child);
                }
            }
        }
        let mut names = Vec::new();
        let mut at = wanted;
        while let Some(Some((directory, name))) = parents.get(at.index()) {
            names.push(name.as_slice());
            at = *directory;
        }
        names.reverse();
        names.join(&b'/')
    }
}

/// A path as text for messages: absolute, with everything that is not printable escaped.
pub fn display_path(path: &[u8]) -> String {
    let mut text = String::from("/");
    for part in path.utf8_chunks() {
        for letter in part.valid().chars() {
            if letter.is_control() {
                text.extend(letter.escape_default());
            } else {
                text.push(letter);
            }
        }
        for byte in part.invalid() {
            // Writing to a string cannot fail.
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

impl FileData {
    /// Blocks of 4096 bytes that the size spans.
    pub fn blocks(&self) -> u64 {
        self.size.div_ceil(u64::from(BLOCK_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inode(kind: Kind) -> Inode {
        Inode { mode: 0o755, uid: 0, gid: 0, mtime: Timestamp::default(), xattrs: vec![], kind }
    }

    fn directory() -> Inode {
        inode(Kind::Directory(BTreeMap::new()))
    }

    #[test]
    fn links_are_counted_as_the_kernel_does() {
        let mut tree = Tree::new(directory());
        let a = tree.add(directory()).unwrap();
        let b = tree.add(directory()).unwrap();
        let file = tree.add(inode(Kind::Fifo)).unwrap();
        let lost = tree.add(inode(Kind::Fifo)).unwrap();
        tree.link(InodeIx::ROOT, b"a".to_vec(), a).unwrap();
        tree.link(a, b"b".to_vec(), b).unwrap();
        tree.link(b, b"x".to_vec(), file).unwrap();
        tree.link(a, b"y".to_vec(), file).unwrap();
        assert_eq!(tree.link_counts().unwrap(), [3, 3, 2, 2, 0]);
        assert_eq!(tree.find(b"/a/b//x"), Some(file));
        assert_eq!(tree.find(b"a/x"), None);
        assert_eq!(tree.path_of(b), b"a/b");
        assert_eq!(tree.path_of(lost), b"");
        assert!(tree.link(file, b"z".to_vec(), a).is_err());
    }

    #[test]
    fn loops_and_lost_indexes_are_refused() {
        let mut tree = Tree::new(directory());
        let a = tree.add(directory()).unwrap();
        tree.link(InodeIx::ROOT, b"a".to_vec(), a).unwrap();
        tree.link(a, b"up".to_vec(), InodeIx::ROOT).unwrap();
        assert!(tree.link_counts().is_err());
        tree.link(a, b"up".to_vec(), a).unwrap();
        assert!(tree.link_counts().is_err());
        tree.link(a, b"up".to_vec(), InodeIx(9)).unwrap();
        assert!(tree.link_counts().is_err());
        assert_eq!(tree.path_of(InodeIx(9)), b"");
        assert!(Tree::new(inode(Kind::Fifo)).link_counts().is_err());
        assert!(Tree { inodes: Vec::new() }.link_counts().is_err());
    }

    #[test]
    fn paths_are_shown_without_control_codes() {
        assert_eq!(display_path(b"a/b\n\xff\x1b[0m"), "/a/b\\n\\xff\\u{1b}[0m");
    }
}
