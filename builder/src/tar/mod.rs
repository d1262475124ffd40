//! Reading tar files: one pass over the headers, contents by position.
//!
//! Understands v7, ustar, PAX (with binary values and sparse files 0.0, 0.1, 1.0) and GNU (long names,
//! old sparse files, base-256 numbers). Every length is checked against the file before it is used, so
//! hostile archives give errors, not memory.

mod acl;
mod header;
mod pax;
mod reader;
mod sparse;

pub(crate) use reader::{Entry, EntryKind, Reader};

/// Tar's unit.
pub(crate) const BLOCK: u64 = 512;

/// Whether a file that begins like this may be a tar file.
pub(crate) fn may_begin(block: [u8; BLOCK as usize]) -> bool {
    !matches!(header::Header::parse(block), header::Block::Broken)
}
