//! Small calls on names: look, make a directory, rename, remove, set mode, owner and time.

use super::{CALLS, entry, folder_of, in_root, make_folders, open, refuse_kernel_files, split};
use crate::ids::Ids;
use crate::sandbox::Sandbox;
use layer::{Context, Error, Result};
use proto::v1::{
    FileEntry, MakeDirectoryRequest, RemoveFileRequest, RenameFileRequest,
    SetFileAttributesRequest, StatFileRequest,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use sys::file::{FileKind, Folder, OFlags, Time};

/// What a path names; a last link is followed if asked for.
pub async fn stat(sandbox: &Arc<Sandbox>, request: StatFileRequest) -> Result<FileEntry> {
    let what = format!("look at {:?} in the sandbox", request.path);
    in_root(&CALLS, sandbox, what, move |root, ids| {
        look(root, ids, Path::new(&request.path), request.follow)
    })
    .await
}

fn look(root: BorrowedFd<'_>, ids: Ids, path: &Path, follow: bool) -> Result<FileEntry> {
    let name = path.file_name().map_or(b"/".to_vec(), |name| name.as_bytes().to_vec());
    if follow || split(path).is_err() {
        let place = open(root, path, OFlags::PATH)?;
        refuse_kernel_files(place.as_fd())?;
        let stat = sys::file::stat_fd(place.as_fd()).context(|| "look".into())?;
        return Ok(entry(name, &stat, Vec::new(), ids));
    }
    let (folder, last) = folder_of(root, path)?;
    let stat = sys::file::stat_at(folder.as_fd(), last).context(|| "look".into())?;
    let target = match stat.kind {
        FileKind::Symlink => {
            sys::file::read_link_at(folder.as_fd(), last).context(|| "look".into())?
        }
        _ => Vec::new(),
    };
    Ok(entry(name, &stat, target, ids))
}

/// Makes a directory; with `parents` also what is missing above it, and one that exists is no error.
pub async fn make_directory(
    sandbox: &Arc<Sandbox>,
    request: MakeDirectoryRequest,
) -> Result<FileEntry> {
    let what = format!("make {:?} in the sandbox", request.path);
    in_root(&CALLS, sandbox, what, move |root, ids| {
        let path = Path::new(&request.path);
        let (parent, name) = split(path)?;
        let (uid, gid) = (ids.outer(request.uid)?, ids.outer(request.gid)?);
        let folder = if request.parents {
            make_folders(root, parent)?
        } else {
            open(root, parent, OFlags::RDONLY | OFlags::DIRECTORY)?
        };
        refuse_kernel_files(folder.as_fd())?;
        match sys::file::make_folder_at(folder.as_fd(), name, 0o700) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && request.parents => {
                // A link to a directory is as good.
                open(root, path, OFlags::PATH | OFlags::DIRECTORY)?;
                return look(root, ids, path, true);
            }
            made => made.context(|| "make".into())?,
        }
        let mode = if request.mode == 0 { 0o755 } else { request.mode };
        sys::file::set_owner_at(folder.as_fd(), name, uid, gid)
            .and_then(|()| sys::file::set_mode_at(folder.as_fd(), name, mode))
            .context(|| "set owner and mode".into())?;
        look(root, ids, path, false)
    })
    .await
}

/// Gives a file another name, in place of what has it unless that is refused.
pub async fn rename(sandbox: &Arc<Sandbox>, request: RenameFileRequest) -> Result<FileEntry> {
    let what = format!("rename {:?} to {:?} in the sandbox", request.from, request.to);
    in_root(&CALLS, sandbox, what, move |root, ids| {
        let (from, old) = folder_of(root, Path::new(&request.from))?;
        let (to, new) = folder_of(root, Path::new(&request.to))?;
        let (from, to) = (from.as_fd(), to.as_fd());
        if request.no_replace {
            sys::file::publish::rename_without_replacing(from, old, to, new)
        } else {
            sys::file::publish::rename(from, old, to, new)
        }
        .context(|| "rename".into())?;
        look(root, ids, Path::new(&request.to), false)
    })
    .await
}

/// Removes a name; with `recursive` all below it, following nothing. False when it does not exist and that is
/// no error.
pub async fn remove(sandbox: &Arc<Sandbox>, request: RemoveFileRequest) -> Result<bool> {
    let what = format!("remove {:?} in the sandbox", request.path);
    in_root(&CALLS, sandbox, what, move |root, _| {
        let absent =
            |error: &Error| error.kind() == layer::ErrorKind::NotFound && request.missing_ok;
        let (folder, name) = match folder_of(root, Path::new(&request.path)) {
            Err(error) if absent(&error) => return Ok(false),
            found => found?,
        };
        let folder = Folder::from_fd(folder).context(|| "open".into())?;
        let removed = if request.recursive {
            folder.remove_tree(name)
        } else {
            const EISDIR: i32 = 21;
            match folder.remove_file(name) {
                Err(error) if error.raw_os_error() == Some(EISDIR) => folder.remove_folder(name),
                removed => removed,
            }
        };
        match removed.context(|| "remove".into())? {
            false if !request.missing_ok => Err(Error::not_found("there is no such file")),
            removed => Ok(removed),
        }
    })
    .await
}

/// Sets what is given of mode, owner and time; a last link is not followed.
pub async fn set_attributes(
    sandbox: &Arc<Sandbox>,
    request: SetFileAttributesRequest,
) -> Result<FileEntry> {
    let what = format!("change {:?} in the sandbox", request.path);
    in_root(&CALLS, sandbox, what, move |root, ids| {
        let path = Path::new(&request.path);
        let (folder, name) = folder_of(root, path)?;
        let folder = folder.as_fd();
        let stat = sys::file::stat_at(folder, name).context(|| "look".into())?;
        if request.uid.is_some() || request.gid.is_some() {
            let uid = request.uid.map_or(Ok(stat.uid), |uid| ids.outer(uid))?;
            let gid = request.gid.map_or(Ok(stat.gid), |gid| ids.outer(gid))?;
            sys::file::set_owner_at(folder, name, uid, gid).context(|| "set owner".into())?;
        }
        // A change of owner may have cleared bits of the mode.
        if let Some(mode) = request.mode {
            sys::file::set_mode_at(folder, name, mode).context(|| "set mode".into())?;
        }
        if let Some(secs) = request.mtime_unix_s {
            let time = Time { secs, nanos: 0 };
            sys::file::set_mtime_at(folder, name, time).context(|| "set time".into())?;
        }
        look(root, ids, path, false)
    })
    .await
}
