//! The whole image at once: every path, or the tree.

use super::{InodeRecord, Reader};
use crate::error::{Error, Result};
use crate::tree::{Body, InodeIx, Kind, Tree};
use std::collections::{BTreeMap, HashMap, HashSet};

/// What a tree may take beyond the size of its image, in bytes: xattrs are shared in the image and
/// not in the tree.
const TREE_ALLOWANCE: u64 = 256 << 20;
/// How much larger than its image a tree may be.
const TREE_FACTOR: u64 = 16;

pub(super) fn walk(
    reader: &Reader<'_>,
    visit: &mut dyn FnMut(&[u8], &InodeRecord) -> Result<()>,
) -> Result<()> {
    let mut budget = Budget::new(reader);
    let mut entered = HashSet::new();
    let mut path = Vec::new();
    let root = reader.inode(reader.root())?;
    visit(&path, &root)?;
    enter(&mut entered, reader.root())?;
    budget.spend_bytes(root.size)?;
    let mut open = vec![(reader.read_dir(reader.root())?.into_iter(), 0)];
    while let Some((entries, path_bytes)) = open.last_mut() {
        path.truncate(*path_bytes);
        let Some(entry) = entries.next() else {
            open.pop();
            continue;
        };
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(&entry.name);
        let record = reader.inode(entry.number)?;
        visit(&path, &record)?;
        if is_directory(&record) {
            enter(&mut entered, entry.number)?;
            budget.spend_bytes(record.size)?;
            open.push((reader.read_dir(entry.number)?.into_iter(), path.len()));
        }
    }
    Ok(())
}

fn enter(entered: &mut HashSet<u64>, directory: u64) -> Result<()> {
    if entered.insert(directory) { Ok(()) } else { Err(two_names(directory)) }
}

fn two_names(directory: u64) -> Error {
    Error::corrupt(format!("EROFS directory {directory} has two names"))
}

fn is_directory(record: &InodeRecord) -> bool {
    matches!(record.inode.kind, Kind::Directory(_))
}

/// The root, which has to be a directory.
fn root(reader: &Reader<'_>) -> Result<InodeRecord> {
    let root = reader.inode(reader.root())?;
    if is_directory(&root) {
        Ok(root)
    } else {
        Err(Error::corrupt("EROFS image: the root is no directory"))
    }
}

pub(super) fn check(reader: &Reader<'_>) -> Result<()> {
    let mut budget = Budget::new(reader);
    budget.spend(&root(reader)?)?;
    // Whether each inode that was met is a directory.
    let mut known = HashMap::from([(reader.root(), true)]);
    let mut pending = vec![reader.root()];
    while let Some(directory) = pending.pop() {
        for entry in reader.read_dir(directory)? {
            match known.get(&entry.number) {
                Some(true) => return Err(two_names(entry.number)),
                Some(false) => {}
                None => {
                    let record = reader.inode(entry.number)?;
                    budget.spend(&record)?;
                    known.insert(entry.number, is_directory(&record));
                    if is_directory(&record) {
                        pending.push(entry.number);
                    }
                }
            }
        }
    }
    Ok(())
}

pub(super) fn to_tree(reader: &Reader<'_>) -> Result<Tree> {
    let mut budget = Budget::new(reader);
    let root = root(reader)?;
    budget.spend(&root)?;
    let mut tree = Tree::new(root.inode);
    let mut known = HashMap::from([(reader.root(), InodeIx::ROOT)]);
    let mut pending = vec![(reader.root(), InodeIx::ROOT)];
    while let Some((number, index)) = pending.pop() {
        let mut names = BTreeMap::new();
        for entry in reader.read_dir(number)? {
            let child = match known.get(&entry.number) {
                Some(child) => {
                    if matches!(tree.inodes[child.index()].kind, Kind::Directory(_)) {
                        return Err(two_names(entry.number));
                    }
                    *child
                }
                None => {
                    let record = reader.inode(entry.number)?;
                    budget.spend(&record)?;
                    let is_directory = is_directory(&record);
                    let child = tree.add(record.inode)?;
                    known.insert(entry.number, child);
                    if is_directory {
                        pending.push((entry.number, child));
                    }
                    child
                }
            };
            names.insert(entry.name, child);
        }
        tree.inodes[index.index()].kind = Kind::Directory(names);
    }
    Ok(tree)
}

/// A bound on what hostile images, whose inodes overlap, can make of a few bytes.
struct Budget {
    left: u64,
}

impl Budget {
    fn new(reader: &Reader<'_>) -> Self {
        Self { left: TREE_ALLOWANCE + TREE_FACTOR * reader.image.len() as u64 }
    }

    fn spend(&mut self, record: &InodeRecord) -> Result<()> {
        let content = match &record.inode.kind {
            Kind::Directory(_) => record.size,
            Kind::Symlink(target) => target.len() as u64,
            Kind::Regular(data) => match &data.body {
                Body::Inline(bytes) => bytes.len() as u64,
                Body::Extents(extents) => 16 * extents.len() as u64,
            },
            _ => 0,
        };
        let xattrs: usize =
            record.inode.xattrs.iter().map(|xattr| xattr.name.len() + xattr.value.len()).sum();
        self.spend_bytes(content.saturating_add(xattrs as u64))
    }

    fn spend_bytes(&mut self, bytes: u64) -> Result<()> {
        self.left = self
            .left
            .checked_sub(bytes)
            .ok_or_else(|| Error::corrupt("EROFS image: its tree is far larger than the image"))?;
        Ok(())
    }
}
