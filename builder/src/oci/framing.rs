//! What of a tar is not the contents of files in its layer: headers, padding, and contents that no file of
//! the layer shows. With the layer it gives the tar back, byte by byte.
//!
//! ```text
//! bytes
//!   8   magic "LAMFRAME"
//!   4   version 1
//!   1   1: the layer is the same whatever lies below it
//!   3   zero
//!   8   length of the tar
//!   2   length of the next field
//!   n   ChainID of what lay below, empty at the bottom
//!       one zstd frame with a checksum, holding records:
//!         bytes of the tar:   varint count, bytes
//!         then a file's:      varint 1 + number of the file (0 ends the tar), varint offset, varint count
//! ```
//! Numbers are little endian; a varint has seven bits a byte, low ones first. Files are the regular files of
//! the layer in path order (parents first, names in byte order), each inode once, at its first name.

use crate::content::Piece;
use crate::source::blob::Region;
use layer::{Context, Error, ErrorKind, Result};
use std::io::{Read, Write};

const MAGIC: &[u8; 8] = b"LAMFRAME";
const VERSION: u32 = 1;
/// The level of the frame: headers are alike, so more effort gains little.
const LEVEL: i32 = 3;
/// The longest ChainID.
const MAX_CHAIN_BYTES: usize = 256;
const BUFFER_BYTES: usize = 128 << 10;

/// What stands before the records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    /// Whether the layer is the same whatever lies below it.
    pub independent: bool,
    /// Length of the tar.
    pub tar_bytes: u64,
    /// ChainID of what lay below.
    pub below: String,
}

impl Header {
    fn encode(&self) -> Result<Vec<u8>> {
        let length = u16::try_from(self.below.len())
            .map_err(|_| Error::new(ErrorKind::Internal, "a long ChainID"))?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend([u8::from(self.independent), 0, 0, 0]);
        bytes.extend(self.tar_bytes.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.extend(self.below.as_bytes());
        Ok(bytes)
    }

    /// Reads what stands before the records.
    pub(crate) fn decode(source: &mut impl Read) -> Result<Self> {
        let mut fixed = [0; 26];
        source.read_exact(&mut fixed).context(|| "framing of a tar".to_owned())?;
        if fixed[..8] != *MAGIC {
            return Err(Error::corrupt("no framing of a tar"));
        }
        let version = u32::from_le_bytes([fixed[8], fixed[9], fixed[10], fixed[11]]);
        if version != VERSION {
            let text = format!("framing of a tar of version {version}");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let mut number = [0; 8];
        number.copy_from_slice(&fixed[16..24]);
        let length = usize::from(u16::from_le_bytes([fixed[24], fixed[25]]));
        if length > MAX_CHAIN_BYTES {
            return Err(Error::corrupt("framing of a tar: a long ChainID"));
        }
        let mut below = vec![0; length];
        source.read_exact(&mut below).context(|| "framing of a tar".to_owned())?;
        let below = String::from_utf8(below)
            .map_err(|_| Error::corrupt("framing of a tar: ChainID is no text"))?;
        let tar_bytes = u64::from_le_bytes(number);
        Ok(Self { independent: fixed[12] & 1 == 1, tar_bytes, below })
    }
}

/// Contents of one file that stand in the tar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placed {
    /// Number of the file.
    pub file: u32,
    /// Where they stand.
    pub piece: Piece,
}

/// Writes the framing of a tar in which these contents of files stand.
pub(crate) fn write(
    header: &Header,
    tar: &Region,
    mut placed: Vec<Placed>,
    mut out: impl Write,
) -> Result<()> {
    let failed = || "write the framing of a tar".to_owned();
    out.write_all(&header.encode()?).context(failed)?;
    let mut frame = zstd::stream::write::Encoder::new(out, LEVEL).context(failed)?;
    frame.include_checksum(true).context(failed)?;
    placed.sort_by_key(|it| it.piece.at);
    let mut position = 0;
    for Placed { file, piece } in placed {
        let inside = piece.at.checked_add(piece.bytes).is_some_and(|end| end <= tar.length);
        // Nothing of ours overlaps; what did would stand in the framing itself.
        if piece.at < position || !inside || piece.bytes == 0 {
            continue;
        }
        copy_literal(tar, position, piece.at, &mut frame)?;
        for number in [u64::from(file) + 1, piece.offset, piece.bytes] {
            put_varint(&mut frame, number).context(failed)?;
        }
        position = piece.at + piece.bytes;
    }
    copy_literal(tar, position, tar.length, &mut frame)?;
    put_varint(&mut frame, 0).context(failed)?;
    frame.finish().context(failed)?.flush().context(failed)
}

fn copy_literal(tar: &Region, from: u64, to: u64, out: &mut impl Write) -> Result<()> {
    let failed = || "write the framing of a tar".to_owned();
    put_varint(out, to - from).context(failed)?;
    let part = Region {
        file: tar.file.try_clone().context(failed)?,
        start: tar.start + from,
        length: to - from,
        name: tar.name.clone(),
    };
    std::io::copy(&mut part.reader(), out).context(failed).map(drop)
}

/// Writes a number, seven bits a byte.
pub(super) fn put_varint(out: &mut impl Write, mut number: u64) -> std::io::Result<()> {
    let mut bytes = [0; 10];
    let mut length = 0;
    loop {
        let low = (number & 0x7f) as u8;
        number >>= 7;
        bytes[length] = if number == 0 { low } else { low | 0x80 };
        length += 1;
        if number == 0 {
            return out.write_all(&bytes[..length]);
        }
    }
}

/// Reads a number that [`put_varint`] wrote.
pub(super) fn get_varint(source: &mut impl Read) -> std::io::Result<u64> {
    let mut number: u64 = 0;
    for shift in (0..64).step_by(7) {
        let mut byte = [0];
        source.read_exact(&mut byte)?;
        let bits = u64::from(byte[0] & 0x7f);
        if shift == 63 && bits > 1 {
            break;
        }
        number |= bits << shift;
        if byte[0] & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "a number of more than 64 bits"))
}

