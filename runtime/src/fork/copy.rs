//! A copy of a tree that hostile code wrote: the writable layer of a sandbox, with its whiteouts, opaque folders,
//! hard links, holes and extended attributes.
//!
//! Every name is opened below the roots without following any symlink, and nothing but regular files is opened for
//! real. Memory: one path for each folder, and nothing for files. Blocks are shared where the file system can.

use layer::{Context, Result};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use sys::file::publish;
use sys::file::space::{self, PageCache};
use sys::file::{self, FileKind, Folder, OFlags, Stat, xattr};

/// Beside the copy while it is made: the first name of every file that has several, by its number.
const LINKS: &str = "links";
/// What overlayfs writes onto a writable layer to tell it from others.
const OWN_NUMBER: &[u8] = b"trusted.overlay.uuid";
/// Bytes that are copied at once where the kernel does not copy by itself.
const BUFFER_BYTES: usize = 1 << 20;

/// Copies everything below `from` into the empty folder `to`, and the metadata of `from` itself. Blocking.
///
/// What is there half when it fails is the caller's to remove.
pub fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    let links = to.with_extension(LINKS);
    let copied = || -> io::Result<()> {
        std::fs::create_dir_all(&links)?;
        let copy =
            Copy { from: Folder::open(from)?, to: Folder::open(to)?, links: Folder::open(&links)? };
        copy.run()
    };
    let result = copied().context(|| format!("copy {} to {}", from.display(), to.display()));
    // What is left in there are second names of what lies in the copy.
    let removed = crate::pool::remove_folder(&links);
    result.and(removed)
}

struct Copy {
    from: Folder,
    to: Folder,
    links: Folder,
}

impl Copy {
    fn run(&self) -> io::Result<()> {
        // Grows while it is walked: the folders of a folder come after it.
        let mut folders = vec![PathBuf::new()];
        let mut next = 0;
        while let Some(path) = folders.get(next).cloned() {
            next += 1;
            let from = Folder::from_fd(self.open(&self.from, &path)?)?;
            let to = Folder::from_fd(self.open(&self.to, &path)?)?;
            let mut inner = Vec::new();
            from.visit(&mut |entry| {
                let stat = from.stat(&entry.name)?;
                if stat.kind == FileKind::Directory {
                    file::make_folder_at(to.as_fd(), &entry.name, 0o700)?;
                    inner.push(path.join(OsStr::from_bytes(&entry.name)));
                    return Ok(());
                }
                self.copy_one(&from, &to, &entry.name, &stat)
            })?;
            folders.append(&mut inner);
        }
        // What is made in a folder changes its time, so theirs come last.
        for path in folders.iter().rev() {
            let from = self.open(&self.from, path)?;
            let to = self.open(&self.to, path)?;
            let stat = file::stat_fd(from.as_fd())?;
            copy_attributes(from.as_fd(), to.as_fd())?;
            // The name of the folder itself, whatever it is called.
            file::set_owner_at(to.as_fd(), b".", stat.uid, stat.gid)?;
            file::set_mode_at(to.as_fd(), b".", stat.mode)?;
            file::set_mtime_fd(to.as_fd(), stat.mtime)?;
        }
        Ok(())
    }

