//! Maps of sparse files: which bytes of a file an archive holds.

use super::header::number;
use super::pax::decimal;
use crate::content::Piece;
use layer::{Error, Result};

/// A run of bytes that the archive holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    /// Where in the file.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
}

/// The most segments of one sparse file.
const MAX_SEGMENTS: usize = 1 << 20;

/// Adds a segment to a map, within the bound.
pub(super) fn push(map: &mut Vec<Segment>, segment: Segment) -> Result<()> {
    if map.len() >= MAX_SEGMENTS {
        return Err(too_many_segments());
    }
    map.push(segment);
    Ok(())
}

fn too_many_segments() -> Error {
    Error::invalid(format!("sparse file with more than {MAX_SEGMENTS} segments"))
}

/// Bytes of one entry of an old GNU map: offset and length, 12 digits each.
const OLD_ENTRY: usize = 24;

/// Reads the entries of an old GNU map from a header or an extension block; an empty one ends it.
pub(super) fn old_entries(field: &[u8], map: &mut Vec<Segment>) -> Result<()> {
    for entry in field.chunks_exact(OLD_ENTRY) {
        if entry.iter().all(|&byte| byte == 0) {
            break;
        }
        let read = |field| number(field).and_then(|value| u64::try_from(value).ok());
        match (read(&entry[..12]), read(&entry[12..])) {
            (Some(offset), Some(bytes)) => push(map, Segment { offset, bytes })?,
            _ => return Err(Error::corrupt("broken map of a sparse file")),
        }
    }
    Ok(())
}

/// Reads a map of format 1.0 from the start of an entry's data: a count, then offset and length in
/// turn, each a decimal on a line. Returns the map and the bytes it took, or `None` when `data` ends
/// too early.
pub(super) fn map_in_data(data: &[u8]) -> Result<Option<(Vec<Segment>, usize)>> {
    let mut at = 0;
    let mut next = || -> Result<Option<u64>> {
        let Some(length) = data[at..].iter().position(|&byte| byte == b'\n') else {
            return Ok(None);
        };
        let value = decimal(&data[at..at + length])
            .ok_or_else(|| Error::corrupt("broken map of a sparse file"))?;
        at += length + 1;
        Ok(Some(value))
    };
    let Some(count) = next()? else { return Ok(None) };
    if count > MAX_SEGMENTS as u64 {
        return Err(too_many_segments());
    }
    let mut map = Vec::new();
    for _ in 0..count {
        match (next()?, next()?) {
            (Some(offset), Some(bytes)) => map.push(Segment { offset, bytes }),
            _ => return Ok(None),
        }
    }
    Ok(Some((map, at)))
}

/// Lays the segments over the stored bytes. They must ascend, stay inside the file and use exactly
/// what is stored.
pub(super) fn pieces(map: &[Segment], size: u64, at: u64, stored: u64) -> Result<Vec<Piece>> {
    let mut pieces: Vec<Piece> = Vec::with_capacity(map.len());
    let (mut end, mut used) = (0, 0_u64);
    for segment in map {
        let stop = segment.offset.checked_add(segment.bytes);
        let stop = stop.filter(|&stop| segment.offset >= end && stop <= size);
        let Some(stop) = stop else {
            return Err(Error::corrupt("the map of a sparse file is out of order or too long"));
        };
        if segment.bytes > 0 {
            let piece = Piece { offset: segment.offset, bytes: segment.bytes, at: at + used };
            match pieces.last_mut() {
                Some(last) if last.offset + last.bytes == piece.offset => last.bytes += piece.bytes,
                _ => pieces.push(piece),
            }
        }
        used += segment.bytes;
        end = stop;
    }
    if used != stored {
        return Err(Error::corrupt("the map of a sparse file does not fit its data"));
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_checked() {
        let segment = |offset, bytes| Segment { offset, bytes };
        let good = [segment(4096, 10), segment(8192, 5), segment(10_000, 0)];
        assert_eq!(
            pieces(&good, 10_000, 512, 15).unwrap(),
            [Piece { offset: 4096, bytes: 10, at: 512 }, Piece { offset: 8192, bytes: 5, at: 522 }]
        );
        assert!(pieces(&good, 10_000, 512, 16).is_err());
        assert!(pieces(&good, 9_999, 512, 15).is_err());
        assert!(pieces(&[segment(10, 5), segment(12, 5)], 100, 0, 10).is_err());
        assert!(pieces(&[segment(u64::MAX, 5)], 100, 0, 5).is_err());
    }

    #[test]
    fn maps_before_the_data() {
        let (map, used) = map_in_data(b"1\n4096\n10\n\0\0").unwrap().unwrap();
        assert_eq!((map.len(), used), (1, 10));
        assert_eq!(map_in_data(b"2\n4096\n10\n").unwrap(), None);
        assert!(map_in_data(b"x\n").is_err());
        assert!(map_in_data(b"99999999999\n").is_err());
    }
}
