//! A whole store in one file, to carry somewhere: objects back to back, an index behind them.
//!
//! Written once, from an empty file to [`Archive::finish`], and read as often as one likes. It has no durability
//! of its own while it is written: a file without its index is no archive.
//!
//! Unfinished objects lie in a nameless temporary file each, so that several can be written at once.
//!
//! Locking: one lock around the index and the end of the file, held while an object is appended.
//!
//! // CRASH: the file has a temporary name until it is whole.

use super::{Backend, Upload, absent, taken, too_large, too_short};
use crate::key::{Key, check_prefix};
use layer::{Context, Digest, Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Bound;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const MAGIC: &[u8; 8] = b"LAMARCH1";
const TRAILER_BYTES: u64 = 56;
const MAX_INDEX_BYTES: u64 = 1 << 30;

#[derive(Debug, Clone, Copy)]
struct Place {
    offset: u64,
    bytes: u64,
}

#[derive(Debug)]
struct State {
    index: BTreeMap<String, Place>,
    end: u64,
    failed: bool,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    /// Where it is written; none for one that is only read.
    temporary: Option<PathBuf>,
    file: File,
    state: Mutex<State>,
    next: AtomicU64,
}

/// A store in one file.
#[derive(Debug, Clone)]
pub struct Archive(Arc<Inner>);

impl Archive {
    /// Begins an archive. `Exists` when there is a file of that name.
    pub fn create(path: &Path) -> Result<Self> {
        if path.exists() {
            return Err(Error::new(ErrorKind::Exists, format!("{} exists", path.display())));
        }
        let mut name = path.as_os_str().to_owned();
        name.push(".unfinished");
        let temporary = PathBuf::from(name);
        let name = || format!("create {}", temporary.display());
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temporary)
            .context(name)?;
        file.write_all_at(MAGIC, 0).context(name)?;
        let state = State { index: BTreeMap::new(), end: MAGIC.len() as u64, failed: false };
        Ok(Self(Arc::new(Inner {
            path: path.to_owned(),
            temporary: Some(temporary),
            file,
            state: Mutex::new(state),
            next: AtomicU64::new(0),
        })))
    }

    /// Opens a whole archive for reading.
    pub fn open(path: &Path) -> Result<Self> {
        let name = || format!("archive {}", path.display());
        let file = File::open(path).context(name)?;
        let size = file.metadata().context(name)?.len();
        let index = read_index(&file, size).context(name)?;
        let state = State { index, end: size, failed: false };
        Ok(Self(Arc::new(Inner {
            path: path.to_owned(),
            temporary: None,
            file,
            state: Mutex::new(state),
            next: AtomicU64::new(0),
        })))
    }

    /// Writes the index, without what is only of use while it is written, and gives the file its name.
    pub fn finish(&self) -> Result<u64> {
        let inner = &self.0;
        let Some(temporary) = &inner.temporary else {
            return Err(Error::invalid("an archive that is only read has no end"));
        };
        let mut state = inner.state();
        if state.failed {
            return Err(Error::new(ErrorKind::Unavailable, "an earlier write of it failed"));
        }
        let mut index = Vec::new();
        let mut count: u64 = 0;
        let passing = ["leases/", "collector/", "condemned/"];
        for (name, place) in &state.index {
            if passing.iter().any(|class| name.starts_with(class)) {
                continue;
            }
            index.extend_from_slice(&(name.len() as u16).to_le_bytes());
            index.extend_from_slice(name.as_bytes());
            index.extend_from_slice(&place.offset.to_le_bytes());
            index.extend_from_slice(&place.bytes.to_le_bytes());
            count += 1;
        }
        let digest = Digest::of(&index);
        index.extend_from_slice(&state.end.to_le_bytes());
        index.extend_from_slice(&count.to_le_bytes());
        index.extend_from_slice(digest.as_bytes());
        index.extend_from_slice(MAGIC);
        let name = || format!("finish {}", inner.path.display());
        inner.file.write_all_at(&index, state.end).context(name)?;
        state.end += index.len() as u64;
        inner.file.sync_all().context(name)?;
        fs::hard_link(temporary, &inner.path).context(name)?;
        fs::remove_file(temporary).context(name)?;
        Ok(state.end)
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, key: &Key) -> Result<Place> {
        let found = self.state().index.get(key.as_str()).copied();
        found.ok_or_else(|| absent(key, &self.path.display().to_string()))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // Gone already when it was finished.
            let _ = fs::remove_file(temporary);
        }
    }
}

