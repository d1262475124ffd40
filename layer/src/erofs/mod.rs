//! EROFS metadata images: our own writer and reader of the subset that layers use.
//!
//! The subset is described in `docs/format.md`. Judges of what the writer makes are the kernel and
//! erofs-utils, never the reader.

pub mod reader;
pub mod writer;
