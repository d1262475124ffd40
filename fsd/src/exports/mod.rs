//! Exports: a layer's metadata image and data as two plain files, for virtual machines.
//!
//! | layer at its first export | what the files are | when fsd dies |
//! |---|---|---|
//! | durably complete | its files in the node cache, lengthened: no fsd takes part in a read | nothing happens |
//! | any other | files of a FUSE file system, which load lazily | EIO, mappings SIGBUS, never zeros |
//!
//! A page fault on a mapping of a FUSE file reaches fsd, which a fault on the cache file would not. One pair of
//! files a layer, shared by all who hold it, so the host keeps each page once.
//!
//! ```text
//! (absent) --export--> held --last withdraw--> lingering --all files closed--> (absent)
//!                        ^                        |
//!                        |---------export---------|
//! ```
//! Plain files do not linger: the cache may evict the layer then, as a whole, and a mapping keeps its file. A
//! layer that is exported is pinned: it is not evicted.
//!
//! Who holds what is in files (`run/exported`), so the next fsd serves the same paths again.
//!
//! Locking: one mutex around the exports, held across the pinning of a layer. Order: this, then the
//! attachments, then the table of files.
// CRASH: the FUSE file system ends with fsd. Whoever has a file open gets EIO, a mapping SIGBUS, and never
// zeros; the next start unmounts what is left and mounts anew at the same place. A holder that is noted and was
// not answered asks again.

mod files;

use crate::attach::Attachments;
use crate::holders::Holders;
use crate::planes::mounting;
use crate::served::ServedLayer;
use files::{DATA, ExportFiles, Files, METADATA};
use fuser::{BackgroundSession, MountOption, Session, SessionACL};
use layer::{Context, Error, ErrorKind, LayerId, Result};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Sizes of exported files are multiples of this: what the guest's kernel wants of a pmem device.
pub const ALIGNMENT: u64 = 2 << 20;
/// Threads that take FUSE requests; a miss does not occupy one while it is fetched.
const THREADS: usize = 2;

/// What an export found or made.
#[derive(Debug, Clone)]
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

/// One exported layer.
#[derive(Debug)]
struct Export {
    exported: Exported,
    /// Whether no fsd is needed.
    plain: bool,
    holders: BTreeSet<String>,
}