    fn open(&self, root: &Folder, path: &Path) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        file::open_without_symlinks(root.as_fd(), path, flags, 0)
    }

    fn copy_one(&self, from: &Folder, to: &Folder, name: &[u8], stat: &Stat) -> io::Result<()> {
        // Whiteouts share an inode with scratch files of overlayfs; they are made anew.
        let is_linked = stat.links > 1 && !stat.is_whiteout();
        let number = stat.inode.to_string();
        if is_linked {
            match self.links.stat(number.as_bytes()) {
                Ok(first) => return self.link(&number, &first, to, name, stat),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        match stat.kind {
            FileKind::Regular => copy_file(from, to, name, stat)?,
            FileKind::Symlink => {
                file::make_symlink_at(to.as_fd(), name, &from.read_link(name)?)?;
            }
            kind => file::make_node_at(to.as_fd(), name, kind, 0o600, stat.rdev)?,
        }
        if stat.kind != FileKind::Regular {
            copy_metadata_at(from.as_fd(), to.as_fd(), name, stat)?;
        }
        if is_linked {
            file::make_link_at(to.as_fd(), name, self.links.as_fd(), number.as_bytes())?;
        }
        Ok(())
    }

    /// Another name of a file. Its last one is the one that was kept aside: nobody asks for that again, and the
    /// file never has more names than the original, which the file system may just allow.
    fn link(
        &self,
        number: &str,
        first: &Stat,
        to: &Folder,
        name: &[u8],
        stat: &Stat,
    ) -> io::Result<()> {
        let (links, number) = (self.links.as_fd(), number.as_bytes());
        if first.links == stat.links {
            return publish::rename_without_replacing(links, number, to.as_fd(), name);
        }
        file::make_link_at(links, number, to.as_fd(), name)
    }
}

fn copy_file(from: &Folder, to: &Folder, name: &[u8], stat: &Stat) -> io::Result<()> {
    let source = from.open_regular(name)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let target =
        file::open_without_symlinks(to.as_fd(), Path::new(OsStr::from_bytes(name)), flags, 0o600)?;
    copy_bytes(source.as_fd(), target.as_fd(), stat.size)?;
    file::set_owner_at(to.as_fd(), name, stat.uid, stat.gid)?;
    file::set_mode_at(to.as_fd(), name, stat.mode)?;
    // After the owner, whose change takes capabilities away.
    copy_attributes(source.as_fd(), target.as_fd())?;
    file::set_mtime_fd(target.as_fd(), stat.mtime)
}

fn copy_bytes(from: BorrowedFd<'_>, to: BorrowedFd<'_>, size: u64) -> io::Result<()> {
    if size == 0 {
        return Ok(());
    }
    // Zero bytes means to the end.
    match space::clone_range(from, 0, to, 0, 0) {
        Err(error) if sys::reflink::cannot_share(&error) => {}
        shared => return shared,
    }
    space::set_size(to, size)?;
    for data in space::data_ranges(from) {
        let data = data?;
        let end = data.end.min(size);
        copy_range(from, to, data.start, end.saturating_sub(data.start))?;
    }
    Ok(())
}

fn copy_range(from: BorrowedFd<'_>, to: BorrowedFd<'_>, at: u64, bytes: u64) -> io::Result<()> {
    match space::copy_range(from, at, to, at, bytes) {
        Err(error) if sys::reflink::cannot_share(&error) => {}
        copied => return copied,
    }
    let (mut buffer, mut done) = (vec![0; BUFFER_BYTES.min(bytes as usize)], 0);
    while done < bytes {
        let step = buffer.len().min((bytes - done) as usize);
        space::read_exact_at(from, &mut buffer[..step], at + done)?;
        space::write_all_at(to, &buffer[..step], at + done, PageCache::Keep)?;
        done += step as u64;
    }
    Ok(())
}

fn is_copied(name: &[u8]) -> bool {
    name != OWN_NUMBER
}

fn copy_attributes(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
    for name in xattr::list_fd(from)?.iter().filter(|name| is_copied(name)) {
        if let Some(value) = xattr::get_fd(from, name)? {
            xattr::set_fd(to, name, &value, xattr::SetMode::Any)?;
        }
    }
    Ok(())
}

/// Of anything that is never opened.
fn copy_metadata_at(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    name: &[u8],
    stat: &Stat,
) -> io::Result<()> {
    file::set_owner_at(to, name, stat.uid, stat.gid)?;
    if stat.kind != FileKind::Symlink {
        file::set_mode_at(to, name, stat.mode)?;
    }
    for key in xattr::list_at(from, name)?.iter().filter(|key| is_copied(key)) {
        if let Some(value) = xattr::get_at(from, name, key)? {
            xattr::set_at(to, name, key, &value, xattr::SetMode::Any)?;
        }
    }
    file::set_mtime_at(to, name, stat.mtime)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};

    const OPAQUE: &[u8] = b"trusted.overlay.opaque";

    /// What a hostile sandbox may leave, all at once.
    fn make(upper: &Path) -> io::Result<()> {
        let folder = Folder::open(upper)?;
        let deep = upper.join("a/b/c/d");
        std::fs::create_dir_all(&deep)?;
        std::fs::write(deep.join("file"), b"deep")?;
        std::fs::set_permissions(upper.join("a"), std::fs::Permissions::from_mode(0o2751))?;
        xattr::set(&upper.join("a/b"), OPAQUE, b"y", xattr::SetMode::Any)?;
        xattr::set(upper, OWN_NUMBER, b"0123456789abcdef", xattr::SetMode::Any)?;
        symlink("/etc/passwd", upper.join("link"))?;
        symlink("/", upper.join("root"))?;
        file::make_node_at(
            folder.as_fd(),
            b"gone",
            FileKind::CharDevice,
            0,
            file::Device::default(),
        )?;
        file::make_node_at(
            folder.as_fd(),
            b"pipe",
            FileKind::Fifo,
            0o644,
            file::Device::default(),
        )?;
        file::make_node_at(
            folder.as_fd(),
            b"sock",
            FileKind::Socket,
            0o644,
            file::Device::default(),
        )?;
        std::fs::write(upper.join("one"), b"one")?;
        std::fs::hard_link(upper.join("one"), upper.join("a/two"))?;
        std::fs::hard_link(upper.join("one"), deep.join("three"))?;
        file::make_link_at(folder.as_fd(), b"link", folder.as_fd(), b"link2")?;
        // A whiteout that shares its inode with a scratch file elsewhere.
        file::make_link_at(folder.as_fd(), b"gone", folder.as_fd(), b"gone2")?;
        let sparse = std::fs::File::create(upper.join("sparse"))?;
        sparse.set_len(1 << 40)?;
        sparse.write_all_at(b"middle", 1 << 39)?;
        std::fs::write(upper.join("new\nline \u{1b}[2J"), b"")?;
        let program = upper.join("program");
        std::fs::write(&program, b"x")?;
        std::os::unix::fs::chown(&program, Some(70_000), Some(5))?;
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755))?;
        xattr::set(&program, b"user.\xff", b"\0\xff", xattr::SetMode::Any)?;
        file::set_mtime_at(folder.as_fd(), b"program", file::Time { secs: -5, nanos: 7 })?;
        file::set_mtime_at(folder.as_fd(), b"a", file::Time { secs: 9, nanos: 8 })
    }

    fn count(folder: &Path) -> usize {
        std::fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn a_hostile_tree_is_copied_as_it_is_and_nothing_is_followed() {
        let world = tempfile::tempdir_in("/var/tmp").unwrap();
        let (from, to) = (world.path().join("upper"), world.path().join("copy"));
        for folder in [&from, &to] {
            std::fs::create_dir(folder).unwrap();
        }
        make(&from).unwrap();
        copy_tree(&from, &to).unwrap();
        assert_eq!(count(world.path()), 2, "nothing is left beside the copy");
        assert_eq!(std::fs::read(to.join("a/b/c/d/file")).unwrap(), b"deep");
        assert_eq!(std::fs::read_link(to.join("link")).unwrap(), Path::new("/etc/passwd"));
        assert_eq!(count(&to), count(&from));
        let stat = |path: &str| std::fs::symlink_metadata(to.join(path)).unwrap();
        assert_eq!((stat("a").mode() & 0o7777, stat("a").mtime()), (0o2751, 9));
        assert_eq!(xattr::get(&to.join("a/b"), OPAQUE).unwrap().unwrap(), b"y");
        assert_eq!(xattr::get(&to, OWN_NUMBER).unwrap(), None);
        let is_whiteout =
            |name: &[u8]| Folder::open(&to).and_then(|to| to.stat(name)).unwrap().is_whiteout();
        assert!(is_whiteout(b"gone") && is_whiteout(b"gone2"));
        assert_eq!(Folder::open(&to).unwrap().stat(b"pipe").unwrap().kind, FileKind::Fifo);
        assert_eq!(Folder::open(&to).unwrap().stat(b"sock").unwrap().kind, FileKind::Socket);
        let one = stat("one");
        assert_eq!((one.nlink(), one.ino()), (3, stat("a/two").ino()));
        assert_eq!(one.ino(), stat("a/b/c/d/three").ino());
        assert_eq!((stat("link").ino(), stat("link").nlink()), (stat("link2").ino(), 2));
        assert_eq!(stat("sparse").len(), 1 << 40);
        assert!(stat("sparse").blocks() * 512 < 1 << 20, "holes stay holes");
        let mut middle = [0; 6];
        let sparse = std::fs::File::open(to.join("sparse")).unwrap();
        sparse.read_exact_at(&mut middle, 1 << 39).unwrap();
        assert_eq!(&middle, b"middle");
        let program = stat("program");
        assert_eq!((program.uid(), program.gid(), program.mode() & 0o7777), (70_000, 5, 0o4755));
        assert_eq!((program.mtime(), program.mtime_nsec()), (-5, 7));
        let value = xattr::get(&to.join("program"), b"user.\xff").unwrap();
        assert_eq!(value.unwrap(), b"\0\xff");
    }

    #[test]
    fn a_failed_copy_says_so() {
        let world = tempfile::tempdir_in("/var/tmp").unwrap();
        let (from, to) = (world.path().join("upper"), world.path().join("copy"));
        for folder in [&from, &to] {
            std::fs::create_dir(folder).unwrap();
        }
        std::fs::write(from.join("file"), b"new").unwrap();
        std::fs::write(to.join("file"), b"old").unwrap();
        copy_tree(&from, &to).unwrap_err();
        assert_eq!(std::fs::read(to.join("file")).unwrap(), b"old");
        assert_eq!(count(world.path()), 2);
    }
}
