//! A directory as a source: every inode below it, with its metadata and its holes.
//!
//! Race-safe: each directory is opened by its path below the root through no symbolic link and must be
//! the inode that was listed; each entry is pinned by a descriptor before anything about it is read, so
//! type, owner and attributes are those of one inode. A tree that changes meanwhile gives an error.
//! Directories wait in a list, not in open descriptors: depth costs memory only.

use crate::content::{Content, Origin, Place, Stamp, changed};
use crate::index::{Index, Node, NodeIx, NodeKind, foreign_whiteout};
use crate::options::BuildOptions;
use crate::path;
use crate::progress::Progress;
use crate::xattr::{self, Marks, Policy};
use layer::tree::{Rdev, Timestamp, Xattr};
use layer::{Context, Error, ErrorKind, Result};
use rustix::fs::{Dir, FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// The kernel's limit for the names of an inode's attributes together, and for one value.
const XATTR_BYTES: usize = 65_536;

/// What a walk found.
#[derive(Debug)]
pub(crate) struct Walked {
    /// The tree.
    pub index: Index,
    /// Directories that show what lower layers have elsewhere, and where (raw attribute values).
    pub redirects: BTreeMap<NodeIx, Vec<u8>>,
}

/// Lists a directory.
pub fn load(path: &Path, options: &BuildOptions, progress: &dyn Progress) -> Result<Index> {
    Ok(walk(path, Policy::Foreign, options, progress, |_, _| true)?.index)
}

/// Lists a directory. `keep` is asked for each path (with whether it is a directory) before anything
/// below is read. Under [`Policy::Upper`] overlay marks become values of their own.
pub(crate) fn walk(
    path: &Path,
    policy: Policy,
    options: &BuildOptions,
    progress: &dyn Progress,
    keep: impl FnMut(&[u8], bool) -> bool,
) -> Result<Walked> {
    let name = path.display().to_string();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(path, flags, Mode::empty())
        .map_err(std::io::Error::from)
        .context(|| format!("open {name}"))?;
    let own = root.try_clone().context(|| format!("open {name}"))?;
    let mut index = Index::new();
    let origin = index.add_origin(Origin::Directory { root: own, name });
    let mut walker = Walker {
        root,
        index,
        origin,
        policy,
        links: HashMap::new(),
        pending: Vec::new(),
        redirects: BTreeMap::new(),
        buffer: vec![0; XATTR_BYTES],
        keep,
        progress,
    };
    walker.root()?;
    while let Some(directory) = walker.pending.pop() {
        options.cancel.check()?;
        walker.directory(&directory)?;
    }
    Ok(Walked { index: walker.index, redirects: walker.redirects })
}

/// A directory that is known and not listed yet.
struct Pending {
    node: NodeIx,
    path: Vec<u8>,
    stamp: Stamp,
}

struct Walker<'a, K> {
    root: OwnedFd,
    index: Index,
    origin: u32,
    policy: Policy,
    /// Inodes with more than one name.
    links: HashMap<(u64, u64), NodeIx>,
    pending: Vec<Pending>,
    redirects: BTreeMap<NodeIx, Vec<u8>>,
    buffer: Vec<u8>,
    keep: K,
    progress: &'a dyn Progress,
}

