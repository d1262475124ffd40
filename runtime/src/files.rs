//! Files in and out of a sandbox, streamed with bounded memory.
//!
//! Every path is resolved by the kernel with the sandbox's root as the root, whatever symlinks say, and
//! magic links of /proc are refused. What is opened is looked at before it is read or cut: only regular
//! files and directories count, and never those of /proc or /sys, which would be read and written with
//! our rights. Runs on blocking threads, since a cold page may take its time.

use crate::sandbox::Sandbox;
use layer::{Context, Error, ErrorKind, Result};
use proto::v1::{self, file_chunk::Part};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use sys::file::space::FileSystemKind;
use sys::file::{FileKind, Folder, OFlags};
use tokio::sync::mpsc;

/// Bytes in one message.
const PART_BYTES: usize = 256 << 10;
/// Messages that wait.
const QUEUE: usize = 4;
/// Folders below each other in one archive.
const MAX_DEPTH: usize = 1024;

const PROC_MAGIC: u64 = 0x9fa0;
const SYSFS_MAGIC: u64 = 0x6265_6572;

type Parts = mpsc::Sender<Result<v1::FileChunk>>;

/// Reads a file, or a directory as a tar.
pub async fn read(
    sandbox: &Arc<Sandbox>,
    path: String,
) -> Result<mpsc::Receiver<Result<v1::FileChunk>>> {
    let root = root_of(sandbox)?;
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::task::spawn_blocking(move || {
        if let Err(error) = read_blocking(root.as_fd(), Path::new(&path), &sender) {
            let error = error.context(format!("read {path:?} in the sandbox"));
            // A client that has left needs no error.
            let _left = sender.blocking_send(Err(error));
        }
    });
    Ok(receiver)
}

fn root_of(sandbox: &Sandbox) -> Result<OwnedFd> {
    let ended = || Error::not_found(format!("sandbox {} has ended", sandbox.id()));
    sandbox.instance().ok_or_else(ended)?.root()
}

fn read_blocking(root: BorrowedFd<'_>, path: &Path, parts: &Parts) -> Result<()> {
    let place = open(root, path, OFlags::PATH)?;
    refuse_kernel_files(place.as_fd())?;
    let stat = sys::file::stat_fd(place.as_fd()).context(|| "look".into())?;
    let header = v1::FileHeader {
        is_directory: stat.kind == FileKind::Directory,
        mode: stat.mode,
        size_bytes: stat.size,
        mtime_unix_s: stat.mtime.secs,
    };
    match stat.kind {
        FileKind::Regular => {
            let file = reopen(&place, OFlags::RDONLY)?;
            send(parts, Part::Header(header))?;
            copy_out(File::from(file), parts)
        }
        FileKind::Directory => {
            let folder = reopen(&place, OFlags::RDONLY | OFlags::DIRECTORY)?;
            let folder = Folder::from_fd(folder).context(|| "open".into())?;
            send(parts, Part::Header(header))?;
            let writer = PartWriter { parts: parts.clone(), buffer: Vec::new() };
            let mut archive = tar::Builder::new(writer);
            archive_folder(&mut archive, &folder, &mut PathBuf::new(), 0)?;
            let mut writer = archive.into_inner().context(|| "end the archive".into())?;
            writer.flush().context(|| "end the archive".into())
        }
        _ => Err(Error::invalid("neither a regular file nor a directory")),
    }
}

fn open(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> Result<OwnedFd> {
    sys::file::open_in_root(root, path, flags | OFlags::CLOEXEC, 0)
        .context(|| format!("open {}", path.display()))
}

/// Opens for real what was only looked at, and nothing that took its place.
fn reopen(place: &OwnedFd, flags: OFlags) -> Result<OwnedFd> {
    use std::os::unix::fs::OpenOptionsExt;
    let extra = flags | OFlags::NONBLOCK | OFlags::NOCTTY;
    let is_writing = flags.contains(OFlags::WRONLY);
    std::fs::OpenOptions::new()
        .read(!is_writing)
        .write(is_writing)
        .custom_flags((extra - OFlags::WRONLY).bits() as i32)
        .open(format!("/proc/self/fd/{}", place.as_raw_fd()))
        .map(OwnedFd::from)
        .context(|| "open".into())
}

fn refuse_kernel_files(place: BorrowedFd<'_>) -> Result<()> {
    match sys::file::space::file_system(place).context(|| "look at the file system".into())?.kind {
        FileSystemKind::Other(PROC_MAGIC | SYSFS_MAGIC) => {
            Err(Error::new(ErrorKind::Denied, "files of the kernel are not transferred"))
        }
        _ => Ok(()),
    }
}

fn send(parts: &Parts, part: Part) -> Result<()> {
    parts
        .blocking_send(Ok(v1::FileChunk { part: Some(part) }))
        .map_err(|_| Error::new(ErrorKind::Unavailable, "the client has left"))
}

fn copy_out(mut file: File, parts: &Parts) -> Result<()> {
    loop {
        let mut buffer = vec![0; PART_BYTES];
        let count = match file.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count.context(|| "read".into())?,
        };
        if count == 0 {
            return Ok(());
        }
        buffer.truncate(count);
        send(parts, Part::Data(buffer))?;
    }
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
        let part = Part::Data(std::mem::take(&mut self.buffer));
        send(&self.parts, part).map_err(|error| io::Error::new(io::ErrorKind::BrokenPipe, error))
    }
}

