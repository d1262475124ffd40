//! A store in a POSIX directory: a local disk, NFS, or 3FS through its mount.
//!
//! An object is written to a temporary name under `.tmp/`, flushed, given its real name by a hard link
//! (which never replaces, and which 3FS has, unlike a rename that does not replace), and then loses the
//! temporary name. Nothing depends on xattrs, fallocate, locks, modification times or directory order.
//!
//! Locking: one lock around the small table of open files, one around the set of directories whose
//! flush failed; neither is held over I/O on an object.
//!
//! // CRASH: before the link only a temporary file is left, after it the object is complete. The next
//! open removes temporary files of dead writers: at once when the writer was of this boot and its process
//! is gone, after a day otherwise (a writer on another host cannot be asked).

use super::open_files::OpenFiles;
use super::{Backend, Upload, absent, taken, too_large, too_short};
use crate::key::{Key, check_prefix};
use crate::writer::WriterName;
use layer::{Context, Error, ErrorKind, Result};
use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Where unfinished objects live. No key can name it: keys do not start with a dot.
const TEMPORARY: &str = ".tmp";
/// Bytes gathered before a write: what 3FS writes at once.
const WRITE_BUFFER_BYTES: usize = 1 << 20;
/// Bytes behind a positioned read that are read into the page cache beside it.
const READ_ON_BYTES: u64 = 256 << 10;

/// Objects in a directory.
#[derive(Debug, Clone)]
pub struct Posix(Arc<Directory>);

/// One row of numbers for the process: two stores on one directory must not choose the same names.
static NEXT: AtomicU64 = AtomicU64::new(0);

#[derive(Debug)]
struct Directory {
    root: PathBuf,
    /// Whether it costs nobody else anything to read more than was asked.
    on_local_disk: bool,
    writer: WriterName,
    open: Mutex<OpenFiles<File>>,
    poisoned: Mutex<HashSet<PathBuf>>,
}

impl Posix {
    /// Opens or creates the directory and removes what dead writers left in it.
    pub fn open(root: &Path) -> Result<Self> {
        fs::create_dir_all(root)
            .context(|| format!("create store directory {}", root.display()))?;
        let root = fs::canonicalize(root).context(|| format!("open store {}", root.display()))?;
        let on_local_disk = File::open(&root)
            .and_then(|folder| sys::file::space::is_on_local_disk(folder.as_fd()))
            .context(|| format!("open store {}", root.display()))?;
        let directory = Directory {
            root,
            on_local_disk,
            writer: WriterName::of_this_process()?,
            open: Mutex::default(),
            poisoned: Mutex::default(),
        };
        directory.collect_stale();
        Ok(Self(Arc::new(directory)))
    }

    /// Opens the object's file for reading.
    pub(super) fn open_object(&self, key: &Key) -> Result<File> {
        self.0.open_object(key)
    }

    /// Closes the object's file, if it is kept open.
    pub(super) fn forget(&self, key: &Key) {
        self.0.open.lock().unwrap_or_else(PoisonError::into_inner).forget(key);
    }

    /// The store's directory.
    pub fn root(&self) -> &Path {
        &self.0.root
    }
}

impl Directory {
    fn path(&self, key: &Key) -> PathBuf {
        self.root.join(key.as_str())
    }

    /// Temporary files only cost space, so a failure here is told and no more.
    fn collect_stale(&self) {
        let directory = self.root.join(TEMPORARY);
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => {
                tracing::warn!(
                    "cannot look for unfinished objects in {}: {error}",
                    directory.display()
                );
                return;
            }
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            if !name.to_str().is_some_and(|name| self.writer.has_abandoned(name)) {
                continue;
            }
            match fs::remove_file(entry.path()) {
                Ok(()) => tracing::info!("removed unfinished object {}", entry.path().display()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => tracing::warn!("cannot remove {}: {error}", entry.path().display()),
            }
        }
    }

    fn temporary_path(&self) -> PathBuf {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        self.root.join(TEMPORARY).join(self.writer.temporary_name(number))
    }

