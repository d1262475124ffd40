//! A tar file as a source.
//!
//! A plain one is only indexed; contents are read later, by position. A compressed one is unpacked once
//! into a spool file first. Later entries win over earlier ones with the same path. Names stay inside:
//! leading slashes and `..` cannot leave the root, and symbolic links of the archive itself in the
//! middle of a path lead to where they would inside that root.

use super::blob::{Hashing, Region};
use super::spool::{Compression, unpack};
use crate::content::{Content, Origin, Place, Stamp};
use crate::index::{Index, Node, NodeIx, NodeKind, split};
use crate::options::BuildOptions;
use crate::path;
use crate::progress::Progress;
use crate::tar::{BLOCK, Entry, EntryKind, Reader, may_begin};
use crate::xattr::{self, Policy};
use layer::{Context, Error, Result};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

/// What names that begin with `.wh.` mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Names {
    /// Nothing.
    Plain,
    /// Deletions, as in the layers of container images.
    ImageLayer,
}

/// A tar file that was listed.
#[derive(Debug)]
pub(crate) struct Unpacked {
    /// The plain tar.
    pub tar: Region,
    /// What it was unpacked from, if it was.
    pub packed: Option<(Compression, Region)>,
}

/// Digests that a tar file must have.
#[derive(Debug, Clone, Default)]
pub(crate) struct Digests {
    /// Of the file as it is stored.
    pub stored: Option<String>,
    /// Of the tar inside.
    pub plain: Option<String>,
}

/// Lists a tar file. Hard links to what the archive does not hold are errors.
pub fn load(path: &Path, options: &BuildOptions, progress: &dyn Progress) -> Result<Index> {
    let name = path.display().to_string();
    let file = File::open(path).context(|| format!("open {name}"))?;
    let region = Region::whole(file, name.clone())?;
    let mut index = load_region(region, &Digests::default(), Names::Plain, options, progress)?;
    if let Some((from, to)) = index.resolve_links()?.first() {
        return Err(Error::invalid(format!(
            "{name}: {} is a hard link to {}, which the archive does not hold",
            path::show(from),
            path::show(to)
        )));
    }
    Ok(index)
}

