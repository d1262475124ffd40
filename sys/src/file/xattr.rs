//! Extended attributes, of symlinks and devices too, without following any trailing symlink.
//!
//! Names are whole names with their namespace, `trusted.overlay.opaque`, as bytes. Values are bytes.
//! A list or a value that changes between the question for its size and the answer is asked again.

use rustix::fs::XattrFlags;
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// What setting an attribute does when it exists or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetMode {
    /// Makes or replaces.
    Any,
    /// EEXIST when it exists.
    Create,
    /// ENODATA when it does not.
    Replace,
}

impl SetMode {
    fn flags(self) -> XattrFlags {
        match self {
            Self::Any => XattrFlags::empty(),
            Self::Create => XattrFlags::CREATE,
            Self::Replace => XattrFlags::REPLACE,
        }
    }
}

/// The kernel's limit of a value and of a list of names, in bytes.
const MAX_BYTES: usize = 65536;
/// What most values and lists fit into.
const USUAL_BYTES: usize = 256;

fn read(
    mut ask: impl FnMut(&mut [u8]) -> rustix::io::Result<usize>,
) -> rustix::io::Result<Vec<u8>> {
    let mut bytes = vec![0; USUAL_BYTES];
    loop {
        match ask(&mut bytes) {
            Ok(length) => {
                bytes.truncate(length);
                return Ok(bytes);
            }
            Err(Errno::RANGE) if bytes.len() < MAX_BYTES => bytes.resize(MAX_BYTES, 0),
            Err(error) => return Err(error),
        }
    }
}

fn names(list: rustix::io::Result<Vec<u8>>) -> io::Result<Vec<Vec<u8>>> {
    let list = match list {
        Ok(list) => list,
        // The file system knows no attributes: there are none.
        Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let names = list.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let mut names: Vec<Vec<u8>> = names.map(<[u8]>::to_vec).collect();
    names.sort();
    Ok(names)
}

fn value(value: rustix::io::Result<Vec<u8>>) -> io::Result<Option<Vec<u8>>> {
    match value {
        Ok(value) => Ok(Some(value)),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The names of all attributes, sorted.
pub fn list(path: &Path) -> io::Result<Vec<Vec<u8>>> {
    names(read(|buffer| rustix::fs::llistxattr(path, buffer)))
}

/// One attribute's value, if it exists.
pub fn get(path: &Path, name: &[u8]) -> io::Result<Option<Vec<u8>>> {
    value(read(|buffer| rustix::fs::lgetxattr(path, name, buffer)))
}

/// Sets one attribute.
pub fn set(path: &Path, name: &[u8], value: &[u8], mode: SetMode) -> io::Result<()> {
    Ok(rustix::fs::lsetxattr(path, name, value, mode.flags())?)
}

/// Removes one attribute; false when it did not exist.
pub fn remove(path: &Path, name: &[u8]) -> io::Result<bool> {
    match rustix::fs::lremovexattr(path, name) {
        Ok(()) => Ok(true),
        Err(Errno::NODATA) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// [`list`] for an open file (not `O_PATH`).
pub fn list_fd(fd: BorrowedFd<'_>) -> io::Result<Vec<Vec<u8>>> {
    names(read(|buffer| rustix::fs::flistxattr(fd, buffer)))
}

/// [`get`] for an open file (not `O_PATH`).
pub fn get_fd(fd: BorrowedFd<'_>, name: &[u8]) -> io::Result<Option<Vec<u8>>> {
    value(read(|buffer| rustix::fs::fgetxattr(fd, name, buffer)))
}

/// [`set`] for an open file (not `O_PATH`).
pub fn set_fd(fd: BorrowedFd<'_>, name: &[u8], value: &[u8], mode: SetMode) -> io::Result<()> {
    Ok(rustix::fs::fsetxattr(fd, name, value, mode.flags())?)
}

/// The path that means `name` in an open folder, whatever the folder is called by now.
///
/// Needs /proc. For calls that have no variant relative to a descriptor.
fn path_in(folder: BorrowedFd<'_>, name: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    let folder = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string());
    folder.join(std::ffi::OsStr::from_bytes(name))
}

/// [`list`] for `name` in an open folder.
pub fn list_at(folder: BorrowedFd<'_>, name: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    list(&path_in(folder, name))
}

/// [`get`] for `name` in an open folder.
pub fn get_at(folder: BorrowedFd<'_>, name: &[u8], key: &[u8]) -> io::Result<Option<Vec<u8>>> {
    get(&path_in(folder, name), key)
}

/// [`set`] for `name` in an open folder.
pub fn set_at(
    folder: BorrowedFd<'_>,
    name: &[u8],
    key: &[u8],
    value: &[u8],
    mode: SetMode,
) -> io::Result<()> {
    set(&path_in(folder, name), key, value, mode)
}
