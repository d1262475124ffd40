//! What happened: an append-only record of every change of a sandbox's life, command, transfer, refusal and limit,
//! outside of all sandboxes; docs/events.md is its description.
//!
//! ```text
//! report ──> inbox (bounded) ──> writer (one thread) ──> files (rotated) ──> any number of readers
//! ```
//! [`record`] is what an event is, [`writer`] and [`files`] how it is kept, [`reader`] how it is read, [`log`] the whole,
//! [`report`] what parts of the runtime say of commands, transfers and calls, [`rpc`] its gRPC face.
//!
//! Locking: a mutex over the inbox, held for a copy of a line. CRASH: a killed node loses what waited in the
//! inbox, for milliseconds; see [`writer`] for the rest.

mod files;
mod log;
mod reader;
pub mod record;
pub mod report;
pub mod rpc;
mod writer;

pub use files::Rotation;
pub use log::EventLog;
pub use reader::{Event, Filter, Reader};
pub use record::What;

use std::time::{SystemTime, UNIX_EPOCH};

/// Name of the folder below the data directory.
pub const FOLDER: &str = "events";

/// Nanoseconds since 1970.
fn now_unix_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
