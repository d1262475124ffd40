//! The writable layer of a sandbox as a source: `pack_diff`.
//!
//! What overlayfs wrote into an upper directory becomes a layer that depends on no particular stack:
//! deletions stay deletions, replaced directories stay opaque, and renamed directories, which overlayfs
//! only notes as a redirect, are written out in full. What they show of lower layers is taken over by
//! reference to chunks that the store holds already, so no data of lower layers is read. Hard links stay
//! links within what is written out; a link between a file in a renamed directory and a name elsewhere in
//! a lower layer ends, as a copy-up would end it.
//!
//! The caller sees to it that nobody writes to the upper directory meanwhile (a frozen sandbox, a
//! snapshot); a change that happens all the same is an error.

use crate::build::{BuiltLayer, build_index};
use crate::content::{ChunkRange, Content, Place};
use crate::index::{Index, Node, NodeIx, NodeKind};
use crate::merge::merge;
use crate::options::BuildOptions;
use crate::path;
use crate::progress::{FewNotices, Phase, Progress};
use crate::publish::Publisher;
use crate::source::directory::{Walked, walk};
use crate::xattr::Policy;
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use layer::chunk::ChunkTable;
use layer::tree::{Body, FileData, Inode, Kind, OPAQUE_XATTR, Tree};
use layer::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The layers below an upper directory. Only asked when a renamed directory has to be written out.
pub trait LowerLayers {
    /// How many there are.
    fn count(&self) -> usize;
    /// The tree and chunk table of one; 0 is the bottom.
    fn layer(&self, number: usize) -> Result<(Tree, ChunkTable)>;
}

/// No layers below.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoLowerLayers;

impl LowerLayers for NoLowerLayers {
    fn count(&self) -> usize {
        0
    }

    fn layer(&self, _number: usize) -> Result<(Tree, ChunkTable)> {
        Err(Error::new(ErrorKind::Internal, "there is no lower layer"))
    }
}

/// What a caller may choose about a diff.
#[derive(Debug, Clone)]
pub struct DiffOptions {
    /// The kind should be `diff`.
    pub build: BuildOptions,
    /// Globs of paths that are taken, with all that is below them; empty takes everything. `*` stays
    /// inside a name, `**` does not. A leading slash does not count.
    pub include: Vec<String>,
    /// Globs of paths that are left out, with all that is below them; they win over `include`.
    pub exclude: Vec<String>,
}

impl DiffOptions {
    /// Takes everything.
    pub fn new(build: BuildOptions) -> Self {
        Self { build, include: Vec::new(), exclude: Vec::new() }
    }
}

/// Builds a layer of what an overlay mount wrote into its upper directory, and commits it.
///
/// Errors: `Busy` when a file changes meanwhile, `Unsupported` for an overlay with metacopy on, `Invalid`
/// for a malformed glob, `NotFound` when the store has lost chunks of a lower layer.
pub fn pack_diff(
    upper: &Path,
    lower: &dyn LowerLayers,
    publisher: &dyn Publisher,
    options: &DiffOptions,
    progress: &dyn Progress,
) -> Result<BuiltLayer> {
    let index = diff_index(upper, lower, options, progress)?;
    build_index(&index, publisher, &options.build, progress)
}

/// The index of the layer that [`pack_diff`] builds.
pub fn diff_index(
    upper: &Path,
    lower: &dyn LowerLayers,
    options: &DiffOptions,
    progress: &dyn Progress,
) -> Result<Index> {
    progress.phase(Phase::Index, 0, 0);
    let filter = Filter::new(options)?;
    let keep = |path: &[u8], is_directory: bool| filter.keeps(path, is_directory);
    let few = FewNotices::of(progress);
    let Walked { mut index, redirects } = walk(upper, Policy::Upper, &options.build, &few, keep)?;
    if !redirects.is_empty() {
        let below = merged(lower, &options.build)?;
        let first_copy = index.nodes.len() as u32;
        let mut grafter = Grafter {
            index: &mut index,
            first_copy,
            below: &below,
            redirects,
            filter: &filter,
            copies: HashMap::new(),
        };
        grafter.run()?;
    }
    drop_idle_whiteouts(&mut index)?;
    if !options.include.is_empty() {
        prune(&mut index, &filter)?;
    }
    Ok(index)
}

