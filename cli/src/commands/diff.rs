//! `diff`: what differs between two layers or environments, as a sandbox would see them.
//!
//! From metadata and chunk digests alone; only where two files of one size lie in chunks of different digests
//! are their bytes read and compared.

use super::images::{layer_ids, resolve};
use super::overlay_view::View;
use super::{Scene, named};
use crate::args::Diff;
use crate::embed::{self, Images};
use crate::errors::Outcome;
use crate::output::name;
use crate::quantity::show_bytes;
use layer::chunk::{BLOCK_BYTES, ChunkTable};
use layer::erofs::reader::Reader;
use layer::location::Locations;
use layer::tree::{Body, FileData, Inode, Kind};
use layer::{Context, Digest, Error, LayerId, Result};
use proto::v1::resolve_response::Target as Resolved;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use store::Store;

/// One path that differs.
#[derive(Debug, Serialize)]
struct Change {
    /// `added`, `removed` or `changed`.
    change: &'static str,
    /// Escaped where the name is no plain text.
    path: String,
    /// Sizes before and after, where it is a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    old_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    new_bytes: Option<u64>,
    /// In what a changed path differs: `type`, `content`, `target`, `mode`, `owner`, `xattrs`, `time`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    differs: Vec<&'static str>,
}

/// All of them.
#[derive(Debug, Default, Serialize)]
struct Changes {
    added: u64,
    removed: u64,
    changed: u64,
    added_bytes: u64,
    removed_bytes: u64,
    paths: Vec<Change>,
}

impl Changes {
    fn lines(&self) -> String {
        let mut text = String::new();
        for change in &self.paths {
            let letter = match change.change {
                "added" => 'A',
                "removed" => 'D',
                _ => 'M',
            };
            _ = write!(text, "{letter} {}", change.path);
            match (change.old_bytes, change.new_bytes) {
                (Some(old), Some(new)) if old != new => _ = write!(text, " ({old} -> {new})"),
                (None, Some(bytes)) | (Some(bytes), None) => _ = write!(text, " ({bytes})"),
                _ => {}
            }
            if !change.differs.is_empty() {
                _ = write!(text, " [{}]", change.differs.join(" "));
            }
            text.push('\n');
        }
        _ = write!(
            text,
            "{} added ({}), {} removed ({}), {} changed",
            self.added,
            show_bytes(self.added_bytes),
            self.removed,
            show_bytes(self.removed_bytes),
            self.changed
        );
        text
    }
}

/// `diff`
pub async fn diff(scene: &Scene, args: &Diff) -> Outcome {
    let mut images = embed::images(&scene.settings, scene.out).await?;
    let old = stack(&mut images, &args.old).await?;
    let new = stack(&mut images, &args.new).await?;
    let url = images.store_url(&scene.settings)?;
    let changes = super::blocking(move || -> Outcome<Changes> {
        let store = Store::open(store::open(&url)?)?;
        let old = Side::read(&store, &old.0, old.1)?;
        let new = Side::read(&store, &new.0, new.1)?;
        compare(&store, &old, &new)
    })
    .await??;
    scene.out.result(&changes, || changes.lines())
}

/// The layers of a name, bottom first, and whether it is one layer and no stack.
async fn stack(images: &mut Images, text: &str) -> Outcome<(Vec<LayerId>, bool)> {
    let answer = resolve(images, &named(text)?).await?;
    let is_layer = matches!(answer.target, Some(Resolved::LayerId(_)));
    Ok((layer_ids(&answer)?, is_layer))
}

/// One of the two.
struct Side {
    view: View,
    layers: Vec<(LayerId, ChunkTable)>,
}

/// A path: its inode, and the layer that it is of.
struct Entry<'a> {
    inode: &'a Inode,
    layer: usize,
}

