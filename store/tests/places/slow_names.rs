//! A file system for tests that lacks what 3FS lacks and is late where 3FS is late, over FUSE.
//!
//! It has: files, directories, hard links, renames without flags. It has not: renames with flags, fallocate,
//! copy_file_range, seeks for holes, locks (ENOSYS), xattrs (EOPNOTSUPP), flushes of directories, devices,
//! symlinks. Attributes and names are believed for 30 s, absences for one. The length of a file that is being
//! written is 0 for whoever looks it up, until it is flushed or closed. One tree can be mounted several
//! times: then every mount is a client with a memory of its own.
//!
//! Locking: one lock around the whole tree. Nothing survives the process.

use fuser::{
    BackgroundSession, CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen,
    ReplyWrite, ReplyXattr, Request, Session, TimeOrNow, WriteFlags,
};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// For how long a client believes what a name is, and how long a file is.
const BELIEVED: Duration = Duration::from_secs(30);
/// For how long it believes that a name is absent. In 3FS 5 s, which tests would have to wait for.
const ABSENT: Duration = Duration::from_secs(1);

enum Body {
    Folder(BTreeMap<OsString, u64>),
    /// Content, and the length that others see.
    File {
        bytes: Vec<u8>,
        seen: u64,
        links: u32,
    },
}

struct Tree {
    nodes: HashMap<u64, Body>,
    next: u64,
    /// How often something was asked that 3FS has not.
    refused: Vec<&'static str>,
}

/// The state behind all mounts.
#[derive(Clone)]
pub struct Shared(Arc<Mutex<Tree>>);

impl Shared {
    pub fn new() -> Self {
        let root = (INodeNo::ROOT.0, Body::Folder(BTreeMap::new()));
        let tree = Tree { nodes: [root].into(), next: 2, refused: Vec::new() };
        Self(Arc::new(Mutex::new(tree)))
    }

    /// Mounts the tree. The mount goes with what is returned.
    pub fn mount(&self, at: &Path) -> BackgroundSession {
        let mut config = fuser::Config::default();
        config.mount_options =
            vec![MountOption::FSName("slow-names".to_owned()), MountOption::NoAtime];
        let session = Session::new(Client(self.clone()), at, &config).unwrap();
        session.spawn().unwrap()
    }

    /// What was asked for in vain.
    pub fn refused(&self) -> Vec<&'static str> {
        self.tree().refused.clone()
    }

    fn tree(&self) -> MutexGuard<'_, Tree> {
        self.0.lock().unwrap()
    }

    fn refuse(&self, what: &'static str) -> Errno {
        self.tree().refused.push(what);
        Errno::ENOSYS
    }
}

struct Client(Shared);

impl Tree {
    fn attributes(&self, number: u64) -> Result<FileAttr, Errno> {
        let (kind, perm, size, nlink) = match self.nodes.get(&number).ok_or(Errno::ENOENT)? {
            Body::Folder(_) => (FileType::Directory, 0o755, 0, 2),
            Body::File { seen, links, .. } => (FileType::RegularFile, 0o644, *seen, *links),
        };
        Ok(FileAttr {
            ino: INodeNo(number),
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 1 << 20,
            flags: 0,
        })
    }

    fn folder(&mut self, number: u64) -> Result<&mut BTreeMap<OsString, u64>, Errno> {
        match self.nodes.get_mut(&number) {
            Some(Body::Folder(names)) => Ok(names),
            Some(Body::File { .. }) => Err(Errno::ENOTDIR),
            None => Err(Errno::ENOENT),
        }
    }

    fn add(&mut self, parent: u64, name: &OsStr, body: Body) -> Result<FileAttr, Errno> {
        let number = self.next;
        let names = self.folder(parent)?;
        if names.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        names.insert(name.to_owned(), number);
        self.next += 1;
        self.nodes.insert(number, body);
        self.attributes(number)
    }

    fn link(&mut self, number: u64, parent: u64, name: &OsStr) -> Result<FileAttr, Errno> {
        let names = self.folder(parent)?;
        if names.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        names.insert(name.to_owned(), number);
        if let Some(Body::File { links, .. }) = self.nodes.get_mut(&number) {
            *links += 1;
        }
        self.attributes(number)
    }

    /// The node stays, as somebody may have it open; its memory is the test's.
    fn remove(&mut self, parent: u64, name: &OsStr) -> Result<(), Errno> {
        let number = *self.folder(parent)?.get(name).ok_or(Errno::ENOENT)?;
        if let Some(Body::File { links, .. }) = self.nodes.get_mut(&number) {
            *links -= 1;
        } else if !self.folder(number)?.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        self.folder(parent)?.remove(name);
        Ok(())
    }

    /// What was written becomes what others see.
    fn settle(&mut self, number: u64) {
        if let Some(Body::File { bytes, seen, .. }) = self.nodes.get_mut(&number) {
            *seen = bytes.len() as u64;
        }
    }
}

fn answer_entry(reply: ReplyEntry, result: Result<FileAttr, Errno>) {
    match result {
        Ok(attributes) => reply.entry(&BELIEVED, &attributes, Generation(0)),
        Err(errno) => reply.error(errno),
    }
}

