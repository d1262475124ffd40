//! The on-disk structures of EROFS that layers use, as documented in the kernel's
//! `Documentation/filesystems/erofs.rst` and at erofs.docs.kernel.org; everything is little-endian.
//!
//! Only numbers and their encoding live here; what goes where is the writer's and reader's business.

use crate::chunk::BLOCK_BYTES;
use crate::tree::{Kind, Rdev, Timestamp};

/// Bytes in a block, as an index.
pub(crate) const BLOCK: usize = BLOCK_BYTES as usize;
/// Where the superblock starts.
pub(crate) const SUPERBLOCK_OFFSET: usize = 1024;
/// Bytes in the superblock.
pub(crate) const SUPERBLOCK_BYTES: usize = 128;
/// The superblock's magic number.
pub(crate) const MAGIC: u32 = 0xE0F5_E1E2;
/// log2 of the block size.
pub(crate) const BLOCK_BITS: u8 = 12;

/// The superblock has a checksum.
pub(crate) const COMPAT_CHECKSUM: u32 = 0x1;
/// Inode times are modification times.
pub(crate) const COMPAT_MTIME: u32 = 0x2;
/// Compressed data is aligned to the end of blocks; says nothing about images without compression.
pub(crate) const INCOMPAT_ZERO_PADDING: u32 = 0x1;
/// Some inodes are chunk-based.
pub(crate) const INCOMPAT_CHUNKED_FILE: u32 = 0x4;
/// There is a device table.
pub(crate) const INCOMPAT_DEVICE_TABLE: u32 = 0x8;

/// Bytes in a device slot; the table starts at a multiple of it.
pub(crate) const DEVICE_SLOT_BYTES: usize = 128;
/// Our one device slot lies right behind the superblock.
pub(crate) const DEVICE_TABLE_OFFSET: usize = SUPERBLOCK_OFFSET + SUPERBLOCK_BYTES;
/// The id of the data device in chunk indexes.
pub(crate) const DATA_DEVICE: u16 = 1;

/// Inodes start at multiples of this; an inode's number counts them.
pub(crate) const SLOT_BYTES: usize = 32;
/// Slots in a block.
pub(crate) const BLOCK_SLOTS: usize = BLOCK / SLOT_BYTES;
/// Bytes in a compact inode.
pub(crate) const COMPACT_BYTES: usize = 32;
/// Bytes in an extended inode.
pub(crate) const EXTENDED_BYTES: usize = 64;

/// Content is contiguous blocks.
pub(crate) const LAYOUT_PLAIN: u16 = 0;
/// Content is contiguous blocks, the last partial one behind the inode.
pub(crate) const LAYOUT_INLINE: u16 = 2;
/// Content is found through an array behind the inode.
pub(crate) const LAYOUT_CHUNKS: u16 = 4;
/// The bits of an inode's format that we know: version and layout.
pub(crate) const FORMAT_MASK: u16 = 0xf;

/// The array behind a chunk-based inode has 8-byte entries with device ids.
pub(crate) const CHUNKS_INDEXED: u16 = 0x20;
/// The bits of the chunk format that hold log2 of the blocks in a chunk.
pub(crate) const CHUNK_BITS_MASK: u16 = 0x1f;
/// Bytes of an entry with device id.
pub(crate) const CHUNK_INDEX_BYTES: usize = 8;
/// Bytes of an entry without device id.
pub(crate) const CHUNK_ADDRESS_BYTES: usize = 4;
/// The block address of a hole.
pub(crate) const NULL_ADDRESS: u32 = u32::MAX;

/// Bytes in a directory entry, without the name.
pub(crate) const DIRENT_BYTES: usize = 12;
/// The longest name.
pub(crate) const MAX_NAME_BYTES: usize = 255;
/// The longest symbolic link target that the kernel resolves (PATH_MAX - 1).
pub(crate) const MAX_TARGET_BYTES: usize = 4095;

/// Bytes of the header before an inode's shared and inline xattrs.
pub(crate) const XATTR_HEADER_BYTES: usize = 12;
/// Bytes of an xattr entry, without name and value; also the alignment of entries.
pub(crate) const XATTR_ENTRY_BYTES: usize = 4;
/// The longest name without its prefix.
pub(crate) const MAX_XATTR_NAME_BYTES: usize = 255;
/// The longest value.
pub(crate) const MAX_XATTR_VALUE_BYTES: usize = 65_535;
/// The most shared xattrs of one inode.
pub(crate) const MAX_SHARED_XATTRS: usize = 255;
/// The most bytes of xattrs behind one inode, header included.
pub(crate) const MAX_XATTR_BODY_BYTES: usize = XATTR_HEADER_BYTES + 4 * (u16::MAX as usize - 1);

/// The xattr namespaces that the kernel's EROFS serves: index and prefix. The two ACLs are whole
/// names.
pub(crate) const XATTR_PREFIXES: [(u8, &[u8]); 5] = [
    (1, b"user."),
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (4, b"trusted."),
    (6, b"security."),
];

/// Splits a full xattr name into the prefix's index and the rest; `None` where EROFS has no
/// namespace for it.
pub(crate) fn split_xattr_name(name: &[u8]) -> Option<(u8, &[u8])> {
    XATTR_PREFIXES.iter().find_map(|(index, prefix)| {
        let rest = name.strip_prefix(*prefix)?;
        (prefix.ends_with(b".") != rest.is_empty()).then_some((*index, rest))
    })
}

/// The prefix of an index.
pub(crate) fn xattr_prefix(index: u8) -> Option<&'static [u8]> {
    XATTR_PREFIXES.iter().find(|(known, _)| *known == index).map(|(_, prefix)| *prefix)
}

