//! The node cache: one folder a layer, `<cache>/<layer id>/{manifest, chunks, meta.erofs, data, present}`.
//!
//! Layers arrive under a temporary name and are renamed into place; they leave by being renamed away
//! first. `present` is made last and only beside flushed metadata, so its bits are believed after a power
//! cut. The metadata image is compared with its digest once in each process, whatever else is there: a
//! disk that lies, or a hand in the folder, must not become a wrong file system.
//!
//! Locking: the cache folder belongs to one process (`lock`, which holds its pid). Folders of layers
//! are made and removed under the attachments' lock of that layer; `verified` and `dormant` have their own.
// CRASH: `.new-*` and `.gone-*` folders are what a killed fsd left; the next start removes them.

mod bits;
mod bring;
pub mod check;
mod descriptions;
pub mod entry;
mod evict;
mod expose;
pub mod files;
mod index;
mod pins;
mod shelf;
mod space;
mod usage;

#[cfg(test)]
mod tests;

pub use entry::CachedLayer;
pub use pins::Pins;
pub use shelf::Shelf;
pub use space::{CacheLimit, Space};

use crate::config::FsdConfig;
use crate::journal::FileKey;
use descriptions::{Description, Descriptions};
use entry::Parts;
use files::FolderFiles;
use index::ChunkIndex;
use layer::chunk::ChunkTable;
use layer::manifest::Manifest;
use layer::presence::Presence;
use layer::{Context, Error, ErrorKind, LayerId, Result};
use std::collections::HashSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use store::Store;

const MANIFEST: &str = "manifest";
const CHUNKS: &str = "chunks";
const METADATA: &str = "meta.erofs";
const DATA: &str = "data";
const PRESENT: &str = "present";
const LOCK: &str = "lock";
const ARRIVING: &str = ".new-";
const LEAVING: &str = ".gone-";

/// Settings of a node cache.
#[derive(Debug, Clone, Copy, Default)]
pub struct CacheSettings {
    /// Bytes of the disk that stay free.
    pub reserve_bytes: u64,
    /// How large the cache may grow.
    pub limit: Option<CacheLimit>,
    /// Compare a metadata image with its digest at every open, not only at the first of a process.
    pub always_verify: bool,
}

impl CacheSettings {
    /// What the daemon was told.
    pub fn of(config: &FsdConfig) -> Self {
        Self {
            reserve_bytes: config.cache_reserve_bytes,
            limit: config.cache_limit,
            always_verify: config.verify_metadata,
        }
    }
}

/// A layer of the cache that nothing serves.
#[derive(Debug, Clone, Copy)]
pub struct Resting {
    /// The layer.
    pub id: LayerId,
    /// When it was used last, in milliseconds since 1970.
    pub used_ms: u64,
    /// Bytes of its folder on disk.
    pub bytes: u64,
}

/// The cache folder, locked.
#[derive(Debug)]
pub struct NodeCache {
    folder: PathBuf,
    space: Space,
    always_verify: bool,
    shelf: Shelf,
    pins: Pins,
    /// Layers whose metadata image this process has compared with its digest.
    verified: Mutex<HashSet<LayerId>>,
    descriptions: Descriptions,
    /// Bytes of layer files that were read from the store.
    brought_bytes: AtomicU64,
    /// The layer out of use from which a chunk was copied last, open.
    dormant: Mutex<Option<Arc<CachedLayer>>>,
    _lock: File,
}

/// Takes the lock of a folder or a process, and writes our pid into it. `Busy` names the holder.
pub fn lock_file(path: &Path, what: &str) -> Result<File> {
    let name = || format!("lock {}", path.display());
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .context(name)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            file.read_to_string(&mut holder).context(name)?;
            let text = format!("{what} is in use by process {}", holder.trim());
            return Err(Error::new(ErrorKind::Busy, text));
        }
        Err(TryLockError::Error(error)) => return Err(error).context(name),
    }
    file.set_len(0).context(name)?;
    writeln!(file, "{}", std::process::id()).context(name)?;
    Ok(file)
}

/// Makes a folder that only its owner can enter, and those above it.
pub fn create_folder(path: &Path) -> Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .context(|| format!("create {}", path.display()))
}

/// Removes a folder and what is in it; none is no error.
fn remove_folder(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(format!("remove {}", path.display()), error))
        }
        _ => Ok(()),
    }
}

fn create_file(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .context(|| format!("create {}", path.display()))
}

