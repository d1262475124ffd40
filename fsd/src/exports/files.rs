//! The FUSE file system of exports: `<layer id>/{meta.erofs,data}`, one folder for each layer that is
//! exported.
//!
//! Reads and page faults of mappings arrive here alike. The kernel keeps what it has read, so all
//! machines that map a file share its pages. Both files end with zeros up to a whole [`ALIGNMENT`].
//!
//! Locking: the table is read on every request and written on export and withdraw.

use super::ALIGNMENT;
use crate::fetch::Engine;
use crate::made_files::attributes;
use crate::reads;
use crate::served::ServedLayer;
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, Request,
};
use layer::{Context, LayerId, Result};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// Name of the file with the EROFS metadata image.
pub const METADATA: &str = "meta.erofs";
/// Name of the file with the data space.
pub const DATA: &str = "data";

/// How long the kernel may believe an answer: layers come and go.
const BELIEVED: Duration = Duration::ZERO;

/// The next multiple of [`ALIGNMENT`].
pub fn padded(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

/// What a number of an inode stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Folder,
    Metadata,
    Data,
}

/// Numbers of one layer: its folder, its metadata, its data. 1 is the root.
const NUMBERS: u64 = 3;
const FIRST_NUMBER: u64 = 2;

/// One exported layer.
#[derive(Debug)]
pub struct ExportedLayer {
    served: Arc<ServedLayer>,
    metadata: File,
    metadata_bytes: u64,
    first_number: u64,
    opens: AtomicU64,
}

impl ExportedLayer {
    /// Size of the metadata file, padded.
    pub fn metadata_bytes(&self) -> u64 {
        padded(self.metadata_bytes)
    }

    /// Size of the data file, padded.
    pub fn data_bytes(&self) -> u64 {
        padded(self.served.fetch().cached().table().data_bytes())
    }

    fn attributes(&self, part: Part) -> FileAttr {
        match part {
            Part::Folder => attributes(self.first_number, FileType::Directory, 0),
            Part::Metadata => {
                attributes(self.first_number + 1, FileType::RegularFile, self.metadata_bytes())
            }
            Part::Data => {
                attributes(self.first_number + 2, FileType::RegularFile, self.data_bytes())
            }
        }
    }

    fn read_metadata(&self, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        let end = offset.saturating_add(bytes).min(self.metadata_bytes);
        let mut content = vec![0; end.saturating_sub(offset) as usize];
        let name = || format!("read metadata of layer {}", self.served.id());
        self.metadata.read_exact_at(&mut content, offset).context(name)?;
        Ok(content)
    }
}

/// The exported layers.
#[derive(Debug, Default)]
pub struct Files {
    layers: RwLock<BTreeMap<LayerId, Arc<ExportedLayer>>>,
    given: AtomicU64,
}

impl Files {
    /// Gives a layer a folder.
    pub fn insert(&self, served: Arc<ServedLayer>) -> Result<Arc<ExportedLayer>> {
        let path = served.fetch().cached().metadata_path();
        let name = || format!("open {}", path.display());
        let metadata = File::open(&path).context(name)?;
        let metadata_bytes = metadata.metadata().context(name)?.len();
        // Numbers are never used again, so no old handle finds a new file.
        let first_number = FIRST_NUMBER + NUMBERS * self.given.fetch_add(1, Ordering::Relaxed);
        let opens = AtomicU64::new(0);
        let id = served.id();
        let layer =
            Arc::new(ExportedLayer { served, metadata, metadata_bytes, first_number, opens });
        let mut layers = self.layers.write().unwrap_or_else(PoisonError::into_inner);
        layers.insert(id, Arc::clone(&layer));
        Ok(layer)
    }

    /// Takes a layer's folder away, unless one of its files is open; answers whether it is gone.
    pub fn remove_unless_open(&self, id: &LayerId) -> bool {
        // Opens are counted under the read lock, so none slips in between.
        let mut layers = self.layers.write().unwrap_or_else(PoisonError::into_inner);
        if layers.get(id).is_some_and(|layer| layer.opens.load(Ordering::Acquire) > 0) {
            return false;
        }
        layers.remove(id);
        true
    }

