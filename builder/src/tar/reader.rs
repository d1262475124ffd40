//! The sequence of entries of a tar file.

use super::BLOCK;
use super::header::{Block, Header, text};
use super::pax::Pax;
use super::sparse::{self, Segment};
use crate::content::Piece;
use crate::path;
use layer::tree::{Rdev, Timestamp, Xattr};
use layer::{Context, Error, ErrorKind, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The most bytes of one PAX header. The kernel allows 64 KiB of attribute names and as much for each
/// value, so real headers stay below.
const MAX_PAX_BYTES: u64 = 16 << 20;
/// The most bytes of a GNU long name.
const MAX_NAME_BYTES: u64 = 1 << 20;
/// The most bytes of a path. Each component makes a directory, so this bounds what one entry costs.
const MAX_PATH_BYTES: usize = 32 << 10;
/// The most bytes of a sparse map in front of the data: 2^20 lines of two numbers.
const MAX_MAP_BYTES: u64 = 48 << 20;
/// How much is read at once while going from header to header.
const WINDOW_BYTES: usize = 16 << 10;

/// One entry with everything that applied to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// As the archive has it: not checked, not normalised.
    pub path: Vec<u8>,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub mtime: Timestamp,
    /// Not checked.
    pub xattrs: Vec<Xattr>,
    pub kind: EntryKind,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EntryKind {
    Directory,
    Regular { size: u64, pieces: Vec<Piece> },
    Symlink(Vec<u8>),
    HardLink(Vec<u8>),
    CharDevice(Rdev),
    BlockDevice(Rdev),
    Fifo,
}

/// Goes through a tar file from header to header.
pub(crate) struct Reader<'a> {
    file: &'a File,
    name: &'a str,
    /// Where the tar lies in the file.
    start: u64,
    length: u64,
    position: u64,
    window: Vec<u8>,
    window_at: u64,
    global: Pax,
    /// Things that the user should know.
    pub notices: Vec<String>,
}

impl<'a> Reader<'a> {
    /// A reader of `length` bytes of `file` from `start`; `name` is for messages. Contents are located
    /// by their place in the file.
    pub(crate) fn new(file: &'a File, start: u64, length: u64, name: &'a str) -> Self {
        Self {
            file,
            name,
            start,
            length,
            position: 0,
            window: Vec::new(),
            window_at: 0,
            global: Pax::default(),
            notices: Vec::new(),
        }
    }

    /// How far it is, in bytes of the tar.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// The next entry; `None` at the end.
    pub(crate) fn next_entry(&mut self) -> Result<Option<Entry>> {
        let at = self.position;
        self.entry().map_err(|error| {
            let line = format!("{}: entry at byte {at}", self.name);
            error.context(line)
        })
    }

    fn entry(&mut self) -> Result<Option<Entry>> {
        let mut pax = self.global.clone();
        let (mut long_name, mut long_link) = (None, None);
        loop {
            let Some(header) = self.header()? else { return Ok(None) };
            let size = self.stated_size(&header)?;
            match header.kind() {
                b'x' | b'X' => {
                    let data = self.take(size, MAX_PAX_BYTES, "PAX header")?;
                    pax.add(&data)?;
                }
                b'g' => {
                    let data = self.take(size, MAX_PAX_BYTES, "PAX header")?;
                    self.global.add(&data)?;
                    pax.add(&data)?;
                }
                b'L' => long_name = Some(self.long(size)?),
                b'K' => long_link = Some(self.long(size)?),
                b'V' => self.skip(size)?,
                b'M' | b'N' => {
                    let text = "a part of a multi-volume or very old GNU archive";
                    return Err(Error::new(ErrorKind::Unsupported, text));
                }
                _ => {
                    let size = pax.size.unwrap_or(size);
                    let named = Named::new(&header, pax, long_name, long_link)?;
                    return self.finish(&header, named, size).map(Some);
                }
            }
        }
    }

