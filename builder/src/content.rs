//! Where the bytes of a file lie before they are chunks, and how they are read.
//!
//! A content is a locator of a few words: no bytes are held. Bytes are read by position, from any
//! thread, as often as needed. A file of a directory is checked against the stamp that the walk
//! took, before and after each use: one that changes under the build is an error, never a mixture.

use crate::path;
use layer::chunk::Chunk;
use layer::{Context, Error, ErrorKind, Result};
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// The bytes of one regular file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    /// Length in bytes, holes included.
    pub size: u64,
    /// Where they lie.
    pub place: Place,
}

/// Where the bytes of a file lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Here.
    Bytes(Vec<u8>),
    /// In pieces of one archive. Ascending and disjoint; what no piece covers is zero.
    Archive {
        /// Which origin of the index.
        origin: u32,
        /// The pieces.
        pieces: Vec<Piece>,
    },
    /// In a file below a directory.
    File {
        /// Which origin of the index.
        origin: u32,
        /// Path below the origin, without a leading slash.
        path: Box<[u8]>,
        /// What the file looked like when it was listed.
        stamp: Stamp,
        /// Where it has data (offset, length), when it has holes.
        data: Option<Vec<(u64, u64)>>,
    },
    /// In chunks that the store holds already; nothing is read. Ascending; gaps are holes.
    Chunks(Vec<ChunkRange>),
}

/// A run of bytes of an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Where in the file, bytes.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
    /// Where in the archive, bytes.
    pub at: u64,
}

/// A run of blocks of a file that lies in one chunk of a lower layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkRange {
    /// First block of the file.
    pub file_block: u32,
    /// How many blocks.
    pub blocks: u32,
    /// The chunk; its `start_block` is the one of the lower layer.
    pub chunk: Chunk,
    /// First block inside the chunk.
    pub chunk_block: u32,
}

/// What tells whether a file is still the one that was listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Device number.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Length in bytes.
    pub size: u64,
    /// Modification time, seconds and nanoseconds.
    pub mtime: (i64, u64),
    /// Change time, seconds and nanoseconds.
    pub ctime: (i64, u64),
}

impl Stamp {
    /// The stamp of a file that was looked at.
    pub fn of(stat: &rustix::fs::Stat) -> Self {
        Self {
            dev: stat.st_dev,
            ino: stat.st_ino,
            size: stat.st_size.cast_unsigned(),
            mtime: (stat.st_mtime, stat.st_mtime_nsec),
            ctime: (stat.st_ctime, stat.st_ctime_nsec),
        }
    }
}

/// Something that contents are read from.
#[derive(Debug)]
pub enum Origin {
    /// A tar file, or the unnamed file that a compressed one was unpacked into.
    Archive {
        /// The bytes of the tar.
        file: File,
        /// How users call it.
        name: String,
        /// What it looked like when it was indexed; `None` where nobody else can change it.
        stamp: Option<Stamp>,
    },
    /// A directory; files are opened below it, through no symbolic link.
    Directory {
        /// The directory, opened.
        root: OwnedFd,
        /// How users call it.
        name: String,
    },
}

impl Origin {
    /// Checks that an archive is still what was indexed. Call it after the last read.
    pub fn finish(&self) -> Result<()> {
        if let Self::Archive { file, name, stamp: Some(stamp) } = self {
            let stat = rustix::fs::fstat(file)
                .map_err(std::io::Error::from)
                .context(|| format!("stat {name}"))?;
            if Stamp::of(&stat) != *stamp {
                let text = format!("{name} changed while it was being read");
                return Err(Error::new(ErrorKind::Busy, text));
            }
        }
        Ok(())
    }
}

