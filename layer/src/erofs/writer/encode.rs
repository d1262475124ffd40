//! Writes the image when everything has its form and place.

use super::place::Places;
use super::plan::{Content, Form, Plan, unfit_device};
use super::{Image, content, directory, refuse};
use crate::erofs::format::{
    BLOCK, CHUNK_INDEX_BYTES, CHUNKS_INDEXED, COMPACT_BYTES, COMPAT_CHECKSUM, COMPAT_MTIME,
    DEVICE_SLOT_BYTES, DEVICE_TABLE_OFFSET, EXTENDED_BYTES, INCOMPAT_CHUNKED_FILE,
    INCOMPAT_DEVICE_TABLE, LAYOUT_CHUNKS, LAYOUT_INLINE, LAYOUT_PLAIN, SLOT_BYTES,
    SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET, Superblock, XATTR_HEADER_BYTES, crc32c, dirent_type,
    encode_rdev, type_bits,
};
use crate::error::{Error, Result};
use crate::tree::{Body, Inode, InodeIx, Kind};

pub(super) fn encode(plan: &Plan<'_>, places: &Places) -> Result<Image> {
    let mut bytes = vec![0; places.image_blocks as usize * BLOCK];
    for position in 0..plan.order.len() {
        put_inode(plan, places, position, &mut bytes)?;
    }
    let area = plan.xattrs.area();
    let start = places.xattr_offset as usize;
    bytes[start..start + area.len()].copy_from_slice(&area);
    put_superblock(plan, places, &mut bytes)?;
    let inode_numbers = places.slots.iter().map(|slot| u64::from(*slot)).collect();
    Ok(Image { bytes, inode_numbers })
}

/// The superblock comes last: the UUID and the checksum depend on the rest.
fn put_superblock(plan: &Plan<'_>, places: &Places, bytes: &mut [u8]) -> Result<()> {
    let chunked = plan.forms.iter().any(|form| matches!(form.content, Content::Chunks { .. }));
    // INVARIANT: the root is placed first, in block 0 or 1.
    let root = u16::try_from(places.slots[0])
        .map_err(|_| Error::new(crate::ErrorKind::Internal, "the root has no 16-bit number"))?;
    let mut superblock = Superblock {
        compatible: COMPAT_CHECKSUM | COMPAT_MTIME,
        incompatible: INCOMPAT_DEVICE_TABLE | if chunked { INCOMPAT_CHUNKED_FILE } else { 0 },
        root,
        inodes: plan.order.len() as u64,
        build_time: plan.build_time,
        blocks: places.image_blocks,
        xattr_block: (places.xattr_offset / BLOCK as u64) as u32,
        devices: 1,
        device_slot: (DEVICE_TABLE_OFFSET / DEVICE_SLOT_BYTES) as u16,
        ..Superblock::default()
    };
    let device = &mut bytes[DEVICE_TABLE_OFFSET..][..DEVICE_SLOT_BYTES];
    device[64..68].copy_from_slice(&plan.data_blocks.to_le_bytes());
    device[68..72].copy_from_slice(&places.image_blocks.to_le_bytes());
    let put = |superblock: &Superblock, bytes: &mut [u8]| {
        bytes[SUPERBLOCK_OFFSET..][..SUPERBLOCK_BYTES].copy_from_slice(&superblock.encode());
    };
    put(&superblock, bytes);
    superblock.uuid = uuid_of(bytes);
    put(&superblock, bytes);
    superblock.checksum = crc32c(&bytes[SUPERBLOCK_OFFSET..BLOCK]);
    put(&superblock, bytes);
    Ok(())
}

