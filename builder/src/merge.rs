//! Layers over layers: what overlayfs shows of a stack, computed on indexes.
//!
//! Two steps. [`rebase`] makes a layer of an image stand on its own, as an upper directory would: hard
//! links to files below become inodes, directories that are only implied get the metadata of what they
//! stand for, and paths through symbolic links of lower layers are spelled out. [`merge`] then knows
//! nothing but the rules of overlayfs.

use crate::content::Place;
use crate::index::{Index, Node, NodeIx, NodeKind, split};
use crate::path;
use layer::{Error, ErrorKind, Result};
use std::collections::HashMap;

/// How often directories may be moved through symbolic links of lower layers, as the kernel counts.
const MAX_ROUNDS: usize = 40;

/// Applies `upper` to `lower`, bottom to top: whiteouts remove, opaque directories replace, directories
/// unite, everything else replaces. Marks of `upper` below new names stay; see [`Index::clear_marks`].
pub fn merge(mut lower: Index, upper: Index) -> Result<Index> {
    let shift = adopt(&mut lower, upper)?;
    let mut pending = vec![(NodeIx::ROOT, NodeIx(shift))];
    while let Some((below, above)) = pending.pop() {
        let node = take(&mut lower, above);
        let NodeKind::Directory(names) = node.kind else {
            return Err(Error::new(ErrorKind::Internal, "merging something that is no directory"));
        };
        let there = lower.node_mut(below);
        let NodeKind::Directory(entries) = &mut there.kind else {
            return Err(Error::new(
                ErrorKind::Internal,
                "merging into something that is no directory",
            ));
        };
        let entries = if node.opaque { Default::default() } else { std::mem::take(entries) };
        if node.implied {
            there.kind = NodeKind::Directory(entries);
        } else {
            *there = Node { kind: NodeKind::Directory(entries), opaque: there.opaque, ..node };
        }
        for (name, ix) in names {
            let old = lower.child(below, &name);
            let unite = old.is_some_and(|old| lower.node(old).is_directory())
                && lower.node(ix).is_directory();
            match (&lower.node(ix).kind, old) {
                (NodeKind::Whiteout, _) => {
                    lower.entries_mut(below)?.remove(&name);
                }
                (_, Some(old)) if unite => pending.push((old, ix)),
                _ => lower.link(below, &name, ix)?,
            }
        }
    }
    Ok(lower)
}

/// Moves all inodes and origins of `upper` into `lower`, not yet named; returns by how much the numbers
/// of its inodes grew.
fn adopt(lower: &mut Index, upper: Index) -> Result<u32> {
    let shift = lower.nodes.len() as u32;
    if u32::try_from(lower.nodes.len() + upper.nodes.len()).is_err() {
        return Err(Error::new(ErrorKind::Unsupported, "a stack of more than 2^32-1 inodes"));
    }
    let origins = lower.origins.len() as u32;
    lower.origins.extend(upper.origins);
    for mut node in upper.nodes {
        if let NodeKind::Directory(entries) = &mut node.kind {
            entries.values_mut().for_each(|ix| ix.0 += shift);
        }
        shift_origin(&mut node, origins);
        lower.nodes.push(node);
    }
    Ok(shift)
}

fn shift_origin(node: &mut Node, by: u32) {
    if let NodeKind::Regular(content) = &mut node.kind {
        match &mut content.place {
            Place::Archive { origin, .. } | Place::File { origin, .. } => *origin += by,
            Place::Bytes(_) | Place::Chunks(_) => {}
        }
    }
}

/// Takes an inode that is not needed any more.
fn take(index: &mut Index, ix: NodeIx) -> Node {
    std::mem::replace(index.node_mut(ix), Node::bare(NodeKind::Whiteout))
}

/// Makes a layer of an image stand on its own above `lower`, the merged tree of all layers below it.
pub fn rebase(lower: &Index, mut upper: Index) -> Result<Index> {
    let mut open = upper.resolve_links()?;
    if !open.is_empty() {
        let origins = upper.origins.len() as u32;
        upper.origins.extend(lower.origins.iter().cloned());
        while !open.is_empty() {
            copy_up(lower, &mut upper, origins, open)?;
            // Links to what was copied a moment ago.
            open = upper.resolve_links()?;
        }
    }
    for round in 0.. {
        let misplaced = misplaced(lower, &upper)?;
        let Some((first, _)) = misplaced.first() else { break };
        // Moved directories may meet further links; links of this very layer that lead back could go
        // on for ever.
        if round > MAX_ROUNDS {
            let text = format!("{}: symbolic links of two layers form a loop", path::show(first));
            return Err(Error::invalid(text));
        }
        for (from, to) in misplaced {
            relocate(&mut upper, &from, &to)?;
        }
    }
    describe_implied(lower, &mut upper)?;
    Ok(upper)
}

