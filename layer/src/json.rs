//! The canonical JSON of stored documents: sorted keys, no spaces, one form only.
//!
//! Structs that are stored declare their fields in alphabetical order (a test checks it for each) and
//! maps are `BTreeMap`s, so that serialising is canonical. Reading refuses every other form, so one
//! document has one digest.

use crate::error::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The canonical bytes of a document.
pub(crate) fn encode<T: Serialize>(document: &T) -> Vec<u8> {
    // INVARIANT: our documents have string keys and no fallible `Serialize`, so this cannot fail; an
    // empty document would be refused by every reader.
    serde_json::to_vec(document).unwrap_or_default()
}

/// Parses a document and refuses any form but the canonical one.
pub(crate) fn decode<T: Serialize + DeserializeOwned>(
    what: &str,
    max_bytes: usize,
    bytes: &[u8],
) -> Result<T> {
    if bytes.len() > max_bytes {
        return Err(Error::corrupt(format!(
            "{what}: {} bytes, more than {max_bytes}",
            bytes.len()
        )));
    }
    check_version(what, bytes)?;
    let document: T =
        serde_json::from_slice(bytes).map_err(|error| Error::corrupt(what).with_source(error))?;
    if encode(&document) == bytes {
        Ok(document)
    } else {
        Err(Error::corrupt(format!("{what}: not in canonical form")))
    }
}

/// The version of every stored JSON document so far.
pub(crate) const VERSION: u32 = 1;

/// A newer document says so before its unknown fields are called corrupt.
fn check_version(what: &str, bytes: &[u8]) -> Result<()> {
    #[derive(serde::Deserialize)]
    struct Versioned {
        version: u32,
    }
    let versioned: Versioned =
        serde_json::from_slice(bytes).map_err(|error| Error::corrupt(what).with_source(error))?;
    if versioned.version == VERSION {
        return Ok(());
    }
    Err(Error::new(
        crate::ErrorKind::Unsupported,
        format!("{what} has version {}; this program knows {VERSION}", versioned.version),
    ))
}

/// Test support: the keys of every object in the canonical form are sorted.
#[cfg(test)]
pub(crate) fn assert_sorted_keys<T: Serialize>(document: &T) {
    let bytes = encode(document);
    let value: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    fn sorted(value: &serde_json::Value) -> String {
        match value {
            serde_json::Value::Object(map) => {
                let ordered: std::collections::BTreeMap<_, _> = map.iter().collect();
                let fields: Vec<String> = ordered
                    .into_iter()
                    .map(|(key, value)| {
                        format!("{}:{}", serde_json::to_string(key).unwrap(), sorted(value))
                    })
                    .collect();
                format!("{{{}}}", fields.join(","))
            }
            serde_json::Value::Array(items) => {
                format!("[{}]", items.iter().map(sorted).collect::<Vec<_>>().join(","))
            }
            other => other.to_string(),
        }
    }
    assert_eq!(String::from_utf8(bytes).unwrap(), sorted(&value));
}