/// Which paths are taken.
struct Filter {
    include: Option<GlobSet>,
    exclude: GlobSet,
}

impl Filter {
    fn new(options: &DiffOptions) -> Result<Self> {
        let include =
            if options.include.is_empty() { None } else { Some(globs(&options.include)?) };
        Ok(Self { include, exclude: globs(&options.exclude)? })
    }

    fn excludes(&self, path: &[u8]) -> bool {
        self.exclude.is_match(OsStr::from_bytes(path))
    }

    /// Whether the path or one above it is asked for.
    fn includes(&self, path: &[u8]) -> bool {
        let Some(include) = &self.include else { return true };
        let ends = path.iter().enumerate().filter(|&(_, &byte)| byte == b'/').map(|(at, _)| at);
        ends.chain([path.len()]).any(|end| include.is_match(OsStr::from_bytes(&path[..end])))
    }

    fn keeps(&self, path: &[u8], is_directory: bool) -> bool {
        // Directories may lead to something that is included; `prune` takes the idle ones out.
        !self.excludes(path) && (is_directory || self.includes(path))
    }
}

fn globs(patterns: &[String]) -> Result<GlobSet> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        let refuse = |error: globset::Error| {
            Error::invalid(format!("{pattern:?} is no valid pattern")).with_source(error)
        };
        let text = pattern.trim_start_matches('/').trim_end_matches('/');
        let glob = GlobBuilder::new(text).literal_separator(true).build().map_err(refuse)?;
        set.add(glob);
    }
    set.build().map_err(|error| Error::invalid("patterns are too large").with_source(error))
}

/// What all lower layers show together.
fn merged(lower: &dyn LowerLayers, options: &BuildOptions) -> Result<Index> {
    let mut below = Index::new();
    for number in 0..lower.count() {
        options.cancel.check()?;
        let (tree, table) = lower.layer(number)?;
        below = merge(below, from_layer(&tree, &table)?)?;
        below.clear_marks();
    }
    Ok(below)
}

/// A finished layer as an index whose contents are references to its chunks.
pub fn from_layer(tree: &Tree, table: &ChunkTable) -> Result<Index> {
    let mut index = Index::new();
    index.nodes =
        tree.inodes.iter().map(|inode| node(inode, table)).collect::<Result<Vec<Node>>>()?;
    if index.nodes.first().is_none_or(|root| !root.is_directory()) {
        return Err(Error::corrupt("a layer without a root directory"));
    }
    Ok(index)
}

fn node(inode: &Inode, table: &ChunkTable) -> Result<Node> {
    let kind = match &inode.kind {
        _ if inode.is_whiteout() => NodeKind::Whiteout,
        Kind::Directory(entries) => NodeKind::Directory(
            entries.iter().map(|(name, ix)| (name.clone(), NodeIx(ix.0))).collect(),
        ),
        Kind::Regular(file) => NodeKind::Regular(referenced(file, table)?),
        Kind::Symlink(target) => NodeKind::Symlink(target.clone()),
        Kind::CharDevice(rdev) => NodeKind::CharDevice(*rdev),
        Kind::BlockDevice(rdev) => NodeKind::BlockDevice(*rdev),
        Kind::Fifo => NodeKind::Fifo,
        Kind::Socket => NodeKind::Socket,
    };
    let mut xattrs = inode.xattrs.clone();
    let before = xattrs.len();
    xattrs.retain(|xattr| xattr.name != OPAQUE_XATTR);
    xattrs.sort();
    Ok(Node {
        mode: inode.mode,
        uid: inode.uid,
        gid: inode.gid,
        mtime: inode.mtime,
        opaque: xattrs.len() < before,
        implied: false,
        xattrs,
        kind,
    })
}

