//! An OCI layout in the making: a directory beside its place, renamed when it is whole.
//!
//! CRASH: whoever dies leaves a directory `.NAME.<random>`, and nothing under the name itself.

use super::tar::Tape;
use crate::source::blob::{Hasher, wrong_digest};
use layer::{Context, Error, ErrorKind, Result};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use tempfile::{NamedTempFile, TempDir};

const BUFFER_BYTES: usize = 256 << 10;
const LAYOUT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;

/// The files of a layout.
pub(super) struct Blobs {
    directory: TempDir,
    place: PathBuf,
}

/// A blob that is part of the layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Blob {
    pub digest: String,
    pub bytes: u64,
}

impl Blobs {
    /// Begins a layout at a place where nothing is, or an empty directory.
    pub(super) fn begin(place: &Path) -> Result<Self> {
        let taken = match fs::read_dir(place) {
            Ok(mut entries) => entries.next().is_some(),
            Err(_) => fs::symlink_metadata(place).is_ok(),
        };
        if taken {
            let text = format!("{} exists already", place.display());
            return Err(Error::new(ErrorKind::Exists, text));
        }
        let name = place.file_name().ok_or_else(|| {
            Error::invalid(format!("{} names no file or directory", place.display()))
        })?;
        let parent = place.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let prefix = format!(".{}.", name.to_string_lossy());
        let directory = tempfile::Builder::new().prefix(&prefix).tempdir_in(parent);
        let directory = directory
            .map_err(without_name)
            .context(|| format!("make a directory in {}", parent.display()))?;
        fs::create_dir_all(directory.path().join("blobs/sha256"))
            .and_then(|()| fs::write(directory.path().join("oci-layout"), LAYOUT))
            .context(|| format!("write {}", directory.path().display()))?;
        Ok(Self { directory, place: place.to_owned() })
    }

    /// A blob in the making; `expected` is the digest that it must have.
    pub(super) fn writer(&self, expected: Option<&str>) -> Result<BlobWriter> {
        let hasher = match expected {
            Some(digest) => Hasher::of(digest)?,
            None => Hasher::sha256(),
        };
        let file = NamedTempFile::new_in(self.directory.path());
        let file = file.context(|| "make a file for a blob".to_owned())?;
        Ok(BlobWriter {
            file: BufWriter::with_capacity(BUFFER_BYTES, file),
            hasher,
            bytes: 0,
            expected: expected.map(str::to_owned),
        })
    }

    /// Puts a finished blob under its digest.
    pub(super) fn put(&self, mut writer: BlobWriter) -> Result<Blob> {
        let failed = || "write a blob".to_owned();
        writer.flush().context(failed)?;
        let digest = writer.hasher.digest();
        if let Some(expected) = &writer.expected
            && *expected != digest
        {
            return Err(wrong_digest("a blob that was made again", expected, &digest));
        }
        let path = self.directory.path().join("blobs").join(digest.replacen(':', "/", 1));
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).context(failed)?;
        }
        let bytes = writer.bytes;
        let file = writer.file.into_inner().map_err(std::io::IntoInnerError::into_error);
        let file = file.context(failed)?.persist(&path).map_err(|error| error.error);
        let file = file.context(failed)?;
        // Temporary files are only their owner's; these are for whoever may read the directory.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        file.set_permissions(mode).context(failed)?;
        Ok(Blob { digest, bytes })
    }

    /// Puts a small blob.
    pub(super) fn put_bytes(&self, bytes: &[u8]) -> Result<Blob> {
        let mut writer = self.writer(None)?;
        writer.write_all(bytes).context(|| "write a blob".to_owned())?;
        self.put(writer)
    }

    /// Writes the index and puts the layout in its place: a directory, or one tar file.
    pub(super) fn finish(self, index: &[u8], as_archive: bool) -> Result<()> {
        let failed = || format!("write {}", self.place.display());
        let root = self.directory.path();
        fs::write(root.join("index.json"), index).context(failed)?;
        if as_archive {
            let parent = root.parent().unwrap_or(Path::new("."));
            let archive = NamedTempFile::new_in(parent).map_err(without_name).context(failed)?;
            let mut out = BufWriter::with_capacity(BUFFER_BYTES, archive);
            pack(root, &mut out).context(failed)?;
            let archive = out.into_inner().map_err(std::io::IntoInnerError::into_error);
            let archive = archive.context(failed)?;
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
            archive.as_file().set_permissions(mode).context(failed)?;
            archive.as_file().sync_all().context(failed)?;
            let kept = archive.persist_noclobber(&self.place).map_err(|error| error.error);
            return kept.context(failed).map(drop);
        }
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(root, mode).context(failed)?;
        for path in files(root)? {
            let synced = File::open(root.join(&path)).and_then(|file| file.sync_all());
            synced.context(failed)?;
        }
        // Over an empty directory, or nothing.
        fs::rename(root, &self.place).context(failed)?;
        // It is not there any more under its old name; there is nothing to clean up.
        let _ = self.directory.keep();
        Ok(())
    }
}

/// The system's word alone: `tempfile` adds a name that nobody else knows, and keeps the number to itself.
fn without_name(error: io::Error) -> io::Error {
    match error.to_string().split_once(" at path ") {
        Some((word, _)) => io::Error::new(error.kind(), word),
        None => error,
    }
}

/// The files below a directory, in order.
fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut pending = vec![PathBuf::new()];
    while let Some(at) = pending.pop() {
        let listed = fs::read_dir(root.join(&at)).context(|| "list the layout".to_owned())?;
        for entry in listed {
            let entry = entry.context(|| "list the layout".to_owned())?;
            let path = at.join(entry.file_name());
            if entry.path().is_dir() { pending.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    Ok(found)
}

/// One tar file of a layout. The small documents come first, as readers of a stream like it.
fn pack(root: &Path, out: &mut dyn Write) -> Result<()> {
    let mut paths = files(root)?;
    paths.sort_by_key(|path| (path.starts_with("blobs"), path.clone()));
    for directory in ["blobs/", "blobs/sha256/"] {
        Tape::new(out).directory(directory.as_bytes())?;
    }
    for path in paths {
        let name = path.to_string_lossy().into_owned();
        let mut file = File::open(root.join(&path)).context(|| name.clone())?;
        let bytes = file.metadata().context(|| name.clone())?.len();
        Tape::new(out).plain(name.as_bytes(), bytes)?;
        std::io::copy(&mut file, out).context(|| name)?;
        Tape::new(out).pad(bytes)?;
    }
    Tape::new(out).end()?;
    out.flush().context(|| "write a tar".to_owned())
}

/// See [`Blobs::writer`].
pub(super) struct BlobWriter {
    file: BufWriter<NamedTempFile>,
    hasher: Hasher,
    bytes: u64,
    expected: Option<String>,
}

impl Write for BlobWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.file.write_all(bytes)?;
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}