fn read_index(file: &File, size: u64) -> Result<BTreeMap<String, Place>> {
    let refuse = || Error::corrupt("not an archive of Lamella, or its end is missing");
    let start = size.checked_sub(TRAILER_BYTES).ok_or_else(refuse)?;
    let mut trailer = [0; TRAILER_BYTES as usize];
    file.read_exact_at(&mut trailer, start).context(|| "read its end".to_owned())?;
    let mut head = [0; 8];
    file.read_exact_at(&mut head, 0).context(|| "read its begin".to_owned())?;
    let word = |at: usize| trailer[at..at + 8].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
    let (offset, count) = (word(0), word(8));
    let bytes = start.checked_sub(offset).ok_or_else(refuse)?;
    if &head != MAGIC || &trailer[48..] != MAGIC || bytes > MAX_INDEX_BYTES {
        return Err(refuse());
    }
    let mut index = vec![0; bytes as usize];
    file.read_exact_at(&mut index, offset).context(|| "read its index".to_owned())?;
    if Digest::of(&index).as_bytes() != &trailer[16..48] {
        return Err(Error::corrupt("its index is damaged"));
    }
    let mut entries = BTreeMap::new();
    let mut rest = &index[..];
    while let Some((length, after)) = rest.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length));
        let (name, after) = after.split_at_checked(length).ok_or_else(refuse)?;
        let (at, after) = after.split_first_chunk::<8>().ok_or_else(refuse)?;
        let (long, after) = after.split_first_chunk::<8>().ok_or_else(refuse)?;
        let place = Place { offset: u64::from_le_bytes(*at), bytes: u64::from_le_bytes(*long) };
        if place.offset.checked_add(place.bytes).is_none_or(|end| end > offset) {
            return Err(refuse());
        }
        let name = Key::new(String::from_utf8_lossy(name))?;
        entries.insert(name.as_str().to_owned(), place);
        rest = after;
    }
    if !rest.is_empty() || entries.len() as u64 != count {
        return Err(refuse());
    }
    Ok(entries)
}

impl Backend for Archive {
    fn read_at(&self, key: &Key, offset: u64, into: &mut [u8]) -> Result<()> {
        let place = self.0.place(key)?;
        let end = offset.checked_add(into.len() as u64);
        if end.is_none_or(|end| end > place.bytes) {
            return Err(too_short(key, offset, into.len()));
        }
        self.0
            .file
            .read_exact_at(into, place.offset + offset)
            .context(|| format!("read object {key}"))
    }

    fn read_all(&self, key: &Key, max_bytes: u64) -> Result<Vec<u8>> {
        let place = self.0.place(key)?;
        if place.bytes > max_bytes {
            return Err(too_large(key, place.bytes, max_bytes));
        }
        let mut bytes = vec![0; place.bytes as usize];
        self.read_at(key, 0, &mut bytes)?;
        Ok(bytes)
    }

    fn size(&self, key: &Key) -> Result<u64> {
        self.0.place(key).map(|place| place.bytes)
    }

    fn create(&self, key: &Key) -> Result<Box<dyn Upload>> {
        let Some(beside) = &self.0.temporary else {
            return Err(Error::new(
                ErrorKind::Denied,
                "an archive is not changed once it is whole",
            ));
        };
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        let path = beside.with_extension(format!("part{number}"));
        let name = || format!("create {}", path.display());
        let part = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .context(name)?;
        fs::remove_file(&path).context(name)?;
        Ok(Box::new(ArchiveUpload { archive: self.clone(), key: key.clone(), part, failed: false }))
    }

    fn list(&self, prefix: &str, start_after: Option<&str>, limit: usize) -> Result<Vec<String>> {
        check_prefix(prefix)?;
        let start = match start_after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        let state = self.0.state();
        let names = state.index.range::<str, _>((start, Bound::Unbounded)).map(|(name, _)| name);
        Ok(names.take_while(|name| name.starts_with(prefix)).take(limit).cloned().collect())
    }