    /// Takes all folders away, whatever is open.
    pub fn clear(&self) {
        self.layers.write().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The exported layer of this id.
    pub fn find(&self, id: &LayerId) -> Option<Arc<ExportedLayer>> {
        let layers = self.layers.read().unwrap_or_else(PoisonError::into_inner);
        layers.get(id).map(Arc::clone)
    }

    /// Shows what a number stands for to `then` while the table cannot change.
    fn with<T>(
        &self,
        number: INodeNo,
        then: impl FnOnce(&Arc<ExportedLayer>, Part) -> T,
    ) -> Option<T> {
        let index = number.0.checked_sub(FIRST_NUMBER)?;
        let part = match index % NUMBERS {
            0 => Part::Folder,
            1 => Part::Metadata,
            _ => Part::Data,
        };
        let first_number = FIRST_NUMBER + index / NUMBERS * NUMBERS;
        let layers = self.layers.read().unwrap_or_else(PoisonError::into_inner);
        let layer = layers.values().find(|layer| layer.first_number == first_number)?;
        Some(then(layer, part))
    }

    fn names_of_root(&self) -> Vec<(u64, FileType, String)> {
        let layers = self.layers.read().unwrap_or_else(PoisonError::into_inner);
        let folders = layers.iter().map(|(id, layer)| (layer.first_number, id.to_string()));
        folders.map(|(number, name)| (number, FileType::Directory, name)).collect()
    }
}

/// The file system.
#[derive(Debug)]
pub struct ExportFiles {
    files: Arc<Files>,
    engine: Engine,
}

impl ExportFiles {
    /// Serves these files.
    pub fn new(files: Arc<Files>, engine: Engine) -> Self {
        Self { files, engine }
    }
}

/// Answers with these bytes, filled up with the zeros behind the end of the file's content.
fn answer(reply: ReplyData, result: Result<Vec<u8>>, bytes: u64) {
    match result {
        Ok(mut content) => {
            content.resize(bytes as usize, 0);
            reply.data(&content);
        }
        Err(error) => {
            tracing::error!(error = %error.chain(), "a read of an export was refused");
            reply.error(Errno::from_i32(error.kind().errno()));
        }
    }
}

impl Filesystem for ExportFiles {
    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = name.to_str().unwrap_or_default();
        let found = if parent == INodeNo::ROOT {
            let layer = name.parse().ok().and_then(|id| self.files.find(&id));
            layer.map(|layer| layer.attributes(Part::Folder))
        } else {
            let part = match name {
                METADATA => Some(Part::Metadata),
                DATA => Some(Part::Data),
                _ => None,
            };
            let look = |layer: &Arc<ExportedLayer>, parent| match (parent, part) {
                (Part::Folder, Some(part)) => Some(layer.attributes(part)),
                _ => None,
            };
            self.files.with(parent, look).flatten()
        };
        match found {
            Some(found) => reply.entry(&BELIEVED, &found, Generation(0)),
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
        match self.files.with(number, |layer, part| layer.attributes(part)) {
            Some(found) => reply.attr(&BELIEVED, &found),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _request: &Request, number: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let opened = self.files.with(number, |layer, _| {
            layer.opens.fetch_add(1, Ordering::AcqRel);
        });
        match opened {
            Some(()) => reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn release(
        &self,
        _request: &Request,
        number: INodeNo,
        _handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.files.with(number, |layer, _| layer.opens.fetch_sub(1, Ordering::AcqRel));
        reply.ok();
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
        let Some((layer, part)) = self.files.with(number, |layer, part| (Arc::clone(layer), part))
        else {
            return reply.error(Errno::ENOENT);
        };
        let within = |file_bytes: u64| file_bytes.saturating_sub(offset).min(u64::from(size));
        match part {
            Part::Folder => reply.error(Errno::EISDIR),
            Part::Metadata => {
                let bytes = within(layer.metadata_bytes());
                answer(reply, layer.read_metadata(offset, bytes), bytes);
            }
            Part::Data => {
                let bytes = within(layer.data_bytes());
                reads::read(&self.engine, &layer.served, offset, bytes, move |result| {
                    answer(reply, result, bytes);
                });
            }
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        number: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let entries = if number == INodeNo::ROOT {
            self.files.names_of_root()
        } else {
            let names = |layer: &Arc<ExportedLayer>, _| {
                vec![
                    (layer.first_number + 1, FileType::RegularFile, METADATA.to_owned()),
                    (layer.first_number + 2, FileType::RegularFile, DATA.to_owned()),
                ]
            };
            self.files.with(number, names).unwrap_or_default()
        };
        for (index, (number, kind, name)) in entries.iter().enumerate().skip(offset as usize) {
            if reply.add(INodeNo(*number), index as u64 + 1, *kind, name) {
                break;
            }
        }
        reply.ok();
    }
}
