//! Files of a call: written before its command starts, and read when everything of the call has ended.
//!
//! What comes out is read from a root that no process has any more, so nothing changes under our hands: a
//! descriptor keeps the overlay when the last namespace is gone, and its other mounts are not there then.
//! Paths resolve with the sandbox's root as the root. Only regular files count.

use super::request::place;
use crate::files::{make_folders, open, refuse_kernel_files, reopen};
use layer::{Context, Error, Result};
use proto::v1::CallFile;
use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use sys::file::{FileKind, Folder, OFlags};

/// Of a file that names none.
const DEFAULT_MODE: u32 = 0o644;
/// Files that come back.
const MAX_FOUND: usize = 1024;
/// Entries of folders that are looked at for patterns.
const MAX_LISTED: usize = 100_000;

/// Writes them, as the sandbox's root. Blocking.
pub fn put(root: BorrowedFd<'_>, cwd: &str, files: &[CallFile]) -> Result<()> {
    for file in files {
        let path = place(cwd, &file.path);
        write(root, &path, file).context(|| format!("write {:?} for the call", file.path))?;
    }
    Ok(())
}

fn write(root: BorrowedFd<'_>, path: &Path, file: &CallFile) -> Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::invalid("the path names no file"));
    };
    let folder = make_folders(root, parent)?;
    refuse_kernel_files(folder.as_fd())?;
    // Neither a link of the image is followed nor is a pipe waited for.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let flags = flags | OFlags::NOCTTY | OFlags::CLOEXEC;
    let opened = sys::file::open_beneath(folder.as_fd(), Path::new(name), flags, 0o600);
    let mut opened = File::from(opened.context(|| "make".into())?);
    let stat = sys::file::stat_fd(opened.as_fd()).context(|| "look".into())?;
    if stat.kind != FileKind::Regular {
        return Err(Error::invalid("not a regular file"));
    }
    let mode = if file.mode == 0 { DEFAULT_MODE } else { file.mode & 0o777 };
    opened
        .set_len(0)
        .and_then(|()| opened.write_all(&file.data))
        .and_then(|()| opened.set_permissions(Permissions::from_mode(mode)))
        .context(|| "write".into())
}

/// Reads what matches; what cannot be read says why in its place. Blocking.
pub fn take(root: BorrowedFd<'_>, cwd: &str, patterns: &[String], limit: u64) -> Vec<CallFile> {
    let mut left = limit;
    let mut found = Vec::new();
    let mut listed = 0;
    for pattern in patterns {
        let path = place(cwd, pattern);
        let paths = match expand(root, &path, &mut listed) {
            Ok(paths) if paths.is_empty() => {
                found.push(refused(&path, &Error::not_found("nothing matches")));
                continue;
            }
            Ok(paths) => paths,
            Err(error) => {
                found.push(refused(&path, &error));
                continue;
            }
        };
        for path in paths {
            if found.len() == MAX_FOUND {
                let text = format!("more than {MAX_FOUND} files would come back");
                found.push(refused(&path, &Error::invalid(text)));
                return found;
            }
            let file = read(root, &path, left);
            let file = file.unwrap_or_else(|error| refused(&path, &error));
            left -= file.data.len() as u64;
            found.push(file);
        }
    }
    found
}

fn refused(path: &Path, error: &Error) -> CallFile {
    CallFile { path: shown(path), error: error.chain(), ..CallFile::default() }
}

fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn read(root: BorrowedFd<'_>, path: &Path, left: u64) -> Result<CallFile> {
    let place = open(root, path, OFlags::PATH | OFlags::NOFOLLOW)?;
    refuse_kernel_files(place.as_fd())?;
    let stat = sys::file::stat_fd(place.as_fd()).context(|| "look".into())?;
    match stat.kind {
        FileKind::Regular => {}
        FileKind::Symlink => return Err(Error::invalid("a symbolic link, which is not followed")),
        _ => return Err(Error::invalid("not a regular file")),
    }
    if stat.size > left {
        let size = stat.size;
        let text = format!("{size} bytes, but only {left} may still come back");
        return Err(Error::new(layer::ErrorKind::NoSpace, text));
    }
    let mut data = Vec::with_capacity(stat.size as usize);
    let file = File::from(reopen(&place, OFlags::RDONLY)?);
    file.take(stat.size).read_to_end(&mut data).context(|| "read".into())?;
    Ok(CallFile { path: shown(path), mode: stat.mode, data, error: String::new() })
}