/// All exports of the node.
pub struct Exports {
    folder: PathBuf,
    attachments: Arc<Attachments>,
    files: Arc<Files>,
    noted: Holders,
    exports: Mutex<BTreeMap<LayerId, Export>>,
    session: Mutex<Option<BackgroundSession>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Exports {
    /// Mounts its file system at `folder` once it is needed; removes what a dead fsd left there. Holders are
    /// noted in `noted`.
    pub fn new(folder: &Path, noted: &Path, attachments: Arc<Attachments>) -> Result<Self> {
        mounting::unmount(folder)?;
        Ok(Self {
            folder: folder.to_owned(),
            attachments,
            files: Arc::default(),
            noted: Holders::open(noted)?,
            exports: Mutex::default(),
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
        if !self.attachments.is_held(id) {
            self.attachments.admit(id, None)?;
        }
        let mut exports = lock(&self.exports);
        let export = match exports.entry(*id) {
            Entry::Occupied(export) => export.into_mut(),
            Entry::Vacant(place) => place.insert(self.begin(id, None)?),
        };
        let noted = self.noted.add(id, holder);
        if noted.is_ok() {
            export.holders.insert(holder.to_owned());
        }
        let exported = export.exported.clone();
        self.end_if_unheld(&mut exports, id);
        noted.map(|()| exported)
    }

    /// Pins a layer and makes its files: plain ones or not, or what can be.
    fn begin(&self, id: &LayerId, plain: Option<bool>) -> Result<Export> {
        let served = self.attachments.pin(id)?;
        let made = self.make(&served, plain);
        let made = made.and_then(|export| self.noted.set_plain(id, export.plain).map(|()| export));
        made.inspect_err(|_| {
            self.files.remove_unless_open(id);
            self.unpin(id);
        })
    }

    fn make(&self, served: &Arc<ServedLayer>, plain: Option<bool>) -> Result<Export> {
        let (cached, id) = (served.fetch().cached(), served.id());
        let holders = BTreeSet::new();
        if plain.unwrap_or_else(|| cached.is_durably_complete()) {
            let exposed = cached.expose(ALIGNMENT)?;
            let bytes = |path: &Path| {
                let found = std::fs::metadata(path).context(|| format!("stat {}", path.display()));
                found.map(|found| found.len())
            };
            let (metadata_bytes, data_bytes) = (bytes(&exposed.metadata)?, bytes(&exposed.data)?);
            let (metadata, data) = (exposed.metadata, exposed.data);
            let exported = Exported { metadata, data, metadata_bytes, data_bytes };
            return Ok(Export { exported, plain: true, holders });
        }
        self.start()?;
        let layer = self.files.insert(Arc::clone(served))?;
        let folder = self.folder.join(id.to_string());
        let exported = Exported {
            metadata: folder.join(METADATA),
            data: folder.join(DATA),
            metadata_bytes: layer.metadata_bytes(),
            data_bytes: layer.data_bytes(),
        };
        Ok(Export { exported, plain: false, holders })
    }

    /// Serves again what a former fsd exported in this boot of the machine, at the same paths. Answers who
    /// holds it. What cannot be served any more is let go, loudly.
    pub fn restore(&self) -> Result<Vec<(LayerId, String)>> {
        let same_boot = self.noted.is_of_this_boot()?;
        let mut exports = lock(&self.exports);
        let mut restored = Vec::new();
        for id in self.noted.layers()? {
            let holders = self.noted.list(&id)?;
            if !same_boot || holders.is_empty() {
                self.noted.clear(&id)?;
                continue;
            }
            match self.begin(&id, Some(self.noted.is_plain(&id))) {
                Ok(export) => {
                    tracing::info!(layer = %id, plain = export.plain, ?holders, "exported again");
                    restored.extend(holders.iter().map(|holder| (id, holder.clone())));
                    exports.insert(id, Export { holders, ..export });
                }
                Err(error) => {
                    tracing::error!(layer = %id, error = %error.chain(), "an export is lost");
                    self.noted.clear(&id)?;
                }
            }
        }
        Ok(restored)
    }

    /// Takes back one export. Answers whether the files are gone: those that load lazily linger while one is
    /// open.
    pub fn withdraw(&self, id: &LayerId, holder: &str) -> Result<bool> {
        let mut exports = lock(&self.exports);
        if !exports.get(id).is_some_and(|export| export.holders.contains(holder)) {
            return Err(Error::not_found(format!("layer {id} is not exported to {holder:?}")));
        }
        self.noted.remove(id, holder)?;
        if let Some(export) = exports.get_mut(id) {
            export.holders.remove(holder);
        }
        Ok(self.end_if_unheld(&mut exports, id))
    }

    fn end_if_unheld(&self, exports: &mut BTreeMap<LayerId, Export>, id: &LayerId) -> bool {
        let unheld = exports.get(id).is_some_and(|export| export.holders.is_empty());
        if !unheld || !self.files.remove_unless_open(id) {
            return false;
        }
        exports.remove(id);
        if let Err(error) = self.noted.clear(id) {
            tracing::warn!(layer = %id, error = %error.chain(), "forget an export");
        }
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
        lock(&self.exports)
            .get(id)
            .into_iter()
            .flat_map(|export| &export.holders)
            .cloned()
            .collect()
    }

    /// Ends exports that lingered until their files were closed.
    pub fn upkeep(&self) {
        let mut exports = lock(&self.exports);
        let unheld = exports.iter().filter(|(_, export)| export.holders.is_empty());
        for id in unheld.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.end_if_unheld(&mut exports, &id);
        }
    }

    /// Ends all exports. `Busy` while somebody holds one, unless forced: whoever has a file open that is not
    /// a plain one then gets errors once the process has ended.
    pub fn close(&self, force: bool) -> Result<()> {
        let mut exports = lock(&self.exports);
        if let Some((id, export)) = exports.first_key_value().filter(|_| !force) {
            let holder = export.holders.first().map_or("somebody's open file", String::as_str);
            return Err(Error::new(
                ErrorKind::Busy,
                format!("layer {id} is exported to {holder:?}"),
            ));
        }
        self.files.clear();
        for id in std::mem::take(&mut *exports).into_keys() {
            self.noted.clear(&id)?;
            self.unpin(&id);
        }
        // Lazily, since files may be open; the session's own attempt then finds nothing.
        mounting::unmount(&self.folder)?;
        drop(lock(&self.session).take());
        Ok(())
    }
}