    fn finish(&mut self, header: &Header, named: Named, size: u64) -> Result<Entry> {
        let Named { path, link, pax } = named;
        let entry = self.kind(header, &path, link, &pax, size);
        let kind = entry.context(|| path::show(&path))?;
        let id = |own: Option<i64>, field: Option<i64>, what: &str| {
            let id = own.or(field).and_then(|id| u32::try_from(id).ok());
            id.filter(|&id| id != u32::MAX).ok_or_else(|| {
                Error::invalid(format!("{}: {what} is not from 0 to 2^32-2", path::show(&path)))
            })
        };
        let uid = id(pax.uid, header.uid(), "owner")?;
        let gid = id(pax.gid, header.gid(), "group")?;
        let field = |value: Option<i64>, what: &str| {
            value.ok_or_else(|| Error::corrupt(format!("{}: broken {what}", path::show(&path))))
        };
        let mtime = match pax.mtime {
            Some(mtime) => mtime,
            None => Timestamp { secs: field(header.mtime(), "time")?, nanos: 0 },
        };
        let mode = (field(header.mode(), "mode")? & 0o7777) as u16;
        Ok(Entry { mode, uid, gid, mtime, xattrs: pax.xattrs, kind, path })
    }

    fn kind(
        &mut self,
        header: &Header,
        path: &[u8],
        link: Vec<u8>,
        pax: &Pax,
        size: u64,
    ) -> Result<EntryKind> {
        let rdev = || {
            let part = |value: Option<i64>| value.and_then(|value| u32::try_from(value).ok());
            match (part(header.major()), part(header.minor())) {
                (Some(major), Some(minor)) => Ok(Rdev { major, minor }),
                _ => Err(Error::corrupt("broken device number")),
            }
        };
        Ok(match header.kind() {
            b'1' => EntryKind::HardLink(link),
            b'2' => EntryKind::Symlink(link),
            b'3' => EntryKind::CharDevice(rdev()?),
            b'4' => EntryKind::BlockDevice(rdev()?),
            b'5' => EntryKind::Directory,
            b'6' => EntryKind::Fifo,
            b'D' => {
                self.skip(size)?;
                EntryKind::Directory
            }
            b'S' => self.old_sparse(header, size)?,
            // Programs before ustar had no type for directories.
            0 | b'0' | b'7' if path.ends_with(b"/") => {
                self.skip(size)?;
                EntryKind::Directory
            }
            kind => {
                if !matches!(kind, 0 | b'0' | b'7') {
                    self.notices.push(format!(
                        "{}: unknown type {:?} is taken as a regular file",
                        path::show(path),
                        char::from(kind)
                    ));
                }
                self.regular(pax, size)?
            }
        })
    }

    fn regular(&mut self, pax: &Pax, stored: u64) -> Result<EntryKind> {
        let at = self.position;
        self.skip(stored)?;
        if !pax.sparse.is_sparse() {
            let pieces = match stored {
                0 => Vec::new(),
                bytes => vec![Piece { offset: 0, bytes, at: self.start + at }],
            };
            return Ok(EntryKind::Regular { size: stored, pieces });
        }
        let (map, start) = if pax.sparse.map_in_data {
            self.map_in_data(at, stored)?
        } else {
            (pax.sparse.map.clone(), 0)
        };
        let end = map.last().map_or(0, |last| last.offset.saturating_add(last.bytes));
        let size = pax.sparse.real_size.unwrap_or(end);
        let pieces = sparse::pieces(&map, size, self.start + at + start, stored - start)?;
        Ok(EntryKind::Regular { size, pieces })
    }

    /// The map of a sparse file 1.0 and the bytes that it takes with its padding.
    fn map_in_data(&mut self, at: u64, stored: u64) -> Result<(Vec<Segment>, u64)> {
        let mut length = BLOCK.min(stored);
        loop {
            let mut data = vec![0; length as usize];
            self.read(at, &mut data)?;
            if let Some((map, used)) = sparse::map_in_data(&data)? {
                let start = (used as u64).next_multiple_of(BLOCK);
                if start > stored {
                    return Err(Error::corrupt("the map of a sparse file is cut"));
                }
                return Ok((map, start));
            }
            if length == stored || length >= MAX_MAP_BYTES {
                return Err(Error::corrupt("the map of a sparse file is cut"));
            }
            length = (length * 2).min(stored).min(MAX_MAP_BYTES);
        }
    }

    fn old_sparse(&mut self, header: &Header, stored: u64) -> Result<EntryKind> {
        let mut map = Vec::new();
        let (field, mut more) = header.sparse();
        sparse::old_entries(field, &mut map)?;
        while more {
            let mut block = [0; BLOCK as usize];
            self.read(self.position, &mut block)?;
            self.position += BLOCK;
            sparse::old_entries(&block[..504], &mut map)?;
            more = block[504] != 0;
        }
        let size = header.sparse_size().and_then(|size| u64::try_from(size).ok());
        let size = size.ok_or_else(|| Error::corrupt("broken size of a sparse file"))?;
        let at = self.position;
        self.skip(stored)?;
        Ok(EntryKind::Regular {
            size,
            pieces: sparse::pieces(&map, size, self.start + at, stored)?,
        })
    }

