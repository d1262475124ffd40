//! The FUSE file system: one folder, one file for each layer that is served, named by its id.
//!
//! A read whose range is present is answered at once; any other by the fill thread that brings the
//! last chunk of it. While the cache disk is full, reads are answered from memory and nothing is kept.
//!
//! Locking: the table of files is read on every request and written on attach and release.

use crate::fetch::{Class, Engine, Failure, Met};
use crate::served::ServedLayer;
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};
use layer::{ErrorKind, LayerId, Result};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, UNIX_EPOCH};

/// How long the kernel may believe an answer: files appear and vanish with attaches.
const BELIEVED: Duration = Duration::ZERO;

/// The layers that have a file.
#[derive(Debug, Default)]
pub struct Files {
    by_number: RwLock<HashMap<u64, Arc<ServedLayer>>>,
    last: AtomicU64,
}

impl Files {
    /// Gives a layer a file; false when it has one.
    pub fn insert(&self, layer: &Arc<ServedLayer>) -> bool {
        let mut files = self.by_number.write().unwrap_or_else(PoisonError::into_inner);
        if files.values().any(|file| Arc::ptr_eq(file, layer)) {
            return false;
        }
        // 1 is the root. Numbers are never used again, so no old handle finds a new file.
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 2;
        files.insert(number, Arc::clone(layer));
        true
    }

    /// Takes a layer's file away.
    pub fn remove(&self, layer: &Arc<ServedLayer>) {
        let mut files = self.by_number.write().unwrap_or_else(PoisonError::into_inner);
        files.retain(|_, file| !Arc::ptr_eq(file, layer));
    }

    /// Whether a layer has a file.
    pub fn contains(&self, layer: &Arc<ServedLayer>) -> bool {
        let files = self.by_number.read().unwrap_or_else(PoisonError::into_inner);
        files.values().any(|file| Arc::ptr_eq(file, layer))
    }

    fn get(&self, number: INodeNo) -> Option<Arc<ServedLayer>> {
        let files = self.by_number.read().unwrap_or_else(PoisonError::into_inner);
        files.get(&u64::from(number)).map(Arc::clone)
    }

    fn find(&self, id: &LayerId) -> Option<(u64, Arc<ServedLayer>)> {
        let files = self.by_number.read().unwrap_or_else(PoisonError::into_inner);
        files
            .iter()
            .find(|(_, file)| file.id() == *id)
            .map(|(number, file)| (*number, Arc::clone(file)))
    }
}

/// The file system.
#[derive(Debug)]
pub struct LayerFiles {
    files: Arc<Files>,
    engine: Engine,
}

impl LayerFiles {
    /// Serves these files.
    pub fn new(files: Arc<Files>, engine: Engine) -> Self {
        Self { files, engine }
    }
}

fn attributes(number: u64, kind: FileType, size: u64) -> FileAttr {
    FileAttr {
        ino: INodeNo(number),
        size,
        blocks: size.div_ceil(512),
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: if kind == FileType::Directory { 0o500 } else { 0o400 },
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        flags: 0,
        blksize: 4096,
    }
}

fn size_of(layer: &ServedLayer) -> u64 {
    layer.fetch().cached().table().data_bytes()
}

impl Filesystem for LayerFiles {
    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let id = name.to_str().and_then(|name| name.parse::<LayerId>().ok());
        match id.filter(|_| parent == INodeNo::ROOT).and_then(|id| self.files.find(&id)) {
            Some((number, layer)) => {
                let found = attributes(number, FileType::RegularFile, size_of(&layer));
                reply.entry(&BELIEVED, &found, Generation(0));
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(
        &self,
        _request: &Request,
        number: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        if number == INodeNo::ROOT {
            return reply.attr(&BELIEVED, &attributes(1, FileType::Directory, 0));
        }
        match self.files.get(number) {
            Some(layer) => {
                let size = size_of(&layer);
                reply.attr(&BELIEVED, &attributes(number.0, FileType::RegularFile, size));
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _request: &Request, number: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match self.files.get(number) {
            Some(_) => reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn read(
        &self,
        _request: &Request,
        number: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(layer) = self.files.get(number) else {
            return reply.error(Errno::ENOENT);
        };
        let end = offset.saturating_add(u64::from(size)).min(size_of(&layer));
        let bytes = end.saturating_sub(offset) as usize;
        if let Some(ahead) = layer.note_asked(offset, bytes as u64) {
            self.engine.prefetch(layer.fetch(), ahead);
        }
        let cached = layer.fetch().cached();
        let chunks = cached.table().covering(offset, bytes as u64);
        if cached.has_all(chunks.clone()) {
            layer.hits.fetch_add(1, Ordering::Relaxed);
            return answer(reply, read_cached(&layer, offset, bytes));
        }
        if !self.engine.has_room(bytes as u64) {
            return answer(reply, read_uncached(&self.engine, &layer, offset, bytes));
        }
        let (engine, owner) = (self.engine.clone(), Arc::clone(&layer));
        let done = Box::new(move |fetched: Result<(), Failure>| {
            let result = match fetched {
                Ok(()) => read_cached(&owner, offset, bytes),
                Err(failure) if failure.kind() == ErrorKind::NoSpace => {
                    read_uncached(&engine, &owner, offset, bytes)
                }
                Err(failure) => Err(failure.to_error()),
            };
            answer(reply, result);
        });
        if self.engine.request(layer.fetch(), chunks, Class::Demand, done) == Met::Joined {
            layer.waits.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn answer(reply: ReplyData, result: Result<Vec<u8>>) {
    match result {
        Ok(bytes) => reply.data(&bytes),
        Err(error) => {
            tracing::error!(error = %error.chain(), "a read was refused");
            reply.error(Errno::from_i32(error.kind().errno()));
        }
    }
}

fn read_cached(layer: &ServedLayer, offset: u64, bytes: usize) -> Result<Vec<u8>> {
    let mut content = vec![0; bytes];
    layer.fetch().cached().read(offset, &mut content)?;
    Ok(content)
}

/// Takes present chunks from the cache file and all others from the store.
fn read_uncached(
    engine: &Engine,
    layer: &Arc<ServedLayer>,
    offset: u64,
    bytes: usize,
) -> Result<Vec<u8>> {
    let cached = layer.fetch().cached();
    let mut content = Vec::with_capacity(bytes);
    let end = offset + bytes as u64;
    for chunk in cached.table().covering(offset, bytes as u64) {
        let range = cached.table().chunks()[chunk].byte_range();
        let (from, to) = (range.start.max(offset), range.end.min(end));
        if cached.has(chunk) {
            content.extend(read_cached(layer, from, (to - from) as usize)?);
        } else {
            let plain = engine.read_uncached(layer.fetch(), chunk)?;
            content.extend_from_slice(
                &plain[(from - range.start) as usize..(to - range.start) as usize],
            );
        }
    }
    Ok(content)
}