/// Gives the bytes of files of a layer.
pub(crate) trait Contents {
    /// Fills `buffer` from `offset` of this file; a range that is not in it is `Corrupt`.
    fn read_at(&mut self, file: u64, offset: u64, buffer: &mut [u8]) -> Result<()>;
}

/// The tar again, as a stream.
pub(crate) struct Rebuilt<R: Read, C> {
    records: std::io::BufReader<zstd::stream::read::Decoder<'static, std::io::BufReader<R>>>,
    contents: C,
    left: u64,
    state: State,
}

enum State {
    /// A record of literal bytes comes next.
    Between,
    Literal(u64),
    /// Number of the file, offset, what is left.
    File(u64, u64, u64),
    Done,
}

impl<R: Read, C: Contents> Rebuilt<R, C> {
    /// Begins behind the header.
    pub(crate) fn new(header: &Header, source: R, contents: C) -> Result<Self> {
        let decoder = zstd::stream::read::Decoder::new(source);
        let decoder = decoder.context(|| "framing of a tar".to_owned())?;
        let records = std::io::BufReader::with_capacity(BUFFER_BYTES, decoder);
        Ok(Self { records, contents, left: header.tar_bytes, state: State::Between })
    }

    fn step(&mut self, buffer: &mut [u8]) -> std::io::Result<Option<usize>> {
        match self.state {
            State::Done => return Ok(Some(0)),
            State::Between => self.state = State::Literal(get_varint(&mut self.records)?),
            State::Literal(0) => {
                let file = get_varint(&mut self.records)?;
                self.state = if file == 0 {
                    State::Done
                } else {
                    let offset = get_varint(&mut self.records)?;
                    State::File(file - 1, offset, get_varint(&mut self.records)?)
                };
            }
            State::Literal(left) => {
                let wanted = left.min(buffer.len() as u64) as usize;
                let length = self.records.read(&mut buffer[..wanted])?;
                if length == 0 {
                    return Err(std::io::ErrorKind::UnexpectedEof.into());
                }
                self.state = State::Literal(left - length as u64);
                return Ok(Some(length));
            }
            State::File(_, _, 0) => self.state = State::Between,
            State::File(file, offset, left) => {
                let length = left.min(buffer.len() as u64) as usize;
                let read = self.contents.read_at(file, offset, &mut buffer[..length]);
                read.map_err(std::io::Error::other)?;
                self.state = State::File(file, offset + length as u64, left - length as u64);
                return Ok(Some(length));
            }
        }
        Ok(None)
    }
}

