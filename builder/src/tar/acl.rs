//! POSIX access control lists from the text that tar keeps to the bytes that the kernel keeps.

use layer::{Error, ErrorKind, Result};

const VERSION: u32 = 2;
const UNDEFINED_ID: u32 = u32::MAX;

/// `user::rwx,user:1000:r-x,group::r--,mask::r-x,other::---`, separated by commas or newlines. A
/// qualifier is a number, or a name with the number in a fourth field, as star writes it.
pub(super) fn encode(text: &[u8]) -> Result<Vec<u8>> {
    let refuse = || {
        let shown = String::from_utf8_lossy(text).escape_default().to_string();
        Error::new(
            ErrorKind::Unsupported,
            format!("access control list {shown:?} cannot be read (pack with --numeric-owner)"),
        )
    };
    let text = std::str::from_utf8(text).map_err(|_| refuse())?;
    let mut entries = Vec::new();
    for line in text.split([',', '\n']).map(str::trim) {
        // What follows # is a remark.
        let line = line.split('#').next().unwrap_or("").trim();
        if !line.is_empty() {
            entries.push(entry(line).ok_or_else(refuse)?);
        }
    }
    // The kernel wants them in the order of tags, then of ids.
    entries.sort_unstable();
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for (tag, id, permissions) in entries {
        bytes.extend_from_slice(&tag.to_le_bytes());
        bytes.extend_from_slice(&permissions.to_le_bytes());
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    Ok(bytes)
}

fn entry(line: &str) -> Option<(u16, u32, u16)> {
    let fields: Vec<&str> = line.split(':').collect();
    let (kind, qualifier, permissions) = match fields[..] {
        // `other:r--` and `mask:r--` without an empty field are in use.
        [kind, permissions] => (kind, "", permissions),
        [kind, qualifier, permissions] => (kind, qualifier, permissions),
        [kind, _, permissions, id] => (kind, id, permissions),
        _ => return None,
    };
    let id = if qualifier.is_empty() { UNDEFINED_ID } else { qualifier.parse().ok()? };
    let tag = match (kind, qualifier.is_empty()) {
        ("user" | "u", true) => 0x01,
        ("user" | "u", false) => 0x02,
        ("group" | "g", true) => 0x04,
        ("group" | "g", false) => 0x08,
        ("mask" | "m", true) => 0x10,
        ("other" | "o", true) => 0x20,
        _ => return None,
    };
    let mut bits = 0;
    for letter in permissions.chars() {
        bits |= match letter {
            'r' => 4,
            'w' => 2,
            'x' => 1,
            '-' => 0,
            _ => return None,
        };
    }
    Some((tag, id, bits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_become_what_the_kernel_keeps() {
        let bytes = encode(b"user::rw-,group::r--,user:1000:rwx,mask::rwx,other::r--").unwrap();
        let mut expected = vec![2, 0, 0, 0];
        for (tag, permissions, id) in [
            (1_u16, 6_u16, u32::MAX),
            (2, 7, 1000),
            (4, 4, u32::MAX),
            (16, 7, u32::MAX),
            (32, 4, u32::MAX),
        ] {
            expected.extend(tag.to_le_bytes());
            expected.extend(permissions.to_le_bytes());
            expected.extend(id.to_le_bytes());
        }
        assert_eq!(bytes, expected);
        assert_eq!(encode(b"user:alice:rwx:1000").unwrap(), encode(b"u:1000:rwx").unwrap());
        assert!(encode(b"user:alice:rwx").is_err());
    }
}
