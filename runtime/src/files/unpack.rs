//! A tar that becomes a tree in a sandbox.

use super::write::PartReader;
use super::{make_folders, open, refuse_kernel_files, split};
use crate::ids::Ids;
use layer::{Context, Error, ErrorKind, Result};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use sys::file::{Folder, OFlags};

/// Unpacks below a folder, which is made if it is missing.
pub fn unpack(root: BorrowedFd<'_>, ids: Ids, path: &Path, reader: &mut PartReader) -> Result<()> {
    let place = make_folders(root, path)?;
    refuse_kernel_files(place.as_fd())?;
    let mut archive = tar::Archive::new(reader);
    for entry in archive.entries().context(|| "read the archive".into())? {
        let mut entry = entry.context(|| "read the archive".into())?;
        let name = clean(&entry.path().context(|| "read the archive".into())?)?;
        if name.as_os_str().is_empty() {
            continue;
        }
        unpack_entry(root, ids, path, &name, &mut entry)
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

fn unpack_entry(
    root: BorrowedFd<'_>,
    ids: Ids,
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
        let value = u32::try_from(value).ok().and_then(|value| ids.outer(value).ok());
        value.ok_or_else(|| Error::invalid(format!("{what}: the sandbox has no such number")))
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
