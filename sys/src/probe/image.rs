//! The smallest EROFS image with one file on a data device, for trying the kernel.
//!
//! Not the format writer: that is elsewhere, and this crate must not depend on it.

/// Block size of the image in bytes.
pub const BLOCK_BYTES: usize = 4096;

const SUPERBLOCK_AT: usize = 1024;
const DEVICE_SLOT_AT: usize = 1152;
const ROOT_AT: usize = 1280;
const FILE_AT: usize = 1376;
const UNIT: usize = 32;

/// Makes a metadata image of one block: a root folder with the one file `data`, which is the whole of
/// a device of 2^`block_bits` blocks. `block_bits` is at most 16.
pub fn tiny_erofs_metadata(block_bits: u8) -> Vec<u8> {
    const FEATURES_CHUNKED_FILE_AND_DEVICE_TABLE: u32 = 0x4 | 0x8;
    let mut image = vec![0; BLOCK_BYTES];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    let blocks = 1u32 << block_bits.min(16);

    put(SUPERBLOCK_AT, &0xE0F5_E1E2_u32.to_le_bytes());
    put(SUPERBLOCK_AT + 12, &[12]); // log2 of the block size
    put(SUPERBLOCK_AT + 14, &((ROOT_AT / UNIT) as u16).to_le_bytes());
    put(SUPERBLOCK_AT + 16, &2u64.to_le_bytes()); // inodes
    put(SUPERBLOCK_AT + 36, &1u32.to_le_bytes()); // blocks of metadata
    put(SUPERBLOCK_AT + 80, &FEATURES_CHUNKED_FILE_AND_DEVICE_TABLE.to_le_bytes());
    put(SUPERBLOCK_AT + 86, &1u16.to_le_bytes()); // devices
    put(SUPERBLOCK_AT + 88, &((DEVICE_SLOT_AT / 128) as u16).to_le_bytes());
    put(DEVICE_SLOT_AT + 64, &blocks.to_le_bytes());

    // A compact inode whose folder data follows it (layout 2).
    let names: [(&[u8], usize, u8); 3] =
        [(b".", ROOT_AT, 2), (b"..", ROOT_AT, 2), (b"data", FILE_AT, 1)];
    let mut name_at = names.len() * 12;
    let folder_bytes: usize = name_at + names.iter().map(|(name, ..)| name.len()).sum::<usize>();
    put(ROOT_AT, &(2u16 << 1).to_le_bytes());
    put(ROOT_AT + 4, &0o40755_u16.to_le_bytes());
    put(ROOT_AT + 6, &2u16.to_le_bytes());
    put(ROOT_AT + 8, &(folder_bytes as u32).to_le_bytes());
    put(ROOT_AT + 20, &1u32.to_le_bytes());
    for (index, (name, inode_at, kind)) in names.into_iter().enumerate() {
        let entry_at = ROOT_AT + UNIT + index * 12;
        put(entry_at, &((inode_at / UNIT) as u64).to_le_bytes());
        put(entry_at + 8, &(name_at as u16).to_le_bytes());
        put(entry_at + 10, &[kind]);
        put(ROOT_AT + UNIT + name_at, name);
        name_at += name.len();
    }

    // A compact inode in chunks (layout 4): one chunk as large as the file, on device 1 from block 0.
    const WITH_INDEXES: u16 = 0x20;
    put(FILE_AT, &(4u16 << 1).to_le_bytes());
    put(FILE_AT + 4, &0o100_644_u16.to_le_bytes());
    put(FILE_AT + 6, &1u16.to_le_bytes());
    put(FILE_AT + 8, &(blocks * BLOCK_BYTES as u32).to_le_bytes());
    put(FILE_AT + 16, &(WITH_INDEXES | u16::from(block_bits.min(16))).to_le_bytes());
    put(FILE_AT + 20, &2u32.to_le_bytes());
    put(FILE_AT + UNIT + 2, &1u16.to_le_bytes());
    image
}
