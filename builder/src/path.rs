//! Paths as bytes: showing them safely, their order in a tree, and opening what is below a directory without leaving it.

pub use layer::tree::display_path as show;

use layer::Result;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

/// Longest path that one system call takes; leaves room for the terminating NUL.
const CALL_BYTES: usize = 4000;

/// Calls `visit` for every name of a tree: parents first, names in byte order; the root comes first, its path
/// empty. `entries` are the names in a directory, `None` for all else.
pub fn walk<'a, Ix: Copy + 'a>(
    root: Ix,
    entries: impl Fn(Ix) -> Option<&'a BTreeMap<Vec<u8>, Ix>>,
    mut visit: impl FnMut(&[u8], Ix) -> Result<()>,
) -> Result<()> {
    visit(b"", root)?;
    let mut path = Vec::new();
    let mut open = Vec::new();
    open.extend(entries(root).map(|names| (0, names.iter())));
    while let Some((length, names)) = open.last_mut() {
        path.truncate(*length);
        let Some((name, &ix)) = names.next() else {
            open.pop();
            continue;
        };
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        visit(&path, ix)?;
        if let Some(names) = entries(ix) {
            open.push((path.len(), names.iter()));
        }
    }
    Ok(())
}

/// `parent/name`, or `name` directly below the root.
pub fn join(parent: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(parent.len() + 1 + name.len());
    path.extend_from_slice(parent);
    if !parent.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

/// The components of a path inside a root: without empty ones and `.`, and `..` takes the one before it
/// away, where there is one.
pub fn inside(path: &[u8]) -> Vec<&[u8]> {
    let mut names: Vec<&[u8]> = Vec::new();
    for name in path.split(|&byte| byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." => {
                names.pop();
            }
            name => names.push(name),
        }
    }
    names
}

/// Opens `path` below `root` through no symbolic link and no magic link. An empty path opens the
/// root itself. Paths longer than PATH_MAX are walked in parts.
pub fn open_below(
    root: impl AsFd,
    path: &[u8],
    flags: OFlags,
    mode: Mode,
) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let mut rest = path;
    let mut parent: Option<OwnedFd> = None;
    while rest.len() > CALL_BYTES {
        let cut =
            rest[..CALL_BYTES].iter().rposition(|&byte| byte == b'/').ok_or(Errno::NAMETOOLONG)?;
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let base = parent.as_ref().map_or_else(|| root.as_fd(), AsFd::as_fd);
        parent = Some(rustix::fs::openat2(base, &rest[..cut], directory, Mode::empty(), resolve)?);
        rest = &rest[cut + 1..];
    }
    let base = parent.as_ref().map_or_else(|| root.as_fd(), AsFd::as_fd);
    let name = if rest.is_empty() { &b"."[..] } else { rest };
    rustix::fs::openat2(base, name, flags | OFlags::CLOEXEC, mode, resolve)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_inside() {
        let text = |path: &[u8]| String::from_utf8(inside(path).join(&b'/')).unwrap();
        assert_eq!(text(b"./a//b/"), "a/b");
        assert_eq!(text(b"/etc/passwd"), "etc/passwd");
        assert_eq!(text(b"../../a/../b"), "b");
        assert_eq!(text(b"./"), "");
    }
}
