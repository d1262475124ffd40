//! PAX records: `length key=value\n`, values of any bytes.

use super::acl;
use super::sparse::{Segment, push};
use layer::tree::{Timestamp, Xattr};
use layer::{Error, Result};

/// What PAX headers say about the next entry. Fields that no record sets are `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Pax {
    pub path: Option<Vec<u8>>,
    pub link_path: Option<Vec<u8>>,
    pub size: Option<u64>,
    pub uid: Option<i64>,
    pub gid: Option<i64>,
    pub mtime: Option<Timestamp>,
    pub xattrs: Vec<Xattr>,
    pub sparse: Sparse,
}

/// What PAX headers say about a sparse file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Sparse {
    /// Format 1.0: the map stands before the data.
    pub map_in_data: bool,
    pub name: Option<Vec<u8>>,
    pub real_size: Option<u64>,
    /// Formats 0.0 and 0.1.
    pub map: Vec<Segment>,
    /// An offset that waits for its length (0.0).
    offset: Option<u64>,
    major: Option<u64>,
}

impl Sparse {
    /// Whether the entry is a sparse file.
    pub(super) fn is_sparse(&self) -> bool {
        self.map_in_data || self.real_size.is_some() || !self.map.is_empty()
    }
}

impl Pax {
    /// Takes over the records of one header; later ones win, an empty value takes a key back.
    pub(super) fn add(&mut self, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            // Some writers pad with NULs.
            if data.iter().all(|&byte| byte == 0) {
                break;
            }
            let (key, value, rest) = record(data).ok_or_else(|| broken("record"))?;
            self.set(key, value)?;
            data = rest;
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let given = !value.is_empty();
        match key {
            b"path" => self.path = given.then(|| value.to_vec()),
            b"linkpath" => self.link_path = given.then(|| value.to_vec()),
            b"size" => self.size = optional(value, "size", decimal)?,
            b"uid" => self.uid = optional(value, "uid", signed)?,
            b"gid" => self.gid = optional(value, "gid", signed)?,
            b"mtime" => self.mtime = optional(value, "mtime", timestamp)?,
            b"RHT.security.selinux" if given => {
                let mut label = value.to_vec();
                if label.last() != Some(&0) {
                    label.push(0);
                }
                self.xattr(b"security.selinux", label);
            }
            b"SCHILY.acl.access" if given => {
                self.xattr(b"system.posix_acl_access", acl::encode(value)?);
            }
            b"SCHILY.acl.default" if given => {
                self.xattr(b"system.posix_acl_default", acl::encode(value)?);
            }
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    self.xattr(name, value.to_vec());
                } else if let Some(name) = key.strip_prefix(b"GNU.sparse.") {
                    self.sparse(name, value)?;
                }
            }
        }
        Ok(())
    }

    fn xattr(&mut self, name: &[u8], value: Vec<u8>) {
        self.xattrs.retain(|xattr| xattr.name != name);
        self.xattrs.push(Xattr { name: name.to_vec(), value });
    }

    fn sparse(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let sparse = &mut self.sparse;
        let number = || decimal(value).ok_or_else(|| broken("sparse number"));
        match key {
            b"major" => sparse.major = Some(number()?),
            b"minor" => {
                let version = (sparse.major, number()?);
                if !matches!(version, (Some(1), 0) | (Some(0), _)) {
                    return Err(Error::invalid("sparse file of an unknown version"));
                }
                sparse.map_in_data = version.0 == Some(1);
            }
            b"name" => sparse.name = Some(value.to_vec()),
            b"realsize" | b"size" => sparse.real_size = Some(number()?),
            b"offset" => sparse.offset = Some(number()?),
            b"numbytes" => {
                let offset = sparse.offset.take().ok_or_else(|| broken("sparse map"))?;
                push(&mut sparse.map, Segment { offset, bytes: number()? })?;
            }
            b"map" => {
                let numbers: Option<Vec<u64>> =
                    value.split(|&byte| byte == b',').map(decimal).collect();
                let numbers = numbers.filter(|list| list.len() % 2 == 0);
                for pair in numbers.ok_or_else(|| broken("sparse map"))?.chunks_exact(2) {
                    push(&mut sparse.map, Segment { offset: pair[0], bytes: pair[1] })?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

fn broken(what: &str) -> Error {
    Error::corrupt(format!("broken PAX {what}"))
}

/// Key, value and what follows the first record.
fn record(data: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = data.iter().take(20).position(|&byte| byte == b' ')?;
    let length = usize::try_from(decimal(&data[..space])?).ok()?;
    let body = data.get(space + 1..length)?.strip_suffix(b"\n")?;
    let equals = body.iter().position(|&byte| byte == b'=')?;
    Some((&body[..equals], &body[equals + 1..], &data[length..]))
}

fn optional<T>(value: &[u8], what: &str, parse: impl Fn(&[u8]) -> Option<T>) -> Result<Option<T>> {
    if value.is_empty() {
        return Ok(None);
    }
    parse(value).map(Some).ok_or_else(|| broken(what))
}

/// Digits only.
pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn signed(text: &[u8]) -> Option<i64> {
    match text.strip_prefix(b"-") {
        Some(digits) => 0_i64.checked_sub_unsigned(decimal(digits)?),
        None => i64::try_from(decimal(text)?).ok(),
    }
}

/// Seconds with a fraction, also negative. Rounds down past nanoseconds.
fn timestamp(text: &[u8]) -> Option<Timestamp> {
    let negative = text.first() == Some(&b'-');
    let digits = if negative { &text[1..] } else { text };
    let mut halves = digits.splitn(2, |&byte| byte == b'.');
    let whole = i64::try_from(decimal(halves.next()?)?).ok()?;
    let fraction = halves.next().unwrap_or(b"");
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let kept = &fraction[..fraction.len().min(9)];
    let mut nanos: u32 = 0;
    for place in 0..9 {
        nanos = nanos * 10 + u32::from(kept.get(place).map_or(0, |digit| digit - b'0'));
    }
    if !negative {
        return Some(Timestamp { secs: whole, nanos });
    }
    if fraction.iter().skip(9).any(|&digit| digit != b'0') {
        nanos += 1;
    }
    if nanos == 0 {
        return Some(Timestamp { secs: -whole, nanos: 0 });
    }
    Some(Timestamp { secs: -whole - 1, nanos: 1_000_000_000 - nanos })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_count_forward() {
        let at = |text: &[u8]| timestamp(text).map(|time| (time.secs, time.nanos));
        assert_eq!(at(b"1700000000.123456789"), Some((1_700_000_000, 123_456_789)));
        assert_eq!(at(b"-1.5"), Some((-2, 500_000_000)));
        assert_eq!(at(b"-3"), Some((-3, 0)));
        assert_eq!(at(b"-0.0000000001"), Some((-1, 999_999_999)));
        assert_eq!(at(b"5.1234567899"), Some((5, 123_456_789)));
        assert_eq!(at(b"9223372036854775807"), Some((i64::MAX, 0)));
        assert_eq!(at(b"9223372036854775808"), None);
        assert_eq!(at(b"1e5"), None);
    }

    #[test]
    fn binary_values_and_broken_records() {
        let mut pax = Pax::default();
        let mut data = b"22 SCHILY.xattr.u.x=".to_vec();
        data.extend_from_slice(b"\n=");
        data.truncate(21);
        data.extend_from_slice(b"\n11 path=a\n\n");
        // "22 SCHILY.xattr.u.x=\n\n" is one record whose value is a newline.
        pax.add(&data).unwrap();
        assert_eq!(pax.xattrs[0].value, b"\n");
        assert_eq!(pax.path.as_deref(), Some(&b"a\n"[..]));
        for bad in [&b"5 a\n"[..], b"99 path=x\n", b"x path=y\n", b"9 path=xy", b"3 \n"] {
            assert!(Pax::default().add(bad).is_err(), "{bad:?}");
        }
    }
}