impl<K: FnMut(&[u8], bool) -> bool> Walker<'_, K> {
    fn root(&mut self) -> Result<()> {
        let fd = self.open(b"", OFlags::PATH)?;
        let stat = stat(&fd, b"")?;
        let (node, marks) = self.describe(&fd, &stat, b"")?;
        self.index.describe_root(node);
        if let Some(redirect) = marks.redirect {
            self.redirects.insert(NodeIx::ROOT, redirect);
        }
        let stamp = Stamp::of(&stat);
        self.pending.push(Pending { node: NodeIx::ROOT, path: Vec::new(), stamp });
        Ok(())
    }

    fn directory(&mut self, directory: &Pending) -> Result<()> {
        let path = &directory.path;
        let fd = self.open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW)?;
        if Stamp::of(&stat(&fd, path)?) != directory.stamp {
            return Err(changed(path));
        }
        let entries = Dir::read_from(&fd).map_err(|error| list_error(path, error))?;
        for entry in entries {
            let entry = entry.map_err(|error| list_error(path, error))?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                self.entry(directory, &fd, name)?;
            }
        }
        if Stamp::of(&stat(&fd, path)?) != directory.stamp {
            return Err(changed(path));
        }
        Ok(())
    }

    fn entry(&mut self, directory: &Pending, parent: &OwnedFd, name: &[u8]) -> Result<()> {
        let path = path::join(&directory.path, name);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(parent, name, flags, Mode::empty())
            .map_err(|error| open_error(&path, error))?;
        let stat = stat(&fd, &path)?;
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if !(self.keep)(&path, is_directory) {
            return Ok(());
        }
        let key = (stat.st_dev, stat.st_ino);
        if !is_directory
            && stat.st_nlink > 1
            && let Some(&ix) = self.links.get(&key)
        {
            return self.index.link(directory.node, name, ix);
        }
        let (mut node, marks) = self.describe(&fd, &stat, &path)?;
        if marks.whiteout && stat.st_size == 0 && matches!(node.kind, NodeKind::Regular(_)) {
            node = Node::bare(NodeKind::Whiteout);
        }
        // Overlayfs links all its whiteouts to one inode.
        let shared = node.kind != NodeKind::Whiteout;
        let ix = self.index.put(directory.node, name, node)?;
        self.progress.advance(1, 0);
        if is_directory {
            if let Some(redirect) = marks.redirect {
                self.redirects.insert(ix, redirect);
            }
            self.pending.push(Pending { node: ix, path, stamp: Stamp::of(&stat) });
        } else if shared && stat.st_nlink > 1 {
            self.links.insert(key, ix);
        }
        Ok(())
    }

    fn describe(&mut self, fd: &OwnedFd, stat: &Stat, path: &[u8]) -> Result<(Node, Marks)> {
        let raw = self.xattrs(fd, path)?;
        let (xattrs, marks) = xattr::admit(self.policy, path, raw, self.progress)?;
        let node = Node {
            mode: (stat.st_mode & 0o7777) as u16,
            uid: stat.st_uid,
            gid: stat.st_gid,
            mtime: Timestamp { secs: stat.st_mtime, nanos: stat.st_mtime_nsec as u32 },
            xattrs,
            implied: false,
            opaque: marks.opaque,
            kind: self.kind(fd, stat, path)?,
        };
        Ok((node, marks))
    }

    fn kind(&self, fd: &OwnedFd, stat: &Stat, path: &[u8]) -> Result<NodeKind> {
        let rdev =
            Rdev { major: rustix::fs::major(stat.st_rdev), minor: rustix::fs::minor(stat.st_rdev) };
        Ok(match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => NodeKind::Directory(BTreeMap::new()),
            FileType::RegularFile => NodeKind::Regular(Content {
                size: stat.st_size.cast_unsigned(),
                place: Place::File {
                    origin: self.origin,
                    path: path.into(),
                    stamp: Stamp::of(stat),
                    data: data_ranges(fd, stat, path)?,
                },
            }),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(fd, "", Vec::new())
                    .map_err(|error| open_error(path, error))?;
                NodeKind::Symlink(target.into_bytes())
            }
            FileType::CharacterDevice if rdev == Rdev::WHITEOUT => match self.policy {
                Policy::Upper => NodeKind::Whiteout,
                Policy::Foreign => return Err(foreign_whiteout(path)),
            },
            FileType::CharacterDevice => NodeKind::CharDevice(rdev),
            FileType::BlockDevice => NodeKind::BlockDevice(rdev),
            FileType::Fifo => NodeKind::Fifo,
            FileType::Socket => NodeKind::Socket,
            FileType::Unknown => {
                let text = format!("{} is of no known type", path::show(path));
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
        })
    }

    fn open(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd> {
        path::open_below(&self.root, path, flags, Mode::empty())
            .map_err(|error| open_error(path, error))
    }

    /// Reads attributes through the descriptor's entry in /proc, which works for every type.
    fn xattrs(&mut self, fd: &OwnedFd, at: &[u8]) -> Result<Vec<Xattr>> {
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let names = match rustix::fs::listxattr(&link, &mut self.buffer[..]) {
            Ok(0) | Err(Errno::NOTSUP) => return Ok(Vec::new()),
            Ok(length) => self.buffer[..length].to_vec(),
            Err(error) => return Err(xattr_error(at, error)),
        };
        let mut xattrs = Vec::new();
        for name in names.split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
            match rustix::fs::getxattr(&link, name, &mut self.buffer[..]) {
                Ok(length) => xattrs
                    .push(Xattr { name: name.to_vec(), value: self.buffer[..length].to_vec() }),
                Err(Errno::NODATA) => return Err(changed(at)),
                Err(error) => return Err(xattr_error(at, error)),
            }
        }
        Ok(xattrs)
    }
}

/// Where a file with fewer blocks than bytes has data; `None` when it has no holes.
fn data_ranges(fd: &OwnedFd, stat: &Stat, path: &[u8]) -> Result<Option<Vec<(u64, u64)>>> {
    let size = stat.st_size.cast_unsigned();
    if size == 0 || stat.st_blocks.cast_unsigned().saturating_mul(512) >= size {
        return Ok(None);
    }
    // Reopens the very inode that the descriptor pins.
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let file = rustix::fs::open(link, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| open_error(path, error))?;
    let mut ranges = Vec::new();
    let mut offset = 0;
    while offset < size {
        let start = match rustix::fs::seek(&file, SeekFrom::Data(offset)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            // A file system that knows no holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(None),
            Err(error) => return Err(open_error(path, error)),
        };
        let end = rustix::fs::seek(&file, SeekFrom::Hole(start))
            .map_err(|error| open_error(path, error))?
            .min(size);
        if end <= start {
            break;
        }
        ranges.push((start, end - start));
        offset = end;
    }
    Ok((ranges != [(0, size)]).then_some(ranges))
}

fn stat(fd: &OwnedFd, path: &[u8]) -> Result<Stat> {
    rustix::fs::fstat(fd)
        .map_err(std::io::Error::from)
        .context(|| format!("stat {}", path::show(path)))
}

fn open_error(path: &[u8], error: Errno) -> Error {
    match error {
        // It was listed a moment ago.
        Errno::NOENT | Errno::LOOP | Errno::NOTDIR => changed(path).with_source(error),
        error => Error::io(format!("open {}", path::show(path)), error.into()),
    }
}

fn list_error(path: &[u8], error: Errno) -> Error {
    Error::io(format!("list {}", path::show(path)), error.into())
}

fn xattr_error(path: &[u8], error: Errno) -> Error {
    Error::io(format!("attributes of {}", path::show(path)), error.into())
}
