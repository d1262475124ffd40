//! What this kernel and this host can do, found out by doing it.
mod image;
pub use image::{BLOCK_BYTES, tiny_erofs_metadata};
