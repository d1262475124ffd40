//! Commands in a sandbox: started for a client or left to themselves, attached to, signalled, waited for.
//!
//! ```text
//! start ──> run (one task a command) ──> output (files) ──> attach (any number of readers)
//!             │                └──> the client that started it
//!             └──> record ──> journal ──> adopt (the next runtime)
//! ```
//! A client that starts a command in the foreground and leaves takes it along, unless another one is attached.
//! CRASH: see [`adopt`].

pub mod adopt;
mod attach;
mod command;
mod output;
pub mod own;
pub mod record;
mod run;
mod start;
mod streams;
mod table;

pub use attach::{attach, logs};
pub use output::Output;
pub use start::start;
pub use table::{CommandStore, Commands, Remembered};