/// A UUID of version 8 (RFC 9562) from the content of the image.
fn uuid_of(bytes: &[u8]) -> [u8; 16] {
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

fn put_inode(plan: &Plan<'_>, places: &Places, position: usize, bytes: &mut [u8]) -> Result<()> {
    let index = plan.order[position];
    let inode = &plan.tree.inodes[index.index()];
    let form = &plan.forms[position];
    let start = places.slots[index.index()] as usize * SLOT_BYTES;
    let head = if form.extended { EXTENDED_BYTES } else { COMPACT_BYTES };
    let field = content_field(inode, form, places, places.blocks[position])
        .map_err(|why| refuse(plan.tree, index, why))?;
    put_head(
        inode,
        form,
        field,
        plan.links[index.index()],
        position,
        &mut bytes[start..start + head],
    );
    if form.xattr_bytes > 0 {
        let area_at = (places.xattr_offset % BLOCK as u64 / 4) as u32;
        let body = plan
            .xattrs
            .body(&inode.xattrs, area_at)
            .map_err(|why| refuse(plan.tree, index, why))?;
        bytes[start + head..start + head + body.len()].copy_from_slice(&body);
    }
    let tail = start + form.tail_offset() as usize;
    if let (Content::Chunks { bits, count }, Kind::Regular(data)) = (form.content, &inode.kind)
        && let Body::Extents(extents) = &data.body
    {
        let array = &mut bytes[tail..tail + count as usize * CHUNK_INDEX_BYTES];
        content::put_chunks(extents, bits, array);
    }
    let mut sink = Sink { bytes, block: places.blocks[position] as usize * BLOCK, tail, form };
    match &inode.kind {
        Kind::Directory(_) => put_directory(plan, places, index, &mut sink),
        Kind::Symlink(target) => sink.put_all(target),
        Kind::Regular(data) => {
            if let Body::Inline(content) = &data.body {
                sink.put_all(content);
            }
        }
        _ => {}
    }
    Ok(())
}

/// The 32-bit field whose meaning depends on the inode: a block address, a chunk format or a device.
fn content_field(
    inode: &Inode,
    form: &Form,
    places: &Places,
    image_block: u32,
) -> std::result::Result<u32, String> {
    if let Kind::CharDevice(rdev) | Kind::BlockDevice(rdev) = &inode.kind {
        return encode_rdev(*rdev).ok_or_else(|| unfit_device(*rdev));
    }
    Ok(match form.content {
        Content::Nothing => 0,
        Content::Image => image_block,
        // INVARIANT: `Places` checked that the data device ends below 2^32.
        Content::Block(block) => places.image_blocks + block,
        Content::Chunks { bits, .. } => u32::from(CHUNKS_INDEXED | u16::from(bits)),
    })
}

fn put_head(inode: &Inode, form: &Form, field: u32, links: u32, position: usize, head: &mut [u8]) {
    let layout = match form.content {
        Content::Chunks { .. } => LAYOUT_CHUNKS,
        _ if form.tail_bytes > 0 => LAYOUT_INLINE,
        _ => LAYOUT_PLAIN,
    };
    let xattr_units = match form.xattr_bytes as usize {
        0 => 0,
        // INVARIANT: `SharedXattrs::decide` keeps the body within what 16 bits count.
        bytes => ((bytes - XATTR_HEADER_BYTES) / 4 + 1) as u16,
    };
    let mut put = |at: usize, field: &[u8]| head[at..at + field.len()].copy_from_slice(field);
    put(0, &(layout << 1 | u16::from(form.extended)).to_le_bytes());
    put(2, &xattr_units.to_le_bytes());
    put(4, &(type_bits(&inode.kind) | inode.mode).to_le_bytes());
    put(16, &field.to_le_bytes());
    // Only 32-bit `stat` uses it; the kernel's own inode number is the slot.
    put(20, &(position as u32).to_le_bytes());
    if form.extended {
        put(8, &form.size.to_le_bytes());
        put(24, &inode.uid.to_le_bytes());
        put(28, &inode.gid.to_le_bytes());
        put(32, &inode.mtime.secs.to_le_bytes());
        put(40, &inode.mtime.nanos.to_le_bytes());
        put(44, &links.to_le_bytes());
    } else {
        // INVARIANT: `Plan::form` checked that each of these fits.
        put(6, &(links as u16).to_le_bytes());
        put(8, &(form.size as u32).to_le_bytes());
        put(24, &(inode.uid as u16).to_le_bytes());
        put(26, &(inode.gid as u16).to_le_bytes());
    }
}

/// Takes an inode's content in order: whole blocks to the block area, a tail behind the inode.
struct Sink<'a> {
    bytes: &'a mut [u8],
    block: usize,
    tail: usize,
    form: &'a Form,
}

impl Sink<'_> {
    fn put_all(&mut self, content: &[u8]) {
        for block in content.chunks(BLOCK) {
            self.put_block(block);
        }
    }

    fn put_block(&mut self, block: &[u8]) {
        let at =
            if block.len() < BLOCK && self.form.tail_bytes > 0 { self.tail } else { self.block };
        self.bytes[at..at + block.len()].copy_from_slice(block);
        self.block += BLOCK;
    }
}

fn put_directory(plan: &Plan<'_>, places: &Places, index: InodeIx, sink: &mut Sink<'_>) {
    let Some(names) = plan.tree.entries(index) else { return };
    let parent = plan.parents[index.index()];
    let typed = directory::entries(names, index, parent).map(|(name, child)| {
        let kind = &plan.tree.inodes[child.index()].kind;
        let file_type = dirent_type(type_bits(kind)).unwrap_or(0);
        (name, u64::from(places.slots[child.index()]), file_type)
    });
    directory::for_each_block(typed, |block| sink.put_block(block));
}
