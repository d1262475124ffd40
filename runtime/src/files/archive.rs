//! A directory as a tar, streamed: what a sandbox gives out.

use super::{Part, Parts, send};
use crate::ids::Ids;
use layer::{Context, Error, Result};
use proto::v1;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use sys::file::{FileKind, Folder};

/// Bytes in one message.
const PART_BYTES: usize = super::PART_BYTES;
/// Folders below each other in one archive.
const MAX_DEPTH: usize = 1024;

/// Sends a whole folder.
pub fn send_folder(folder: &Folder, ids: Ids, parts: &Parts) -> Result<()> {
    let writer = PartWriter { parts: parts.clone(), buffer: Vec::new() };
    let mut archive = tar::Builder::new(writer);
    archive_folder(&mut archive, folder, ids, &mut PathBuf::new(), 0)?;
    let mut writer = archive.into_inner().context(|| "end the archive".into())?;
    writer.flush().context(|| "end the archive".into())
}

/// Turns writes into messages.
struct PartWriter {
    parts: Parts,
    buffer: Vec<u8>,
}

impl Write for PartWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= PART_BYTES {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let part = Some(Part::Data(std::mem::take(&mut self.buffer)));
        let part = v1::FileChunk { part };
        send(&self.parts, part).map_err(|error| io::Error::new(io::ErrorKind::BrokenPipe, error))
    }
}

fn archive_folder(
    archive: &mut tar::Builder<PartWriter>,
    folder: &Folder,
    ids: Ids,
    path: &mut PathBuf,
    depth: usize,
) -> Result<()> {
    if depth > MAX_DEPTH {
        return Err(Error::invalid("directories nested deeper than 1024"));
    }
    let context = |path: &Path| format!("archive {}", path.display());
    let mut entries = folder.entries().context(|| context(path))?;
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    for entry in entries {
        path.push(OsStr::from_bytes(&entry.name));
        let stat = folder.stat(&entry.name).context(|| context(path))?;
        let mut header = tar::Header::new_gnu();
        header.set_mode(stat.mode);
        header.set_uid(u64::from(ids.inner(stat.uid)));
        header.set_gid(u64::from(ids.inner(stat.gid)));
        header.set_mtime(u64::try_from(stat.mtime.secs).unwrap_or(0));
        header.set_size(0);
        match stat.kind {
            FileKind::Directory => {
                header.set_entry_type(tar::EntryType::Directory);
                archive.append_data(&mut header, &*path, io::empty()).context(|| context(path))?;
                let below = folder.open_folder(&entry.name).context(|| context(path))?;
                archive_folder(archive, &below, ids, path, depth + 1)?;
            }
            FileKind::Regular => {
                let file = folder.open_regular(&entry.name).context(|| context(path))?;
                let file = File::from(file);
                // The size may have changed; the header says how many bytes follow.
                let size = file.metadata().context(|| context(path))?.len();
                header.set_entry_type(tar::EntryType::Regular);
                header.set_size(size);
                let exact = file.take(size).chain(io::repeat(0)).take(size);
                archive.append_data(&mut header, &*path, exact).context(|| context(path))?;
            }
            FileKind::Symlink => {
                let target = folder.read_link(&entry.name).context(|| context(path))?;
                header.set_entry_type(tar::EntryType::Symlink);
                archive
                    .append_link(&mut header, &*path, Path::new(OsStr::from_bytes(&target)))
                    .context(|| context(path))?;
            }
            // Devices, pipes and sockets mean nothing outside.
            _ => {}
        }
        path.pop();
    }
    Ok(())
}
