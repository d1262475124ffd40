//! A layer as a tar file, as the OCI image specification wants it: ustar with PAX records where a header
//! is too small, whiteouts as `.wh.` files, opaque directories with `.wh..wh..opq` in them.
//!
//! Equal layers give equal tars. Sockets, which no tar can hold, are left out with a notice; names that
//! would be read as whiteouts are errors.

use super::data::{LayerData, walk};
use crate::path;
use crate::progress::{Cancel, Progress};
use layer::chunk::BLOCK_BYTES;
use layer::tree::{Body, FileData, Inode, InodeIx, Kind, OPAQUE_XATTR, Rdev, Timestamp};
use layer::{Context, Error, ErrorKind, Result};
use std::collections::HashMap;
use std::io::Write;

const BLOCK: usize = 512;
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Contents are copied in parts of this size.
const PART_BYTES: usize = 256 << 10;
/// Holes of less than this together are written as zeros.
const SPARSE_BYTES: u64 = 1 << 20;

/// Writes the whole layer.
pub(super) fn write(
    data: &mut LayerData<'_>,
    out: &mut dyn Write,
    cancel: &Cancel,
    progress: &dyn Progress,
) -> Result<()> {
    let mut names = Vec::new();
    walk(data.tree(), |path, ix| {
        names.push((path.to_vec(), ix));
        Ok(())
    })?;
    let mut tape = Tape { out };
    let mut first_names: HashMap<InodeIx, usize> = HashMap::new();
    for (at, (path, ix)) in names.iter().enumerate() {
        cancel.check()?;
        let inode = data.tree().inodes[ix.index()].clone();
        let first = *first_names.entry(*ix).or_insert(at);
        entry(data, &mut tape, path, *ix, &inode, &names[first].0, progress)
            .context(|| path::show(path))?;
    }
    tape.end()
}

fn entry(
    data: &mut LayerData<'_>,
    tape: &mut Tape<'_>,
    path: &[u8],
    ix: InodeIx,
    inode: &Inode,
    first: &[u8],
    progress: &dyn Progress,
) -> Result<()> {
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    if name.starts_with(WHITEOUT) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "an image layer cannot hold this name, it would be read as a deletion",
        ));
    }
    if inode.is_whiteout() {
        let hidden = [&path[..path.len() - name.len()], WHITEOUT, name].concat();
        return tape.mark(&hidden);
    }
    if first != path && !matches!(inode.kind, Kind::Directory(_) | Kind::Socket) {
        return tape.entry(&Entry { link: first, ..Entry::of(path, inode, b'1') });
    }
    match &inode.kind {
        Kind::Directory(_) => {
            let shown = if path.is_empty() { b"./".to_vec() } else { [path, b"/"].concat() };
            tape.entry(&Entry::of(&shown, inode, b'5'))?;
            if inode.is_opaque() {
                let prefix = if path.is_empty() { Vec::new() } else { shown };
                tape.mark(&[&prefix, OPAQUE].concat())?;
            }
            Ok(())
        }
        Kind::Regular(file) => regular(data, tape, path, ix, inode, file, progress),
        Kind::Symlink(target) => {
            tape.entry(&Entry { link: target, ..Entry::of(path, inode, b'2') })
        }
        Kind::CharDevice(rdev) => {
            tape.entry(&Entry { rdev: *rdev, ..Entry::of(path, inode, b'3') })
        }
        Kind::BlockDevice(rdev) => {
            tape.entry(&Entry { rdev: *rdev, ..Entry::of(path, inode, b'4') })
        }
        Kind::Fifo => tape.entry(&Entry::of(path, inode, b'6')),
        Kind::Socket => {
            progress.notice(&format!("{} is a socket and left out", path::show(path)));
            Ok(())
        }
    }
}

fn regular(
    data: &mut LayerData<'_>,
    tape: &mut Tape<'_>,
    path: &[u8],
    ix: InodeIx,
    inode: &Inode,
    file: &FileData,
    progress: &dyn Progress,
) -> Result<()> {
    let whole = vec![(0, file.size)];
    let segments = segments(file);
    let held: u64 = segments.iter().map(|(_, bytes)| bytes).sum();
    let entry = Entry { size: file.size, ..Entry::of(path, inode, b'0') };
    let (segments, size) = if file.size - held < SPARSE_BYTES {
        tape.entry(&entry)?;
        (whole, file.size)
    } else {
        let map = sparse_map(&segments);
        let size = map.len() as u64 + held;
        let records = vec![
            (b"GNU.sparse.major".to_vec(), b"1".to_vec()),
            (b"GNU.sparse.minor".to_vec(), b"0".to_vec()),
            (b"GNU.sparse.name".to_vec(), path.to_vec()),
            (b"GNU.sparse.realsize".to_vec(), file.size.to_string().into_bytes()),
        ];
        tape.entry(&Entry { size, records, ..entry })?;
        tape.write(&map)?;
        (segments, size)
    };
    let mut buffer = vec![0; PART_BYTES.min(file.size as usize)];
    for (offset, bytes) in segments {
        let mut done = 0;
        while done < bytes {
            let length = (bytes - done).min(buffer.len() as u64) as usize;
            data.read(ix, offset + done, &mut buffer[..length])?;
            tape.write(&buffer[..length])?;
            progress.advance(0, length as u64);
            done += length as u64;
        }
    }
    progress.advance(1, 0);
    tape.pad(size)
}

