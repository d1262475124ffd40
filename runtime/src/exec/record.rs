//! What is known of a command, as the journal of commands keeps it.

use crate::journal::Entry;
use crate::record::End;
use crate::zygote::former::StreamId;
use proto::v1;
use serde::{Deserialize, Serialize};
use std::time::{SystemTime, UNIX_EPOCH};

/// Bytes of a command line that are kept for listings.
const MAX_ARGV_BYTES: usize = 4096;

/// Version of [`CommandRecord`] that this build writes.
const VERSION: u32 = 1;

/// The end of a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// How.
    pub end: End,
    /// One line for people, or empty.
    pub message: String,
    /// Output beyond its limit.
    pub truncated_bytes: u64,
    /// When, in nanoseconds since 1970.
    pub unix_ns: u64,
}

impl Ended {
    /// Just now.
    pub fn now(end: End, message: String, truncated_bytes: u64) -> Self {
        Self { end, message, truncated_bytes, unix_ns: now_unix_ns() }
    }

    /// As a message.
    pub fn wire(&self) -> v1::ExecEnded {
        v1::ExecEnded {
            end: Some(self.end.wire()),
            exit_code: self.end.exit_code(),
            message: self.message.clone(),
            truncated_bytes: self.truncated_bytes,
        }
    }
}

/// A command that was started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandRecord {
    /// Version of this structure.
    pub version: u32,
    /// Sandbox and command: `SANDBOX/COMMAND`.
    pub key: String,
    /// The beginning of its command line.
    pub argv: Vec<String>,
    /// Whether it goes on without a client.
    pub is_background: bool,
    /// Whether it has a terminal.
    pub is_terminal: bool,
    /// Nanoseconds since 1970.
    pub started_unix_ns: u64,
    /// When its time is over.
    pub deadline_unix_ns: Option<u64>,
    /// Bytes of its output that are kept.
    pub kept_bytes: u64,
    /// Process id on the host.
    pub pid: i32,
    /// The kernel's number for the process.
    pub process_number: u64,
    /// Process id inside the sandbox.
    pub inner_pid: i32,
    /// Its own control group.
    pub group: Option<u32>,
    /// What it prints into; true for the error stream.
    pub outputs: Vec<(bool, StreamId)>,
    /// Absent while it runs.
    pub ended: Option<Ended>,
}

impl CommandRecord {
    /// A command that is about to be started.
    pub fn new(sandbox: &str, id: &str, argv: &[String]) -> Self {
        Self {
            version: VERSION,
            key: format!("{sandbox}/{id}"),
            argv: cut(argv),
            is_background: false,
            is_terminal: false,
            started_unix_ns: now_unix_ns(),
            deadline_unix_ns: None,
            kept_bytes: 0,
            pid: 0,
            process_number: 0,
            inner_pid: 0,
            group: None,
            outputs: Vec::new(),
            ended: None,
        }
    }

    /// Sandbox and command.
    pub fn names(&self) -> (&str, &str) {
        self.key.split_once('/').unwrap_or((&self.key, ""))
    }
}

impl Entry for CommandRecord {
    const NAME: &'static str = "commands";

    fn key(&self) -> &str {
        &self.key
    }

    fn since(&self) -> u64 {
        self.started_unix_ns
    }
}

/// The beginning of a command line.
fn cut(argv: &[String]) -> Vec<String> {
    let mut left = MAX_ARGV_BYTES;
    let mut cut = Vec::new();
    for word in argv {
        if left == 0 {
            break;
        }
        let end = word.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|at| *at <= left);
        let end = end.last().unwrap_or(0);
        cut.push(word[..end].to_owned());
        left = if end < word.len() { 0 } else { left - end };
    }
    cut
}

/// Nanoseconds since 1970.
pub fn now_unix_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_command_line_is_cut_at_a_character() {
        let words = ["sh".to_owned(), "ä".repeat(5000), "more".to_owned()];
        let record = CommandRecord::new("s", "c", &words);
        assert_eq!(record.argv.len(), 2);
        assert!(record.argv[1].len() <= MAX_ARGV_BYTES && record.argv[1].starts_with("ää"));
        assert_eq!(record.names(), ("s", "c"));
    }
}
