//! The tree of a source before it is a layer: every inode with its metadata, no contents in memory.
//!
//! An index is what all sources produce and what merging, planning and writing consume. It may hold
//! what a finished layer cannot: hard links whose target is not known yet, directories that are
//! only implied by a path below them, and overlay marks as values of their own.

use crate::content::{Content, Origin};
use crate::path;
use layer::tree::{Rdev, Timestamp, Xattr};
use layer::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// How many symbolic links a path may lead through, as in the kernel.
const MAX_SYMLINKS: usize = 40;
/// The longest name, as in the kernel and in EROFS.
const MAX_NAME_BYTES: usize = 255;

/// Number of an inode in its index; 0 is the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeIx(pub u32);

impl NodeIx {
    /// The root directory.
    pub const ROOT: Self = Self(0);
}

/// One inode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Permission bits with setuid, setgid and sticky (07777).
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time.
    pub mtime: Timestamp,
    /// Extended attributes with their full names, sorted by name, each name once.
    pub xattrs: Vec<Xattr>,
    /// A directory that no entry describes; it only stands in the path of another. Merging takes
    /// the metadata of the lower directory for it.
    pub implied: bool,
    /// A directory that hides what lower layers have at its path.
    pub opaque: bool,
    /// What it is.
    pub kind: NodeKind,
}

/// What an inode is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeKind {
    /// Names and inodes, in byte order.
    Directory(BTreeMap<Vec<u8>, NodeIx>),
    /// A file.
    Regular(Content),
    /// Its target.
    Symlink(Vec<u8>),
    /// A character device; never 0/0.
    CharDevice(Rdev),
    /// A block device.
    BlockDevice(Rdev),
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// Hides this name of lower layers.
    Whiteout,
    /// A hard link to a path that is not in this index, or not yet.
    Link(Vec<u8>),
}

impl Node {
    /// An empty directory that only a path implies: 0755, root's, from 1970.
    pub fn implied_directory() -> Self {
        Self {
            mode: 0o755,
            uid: 0,
            gid: 0,
            mtime: Timestamp { secs: 0, nanos: 0 },
            xattrs: Vec::new(),
            implied: true,
            opaque: false,
            kind: NodeKind::Directory(BTreeMap::new()),
        }
    }

    /// A mark or a link, where metadata says nothing.
    pub fn bare(kind: NodeKind) -> Self {
        Self { mode: 0, implied: false, kind, ..Self::implied_directory() }
    }

    /// Whether it is a directory.
    pub fn is_directory(&self) -> bool {
        matches!(self.kind, NodeKind::Directory(_))
    }
}

/// The tree of a source.
#[derive(Debug, Clone)]
pub struct Index {
    pub(crate) nodes: Vec<Node>,
    pub(crate) origins: Vec<Arc<Origin>>,
}

impl Default for Index {
    fn default() -> Self {
        Self::new()
    }
}

impl Index {
    /// An empty tree whose root nobody has described.
    pub fn new() -> Self {
        Self { nodes: vec![Node::implied_directory()], origins: Vec::new() }
    }

    /// The inode with this number.
    pub fn node(&self, ix: NodeIx) -> &Node {
        &self.nodes[ix.0 as usize]
    }

    pub(crate) fn node_mut(&mut self, ix: NodeIx) -> &mut Node {
        &mut self.nodes[ix.0 as usize]
    }

    /// The entries of a directory; `None` for anything else.
    pub fn entries(&self, ix: NodeIx) -> Option<&BTreeMap<Vec<u8>, NodeIx>> {
        match &self.node(ix).kind {
            NodeKind::Directory(entries) => Some(entries),
            _ => None,
        }
    }

    pub(crate) fn entries_mut(&mut self, ix: NodeIx) -> Result<&mut BTreeMap<Vec<u8>, NodeIx>> {
        match &mut self.node_mut(ix).kind {
            NodeKind::Directory(entries) => Ok(entries),
            _ => Err(Error::new(ErrorKind::Internal, "entries of something that is no directory")),
        }
    }

    /// Adds an inode that no directory names yet.
    pub fn add(&mut self, node: Node) -> Result<NodeIx> {
        let ix = u32::try_from(self.nodes.len()).map_err(|_| {
            Error::new(ErrorKind::Unsupported, "a tree of more than 4,294,967,295 inodes")
        })?;
        self.nodes.push(node);
        Ok(NodeIx(ix))
    }

    /// Adds something contents are read from; its number goes into locators.
    pub fn add_origin(&mut self, origin: Origin) -> u32 {
        self.origins.push(Arc::new(origin));
        self.origins.len() as u32 - 1
    }

    /// The entry of a directory, if both exist.
    pub fn child(&self, parent: NodeIx, name: &[u8]) -> Option<NodeIx> {
        self.entries(parent)?.get(name).copied()
    }

