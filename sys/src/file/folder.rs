//! Walking and removing trees through descriptors of folders, so that no rename or symlink that
//! somebody slips in can lead out of the tree.

use super::{FileKind, Stat, stat_at, stat_fd};
use rustix::fs::{AtFlags, Mode, OFlags, RawDir, SeekFrom};
use std::io;
use std::mem::MaybeUninit;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

const BUFFER_BYTES: usize = 32 * 1024;

/// One name in a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The name: any bytes but zero and slash.
    pub name: Vec<u8>,
    /// The kind, where the file system says it while listing.
    pub kind: Option<FileKind>,
    /// Inode number of the entry; on an overlay or a mount point it can differ from `stat`'s.
    pub inode: u64,
}

/// An open folder.
#[derive(Debug)]
pub struct Folder {
    fd: OwnedFd,
}

impl Folder {
    /// Opens a folder by path; a trailing symlink is followed.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { fd: rustix::fs::open(path, flags, Mode::empty())? })
    }

    /// Opens a folder in this one. ENOTDIR for everything else, symlinks included.
    pub fn open_folder(&self, name: &[u8]) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Self { fd: rustix::fs::openat(&self.fd, name, flags, Mode::empty())? })
    }

    /// Takes over a descriptor that is open for reading. ENOTDIR when it is no folder.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        if stat_fd(fd.as_fd())?.kind != FileKind::Directory {
            return Err(io::Error::from_raw_os_error(libc::ENOTDIR));
        }
        Ok(Self { fd })
    }

    /// Gives up the descriptor.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Opens a regular file for reading. Nothing else is ever opened for real: no symlink is
    /// followed, no pipe waits, no device wakes; they are `InvalidInput`.
    pub fn open_regular(&self, name: &[u8]) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let flags = flags | OFlags::CLOEXEC;
        // Looked at first, because opening a device can have effects.
        if stat_at(self.fd.as_fd(), name)?.kind != FileKind::Regular {
            return Err(not_regular(name));
        }
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::empty())?;
        if stat_fd(fd.as_fd())?.kind != FileKind::Regular {
            return Err(not_regular(name));
        }
        Ok(fd)
    }

    /// Metadata of a name in this folder; a symlink is not followed.
    pub fn stat(&self, name: &[u8]) -> io::Result<Stat> {
        stat_at(self.fd.as_fd(), name)
    }

    /// Metadata of the folder itself.
    pub fn stat_self(&self) -> io::Result<Stat> {
        stat_fd(self.fd.as_fd())
    }

    /// The target of a symlink in this folder.
    pub fn read_link(&self, name: &[u8]) -> io::Result<Vec<u8>> {
        super::read_link_at(self.fd.as_fd(), name)
    }

    /// Calls `visit` for each entry but `.` and `..`, in the file system's order, from the start.
    ///
    /// Memory is bounded whatever the size of the folder. One listing of a `Folder` at a time: the
    /// position is the descriptor's.
    pub fn visit(&self, visit: &mut dyn FnMut(Entry) -> io::Result<()>) -> io::Result<()> {
        self.visit_until(&mut |entry| visit(entry).map(|()| ControlFlow::Continue(())))
    }

    /// [`Folder::visit`] that can end early.
    pub fn visit_until(
        &self,
        visit: &mut dyn FnMut(Entry) -> io::Result<ControlFlow<()>>,
    ) -> io::Result<()> {
        rustix::fs::seek(&self.fd, SeekFrom::Start(0))?;
        let mut buffer = vec![MaybeUninit::uninit(); BUFFER_BYTES];
        let mut listing = RawDir::new(&self.fd, &mut buffer);
        while let Some(entry) = listing.next() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            let kind = kind_of(entry.file_type());
            if visit(Entry { name: name.to_vec(), kind, inode: entry.ino() })?.is_break() {
                break;
            }
        }
        Ok(())
    }

    /// The first names, at most [`MAX_BATCH`].
    fn first_names(&self) -> io::Result<Vec<Vec<u8>>> {
        let mut names = Vec::new();
        self.visit_until(&mut |entry| {
            names.push(entry.name);
            Ok(if names.len() < MAX_BATCH {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            })
        })?;
        Ok(names)
    }

    /// All entries but `.` and `..`, sorted by name.
    pub fn entries(&self) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        self.visit(&mut |entry| {
            entries.push(entry);
            Ok(())
        })?;
        entries.sort_by(|left, right| left.name.cmp(&right.name));
        Ok(entries)
    }

    /// Removes a name that is no folder; false when it does not exist.
    pub fn remove_file(&self, name: &[u8]) -> io::Result<bool> {
        found(rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()))
    }

    /// Removes an empty folder; false when it does not exist.
    pub fn remove_folder(&self, name: &[u8]) -> io::Result<bool> {
        found(rustix::fs::unlinkat(&self.fd, name, AtFlags::REMOVEDIR))
    }

    /// Removes whatever the name is, with all below it; false when it does not exist.
    ///
    /// Uses three descriptors and no recursion, however deep hostile code nested the folders: a folder
    /// that is not empty is first moved up to the top of the tree that is removed. Mounts inside are
    /// EBUSY and never entered. What is removed while something else adds to it can fail with
    /// ENOTEMPTY.
    // CRASH: a half-removed tree is still a tree under the same name; removing it again finishes.
    pub fn remove_tree(&self, name: &[u8]) -> io::Result<bool> {
        let Some(kind) = missing_is_none(self.stat(name).map(|stat| stat.kind))? else {
            return Ok(false);
        };
        if kind != FileKind::Directory {
            return self.remove_file(name);
        }
        let top = self.open_folder(name)?;
        let mount_id = top.stat_self()?.mount_id;
        let mut moved = 0u64;
        loop {
            // Names are taken first: removing while listing can skip entries on some file systems.
            let batch = top.first_names()?;
            if batch.is_empty() {
                return self.remove_folder(name);
            }
            for entry in batch {
                top.empty_and_remove(&entry, &top, mount_id, &mut moved)?;
            }
        }
    }

    /// Removes one entry of `self`; folders inside it move up to `top`.
    fn empty_and_remove(
        &self,
        name: &[u8],
        top: &Self,
        mount_id: u64,
        moved: &mut u64,
    ) -> io::Result<()> {
        if self.remove_leaf(name)? {
            return Ok(());
        }
        let folder = self.open_folder(name)?;
        if folder.stat_self()?.mount_id != mount_id {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        loop {
            let batch = folder.first_names()?;
            if batch.is_empty() {
                self.remove_folder(name)?;
                return Ok(());
            }
            for entry in batch {
                if !folder.remove_leaf(&entry)? {
                    folder.move_up(&entry, top, moved)?;
                }
            }
        }
    }

    /// Removes a file or an empty folder; false when it is a folder with something in it.
    fn remove_leaf(&self, name: &[u8]) -> io::Result<bool> {
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => return Ok(true),
            Err(rustix::io::Errno::ISDIR) => {}
            Err(error) => return Err(error.into()),
        }
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(true),
            Err(rustix::io::Errno::NOTEMPTY | rustix::io::Errno::EXIST) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn move_up(&self, name: &[u8], top: &Self, moved: &mut u64) -> io::Result<()> {
        loop {
            let to = format!("removed-{moved}");
            *moved += 1;
            let (from, into) = (self.fd.as_fd(), top.fd.as_fd());
            match super::publish::rename_without_replacing(from, name, into, to.as_bytes()) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                result => return result,
            }
        }
    }
}

/// Names that a removal holds in memory at once.
const MAX_BATCH: usize = 4096;

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn kind_of(file_type: rustix::fs::FileType) -> Option<FileKind> {
    use rustix::fs::FileType;
    match file_type {
        FileType::RegularFile => Some(FileKind::Regular),
        FileType::Directory => Some(FileKind::Directory),
        FileType::Symlink => Some(FileKind::Symlink),
        FileType::CharacterDevice => Some(FileKind::CharDevice),
        FileType::BlockDevice => Some(FileKind::BlockDevice),
        FileType::Fifo => Some(FileKind::Fifo),
        FileType::Socket => Some(FileKind::Socket),
        FileType::Unknown => None,
    }
}

fn not_regular(name: &[u8]) -> io::Error {
    let name = String::from_utf8_lossy(name);
    io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?} is no regular file"))
}

fn found(result: rustix::io::Result<()>) -> io::Result<bool> {
    missing_is_none(result.map_err(io::Error::from)).map(|done| done.is_some())
}

fn missing_is_none<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
