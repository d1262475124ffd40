//! Presets: well-known places by one word. They are data, in `presets.json`.
//!
//! A preset either allows destinations, or it opens a registry through the node: then the registry's own
//! servers are closed, and the node decides what of it a sandbox sees.

use crate::name::DomainName;
use crate::range::GATEWAY;
use layer::{Error, Result};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;

const TEXT: &str = include_str!("../presets.json");

/// Which protocol a registry speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RegistryKind {
    /// The simple index of Python packages.
    Pypi,
    /// Package documents of npm.
    Npm,
    /// The module proxy of Go.
    Go,
    /// A Debian archive.
    Apt,
}

/// One preset.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Preset {
    /// What it opens, for people.
    pub what: String,
    /// Rules that it stands for.
    #[serde(default)]
    pub allow: Vec<String>,
    /// The registry that it opens through the node.
    #[serde(default)]
    pub registry: Option<RegistryKind>,
    /// Where the registry's parts are.
    #[serde(default)]
    pub upstream: BTreeMap<String, String>,
    /// Names, `*.NAME` for all below, that nobody reaches directly while the registry is open.
    #[serde(default)]
    pub closes: Vec<String>,
    /// Names that the node answers for itself.
    #[serde(default)]
    pub answers: Vec<String>,
    /// Environment of commands, so that clients ask the node.
    #[serde(default)]
    env: Vec<String>,
}

impl Preset {
    /// Whether this name is one of the registry's own servers.
    pub fn closes(&self, name: &DomainName) -> bool {
        self.closes.iter().any(|closed| match closed.strip_prefix("*.") {
            Some(above) => {
                name.as_str().strip_suffix(above).is_some_and(|rest| rest.ends_with('.'))
            }
            None => name.as_str() == closed,
        })
    }

    /// Whether the node itself plays this server.
    pub fn answers(&self, name: &DomainName) -> bool {
        self.answers.iter().any(|answered| name.as_str() == answered)
    }

    /// Environment of commands, `K=V`.
    pub fn env(&self) -> impl Iterator<Item = String> {
        self.env.iter().map(|entry| entry.replace("GATEWAY", &GATEWAY.to_string()))
    }
}

/// All presets by name.
pub fn all() -> &'static BTreeMap<String, Preset> {
    static ALL: LazyLock<BTreeMap<String, Preset>> = LazyLock::new(|| {
        serde_json::from_str(TEXT).unwrap_or_else(|error| {
            // A test reads the same file.
            tracing::error!(%error, "presets.json");
            BTreeMap::new()
        })
    });
    &ALL
}

/// A registry as one policy opens it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// Which it is.
    pub kind: RegistryKind,
    /// Name of its preset.
    name: String,
    /// What was published at this moment or later does not exist.
    pub before: Option<Date>,
    /// Packages that do not exist, as the registry spells them in comparisons.
    pub deny: Vec<String>,
}

impl Selection {
    /// What is known of the registry.
    pub fn preset(&self) -> &'static Preset {
        static NONE: LazyLock<Preset> = LazyLock::new(|| Preset {
            what: String::new(),
            allow: Vec::new(),
            registry: None,
            upstream: BTreeMap::new(),
            closes: Vec::new(),
            answers: Vec::new(),
            env: Vec::new(),
        });
        all().get(&self.name).unwrap_or(&NONE)
    }
}

/// A day, at whose beginning (UTC) something ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Date {
    /// Seconds since 1970.
    pub unix_s: i64,
}