    /// Creates `directory` and every missing one above it, each flushed into its parent.
    fn make_directories(&self, directory: &Path) -> Result<()> {
        if directory.is_dir() || directory == self.root {
            return Ok(());
        }
        let Some(parent) = directory.parent() else { return Ok(()) };
        self.make_directories(parent)?;
        match fs::create_dir(directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(Error::io(format!("create directory {}", directory.display()), error))
            }
            _ => self.flush_directory(parent),
        }
    }

    /// Makes the names in a directory durable where the file system can (3FS cannot and need not).
    ///
    /// INVARIANT: once this failed for a directory it never succeeds again in this process, because the
    /// kernel reports a lost write only once.
    fn flush_directory(&self, directory: &Path) -> Result<()> {
        let poisoned = || self.poisoned.lock().unwrap_or_else(PoisonError::into_inner);
        let flushed = File::open(directory).and_then(|directory| directory.sync_all());
        if poisoned().contains(directory) {
            return Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "an earlier flush of {} failed; check the disk and restart",
                    directory.display()
                ),
            ));
        }
        match flushed {
            Err(error) if !is_unsupported(&error) => {
                poisoned().insert(directory.to_owned());
                Err(Error::io(format!("flush directory {}", directory.display()), error))
            }
            _ => Ok(()),
        }
    }

    fn opened(&self, key: &Key) -> Result<Arc<File>> {
        let cached = self.open.lock().unwrap_or_else(PoisonError::into_inner).get(key);
        if let Some(file) = cached {
            return Ok(file);
        }
        let file = Arc::new(self.open_object(key)?);
        self.open.lock().unwrap_or_else(PoisonError::into_inner).put(key, &file);
        Ok(file)
    }

    /// What lies behind a read is often read next, and a local disk has it in the page cache until then. Advice:
    /// where it fails nothing is lost.
    fn read_on(&self, file: &File, from: u64) {
        if self.on_local_disk
            && let Err(error) = sys::file::space::read_ahead(file.as_fd(), from, READ_ON_BYTES)
        {
            tracing::debug!(%error, "read on");
        }
    }

    fn open_object(&self, key: &Key) -> Result<File> {
        File::open(self.path(key)).map_err(|error| self.missing(key, "open", error))
    }

    fn missing(&self, key: &Key, operation: &str, error: io::Error) -> Error {
        if is_absent(&error) {
            return absent(key, &self.root.display().to_string());
        }
        Error::io(format!("{operation} object {key} in {}", self.root.display()), error)
    }
}

/// A directory is no object, and a path through something that is no directory names nothing.
fn is_absent(error: &io::Error) -> bool {
    use io::ErrorKind::{IsADirectory, NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory | IsADirectory)
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput)
}

impl Backend for Posix {
    fn read_at(&self, key: &Key, offset: u64, into: &mut [u8]) -> Result<()> {
        let file = self.0.opened(key)?;
        if offset.checked_add(into.len() as u64).is_none_or(|end| i64::try_from(end).is_err()) {
            return Err(too_short(key, offset, into.len()));
        }
        file.read_exact_at(into, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => too_short(key, offset, into.len()),
            _ => self.0.missing(key, "read", error),
        })?;
        self.0.read_on(&file, offset + into.len() as u64);
        Ok(())
    }

    fn read_all(&self, key: &Key, max_bytes: u64) -> Result<Vec<u8>> {
        let file = self.0.open_object(key)?;
        let size = self.size(key)?;
        if size > max_bytes {
            return Err(too_large(key, size, max_bytes));
        }
        let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0));
        // One byte more than allowed shows an object that grew since it was measured.
        let read = file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes);
        read.map_err(|error| self.0.missing(key, "read", error))?;
        if bytes.len() as u64 > max_bytes {
            return Err(too_large(key, bytes.len() as u64, max_bytes));
        }
        Ok(bytes)
    }

    fn local_path(&self, key: &Key) -> Option<PathBuf> {
        Some(self.0.path(key))
    }

    fn size(&self, key: &Key) -> Result<u64> {
        match fs::metadata(self.0.path(key)) {
            Ok(metadata) if metadata.is_file() => Ok(metadata.len()),
            Ok(_) => Err(absent(key, &self.0.root.display().to_string())),
            Err(error) => Err(self.0.missing(key, "measure", error)),
        }
    }

    fn create(&self, key: &Key) -> Result<Box<dyn Upload>> {
        let temporary = self.0.temporary_path();
        self.0.make_directories(&self.0.root.join(TEMPORARY))?;
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o644)
            .open(&temporary)
            .context(|| format!("create {} for object {key}", temporary.display()))?;
        Ok(Box::new(PosixUpload {
            directory: self.0.clone(),
            key: key.clone(),
            temporary,
            file,
            buffer: Vec::new(),
            failed: false,
        }))
    }

    fn list(&self, prefix: &str, start_after: Option<&str>, limit: usize) -> Result<Vec<String>> {
        check_prefix(prefix)?;
        let mut names = Vec::new();
        let mut listing = Listing { root: &self.0.root, start_after, limit, names: &mut names };
        listing.visit(prefix)?;
        Ok(names)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.forget(key);
        let path = self.0.path(key);
        match fs::remove_file(&path) {
            Ok(()) => path.parent().map_or(Ok(()), |parent| self.0.flush_directory(parent)),
            Err(error) => match self.0.missing(key, "delete", error) {
                error if error.kind() == ErrorKind::NotFound => Ok(()),
                error => Err(error),
            },
        }
    }

    fn describe(&self) -> String {
        format!("file://{}", self.0.root.display())
    }
}