    /// Gives an existing inode a (further) name; what had the name loses it.
    pub fn link(&mut self, parent: NodeIx, name: &[u8], ix: NodeIx) -> Result<()> {
        check_name(name)?;
        self.entries_mut(parent)?.insert(name.to_vec(), ix);
        Ok(())
    }

    /// Puts a new inode under a name, as unpacking an entry does: a directory over a directory
    /// replaces its metadata and keeps its entries; anything else replaces what was there.
    pub fn put(&mut self, parent: NodeIx, name: &[u8], mut node: Node) -> Result<NodeIx> {
        if let Some(old) = self.child(parent, name) {
            let there = self.node_mut(old);
            match (&there.kind, &node.kind) {
                (NodeKind::Directory(_), NodeKind::Directory(_)) => {
                    if !node.implied {
                        describe(there, node);
                    }
                    return Ok(old);
                }
                // A whiteout concerns lower layers only, wherever it stands in the archive.
                (NodeKind::Directory(_), NodeKind::Whiteout) => {
                    there.opaque = true;
                    return Ok(old);
                }
                (_, NodeKind::Whiteout) => return Ok(old),
                // What was a file or a mark a moment ago shows nothing of lower directories.
                (_, NodeKind::Directory(_)) => node.opaque = true,
                _ => {}
            }
        }
        let ix = self.add(node)?;
        self.link(parent, name, ix)?;
        Ok(ix)
    }

    /// Replaces the metadata of the root.
    pub fn describe_root(&mut self, node: Node) {
        describe(self.node_mut(NodeIx::ROOT), node);
    }

    /// The directory at a path, through symbolic links but never out of the tree. Missing ones are
    /// made, and what is no directory gives way.
    pub fn make_directory(&mut self, path: &[u8]) -> Result<NodeIx> {
        let mut walk = Walk::new(path);
        while let Some(name) = walk.next_name() {
            let next = self.child(walk.here(), &name);
            match next.map(|ix| (ix, &self.node(ix).kind)) {
                Some((ix, NodeKind::Directory(_))) => walk.enter(ix, name),
                Some((_, NodeKind::Symlink(target))) => walk.follow(target, path)?,
                _ => {
                    let ix = self.put(walk.here(), &name, Node::implied_directory())?;
                    walk.enter(ix, name);
                }
            }
        }
        Ok(walk.here())
    }

    /// The inode at a path; links in the middle are followed, one at the end is not.
    pub fn lookup(&self, path: &[u8]) -> Result<Option<NodeIx>> {
        let (parent, name) = split(path);
        let Some(parent) = self.find_directory(parent)? else { return Ok(None) };
        Ok(match name {
            b"" | b"." => Some(parent),
            name => self.child(parent, name),
        })
    }

    /// The directory at a path, through symbolic links but never out of the tree.
    pub fn find_directory(&self, path: &[u8]) -> Result<Option<NodeIx>> {
        Ok(self.find_real_directory(path)?.map(|(ix, _)| ix))
    }

    /// As [`Index::find_directory`], with the path that leads there through no link.
    pub(crate) fn find_real_directory(&self, path: &[u8]) -> Result<Option<(NodeIx, Vec<u8>)>> {
        let mut walk = Walk::new(path);
        while let Some(name) = walk.next_name() {
            match self.child(walk.here(), &name) {
                None => return Ok(None),
                Some(ix) => match &self.node(ix).kind {
                    NodeKind::Directory(_) => walk.enter(ix, name),
                    NodeKind::Symlink(target) => walk.follow(target, path)?,
                    _ => return Ok(None),
                },
            }
        }
        Ok(Some((walk.here(), walk.path())))
    }

    /// Calls `visit` for every name, parents first, names in byte order: the path order that
    /// decides about layout. The root comes first with an empty path.
    pub fn walk(&self, visit: impl FnMut(&[u8], NodeIx) -> Result<()>) -> Result<()> {
        path::walk(NodeIx::ROOT, |ix| self.entries(ix), visit)
    }