impl NodeCache {
    /// Locks the folder, refuses file systems that cannot carry layers, removes left-overs.
    pub fn open(folder: &Path, settings: CacheSettings) -> Result<Self> {
        create_folder(folder)?;
        let what = format!("the node cache {}", folder.display());
        let lock = lock_file(&folder.join(LOCK), &what)?;
        space::check_file_system(folder)?;
        let cache = Self {
            folder: folder.to_owned(),
            space: Space::new(folder, settings.reserve_bytes, settings.limit),
            always_verify: settings.always_verify,
            shelf: Shelf::default(),
            pins: Pins::open(folder)?,
            verified: Mutex::default(),
            descriptions: Descriptions::default(),
            brought_bytes: AtomicU64::new(0),
            dormant: Mutex::default(),
            _lock: lock,
        };
        for name in cache.names()? {
            if name.starts_with(ARRIVING) || name.starts_with(LEAVING) {
                remove_folder(&folder.join(&name))?;
            }
        }
        Ok(cache)
    }

    /// How much room the disk has.
    pub fn space(&self) -> &Space {
        &self.space
    }

    /// Bytes of layer files that were read from the store.
    pub fn brought_bytes(&self) -> u64 {
        self.brought_bytes.load(Ordering::Relaxed)
    }

    /// What must stay.
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    /// Which layer has which chunk.
    pub fn shelf(&self) -> &Shelf {
        &self.shelf
    }

    /// Takes all layers of the cache into the shelf. Slow where there are many; what is not taken in yet
    /// is fetched instead of copied.
    pub fn fill_shelf(&self) -> Result<()> {
        for id in self.layers()? {
            if self.shelf.knows(&id) {
                continue;
            }
            let Ok(bytes) = std::fs::read(self.folder_of(&id).join(CHUNKS)) else { continue };
            if let Ok(table) = ChunkTable::decode(&bytes) {
                self.shelf.put(&id, Arc::new(ChunkIndex::new(&table)));
            }
        }
        Ok(())
    }

    /// A layer that nothing serves, to copy chunks from. Only under the attachments' lock of that layer:
    /// of a file that is served and marked no new descriptor may be opened here.
    pub fn open_dormant(&self, id: &LayerId) -> Result<Arc<CachedLayer>> {
        let mut dormant = self.dormant();
        if let Some(open) = dormant.as_ref().filter(|open| open.id() == *id) {
            return Ok(Arc::clone(open));
        }
        let opened = Arc::new(self.open_folder(id, &self.folder_of(id), None, self.known(id))?);
        *dormant = Some(Arc::clone(&opened));
        Ok(opened)
    }

    /// What was opened to copy from it is closed: it is served now, or goes.
    fn wake(&self, id: &LayerId) {
        self.dormant().take_if(|open| open.id() == *id);
    }