/// Lists a tar file that may be packed, after comparing its digests. Hard links that are not resolved
/// yet stay in the index.
pub(crate) fn load_region(
    region: Region,
    digests: &Digests,
    names: Names,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Index> {
    load_layer(region, digests, names, options, progress).map(|(index, _)| index)
}

/// As [`load_region`]; answers the files too. The contents in the index have origin 0, the plain tar.
pub(crate) fn load_layer(
    region: Region,
    digests: &Digests,
    names: Names,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<(Index, Unpacked)> {
    let compression = Compression::detect(&region.first()?).context(|| region.name.clone())?;
    let stat = rustix::fs::fstat(&region.file).map_err(std::io::Error::from);
    let stamp = Stamp::of(&stat.context(|| format!("stat {}", region.name))?);
    if compression == Compression::None {
        for digest in [&digests.stored, &digests.plain].into_iter().flatten() {
            region.verify(digest)?;
        }
        let tar = region.another()?;
        let index = index_region(region, Some(stamp), names, options, progress)?;
        return Ok((index, Unpacked { tar, packed: None }));
    }
    let name = region.name.clone();
    let spool = match &digests.stored {
        Some(digest) => {
            let mut source = Hashing::new(region.reader(), digest)?;
            let spool = unpack(&mut source, compression, &name, options, progress)?;
            source.finish(&name)?;
            spool
        }
        None => unpack(region.reader(), compression, &name, options, progress)?,
    };
    let packed = region.another()?;
    // The packed file is not needed again for contents, so only a change until here matters.
    Origin::Archive { file: region.file, name: name.clone(), stamp: Some(stamp) }.finish()?;
    let spool = Region::whole(spool, name)?;
    if let Some(digest) = &digests.plain {
        spool.verify(digest)?;
    }
    let tar = spool.another()?;
    let index = index_region(spool, None, names, options, progress)?;
    Ok((index, Unpacked { tar, packed: Some((compression, packed)) }))
}

/// What users name may be anything; an empty file would pass for a tar file without entries.
fn refuse_foreign(region: &Region) -> Result<()> {
    if region.length == 0 {
        return Err(Error::invalid("no bytes, so no archive; was a download cut off?"));
    }
    let mut block = [0; BLOCK as usize];
    let begin = region.bytes_at_most(BLOCK as usize)?;
    block[..begin.len()].copy_from_slice(&begin);
    if begin.len() == block.len() && may_begin(block) {
        return Ok(());
    }
    Err(Error::invalid("no archive that is known: a tar file, plain or packed by gz, zst or xz"))
}

/// Lists a plain tar file.
fn index_region(
    region: Region,
    stamp: Option<Stamp>,
    names: Names,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Index> {
    if names == Names::Plain {
        refuse_foreign(&region)?;
    }
    let Region { file, start, length, name } = region;
    let mut index = Index::new();
    let mut reader = Reader::new(&file, start, length, &name);
    let mut position = 0;
    while let Some(entry) = reader.next_entry()? {
        options.cancel.check()?;
        for notice in reader.notices.drain(..) {
            progress.notice(&notice);
        }
        apply(&mut index, entry, names, progress).context(|| name.clone())?;
        progress.advance(1, reader.position() - position);
        position = reader.position();
    }
    // The locators of this index all say origin 0.
    index.add_origin(Origin::Archive { file, name, stamp });
    Ok(index)
}

fn apply(index: &mut Index, entry: Entry, names: Names, progress: &dyn Progress) -> Result<()> {
    let full = path::inside(&entry.path).join(&b'/');
    if full.is_empty() {
        // `./`, `/` and whatever else comes to the root.
        if entry.kind == EntryKind::Directory {
            let node = node(entry, b"", progress)?;
            index.describe_root(node);
        }
        return Ok(());
    }
    let (parent, name) = split(&full);
    let parent = index.make_directory(parent)?;
    if names == Names::ImageLayer
        && let Some(hidden) = name.strip_prefix(b".wh.")
    {
        if hidden == b".wh..opq" {
            index.node_mut(parent).opaque = true;
        } else if !hidden.is_empty() && !hidden.starts_with(b".wh.") {
            index.put(parent, hidden, Node::bare(NodeKind::Whiteout))?;
        }
        // What else begins with `.wh..wh.` is aufs's own bookkeeping, or hides such a name, which
        // no layer can hold.
        return Ok(());
    }
    if let EntryKind::HardLink(target) = &entry.kind {
        let target = path::inside(target).join(&b'/');
        return hard_link(index, parent, name, &full, target);
    }
    let node = node(entry, &full, progress)?;
    index.put(parent, name, node).context(|| path::show(&full))?;
    Ok(())
}

fn hard_link(
    index: &mut Index,
    parent: NodeIx,
    name: &[u8],
    path: &[u8],
    target: Vec<u8>,
) -> Result<()> {
    match index.lookup(&target)? {
        Some(ix) if index.node(ix).is_directory() => {
            Err(Error::invalid(format!("{} is a hard link to a directory", path::show(path))))
        }
        Some(ix) if !matches!(index.node(ix).kind, NodeKind::Whiteout | NodeKind::Link(_)) => {
            index.link(parent, name, ix)
        }
        _ => index.put(parent, name, Node::bare(NodeKind::Link(target))).map(|_| ()),
    }
}

fn node(entry: Entry, path: &[u8], progress: &dyn Progress) -> Result<Node> {
    let (xattrs, _) = xattr::admit(Policy::Foreign, path, entry.xattrs, progress)?;
    let kind = match entry.kind {
        EntryKind::Directory => NodeKind::Directory(BTreeMap::new()),
        EntryKind::Regular { size, pieces } => {
            NodeKind::Regular(Content { size, place: Place::Archive { origin: 0, pieces } })
        }
        EntryKind::Symlink(target) if target.is_empty() => {
            return Err(Error::invalid(format!("{}: symbolic link to nothing", path::show(path))));
        }
        EntryKind::Symlink(target) => NodeKind::Symlink(target),
        EntryKind::HardLink(target) => NodeKind::Link(target),
        EntryKind::CharDevice(rdev) => NodeKind::CharDevice(rdev),
        EntryKind::BlockDevice(rdev) => NodeKind::BlockDevice(rdev),
        EntryKind::Fifo => NodeKind::Fifo,
    };
    // The kernel gives every symbolic link this mode, whatever the archive says.
    let mode = if matches!(kind, NodeKind::Symlink(_)) { 0o777 } else { entry.mode };
    Ok(Node {
        mode,
        uid: entry.uid,
        gid: entry.gid,
        mtime: entry.mtime,
        xattrs,
        implied: false,
        opaque: false,
        kind,
    })
}
