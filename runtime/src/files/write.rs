//! Bytes that become a file: one that takes the place of an older one when it is whole, or one that grows.

use super::unpack::unpack;
use super::{PATIENCE, TRANSFERS, folder_of, in_root, make_folders, refuse_kernel_files, split};
use crate::ids::Ids;
use crate::sandbox::Sandbox;
use layer::{Context, Error, Result};
use proto::v1::WriteFileStart;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use sys::file::publish::{self, Unnamed};
use sys::file::{FileKind, Folder, OFlags, Stat, Time};
use tokio::sync::mpsc;

/// Links that are followed to find a file.
const MAX_LINKS: u32 = 40;

/// What comes after the last bytes of a whole upload; without it, it broke off.
pub const END: Vec<u8> = Vec::new();

/// What arrives from a client: never nothing but [`END`].
pub type Incoming = mpsc::Receiver<io::Result<Vec<u8>>>;

/// Writes a file, or unpacks a tar below a directory. Answers the bytes that arrived.
pub async fn write(
    sandbox: &Arc<Sandbox>,
    start: WriteFileStart,
    incoming: Incoming,
) -> Result<u64> {
    let what = format!("write {:?} in the sandbox", start.path);
    in_root(&TRANSFERS, sandbox, what, move |root, ids| {
        let mut reader =
            PartReader { incoming, rest: Vec::new(), at: 0, bytes: 0, is_whole: false };
        let path = Path::new(&start.path);
        if start.untar {
            unpack(root, ids, path, &mut reader)?;
        } else {
            if start.make_parents {
                make_folders(root, split(path)?.0)?;
            }
            if start.append {
                append(root, ids, &start, &mut reader)?;
            } else {
                replace(root, ids, &start, &mut reader)?;
            }
        }
        Ok(reader.bytes)
    })
    .await
}

/// Reads what arrives.
pub struct PartReader {
    incoming: Incoming,
    rest: Vec<u8>,
    at: usize,
    bytes: u64,
    is_whole: bool,
}

impl Read for PartReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.at == self.rest.len() {
            if self.is_whole {
                return Ok(0);
            }
            let part = match self.incoming.try_recv() {
                Ok(part) => Some(part),
                Err(mpsc::error::TryRecvError::Disconnected) => None,
                Err(mpsc::error::TryRecvError::Empty) => {
                    let wait = tokio::time::timeout(PATIENCE, self.incoming.recv());
                    tokio::runtime::Handle::current()
                        .block_on(wait)
                        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
                }
            };
            let broke_off = || io::Error::other("the upload broke off");
            self.rest = part.ok_or_else(broke_off)??;
            self.is_whole = self.rest.is_empty();
            self.at = 0;
            self.bytes += self.rest.len() as u64;
        }
        let count = into.len().min(self.rest.len() - self.at);
        into[..count].copy_from_slice(&self.rest[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

/// Where a file is to be, links followed: its folder, its name, and what is there.
fn destination(root: BorrowedFd<'_>, path: &Path) -> Result<(OwnedFd, Vec<u8>, Option<Stat>)> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let (folder, name) = folder_of(root, &path)?;
        let name = name.to_owned();
        match sys::file::stat_at(folder.as_fd(), &name) {
            Ok(stat) if stat.kind == FileKind::Symlink => {
                let target = sys::file::read_link_at(folder.as_fd(), &name);
                let target = PathBuf::from(OsStr::from_bytes(&target.context(|| "look".into())?));
                // An absolute one begins anew at the sandbox's root.
                path = path.parent().unwrap_or(Path::new("/")).join(target);
            }
            Ok(stat) => return Ok((folder, name, Some(stat))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok((folder, name, None));
            }
            Err(error) => return Err(Error::io("look", error)),
        }
    }
    Err(Error::invalid("too many links"))
}

/// CRASH: the new file has no name until it is whole; a killed node leaves the old one, or both for an instant.
fn replace(
    root: BorrowedFd<'_>,
    ids: Ids,
    start: &WriteFileStart,
    reader: &mut PartReader,
) -> Result<()> {
    let owner = (ids.outer(start.uid)?, ids.outer(start.gid)?);
    let (folder, name, old) = destination(root, Path::new(&start.path))?;
    if old.is_some_and(|old| old.kind != FileKind::Regular) {
        return Err(Error::invalid("not a regular file"));
    }
    let above = sys::file::stat_fd(folder.as_fd()).context(|| "look".into())?;
    if old.is_some_and(|old| old.mount_id != above.mount_id) {
        // Something is mounted there: nothing takes its place.
        return overwrite(folder.as_fd(), &name, owner, start, reader);
    }
    match Unnamed::create(folder.as_fd(), 0o600) {
        Ok(new) => {
            let mut file = File::from(new.as_fd().try_clone_to_owned().context(|| "open".into())?);
            fill(&mut file, owner, start, reader)?;
            let hidden = hidden_name()?;
            new.publish_without_sync(folder.as_fd(), &hidden).context(|| "name".into())?;
            take_place(folder.as_fd(), &hidden, &name)
        }
        // Not every file system makes files without a name.
        Err(error) if is_unsupported(&error) => {
            let hidden = hidden_name()?;
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let path = Path::new(OsStr::from_bytes(&hidden));
            let file = sys::file::open_beneath(folder.as_fd(), path, flags, 0o600);
            let mut file = File::from(file.context(|| "make".into())?);
            match fill(&mut file, owner, start, reader) {
                Ok(()) => take_place(folder.as_fd(), &hidden, &name),
                Err(error) => {
                    remove_hidden(folder.as_fd(), &hidden);
                    Err(error)
                }
            }
        }
        Err(error) => Err(Error::io("make", error)),
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    const EISDIR: i32 = 21;
    const EOPNOTSUPP: i32 = 95;
    matches!(sys::errno_of(error), Some(EISDIR | EOPNOTSUPP))
}

fn hidden_name() -> Result<Vec<u8>> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|error| {
        Error::new(layer::ErrorKind::Internal, format!("random numbers: {error}"))
    })?;
    Ok(format!(".upload-{:016x}", u64::from_le_bytes(random)).into_bytes())
}

