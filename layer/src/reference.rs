//! References: mutable names `kind/name:tag` and the immutable entries that record their moves.

use crate::error::{Error, Result};
use crate::id::{EnvId, LayerId};
use crate::json;
use crate::manifest::LayerKind;
use crate::words::words;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The tag of a reference that names none.
pub const DEFAULT_TAG: &str = "latest";
/// The longest name.
pub const MAX_NAME_BYTES: usize = 255;
/// The longest tag.
pub const MAX_TAG_BYTES: usize = 128;
/// The longest stored entry.
pub const MAX_ENTRY_BYTES: usize = 64 << 10;

/// What a reference points to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RefKind {
    /// A base layer.
    Base,
    /// A workspace layer.
    Workspace,
    /// A toolkit layer.
    Toolkit,
    /// A diff layer.
    Diff,
    /// An environment.
    Env,
}

words!(RefKind, "kind of reference", {
    Base = "base",
    Workspace = "workspace",
    Toolkit = "toolkit",
    Diff = "diff",
    Env = "env",
});

impl From<LayerKind> for RefKind {
    fn from(kind: LayerKind) -> Self {
        match kind {
            LayerKind::Base => Self::Base,
            LayerKind::Workspace => Self::Workspace,
            LayerKind::Toolkit => Self::Toolkit,
            LayerKind::Diff => Self::Diff,
        }
    }
}

/// A mutable name, `kind/name:tag`.
///
/// INVARIANT: the name is `[a-z0-9][a-z0-9._/-]*` of parts that are neither empty nor begin with a
/// dot, at most [`MAX_NAME_BYTES`] long; the tag is `[A-Za-z0-9_][A-Za-z0-9._-]*`, at most
/// [`MAX_TAG_BYTES`] long. So both are safe as paths on any store.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    kind: RefKind,
    name: String,
    tag: String,
}

impl Reference {
    /// Checks the parts.
    pub fn new(kind: RefKind, name: &str, tag: &str) -> Result<Self> {
        let name_byte = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-');
        let part_fits =
            |part: &str| !part.is_empty() && !part.starts_with('.') && part.bytes().all(name_byte);
        let starts_well = name.starts_with(|first: char| first.is_ascii_alphanumeric());
        if name.len() > MAX_NAME_BYTES || !starts_well || !name.split('/').all(part_fits) {
            return Err(Error::invalid(format!(
                "{name:?} is no name: lower-case letters, digits, '.', '_', '-' and '/' between parts"
            )));
        }
        let tag_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let starts_well =
            tag.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '_');
        if tag.len() > MAX_TAG_BYTES || !starts_well || !tag.bytes().all(tag_byte) {
            return Err(Error::invalid(format!(
                "{tag:?} is no tag: letters, digits, '.', '_' and '-', at most {MAX_TAG_BYTES}"
            )));
        }
        Ok(Self { kind, name: name.to_owned(), tag: tag.to_owned() })
    }

    /// What it points to.
    pub fn kind(&self) -> RefKind {
        self.kind
    }

    /// The name without kind and tag; may hold slashes.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The tag.
    pub fn tag(&self) -> &str {
        &self.tag
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}:{}", self.kind, self.name, self.tag)
    }
}

impl FromStr for Reference {
    type Err = Error;
    /// Parses `kind/name:tag` or `kind/name`.
    fn from_str(text: &str) -> Result<Self> {
        let refuse =
            || Error::invalid(format!("{text:?} is no reference: kind/name or kind/name:tag"));
        let (kind, rest) = text.split_once('/').ok_or_else(refuse)?;
        let (name, tag) = rest.split_once(':').unwrap_or((rest, DEFAULT_TAG));
        let parsed = kind.parse().and_then(|kind| Self::new(kind, name, tag));
        parsed.map_err(|error| refuse().with_source(error))
    }
}

