//! One inode: its structure, and where its content is.

use super::{InodeRecord, Reader, u16_at, u32_at, u64_at};
use crate::erofs::format::{
    BLOCK, CHUNK_ADDRESS_BYTES, CHUNK_BITS_MASK, CHUNK_INDEX_BYTES, CHUNKS_INDEXED, COMPACT_BYTES,
    DATA_DEVICE, EXTENDED_BYTES, FORMAT_MASK, LAYOUT_CHUNKS, LAYOUT_INLINE, LAYOUT_PLAIN,
    MAX_TARGET_BYTES, NULL_ADDRESS, S_IFMT, SLOT_BYTES, XATTR_HEADER_BYTES, decode_rdev,
};
use crate::error::{Error, ErrorKind, Result};
use crate::tree::{Body, Extent, FileData, Inode, Kind, Timestamp};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// The fields of an inode, not yet interpreted.
pub(super) struct RawInode<'r, 'a> {
    pub(super) reader: &'r Reader<'a>,
    pub(super) number: u64,
    offset: u64,
    head_bytes: u64,
    layout: u16,
    pub(super) mode: u16,
    pub(super) links: u32,
    pub(super) size: u64,
    field: u32,
    uid: u32,
    gid: u32,
    mtime: Timestamp,
    pub(super) xattr_bytes: u64,
}

impl<'a> Reader<'a> {
    pub(super) fn raw_inode(&self, number: u64) -> Result<RawInode<'_, 'a>> {
        let offset = number
            .checked_mul(SLOT_BYTES as u64)
            .and_then(|at| at.checked_add(u64::from(self.superblock.inode_block) * BLOCK as u64))
            .ok_or_else(|| Error::corrupt(format!("EROFS inode {number} lies nowhere")))?;
        let head = self.bytes(offset, COMPACT_BYTES as u64)?;
        let format = u16_at(head, 0);
        if format & !FORMAT_MASK != 0 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("EROFS inode {number} has format {format:#x}"),
            ));
        }
        let xattr_bytes = match u64::from(u16_at(head, 2)) {
            0 => 0,
            units => XATTR_HEADER_BYTES as u64 + 4 * (units - 1),
        };
        let layout = format >> 1;
        let compact = RawInode {
            reader: self,
            number,
            offset,
            head_bytes: COMPACT_BYTES as u64,
            layout,
            mode: u16_at(head, 4),
            links: u32::from(u16_at(head, 6)),
            size: u64::from(u32_at(head, 8)),
            field: u32_at(head, 16),
            uid: u32::from(u16_at(head, 24)),
            gid: u32::from(u16_at(head, 26)),
            mtime: self.superblock.build_time,
            xattr_bytes,
        };
        if format & 1 == 0 {
            return Ok(compact);
        }
        let head = self.bytes(offset, EXTENDED_BYTES as u64)?;
        Ok(RawInode {
            head_bytes: EXTENDED_BYTES as u64,
            links: u32_at(head, 44),
            size: u64_at(head, 8),
            uid: u32_at(head, 24),
            gid: u32_at(head, 28),
            mtime: Timestamp { secs: u64_at(head, 32).cast_signed(), nanos: u32_at(head, 40) },
            ..compact
        })
    }
}