/// The content of a file of a layer, by the chunks it lies in.
fn referenced(file: &FileData, table: &ChunkTable) -> Result<Content> {
    let extents = match &file.body {
        Body::Inline(bytes) => return Ok(Content::bytes(bytes.clone())),
        Body::Extents(extents) => extents,
    };
    let mut ranges = Vec::new();
    for extent in extents {
        let (mut file_block, mut data_block) = (extent.file_block, extent.data_block);
        let mut left = extent.blocks;
        while left > 0 {
            let chunk = table.find(data_block).map(|at| table.chunks()[at]);
            let chunk = chunk.ok_or_else(|| Error::corrupt("a file ends outside its layer"))?;
            let chunk_block = data_block - chunk.start_block;
            let blocks = left.min(chunk.blocks - chunk_block);
            ranges.push(ChunkRange { file_block, blocks, chunk, chunk_block });
            left -= blocks;
            file_block += blocks;
            // The last block of a data space may be the last there is.
            data_block = data_block.saturating_add(blocks);
        }
    }
    Ok(Content { size: file.size, place: Place::Chunks(ranges) })
}

/// Writes redirected directories out.
struct Grafter<'a> {
    index: &'a mut Index,
    /// Inodes from here on were copied from lower layers.
    first_copy: u32,
    below: &'a Index,
    redirects: BTreeMap<NodeIx, Vec<u8>>,
    filter: &'a Filter,
    /// Inodes of lower layers that were taken over; keeps hard links together.
    copies: HashMap<NodeIx, NodeIx>,
}

/// A directory of the upper layer on its way through the [`Grafter`].
struct Step {
    node: NodeIx,
    path: Vec<u8>,
    /// The path that it has in the lower layers; `None` where it hides them.
    lower: Option<Vec<u8>>,
    /// Whether what lower layers have there must be written out.
    graft: bool,
}