struct Listing<'a> {
    root: &'a Path,
    start_after: Option<&'a str>,
    limit: usize,
    names: &'a mut Vec<String>,
}

impl Listing<'_> {
    /// Visits the directory `prefix` (empty or with its slash) in the byte order of full names, in which
    /// a directory sorts as its name with the slash.
    fn visit(&mut self, prefix: &str) -> Result<()> {
        for (name, is_directory) in self.entries(prefix)? {
            if self.names.len() >= self.limit {
                return Ok(());
            }
            let full = format!("{prefix}{name}");
            let after = self.start_after.unwrap_or_default();
            if is_directory {
                if full.as_str() > after || after.starts_with(&full) {
                    self.visit(&full)?;
                }
            } else if self.start_after.is_none_or(|after| full.as_str() > after) {
                self.names.push(full);
            }
        }
        Ok(())
    }

    fn entries(&self, prefix: &str) -> Result<Vec<(String, bool)>> {
        let path = self.root.join(prefix);
        let entries = match fs::read_dir(&path) {
            Ok(entries) => entries,
            Err(error) if is_absent(&error) => return Ok(Vec::new()),
            Err(error) => return Err(Error::io(format!("list {}", path.display()), error)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry.context(|| format!("list {}", path.display()))?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if Key::new(name.as_str()).is_err() {
                continue;
            }
            let kind = entry.file_type().context(|| format!("list {}", path.display()))?;
            if kind.is_dir() {
                found.push((name + "/", true));
            } else if kind.is_file() {
                found.push((name, false));
            }
        }
        found.sort();
        Ok(found)
    }
}

struct PosixUpload {
    directory: Arc<Directory>,
    key: Key,
    temporary: PathBuf,
    file: File,
    buffer: Vec<u8>,
    failed: bool,
}

impl PosixUpload {
    /// After a failed write or flush the kernel may have dropped pages: the object is lost for good.
    fn guarded(
        &mut self,
        what: &str,
        step: impl FnOnce(&mut Self) -> io::Result<()>,
    ) -> Result<()> {
        if self.failed {
            return Err(Error::new(
                ErrorKind::Unavailable,
                format!("an earlier write of object {} failed; start it again", self.key),
            ));
        }
        step(self).map_err(|error| {
            self.failed = true;
            Error::io(
                format!("{what} object {} in {}", self.key, self.directory.root.display()),
                error,
            )
        })
    }

    fn drain(&mut self) -> io::Result<()> {
        self.file.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }
}

impl Upload for PosixUpload {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.guarded("write", |upload| {
            if upload.buffer.len() + bytes.len() > WRITE_BUFFER_BYTES {
                upload.drain()?;
            }
            if bytes.len() >= WRITE_BUFFER_BYTES {
                return upload.file.write_all(bytes);
            }
            upload.buffer.extend_from_slice(bytes);
            Ok(())
        })
    }

    fn publish(mut self: Box<Self>) -> Result<()> {
        self.guarded("write", Self::drain)?;
        self.guarded("flush", |upload| upload.file.sync_all())?;
        let path = self.directory.path(&self.key);
        let parent = path.parent().unwrap_or(&self.directory.root).to_owned();
        self.directory.make_directories(&parent)?;
        // CRASH: up to here the object has no name.
        let linked = fs::hard_link(&self.temporary, &path);
        // CRASH: from here it is whole and visible; the temporary name is garbage of a dead writer.
        match linked {
            Ok(()) => self.directory.flush_directory(&parent),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                // Whoever published it may not have flushed the name yet, but our caller relies on it.
                self.directory.flush_directory(&parent)?;
                Err(taken(&self.key, &self.directory.root.display().to_string()))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "{} vanished before object {} was published",
                    self.temporary.display(),
                    self.key
                ),
            )),
            Err(error) => {
                Err(Error::io(format!("publish object {} as {}", self.key, path.display()), error))
            }
        }
    }
}