/// The paths that a pattern stands for, in order. Only `*` and `?` are special, within one name each.
fn expand(root: BorrowedFd<'_>, pattern: &Path, listed: &mut usize) -> Result<Vec<PathBuf>> {
    let mut paths = vec![PathBuf::from("/")];
    let mut is_literal = true;
    for component in pattern.components() {
        let Component::Normal(name) = component else { continue };
        let name = name.as_bytes();
        if !name.iter().any(|byte| matches!(byte, b'*' | b'?')) {
            paths.iter_mut().for_each(|path| path.push(OsStr::from_bytes(name)));
            continue;
        }
        is_literal = false;
        let mut next = Vec::new();
        for path in &paths {
            let Ok(folder) = open(root, path, OFlags::RDONLY | OFlags::DIRECTORY) else { continue };
            let folder = Folder::from_fd(folder).context(|| "list".into())?;
            let mut names = Vec::new();
            let visited = folder.visit_until(&mut |entry| {
                *listed += 1;
                if matches(name, &entry.name) {
                    names.push(entry.name.clone());
                }
                let is_over = *listed > MAX_LISTED || names.len() > MAX_FOUND;
                Ok(if is_over { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
            });
            visited.context(|| "list".into())?;
            if *listed > MAX_LISTED {
                let text = format!("more than {MAX_LISTED} names would be looked at");
                return Err(Error::invalid(text));
            }
            names.sort_unstable();
            next.extend(names.iter().map(|name| path.join(OsStr::from_bytes(name))));
        }
        next.truncate(MAX_FOUND + 1);
        paths = next;
    }
    if !is_literal {
        // A name behind a pattern need not be everywhere.
        paths.retain(|path| open(root, path, OFlags::PATH | OFlags::NOFOLLOW).is_ok());
    }
    Ok(paths)
}

/// Whether a name matches, in time linear in both.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut in_name) = (0, 0);
    // Where the last star is, and how much of the name it takes.
    let mut star = None;
    while in_name < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, in_name));
                at += 1;
            }
            Some(byte) if *byte == b'?' || *byte == name[in_name] => {
                at += 1;
                in_name += 1;
            }
            _ => {
                let Some((place, taken)) = star else { return false };
                star = Some((place, taken + 1));
                at = place + 1;
                in_name = taken + 1;
            }
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_and_question_marks_match_within_a_name() {
        for (pattern, name) in
            [("*", "a"), ("*.txt", "a.txt"), ("a?c", "abc"), ("a*b*c", "axxbyyc"), ("**", "x")]
        {
            assert!(matches(pattern.as_bytes(), name.as_bytes()), "{pattern} {name}");
        }
        for (pattern, name) in [("*.txt", "a.txt2"), ("a?c", "ac"), ("a*b", "axxc"), ("", "x")] {
            assert!(!matches(pattern.as_bytes(), name.as_bytes()), "{pattern} {name}");
        }
    }

    #[test]
    fn what_is_no_plain_file_is_refused_in_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        std::fs::create_dir_all(path.join("d/sub")).unwrap();
        std::fs::write(path.join("d/a.txt"), "one").unwrap();
        std::fs::write(path.join("d/b.txt"), "two").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", path.join("d/c.txt")).unwrap();
        File::create(path.join("huge")).unwrap().set_len(15 << 40).unwrap();
        let root = File::open(path).unwrap();
        let asked = ["d/*.txt", "huge", "d/sub", "none", "*.none"].map(str::to_owned);
        let found = take(root.as_fd(), "/", &asked, 1 << 20);
        let told: Vec<_> =
            found.iter().map(|file| (file.path.as_str(), file.error.as_str())).collect();
        assert_eq!(&found[0].data, b"one");
        assert_eq!(&found[1].data, b"two");
        assert_eq!(told[0], ("/d/a.txt", ""));
        assert!(told[2].1.contains("symbolic link"), "{told:?}");
        assert!(told[3].1.contains("16492674416640 bytes"), "{told:?}");
        assert!(told[4].1.contains("not a regular file"), "{told:?}");
        assert!(!told[5].1.is_empty() && told[6].1.contains("nothing matches"), "{told:?}");
        // What is taken counts.
        let found = take(root.as_fd(), "/d", &["*.txt".to_owned()], 5);
        assert!(found[0].error.is_empty() && found[1].error.contains("2 may still"), "{found:?}");
    }
}