fn answer(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

impl Filesystem for Client {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let mut tree = self.0.tree();
        let found = tree.folder(parent.0).map(|names| names.get(name).copied());
        match found {
            Ok(Some(number)) => answer_entry(reply, tree.attributes(number)),
            Ok(None) => {
                // Number 0 is an absence that may be remembered.
                let nothing = tree
                    .attributes(INodeNo::ROOT.0)
                    .map(|root| FileAttr { ino: INodeNo(0), ..root });
                match nothing {
                    Ok(nothing) => reply.entry(&ABSENT, &nothing, Generation(0)),
                    Err(errno) => reply.error(errno),
                }
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.0.tree().attributes(node.0) {
            Ok(attributes) => reply.attr(&BELIEVED, &attributes),
            Err(errno) => reply.error(errno),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        node: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mut tree = self.0.tree();
        if let (Some(size), Some(Body::File { bytes, .. })) = (size, tree.nodes.get_mut(&node.0)) {
            bytes.resize(size as usize, 0);
            tree.settle(node.0);
        }
        match tree.attributes(node.0) {
            Ok(attributes) => reply.attr(&BELIEVED, &attributes),
            Err(errno) => reply.error(errno),
        }
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        answer_entry(reply, self.0.tree().add(parent.0, name, Body::Folder(BTreeMap::new())));
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(reply, self.0.tree().remove(parent.0, name));
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(reply, self.0.tree().remove(parent.0, name));
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        if !flags.is_empty() {
            return reply.error(self.0.refuse("rename flags"));
        }
        let mut tree = self.0.tree();
        let moved = tree.folder(parent.0).and_then(|names| names.remove(name).ok_or(Errno::ENOENT));
        let placed = moved.and_then(|number| {
            tree.folder(new_parent.0).map(|names| names.insert(new_name.to_owned(), number))
        });
        answer(reply, placed.map(drop));
    }

    fn link(&self, _: &Request, node: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        answer_entry(reply, self.0.tree().link(node.0, parent.0, name));
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        _: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        let body = Body::File { bytes: Vec::new(), seen: 0, links: 1 };
        match self.0.tree().add(parent.0, name, body) {
            Ok(attributes) => reply.created(
                &BELIEVED,
                &attributes,
                Generation(0),
                FileHandle(0),
                FopenFlags::empty(),
            ),
            Err(errno) => reply.error(errno),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn read(
        &self,
        _: &Request,
        node: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.0.tree().nodes.get(&node.0) {
            Some(Body::File { bytes, .. }) => {
                let start = (offset as usize).min(bytes.len());
                reply.data(&bytes[start..bytes.len().min(start + size as usize)]);
            }
            _ => reply.error(Errno::EISDIR),
        }
    }

    fn write(
        &self,
        _: &Request,
        node: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.0.tree().nodes.get_mut(&node.0) {
            Some(Body::File { bytes, .. }) => {
                let end = offset as usize + data.len();
                bytes.resize(bytes.len().max(end), 0);
                bytes[offset as usize..end].copy_from_slice(data);
                reply.written(data.len() as u32);
            }
            _ => reply.error(Errno::EISDIR),
        }
    }

    fn flush(&self, _: &Request, node: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.0.tree().settle(node.0);
        reply.ok();
    }

    fn fsync(&self, _: &Request, node: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.0.tree().settle(node.0);
        reply.ok();
    }

    fn readdir(
        &self,
        _: &Request,
        node: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let mut tree = self.0.tree();
        let names: Vec<(OsString, u64)> = match tree.folder(node.0) {
            Ok(names) => names.iter().map(|(name, number)| (name.clone(), *number)).collect(),
            Err(errno) => return reply.error(errno),
        };
        for (position, (name, number)) in names.into_iter().enumerate().skip(offset as usize) {
            let kind = match tree.nodes.get(&number) {
                Some(Body::Folder(_)) => FileType::Directory,
                _ => FileType::RegularFile,
            };
            if reply.add(INodeNo(number), position as u64 + 1, kind, &name) {
                break;
            }
        }
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        // The store flushes directories where it can; 3FS cannot, and need not.
        reply.error(Errno::ENOSYS);
    }

    fn setxattr(
        &self,
        _: &Request,
        _: INodeNo,
        _: &OsStr,
        _: &[u8],
        _: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        self.0.refuse("xattr");
        reply.error(Errno::EOPNOTSUPP);
    }

    fn getxattr(&self, _: &Request, _: INodeNo, name: &OsStr, _: u32, reply: ReplyXattr) {
        // The kernel itself asks for this one before every write.
        if name != "security.capability" {
            self.0.refuse("xattr");
        }
        reply.error(Errno::EOPNOTSUPP);
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u64,
        _: i32,
        reply: ReplyEmpty,
    ) {
        reply.error(self.0.refuse("fallocate"));
    }

    fn lseek(&self, _: &Request, _: INodeNo, _: FileHandle, _: i64, _: i32, reply: ReplyLseek) {
        reply.error(self.0.refuse("seek for holes"));
    }

    fn copy_file_range(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        reply.error(self.0.refuse("copy_file_range"));
    }

    fn setlk(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: LockOwner,
        _: u64,
        _: u64,
        _: i32,
        _: u32,
        _: bool,
        reply: ReplyEmpty,
    ) {
        reply.error(self.0.refuse("lock"));
    }
}
