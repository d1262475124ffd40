//! What a command prints: tables and lines for people, JSON for programs.
//!
//! Names come from images and sandboxes, so they are hostile: nothing that a terminal would act on is
//! ever printed raw. A reader that goes away ends the command quietly, as for any filter.

use crate::errors::{Failure, Outcome};
use comfy_table::{ContentArrangement, Table, presets};
use layer::Error;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

/// The code of a process that a closed pipe ended.
const CLOSED_PIPE: u8 = 141;

/// One line of a listing.
pub trait Row: Serialize {
    /// The names of the columns.
    const HEADER: &'static [&'static str];
    /// The columns, unescaped.
    fn cells(&self) -> Vec<String>;
}

/// Where results and notices go.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    json: bool,
}

impl Output {
    /// `json` chooses the form of every result.
    pub fn new(json: bool) -> Self {
        Self { json }
    }

    /// Whether results are for programs.
    pub fn is_json(self) -> bool {
        self.json
    }

    /// Whether somebody watches: bars are drawn on standard error only then.
    pub fn is_watched(self) -> bool {
        !self.json && io::stderr().is_terminal()
    }

    /// Prints a listing: a table, or one JSON array.
    pub fn listing<R: Row>(self, rows: &[R]) -> Outcome {
        if self.json {
            return self.print_json(&rows);
        }
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(R::HEADER);
        for row in rows {
            table.add_row(row.cells().iter().map(|cell| escape(cell)));
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        let mut text = String::new();
        for line in table.to_string().lines() {
            text.push_str(line.trim_end());
            text.push('\n');
        }
        write_out(text.as_bytes())
    }

    /// Prints one result: these lines, or the value as a JSON object.
    pub fn result(self, value: &impl Serialize, lines: impl FnOnce() -> String) -> Outcome {
        if self.json {
            return self.print_json(value);
        }
        let text = lines();
        let mut safe: String = text.lines().map(escape).collect::<Vec<_>>().join("\n");
        safe.push('\n');
        write_out(safe.as_bytes())
    }

    fn print_json(self, value: &impl Serialize) -> Outcome {
        let text = serde_json::to_string_pretty(value)
            .map_err(|error| Error::invalid("write the result as JSON").with_source(error))?;
        let mut text = safe_json(&text);
        text.push('\n');
        write_out(text.as_bytes())
    }

    /// Says something on standard error that is no result.
    pub fn notice(self, text: &str) {
        _ = writeln!(io::stderr(), "lamella: {}", escape(text));
    }
}

/// Writes results to standard output.
pub fn write_out(bytes: &[u8]) -> Outcome {
    let mut out = io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).map_err(output_failure)
}

/// What a failed write to standard output means.
pub fn output_failure(error: io::Error) -> Failure {
    if error.kind() == io::ErrorKind::BrokenPipe {
        return Failure::Code(CLOSED_PIPE);
    }
    Error::io("write to standard output", error).into()
}

/// Characters that move a cursor, hide text or reorder it.
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{061c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
}

/// The text with everything that a terminal would act on written as `\u{..}`.
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unsafe(c) {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
    }
    safe
}

/// A name of any bytes, as text: what is no UTF-8 becomes `\xNN`, a backslash is doubled.
pub fn name(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\\' => text.push_str("\\\\"),
                c if is_unsafe(c) => text.extend(c.escape_default()),
                c => text.push(c),
            }
        }
        for byte in chunk.invalid() {
            _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

/// JSON text that is the same value and harmless on a terminal. JSON itself escapes only what lies
/// below U+0020, and the other dangerous characters occur inside strings alone.
pub fn safe_json(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unsafe(c) && !matches!(c, '\n' | ' ') {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                _ = write!(safe, "\\u{unit:04x}");
            }
        } else {
            safe.push(c);
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_escape_sequence_survives() {
        assert_eq!(escape("a\x1b[31mb"), "a\\u{1b}[31mb");
        assert_eq!(escape("x\u{9b}2Jy\u{202e}z"), "x\\u{9b}2Jy\\u{202e}z");
        assert_eq!(escape("Grüße 日本"), "Grüße 日本");
        assert_eq!(name(b"a\\b\xff\n"), "a\\\\b\\xff\\n");
    }

    #[test]
    fn json_stays_the_same_value() {
        let value = serde_json::json!({ "n": "a\u{9b}b\u{202e}\u{7f}\n" });
        let text = safe_json(&serde_json::to_string_pretty(&value).unwrap());
        assert!(!text.chars().any(|c| is_unsafe(c) && c != '\n'));
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }
}