    /// The next header block; `None` at the end of the archive.
    fn header(&mut self) -> Result<Option<Box<Header>>> {
        let mut zeros = 0;
        loop {
            let left = self.length.saturating_sub(self.position);
            if left == 0 {
                return Ok(None);
            }
            let mut block = [0; BLOCK as usize];
            let take = left.min(BLOCK) as usize;
            self.read(self.position, &mut block[..take])?;
            if take < block.len() {
                // What is left of a block at the end may be padding and nothing else.
                if block.iter().all(|&byte| byte == 0) {
                    return Ok(None);
                }
                return Err(Error::corrupt("the archive ends inside a header"));
            }
            self.position += BLOCK;
            match Header::parse(block) {
                Block::Header(header) => return Ok(Some(header)),
                Block::Zero if zeros == 1 => return Ok(None),
                Block::Zero => zeros += 1,
                // Some programs write one block of zeros and then what was in their buffer.
                Block::Broken if zeros == 1 => return Ok(None),
                Block::Broken => {
                    return Err(Error::corrupt("not a tar header (wrong checksum)"));
                }
            }
        }
    }

    fn stated_size(&self, header: &Header) -> Result<u64> {
        header
            .size()
            .and_then(|size| u64::try_from(size).ok())
            .ok_or_else(|| Error::corrupt("broken size"))
    }

    /// Reads the data of an entry that only describes the next one.
    fn take(&mut self, size: u64, most: u64, what: &str) -> Result<Vec<u8>> {
        if size > most {
            return Err(Error::invalid(format!("{what} of {size} bytes (at most {most})")));
        }
        let at = self.position;
        self.skip(size)?;
        let mut data = vec![0; size as usize];
        self.read(at, &mut data)?;
        Ok(data)
    }

    fn long(&mut self, size: u64) -> Result<Vec<u8>> {
        let data = self.take(size, MAX_NAME_BYTES, "name")?;
        Ok(text(&data).to_vec())
    }

    /// Goes past data and its padding. The last padding may be missing.
    fn skip(&mut self, bytes: u64) -> Result<()> {
        let end = self.position.checked_add(bytes).filter(|&end| end <= self.length);
        let end = end.ok_or_else(|| Error::corrupt("the archive ends inside an entry"))?;
        self.position = end.next_multiple_of(BLOCK);
        Ok(())
    }

    fn read(&mut self, at: u64, buffer: &mut [u8]) -> Result<()> {
        let end = at + buffer.len() as u64;
        if end > self.length {
            return Err(Error::corrupt("the archive ends inside an entry"));
        }
        let context = || format!("read at byte {at}");
        if buffer.len() > WINDOW_BYTES {
            return self.file.read_exact_at(buffer, self.start + at).context(context);
        }
        if at < self.window_at || end > self.window_at + self.window.len() as u64 {
            let length = (self.length - at).min(WINDOW_BYTES as u64) as usize;
            self.window.resize(length, 0);
            self.window_at = at;
            self.file.read_exact_at(&mut self.window, self.start + at).context(context)?;
        }
        let start = (at - self.window_at) as usize;
        buffer.copy_from_slice(&self.window[start..start + buffer.len()]);
        Ok(())
    }
}

/// The names of an entry after all headers in front of it.
struct Named {
    path: Vec<u8>,
    link: Vec<u8>,
    pax: Pax,
}

impl Named {
    fn new(
        header: &Header,
        mut pax: Pax,
        long_name: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
    ) -> Result<Self> {
        let path = pax.sparse.name.take().or(pax.path.take()).or(long_name);
        let path = clean(path.unwrap_or_else(|| header.name()))?;
        let link = clean(pax.link_path.take().or(long_link).unwrap_or_else(|| header.link_name()))?;
        Ok(Self { path, link, pax })
    }
}

/// Without the NULs that some writers leave at the end.
fn clean(mut name: Vec<u8>) -> Result<Vec<u8>> {
    if name.len() > MAX_PATH_BYTES {
        return Err(Error::invalid(format!(
            "a path of {} bytes (at most {MAX_PATH_BYTES}): {}...",
            name.len(),
            path::show(&name[..60])
        )));
    }
    while name.last() == Some(&0) {
        name.pop();
    }
    if name.contains(&0) {
        return Err(Error::invalid(format!("{}: a name with a NUL byte", path::show(&name))));
    }
    Ok(name)
}