/// Bytes of a whole xattr entry, padding included.
pub(crate) fn xattr_entry_bytes(name: usize, value: usize) -> usize {
    (XATTR_ENTRY_BYTES + name + value).next_multiple_of(XATTR_ENTRY_BYTES)
}

/// The file type bits of `st_mode`.
pub(crate) const S_IFMT: u16 = 0o170_000;

/// The file type bits of `st_mode` for a kind of inode.
pub(crate) fn type_bits(kind: &Kind) -> u16 {
    match kind {
        Kind::Fifo => 0o010_000,
        Kind::CharDevice(_) => 0o020_000,
        Kind::Directory(_) => 0o040_000,
        Kind::BlockDevice(_) => 0o060_000,
        Kind::Regular(_) => 0o100_000,
        Kind::Symlink(_) => 0o120_000,
        Kind::Socket => 0o140_000,
    }
}

/// The file type in a directory entry for `st_mode`'s type bits; `None` for bits that mean nothing.
pub(crate) fn dirent_type(mode: u16) -> Option<u8> {
    match mode & S_IFMT {
        0o100_000 => Some(1),
        0o040_000 => Some(2),
        0o020_000 => Some(3),
        0o060_000 => Some(4),
        0o010_000 => Some(5),
        0o140_000 => Some(6),
        0o120_000 => Some(7),
        _ => None,
    }
}

/// `DT_*` of readdir(3) for the file type in a directory entry; 0 for unknown ones.
pub(crate) fn readdir_type(dirent_type: u8) -> u8 {
    match dirent_type {
        1 => 8,
        2 => 4,
        3 => 2,
        4 => 6,
        5 => 1,
        6 => 12,
        7 => 10,
        _ => 0,
    }
}

/// A device number as the kernel keeps it: 12 bits major, 20 bits minor. `None` where it does not fit.
pub(crate) fn encode_rdev(rdev: Rdev) -> Option<u32> {
    if rdev.major >= 1 << 12 || rdev.minor >= 1 << 20 {
        return None;
    }
    Some(rdev.minor & 0xff | rdev.major << 8 | (rdev.minor & !0xff) << 12)
}

/// The inverse of [`encode_rdev`].
pub(crate) fn decode_rdev(number: u32) -> Rdev {
    Rdev { major: number >> 8 & 0xfff, minor: number & 0xff | number >> 12 & 0xf_ff00 }
}

/// The fields of the superblock that we set or read.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Superblock {
    pub(crate) checksum: u32,
    pub(crate) compatible: u32,
    pub(crate) incompatible: u32,
    pub(crate) root: u16,
    pub(crate) inodes: u64,
    pub(crate) build_time: Timestamp,
    pub(crate) blocks: u32,
    pub(crate) inode_block: u32,
    pub(crate) xattr_block: u32,
    pub(crate) uuid: [u8; 16],
    pub(crate) devices: u16,
    pub(crate) device_slot: u16,
}

impl Superblock {
    pub(crate) fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC.to_le_bytes());
        put(4, &self.checksum.to_le_bytes());
        put(8, &self.compatible.to_le_bytes());
        put(12, &[BLOCK_BITS]);
        put(14, &self.root.to_le_bytes());
        put(16, &self.inodes.to_le_bytes());
        put(24, &self.build_time.secs.to_le_bytes());
        put(32, &self.build_time.nanos.to_le_bytes());
        put(36, &self.blocks.to_le_bytes());
        put(40, &self.inode_block.to_le_bytes());
        put(44, &self.xattr_block.to_le_bytes());
        put(48, &self.uuid);
        put(80, &self.incompatible.to_le_bytes());
        put(86, &self.devices.to_le_bytes());
        put(88, &self.device_slot.to_le_bytes());
        bytes
    }
}

/// CRC-32C (Castagnoli) as the kernel computes it over a superblock: seeded with all ones, not
/// inverted at the end.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut index = 0;
        while index < 256 {
            let mut value = index as u32;
            let mut bit = 0;
            while bit < 8 {
                value = value >> 1 ^ if value & 1 == 1 { 0x82F6_3B78 } else { 0 };
                bit += 1;
            }
            table[index] = value;
            index += 1;
        }
        table
    };
    bytes
        .iter()
        .fold(u32::MAX, |crc, byte| TABLE[((crc ^ u32::from(*byte)) & 0xff) as usize] ^ crc >> 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_has_the_known_check_value() {
        assert_eq!(!crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn device_numbers_round_trip() {
        for (major, minor) in [(0, 0), (1, 3), (4095, 1_048_575), (8, 256), (259, 70_000)] {
            let rdev = Rdev { major, minor };
            assert_eq!(decode_rdev(encode_rdev(rdev).unwrap()), rdev);
        }
        assert_eq!(encode_rdev(Rdev { major: 4096, minor: 0 }), None);
        assert_eq!(encode_rdev(Rdev { major: 0, minor: 1 << 20 }), None);
    }

    #[test]
    fn xattr_names_split_where_the_kernel_has_a_namespace() {
        assert_eq!(split_xattr_name(b"user.a"), Some((1, b"a".as_slice())));
        assert_eq!(split_xattr_name(b"system.posix_acl_access"), Some((2, b"".as_slice())));
        assert_eq!(split_xattr_name(b"security.capability"), Some((6, b"capability".as_slice())));
        for none in
            [&b"user."[..], b"user", b"system.x", b"system.posix_acl_access2", b"lustre.lov"]
        {
            assert_eq!(split_xattr_name(none), None);
        }
    }
}
