//! Exports: a layer's metadata image and data as two plain files that load lazily, for virtual machines.
//!
//! The files lie on a FUSE file system of fsd's own: a page fault on a mapping of such a file reaches
//! fsd, which a fault on the cache file would not. One pair of files a layer, shared by all who hold it,
//! so the host keeps each page once.
//!
//! ```text
//! (absent) --export--> held --last withdraw--> lingering --all files closed--> (absent)
//!                        ^                        |
//!                        |---------export---------|
//! ```
//! A layer that is exported is pinned: it is not evicted.
//!
//! Locking: one mutex around the holders, held across the pinning of a layer. Order: this, then the
//! attachments, then the table of files.
// CRASH: the file system ends with fsd. Whoever has a file open gets EIO, a mapping SIGBUS, and never
// zeros; the next start unmounts what is left, and holders export again.

mod files;

use crate::attach::Attachments;
use crate::planes::mounting;
use files::{DATA, ExportFiles, Files, METADATA};
use fuser::{BackgroundSession, MountOption, Session, SessionACL};
use layer::{Context, Error, ErrorKind, LayerId, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Sizes of exported files are multiples of this: what the guest's kernel wants of a pmem device.
pub const ALIGNMENT: u64 = 2 << 20;
/// Threads that take FUSE requests; a miss does not occupy one while it is fetched.
const THREADS: usize = 2;

/// What an export found or made.
#[derive(Debug)]
pub struct Exported {
    /// The EROFS metadata image.
    pub metadata: PathBuf,
    /// The data space: EROFS's extra device.
    pub data: PathBuf,
    /// Size of the metadata file; zeros behind the image.
    pub metadata_bytes: u64,
    /// Size of the data file; zeros behind the data.
    pub data_bytes: u64,
}

/// All exports of the node.
pub struct Exports {
    folder: PathBuf,
    attachments: Arc<Attachments>,
    files: Arc<Files>,
    holders: Mutex<BTreeMap<LayerId, BTreeSet<String>>>,
    session: Mutex<Option<BackgroundSession>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Exports {
    /// Mounts its file system at `folder` once it is needed; removes what a dead fsd left there.
    pub fn new(folder: &Path, attachments: Arc<Attachments>) -> Result<Self> {
        mounting::unmount(folder)?;
        Ok(Self {
            folder: folder.to_owned(),
            attachments,
            files: Arc::default(),
            holders: Mutex::default(),
            session: Mutex::new(None),
        })
    }

    fn start(&self) -> Result<()> {
        let mut session = lock(&self.session);
        if session.is_some() {
            return Ok(());
        }
        let name = || format!("mount FUSE at {}", self.folder.display());
        crate::cache::create_folder(&self.folder)?;
        let mut config = fuser::Config::default();
        config.mount_options = vec![
            MountOption::RO,
            MountOption::FSName("lamella-exports".to_owned()),
            MountOption::NoSuid,
            MountOption::NoDev,
            MountOption::NoExec,
        ];
        config.acl = SessionACL::Owner;
        config.n_threads = Some(THREADS);
        let engine = self.attachments.parts().engine.clone();
        let files = ExportFiles::new(Arc::clone(&self.files), engine);
        let begun = Session::new(files, &self.folder, &config).and_then(Session::spawn);
        *session = Some(begun.context(name)?);
        Ok(())
    }

    /// Exports a layer, or counts one more holder of it. Idempotent for a holder.
    pub fn export(&self, id: &LayerId, holder: &str) -> Result<Exported> {
        if holder.is_empty() {
            return Err(Error::invalid("a holder without a name"));
        }
        let mut holders = lock(&self.holders);
        let layer = match self.files.find(id) {
            Some(layer) => layer,
            None => {
                self.start()?;
                let served = self.attachments.pin(id)?;
                self.files.insert(served).inspect_err(|_| self.unpin(id))?
            }
        };
        holders.entry(*id).or_default().insert(holder.to_owned());
        let folder = self.folder.join(id.to_string());
        Ok(Exported {
            metadata: folder.join(METADATA),
            data: folder.join(DATA),
            metadata_bytes: layer.metadata_bytes(),
            data_bytes: layer.data_bytes(),
        })
    }

    /// Takes back one export. Answers whether the files are gone: they linger while one is open.
    pub fn withdraw(&self, id: &LayerId, holder: &str) -> Result<bool> {
        let mut holders = lock(&self.holders);
        let held = holders.get_mut(id).is_some_and(|held| held.remove(holder));
        if !held {
            return Err(Error::not_found(format!("layer {id} is not exported to {holder:?}")));
        }
        Ok(self.end_if_unheld(&mut holders, id))
    }

    fn end_if_unheld(
        &self,
        holders: &mut BTreeMap<LayerId, BTreeSet<String>>,
        id: &LayerId,
    ) -> bool {
        if holders.get(id).is_none_or(|held| !held.is_empty()) || !self.files.remove_unless_open(id)
        {
            return false;
        }
        holders.remove(id);
        self.unpin(id);
        tracing::info!(layer = %id, "its export has ended");
        true
    }

    fn unpin(&self, id: &LayerId) {
        if let Err(error) = self.attachments.unpin(id) {
            tracing::error!(layer = %id, error = %error.chain(), "release an export");
        }
    }

    /// Who holds an export of a layer.
    pub fn holders_of(&self, id: &LayerId) -> Vec<String> {
        lock(&self.holders).get(id).into_iter().flatten().cloned().collect()
    }

    /// Ends exports that lingered until their files were closed.
    pub fn upkeep(&self) {
        let mut holders = lock(&self.holders);
        let unheld = holders.iter().filter(|(_, held)| held.is_empty()).map(|(id, _)| *id);
        for id in unheld.collect::<Vec<_>>() {
            self.end_if_unheld(&mut holders, &id);
        }
    }

    /// Ends all exports. `Busy` while somebody holds one, unless forced: whoever has a file open then
    /// gets errors once the process has ended.
    pub fn close(&self, force: bool) -> Result<()> {
        let mut holders = lock(&self.holders);
        if let Some((id, held)) = holders.first_key_value().filter(|_| !force) {
            let holder = held.first().map_or("somebody's open file", String::as_str);
            return Err(Error::new(
                ErrorKind::Busy,
                format!("layer {id} is exported to {holder:?}"),
            ));
        }
        self.files.clear();
        for id in std::mem::take(&mut *holders).into_keys() {
            self.unpin(&id);
        }
        // Lazily, since files may be open; the session's own attempt then finds nothing.
        mounting::unmount(&self.folder)?;
        drop(lock(&self.session).take());
        Ok(())
    }
}
