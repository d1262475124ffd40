//! What an event is: kinds, their fields, and the line of JSON that each becomes. docs/events.md says what every
//! field means, and a test compares the two.
//!
//! Names, command lines and reasons come from images and sandboxes: each is cut to a length, and JSON keeps a
//! newline in one of them from ending the line. Pure: no I/O.

use crate::record::End;
use serde::Serialize;
use std::collections::BTreeMap;

/// The longest text of one field, in bytes.
pub const MAX_TEXT_BYTES: usize = 4096;

/// Every kind of event, in the order of docs/events.md.
pub const KINDS: [&str; 23] = [
    "node_started",
    "node_ended",
    "creating",
    "running",
    "paused",
    "resumed",
    "stopping",
    "gone",
    "failed",
    "lost",
    "exec_start",
    "exec_end",
    "file_transfer",
    "file_change",
    "call",
    "pack_diff",
    "fork",
    "network",
    "port",
    "denied",
    "limit",
    "dropped",
    "expired",
];

/// Who refused something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeniedBy {
    /// The network policy.
    Network,
    /// Nobody who is trusted has signed it.
    Signature,
}

impl DeniedBy {
    /// Every one, as a word.
    pub const WORDS: [&str; 2] = ["network", "signature"];

    /// As a word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Network => Self::WORDS[0],
            Self::Signature => Self::WORDS[1],
        }
    }
}

impl Serialize for DeniedBy {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.word())
    }
}

/// A limit that was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Memory: the kernel ended a process.
    Oom,
    /// Tasks: a fork was refused.
    Pids,
    /// The writable layer, or the disk below it.
    DiskFull,
    /// Output of a command was cut.
    Output,
}

impl Limit {
    /// Every one, as a word.
    pub const WORDS: [&str; 4] = ["oom", "pids", "disk_full", "output"];

    /// As a word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Oom => Self::WORDS[0],
            Self::Pids => Self::WORDS[1],
            Self::DiskFull => Self::WORDS[2],
            Self::Output => Self::WORDS[3],
        }
    }
}

impl Serialize for Limit {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.word())
    }
}

/// How something ended, as JSON: `{"how":"exited","code":0}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HowEnded {
    how: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    signal: Option<i32>,
}

impl From<End> for HowEnded {
    fn from(end: End) -> Self {
        let (code, signal) = match end {
            End::Exited(code) | End::DiskFull(code) => (Some(code), None),
            End::Signal(signal) => (None, Some(signal)),
            _ => (None, None),
        };
        Self { how: crate::meters::word(end), code, signal }
    }
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum What {
    NodeStarted {
        version: &'static str,
        pid: u32,
        boot: String,
    },
    NodeEnded {},
    Creating {
        environment: String,
        labels: BTreeMap<String, String>,
    },
    Running {},
    Paused {},
    Resumed {
        paused_ms: Option<u64>,
    },
    Stopping {},
    Gone {
        end: Option<HowEnded>,
        reason: String,
    },
    Failed {
        reason: String,
    },
    Lost {
        reason: String,
    },
    ExecStart {
        command: String,
        argv: Vec<String>,
        argv_bytes: u64,
        user: String,
        cwd: String,
        tty: bool,
        background: bool,
    },
    ExecEnd {
        command: String,
        end: HowEnded,
        exit_code: i32,
        message: String,
        output_bytes: u64,
        truncated_bytes: u64,
        ran_ms: u64,
    },
    FileTransfer {
        direction: &'static str,
        path: String,
        bytes: u64,
        result: String,
    },
    FileChange {
        change: &'static str,
        path: String,
        to: String,
        result: String,
    },
    Call {
        environment: String,
        argv: Vec<String>,
        argv_bytes: u64,
        exit_code: i32,
        ran_ms: u64,
        result: String,
    },
    PackDiff {
        name: String,
        layer: String,
        environment: String,
        files: u64,
        plain_bytes: u64,
        new_bytes: u64,
        frozen_ms: u64,
        result: String,
    },
    Fork {
        count: u32,
        frozen_ms: u64,
        result: String,
    },
    Network {
        allow: Vec<String>,
    },
    Port {
        port: String,
        change: &'static str,
    },
    Denied {
        by: DeniedBy,
        reason: String,
        protocol: String,
        address: String,
        port: u16,
        name: String,
        suppressed: u64,
    },
    Limit {
        limit: Limit,
        command: String,
        count: u64,
    },
    Dropped {
        count: u64,
        reason: &'static str,
    },
    Expired {
        through: u64,
    },
}

impl What {
    /// Its kind, one of [`KINDS`].
    pub fn kind(&self) -> &'static str {
        let number = match self {
            Self::NodeStarted { .. } => 0,
            Self::NodeEnded {} => 1,
            Self::Creating { .. } => 2,
            Self::Running {} => 3,
            Self::Paused {} => 4,
            Self::Resumed { .. } => 5,
            Self::Stopping {} => 6,
            Self::Gone { .. } => 7,
            Self::Failed { .. } => 8,
            Self::Lost { .. } => 9,
            Self::ExecStart { .. } => 10,
            Self::ExecEnd { .. } => 11,
            Self::FileTransfer { .. } => 12,
            Self::FileChange { .. } => 13,
            Self::Call { .. } => 14,
            Self::PackDiff { .. } => 15,
            Self::Fork { .. } => 16,
            Self::Network { .. } => 17,
            Self::Port { .. } => 18,
            Self::Denied { .. } => 19,
            Self::Limit { .. } => 20,
            Self::Dropped { .. } => 21,
            Self::Expired { .. } => 22,
        };
        KINDS[number]
    }
}

