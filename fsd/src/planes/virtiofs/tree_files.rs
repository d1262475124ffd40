//! What a guest's kernel asks of a layer's tree, and the answers.
//!
//! Nothing is kept for an open file or folder, and numbers of inodes are those of the image, so a guest
//! can ask for anything at any time and can make nothing grow.

use crate::planes::fuse::attributes::device_number;
use crate::planes::tree::{self, Folder, LayerTree, Part, Seek};
use layer::Error;
use layer::erofs::reader::{DirEntry as ListedEntry, InodeRecord};
use layer::tree::Kind;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;
use virtiofsd::filesystem::{
    Context, DirEntry, DirectoryIterator, Entry, FileSystem, FsOptions, GetxattrReply,
    ListxattrReply, OpenOptions, SerializableFileSystem, ZeroCopyWriter,
};
use virtiofsd::fuse::Attr;

/// How long the guest may believe an answer: a layer never changes. 34 years.
const FOREVER: Duration = Duration::from_secs(1 << 30);
/// FUSE's number of the root.
const ROOT: u64 = 1;
const BLOCK: u64 = layer::chunk::BLOCK_BYTES as u64;
const DT_DIR: u8 = 4;
/// What a guest's kernel is allowed to ask for at once; the library does not look.
const MAX_READ_BYTES: u32 = 1 << 20;

/// The file system of one layer.
pub struct TreeFiles {
    tree: LayerTree,
    data: File,
}

fn refused(error: &Error) -> io::Error {
    tracing::warn!(error = %error.chain(), "a guest's request was refused");
    errno(error.kind().errno())
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

impl TreeFiles {
    /// Serves this tree, whose files lie in `data`.
    pub fn new(tree: LayerTree, data: File) -> Self {
        Self { tree, data }
    }

    fn number(&self, node: u64) -> u64 {
        if node == ROOT { self.tree.root() } else { node }
    }

    fn record(&self, node: u64) -> io::Result<InodeRecord> {
        self.tree.inode(self.number(node)).map_err(|error| refused(&error))
    }

    /// Answers through a file that ends where the answer does: the library copies out of files only,
    /// and fills the whole of the guest's last buffer when the file goes on.
    fn read_assembled<W: ZeroCopyWriter>(&self, parts: Vec<Part>, to: &mut W) -> io::Result<usize> {
        let mut content = Vec::new();
        for part in parts {
            match part {
                Part::Data { offset, bytes } => {
                    let start = content.len();
                    content.resize(start + bytes as usize, 0);
                    self.data.read_exact_at(&mut content[start..], offset)?;
                }
                Part::Hole(bytes) => content.resize(content.len() + bytes as usize, 0),
                Part::Inline(bytes) => content.extend(bytes),
            }
        }
        let mut file = File::from(sys::memory::memfd("lamella-answer")?);
        file.write_all(&content)?;
        let read = to.read_from_file_at(&file, content.len(), 0, None)?;
        if read == content.len() { Ok(read) } else { Err(errno(libc::EIO)) }
    }
}

fn mode_of(kind: &Kind) -> u32 {
    match kind {
        Kind::Directory(_) => libc::S_IFDIR,
        Kind::Regular(_) => libc::S_IFREG,
        Kind::Symlink(_) => libc::S_IFLNK,
        Kind::CharDevice(_) => libc::S_IFCHR,
        Kind::BlockDevice(_) => libc::S_IFBLK,
        Kind::Fifo => libc::S_IFIFO,
        Kind::Socket => libc::S_IFSOCK,
    }
}

fn attributes(record: &InodeRecord) -> Attr {
    let inode = &record.inode;
    let (seconds, nanos) = (inode.mtime.secs as u64, inode.mtime.nanos);
    Attr {
        ino: record.number,
        size: record.size,
        blocks: record.size.div_ceil(BLOCK) * (BLOCK / 512),
        atime: seconds,
        mtime: seconds,
        ctime: seconds,
        atimensec: nanos,
        mtimensec: nanos,
        ctimensec: nanos,
        mode: mode_of(&inode.kind) | u32::from(inode.mode),
        nlink: record.links,
        uid: inode.uid.into(),
        gid: inode.gid.into(),
        rdev: match inode.kind {
            Kind::CharDevice(rdev) | Kind::BlockDevice(rdev) => device_number(rdev),
            _ => 0,
        },
        blksize: layer::chunk::BLOCK_BYTES,
        flags: 0,
    }
}

/// A folder that is being listed. Positions are the places of the names in it.
pub struct Listing {
    folder: Arc<Folder>,
    number: u64,
    position: u64,
    name: CString,
}

impl Listing {
    fn at(&self, position: u64) -> Option<(u64, u8, &[u8])> {
        match position {
            0 => Some((self.number, DT_DIR, b".")),
            1 => Some((self.folder.parent, DT_DIR, b"..")),
            _ => {
                let index = usize::try_from(position - 2).ok()?;
                let ListedEntry { name, number, file_type } = self.folder.entries.get(index)?;
                Some((*number, *file_type, name))
            }
        }
    }
}

impl DirectoryIterator for Listing {
    fn next(&mut self) -> Option<DirEntry<'_>> {
        let (ino, file_type, name) = self.at(self.position)?;
        // Names of an image hold no zero, as its reader checks.
        self.name = CString::new(name).ok()?;
        self.position += 1;
        Some(DirEntry { ino, offset: self.position, type_: file_type.into(), name: &self.name })
    }
}