    /// Turns hard links into further names of the inodes that their paths name. Links to links are
    /// followed. What leads nowhere stays and is returned, in path order, with the path it names.
    pub fn resolve_links(&mut self) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut known = HashMap::new();
        let (mut found, mut open) = (Vec::new(), Vec::new());
        self.walk(|path, ix| {
            if let NodeKind::Link(target) = &self.node(ix).kind {
                match self.end_of_link(ix, &mut known)? {
                    Some(to) => found.push((path.to_vec(), to)),
                    None => open.push((path.to_vec(), target.clone())),
                }
            }
            Ok(())
        })?;
        for (path, to) in found {
            if self.node(to).is_directory() {
                return Err(Error::invalid(format!(
                    "{} is a hard link to a directory",
                    path::show(&path)
                )));
            }
            let (parent, name) = split(&path);
            // The path is spelled out, so no link stands in it.
            let parent = self.find_directory(parent)?.ok_or_else(|| {
                Error::new(ErrorKind::Internal, "the parent of a hard link is gone")
            })?;
            self.link(parent, name, to)?;
        }
        Ok(open)
    }

    /// The inode at the end of a chain of hard links. `known` keeps what is known of links, so that
    /// long chains are walked once.
    fn end_of_link(
        &self,
        link: NodeIx,
        known: &mut HashMap<NodeIx, Option<NodeIx>>,
    ) -> Result<Option<NodeIx>> {
        let mut chain = Vec::new();
        let mut at = link;
        let end = loop {
            let NodeKind::Link(target) = &self.node(at).kind else { break Some(at) };
            if let Some(end) = known.get(&at) {
                break *end;
            }
            // Until the end is known: what comes back here is a circle.
            known.insert(at, None);
            chain.push(at);
            match self.lookup(target)? {
                Some(next) if self.node(next).kind != NodeKind::Whiteout => at = next,
                _ => break None,
            }
        };
        known.extend(chain.into_iter().map(|link| (link, end)));
        Ok(end)
    }

    /// Removes what only means something above other layers: whiteouts and opaque marks.
    pub fn clear_marks(&mut self) {
        let marks: HashSet<NodeIx> = (0..self.nodes.len() as u32)
            .map(NodeIx)
            .filter(|&ix| self.node(ix).kind == NodeKind::Whiteout)
            .collect();
        for node in &mut self.nodes {
            node.opaque = false;
            if let NodeKind::Directory(entries) = &mut node.kind
                && !marks.is_empty()
            {
                entries.retain(|_, ix| !marks.contains(ix));
            }
        }
    }
}

/// Takes over what an entry says about a directory that exists.
fn describe(there: &mut Node, entry: Node) {
    let kind = std::mem::replace(&mut there.kind, NodeKind::Fifo);
    *there = Node { kind, opaque: there.opaque || entry.opaque, ..entry };
}

/// The part before the last slash, and the part after it; trailing slashes do not count.
pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    let end = path.iter().rposition(|&byte| byte != b'/').map_or(0, |last| last + 1);
    let path = &path[..end];
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b"", path),
    }
}

/// The refusal of a device that would be a whiteout in a layer and is none in its source.
pub(crate) fn foreign_whiteout(path: &[u8]) -> Error {
    Error::invalid(format!(
        "{} is a character device 0/0, which overlayfs takes for a deleted file",
        path::show(path)
    ))
}

fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > MAX_NAME_BYTES {
        return Err(Error::invalid(format!(
            "name of {} bytes (at most {MAX_NAME_BYTES}): {}",
            name.len(),
            path::show(name)
        )));
    }
    if matches!(name, b"" | b"." | b"..") || name.contains(&b'/') || name.contains(&0) {
        return Err(Error::invalid(format!("{:?} is no file name", path::show(name))));
    }
    Ok(())
}

/// A path on its way down, as the kernel resolves it inside a root.
struct Walk {
    stack: Vec<(NodeIx, Vec<u8>)>,
    /// What is left, last component first.
    rest: Vec<Vec<u8>>,
    links: usize,
}

impl Walk {
    fn new(path: &[u8]) -> Self {
        let mut walk = Self { stack: Vec::new(), rest: Vec::new(), links: 0 };
        walk.push(path);
        walk
    }

    fn push(&mut self, path: &[u8]) {
        let names = path.split(|&byte| byte == b'/').rev();
        self.rest.extend(names.filter(|name| !matches!(*name, b"" | b".")).map(<[u8]>::to_vec));
    }

    fn here(&self) -> NodeIx {
        self.stack.last().map_or(NodeIx::ROOT, |(ix, _)| *ix)
    }

    fn next_name(&mut self) -> Option<Vec<u8>> {
        loop {
            let name = self.rest.pop()?;
            if name != b".." {
                return Some(name);
            }
            self.stack.pop();
        }
    }

    fn enter(&mut self, ix: NodeIx, name: Vec<u8>) {
        self.stack.push((ix, name));
    }

    fn path(self) -> Vec<u8> {
        let names: Vec<Vec<u8>> = self.stack.into_iter().map(|(_, name)| name).collect();
        names.join(&b'/')
    }

    fn follow(&mut self, target: &[u8], path: &[u8]) -> Result<()> {
        self.links += 1;
        if self.links > MAX_SYMLINKS {
            let text = format!("{}: too many symbolic links", path::show(path));
            return Err(Error::invalid(text));
        }
        if target.first() == Some(&b'/') {
            self.stack.clear();
        }
        self.push(target);
        Ok(())
    }
}