impl Drop for PosixUpload {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.temporary)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("cannot remove {}: {error}", self.temporary.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::open_files::OPEN_FILES;

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    #[test]
    fn an_abandoned_upload_leaves_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let store = Posix::open(directory.path()).unwrap();
        let mut upload = store.create(&key("packs/aa/x")).unwrap();
        upload.write(b"half").unwrap();
        drop(upload);
        assert_eq!(store.list("", None, 10).unwrap(), Vec::<String>::new());
        assert_eq!(fs::read_dir(directory.path().join(TEMPORARY)).unwrap().count(), 0);
    }

    #[test]
    fn files_of_dead_writers_are_removed_at_open_and_others_stay() {
        let directory = tempfile::tempdir().unwrap();
        let store = Posix::open(directory.path()).unwrap();
        let temporary = directory.path().join(TEMPORARY);
        let living = store.create(&key("a")).unwrap();
        let dead = WriterName::of_this_process().unwrap().with_pid(u32::MAX >> 1);
        fs::write(temporary.join(dead.temporary_name(1)), b"x").unwrap();
        fs::write(temporary.join("foreign"), b"x").unwrap();
        assert_eq!(fs::read_dir(&temporary).unwrap().count(), 3);
        let again = Posix::open(directory.path()).unwrap();
        let mut left: Vec<_> = fs::read_dir(&temporary)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left.len(), 2, "{left:?}");
        assert_eq!(left[1], "foreign");
        living.publish().unwrap();
        assert_eq!(again.list("", None, 10).unwrap(), ["a"]);
    }

    #[test]
    fn a_temporary_file_that_vanished_fails_the_publish() {
        let directory = tempfile::tempdir().unwrap();
        let store = Posix::open(directory.path()).unwrap();
        let upload = store.create(&key("a/b")).unwrap();
        for entry in fs::read_dir(directory.path().join(TEMPORARY)).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
        assert_eq!(upload.publish().unwrap_err().kind(), ErrorKind::Unavailable);
        assert_eq!(store.size(&key("a/b")).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_full_disk_is_no_space_and_poisons_the_upload() {
        let mut upload = PosixUpload {
            directory: Posix::open(tempfile::tempdir().unwrap().path()).unwrap().0,
            key: key("a"),
            temporary: PathBuf::from("/nonexistent/temporary"),
            file: OpenOptions::new().write(true).open("/dev/full").unwrap(),
            buffer: Vec::new(),
            failed: false,
        };
        let big = vec![1; WRITE_BUFFER_BYTES];
        assert_eq!(upload.write(&big).unwrap_err().kind(), ErrorKind::NoSpace);
        assert_eq!(upload.write(b"x").unwrap_err().kind(), ErrorKind::Unavailable);
        assert_eq!(Box::new(upload).publish().unwrap_err().kind(), ErrorKind::Unavailable);
    }

    #[test]
    fn more_files_than_are_kept_open_can_be_read() {
        let directory = tempfile::tempdir().unwrap();
        let store = Posix::open(directory.path()).unwrap();
        for round in 0..2 {
            for number in 0..OPEN_FILES + 8 {
                let key = key(&format!("packs/{number}"));
                if round == 0 {
                    let mut upload = store.create(&key).unwrap();
                    upload.write(&(number as u64).to_le_bytes()).unwrap();
                    upload.publish().unwrap();
                }
                let mut bytes = [0; 8];
                store.read_at(&key, 0, &mut bytes).unwrap();
                assert_eq!(u64::from_le_bytes(bytes), number as u64);
            }
        }
        assert!(store.0.open.lock().unwrap().len() <= OPEN_FILES);
    }
}