impl Serialize for Reference {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Reference {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// What a reference can point to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Target {
    /// One layer.
    Layer(LayerId),
    /// A stack of layers and its configuration.
    Environment(EnvId),
}

impl Target {
    /// True where a reference of this kind may point here.
    pub fn fits(&self, kind: RefKind) -> bool {
        matches!(self, Self::Environment(_)) == (kind == RefKind::Env)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layer(id) => write!(f, "layer {id}"),
            Self::Environment(id) => write!(f, "environment {id}"),
        }
    }
}

/// One move of a reference; immutable once it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReferenceEntry {
    /// Counts the moves from 1.
    pub number: u64,
    /// `None` where the reference was removed.
    pub target: Option<Target>,
    /// When, by the writer's clock.
    pub time_unix_ns: u64,
    /// Who.
    pub author: String,
    /// Random: a writer that meets an entry of its number knows by it whether it is its own.
    pub nonce: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredEntry {
    author: String,
    nonce: String,
    number: u64,
    target: Option<Target>,
    time_unix_ns: u64,
    version: u32,
}

impl ReferenceEntry {
    /// Canonical JSON.
    pub fn encode(&self) -> Vec<u8> {
        json::encode(&self.stored())
    }

    fn stored(&self) -> StoredEntry {
        StoredEntry {
            author: self.author.clone(),
            nonce: self.nonce.clone(),
            number: self.number,
            target: self.target,
            time_unix_ns: self.time_unix_ns,
            version: json::VERSION,
        }
    }

    /// Parses canonical JSON; any other form is `Corrupt`, a newer version is `Unsupported`.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let stored: StoredEntry = json::decode("reference entry", MAX_ENTRY_BYTES, bytes)?;
        Ok(Self {
            number: stored.number,
            target: stored.target,
            time_unix_ns: stored.time_unix_ns,
            author: stored.author,
            nonce: stored.nonce,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn references_round_trip(
            kind in 0..5_usize,
            name in "[a-z0-9][a-z0-9_-]{0,9}(/[a-z0-9][a-z0-9._-]{0,9}){0,3}",
            tag in "[A-Za-z0-9_][A-Za-z0-9._-]{0,20}",
        ) {
            let reference = Reference::new(RefKind::ALL[kind], &name, &tag).unwrap();
            prop_assert_eq!(reference.to_string().parse::<Reference>().unwrap(), reference);
        }

        #[test]
        fn any_text_parses_or_is_refused(text in ".{0,40}") {
            if let Ok(reference) = text.parse::<Reference>() {
                prop_assert!(reference.to_string().starts_with(&text));
            }
        }

        #[test]
        fn entries_round_trip(
            number: u64,
            time_unix_ns: u64,
            author in ".{0,20}",
            nonce in "[0-9a-f]{32}",
            target in 0..3,
        ) {
            let target = match target {
                0 => None,
                1 => Some(Target::Layer(LayerId([1; 32]))),
                _ => Some(Target::Environment(EnvId([2; 32]))),
            };
            let entry = ReferenceEntry { number, target, time_unix_ns, author, nonce };
            json::assert_sorted_keys(&entry.stored());
            prop_assert_eq!(ReferenceEntry::decode(&entry.encode()).unwrap(), entry);
        }
    }

    #[test]
    fn the_tag_defaults_and_bad_names_are_refused() {
        let reference: Reference = "base/debian".parse().unwrap();
        assert_eq!(reference.to_string(), "base/debian:latest");
        for bad in [
            "",
            "base",
            "base/",
            "base/:x",
            "nope/x",
            "base/X",
            "base/a//b",
            "base/a/",
            "base/../a",
            "base/a/.b",
            "base/a:",
            "base/a:b:c",
            "base/a:b/c",
            "base/a:.b",
            "base/é",
            "/a",
            "base/-a",
        ] {
            assert!(bad.parse::<Reference>().is_err(), "{bad}");
        }
        assert!(format!("base/{}", "a".repeat(256)).parse::<Reference>().is_err());
    }

    #[test]
    fn targets_fit_their_kinds() {
        assert!(Target::Layer(LayerId([0; 32])).fits(RefKind::Base));
        assert!(!Target::Layer(LayerId([0; 32])).fits(RefKind::Env));
        assert!(Target::Environment(EnvId([0; 32])).fits(RefKind::Env));
    }
}
