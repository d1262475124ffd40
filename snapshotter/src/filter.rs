//! containerd's filters: which snapshots a listing wants.
//!
//! ```text
//! filter    = selector ("," selector)*          all of them hold; of several filters one has to
//! selector  = path [("==" | "!=" | "~=") value]
//! path      = field ("." field)*
//! field     = quoted | letter (letter | digit | "_")*
//! value     = quoted | anything without spaces and commas
//! quoted    = Go's: "..." with escapes, `...` without; a regular expression may stand in / / or | |
//! ```
//! Paths are `name`, `parent`, `kind` and `labels.KEY`.

use crate::record::Snapshot;
use layer::{Error, Result};
use regex::{Regex, RegexBuilder};
use std::iter::Peekable;
use std::str::Chars;

/// The longest filter.
const MAX_FILTER_BYTES: usize = 64 << 10;
/// How large a regular expression may become in memory.
const MAX_REGEX_BYTES: usize = 1 << 20;

/// Filters, of which one has to hold.
#[derive(Debug)]
pub struct Filters(Vec<Vec<Selector>>);

#[derive(Debug)]
struct Selector {
    path: Vec<String>,
    condition: Condition,
}

#[derive(Debug)]
enum Condition {
    Present,
    Equal(String),
    Unequal(String),
    Matches(Regex),
}

impl Filters {
    /// Parses them; none are all snapshots.
    pub fn parse(texts: &[String]) -> Result<Self> {
        let parsed = texts.iter().map(|text| {
            if text.len() > MAX_FILTER_BYTES {
                return Err(Error::invalid(format!("a filter of {} bytes", text.len())));
            }
            Parser { rest: text.chars().peekable() }
                .filter()
                .map_err(|why| Error::invalid(format!("filter {text:?}: {why}")))
        });
        parsed.collect::<Result<_>>().map(Self)
    }

    /// Whether a snapshot is wanted.
    pub fn want(&self, snapshot: &Snapshot) -> bool {
        let holds = |filter: &Vec<Selector>| filter.iter().all(|selector| selector.holds(snapshot));
        self.0.is_empty() || self.0.iter().any(holds)
    }
}

impl Selector {
    fn holds(&self, snapshot: &Snapshot) -> bool {
        let value = field(snapshot, &self.path);
        match &self.condition {
            Condition::Present => value.is_some(),
            Condition::Equal(wanted) => value == Some(wanted),
            Condition::Unequal(wanted) => value != Some(wanted),
            Condition::Matches(regex) => value.is_some_and(|value| regex.is_match(value)),
        }
    }
}

fn field<'a>(snapshot: &'a Snapshot, path: &[String]) -> Option<&'a str> {
    let (first, rest) = path.split_first()?;
    match (first.as_str(), rest) {
        ("name", []) => Some(&snapshot.name),
        ("parent", []) => Some(&snapshot.parent),
        ("kind", []) => Some(snapshot.kind.word()),
        ("labels", [_, ..]) => snapshot.labels.get(&rest.join(".")).map(String::as_str),
        _ => None,
    }
}

struct Parser<'a> {
    rest: Peekable<Chars<'a>>,
}

type Parsed<T> = std::result::Result<T, String>;

impl Parser<'_> {
    fn filter(mut self) -> Parsed<Vec<Selector>> {
        let mut selectors = Vec::new();
        if self.rest.peek().is_none() {
            return Ok(selectors);
        }
        loop {
            selectors.push(self.selector()?);
            match self.rest.next() {
                None => return Ok(selectors),
                Some(',') => {}
                Some(other) => return Err(format!("{other:?} where a comma was expected")),
            }
        }
    }

    fn selector(&mut self) -> Parsed<Selector> {
        let mut path = vec![self.field()?];
        while self.rest.next_if_eq(&'.').is_some() {
            path.push(self.field()?);
        }
        let Some(&first) = self.rest.peek().filter(|next| matches!(next, '=' | '!' | '~')) else {
            return Ok(Selector { path, condition: Condition::Present });
        };
        self.rest.next();
        if self.rest.next() != Some('=') {
            return Err(format!("{first:?} is no operator; they are ==, != and ~="));
        }
        let value = self.value(first == '~')?;
        let condition = match first {
            '=' => Condition::Equal(value),
            '!' => Condition::Unequal(value),
            _ => {
                let regex = RegexBuilder::new(&value).size_limit(MAX_REGEX_BYTES).build();
                Condition::Matches(regex.map_err(|error| error.to_string())?)
            }
        };
        Ok(Selector { path, condition })
    }

    fn field(&mut self) -> Parsed<String> {
        if let Some(quote) = self.rest.next_if(|next| matches!(next, '"' | '`')) {
            return self.quoted(quote);
        }
        let mut field = String::new();
        while let Some(next) = self.rest.next_if(|next| {
            next.is_ascii_alphabetic()
                || (!field.is_empty() && (next.is_ascii_digit() || *next == '_'))
        }) {
            field.push(next);
        }
        match field.is_empty() {
            true => Err(match self.rest.peek() {
                Some(next) => format!("{next:?} where a field was expected"),
                None => "it ends where a field was expected".to_owned(),
            }),
            false => Ok(field),
        }
    }

    fn value(&mut self, regex: bool) -> Parsed<String> {
        let quotes: &[char] = if regex { &['"', '`', '/', '|'] } else { &['"', '`'] };
        if let Some(quote) = self.rest.next_if(|next| quotes.contains(next)) {
            return self.quoted(quote);
        }
        let mut value = String::new();
        while let Some(next) = self.rest.next_if(|next| !next.is_whitespace() && *next != ',') {
            value.push(next);
        }
        match value.is_empty() {
            true => Err("a value is missing".to_owned()),
            false => Ok(value),
        }
    }

    fn quoted(&mut self, quote: char) -> Parsed<String> {
        let mut text = String::new();
        loop {
            match self.rest.next() {
                None => return Err("a quote is not closed".to_owned()),
                Some(next) if next == quote => return Ok(text),
                Some('\\') if quote == '"' => text.push(self.escaped()?),
                // In an expression everything is the expression's, but for the quote.
                Some('\\') if matches!(quote, '/' | '|') && self.rest.peek() == Some(&quote) => {
                    self.rest.next();
                    text.push(quote);
                }
                Some(next) => text.push(next),
            }
        }
    }

    fn escaped(&mut self) -> Parsed<char> {
        let digits = match self.rest.next() {
            Some('n') => return Ok('\n'),
            Some('t') => return Ok('\t'),
            Some('r') => return Ok('\r'),
            Some('a') => return Ok('\x07'),
            Some('b') => return Ok('\x08'),
            Some('f') => return Ok('\x0c'),
            Some('v') => return Ok('\x0b'),
            Some(same @ ('\\' | '"' | '\'')) => return Ok(same),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            other => return Err(format!("{other:?} is no escape")),
        };
        let mut code = 0_u32;
        for _ in 0..digits {
            let digit = self.rest.next().and_then(|next| next.to_digit(16));
            code = code.wrapping_mul(16) + digit.ok_or("an escape lacks digits")?;
        }
        char::from_u32(code).ok_or_else(|| "an escape is no character".to_owned())
    }
}

#[cfg(test)]
mod tests;