    fn dormant(&self) -> MutexGuard<'_, Option<Arc<CachedLayer>>> {
        self.dormant.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn names(&self) -> Result<Vec<String>> {
        let name = || format!("list {}", self.folder.display());
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.folder).context(name)? {
            if let Ok(name) = entry.context(name)?.file_name().into_string() {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// The layers that have a folder, the least recently used first.
    pub fn layers(&self) -> Result<Vec<LayerId>> {
        Ok(self.by_use()?.into_iter().map(|(_, id)| id).collect())
    }

    fn by_use(&self) -> Result<Vec<(u64, LayerId)>> {
        let mut found: Vec<(u64, LayerId)> = Vec::new();
        for name in self.names()? {
            let Ok(id) = name.parse::<LayerId>() else { continue };
            // A folder that vanishes meanwhile is simply not listed.
            if let Ok(metadata) = std::fs::metadata(self.folder.join(&name)) {
                let used =
                    metadata.mtime() as u64 * 1000 + metadata.mtime_nsec() as u64 / 1_000_000;
                found.push((used, id));
            }
        }
        found.sort();
        Ok(found)
    }

    /// Every layer with its last use as a whole and its bytes on disk, the least recently used first.
    pub fn resting(&self) -> Result<Vec<Resting>> {
        let layers = self.by_use()?.into_iter();
        let resting = layers.map(|(used_ms, id)| {
            let bytes = allocated_bytes(&self.folder_of(&id));
            Resting { id, used_ms, bytes }
        });
        Ok(resting.collect())
    }

    /// Where a layer's folder is or would be.
    pub fn folder_of(&self, id: &LayerId) -> PathBuf {
        self.folder.join(id.to_string())
    }

    /// Opens a layer, fetching its metadata first when the node does not have it.
    ///
    /// `quiet_data` is the data file's descriptor from a keeper, for a file that is marked.
    pub fn open_layer(
        &self,
        id: &LayerId,
        store: &Store,
        quiet_data: Option<OwnedFd>,
    ) -> Result<CachedLayer> {
        let folder = self.folder_of(id);
        self.wake(id);
        let opened = self.open_or_bring(id, store, quiet_data, &folder)?;
        match self.shelf.get(id) {
            Some(known) => opened.set_index(known),
            None => self.shelf.put(id, Arc::clone(opened.index())),
        }
        Ok(opened)
    }

    fn open_or_bring(
        &self,
        id: &LayerId,
        store: &Store,
        quiet_data: Option<OwnedFd>,
        folder: &Path,
    ) -> Result<CachedLayer> {
        // A file that is served must never be replaced under its readers.
        let served = quiet_data.is_some();
        match std::fs::metadata(folder) {
            Ok(_) => match self.open_folder(id, folder, quiet_data, self.known(id)) {
                Err(error) if error.kind() == ErrorKind::Corrupt && !served => {
                    // Written, but lost by a power cut: the store has it.
                    tracing::warn!(layer = %id, error = %error.chain(), "discard a cached layer");
                    self.remove(id)?;
                    let brought = self.bring(id, store)?;
                    self.open_folder(id, folder, None, Some(brought))
                }
                other => other,
            },
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !served => {
                let brought = self.bring(id, store)?;
                self.open_folder(id, folder, None, Some(brought))
            }
            Err(error) => Err(Error::io(format!("stat {}", folder.display()), error)),
        }
    }

    fn open_folder(
        &self,
        id: &LayerId,
        folder: &Path,
        quiet_data: Option<OwnedFd>,
        known: Option<Description>,
    ) -> Result<CachedLayer> {
        let served = quiet_data.is_some();
        let (opened, allocated) = self.open_files(id, folder, quiet_data, known)?;
        // More than the file system's own blocks for a file's map.
        let spare = allocated > opened.present_bytes() + (1 << 20);
        if spare && !served && !opened.is_exposed() {
            opened.give_back_absent()?;
        }
        Ok(opened)
    }

    /// What needs not be read again, where nothing is to be verified at every open.
    fn known(&self, id: &LayerId) -> Option<Description> {
        self.descriptions.get(id).filter(|_| !self.always_verify)
    }

    fn read_description(&self, id: &LayerId, folder: &Path) -> Result<Description> {
        let read = |name: &str| {
            let path = folder.join(name);
            std::fs::read(&path).map_err(|error| part_error("read", &path, error))
        };
        let manifest = Manifest::decode(&read(MANIFEST)?)?;
        if manifest.id() != *id {
            return Err(Error::corrupt(format!("cached metadata of layer {id}")));
        }
        let table = Arc::new(bring::read_table(&manifest, &read(CHUNKS)?)?);
        Ok(Description { manifest, table })
    }

    /// Opens a layer and changes nothing. Answers the bytes that its data takes on the disk, too.
    fn open_files(
        &self,
        id: &LayerId,
        folder: &Path,
        quiet_data: Option<OwnedFd>,
        known: Option<Description>,
    ) -> Result<(CachedLayer, u64)> {
        let description = match known {
            Some(known) => known,
            None => self.read_description(id, folder)?,
        };
        let Description { manifest, table } = &description;
        let path = folder.join(DATA);
        let data = match quiet_data {
            Some(fd) => File::from(fd),
            None => OpenOptions::new()
                .read(true)
                .write(true)
                .open(&path)
                .map_err(|error| part_error("open", &path, error))?,
        };
        let stat = data.metadata().context(|| format!("stat {}", path.display()))?;
        let (key, length) = (FileKey { device: stat.dev(), inode: stat.ino() }, stat.len());
        let fits = length == table.data_bytes()
            || (length > table.data_bytes() && expose::is_exposed(folder));
        if !fits {
            return Err(Error::corrupt(format!("data of layer {id} has {length} bytes")));
        }
        self.check_metadata(id, &folder.join(METADATA), manifest)?;
        let present = self.open_presence(id, folder, table)?;
        let (present, file) = present.unzip();
        let (folder, table) = (folder.to_owned(), Arc::clone(table));
        let files = Box::new(FolderFiles::new(folder.clone(), data, file)?);
        self.descriptions.put(id, &description);
        let opened = CachedLayer::new(Parts { id: *id, folder, table, key, files, present });
        Ok((opened, stat.blocks() * 512))
    }

    /// The size always, as it costs nothing; the digest once.
    fn check_metadata(&self, id: &LayerId, path: &Path, manifest: &Manifest) -> Result<()> {
        let stat = std::fs::metadata(path).map_err(|error| part_error("stat", path, error))?;
        if stat.len() != manifest.metadata_bytes {
            return Err(Error::corrupt(format!(
                "{} has {} bytes, not {}",
                path.display(),
                stat.len(),
                manifest.metadata_bytes
            )));
        }
        if self.always_verify || !self.verified().contains(id) {
            bring::verify_file(path, &manifest.metadata_digest)?;
            self.verified().insert(*id);
        }
        Ok(())
    }

    fn verified(&self) -> MutexGuard<'_, HashSet<LayerId>> {
        self.verified.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_presence(
        &self,
        id: &LayerId,
        folder: &Path,
        table: &ChunkTable,
    ) -> Result<Option<(Presence, File)>> {
        let path = folder.join(PRESENT);
        let name = || format!("read {}", path.display());
        let mut file = match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io(name(), error)),
        };
        let chunks = table.len() as u32;
        let longest = Presence::file_bytes(chunks) + 1;
        let mut bytes = Vec::with_capacity(longest);
        std::io::Read::by_ref(&mut file)
            .take(longest as u64)
            .read_to_end(&mut bytes)
            .context(name)?;
        Ok(Some((Presence::decode(*id, chunks, &bytes), file)))
    }