fn archive_folder(
    archive: &mut tar::Builder<PartWriter>,
    folder: &Folder,
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
        header.set_uid(u64::from(stat.uid));
        header.set_gid(u64::from(stat.gid));
        header.set_mtime(u64::try_from(stat.mtime.secs).unwrap_or(0));
        header.set_size(0);
        match stat.kind {
            FileKind::Directory => {
                header.set_entry_type(tar::EntryType::Directory);
                archive.append_data(&mut header, &*path, io::empty()).context(|| context(path))?;
                let below = folder.open_folder(&entry.name).context(|| context(path))?;
                archive_folder(archive, &below, path, depth + 1)?;
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

/// What arrives from a client.
pub type Incoming = mpsc::Receiver<io::Result<Vec<u8>>>;

/// Writes a file, or unpacks a tar below a directory. Answers the bytes that arrived.
pub async fn write(
    sandbox: &Arc<Sandbox>,
    start: v1::WriteFileStart,
    incoming: Incoming,
) -> Result<u64> {
    let root = root_of(sandbox)?;
    let path = start.path.clone();
    let written = tokio::task::spawn_blocking(move || -> Result<u64> {
        let mut reader = PartReader { incoming, rest: Vec::new(), at: 0, bytes: 0 };
        if start.untar {
            unpack(root.as_fd(), Path::new(&start.path), &mut reader)?;
        } else {
            write_one(root.as_fd(), &start, &mut reader)?;
        }
        Ok(reader.bytes)
    });
    let written = written
        .await
        .map_err(|error| Error::new(ErrorKind::Internal, "writing panicked").with_source(error))?;
    written.context(|| format!("write {path:?} in the sandbox"))
}

struct PartReader {
    incoming: Incoming,
    rest: Vec<u8>,
    at: usize,
    bytes: u64,
}

impl Read for PartReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.at == self.rest.len() {
            let Some(part) = self.incoming.blocking_recv() else { return Ok(0) };
            self.rest = part?;
            self.at = 0;
            self.bytes += self.rest.len() as u64;
        }
        let count = into.len().min(self.rest.len() - self.at);
        into[..count].copy_from_slice(&self.rest[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

/// Folder and name; the path may be absolute.
fn split(path: &Path) -> Result<(&Path, &[u8])> {
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => Ok((parent, name.as_bytes())),
        _ => Err(Error::invalid("the path names no file")),
    }
}

fn write_one(
    root: BorrowedFd<'_>,
    start: &v1::WriteFileStart,
    reader: &mut PartReader,
) -> Result<()> {
    let path = Path::new(&start.path);
    split(path)?;
    // Nothing is cut before it is known what it is; a pipe without a reader does not hold us.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = sys::file::open_in_root(root, path, flags | OFlags::CLOEXEC, 0o600)
        .context(|| "open".into())?;
    refuse_kernel_files(file.as_fd())?;
    let stat = sys::file::stat_fd(file.as_fd()).context(|| "look".into())?;
    if stat.kind != FileKind::Regular {
        return Err(Error::invalid("not a regular file"));
    }
    let mut file = File::from(file);
    file.set_len(0).context(|| "empty the file".into())?;
    io::copy(reader, &mut file).context(|| "write".into())?;
    std::os::unix::fs::fchown(&file, Some(start.uid), Some(start.gid))
        .and_then(|()| file.set_permissions(std::fs::Permissions::from_mode(start.mode & 0o7777)))
        .context(|| "set owner and mode".into())
}

fn unpack(root: BorrowedFd<'_>, path: &Path, reader: &mut PartReader) -> Result<()> {
    let place = make_folders(root, path)?;
    refuse_kernel_files(place.as_fd())?;
    let mut archive = tar::Archive::new(reader);
    for entry in archive.entries().context(|| "read the archive".into())? {
        let mut entry = entry.context(|| "read the archive".into())?;
        let name = clean(&entry.path().context(|| "read the archive".into())?)?;
        if name.as_os_str().is_empty() {
            continue;
        }
        unpack_entry(root, path, &name, &mut entry)
            .map_err(|error| error.context(format!("unpack {}", name.display())))?;
    }
    // What follows the end of an archive is padding.
    let mut rest = archive.into_inner();
    io::copy(&mut rest, &mut io::sink()).map(drop).context(|| "read the archive".into())
}

/// A relative path without `.`; one with `..` is refused.
fn clean(path: &Path) -> Result<PathBuf> {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => clean.push(name),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(Error::invalid(format!("the archive names {}", path.display())));
            }
        }
    }
    Ok(clean)
}

/// Opens a folder, making what is missing of its path.
fn make_folders(root: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let mut made = PathBuf::from("/");
    let mut folder = open(root, &made, flags)?;
    for component in path.components() {
        match component {
            Component::Normal(name) => made.push(name),
            Component::ParentDir => made.push(".."),
            _ => continue,
        }
        folder = match sys::file::open_in_root(root, &made, flags | OFlags::CLOEXEC, 0) {
            Ok(next) => next,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let name = made.file_name().unwrap_or_default().as_bytes();
                sys::file::make_folder_at(folder.as_fd(), name, 0o755)
                    .context(|| format!("make {}", made.display()))?;
                open(root, &made, flags)?
            }
            Err(error) => return Err(Error::io(format!("open {}", made.display()), error)),
        };
    }
    Ok(folder)
}