impl<R: Read, C: Contents> Read for Rebuilt<R, C> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            let Some(length) = self.step(buffer)? else { continue };
            let invalid = |text| std::io::Error::new(std::io::ErrorKind::InvalidData, text);
            self.left = self
                .left
                .checked_sub(length as u64)
                .ok_or_else(|| invalid("the tar is longer than its framing says"))?;
            if length == 0 && self.left > 0 {
                return Err(invalid("the tar is shorter than its framing says"));
            }
            return Ok(length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::FileExt;

    /// Files as they stand in a tar.
    struct Files(Vec<Vec<u8>>);

    impl Contents for Files {
        fn read_at(&mut self, file: u64, offset: u64, buffer: &mut [u8]) -> Result<()> {
            let outside = || Error::corrupt("no such bytes");
            let bytes = self.0.get(file as usize).ok_or_else(outside)?;
            let end = offset.saturating_add(buffer.len() as u64) as usize;
            buffer.copy_from_slice(bytes.get(offset as usize..end).ok_or_else(outside)?);
            Ok(())
        }
    }

    fn region(bytes: &[u8]) -> Region {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        Region::whole(file, "tar".to_owned()).unwrap()
    }

    fn framed(tar: &[u8], placed: Vec<Placed>) -> Vec<u8> {
        let header =
            Header { independent: true, tar_bytes: tar.len() as u64, below: "sha256:x".into() };
        let mut framing = Vec::new();
        write(&header, &region(tar), placed, &mut framing).unwrap();
        framing
    }

    fn rebuilt(mut framing: &[u8], files: Vec<Vec<u8>>) -> std::io::Result<Vec<u8>> {
        let header = Header::decode(&mut framing).map_err(std::io::Error::other)?;
        let reader = Rebuilt::new(&header, framing, Files(files)).map_err(std::io::Error::other)?;
        let mut tar = Vec::new();
        // More than any of these tests can hold is a bomb.
        reader.take(1 << 20).read_to_end(&mut tar)?;
        Ok(tar)
    }

    proptest! {
        #[test]
        fn every_mixture_is_rebuilt(
            parts in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..40), any::<bool>()), 0..12),
        ) {
            let (mut tar, mut placed, mut files) = (Vec::new(), Vec::new(), Vec::new());
            for (bytes, is_file) in parts {
                if is_file {
                    let piece = Piece { offset: 0, bytes: bytes.len() as u64, at: tar.len() as u64 };
                    placed.push(Placed { file: files.len() as u32, piece });
                    files.push(bytes.clone());
                }
                tar.extend(bytes);
            }
            placed.reverse();
            let framing = framed(&tar, placed);
            prop_assert_eq!(rebuilt(&framing, files).unwrap(), tar);
        }

        #[test]
        fn damage_is_an_error_and_never_a_bomb(at: usize, byte: u8) {
            let tar: Vec<u8> = (0..4000_u32).map(|at| (at / 7) as u8).collect();
            let piece = Piece { offset: 0, bytes: 1000, at: 512 };
            let mut framing = framed(&tar, vec![Placed { file: 0, piece }]);
            let at = at % framing.len();
            prop_assume!(framing[at] != byte);
            framing[at] = byte;
            if let Ok(found) = rebuilt(&framing, vec![tar[512..1512].to_vec()]) {
                prop_assert!(found == tar, "other bytes without an error");
            }
        }
    }

    #[test]
    fn numbers_are_read_as_written() {
        for number in [0, 1, 127, 128, 300, u64::from(u32::MAX), u64::MAX] {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, number).unwrap();
            assert_eq!(get_varint(&mut bytes.as_slice()).unwrap(), number);
        }
        assert!(get_varint(&mut [0xff; 11].as_slice()).is_err());
        assert!(get_varint(&mut [0x80].as_slice()).is_err());
    }

    #[test]
    fn the_header_is_told_apart() {
        let framing = framed(b"tar", Vec::new());
        let header = Header::decode(&mut framing.as_slice()).unwrap();
        assert_eq!((header.independent, header.tar_bytes), (true, 3));
        assert_eq!(header.below, "sha256:x");
        let mut newer = framing.clone();
        newer[8] = 2;
        let error = Header::decode(&mut newer.as_slice()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(Header::decode(&mut &framing[..20]).is_err());
        assert!(Header::decode(&mut b"something else entirely, long".as_slice()).is_err());
    }
}