    fn delete(&self, key: &Key) -> Result<()> {
        if self.0.temporary.is_none() {
            return Err(Error::new(
                ErrorKind::Denied,
                "an archive is not changed once it is whole",
            ));
        }
        self.0.state().index.remove(key.as_str());
        Ok(())
    }

    fn describe(&self) -> String {
        format!("archive {}", self.0.path.display())
    }
}

struct ArchiveUpload {
    archive: Archive,
    key: Key,
    part: File,
    failed: bool,
}

impl Upload for ArchiveUpload {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.part.write_all(bytes).context(|| format!("write object {}", self.key));
        self.failed |= written.is_err();
        written
    }

    fn publish(mut self: Box<Self>) -> Result<()> {
        if self.failed {
            return Err(Error::new(ErrorKind::Unavailable, "an earlier write of it failed"));
        }
        let inner = &self.archive.0;
        let mut state = inner.state();
        if state.index.contains_key(self.key.as_str()) {
            return Err(taken(&self.key, &self.archive.describe()));
        }
        let name = || format!("publish object {}", self.key);
        let offset = state.end;
        let appended = (|| -> std::io::Result<u64> {
            self.part.seek(SeekFrom::Start(0))?;
            let mut buffer = vec![0; 1 << 20];
            let mut end = offset;
            loop {
                match self.part.read(&mut buffer)? {
                    0 => return Ok(end - offset),
                    read => {
                        inner.file.write_all_at(&buffer[..read], end)?;
                        end += read as u64;
                    }
                }
            }
        })();
        let bytes = match appended {
            Ok(bytes) => bytes,
            Err(error) => {
                state.failed = true;
                return Err(Error::io(name(), error));
            }
        };
        state.end += bytes;
        state.index.insert(self.key.as_str().to_owned(), Place { offset, bytes });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(store: &Archive, name: &str, bytes: &[u8]) -> Result<()> {
        let mut upload = store.create(&Key::new(name)?)?;
        upload.write(bytes)?;
        upload.publish()
    }

    #[test]
    fn what_was_put_in_is_read_from_the_file_and_nothing_else_is_accepted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.lamella");
        let archive = Archive::create(&path).unwrap();
        put(&archive, "packs/a", &[7; 3_000_000]).unwrap();
        put(&archive, "leases/x/y", b"gone").unwrap();
        put(&archive, "FORMAT", b"f").unwrap();
        assert_eq!(put(&archive, "FORMAT", b"g").unwrap_err().kind(), ErrorKind::Exists);
        drop(archive.create(&Key::new("abandoned").unwrap()).unwrap());
        assert!(!path.exists());
        archive.finish().unwrap();
        drop(archive);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        assert_eq!(Archive::create(&path).unwrap_err().kind(), ErrorKind::Exists);

        let archive = Archive::open(&path).unwrap();
        assert_eq!(archive.list("", None, 9).unwrap(), ["FORMAT", "packs/a"]);
        let mut part = [0; 9];
        archive.read_at(&Key::new("packs/a").unwrap(), 2_999_991, &mut part).unwrap();
        assert_eq!(part, [7; 9]);
        assert!(archive.read_at(&Key::new("packs/a").unwrap(), 2_999_992, &mut part).is_err());
        assert_eq!(put(&archive, "b", b"").unwrap_err().kind(), ErrorKind::Denied);

        let bytes = fs::read(&path).unwrap();
        for (name, at) in [("cut", bytes.len() - 1), ("empty", 0), ("head", 20)] {
            let bad = directory.path().join(name);
            fs::write(&bad, &bytes[..at]).unwrap();
            assert_eq!(Archive::open(&bad).unwrap_err().kind(), ErrorKind::Corrupt, "{name}");
        }
        let mut flipped = bytes.clone();
        let at = flipped.len() - 70;
        flipped[at] ^= 1;
        let bad = directory.path().join("flipped");
        fs::write(&bad, &flipped).unwrap();
        assert_eq!(Archive::open(&bad).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}
