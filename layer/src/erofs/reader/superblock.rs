//! The superblock and the device table.

use super::{Reader, array_at, u16_at, u32_at, u64_at};
use crate::erofs::format::{
    BLOCK, BLOCK_BITS, COMPAT_CHECKSUM, DEVICE_SLOT_BYTES, INCOMPAT_CHUNKED_FILE,
    INCOMPAT_DEVICE_TABLE, INCOMPAT_ZERO_PADDING, MAGIC, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET,
    Superblock, crc32c,
};
use crate::error::{Error, ErrorKind, Result};
use crate::tree::Timestamp;

const KNOWN_INCOMPATIBLE: u32 =
    INCOMPAT_ZERO_PADDING | INCOMPAT_CHUNKED_FILE | INCOMPAT_DEVICE_TABLE;

pub(super) fn parse(image: &[u8]) -> Result<Reader<'_>> {
    let refuse = |why: String| Error::corrupt(format!("EROFS superblock: {why}"));
    let bytes = image
        .get(SUPERBLOCK_OFFSET..SUPERBLOCK_OFFSET + SUPERBLOCK_BYTES)
        .ok_or_else(|| refuse(format!("an image of {} bytes has none", image.len())))?;
    let superblock = decode(bytes);
    if u32_at(bytes, 0) != MAGIC {
        return Err(refuse("wrong magic".to_owned()));
    }
    let unknown = superblock.incompatible & !KNOWN_INCOMPATIBLE;
    if unknown != 0 || bytes[12] != BLOCK_BITS || superblock.devices > 1 {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "EROFS superblock: features {unknown:#x}, blocks of 2^{} bytes, {} devices",
                bytes[12], superblock.devices
            ),
        ));
    }
    if superblock.compatible & COMPAT_CHECKSUM != 0 {
        let mut block = image
            .get(SUPERBLOCK_OFFSET..BLOCK)
            .ok_or_else(|| refuse("the first block is cut".to_owned()))?
            .to_vec();
        block[4..8].fill(0);
        if crc32c(&block) != superblock.checksum {
            return Err(refuse("wrong checksum".to_owned()));
        }
    }
    if superblock.build_time.nanos >= 1_000_000_000 {
        return Err(refuse(format!("{} nanoseconds", superblock.build_time.nanos)));
    }
    let mut reader = Reader { image, superblock, data_blocks: 0, data_address: 0 };
    if superblock.devices == 1 {
        let at = u64::from(superblock.device_slot) * DEVICE_SLOT_BYTES as u64;
        let slot = reader.bytes(at, DEVICE_SLOT_BYTES as u64)?;
        reader.data_blocks = u32_at(slot, 64);
        reader.data_address = u32_at(slot, 68);
    }
    Ok(reader)
}

fn decode(bytes: &[u8]) -> Superblock {
    Superblock {
        checksum: u32_at(bytes, 4),
        compatible: u32_at(bytes, 8),
        incompatible: u32_at(bytes, 80),
        root: u16_at(bytes, 14),
        inodes: u64_at(bytes, 16),
        build_time: Timestamp {
            secs: i64::from_le_bytes(array_at(bytes, 24)),
            nanos: u32_at(bytes, 32),
        },
        blocks: u32_at(bytes, 36),
        inode_block: u32_at(bytes, 40),
        xattr_block: u32_at(bytes, 44),
        uuid: array_at(bytes, 48),
        devices: u16_at(bytes, 86),
        device_slot: u16_at(bytes, 88),
    }
}