/// Where a file has data: offset and length, ascending.
fn segments(file: &FileData) -> Vec<(u64, u64)> {
    let Body::Extents(extents) = &file.body else { return vec![(0, file.size)] };
    let mut segments: Vec<(u64, u64)> = Vec::new();
    for extent in extents {
        let start = u64::from(extent.file_block) * u64::from(BLOCK_BYTES);
        let end = start + u64::from(extent.blocks) * u64::from(BLOCK_BYTES);
        let bytes = end.min(file.size).saturating_sub(start);
        match segments.last_mut() {
            Some((last, length)) if *last + *length == start => *length += bytes,
            _ if bytes > 0 => segments.push((start, bytes)),
            _ => {}
        }
    }
    segments
}

/// The map of a sparse file in GNU's PAX format 1.0, padded to a block; a hole at the end is an empty segment.
fn sparse_map(segments: &[(u64, u64)]) -> Vec<u8> {
    let mut map = format!("{}\n", segments.len());
    for (offset, bytes) in segments {
        map.push_str(&format!("{offset}\n{bytes}\n"));
    }
    let mut map = map.into_bytes();
    map.resize(map.len().next_multiple_of(BLOCK), 0);
    map
}

/// One header to be.
struct Entry<'a> {
    path: &'a [u8],
    link: &'a [u8],
    mode: u16,
    uid: u32,
    gid: u32,
    size: u64,
    mtime: Timestamp,
    rdev: Rdev,
    kind: u8,
    /// PAX records that come first.
    records: Vec<(Vec<u8>, Vec<u8>)>,
    xattrs: Vec<(&'a [u8], &'a [u8])>,
}

impl<'a> Entry<'a> {
    fn of(path: &'a [u8], inode: &'a Inode, kind: u8) -> Self {
        let own = inode.xattrs.iter().filter(|xattr| xattr.name != OPAQUE_XATTR);
        Self {
            path,
            link: b"",
            mode: inode.mode,
            uid: inode.uid,
            gid: inode.gid,
            size: 0,
            mtime: inode.mtime,
            rdev: Rdev { major: 0, minor: 0 },
            kind,
            records: Vec::new(),
            xattrs: own.map(|xattr| (&xattr.name[..], &xattr.value[..])).collect(),
        }
    }