impl Grafter<'_> {
    fn run(&mut self) -> Result<()> {
        let mut pending = vec![Step {
            node: NodeIx::ROOT,
            path: Vec::new(),
            lower: Some(Vec::new()),
            graft: false,
        }];
        while let Some(mut step) = pending.pop() {
            if self.index.node(step.node).opaque {
                step.lower = None;
            }
            if step.graft {
                self.graft(&step)?;
            }
            let entries: Vec<(Vec<u8>, NodeIx)> = self
                .index
                .entries(step.node)
                .into_iter()
                .flatten()
                .map(|(name, ix)| (name.clone(), *ix))
                .collect();
            for (name, ix) in entries {
                // A copied directory holds nothing of the upper layer.
                if self.index.node(ix).is_directory() && ix.0 < self.first_copy {
                    pending.push(self.child(&step, &name, ix)?);
                }
            }
        }
        Ok(())
    }

    fn child(&mut self, parent: &Step, name: &[u8], ix: NodeIx) -> Result<Step> {
        let path = path::join(&parent.path, name);
        let beside = |name: &[u8]| parent.lower.as_ref().map(|lower| path::join(lower, name));
        let Some(redirect) = self.redirects.get(&ix) else {
            // Below a redirect, united directories are written out too.
            let lower = beside(name);
            let graft = parent.graft && lower.is_some();
            return Ok(Step { node: ix, path, lower, graft });
        };
        let lower = match redirect.strip_prefix(b"/") {
            Some(absolute) => Some(absolute.to_vec()),
            None if redirect.contains(&b'/') || redirect.is_empty() => {
                let text = format!("{} has a malformed redirect", path::show(&path));
                return Err(Error::corrupt(text));
            }
            None => beside(redirect),
        };
        let graft = !self.index.node(ix).opaque;
        let there = lower.as_deref().and_then(|lower| exact(self.below, lower));
        if graft && !there.is_some_and(|there| self.below.node(there).is_directory()) {
            let from = redirect.strip_prefix(b"/").unwrap_or(redirect);
            let (path, from) = (path::show(&path), path::show(from));
            let text = format!("{path} was renamed from {from}, which no lower layer holds");
            return Err(Error::not_found(text));
        }
        Ok(Step { node: ix, path, lower, graft })
    }

    /// Takes over what the lower layers have at a directory and the upper layer does not hide.
    fn graft(&mut self, step: &Step) -> Result<()> {
        self.index.node_mut(step.node).opaque = true;
        let Some(lower) = &step.lower else { return Ok(()) };
        let Some(entries) = exact(self.below, lower).and_then(|ix| self.below.entries(ix)) else {
            return Ok(());
        };
        for (name, &ix) in entries {
            if self.index.child(step.node, name).is_none() {
                self.copy(step.node, name, ix, &path::join(&step.path, name))?;
            }
        }
        Ok(())
    }

    /// Copies a subtree of the lower layers.
    fn copy(&mut self, parent: NodeIx, name: &[u8], ix: NodeIx, path: &[u8]) -> Result<()> {
        let mut pending = vec![(parent, name.to_vec(), ix, path.to_vec())];
        while let Some((parent, name, ix, path)) = pending.pop() {
            if self.filter.excludes(&path) {
                continue;
            }
            if let Some(&copy) = self.copies.get(&ix)
                && !self.below.node(ix).is_directory()
            {
                self.index.link(parent, &name, copy)?;
                continue;
            }
            let mut node = self.below.node(ix).clone();
            if let NodeKind::Directory(entries) = &mut node.kind {
                entries.clear();
            }
            let copy = self.index.add(node)?;
            self.index.link(parent, &name, copy)?;
            self.copies.insert(ix, copy);
            for (name, &child) in self.below.entries(ix).into_iter().flatten() {
                let path = path::join(&path, name);
                pending.push((copy, name.clone(), child, path));
            }
        }
        Ok(())
    }
}

/// The inode at a path, through no link.
fn exact(index: &Index, path: &[u8]) -> Option<NodeIx> {
    path.split(|&byte| byte == b'/')
        .filter(|name| !name.is_empty())
        .try_fold(NodeIx::ROOT, |at, name| index.child(at, name))
}

/// Takes out whiteouts below opaque directories, where they hide nothing: overlayfs would show them.
fn drop_idle_whiteouts(index: &mut Index) -> Result<()> {
    let mut pending = vec![(NodeIx::ROOT, false)];
    while let Some((ix, hidden)) = pending.pop() {
        let hidden = hidden || index.node(ix).opaque;
        let Some(entries) = index.entries(ix) else { continue };
        let idle: Vec<Vec<u8>> = entries
            .iter()
            .filter(|&(_, &child)| hidden && index.node(child).kind == NodeKind::Whiteout)
            .map(|(name, _)| name.clone())
            .collect();
        pending.extend(entries.values().map(|&child| (child, hidden)));
        let entries = index.entries_mut(ix)?;
        for name in idle {
            entries.remove(&name);
        }
    }
    Ok(())
}

/// Takes out directories that only might have led to something included.
fn prune(index: &mut Index, filter: &Filter) -> Result<()> {
    let mut directories = Vec::new();
    index.walk(|path, ix| {
        for (name, &child) in index.entries(ix).into_iter().flatten() {
            if index.node(child).is_directory() && !filter.includes(&path::join(path, name)) {
                directories.push((ix, name.clone(), child));
            }
        }
        Ok(())
    })?;
    // Deepest first, so that chains of empty ones go.
    for (parent, name, child) in directories.into_iter().rev() {
        if index.entries(child).is_some_and(BTreeMap::is_empty) {
            index.entries_mut(parent)?.remove(&name);
        }
    }
    Ok(())
}
