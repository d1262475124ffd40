//! EROFS metadata images: our own writer and reader of the subset that layers use.
//!
//! The subset is described in `docs/format.md`. Judges of what the writer makes are the kernel and
//! erofs-utils, never the reader.

pub(crate) mod format;
pub mod reader;
pub mod writer;

/// The most entries that a builder should let the chunk array of one file have.
const WANTED_CHUNKS: u64 = 1 << 16;

/// The blocks to which a builder rounds the borders of holes in a file of so many blocks: a power of
/// two, so that a sparse file of terabytes has an array of at most half a MiB.
///
/// A chunk-based inode has one entry for each of its chunks, and a chunk is data or hole as a whole.
/// Where data begins or ends inside such a unit, the rest of the unit becomes zero blocks of the data
/// space, which cost nothing: chunks of zeros lie in no pack.
pub fn hole_granularity_blocks(file_blocks: u64) -> u64 {
    file_blocks.div_ceil(WANTED_CHUNKS).next_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::hole_granularity_blocks;

    #[test]
    fn small_files_keep_every_hole_and_terabytes_have_short_arrays() {
        assert_eq!(hole_granularity_blocks(0), 1);
        assert_eq!(hole_granularity_blocks(65_536), 1);
        assert_eq!(hole_granularity_blocks(65_537), 2);
        assert_eq!(hole_granularity_blocks(1 << 28), 1 << 12);
    }
}