impl Date {
    /// `2025-01-31`, optionally with a time of day: `2025-01-31T12:00:00Z`. Fractions of a second are
    /// dropped.
    pub fn parse(text: &str) -> Option<Self> {
        let (day, time) = text.split_once('T').unwrap_or((text, "00:00:00Z"));
        let mut parts = day.split('-').map(|part| (part.len(), part.parse::<i64>().ok()));
        let (Some((4, Some(year))), Some((2, Some(month))), Some((2, Some(of_month))), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return None;
        };
        let time = time.strip_suffix('Z').or_else(|| time.strip_suffix("+00:00"))?;
        let time = time.split('.').next()?;
        let mut parts = time.split(':').map(|part| (part.len(), part.parse::<i64>().ok()));
        let (Some((2, Some(hour))), Some((2, Some(minute))), Some((2, Some(second))), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return None;
        };
        let is_day = (1..=12).contains(&month) && (1..=days_of(year, month)).contains(&of_month);
        let is_time = hour < 24 && minute < 60 && second <= 60;
        if !is_day || !is_time || hour < 0 || minute < 0 || second < 0 || year < 1970 {
            return None;
        }
        let days = days_since_1970(year, month, of_month);
        Some(Self { unix_s: days * 86_400 + hour * 3600 + minute * 60 + second })
    }
}

fn days_of(year: i64, month: i64) -> i64 {
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    match month {
        2 if is_leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    // Years begin in March, so that the leap day is their last.
    let year = if month <= 2 { year - 1 } else { year };
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    year * 365 + year / 4 - year / 100 + year / 400 + of_year - 719_468
}

/// `NAME[,before=DATE][,deny=PACKAGE]...`
pub(crate) fn select(line: &str) -> Result<(&'static Preset, Option<Selection>)> {
    let mut words = line.split(',');
    let name = words.next().unwrap_or_default();
    let Some(preset) = all().get(name) else {
        let known: Vec<&str> = all().keys().map(String::as_str).collect();
        let known = known.join(", ");
        let text = format!("{name:?} is no preset ({known}), and no name, address or range");
        return Err(Error::invalid(text));
    };
    let Some(kind) = preset.registry else {
        return match words.next() {
            Some(word) => Err(Error::invalid(format!("{line}: {name} takes no {word:?}"))),
            None => Ok((preset, None)),
        };
    };
    let mut selection = Selection { kind, name: name.to_owned(), before: None, deny: Vec::new() };
    for word in words {
        match word.split_once('=') {
            Some(("before", date)) => {
                let wrong =
                    || Error::invalid(format!("{line}: {date:?} is no date like 2025-01-31"));
                selection.before = Some(Date::parse(date).ok_or_else(wrong)?);
            }
            Some(("deny", package)) if !package.is_empty() => {
                selection.deny.push(package_key(kind, package));
            }
            _ => {
                let text = format!("{line}: {word:?} is neither before=DATE nor deny=PACKAGE");
                return Err(Error::invalid(text));
            }
        }
    }
    selection.deny.sort_unstable();
    Ok((preset, Some(selection)))
}

/// A package's name as the registry compares it.
pub fn package_key(kind: RegistryKind, package: &str) -> String {
    let lower = package.to_ascii_lowercase();
    if kind != RegistryKind::Pypi {
        return lower;
    }
    let mut key = String::with_capacity(lower.len());
    for part in lower.split(['-', '_', '.']).filter(|part| !part.is_empty()) {
        if !key.is_empty() {
            key.push('-');
        }
        key.push_str(part);
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_can_be_read() {
        let all: BTreeMap<String, Preset> = serde_json::from_str(TEXT).unwrap();
        for (name, preset) in &all {
            crate::Policy::parse(&[name]).unwrap();
            assert_eq!(preset.registry.is_some(), preset.allow.is_empty(), "{name}");
        }
    }

    #[test]
    fn dates_are_days_since_1970() {
        let seconds = |text| Date::parse(text).map(|date| date.unix_s);
        assert_eq!(seconds("1970-01-01"), Some(0));
        assert_eq!(seconds("2025-01-01"), Some(1_735_689_600));
        assert_eq!(seconds("2024-02-29T12:00:01.5Z"), Some(1_709_208_001));
        for text in ["2025-02-29", "2025-13-01", "2025-1-1", "x", "2025-01-01T25:00:00Z", "-1"] {
            assert_eq!(seconds(text), None, "{text}");
        }
    }

    #[test]
    fn packages_have_one_spelling() {
        assert_eq!(package_key(RegistryKind::Pypi, "Zope.Interface__x"), "zope-interface-x");
        assert_eq!(package_key(RegistryKind::Npm, "@Scope/Name"), "@scope/name");
    }
}