    /// What the header cannot say.
    fn pax(&self) -> Result<Vec<u8>> {
        let mut records = Vec::new();
        for (key, value) in &self.records {
            record(&mut records, key, value);
        }
        if self.path.len() > 100 || !self.path.is_ascii() {
            record(&mut records, b"path", self.path);
        }
        if self.link.len() > 100 || !self.link.is_ascii() {
            record(&mut records, b"linkpath", self.link);
        }
        for (key, value, bits) in [
            (b"uid".as_slice(), u64::from(self.uid), 21),
            (b"gid", u64::from(self.gid), 21),
            (b"size", self.size, 33),
        ] {
            if value >> bits != 0 {
                record(&mut records, key, value.to_string().as_bytes());
            }
        }
        if self.mtime.nanos != 0 || self.mtime.secs < 0 || self.mtime.secs >> 33 != 0 {
            record(&mut records, b"mtime", seconds(self.mtime).as_bytes());
        }
        // A hard link has the attributes of its file.
        for (name, value) in self.xattrs.iter().filter(|_| self.kind != b'1') {
            if name.contains(&b'=') {
                let name = String::from_utf8_lossy(name).escape_debug().to_string();
                let text = format!("no tar can hold the attribute {name}");
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
            record(&mut records, &[b"SCHILY.xattr.", *name].concat(), value);
        }
        Ok(records)
    }

    fn header(&self) -> [u8; BLOCK] {
        let mut header = [0; BLOCK];
        fill(&mut header[..100], self.path);
        octal(&mut header[100..108], u64::from(self.mode));
        octal(&mut header[108..116], u64::from(self.uid));
        octal(&mut header[116..124], u64::from(self.gid));
        octal(&mut header[124..136], self.size);
        octal(&mut header[136..148], self.mtime.secs.max(0).cast_unsigned());
        header[156] = self.kind;
        fill(&mut header[157..257], self.link);
        header[257..265].copy_from_slice(b"ustar\x0000");
        if matches!(self.kind, b'3' | b'4') {
            octal(&mut header[329..337], u64::from(self.rdev.major));
            octal(&mut header[337..345], u64::from(self.rdev.minor));
        }
        header[148..156].fill(b' ');
        let sum: u64 = header.iter().map(|&byte| u64::from(byte)).sum();
        octal(&mut header[148..155], sum);
        header
    }
}

/// As much of a name as fits; a PAX record holds the rest.
fn fill(field: &mut [u8], bytes: &[u8]) {
    let length = bytes.len().min(field.len());
    field[..length].copy_from_slice(&bytes[..length]);
}

/// Digits and a NUL; a number that does not fit is 0, and a PAX record says it.
fn octal(field: &mut [u8], number: u64) {
    let digits = field.len() - 1;
    let number = if number >> (3 * digits) == 0 { number } else { 0 };
    let text = format!("{number:0digits$o}");
    field[..digits].copy_from_slice(text.as_bytes());
}

/// `length key=value\n`, where the length counts itself.
fn record(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    records.extend_from_slice(format!("{length} ").as_bytes());
    records.extend_from_slice(key);
    records.push(b'=');
    records.extend_from_slice(value);
    records.push(b'\n');
}

fn seconds(time: Timestamp) -> String {
    let nanos = i128::from(time.secs) * 1_000_000_000 + i128::from(time.nanos);
    let sign = if nanos < 0 { "-" } else { "" };
    let (whole, part) =
        (nanos.unsigned_abs() / 1_000_000_000, nanos.unsigned_abs() % 1_000_000_000);
    let text = format!("{sign}{whole}.{part:09}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A tar file in the making.
pub(super) struct Tape<'a> {
    out: &'a mut dyn Write,
}

impl<'a> Tape<'a> {
    pub(super) fn new(out: &'a mut dyn Write) -> Self {
        Self { out }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).context(|| "write a tar".to_owned())
    }

    /// Zeros up to the next block behind so many bytes.
    pub(super) fn pad(&mut self, bytes: u64) -> Result<()> {
        let over = (bytes % BLOCK as u64) as usize;
        if over == 0 { Ok(()) } else { self.write(&[0; BLOCK][over..]) }
    }

    fn entry(&mut self, entry: &Entry<'_>) -> Result<()> {
        let records = entry.pax()?;
        if !records.is_empty() {
            let short = Entry {
                link: b"",
                size: records.len() as u64,
                kind: b'x',
                records: Vec::new(),
                xattrs: Vec::new(),
                ..*entry
            };
            self.write(&short.header())?;
            self.write(&records)?;
            self.pad(records.len() as u64)?;
        }
        self.write(&entry.header())
    }

    /// An empty file that means something by its name.
    fn mark(&mut self, path: &[u8]) -> Result<()> {
        self.plain(path, 0)
    }

    /// The header of a plain file whose bytes follow.
    pub(super) fn plain(&mut self, path: &[u8], size: u64) -> Result<()> {
        self.simple(path, size, b'0', 0o644)
    }

    /// A plain directory.
    pub(super) fn directory(&mut self, path: &[u8]) -> Result<()> {
        self.simple(path, 0, b'5', 0o755)
    }

    fn simple(&mut self, path: &[u8], size: u64, kind: u8, mode: u16) -> Result<()> {
        self.entry(&Entry {
            path,
            link: b"",
            mode,
            uid: 0,
            gid: 0,
            size,
            mtime: Timestamp { secs: 0, nanos: 0 },
            rdev: Rdev { major: 0, minor: 0 },
            kind,
            records: Vec::new(),
            xattrs: Vec::new(),
        })
    }

    /// Two blocks of zeros.
    pub(super) fn end(&mut self) -> Result<()> {
        self.write(&[0; 2 * BLOCK])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_count_themselves() {
        for (key, value, expected) in [
            ("a", "b", "6 a=b\n".to_owned()),
            ("path", &"x".repeat(90)[..], format!("99 path={}\n", "x".repeat(90))),
            ("path", &"x".repeat(91)[..], format!("101 path={}\n", "x".repeat(91))),
        ] {
            let mut records = Vec::new();
            record(&mut records, key.as_bytes(), value.as_bytes());
            assert_eq!(String::from_utf8(records).unwrap(), expected);
        }
    }

    #[test]
    fn times_are_decimal_numbers() {
        for (secs, nanos, text) in [
            (0, 0, "0"),
            (10, 0, "10"),
            (10, 500_000_000, "10.5"),
            (-1, 750_000_000, "-0.25"),
            (-5, 0, "-5"),
            (1 << 40, 1, "1099511627776.000000001"),
        ] {
            assert_eq!(seconds(Timestamp { secs, nanos }), text);
        }
    }
}