/// Gives hard links to files of lower layers an inode: as on overlayfs, the file is copied up, at its
/// old name too. Links to links wait; at least one of `open` is no such link, or it is an error.
/// `origins` is by how much the origins of `lower` moved.
fn copy_up(
    lower: &Index,
    upper: &mut Index,
    origins: u32,
    open: Vec<(Vec<u8>, Vec<u8>)>,
) -> Result<()> {
    let mut copies: HashMap<NodeIx, NodeIx> = HashMap::new();
    let mut waiting = None;
    for (from, to) in open {
        let refuse = |why: &str| {
            let (from, to) = (path::show(&from), path::show(&to));
            Error::invalid(format!("{from} is a hard link to {to}, which {why}"))
        };
        let there = upper.lookup(&to)?;
        if there.is_some_and(|ix| upper.node(ix).kind != NodeKind::Whiteout) && from != to {
            waiting.get_or_insert_with(|| refuse("no layer holds"));
            continue;
        }
        let below = lower.lookup(&to)?.ok_or_else(|| refuse("no layer holds"))?;
        if lower.node(below).is_directory() {
            return Err(refuse("is a directory"));
        }
        let copy = match copies.get(&below) {
            Some(&copy) => copy,
            None => {
                let mut node = lower.node(below).clone();
                shift_origin(&mut node, origins);
                let copy = upper.add(node)?;
                copies.insert(below, copy);
                copy
            }
        };
        let (parent, name) = split(&from);
        let parent = upper.make_directory(parent)?;
        upper.link(parent, name, copy)?;
        // A deletion in the same layer concerns the old name, not the file.
        if there.is_none() {
            let (parent, name) = split(&to);
            let parent = upper.make_directory(parent)?;
            upper.link(parent, name, copy)?;
        }
    }
    match waiting {
        // Nothing but links to each other.
        Some(error) if copies.is_empty() => Err(error),
        _ => Ok(()),
    }
}

/// Directories of `upper` that nothing describes and that are symbolic links below, each with the path
/// of the directory that the link leads to. None of them lies in another.
fn misplaced(lower: &Index, upper: &Index) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut found: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    upper.walk(|path, ix| {
        let node = upper.node(ix);
        let inside =
            |outer: &[u8]| path.strip_prefix(outer).is_some_and(|rest| rest.starts_with(b"/"));
        if !node.implied
            || node.opaque
            || !node.is_directory()
            || found.last().is_some_and(|(outer, _)| inside(outer))
        {
            return Ok(());
        }
        if let Some(below) = lower.lookup(path)?
            && matches!(lower.node(below).kind, NodeKind::Symlink(_))
            && let Some((_, real)) = lower.find_real_directory(path)?
        {
            found.push((path.to_vec(), real));
        }
        Ok(())
    })?;
    Ok(found)
}

/// Moves the entries of one directory into another, which may exist.
fn relocate(upper: &mut Index, from: &[u8], to: &[u8]) -> Result<()> {
    let (parent, name) = split(from);
    let parent = upper.make_directory(parent)?;
    let moved = upper.entries_mut(parent)?.remove(name);
    let Some(moved) = moved else {
        return Err(Error::new(ErrorKind::Internal, "a directory to be moved is gone"));
    };
    let target = upper.make_directory(to)?;
    let mut pending = vec![(target, moved)];
    while let Some((target, moved)) = pending.pop() {
        let entries = std::mem::take(upper.entries_mut(moved)?);
        for (name, ix) in entries {
            match upper.child(target, &name) {
                Some(old) if upper.node(old).is_directory() && upper.node(ix).is_directory() => {
                    pending.push((old, ix));
                }
                _ => upper.link(target, &name, ix)?,
            }
        }
    }
    Ok(())
}

/// Gives implied directories the metadata of what is at their path below.
fn describe_implied(lower: &Index, upper: &mut Index) -> Result<()> {
    let mut implied = Vec::new();
    upper.walk(|path, ix| {
        if upper.node(ix).implied {
            implied.push((ix, lower.lookup(path)?));
        }
        Ok(())
    })?;
    for (ix, below) in implied {
        let node = upper.node_mut(ix);
        // The root of a tree that nobody described stays open for a later layer.
        node.implied = ix == NodeIx::ROOT;
        if let Some(below) = below.map(|below| lower.node(below)).filter(|node| node.is_directory())
        {
            node.implied = below.implied;
            node.mode = below.mode;
            node.uid = below.uid;
            node.gid = below.gid;
            node.mtime = below.mtime;
            node.xattrs.clone_from(&below.xattrs);
        }
    }
    Ok(())
}
