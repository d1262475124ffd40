//! Checks a tree and decides the form of every inode: compact or extended, and where content goes.

use super::content::{self, Mapped};
use super::xattr::SharedXattrs;
use super::{directory, refuse};
use crate::erofs::format::{
    BLOCK, CHUNK_INDEX_BYTES, COMPACT_BYTES, EXTENDED_BYTES, MAX_NAME_BYTES, MAX_TARGET_BYTES,
    SLOT_BYTES, encode_rdev,
};
use crate::error::Result;
use crate::tree::{Body, Inode, InodeIx, Kind, Rdev, Timestamp, Tree};
use std::collections::HashMap;

/// Where an inode's content goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// There is none: special files and empty ones.
    Nothing,
    /// In the image: whole blocks and then perhaps a tail behind the inode.
    Image,
    /// This one block of the data device.
    Block(u32),
    /// An array of chunks behind the inode, on an 8-byte border.
    Chunks { bits: u8, count: u32 },
}

/// The form of one inode in the image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Form {
    pub(super) size: u64,
    pub(super) content: Content,
    pub(super) extended: bool,
    pub(super) xattr_bytes: u32,
    /// Bytes of content behind the inode; they must not cross a block border.
    pub(super) tail_bytes: u32,
    /// Whole blocks of content in the image.
    pub(super) image_blocks: u32,
}

impl Form {
    fn head_bytes(&self) -> u64 {
        if self.extended { EXTENDED_BYTES as u64 } else { COMPACT_BYTES as u64 }
    }

    /// Slots of the inode structure alone.
    pub(super) fn head_slots(&self) -> u64 {
        self.head_bytes() / SLOT_BYTES as u64
    }

    /// Where tail or chunk array start, from the start of the inode.
    pub(super) fn tail_offset(&self) -> u64 {
        let end = self.head_bytes() + u64::from(self.xattr_bytes);
        match self.content {
            Content::Chunks { .. } => end.next_multiple_of(CHUNK_INDEX_BYTES as u64),
            _ => end,
        }
    }

    /// Bytes of the inode with everything that stands behind it.
    pub(super) fn inode_bytes(&self) -> u64 {
        let tail = match self.content {
            Content::Chunks { count, .. } => u64::from(count) * CHUNK_INDEX_BYTES as u64,
            _ => u64::from(self.tail_bytes),
        };
        self.tail_offset() + tail
    }

    /// Puts the last partial block of an image content behind the inode if there is room in a block.
    fn settle_image_content(&mut self) -> std::result::Result<(), String> {
        let (full, tail) = (self.size / BLOCK as u64, self.size % BLOCK as u64);
        let inlined = self.head_bytes() + u64::from(self.xattr_bytes) + tail <= BLOCK as u64;
        self.tail_bytes = if inlined { tail as u32 } else { 0 };
        let blocks = full + u64::from(tail > 0 && !inlined);
        self.image_blocks = u32::try_from(blocks)
            .map_err(|_| format!("{} bytes of metadata for one inode", self.size))?;
        Ok(())
    }
}

/// Everything that is decided about a tree before places are given.
#[derive(Debug)]
pub(super) struct Plan<'t> {
    pub(super) tree: &'t Tree,
    pub(super) data_blocks: u32,
    /// The inodes of the image: each directory's together, directories depth first.
    pub(super) order: Vec<InodeIx>,
    /// Parallel to `order`.
    pub(super) forms: Vec<Form>,
    /// By index in the tree.
    pub(super) links: Vec<u32>,
    /// The parent of each directory, by index in the tree; the root is its own.
    pub(super) parents: Vec<InodeIx>,
    pub(super) xattrs: SharedXattrs<'t>,
    /// The time of the superblock and of every compact inode.
    pub(super) build_time: Timestamp,
}

impl<'t> Plan<'t> {
    pub(super) fn new(tree: &'t Tree, data_blocks: u32) -> Result<Self> {
        let links = tree.link_counts()?;
        let mut plan = Self {
            tree,
            data_blocks,
            order: Vec::new(),
            forms: Vec::new(),
            links,
            parents: Vec::new(),
            xattrs: SharedXattrs::default(),
            build_time: Timestamp::default(),
        };
        plan.arrange()?;
        plan.share_xattrs()?;
        plan.shape()?;
        Ok(plan)
    }

