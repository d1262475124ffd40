//! `erofs-fuse`: EROFS reads its data from a file on a small FUSE file system of ours; its metadata
//! stays a local file. The fallback where pre-content events are missing.
//!
//! The FUSE file is opened without caching, so only EROFS's page cache holds the data. A layer that is
//! complete when it is mounted takes its cache file directly and needs nobody.
//!
//! Locking: one mutex around the session, which is made at the first mount.
//! What survives a crash: nothing; reads fail with ENOTCONN or EIO (closed, never zeros), and the next
//! start unmounts what is left.

mod events;

use super::{Plane, PlaneKind, mounting};
use crate::fetch::Engine;
use crate::served::ServedLayer;
use events::{Files, LayerFiles};
use fuser::{BackgroundSession, MountOption, Session, SessionACL};
use layer::{Context, Result};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Threads that take FUSE requests; a miss does not occupy one while it is fetched.
const THREADS: usize = 2;

/// The plane.
pub struct ErofsFuse {
    folder: PathBuf,
    engine: Engine,
    files: Arc<Files>,
    session: Mutex<Option<BackgroundSession>>,
}

impl ErofsFuse {
    /// Mounts its FUSE file system at `folder` once it is needed; removes what a dead fsd left there.
    pub fn new(folder: &Path, engine: Engine) -> Result<Self> {
        mounting::unmount(folder)?;
        Ok(Self {
            folder: folder.to_owned(),
            engine,
            files: Arc::default(),
            session: Mutex::new(None),
        })
    }

    fn start(&self) -> Result<()> {
        let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        if session.is_some() {
            return Ok(());
        }
        let name = || format!("mount FUSE at {}", self.folder.display());
        crate::cache::create_folder(&self.folder)?;
        let mut config = fuser::Config::default();
        config.mount_options =
            vec![MountOption::RO, MountOption::FSName("lamella".to_owned()), MountOption::NoSuid];
        config.acl = SessionACL::Owner;
        config.n_threads = Some(THREADS);
        let files = LayerFiles::new(Arc::clone(&self.files), self.engine.clone());
        let begun = Session::new(files, &self.folder, &config).and_then(Session::spawn);
        *session = Some(begun.context(name)?);
        Ok(())
    }
}

impl Plane for ErofsFuse {
    fn kind(&self) -> PlaneKind {
        PlaneKind::ErofsFuse
    }

    fn mount(&self, layer: &Arc<ServedLayer>, at: &Path) -> Result<()> {
        let cached = layer.fetch().cached();
        if !layer.needs_events() && !self.files.contains(layer) {
            return mounting::mount_erofs(&cached.metadata_path(), &cached.data_path(), at);
        }
        self.start()?;
        let fresh = self.files.insert(layer);
        let data = self.folder.join(layer.id().to_string());
        let mounted = mounting::mount_erofs(&cached.metadata_path(), &data, at);
        if mounted.is_err() && fresh {
            self.files.remove(layer);
        }
        mounted
    }

    fn survives(&self, layer: &Arc<ServedLayer>) -> bool {
        !self.files.contains(layer)
    }

    fn answers_reads(&self, layer: &Arc<ServedLayer>) -> bool {
        // A layer that was complete when it was mounted is read by the kernel.
        self.files.contains(layer)
    }

    fn release(&self, layer: &Arc<ServedLayer>) -> Result<()> {
        self.files.remove(layer);
        Ok(())
    }

    fn completed(&self, _layer: &Arc<ServedLayer>) -> Result<()> {
        Ok(())
    }

    fn close(&self) -> Result<()> {
        let session = self.session.lock().unwrap_or_else(PoisonError::into_inner).take();
        match session {
            Some(session) => session
                .umount_and_join()
                .context(|| format!("unmount FUSE at {}", self.folder.display())),
            None => Ok(()),
        }
    }
}