fn unpack_entry(
    root: BorrowedFd<'_>,
    below: &Path,
    name: &Path,
    entry: &mut tar::Entry<'_, &mut PartReader>,
) -> Result<()> {
    let whole = below.join(name);
    let (parent, last) = split(&whole)?;
    let folder = make_folders(root, parent)?;
    refuse_kernel_files(folder.as_fd())?;
    let header = entry.header().clone();
    let mode = header.mode().context(|| "mode".into())? & 0o7777;
    let number = |value: io::Result<u64>, what: &str| -> Result<u32> {
        let value = value.context(|| what.to_owned())?;
        u32::try_from(value).map_err(|_| Error::invalid(format!("{what} {value}")))
    };
    let (uid, gid) = (number(header.uid(), "uid")?, number(header.gid(), "gid")?);
    let kind = header.entry_type();
    let link = entry.link_name_bytes().map(std::borrow::Cow::into_owned);
    let remove = || -> Result<()> {
        let copy = folder.try_clone().context(|| "open".into())?;
        match Folder::from_fd(copy).and_then(|folder| folder.remove_file(last)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map(drop).context(|| "replace".into()),
        }
    };
    match kind {
        tar::EntryType::Directory => match sys::file::make_folder_at(folder.as_fd(), last, 0o755) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made.context(|| "make".into())?,
        },
        tar::EntryType::Regular | tar::EntryType::Continuous | tar::EntryType::GNUSparse => {
            remove()?;
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let file = sys::file::open_beneath(
                folder.as_fd(),
                Path::new(OsStr::from_bytes(last)),
                flags,
                0o600,
            );
            let mut file = File::from(file.context(|| "make".into())?);
            io::copy(entry, &mut file).context(|| "write".into())?;
        }
        tar::EntryType::Symlink => {
            remove()?;
            let target = link.ok_or_else(|| Error::invalid("a symlink without a target"))?;
            sys::file::make_symlink_at(folder.as_fd(), last, &target).context(|| "make".into())?;
        }
        tar::EntryType::Link => {
            let target = link.ok_or_else(|| Error::invalid("a link without a target"))?;
            let target = below.join(clean(Path::new(OsStr::from_bytes(&target)))?);
            let (old_parent, old_name) = split(&target)?;
            let old = open(root, old_parent, OFlags::RDONLY | OFlags::DIRECTORY)?;
            remove()?;
            return sys::file::make_link_at(old.as_fd(), old_name, folder.as_fd(), last)
                .context(|| "link".into());
        }
        other => {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("entries of type {other:?} are not unpacked into sandboxes"),
            ));
        }
    }
    let metadata = || -> io::Result<()> {
        sys::file::set_owner_at(folder.as_fd(), last, uid, gid)?;
        if kind != tar::EntryType::Symlink {
            sys::file::set_mode_at(folder.as_fd(), last, mode)?;
        }
        let secs = i64::try_from(header.mtime()?).unwrap_or(i64::MAX);
        sys::file::set_mtime_at(folder.as_fd(), last, sys::file::Time { secs, nanos: 0 })
    };
    metadata().context(|| "set owner, mode and time".into())
}
