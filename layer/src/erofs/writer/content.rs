//! Where the content of regular files lies: one block of the data device, or an array of chunks.
//!
//! Content of several blocks in one run is an array of one chunk, not a plain inode at the device's
//! mapped address: Linux (6.18) compares a mapped address with a device's own when it decides whether
//! the next page continues a request to a file-backed device, so plain content is read page by page,
//! each with an event of its own. See docs/decisions/0005-one-chunk-instead-of-a-mapped-address.md.

use crate::chunk::BLOCK_BYTES;
use crate::erofs::format::{CHUNK_BITS_MASK, CHUNK_INDEX_BYTES, DATA_DEVICE, NULL_ADDRESS};
use crate::tree::Extent;

/// The longest chunk array of one file: a limit of ours, so that one file with finely cut holes
/// cannot make an image of gigabytes.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// The form of a content that lies on the data device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mapped {
    /// This one block of the data space.
    Block(u32),
    /// Chunks of `1 << bits` blocks, `count` of them; none for an empty file.
    Chunks { bits: u8, count: u32 },
}

fn end_of(extent: &Extent) -> u64 {
    u64::from(extent.file_block) + u64::from(extent.blocks)
}

/// Extents without those borders that mean nothing.
pub(super) fn merged(extents: &[Extent]) -> impl Iterator<Item = Extent> {
    let mut rest = extents.iter().copied().peekable();
    std::iter::from_fn(move || {
        let mut run = rest.next()?;
        while rest.next_if(|next| run.absorb(next)).is_some() {}
        Some(run)
    })
}

/// Checks the extents of a file and finds the cheapest form; the error says what is wrong.
pub(super) fn map(size: u64, extents: &[Extent], data_blocks: u32) -> Result<Mapped, String> {
    if size > i64::MAX as u64 {
        return Err(format!("a size of {size} bytes"));
    }
    let blocks = size.div_ceil(u64::from(BLOCK_BYTES));
    let mut next = 0_u64;
    for extent in extents {
        let end = end_of(extent);
        if u64::from(extent.file_block) < next || extent.blocks == 0 || end > blocks {
            return Err(format!("{extent:?} does not fit behind block {next} of {blocks}"));
        }
        if u64::from(extent.data_block) + u64::from(extent.blocks) > u64::from(data_blocks) {
            return Err(format!("{extent:?} ends behind the data space of {data_blocks} blocks"));
        }
        next = end;
    }
    if let ([extent], 1) = (extents, blocks) {
        return Ok(Mapped::Block(extent.data_block));
    }
    // A chunk is one run or one hole, so every border but the file's own end lies between chunks.
    let mut bits = blocks.next_power_of_two().trailing_zeros().min(u32::from(CHUNK_BITS_MASK));
    for run in merged(extents) {
        let end = end_of(&run);
        bits = bits.min(run.file_block.trailing_zeros());
        if end != blocks {
            bits = bits.min(end.trailing_zeros());
        }
    }
    let count = blocks.div_ceil(1 << bits);
    if count * CHUNK_INDEX_BYTES as u64 > MAX_INDEX_BYTES {
        return Err(format!(
            "its holes are too fine: {count} chunks of {} KiB for {size} bytes",
            4_u64 << bits
        ));
    }
    // INVARIANT: at most MAX_INDEX_BYTES / 8 chunks, far below 2^32.
    Ok(Mapped::Chunks { bits: bits as u8, count: count as u32 })
}

/// Writes the chunk array of a file that [`map`] gave this form; `array` has 8 bytes for each chunk.
pub(super) fn put_chunks(extents: &[Extent], bits: u8, array: &mut [u8]) {
    let entries = array.len() / CHUNK_INDEX_BYTES;
    let mut put = |index: usize, device: u16, address: u32| {
        let entry = &mut array[index * CHUNK_INDEX_BYTES..][..CHUNK_INDEX_BYTES];
        entry[2..4].copy_from_slice(&device.to_le_bytes());
        entry[4..].copy_from_slice(&address.to_le_bytes());
    };
    for index in 0..entries {
        put(index, 0, NULL_ADDRESS);
    }
    for run in merged(extents) {
        let first = run.file_block >> bits;
        let chunks = u64::from(run.blocks).div_ceil(1 << bits) as u32;
        for chunk in 0..chunks {
            put((first + chunk) as usize, DATA_DEVICE, run.data_block + (chunk << bits));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(file_block: u32, blocks: u32, data_block: u32) -> Extent {
        Extent { file_block, blocks, data_block }
    }

    #[test]
    fn contiguous_content_is_one_block_or_one_chunk() {
        assert_eq!(map(0, &[], 0), Ok(Mapped::Chunks { bits: 0, count: 0 }));
        assert_eq!(map(1, &[extent(0, 1, 5)], 9), Ok(Mapped::Block(5)));
        assert_eq!(map(1, &[], 9), Ok(Mapped::Chunks { bits: 0, count: 1 }));
        assert_eq!(map(12288, &[extent(0, 3, 5)], 9), Ok(Mapped::Chunks { bits: 2, count: 1 }));
        let two = [extent(0, 1, 5), extent(1, 1, 6)];
        assert_eq!(map(4097, &two, 9), Ok(Mapped::Chunks { bits: 1, count: 1 }));
    }

    #[test]
    fn chunks_are_as_large_as_the_borders_allow() {
        let chunks =
            |size_blocks: u64, extents: &[Extent]| match map(size_blocks * 4096, extents, 999) {
                Ok(Mapped::Chunks { bits, count }) => (bits, count),
                other => panic!("{other:?}"),
            };
        assert_eq!(chunks(100, &[]), (7, 1));
        assert_eq!(chunks(100, &[extent(0, 4, 0)]), (2, 25));
        assert_eq!(chunks(100, &[extent(96, 4, 0)]), (5, 4));
        assert_eq!(chunks(100, &[extent(64, 16, 0)]), (4, 7));
        assert_eq!(chunks(3, &[extent(1, 1, 0)]), (0, 3));
        assert_eq!(chunks(8, &[extent(0, 4, 100), extent(4, 4, 0)]), (2, 2));
        assert_eq!(chunks(1 << 50, &[]), (31, 1 << 19));
    }

    #[test]
    fn extents_that_do_not_fit_are_refused() {
        for (size, extents) in [
            (4096, vec![extent(0, 2, 0)]),
            (0, vec![extent(0, 1, 0)]),
            (9000, vec![extent(1, 1, 0), extent(0, 1, 1)]),
            (9000, vec![extent(0, 2, 0), extent(1, 1, 1)]),
            (9000, vec![extent(0, 0, 0)]),
            (9000, vec![extent(0, 1, 9)]),
            (u64::MAX, vec![]),
            (1 << 44, vec![extent(1, 1, 0)]),
        ] {
            assert!(map(size, &extents, 9).is_err(), "{size} {extents:?}");
        }
    }

    #[test]
    fn the_array_says_where_each_chunk_lies() {
        let mut array = [0; 40];
        put_chunks(&[extent(2, 2, 10), extent(8, 1, 77)], 1, &mut array);
        let entry = |index: usize| (array[index * 8 + 2], &array[index * 8 + 4..index * 8 + 8]);
        assert_eq!(entry(0), (0, &[0xff; 4][..]));
        assert_eq!(entry(1), (1, &[10, 0, 0, 0][..]));
        assert_eq!(entry(3), (0, &[0xff; 4][..]));
        assert_eq!(entry(4), (1, &[77, 0, 0, 0][..]));
    }
}
