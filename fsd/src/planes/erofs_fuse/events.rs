//! The FUSE file system: one folder, one file for each layer that is served, named by its id.
//!
//! Locking: the table of files is read on every request and written on attach and release.

use crate::fetch::Engine;
use crate::made_files::attributes;
use crate::reads;
use crate::served::ServedLayer;
use fuser::{
    Errno, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, OpenFlags,
    ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};
use layer::{LayerId, Result};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

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
        let bytes = u64::from(size);
        reads::read(&self.engine, &layer, offset, bytes, move |result| answer(reply, result));
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
