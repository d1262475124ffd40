//! Reading the log: from a number or a time on, of some sandboxes and kinds, to its end or for ever.
//!
//! Every reader reads the files for itself, so a slow one slows nobody. What has expired meanwhile, or before, is told
//! by an `expired` event in its place. A reader sees an event only when all of its batch is written.

use super::files::{self, number_of};
use super::record::{What, encode};
use layer::{Context, Result};
use serde::Deserialize;
use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::PathBuf;

/// Events that are read at once.
const MAX_EVENTS: usize = 256;
/// Bytes that are looked through at once.
const MAX_LOOKED_AT: u64 = 4 << 20;
/// What everybody is told, whatever they ask for.
const FOR_ALL: [&str; 2] = ["dropped", "expired"];

/// What is asked for.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Only later ones.
    pub after: u64,
    /// Only since then, nanoseconds since 1970.
    pub since_unix_ns: u64,
    /// Only of sandboxes whose id begins with this.
    pub sandbox: String,
    /// Only of these kinds; all when empty.
    pub kinds: Vec<String>,
}

/// One event, as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Its number.
    pub seq: u64,
    /// When, nanoseconds since 1970.
    pub unix_ns: u64,
    /// Of which sandbox; empty: of the node.
    pub sandbox: String,
    /// Its kind.
    pub kind: String,
    /// The whole of it, one line of JSON.
    pub json: String,
}

/// What every event has.
#[derive(Debug, Deserialize)]
struct Head {
    seq: u64,
    unix_ns: u64,
    sandbox: String,
    kind: String,
}

impl Event {
    fn read(line: &[u8]) -> Option<Self> {
        let head: Head = serde_json::from_slice(line).ok()?;
        let json = String::from_utf8(line.to_vec()).ok()?;
        let Head { seq, unix_ns, sandbox, kind } = head;
        Some(Self { seq, unix_ns, sandbox, kind, json })
    }
}

/// A place in the log.
#[derive(Debug)]
pub struct Reader {
    folder: PathBuf,
    filter: Filter,
    /// The number of the event to read next.
    next: u64,
    file: Option<Open>,
}

#[derive(Debug)]
struct Open {
    first: u64,
    lines: BufReader<File>,
    /// Whole lines that were read.
    offset: u64,
    /// Of the last one.
    length: u64,
}

enum Line {
    Event(u64, Vec<u8>),
    /// Nothing that is an event.
    Other,
    /// No whole line is left.
    End,
}

impl Open {
    fn line(&mut self) -> std::io::Result<Line> {
        let mut line = Vec::new();
        let count = self.lines.read_until(b'\n', &mut line)? as u64;
        if line.pop() != Some(b'\n') {
            self.lines.seek(SeekFrom::Start(self.offset))?;
            return Ok(Line::End);
        }
        (self.offset, self.length) = (self.offset + count, count);
        Ok(number_of(&line).map_or(Line::Other, |number| Line::Event(number, line)))
    }

    /// Before the last line again.
    fn back(&mut self) -> std::io::Result<()> {
        self.offset -= self.length;
        self.lines.seek(SeekFrom::Start(self.offset)).map(drop)
    }
}

impl Reader {
    /// At the first event that is asked for.
    pub fn new(folder: PathBuf, filter: Filter) -> Self {
        Self { folder, next: filter.after + 1, filter, file: None }
    }

    /// The number of the event that it reads next.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The next events, none later than `through`. When none comes and [`Reader::next`] stays, there is no more.
    /// Blocking.
    pub fn read(&mut self, through: u64) -> Result<Vec<Event>> {
        let context = || "read events".to_owned();
        let (mut events, mut looked_at) = (Vec::new(), 0);
        if let Some(open) = &mut self.file {
            // What was read ahead may have been taken back meanwhile.
            open.lines.seek(SeekFrom::Start(open.offset)).context(context)?;
        }
        while events.len() < MAX_EVENTS && looked_at < MAX_LOOKED_AT && self.next <= through {
            let Some(open) = &mut self.file else {
                if self.find_file(&mut events)? {
                    continue;
                }
                break;
            };
            let (number, line) = match open.line().context(context)? {
                Line::Event(number, line) if number <= through => (number, line),
                Line::Event(..) => {
                    open.back().context(context)?;
                    break;
                }
                Line::Other => continue,
                Line::End if self.find_file(&mut events)? => continue,
                Line::End => break,
            };
            looked_at += line.len() as u64;
            if number >= self.next {
                self.next = number + 1;
                events.extend(Event::read(&line).filter(|event| self.is_wanted(event)));
            }
        }
        Ok(events)
    }

    /// Opens the file that has the next event, or the oldest later one; false when there is none but the open one.
    fn find_file(&mut self, events: &mut Vec<Event>) -> Result<bool> {
        let firsts = files::list(&self.folder)?;
        let Some(oldest) = firsts.first().copied() else { return Ok(false) };
        if oldest > self.next {
            let mut line = format!("{{\"seq\":{},", oldest - 1).into_bytes();
            let expired = What::Expired { through: oldest - 1 };
            encode(super::now_unix_ns(), "", &expired, &mut line)?;
            line.pop();
            events.extend(Event::read(&line));
            self.next = oldest;
        }
        let first = firsts.into_iter().rfind(|first| *first <= self.next).unwrap_or(oldest);
        if self.file.as_ref().is_some_and(|open| open.first == first) {
            return Ok(false);
        }
        let path = files::path_of(&self.folder, first);
        let file = match File::open(&path) {
            // It has just expired.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            file => file.context(|| format!("open {}", path.display()))?,
        };
        self.file = Some(Open { first, lines: BufReader::new(file), offset: 0, length: 0 });
        Ok(true)
    }

    fn is_wanted(&self, event: &Event) -> bool {
        let Filter { since_unix_ns, sandbox, kinds, .. } = &self.filter;
        if FOR_ALL.contains(&event.kind.as_str()) {
            return true;
        }
        event.unix_ns >= *since_unix_ns
            && (sandbox.is_empty() || event.sandbox.starts_with(sandbox.as_str()))
            && (kinds.is_empty() || kinds.contains(&event.kind))
    }
}