impl Side {
    fn read(store: &Store, ids: &[LayerId], is_layer: bool) -> Result<Self> {
        let (mut trees, mut layers) = (Vec::new(), Vec::new());
        for id in ids {
            let name = || format!("read layer {}", id.short());
            let file = store.read_layer(id).context(name)?;
            trees.push(
                Reader::parse(&file.metadata).and_then(|image| image.to_tree()).context(name)?,
            );
            layers.push((*id, file.chunk_table));
        }
        let view = match trees.pop() {
            Some(only) if is_layer => View::of_layer(only),
            top => {
                trees.extend(top);
                View::of_stack(trees)
            }
        };
        Ok(Self { view, layers })
    }

    fn entries(&self) -> Outcome<BTreeMap<Vec<u8>, Entry<'_>>> {
        let mut entries = BTreeMap::new();
        let root = self.view.find(b"").ok_or_else(|| Error::corrupt("a tree without a root"))?;
        self.view.walk(b"", &root, &mut |path, node| {
            let inode = self.view.inode(node)?;
            entries.insert(path.to_vec(), Entry { inode, layer: node.layer() });
            Ok(())
        })?;
        Ok(entries)
    }

    /// Where the bytes of a file lie, cut at chunks: digest, first block in the chunk, blocks. Equal ones mean
    /// equal bytes.
    fn pieces(&self, layer: usize, data: &FileData) -> Result<Vec<u8>> {
        let mut pieces = Vec::new();
        let extents = match &data.body {
            Body::Inline(bytes) => return Ok([b"inline".as_slice(), bytes].concat()),
            Body::Extents(extents) => extents,
        };
        for extent in extents {
            let mut at = extent.data_block;
            let end = extent.data_block.saturating_add(extent.blocks);
            let mut file_block = extent.file_block;
            while at < end {
                let chunk = self.chunk(layer, at)?;
                let blocks = (chunk.start_block + chunk.blocks).min(end) - at;
                pieces.extend_from_slice(&chunk.digest.0);
                for number in [file_block, at - chunk.start_block, blocks] {
                    pieces.extend_from_slice(&number.to_le_bytes());
                }
                at += blocks;
                file_block += blocks;
            }
        }
        Ok(pieces)
    }

    fn chunk(&self, layer: usize, block: u32) -> Result<layer::chunk::Chunk> {
        let (id, table) = &self.layers[layer];
        let found = table.find(block).map(|at| table.chunks()[at]);
        found.ok_or_else(|| Error::corrupt(format!("layer {id} has no block {block}")))
    }

    /// The digest of a file's bytes, read from the store.
    fn content(&self, store: &Store, layer: usize, data: &FileData) -> Result<Digest> {
        let mut hasher = Content { hasher: blake3::Hasher::new(), left: data.size };
        let extents = match &data.body {
            Body::Inline(bytes) => {
                hasher.add(bytes);
                return Ok(hasher.end());
            }
            Body::Extents(extents) => extents,
        };
        let (id, table) = &self.layers[layer];
        let locations = store.read_locations(id)?.unwrap_or_default();
        let mut block = 0;
        for extent in extents {
            hasher
                .zeros(u64::from(extent.file_block.saturating_sub(block)) * u64::from(BLOCK_BYTES));
            let mut at = extent.data_block;
            let end = extent.data_block.saturating_add(extent.blocks);
            while at < end {
                let chunk = self.chunk(layer, at)?;
                let blocks = (chunk.start_block + chunk.blocks).min(end) - at;
                let plain = read_chunk(store, id, table, &locations, at)?;
                let start = ((at - chunk.start_block) * BLOCK_BYTES) as usize;
                hasher.add(&plain[start..start + (blocks * BLOCK_BYTES) as usize]);
                at += blocks;
            }
            block = extent.file_block + extent.blocks;
        }
        Ok(hasher.end())
    }
}

/// A digest over exactly as many bytes as a file has.
struct Content {
    hasher: blake3::Hasher,
    left: u64,
}

impl Content {
    fn add(&mut self, bytes: &[u8]) {
        let taken = self.left.min(bytes.len() as u64);
        self.hasher.update(&bytes[..taken as usize]);
        self.left -= taken;
    }