    /// Copies manifest, chunk table and metadata image from the store, each verified, and makes the
    /// empty data file of its final size.
    fn bring(&self, id: &LayerId, store: &Store) -> Result<Description> {
        let arriving = self.folder.join(format!("{ARRIVING}{id}"));
        remove_folder(&arriving)?;
        create_folder(&arriving)?;
        let brought = self.space.check(0).and_then(|()| bring::bring_into(id, store, &arriving));
        let brought = brought.and_then(|(description, bytes)| {
            self.brought_bytes.fetch_add(bytes, Ordering::Relaxed);
            let folder = self.folder_of(id);
            let named = std::fs::rename(&arriving, &folder);
            named.context(|| format!("name {}", folder.display())).map(|()| description)
        });
        if brought.is_ok() {
            // The image was compared with its digest before it was written.
            self.verified().insert(*id);
        }
        if brought.is_err() {
            // Best effort: what stays is removed by the next start.
            let _ = remove_folder(&arriving);
        }
        brought.map_err(|error| error.context(format!("bring layer {id} to this node")))
    }

    /// Notes that the layer was used now, for eviction.
    pub fn touch(&self, id: &LayerId) {
        let touched = File::open(self.folder_of(id))
            .and_then(|folder| folder.set_modified(std::time::SystemTime::now()));
        if let Err(error) = touched {
            tracing::debug!(%error, layer = %id, "touch");
        }
    }

    /// Drops a layer that nothing serves. Answers the bytes that this freed.
    pub fn remove(&self, id: &LayerId) -> Result<u64> {
        let folder = self.folder_of(id);
        let leaving = self.folder.join(format!("{LEAVING}{id}"));
        let freed = allocated_bytes(&folder);
        let name = || format!("remove {}", folder.display());
        self.verified().remove(id);
        self.descriptions.forget(id);
        self.wake(id);
        self.shelf.take(id);
        // What an earlier attempt did not come to remove.
        remove_folder(&leaving)?;
        std::fs::rename(&folder, &leaving).context(name)?;
        remove_folder(&leaving)?;
        self.space.forget();
        Ok(freed)
    }

    /// Bytes that all layers occupy on disk.
    pub fn allocated_bytes(&self) -> Result<u64> {
        Ok(self.layers()?.iter().map(|id| allocated_bytes(&self.folder_of(id))).sum())
    }
}

/// A part that is missing is damage of the folder, not an unknown layer.
fn part_error(operation: &str, path: &Path, error: std::io::Error) -> Error {
    let missing = error.kind() == std::io::ErrorKind::NotFound;
    let error = Error::io(format!("{operation} {}", path.display()), error);
    if missing { Error::corrupt("incomplete cache folder").with_source(error) } else { error }
}

fn allocated_bytes(folder: &Path) -> u64 {
    let parts = [MANIFEST, CHUNKS, METADATA, DATA, PRESENT];
    let blocks = parts.iter().filter_map(|part| std::fs::metadata(folder.join(part)).ok());
    blocks.map(|metadata| metadata.blocks() * 512).sum()
}
