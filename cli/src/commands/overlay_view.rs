//! The tree that a stack of layers shows, as overlayfs would show it: computed from the layers'
//! metadata alone, nothing is mounted.
//!
//! Rules (Documentation/filesystems/overlayfs.rst): the topmost layer that has a name decides; a
//! whiteout (character device 0/0) hides the name; directories of one name merge downwards until one is
//! opaque (`trusted.overlay.opaque=y`) or a layer has something else there.

use crate::errors::Outcome;
use layer::tree::{Inode, InodeIx, Kind, Tree};
use layer::{Error, Result};
use std::collections::BTreeMap;

/// A stack of trees, bottom first.
pub struct View {
    trees: Vec<Tree>,
    /// Whether whiteouts hide, as in an environment, or are shown, as in one layer.
    merged: bool,
}

/// Something visible: the topmost inode, and for directories all that merge into it, topmost first.
#[derive(Debug, Clone)]
pub struct Node {
    parts: Vec<(usize, InodeIx)>,
}

impl Node {
    /// The number of the layer that the topmost inode is of, the bottom one 0.
    pub fn layer(&self) -> usize {
        self.parts.first().map_or(0, |(layer, _)| *layer)
    }
}

/// A directory that is being listed.
struct Frame {
    path: Vec<u8>,
    entries: std::collections::btree_map::IntoIter<Vec<u8>, Node>,
}

impl View {
    /// One layer as it is.
    pub fn of_layer(tree: Tree) -> Self {
        Self { trees: vec![tree], merged: false }
    }

    /// A stack as a sandbox sees it.
    pub fn of_stack(trees: Vec<Tree>) -> Self {
        Self { trees, merged: true }
    }

    /// The topmost inode of a node.
    pub fn inode(&self, node: &Node) -> Result<&Inode> {
        let first = node.parts.first();
        first
            .and_then(|part| self.at(*part))
            .ok_or_else(|| Error::corrupt("a directory entry without an inode"))
    }

    fn root(&self) -> Node {
        let below = (0..self.trees.len()).rev().map(|tree| (tree, InodeIx::ROOT));
        Node { parts: self.cut_at_opaque(below.collect()) }
    }

    fn at(&self, part: (usize, InodeIx)) -> Option<&Inode> {
        self.trees.get(part.0)?.get(part.1)
    }

    /// Drops what lies below an opaque directory.
    fn cut_at_opaque(&self, mut parts: Vec<(usize, InodeIx)>) -> Vec<(usize, InodeIx)> {
        let opaque = |part: &(usize, InodeIx)| self.at(*part).is_some_and(Inode::is_opaque);
        if self.merged
            && let Some(first) = parts.iter().position(opaque)
        {
            parts.truncate(first + 1);
        }
        parts
    }

    /// What is visible in a directory.
    fn entries(&self, directory: &Node) -> BTreeMap<Vec<u8>, Node> {
        let mut stacks: BTreeMap<Vec<u8>, Vec<(usize, InodeIx)>> = BTreeMap::new();
        for (tree, at) in &directory.parts {
            let entries = self.trees.get(*tree).and_then(|tree| tree.entries(*at));
            for (name, child) in entries.into_iter().flatten() {
                stacks.entry(name.clone()).or_default().push((*tree, *child));
            }
        }
        let is_directory = |part: &(usize, InodeIx)| {
            self.at(*part).is_some_and(|inode| matches!(inode.kind, Kind::Directory(_)))
        };
        let hides =
            |part: &(usize, InodeIx)| self.merged && self.at(*part).is_some_and(Inode::is_whiteout);
        let visible = stacks.into_iter().filter_map(|(name, mut parts)| {
            if hides(parts.first()?) {
                return None;
            }
            let directories = parts.iter().take_while(|part| is_directory(part)).count();
            parts.truncate(directories.max(1));
            Some((name, Node { parts: self.cut_at_opaque(parts) }))
        });
        visible.collect()
    }