impl SerializableFileSystem for TreeFiles {}

impl FileSystem for TreeFiles {
    type Inode = u64;
    type Handle = u64;
    type DirIter = Listing;

    fn init(&self, _capable: FsOptions) -> io::Result<FsOptions> {
        Ok(FsOptions::ASYNC_READ
            | FsOptions::PARALLEL_DIROPS
            | FsOptions::MAX_PAGES
            | FsOptions::CACHE_SYMLINKS
            | FsOptions::POSIX_ACL)
    }

    fn lookup(&self, _: Context, parent: u64, name: &CStr) -> io::Result<Entry> {
        let found = self.tree.lookup(self.number(parent), name.to_bytes());
        let Some(number) = found.map_err(|error| refused(&error))? else {
            return Err(errno(libc::ENOENT));
        };
        Ok(Entry {
            inode: number,
            generation: 0,
            attr: attributes(&self.record(number)?),
            attr_timeout: FOREVER,
            entry_timeout: FOREVER,
        })
    }

    fn getattr(&self, _: Context, node: u64, _: Option<u64>) -> io::Result<(Attr, Duration)> {
        Ok((attributes(&self.record(node)?), FOREVER))
    }

    fn readlink(&self, _: Context, node: u64) -> io::Result<Vec<u8>> {
        match self.record(node)?.inode.kind {
            Kind::Symlink(target) => Ok(target),
            _ => Err(errno(libc::EINVAL)),
        }
    }

    fn open(
        &self,
        _: Context,
        _node: u64,
        _kill_priv: bool,
        flags: u32,
    ) -> io::Result<(Option<u64>, OpenOptions)> {
        if flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32 {
            return Err(errno(libc::EROFS));
        }
        Ok((None, OpenOptions::KEEP_CACHE))
    }

    fn read<W: ZeroCopyWriter>(
        &self,
        _: Context,
        node: u64,
        _: u64,
        mut to: W,
        size: u32,
        offset: u64,
        _: Option<u64>,
        _: u32,
    ) -> io::Result<usize> {
        if size > MAX_READ_BYTES {
            return Err(errno(libc::EINVAL));
        }
        let file = self.tree.file(self.number(node)).map_err(|error| refused(&error))?;
        let parts = tree::parts(&file, offset, u64::from(size));
        match parts[..] {
            [Part::Data { offset, bytes }] if bytes == u64::from(size) => {
                let read = to.read_from_file_at(&self.data, size as usize, offset, None)?;
                // INVARIANT: the export has every byte of the data space, so less is a failure.
                if read == size as usize { Ok(read) } else { Err(errno(libc::EIO)) }
            }
            [] => Ok(0),
            _ => self.read_assembled(parts, &mut to),
        }
    }

    fn opendir(&self, _: Context, _: u64, _: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        Ok((None, OpenOptions::KEEP_CACHE | OpenOptions::CACHE_DIR))
    }

    fn readdir(&self, _: Context, node: u64, _: u64, _: u32, offset: u64) -> io::Result<Listing> {
        let number = self.number(node);
        let folder = self.tree.folder(number).map_err(|error| refused(&error))?;
        Ok(Listing { folder, number, position: offset, name: CString::default() })
    }

    fn getxattr(&self, _: Context, node: u64, name: &CStr, size: u32) -> io::Result<GetxattrReply> {
        let xattrs = self.record(node)?.inode.xattrs;
        let found = xattrs.into_iter().find(|xattr| xattr.name == name.to_bytes());
        let value = found.ok_or_else(|| errno(libc::ENODATA))?.value;
        match size {
            0 => Ok(GetxattrReply::Count(value.len() as u32)),
            _ if value.len() > size as usize => Err(errno(libc::ERANGE)),
            _ => Ok(GetxattrReply::Value(value)),
        }
    }

    fn listxattr(&self, _: Context, node: u64, size: u32) -> io::Result<ListxattrReply> {
        let mut names = Vec::new();
        for xattr in self.record(node)?.inode.xattrs {
            names.extend(xattr.name);
            names.push(0);
        }
        match size {
            0 => Ok(ListxattrReply::Count(names.len() as u32)),
            _ if names.len() > size as usize => Err(errno(libc::ERANGE)),
            _ => Ok(ListxattrReply::Names(names)),
        }
    }

    fn lseek(&self, _: Context, node: u64, _: u64, offset: u64, whence: u32) -> io::Result<u64> {
        let wanted = match whence as i32 {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return Err(errno(libc::EINVAL)),
        };
        let file = self.tree.file(self.number(node)).map_err(|error| refused(&error))?;
        tree::seek(&file, offset, wanted).ok_or_else(|| errno(libc::ENXIO))
    }
}
