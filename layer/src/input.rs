//! A bounded little-endian reader over foreign bytes: every step is checked, nothing panics.

use crate::error::{Error, Result};

/// The rest of some bytes that are being decoded, and what they are, for messages.
pub(crate) struct Input<'a> {
    what: &'static str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Input<'a> {
    pub(crate) fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Self { what, bytes, at: 0 }
    }

    /// An error that says what was decoded and where.
    pub(crate) fn corrupt(&self, why: impl AsRef<str>) -> Error {
        Error::corrupt(format!("{} at byte {}: {}", self.what, self.at, why.as_ref()))
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.bytes.len());
        let Some(end) = end else {
            return Err(self.corrupt(format!("{len} bytes wanted, {} left", self.left())));
        };
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// An unsigned LEB128 number in its shortest form.
    pub(crate) fn varint(&mut self) -> Result<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(self.corrupt("number above 64 bits"));
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                if byte == 0 && shift > 0 {
                    return Err(self.corrupt("number not in its shortest form"));
                }
                return Ok(value);
            }
        }
        Err(self.corrupt("number longer than 10 bytes"))
    }

    /// Fails unless the next bytes are these.
    pub(crate) fn magic(&mut self, magic: &[u8; 8]) -> Result<()> {
        let found = self.array::<8>()?;
        if &found == magic { Ok(()) } else { Err(self.corrupt("wrong magic")) }
    }

    /// Fails unless the next u32 is the one version that exists.
    pub(crate) fn version(&mut self, known: u32) -> Result<()> {
        let found = self.u32()?;
        if found == known {
            return Ok(());
        }
        let text = format!("{} has version {found}; this program knows {known}", self.what);
        Err(Error::new(crate::ErrorKind::Unsupported, text))
    }

    /// The next u32, a set of incompatible features; fails unless it is within the known ones.
    pub(crate) fn incompatible(&mut self, known: u32) -> Result<u32> {
        let found = self.u32()?;
        if found & !known == 0 {
            return Ok(found);
        }
        let text = format!("{} needs unknown features {:#x}", self.what, found & !known);
        Err(Error::new(crate::ErrorKind::Unsupported, text))
    }

    pub(crate) fn zeros(&mut self, len: usize) -> Result<()> {
        if self.take(len)?.iter().all(|byte| *byte == 0) {
            Ok(())
        } else {
            Err(self.corrupt("reserved bytes are not zero"))
        }
    }

    pub(crate) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Fails unless everything was consumed.
    pub(crate) fn end(&self) -> Result<()> {
        if self.left() == 0 { Ok(()) } else { Err(self.corrupt("bytes after the end")) }
    }
}

/// Bytes of the checksum behind a document.
pub(crate) const CHECKSUM_BYTES: usize = 32;

/// Appends the checksum of all bytes so far: their BLAKE3.
pub(crate) fn put_checksum(out: &mut Vec<u8>) {
    let checksum = blake3::hash(out);
    out.extend_from_slice(checksum.as_bytes());
}

/// What stands before the checksum; `Corrupt` where it is not the checksum of that.
pub(crate) fn checked<'a>(what: &str, bytes: &'a [u8]) -> Result<&'a [u8]> {
    let split = bytes.len().checked_sub(CHECKSUM_BYTES).map(|cut| bytes.split_at(cut));
    split
        .filter(|(body, checksum)| blake3::hash(body).as_bytes() == checksum)
        .map(|(body, _)| body)
        .ok_or_else(|| Error::corrupt(format!("{what}: wrong checksum")))
}

/// Appends an unsigned LEB128 number.
pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn varints_round_trip(value: u64) {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value);
            let mut input = Input::new("number", &bytes);
            prop_assert_eq!(input.varint().unwrap(), value);
            input.end().unwrap();
        }
    }

    #[test]
    fn long_and_padded_varints_are_refused() {
        assert!(Input::new("number", &[0x80, 0x00]).varint().is_err());
        assert!(Input::new("number", &[0xff; 11]).varint().is_err());
        let mut two_to_the_64 = [0x80; 10];
        two_to_the_64[9] = 2;
        assert!(Input::new("number", &two_to_the_64).varint().is_err());
    }
}