fn take_place(folder: BorrowedFd<'_>, hidden: &[u8], name: &[u8]) -> Result<()> {
    let renamed = publish::rename(folder, hidden, folder, name);
    if renamed.is_err() {
        remove_hidden(folder, hidden);
    }
    renamed.context(|| "take the place of what is there".into())
}

fn remove_hidden(folder: BorrowedFd<'_>, hidden: &[u8]) {
    let removed = folder
        .try_clone_to_owned()
        .and_then(Folder::from_fd)
        .and_then(|folder| folder.remove_file(hidden));
    if let Err(error) = removed {
        tracing::warn!(%error, "half an upload stays in a sandbox");
    }
}

/// Bytes first, then owner, mode and time, which each of the former would change.
fn fill(
    file: &mut File,
    (uid, gid): (u32, u32),
    start: &WriteFileStart,
    reader: &mut PartReader,
) -> Result<()> {
    io::copy(reader, file).context(|| "write".into())?;
    std::os::unix::fs::fchown(&*file, Some(uid), Some(gid))
        .and_then(|()| file.set_permissions(std::fs::Permissions::from_mode(start.mode & 0o7777)))
        .and_then(|()| match start.mtime_unix_s {
            Some(secs) => sys::file::set_mtime_fd(file.as_fd(), Time { secs, nanos: 0 }),
            None => Ok(()),
        })
        .context(|| "set owner, mode and time".into())
}

fn open_existing(folder: BorrowedFd<'_>, name: &[u8], extra: OFlags) -> Result<File> {
    // A pipe without a reader does not hold us.
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW;
    let path = Path::new(OsStr::from_bytes(name));
    // Not beneath: a file that is mounted over its place is another mount's.
    let file = sys::file::open_in_root(folder, path, flags | OFlags::CLOEXEC | extra, 0o644);
    let file = file.context(|| "open".into())?;
    refuse_kernel_files(file.as_fd())?;
    let stat = sys::file::stat_fd(file.as_fd()).context(|| "look".into())?;
    if stat.kind != FileKind::Regular {
        return Err(Error::invalid("not a regular file"));
    }
    Ok(File::from(file))
}

fn overwrite(
    folder: BorrowedFd<'_>,
    name: &[u8],
    owner: (u32, u32),
    start: &WriteFileStart,
    reader: &mut PartReader,
) -> Result<()> {
    let mut file = open_existing(folder, name, OFlags::empty())?;
    file.set_len(0).context(|| "empty the file".into())?;
    fill(&mut file, owner, start, reader)
}

fn append(
    root: BorrowedFd<'_>,
    ids: Ids,
    start: &WriteFileStart,
    reader: &mut PartReader,
) -> Result<()> {
    let (folder, name, old) = destination(root, Path::new(&start.path))?;
    let Some(old) = old else { return replace(root, ids, start, reader) };
    if old.kind != FileKind::Regular {
        return Err(Error::invalid("not a regular file"));
    }
    let mut file = open_existing(folder.as_fd(), &name, OFlags::APPEND)?;
    io::copy(reader, &mut file).map(drop).context(|| "write".into())
}