    fn inode(&self, index: InodeIx) -> &'t Inode {
        // INVARIANT: `link_counts` checked every index.
        &self.tree.inodes[index.index()]
    }

    /// Finds the order of the inodes and each directory's parent; checks names.
    fn arrange(&mut self) -> Result<()> {
        let count = self.tree.inodes.len();
        let mut seen = vec![false; count];
        self.parents = vec![InodeIx::ROOT; count];
        self.order.push(InodeIx::ROOT);
        seen[0] = true;
        let mut pending = vec![InodeIx::ROOT];
        let mut below = Vec::new();
        while let Some(at) = pending.pop() {
            for (name, child) in self.tree.entries(at).into_iter().flatten() {
                self.check_name(at, name)?;
                if std::mem::replace(&mut seen[child.index()], true) {
                    continue;
                }
                self.order.push(*child);
                if matches!(self.inode(*child).kind, Kind::Directory(_)) {
                    self.parents[child.index()] = at;
                    below.push(*child);
                }
            }
            pending.extend(below.drain(..).rev());
        }
        Ok(())
    }

    fn check_name(&self, directory: InodeIx, name: &[u8]) -> Result<()> {
        let why = match name {
            b"" | b"." | b".." => "is no name",
            _ if name.len() > MAX_NAME_BYTES => "is longer than 255 bytes",
            _ if name.iter().any(|byte| matches!(byte, 0 | b'/')) => "has a zero byte or a slash",
            _ => return Ok(()),
        };
        let shown = crate::tree::display_path(name);
        Err(refuse(self.tree, directory, format!("the name {:?} in it {why}", &shown[1..])))
    }

    fn share_xattrs(&mut self) -> Result<()> {
        let carriers: Vec<InodeIx> =
            self.order.iter().copied().filter(|ix| !self.inode(*ix).xattrs.is_empty()).collect();
        for index in &carriers {
            let counted = self.xattrs.count(&self.inode(*index).xattrs);
            counted.map_err(|why| refuse(self.tree, *index, why))?;
        }
        for index in &carriers {
            let decided = self.xattrs.decide(&self.inode(*index).xattrs);
            decided.map_err(|why| refuse(self.tree, *index, why))?;
        }
        Ok(())
    }

    /// Decides all forms. The build time is the most frequent one among the inodes that could be
    /// compact, the earliest of equals: before Linux 6.15 a compact inode has no time of its own.
    fn shape(&mut self) -> Result<()> {
        let mut times: HashMap<Timestamp, u64> = HashMap::new();
        for position in 0..self.order.len() {
            let index = self.order[position];
            let form = self.form(index).map_err(|why| refuse(self.tree, index, why))?;
            if !form.extended {
                *times.entry(self.inode(index).mtime).or_default() += 1;
            }
            self.forms.push(form);
        }
        let frequent = times
            .into_iter()
            .max_by(|(a, times_a), (b, times_b)| times_a.cmp(times_b).then_with(|| b.cmp(a)));
        self.build_time = frequent.map_or_else(Timestamp::default, |(time, _)| time);
        for (index, form) in self.order.iter().zip(&mut self.forms) {
            form.extended |= self.tree.inodes[index.index()].mtime != self.build_time;
            if form.content == Content::Image {
                form.settle_image_content().map_err(|why| refuse(self.tree, *index, why))?;
            }
        }
        Ok(())
    }

    /// The form of an inode as far as it does not depend on the build time.
    fn form(&self, index: InodeIx) -> std::result::Result<Form, String> {
        let inode = self.inode(index);
        if inode.mode > 0o7777 {
            return Err(format!("its mode {:o} is no mode", inode.mode));
        }
        if inode.mtime.nanos >= 1_000_000_000 {
            return Err(format!("its time has {} nanoseconds", inode.mtime.nanos));
        }
        if inode.uid == u32::MAX || inode.gid == u32::MAX {
            return Err("its owner is 2^32-1, which is nobody's id".to_owned());
        }
        let (size, content) = self.content(&inode.kind)?;
        let extended = inode.uid > u32::from(u16::MAX)
            || inode.gid > u32::from(u16::MAX)
            || self.links[index.index()] > u32::from(u16::MAX)
            || size > u64::from(u32::MAX);
        let xattr_bytes = self.xattrs.body_bytes(&inode.xattrs)?;
        Ok(Form { size, content, extended, xattr_bytes, tail_bytes: 0, image_blocks: 0 })
    }

    fn content(&self, kind: &Kind) -> std::result::Result<(u64, Content), String> {
        let image =
            |bytes: u64| (bytes, if bytes == 0 { Content::Nothing } else { Content::Image });
        match kind {
            Kind::Directory(names) => Ok(image(directory::size(names))),
            Kind::Symlink(target) => {
                if target.is_empty() || target.len() > MAX_TARGET_BYTES || target.contains(&0) {
                    return Err(format!(
                        "its target has {} bytes; EROFS holds 1 to {MAX_TARGET_BYTES} without zeros",
                        target.len()
                    ));
                }
                Ok(image(target.len() as u64))
            }
            Kind::Regular(data) => match &data.body {
                Body::Inline(bytes) if bytes.len() as u64 == data.size => Ok(image(data.size)),
                Body::Inline(bytes) => {
                    Err(format!("{} inlined bytes for a size of {}", bytes.len(), data.size))
                }
                Body::Extents(extents) => {
                    match content::map(data.size, extents, self.data_blocks)? {
                        _ if data.size == 0 => Ok((0, Content::Nothing)),
                        Mapped::Block(block) => Ok((data.size, Content::Block(block))),
                        Mapped::Chunks { bits, count } => {
                            Ok((data.size, Content::Chunks { bits, count }))
                        }
                    }
                }
            },
            Kind::CharDevice(rdev) | Kind::BlockDevice(rdev) => {
                encode_rdev(*rdev).map(|_| (0, Content::Nothing)).ok_or_else(|| unfit_device(*rdev))
            }
            Kind::Fifo | Kind::Socket => Ok((0, Content::Nothing)),
        }
    }
}

/// Why a device node is refused.
pub(super) fn unfit_device(rdev: Rdev) -> String {
    format!("device {}:{} does not fit 12 and 20 bits", rdev.major, rdev.minor)
}
