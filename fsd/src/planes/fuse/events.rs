//! What the kernel asks of a layer's tree, and the answers.
//!
//! Nothing is kept for an open file or folder: where the kernel allows it, opening asks us nothing at
//! all. Positions in a listing are the places of the names in it, so that seeks of any age are right.

use super::attributes;
use crate::fetch::Engine;
use crate::planes::gather::gather;
use crate::planes::tree::{self, LayerTree, Seek};
use crate::served::ServedLayer;
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyXattr, Request,
};
use layer::tree::Kind;
use layer::{Error, Result};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

/// How long the kernel may believe an answer: a layer never changes. 34 years.
const FOREVER: Duration = Duration::from_secs(1 << 30);
const MAX_NAME_BYTES: u32 = 255;
/// Reads that the kernel may have under way at once, readahead included.
const MAX_BACKGROUND: u16 = 512;
/// The namespace that only root may list.
const TRUSTED: &[u8] = b"trusted.";
/// Namespaces of extended attributes that a layer can hold; all others are not supported.
const NAMESPACES: [&[u8]; 4] = [b"user.", TRUSTED, b"security.", b"system.posix_acl_"];

/// The file system of one layer.
#[derive(Debug)]
pub struct TreeFiles {
    layer: Arc<ServedLayer>,
    tree: LayerTree,
    engine: Engine,
    /// Files need not be opened, and folders neither.
    opens_free: (bool, bool),
}

impl TreeFiles {
    /// Serves this layer.
    pub fn new(layer: Arc<ServedLayer>, tree: LayerTree, engine: Engine) -> Self {
        Self { layer, tree, engine, opens_free: (false, false) }
    }

    /// FUSE's root is always number 1; everything else has the number that it has in the image.
    fn number(&self, node: INodeNo) -> u64 {
        if node == INodeNo::ROOT { self.tree.root() } else { node.0 }
    }

    fn attributes(&self, number: u64) -> Result<FileAttr> {
        Ok(attributes::of(&self.tree.inode(number)?))
    }

    /// As [`Self::attributes`], for a node that the kernel will know by its number.
    fn child(&self, number: u64) -> Result<FileAttr> {
        if number <= INodeNo::ROOT.0 {
            // Where FUSE has its root. Images of ours begin with a superblock, and inodes far behind it.
            return Err(Error::corrupt(format!("an inode has number {number}")));
        }
        self.attributes(number)
    }

    fn refused(&self, error: &Error) -> Errno {
        tracing::error!(layer = %self.layer.id(), error = %error.chain(), "a request was refused");
        Errno::from_i32(error.kind().errno())
    }

    fn xattr(&self, number: u64, name: &[u8]) -> Result<Option<Vec<u8>>> {
        let xattrs = self.tree.inode(number)?.inode.xattrs;
        Ok(xattrs.into_iter().find(|xattr| xattr.name == name).map(|xattr| xattr.value))
    }

    /// The names of the attributes, each with a zero behind it.
    fn xattr_names(&self, number: u64, trusted: bool) -> Result<Vec<u8>> {
        let mut names = Vec::new();
        for xattr in self.tree.inode(number)?.inode.xattrs {
            if trusted || !xattr.name.starts_with(TRUSTED) {
                names.extend(xattr.name);
                names.push(0);
            }
        }
        Ok(names)
    }

    /// Shows the names from position `from` on to `add`, until that says that it has enough.
    fn list(
        &self,
        number: u64,
        from: u64,
        mut add: impl FnMut(u64, u64, Option<FileType>, &OsStr) -> Result<bool>,
    ) -> Result<()> {
        let folder = self.tree.folder(number)?;
        let dots = [(number, "."), (folder.parent, "..")];
        let dots = dots.map(|(number, name)| (number, Some(FileType::Directory), OsStr::new(name)));
        let names = folder.entries.iter().map(|entry| {
            let kind = attributes::listed_kind(entry.file_type);
            (entry.number, kind, OsStr::from_bytes(&entry.name))
        });
        let from = usize::try_from(from).unwrap_or(usize::MAX);
        for (position, (number, kind, name)) in dots.into_iter().chain(names).enumerate().skip(from)
        {
            if add(number, position as u64 + 1, kind, name)? {
                break;
            }
        }
        Ok(())
    }
}

/// Answers with a value as getxattr(2) and listxattr(2) want it.
fn answer_xattr(reply: ReplyXattr, asked: u32, value: &[u8]) {
    match u32::try_from(value.len()) {
        Ok(bytes) if asked == 0 => reply.size(bytes),
        Ok(bytes) if bytes <= asked => reply.data(value),
        _ => reply.error(Errno::ERANGE),
    }
}