impl<'a> RawInode<'_, 'a> {
    pub(super) fn corrupt(&self, why: impl AsRef<str>) -> Error {
        Error::corrupt(format!("EROFS inode {}: {}", self.number, why.as_ref()))
    }

    /// The xattrs that stand behind the inode, header included; empty for none.
    pub(super) fn xattr_body(&self) -> Result<&'a [u8]> {
        self.reader.bytes(self.offset + self.head_bytes, self.xattr_bytes)
    }

    fn tail_offset(&self) -> u64 {
        self.offset + self.head_bytes + self.xattr_bytes
    }

    /// True where the content lies in the image and not on the data device.
    fn is_in_image(&self) -> bool {
        match self.layout {
            LAYOUT_INLINE => true,
            LAYOUT_PLAIN => {
                let start = self.reader.data_address;
                start == 0 || self.field < start || self.field - start >= self.reader.data_blocks
            }
            _ => false,
        }
    }

    /// The content of an inode that keeps it in the image; bounded by the image's size.
    pub(super) fn image_content(&self) -> Result<Cow<'a, [u8]>> {
        if self.size == 0 {
            return Ok(Cow::Borrowed(&[]));
        }
        let blocks = self.size.div_ceil(BLOCK as u64);
        match self.layout {
            LAYOUT_PLAIN => {
                let address = u64::from(self.field) * BLOCK as u64;
                self.reader.bytes(address, self.size).map(Cow::Borrowed)
            }
            LAYOUT_INLINE => {
                let tail = (self.size - 1) % BLOCK as u64 + 1;
                if self.tail_offset() % BLOCK as u64 + tail > BLOCK as u64 {
                    return Err(self.corrupt("its inline tail crosses a block border"));
                }
                let tail = self.reader.bytes(self.tail_offset(), tail)?;
                if blocks == 1 {
                    return Ok(Cow::Borrowed(tail));
                }
                let whole = self.reader.blocks(self.field, blocks - 1)?;
                Ok(Cow::Owned([whole, tail].concat()))
            }
            _ => Err(self.corrupt(format!("layout {} where content is in the image", self.layout))),
        }
    }

    pub(super) fn is_directory(&self) -> bool {
        self.mode & S_IFMT == 0o040_000
    }

    pub(super) fn record(&self) -> Result<InodeRecord> {
        if self.mtime.nanos >= 1_000_000_000 {
            return Err(self.corrupt(format!("{} nanoseconds", self.mtime.nanos)));
        }
        let kind = match self.mode & S_IFMT {
            0o010_000 => Kind::Fifo,
            0o020_000 => Kind::CharDevice(decode_rdev(self.field)),
            0o040_000 => Kind::Directory(BTreeMap::new()),
            0o060_000 => Kind::BlockDevice(decode_rdev(self.field)),
            0o100_000 => Kind::Regular(self.file_data()?),
            0o120_000 if self.size > MAX_TARGET_BYTES as u64 => {
                return Err(self.corrupt(format!("a link target of {} bytes", self.size)));
            }
            0o120_000 => Kind::Symlink(self.image_content()?.into_owned()),
            0o140_000 => Kind::Socket,
            _ => return Err(self.corrupt(format!("mode {:o}", self.mode))),
        };
        let inode = Inode {
            mode: self.mode & !S_IFMT,
            uid: self.uid,
            gid: self.gid,
            mtime: self.mtime,
            xattrs: self.xattrs()?,
            kind,
        };
        Ok(InodeRecord { number: self.number, links: self.links, size: self.size, inode })
    }

    fn file_data(&self) -> Result<FileData> {
        if self.size > i64::MAX as u64 {
            return Err(self.corrupt(format!("a size of {} bytes", self.size)));
        }
        let body = match self.layout {
            _ if self.size == 0 => Body::Inline(Vec::new()),
            LAYOUT_CHUNKS => Body::Extents(self.chunks()?),
            _ if self.is_in_image() => Body::Inline(self.image_content()?.into_owned()),
            LAYOUT_PLAIN => Body::Extents(vec![self.run()?]),
            layout => return Err(self.corrupt(format!("layout {layout}"))),
        };
        Ok(FileData { size: self.size, body })
    }

    /// The one extent of a plain file on the data device.
    fn run(&self) -> Result<Extent> {
        let data_block = self.field - self.reader.data_address;
        u32::try_from(self.size.div_ceil(BLOCK as u64))
            .ok()
            .filter(|blocks| *blocks <= self.reader.data_blocks - data_block)
            .map(|blocks| Extent { file_block: 0, blocks, data_block })
            .ok_or_else(|| self.corrupt("its content ends behind the data device"))
    }

    /// The extents of a chunk-based file: neighbours are merged, holes left out.
    fn chunks(&self) -> Result<Vec<Extent>> {
        let format = u16_at(&self.field.to_le_bytes(), 0);
        if format & !(CHUNK_BITS_MASK | CHUNKS_INDEXED) != 0 {
            return Err(self.corrupt(format!("chunk format {format:#x}")));
        }
        let bits = format & CHUNK_BITS_MASK;
        let indexed = format & CHUNKS_INDEXED != 0;
        let unit = if indexed { CHUNK_INDEX_BYTES } else { CHUNK_ADDRESS_BYTES };
        let blocks = self.size.div_ceil(BLOCK as u64);
        let count = blocks.div_ceil(1 << bits);
        let array = count
            .checked_mul(unit as u64)
            .ok_or_else(|| self.corrupt("a chunk array without end"))?;
        let array = self.reader.bytes(self.tail_offset().next_multiple_of(unit as u64), array)?;
        let mut extents: Vec<Extent> = Vec::new();
        for (entry, chunk) in array.chunks_exact(unit).zip(0_u64..) {
            let address = u32_at(entry, unit - 4);
            if address == NULL_ADDRESS {
                continue;
            }
            let device = if indexed { u16_at(entry, 2) & 1 } else { 0 };
            let file_block = chunk << bits;
            let length = (blocks - file_block).min(1 << bits);
            let extent = self.chunk_extent(device, address, file_block, length)?;
            if !extents.last_mut().is_some_and(|last| last.absorb(&extent)) {
                extents.push(extent);
            }
        }
        Ok(extents)
    }

    fn chunk_extent(
        &self,
        device: u16,
        address: u32,
        file_block: u64,
        blocks: u64,
    ) -> Result<Extent> {
        // The data device is named, or mapped behind the image where it has a place in the addresses.
        let start = match (device, self.reader.data_address) {
            (DATA_DEVICE, _) => Some(0),
            (_, 0) => None,
            (_, mapped) => Some(mapped),
        };
        let data_block = start
            .and_then(|start| address.checked_sub(start))
            .filter(|block| u64::from(*block) + blocks <= u64::from(self.reader.data_blocks));
        // Block numbers in a file have 32 bits, as those of the data device do.
        let end = u32::try_from(file_block + blocks).ok();
        match (data_block, end) {
            // INVARIANT: both are at most `end`.
            (Some(data_block), Some(_)) => {
                Ok(Extent { file_block: file_block as u32, blocks: blocks as u32, data_block })
            }
            _ => Err(self.corrupt(format!(
                "{blocks} blocks of file block {file_block} at {address} of device {device}"
            ))),
        }
    }
}