/// The result of what succeeded.
pub const DONE: &str = "ok";

/// A text that may be long, cut at a character.
pub fn cut(text: &str) -> String {
    cut_to(text, MAX_TEXT_BYTES).to_owned()
}

fn cut_to(text: &str, bytes: usize) -> &str {
    let mut end = text.len().min(bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// The beginning of a list, so many bytes in all, and at most so many entries.
pub fn cut_all(list: &[String]) -> Vec<String> {
    const MAX_ENTRIES: usize = 256;
    let mut left = MAX_TEXT_BYTES;
    let mut cut = Vec::new();
    for text in list.iter().take(MAX_ENTRIES) {
        if left == 0 {
            break;
        }
        let part = cut_to(text, left);
        left = if part.len() < text.len() { 0 } else { left - part.len() };
        cut.push(part.to_owned());
    }
    cut
}

/// Labels as the caller gave them, the first ones of many, each cut.
pub fn cut_labels(labels: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    const MAX_LABELS: usize = 32;
    const MAX_LABEL_BYTES: usize = 256;
    let cut = |text: &str| cut_to(text, MAX_LABEL_BYTES).to_owned();
    labels.iter().take(MAX_LABELS).map(|(key, value)| (cut(key), cut(value))).collect()
}

/// How a call went.
pub fn result_of<T>(result: &layer::Result<T>) -> String {
    match result {
        Ok(_) => DONE.to_owned(),
        Err(error) => cut(&error.chain()),
    }
}

/// An event but for its number, which the writer gives.
#[derive(Debug, Serialize)]
struct Line<'a> {
    unix_ns: u64,
    sandbox: &'a str,
    #[serde(flatten)]
    what: &'a What,
}

/// The line without its first brace and its number, newline included.
pub fn encode(unix_ns: u64, sandbox: &str, what: &What, into: &mut Vec<u8>) -> layer::Result<()> {
    let line = Line { unix_ns, sandbox, what };
    let text = serde_json::to_vec(&line)
        .map_err(|error| layer::Error::invalid("write an event").with_source(error))?;
    into.extend_from_slice(text.get(1..).unwrap_or_default());
    into.push(b'\n');
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::record::End;
    use std::collections::BTreeSet;

    fn text() -> String {
        "x".to_owned()
    }

    /// One of each kind.
    pub fn samples() -> Vec<What> {
        let end = HowEnded::from(End::Exited(0));
        let labels = BTreeMap::from([(text(), text())]);
        vec![
            What::NodeStarted { version: "1", pid: 1, boot: text() },
            What::NodeEnded {},
            What::Creating { environment: text(), labels },
            What::Running {},
            What::Paused {},
            What::Resumed { paused_ms: Some(1) },
            What::Stopping {},
            What::Gone { end: Some(end.clone()), reason: text() },
            What::Failed { reason: text() },
            What::Lost { reason: text() },
            What::ExecStart {
                command: text(),
                argv: vec![text()],
                argv_bytes: 1,
                user: text(),
                cwd: text(),
                tty: false,
                background: false,
            },
            What::ExecEnd {
                command: text(),
                end,
                exit_code: 0,
                message: text(),
                output_bytes: 1,
                truncated_bytes: 0,
                ran_ms: 1,
            },
            What::FileTransfer { direction: "in", path: text(), bytes: 1, result: text() },
            What::FileChange { change: "remove", path: text(), to: text(), result: text() },
            What::Call {
                environment: text(),
                argv: vec![text()],
                argv_bytes: 1,
                exit_code: 0,
                ran_ms: 1,
                result: text(),
            },
            What::PackDiff {
                name: text(),
                layer: text(),
                environment: text(),
                files: 1,
                plain_bytes: 1,
                new_bytes: 1,
                frozen_ms: 1,
                result: text(),
            },
            What::Fork { count: 1, frozen_ms: 1, result: text() },
            What::Network { allow: vec![text()] },
            What::Port { port: text(), change: "opened" },
            What::Denied {
                by: DeniedBy::Network,
                reason: text(),
                protocol: text(),
                address: text(),
                port: 1,
                name: text(),
                suppressed: 0,
            },
            What::Limit { limit: Limit::Oom, command: text(), count: 1 },
            What::Dropped { count: 1, reason: "full" },
            What::Expired { through: 1 },
        ]
    }

    fn value(what: &What) -> serde_json::Map<String, serde_json::Value> {
        let mut line = b"{".to_vec();
        encode(7, "abc", what, &mut line).unwrap();
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        match serde_json::from_slice(&line).unwrap() {
            serde_json::Value::Object(map) => map,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn every_kind_and_field_is_documented_and_no_other() {
        let document = include_str!("../../../docs/events.md");
        let mut documented = BTreeSet::new();
        for line in document.lines().filter_map(|line| line.strip_prefix("| `")) {
            let mut cells = line.split('|');
            let kind = cells.next().unwrap().trim().trim_end_matches('`').to_owned();
            let fields = cells.next().unwrap().split('`').skip(1).step_by(2).map(str::to_owned);
            documented.insert((kind, fields.collect::<BTreeSet<String>>()));
        }
        let own = ["unix_ns", "sandbox", "kind"];
        let mut served = BTreeSet::new();
        let mut kinds = Vec::new();
        for sample in samples() {
            let map = value(&sample);
            kinds.push(map["kind"].as_str().unwrap().to_owned());
            assert_eq!(map["kind"], sample.kind());
            let fields = map.keys().filter(|key| !own.contains(&key.as_str())).cloned();
            served.insert((kinds[kinds.len() - 1].clone(), fields.collect::<BTreeSet<String>>()));
        }
        assert_eq!(kinds, KINDS);
        assert_eq!(documented, served);
    }

    #[test]
    fn hostile_command_lines_stay_one_bounded_line() {
        let argv = vec![
            "a\nb\r\u{1b}[2J\u{9b}".to_owned(),
            "{\"seq\":1}\n{\"seq\":2}".to_owned(),
            "ä".repeat(64 << 10),
            "more".to_owned(),
        ];
        let start = What::ExecStart {
            command: "c".into(),
            argv: cut_all(&argv),
            argv_bytes: 1,
            user: String::new(),
            cwd: cut("/"),
            tty: false,
            background: false,
        };
        let map = value(&start);
        let words = map["argv"].as_array().unwrap();
        assert_eq!(words.len(), 3);
        assert_eq!(words[0], argv[0].as_str());
        assert_eq!(words[1], argv[1].as_str());
        let total: usize = words.iter().map(|word| word.as_str().unwrap().len()).sum();
        assert!(total <= MAX_TEXT_BYTES && total > MAX_TEXT_BYTES - 4, "{total}");
        assert!(cut_all(&vec![String::new(); 100_000]).len() <= 256);
    }
}