impl Filesystem for TreeFiles {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let offered = config.capabilities();
        for wanted in [
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_CACHE_SYMLINKS,
            InitFlags::FUSE_POSIX_ACL,
            InitFlags::FUSE_ASYNC_DIO,
        ] {
            // What the kernel does not offer is only slower; rights are checked by mode then.
            let _ = config.add_capabilities(wanted & offered);
        }
        let _ = config.set_max_background(MAX_BACKGROUND);
        self.opens_free = (
            offered.contains(InitFlags::FUSE_NO_OPEN_SUPPORT),
            offered.contains(InitFlags::FUSE_NO_OPENDIR_SUPPORT),
        );
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name.len() > MAX_NAME_BYTES as usize {
            return reply.error(Errno::ENAMETOOLONG);
        }
        let found = self.tree.lookup(self.number(parent), name.as_bytes());
        let found = found.and_then(|number| number.map(|number| self.child(number)).transpose());
        match found {
            Ok(found) => {
                let attributes = found.unwrap_or_else(attributes::of_nothing);
                reply.entry(&FOREVER, &attributes, Generation(0));
            }
            Err(error) => reply.error(self.refused(&error)),
        }
    }

    fn getattr(
        &self,
        _request: &Request,
        node: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        match self.attributes(self.number(node)) {
            Ok(attributes) => reply.attr(&FOREVER, &attributes),
            Err(error) => reply.error(self.refused(&error)),
        }
    }

    fn readlink(&self, _request: &Request, node: INodeNo, reply: ReplyData) {
        match self.tree.inode(self.number(node)).map(|record| record.inode.kind) {
            Ok(Kind::Symlink(target)) => reply.data(&target),
            Ok(_) => reply.error(Errno::EINVAL),
            Err(error) => reply.error(self.refused(&error)),
        }
    }

    fn open(&self, _request: &Request, _node: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        if self.opens_free.0 {
            // Nobody opens ever again, and the page cache is kept.
            return reply.error(Errno::ENOSYS);
        }
        reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE);
    }

    fn read(
        &self,
        _request: &Request,
        node: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let parts = match self.tree.file(self.number(node)) {
            Ok(file) => tree::parts(&file, offset, u64::from(size)),
            Err(error) => return reply.error(self.refused(&error)),
        };
        let id = self.layer.id();
        gather(&self.engine, &self.layer, parts, move |result| match result {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => {
                tracing::error!(layer = %id, error = %error.chain(), "a read was refused");
                reply.error(Errno::from_i32(error.kind().errno()));
            }
        });
    }

    fn flush(
        &self,
        _request: &Request,
        _node: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // There is nothing to flush: nobody asks ever again.
        reply.error(Errno::ENOSYS);
    }

    fn fsync(
        &self,
        _request: &Request,
        _node: INodeNo,
        _handle: FileHandle,
        _only_data: bool,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        _node: INodeNo,
        _handle: FileHandle,
        _only_data: bool,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn opendir(&self, _request: &Request, _node: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        if self.opens_free.1 {
            return reply.error(Errno::ENOSYS);
        }
        let flags = FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_CACHE_DIR;
        reply.opened(FileHandle(0), flags);
    }

    fn readdir(
        &self,
        _request: &Request,
        node: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listed = self.list(self.number(node), offset, |number, next, kind, name| {
            let kind = match kind {
                Some(kind) => kind,
                None => self.attributes(number)?.kind,
            };
            Ok(reply.add(INodeNo(number), next, kind, name))
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(self.refused(&error)),
        }
    }

    fn readdirplus(
        &self,
        _request: &Request,
        node: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let listed = self.list(self.number(node), offset, |number, next, _, name| {
            let attributes = self.child(number)?;
            let node = INodeNo(number);
            Ok(reply.add(node, next, name, &FOREVER, &attributes, Generation(0)))
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(self.refused(&error)),
        }
    }

    fn statfs(&self, _request: &Request, _node: INodeNo, reply: ReplyStatfs) {
        let block = layer::chunk::BLOCK_BYTES;
        reply.statfs(self.tree.blocks(), 0, 0, self.tree.inodes(), 0, block, MAX_NAME_BYTES, block);
    }

    fn getxattr(
        &self,
        _request: &Request,
        node: INodeNo,
        name: &OsStr,
        size: u32,
        reply: ReplyXattr,
    ) {
        let name = name.as_bytes();
        if !NAMESPACES.iter().any(|namespace| name.starts_with(namespace)) {
            return reply.error(Errno::EOPNOTSUPP);
        }
        match self.xattr(self.number(node), name) {
            Ok(Some(value)) => answer_xattr(reply, size, &value),
            Ok(None) => reply.error(Errno::ENODATA),
            Err(error) => reply.error(self.refused(&error)),
        }
    }

    fn listxattr(&self, request: &Request, node: INodeNo, size: u32, reply: ReplyXattr) {
        match self.xattr_names(self.number(node), request.uid() == 0) {
            Ok(names) => answer_xattr(reply, size, &names),
            Err(error) => reply.error(self.refused(&error)),
        }
    }

    fn lseek(
        &self,
        _request: &Request,
        node: INodeNo,
        _handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        // linux/fs.h SEEK_DATA and SEEK_HOLE; the kernel does the others itself.
        let wanted = match whence {
            3 => Seek::Data,
            4 => Seek::Hole,
            _ => return reply.error(Errno::EINVAL),
        };
        let Ok(offset) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        match self.tree.file(self.number(node)) {
            Ok(file) => match tree::seek(&file, offset, wanted) {
                // INVARIANT: a size, and so every place in a file, is below 2^63.
                Some(found) => reply.offset(found.cast_signed()),
                None => reply.error(Errno::ENXIO),
            },
            Err(error) => reply.error(self.refused(&error)),
        }
    }
}