    /// Finds a path; symbolic links are not followed.
    pub fn find(&self, path: &[u8]) -> Option<Node> {
        let names =
            path.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".");
        names.into_iter().try_fold(self.root(), |at, name| self.entries(&at).remove(name))
    }

    /// Visits `start`, whose path is `path`, and all below it, in the order of names. Depth costs heap,
    /// not stack: a hostile layer may be very deep.
    pub fn walk(
        &self,
        path: &[u8],
        start: &Node,
        visit: &mut dyn FnMut(&[u8], &Node) -> Outcome,
    ) -> Outcome {
        visit(if path.is_empty() { b"/" } else { path }, start)?;
        let mut frames =
            vec![Frame { path: path.to_vec(), entries: self.entries(start).into_iter() }];
        while let Some(frame) = frames.last_mut() {
            let Some((name, node)) = frame.entries.next() else {
                frames.pop();
                continue;
            };
            let mut path = frame.path.clone();
            path.push(b'/');
            path.extend_from_slice(&name);
            visit(&path, &node)?;
            let entries = self.entries(&node);
            if !entries.is_empty() {
                frames.push(Frame { path, entries: entries.into_iter() });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use layer::tree::{OPAQUE_XATTR, Rdev, Timestamp, Xattr};

    fn inode(kind: Kind) -> Inode {
        let mtime = Timestamp { secs: 0, nanos: 0 };
        Inode { mode: 0o755, uid: 0, gid: 0, mtime, xattrs: Vec::new(), kind }
    }

    /// A tree of paths: `d/` a directory, `d!/` an opaque one, `-x` a whiteout, else a fifo.
    fn tree(paths: &[&str]) -> Tree {
        let mut tree = Tree::new(inode(Kind::Directory(BTreeMap::new())));
        for path in paths {
            let clean = path.replace(['!', '-'], "");
            let mut at = InodeIx::ROOT;
            let names: Vec<&str> = clean.split('/').filter(|name| !name.is_empty()).collect();
            for (index, name) in names.iter().enumerate() {
                let last = index + 1 == names.len();
                let kind = if !last || path.ends_with('/') {
                    Kind::Directory(BTreeMap::new())
                } else if path.contains('-') {
                    Kind::CharDevice(Rdev::WHITEOUT)
                } else {
                    Kind::Fifo
                };
                let known = tree.entries(at).and_then(|entries| entries.get(name.as_bytes()));
                at = match known.copied() {
                    Some(known) => known,
                    None => {
                        let mut new = inode(kind);
                        if last && path.contains('!') {
                            let (name, value) = (OPAQUE_XATTR.to_vec(), b"y".to_vec());
                            new.xattrs.push(Xattr { name, value });
                        }
                        let new = tree.add(new).unwrap();
                        tree.link(at, name.as_bytes().to_vec(), new).unwrap();
                        new
                    }
                };
            }
        }
        tree
    }

    fn shown(view: &View) -> Vec<String> {
        let mut paths = Vec::new();
        let root = view.find(b"/").unwrap();
        let visited = view.walk(b"", &root, &mut |path, _| {
            paths.push(String::from_utf8(path.to_vec()).unwrap());
            Ok(())
        });
        visited.unwrap();
        paths
    }

    #[test]
    fn a_stack_shows_what_overlayfs_shows() {
        let view = View::of_stack(vec![
            tree(&["a", "d/x", "d/y", "o/old", "gone/z", "f/in"]),
            tree(&["-a", "d/-x", "d/new", "o!/", "o/fresh", "-gone", "f"]),
        ]);
        assert_eq!(shown(&view), ["/", "/d", "/d/new", "/d/y", "/f", "/o", "/o/fresh"]);
        assert!(view.find(b"/a").is_none());
        assert!(view.find(b"d/y").is_some());
    }

    #[test]
    fn what_returns_after_a_whiteout_does_not_bring_back_what_lay_below() {
        let view = View::of_stack(vec![tree(&["d/x"]), tree(&["-d"]), tree(&["d/y"])]);
        assert_eq!(shown(&view), ["/", "/d", "/d/y"]);
    }

    #[test]
    fn one_layer_shows_its_whiteouts() {
        let view = View::of_layer(tree(&["d/-x"]));
        assert_eq!(shown(&view), ["/", "/d", "/d/x"]);
    }
}
