//! Names of the domain name system, as policies and questions have them.

use layer::{Error, Result};
use std::fmt;

/// A name in lower case, without the dot at its end.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainName(String);

impl DomainName {
    /// Reads a name: labels of letters, digits, `-` and `_`.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |why: &str| Err(Error::invalid(format!("name {text:?}: {why}")));
        let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        if name.is_empty() || name.len() > 253 {
            return wrong("1 to 253 bytes");
        }
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        for label in name.split('.') {
            if label.is_empty() || label.len() > 63 {
                return wrong("each label has 1 to 63 bytes");
            }
            if !label.bytes().all(is_part) {
                return wrong("letters, digits, `-` and `_` only");
            }
        }
        Ok(Self(name))
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this name lies below the other one, at any depth.
    pub fn is_below(&self, above: &Self) -> bool {
        self.0.strip_suffix(&above.0).is_some_and(|rest| rest.ends_with('.'))
    }
}

impl fmt::Display for DomainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