/// A content that is ready to be read.
#[derive(Debug)]
pub enum Open<'a> {
    /// Bytes in memory.
    Bytes(&'a [u8]),
    /// Pieces of an archive.
    Archive(&'a File, &'a str, &'a [Piece]),
    /// A file, its path for messages, its stamp.
    File(File, &'a [u8], Stamp),
}

impl Content {
    /// A content that is held in memory.
    pub fn bytes(bytes: Vec<u8>) -> Self {
        Self { size: bytes.len() as u64, place: Place::Bytes(bytes) }
    }

    /// The first range at or after `offset` that may hold other bytes than zero, or `None` when
    /// there is none before the end.
    pub fn next_data(&self, offset: u64) -> Option<(u64, u64)> {
        let clip = |start: u64, bytes: u64| {
            let end = (start + bytes).min(self.size);
            let start = start.max(offset);
            (start < end).then(|| (start, end - start))
        };
        match &self.place {
            Place::Archive { pieces, .. } => {
                let first = pieces.partition_point(|piece| piece.offset + piece.bytes <= offset);
                pieces[first..].iter().find_map(|piece| clip(piece.offset, piece.bytes))
            }
            Place::File { data: Some(data), .. } => {
                let first = data.partition_point(|&(start, bytes)| start + bytes <= offset);
                data[first..].iter().find_map(|&(start, bytes)| clip(start, bytes))
            }
            Place::Bytes(_) | Place::File { data: None, .. } => clip(0, self.size),
            Place::Chunks(_) => None,
        }
    }

    /// Makes the content ready to be read.
    pub fn open<'a>(&'a self, origins: &'a [Arc<Origin>]) -> Result<Open<'a>> {
        let lost = || Error::new(ErrorKind::Internal, "content names an origin that is not there");
        let origin = |number: u32| origins.get(number as usize).map(|origin| &**origin);
        match &self.place {
            Place::Bytes(bytes) => Ok(Open::Bytes(bytes)),
            Place::Archive { origin: number, pieces } => match origin(*number) {
                Some(Origin::Archive { file, name, .. }) => Ok(Open::Archive(file, name, pieces)),
                _ => Err(lost()),
            },
            Place::File { origin: number, path, stamp, .. } => {
                let Some(Origin::Directory { root, .. }) = origin(*number) else {
                    return Err(lost());
                };
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
                let file = path::open_below(root, path, flags, Mode::empty())
                    .map_err(|error| changed(path).with_source(error))?;
                let open = Open::File(File::from(file), path, *stamp);
                open.finish()?;
                Ok(open)
            }
            Place::Chunks(_) => {
                Err(Error::new(ErrorKind::Internal, "content by reference has no bytes to read"))
            }
        }
    }
}

impl Open<'_> {
    /// Fills `buffer` with the bytes from `offset`; the range must lie inside the file.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        match self {
            Open::Bytes(bytes) => {
                let range = usize::try_from(offset)
                    .ok()
                    .and_then(|start| bytes.get(start..start.checked_add(buffer.len())?));
                let bytes =
                    range.ok_or_else(|| Error::new(ErrorKind::Internal, "read past the end"))?;
                buffer.copy_from_slice(bytes);
                Ok(())
            }
            Open::Archive(file, name, pieces) => read_pieces(file, name, pieces, offset, buffer),
            Open::File(file, path, _) => file.read_exact_at(buffer, offset).map_err(|error| {
                if error.kind() == std::io::ErrorKind::UnexpectedEof {
                    changed(path)
                } else {
                    Error::io(format!("read {}", path::show(path)), error)
                }
            }),
        }
    }

    /// Checks that what was read is what was listed. Call it after the last read.
    pub fn finish(&self) -> Result<()> {
        if let Open::File(file, path, stamp) = self {
            let stat = rustix::fs::fstat(file)
                .map_err(std::io::Error::from)
                .context(|| format!("stat {}", path::show(path)))?;
            if Stamp::of(&stat) != *stamp {
                return Err(changed(path));
            }
        }
        Ok(())
    }
}

/// The refusal of a file that is not any more what was listed.
pub(crate) fn changed(path: &[u8]) -> Error {
    Error::new(ErrorKind::Busy, format!("{} changed while it was being read", path::show(path)))
}

fn read_pieces(
    file: &File,
    name: &str,
    pieces: &[Piece],
    offset: u64,
    buffer: &mut [u8],
) -> Result<()> {
    let end = offset + buffer.len() as u64;
    let first = pieces.partition_point(|piece| piece.offset + piece.bytes <= offset);
    let mut filled = offset;
    for piece in pieces[first..].iter().take_while(|piece| piece.offset < end) {
        let start = piece.offset.max(offset);
        let stop = (piece.offset + piece.bytes).min(end);
        buffer[index(filled - offset)..index(start - offset)].fill(0);
        file.read_exact_at(
            &mut buffer[index(start - offset)..index(stop - offset)],
            piece.at + (start - piece.offset),
        )
        .context(|| format!("read {name} at {}", piece.at + (start - piece.offset)))?;
        filled = stop;
    }
    buffer[index(filled - offset)..].fill(0);
    Ok(())
}

/// Offsets inside a buffer fit by construction.
fn index(offset: u64) -> usize {
    offset as usize
}
