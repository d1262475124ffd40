//! A source folder as a tree and a data space: a small builder of the tests' own, with choices by a
//! seed, so that every form of content occurs.

use crate::random::Random;
use crate::view;
use anyhow::{Context, Result};
use layer::tree::{Body, Extent, FileData, Inode, InodeIx, Kind, Rdev, Timestamp, Tree, Xattr};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;

const BLOCK: u64 = 4096;

pub struct Imported {
    pub tree: Tree,
    /// Whole blocks.
    pub data: Vec<u8>,
}

impl Imported {
    pub fn data_blocks(&self) -> u32 {
        (self.data.len() as u64 / BLOCK) as u32
    }
}

/// How contents are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Every form: inlined, shared, scattered, one run.
    Mixed,
    /// One run a file, nothing inlined or shared: what a comparison of sizes needs.
    Plain,
}

struct Importer<'r> {
    random: &'r mut Random,
    layout: Layout,
    tree: Tree,
    data: Vec<u8>,
    known: HashMap<u64, InodeIx>,
    shared: HashMap<Vec<u8>, Vec<Extent>>,
}

pub fn import(root: &Path, random: &mut Random, layout: Layout) -> Result<Imported> {
    let mut importer = Importer {
        random,
        layout,
        tree: Tree::new(Inode {
            mode: 0,
            uid: 0,
            gid: 0,
            mtime: Timestamp::default(),
            xattrs: Vec::new(),
            kind: Kind::Fifo,
        }),
        data: Vec::new(),
        known: HashMap::new(),
        shared: HashMap::new(),
    };
    importer.tree.inodes[0] = importer.inode(root)?;
    let mut pending = vec![(InodeIx::ROOT, root.to_owned())];
    while let Some((parent, path)) = pending.pop() {
        let mut names: Vec<_> =
            std::fs::read_dir(&path)?.map(|entry| Ok(entry?.file_name())).collect::<Result<_>>()?;
        names.sort();
        for name in names {
            let below = path.join(&name);
            let number = below.symlink_metadata()?.ino();
            let index = match importer.known.get(&number) {
                Some(index) => *index,
                None => {
                    let inode =
                        importer.inode(&below).with_context(|| format!("import {below:?}"))?;
                    importer.tree.add(inode)?
                }
            };
            importer.known.insert(number, index);
            importer.tree.link(parent, name.into_vec(), index)?;
            if below.symlink_metadata()?.is_dir() {
                pending.push((index, below));
            }
        }
    }
    Ok(Imported { tree: importer.tree, data: importer.data })
}

impl Importer<'_> {
    fn inode(&mut self, path: &Path) -> Result<Inode> {
        let meta = path.symlink_metadata()?;
        let kind = meta.file_type();
        let rdev =
            Rdev { major: rustix::fs::major(meta.rdev()), minor: rustix::fs::minor(meta.rdev()) };
        let kind = match () {
            () if kind.is_dir() => Kind::Directory(BTreeMap::new()),
            () if kind.is_file() => Kind::Regular(self.file(path, meta.size())?),
            () if kind.is_symlink() => {
                Kind::Symlink(std::fs::read_link(path)?.as_os_str().as_bytes().to_vec())
            }
            () if kind.is_fifo() => Kind::Fifo,
            () if kind.is_socket() => Kind::Socket,
            () if kind.is_char_device() => Kind::CharDevice(rdev),
            () => Kind::BlockDevice(rdev),
        };
        let xattrs = view::xattrs(path)?;
        Ok(Inode {
            mode: (meta.mode() & 0o7777) as u16,
            uid: meta.uid(),
            gid: meta.gid(),
            mtime: Timestamp { secs: meta.mtime(), nanos: meta.mtime_nsec() as u32 },
            xattrs: xattrs.into_iter().map(|(name, value)| Xattr { name, value }).collect(),
            kind,
        })
    }

    fn file(&mut self, path: &Path, size: u64) -> Result<FileData> {
        let file = File::open(path)?;
        let runs = view::data_runs(&file, size)?;
        let whole = runs.as_slice() == [(0, size)] || size == 0;
        if !whole {
            return Ok(FileData { size, body: Body::Extents(self.sparse(&file, size, &runs)?) });
        }
        let mut content = vec![0; size as usize];
        file.read_exact_at(&mut content, 0)?;
        let mixed = self.layout == Layout::Mixed;
        if mixed && size <= 20_000 && self.random.one_in(3) {
            return Ok(FileData { size, body: Body::Inline(content) });
        }
        if size == 0 {
            return Ok(FileData { size, body: Body::Extents(Vec::new()) });
        }
        content.resize(content.len().next_multiple_of(BLOCK as usize), 0);
        if mixed && let Some(extents) = self.shared.get(&content) {
            return Ok(FileData { size, body: Body::Extents(extents.clone()) });
        }
        let blocks = (content.len() as u64 / BLOCK) as u32;
        let extents = if mixed && blocks > 1 && self.random.one_in(3) {
            // Two parts, the second of them placed first.
            let cut = 1 + self.random.below(u64::from(blocks) - 1) as u32;
            let (head, tail) = content.split_at(cut as usize * BLOCK as usize);
            let tail = self.place(cut, tail);
            vec![self.place(0, head), tail]
        } else {
            vec![self.place(0, &content)]
        };
        self.shared.insert(content, extents.clone());
        Ok(FileData { size, body: Body::Extents(extents) })
    }

    /// Rounds what is data to the borders that holes may have in such a file.
    fn sparse(&mut self, file: &File, size: u64, runs: &[(u64, u64)]) -> Result<Vec<Extent>> {
        let blocks = size.div_ceil(BLOCK);
        let unit = layer::erofs::hole_granularity_blocks(blocks) * BLOCK;
        let mut rounded: Vec<(u64, u64)> = Vec::new();
        for (start, end) in runs {
            let start = start / unit * unit;
            let end = end.next_multiple_of(unit).min(blocks * BLOCK);
            match rounded.last_mut() {
                Some(last) if last.1 >= start => last.1 = end,
                _ => rounded.push((start, end)),
            }
        }
        let mut extents = Vec::new();
        for (start, end) in rounded {
            let mut content = vec![0; (end - start) as usize];
            let inside = (end.min(size) - start) as usize;
            file.read_exact_at(&mut content[..inside], start)?;
            extents.push(self.place((start / BLOCK) as u32, &content));
        }
        Ok(extents)
    }

    fn place(&mut self, file_block: u32, content: &[u8]) -> Extent {
        let data_block = (self.data.len() as u64 / BLOCK) as u32;
        self.data.extend_from_slice(content);
        Extent { file_block, blocks: (content.len() as u64 / BLOCK) as u32, data_block }
    }
}