    fn zeros(&mut self, mut count: u64) {
        let zeros = [0; 1 << 16];
        while count > 0 && self.left > 0 {
            let part = count.min(zeros.len() as u64);
            self.add(&zeros[..part as usize]);
            count -= part;
        }
    }

    fn end(mut self) -> Digest {
        self.zeros(u64::MAX);
        Digest(*self.hasher.finalize().as_bytes())
    }
}

fn read_chunk(
    store: &Store,
    id: &LayerId,
    table: &ChunkTable,
    locations: &Locations,
    block: u32,
) -> Result<Vec<u8>> {
    let missing = || Error::not_found(format!("block {block} of layer {id} is not located"));
    let at = table.find(block).ok_or_else(missing)?;
    let chunk = table.chunks()[at];
    if chunk.is_zero() {
        return Ok(vec![0; chunk.plain_bytes() as usize]);
    }
    let (pack, place) = locations.get(at).ok_or_else(missing)?;
    let mut payload = vec![0; place.stored_bytes as usize];
    store.read_pack(&pack, place.offset, &mut payload)?;
    store::codec::decode_chunk(&payload, place.codec, chunk.plain_bytes(), &chunk.digest)
}

fn compare(store: &Store, old: &Side, new: &Side) -> Outcome<Changes> {
    let (before, mut after) = (old.entries()?, new.entries()?);
    let mut changes = Changes::default();
    for (path, was) in &before {
        let change = match after.remove(path) {
            None => {
                changes.removed += 1;
                changes.removed_bytes += size(was.inode).unwrap_or(0);
                change("removed", path, size(was.inode), None, Vec::new())
            }
            Some(is) => {
                let differs = differences(store, (old, was), (new, &is))?;
                if differs.is_empty() {
                    continue;
                }
                changes.changed += 1;
                change("changed", path, size(was.inode), size(is.inode), differs)
            }
        };
        changes.paths.push(change);
    }
    for (path, is) in &after {
        changes.added += 1;
        changes.added_bytes += size(is.inode).unwrap_or(0);
        changes.paths.push(change("added", path, None, size(is.inode), Vec::new()));
    }
    changes.paths.sort_by(|one, two| one.path.cmp(&two.path));
    Ok(changes)
}

fn change(
    change: &'static str,
    path: &[u8],
    old_bytes: Option<u64>,
    new_bytes: Option<u64>,
    differs: Vec<&'static str>,
) -> Change {
    Change { change, path: name(path), old_bytes, new_bytes, differs }
}

fn size(inode: &Inode) -> Option<u64> {
    match &inode.kind {
        Kind::Regular(data) => Some(data.size),
        _ => None,
    }
}

fn differences(
    store: &Store,
    (old, was): (&Side, &Entry<'_>),
    (new, is): (&Side, &Entry<'_>),
) -> Result<Vec<&'static str>> {
    let (one, two) = (was.inode, is.inode);
    let kind = match (&one.kind, &two.kind) {
        (Kind::Directory(_), Kind::Directory(_)) => None,
        (Kind::Regular(before), Kind::Regular(after)) => {
            let differs = before.size != after.size
                || old.pieces(was.layer, before)? != new.pieces(is.layer, after)?
                    && old.content(store, was.layer, before)?
                        != new.content(store, is.layer, after)?;
            differs.then_some("content")
        }
        (Kind::Symlink(before), Kind::Symlink(after)) => (before != after).then_some("target"),
        (before, after) => (before != after).then_some("type"),
    };
    let pairs = [
        (one.mode != two.mode, "mode"),
        ((one.uid, one.gid) != (two.uid, two.gid), "owner"),
        (one.xattrs != two.xattrs, "xattrs"),
        (one.mtime != two.mtime, "time"),
    ];
    let others = pairs.into_iter().filter(|(differs, _)| *differs).map(|(_, what)| what);
    Ok(kind.into_iter().chain(others).collect())
}
