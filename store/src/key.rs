//! Names of objects on a store: validated relative paths that every backend can hold.
//!
//! A key is what an object store, a POSIX directory and 3FS can all name: components of at most 255
//! bytes from a small alphabet, joined by `/`. Nothing here touches a disk.

use layer::{Error, Result};
use std::fmt;

/// Longest component, in bytes: what POSIX file systems and 3FS hold.
const MAX_COMPONENT_BYTES: usize = 255;
/// Longest key, in bytes: what object stores hold.
const MAX_KEY_BYTES: usize = 1024;
/// Deepest key, in components: below the 64 levels of 3FS, leaving room for the root's own depth.
const MAX_DEPTH: usize = 16;

/// The name of one object, for example `packs/3f/3f0c...`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(String);

impl Key {
    /// Accepts `a/b/c` with components of `[A-Za-z0-9._+-]` that do not start with a dot.
    pub fn new(text: impl Into<String>) -> Result<Self> {
        let text = text.into();
        check(&text)?;
        Ok(Self(text))
    }

    /// A name of the backend's own beside all keys; the caller sees that no key has it.
    pub(crate) fn reserved(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// The key as text, for example `refs/base/debian/latest/18446744073709551614`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The first component: what sort of object this is.
    pub fn class(&self) -> &str {
        self.0.split('/').next().unwrap_or_default()
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.0)
    }
}

fn check(text: &str) -> Result<()> {
    let refuse = |why: &str| Err(Error::invalid(format!("object name {text:?} {why}")));
    if text.len() > MAX_KEY_BYTES {
        return refuse("is too long");
    }
    let mut depth = 0;
    for component in text.split('/') {
        depth += 1;
        if component.is_empty() || component.len() > MAX_COMPONENT_BYTES {
            return refuse("has an empty or too long component");
        }
        if component.starts_with('.') {
            return refuse("has a component that starts with a dot");
        }
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._+-".contains(&byte);
        if !component.bytes().all(allowed) {
            return refuse("has characters outside [A-Za-z0-9._+-]");
        }
    }
    if depth > MAX_DEPTH {
        return refuse("is too deep");
    }
    Ok(())
}

/// Checks what may stand before a listing: nothing, or whole components that end with `/`.
pub(crate) fn check_prefix(prefix: &str) -> Result<()> {
    if prefix.is_empty() {
        return Ok(());
    }
    match prefix.strip_suffix('/') {
        Some(directory) => check(directory),
        None => Err(Error::invalid(format!("listing prefix {prefix:?} does not end with a slash"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_stay_inside_the_store() {
        for good in ["FORMAT", "packs/3f/3f00", "refs/base/a+b/1.0_x/0001"] {
            assert_eq!(Key::new(good).unwrap().as_str(), good);
        }
        let long = "a".repeat(256);
        let deep = "a/".repeat(16) + "a";
        for bad in
            ["", "/a", "a/", "a//b", "..", "a/../b", ".tmp/x", "a b", "ä", "a\0", &long, &deep]
        {
            assert!(Key::new(bad).is_err(), "{bad:?}");
        }
        assert_eq!(Key::new("leases/a/b").unwrap().class(), "leases");
    }

    #[test]
    fn a_listing_prefix_ends_at_a_component() {
        check_prefix("").unwrap();
        check_prefix("packs/").unwrap();
        assert!(check_prefix("pac").is_err());
        assert!(check_prefix("../").is_err());
    }
}
