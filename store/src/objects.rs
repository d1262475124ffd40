//! [`Store`]: what the objects on a backend are, where they lie, and the checks on all that is read.
//!
//! A store holds no state beside its backend, needs no lock, and is cheap to clone.
//!
//! // CRASH: every write here is one published object; a writer that dies leaves the old state. The order of
//! a publish (packs, then the layer, then the reference) is the caller's to keep.

use crate::backend::Backend;
use crate::clock::{Clock, HostClock};
use crate::key::Key;
use layer::chunk::ChunkTable;
use layer::environment::{self, Environment};
use layer::layer_file::{self, LayerFile, Layout};
use layer::manifest::Manifest;
use layer::{Context, EnvId, Error, ErrorKind, LayerId, Result};
use serde::{Deserialize, Serialize};
use std::str::FromStr;
use std::sync::Arc;

const FORMAT_VERSION: u32 = 1;
const MAX_FORMAT_BYTES: u64 = 4096;
/// The longest layer file that is read or written as a whole.
pub const MAX_LAYER_FILE_BYTES: u64 = 4 << 30;
/// Names asked for in one listing.
const PAGE: usize = 1000;

/// Layers, environments, packs, references and leases on one backend.
#[derive(Debug, Clone)]
pub struct Store {
    backend: Arc<dyn Backend>,
    clock: Arc<dyn Clock>,
    id: String,
}

/// What the object `FORMAT` says.
#[derive(Debug, Serialize, Deserialize)]
struct Format {
    format: String,
    version: u32,
    store_id: String,
}

impl Store {
    /// Opens a store; an empty backend becomes one.
    pub fn open(backend: Arc<dyn Backend>) -> Result<Self> {
        let key = Key::new("FORMAT")?;
        let format = match backend.read_all(&key, MAX_FORMAT_BYTES) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                create_format(&*backend, &key)?;
                backend.read_all(&key, MAX_FORMAT_BYTES)?
            }
            Err(error) => return Err(error),
        };
        let place = backend.describe();
        let format: Format = serde_json::from_slice(&format)
            .map_err(|error| Error::corrupt(format!("{place}: FORMAT")).with_source(error))?;
        if format.format != "lamella-store" {
            return Err(Error::invalid(format!("{place} is no store of Lamella")));
        }
        if format.version != FORMAT_VERSION {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{place} has store version {}, this program knows {FORMAT_VERSION}",
                    format.version
                ),
            ));
        }
        Ok(Self { backend, clock: Arc::new(HostClock), id: format.store_id })
    }

    /// The same store under another clock.
    pub fn with_clock(self, clock: Arc<dyn Clock>) -> Self {
        Self { clock, ..self }
    }

    /// What entries and leases are dated by.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    pub(crate) fn now_unix_ns(&self) -> u64 {
        self.clock.now_unix_ns()
    }

    /// What tells this store from every other one; random, chosen when it was made.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The objects below.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// Publishes a layer file. Returns its id, and whether the store had it already.
    pub fn put_layer(&self, file: &[u8]) -> Result<(LayerId, bool)> {
        if file.len() as u64 > MAX_LAYER_FILE_BYTES {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "a layer file of {} bytes; the limit is {MAX_LAYER_FILE_BYTES}",
                    file.len()
                ),
            ));
        }
        let id = LayerFile::decode(file).context(|| "layer file to publish".to_owned())?.id();
        // How the image is compressed is no part of the id: other bytes may be as good.
        let sound = |found: &[u8]| LayerFile::decode(found).is_ok_and(|file| file.id() == id);
        let existed = self.put_sound(&layer_key(&id)?, file, MAX_LAYER_FILE_BYTES, sound)?;
        Ok((id, existed))
    }

    /// A layer file with everything in it checked against the id.
    pub fn read_layer(&self, id: &LayerId) -> Result<LayerFile> {
        let bytes =
            self.read_object(&layer_key(id)?, MAX_LAYER_FILE_BYTES, || format!("layer {id}"))?;
        let file = LayerFile::decode(&bytes).context(|| format!("layer {id}"))?;
        if file.id() != *id {
            return Err(Error::corrupt(format!(
                "layer {id}: the object holds layer {}",
                file.id()
            )));
        }
        Ok(file)
    }

    /// Raw bytes of a layer file; the caller checks them (see [`Store::read_layer_layout`]).
    pub fn read_layer_part(&self, id: &LayerId, offset: u64, into: &mut [u8]) -> Result<()> {
        let key = layer_key(id)?;
        self.backend
            .read_at(&key, offset, into)
            .map_err(|error| named(error, || format!("layer {id}")))
    }

    /// Where the parts of a layer file lie; its length was compared with the object's.
    pub fn read_layer_layout(&self, id: &LayerId) -> Result<Layout> {
        let mut header = [0; layer_file::HEADER_BYTES];
        self.read_layer_part(id, 0, &mut header)?;
        let layout = Layout::decode(&header).context(|| format!("layer {id}"))?;
        let size = self.backend.size(&layer_key(id)?)?;
        if layout.file_bytes() != size {
            return Err(Error::corrupt(format!(
                "layer {id}: {size} bytes, its header says {}",
                layout.file_bytes()
            )));
        }
        Ok(layout)
    }

    /// Manifest and chunk table of a layer, checked against the id, without reading the metadata image.
    pub fn read_layer_tables(&self, id: &LayerId) -> Result<(Manifest, ChunkTable)> {
        let layout = self.read_layer_layout(id)?;
        let mut bytes = vec![0; (layout.chunk_table.end - layout.manifest.start) as usize];
        self.read_layer_part(id, layout.manifest.start, &mut bytes)?;
        let (manifest, table) =
            bytes.split_at((layout.manifest.end - layout.manifest.start) as usize);
        let manifest = Manifest::decode(manifest).context(|| format!("layer {id}"))?;
        let table = ChunkTable::decode(table).context(|| format!("layer {id}"))?;
        if manifest.id() != *id || manifest.chunk_table_digest != table.digest() {
            return Err(Error::corrupt(format!(
                "layer {id}: the object is not what its name says"
            )));
        }
        Ok((manifest, table))
    }

    /// Whether the layer is published.
    pub fn has_layer(&self, id: &LayerId) -> Result<bool> {
        self.has(&layer_key(id)?)
    }

    /// All layers, in the order of their ids.
    pub fn list_layers(&self) -> Result<Vec<LayerId>> {
        self.list_ids("layers/")
    }

    /// The layers whose hex id starts with `prefix` (two digits or more), in order.
    pub fn layers_like(&self, prefix: &str) -> Result<Vec<LayerId>> {
        self.ids_like("layers", prefix)
    }

    /// The environments whose hex id starts with `prefix` (two digits or more), in order.
    pub fn environments_like(&self, prefix: &str) -> Result<Vec<EnvId>> {
        self.ids_like("envs", prefix)
    }

    fn ids_like<T: FromStr + ToString>(&self, class: &str, prefix: &str) -> Result<Vec<T>> {
        let shard = prefix
            .get(..2)
            .ok_or_else(|| Error::invalid(format!("{prefix:?} is too short for an id")))?;
        let ids: Vec<T> = self.list_ids(&format!("{class}/{shard}/"))?;
        Ok(ids.into_iter().filter(|id| id.to_string().starts_with(prefix)).collect())
    }

    /// Publishes an environment document (canonical JSON). Returns its id, and whether it existed. Whether
    /// its layers exist is the caller's to check.
    pub fn put_environment(&self, document: &[u8]) -> Result<(EnvId, bool)> {
        let environment =
            Environment::decode(document).context(|| "environment to publish".to_owned())?;
        let id = environment.id();
        let existed = self.put_content(&environment_key(&id)?, &environment.canonical())?;
        Ok((id, existed))
    }

    /// An environment, checked against its id.
    pub fn read_environment(&self, id: &EnvId) -> Result<Environment> {
        let what = || format!("environment {id}");
        let bytes = self.read_object(&environment_key(id)?, environment::MAX_BYTES as u64, what)?;
        let environment = Environment::decode(&bytes).context(what)?;
        if environment.id() != *id {
            return Err(Error::corrupt(format!(
                "{}: the object holds {}",
                what(),
                environment.id()
            )));
        }
        Ok(environment)
    }

    /// Whether the environment is published.
    pub fn has_environment(&self, id: &EnvId) -> Result<bool> {
        self.has(&environment_key(id)?)
    }

    /// All environments, in the order of their ids.
    pub fn list_environments(&self) -> Result<Vec<EnvId>> {
        self.list_ids("envs/")
    }

    /// The names of all objects under a prefix, in byte order.
    pub(crate) fn list_names(&self, prefix: &str) -> Result<Vec<String>> {
        let mut names: Vec<String> = Vec::new();
        loop {
            let page = self.backend.list(prefix, names.last().map(String::as_str), PAGE)?;
            let last = page.len() < PAGE;
            names.extend(page);
            if last {
                return Ok(names);
            }
        }
    }

    /// The ids of all objects `<prefix><2 hex>/<id>`; what is named otherwise is not ours.
    pub(crate) fn list_ids<T: FromStr>(&self, prefix: &str) -> Result<Vec<T>> {
        let names = self.list_names(prefix)?;
        let parsed = names.iter().filter_map(|name| {
            let id = name.rsplit('/').next().and_then(|id| id.parse().ok());
            if id.is_none() {
                tracing::warn!("{}: object {name} has no name of ours", self.backend.describe());
            }
            id
        });
        Ok(parsed.collect())
    }

    /// Publishes a new object; `Exists` when the name is taken.
    pub(crate) fn put_new(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        let mut upload = self.backend.create(key)?;
        upload.write(bytes)?;
        upload.publish()
    }

    /// Publishes an object whose name commits to its bytes. True when it was there already.
    ///
    /// One that is there with other bytes is damaged; it helps nobody and is replaced.
    pub(crate) fn put_content(&self, key: &Key, bytes: &[u8]) -> Result<bool> {
        self.put_sound(key, bytes, bytes.len() as u64, |found| found == bytes)
    }

    /// As [`Store::put_content`]; `sound` says whether what is there, of at most `max_bytes`, may stay.
    pub(crate) fn put_sound(
        &self,
        key: &Key,
        bytes: &[u8],
        max_bytes: u64,
        sound: impl Fn(&[u8]) -> bool,
    ) -> Result<bool> {
        match self.put_new(key, bytes) {
            Err(error) if error.kind() == ErrorKind::Exists => {}
            other => return other.map(|()| false),
        }
        let holds = || match self.backend.read_all(key, max_bytes) {
            Ok(found) => Ok(sound(&found)),
            Err(error) if error.kind() == ErrorKind::Corrupt => Ok(false),
            Err(error) => Err(error),
        };
        // Twice, because a single bad read may be the reader's fault.
        if holds()? || holds()? {
            return Ok(true);
        }
        tracing::warn!(
            "{}: object {key} was damaged and is written again",
            self.backend.describe()
        );
        self.backend.delete(key)?;
        match self.put_new(key, bytes) {
            Err(error) if error.kind() == ErrorKind::Exists => Ok(true),
            other => other.map(|()| false),
        }
    }

    pub(crate) fn has(&self, key: &Key) -> Result<bool> {
        match self.backend.size(key) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// A whole object; when it is absent the error names what it is.
    pub(crate) fn read_object(
        &self,
        key: &Key,
        max_bytes: u64,
        what: impl Fn() -> String,
    ) -> Result<Vec<u8>> {
        self.backend.read_all(key, max_bytes).map_err(|error| named(error, what))
    }
}

fn named(error: Error, what: impl Fn() -> String) -> Error {
    let context = match error.kind() {
        ErrorKind::NotFound => format!("{} is not on the store", what()),
        _ => format!("read {}", what()),
    };
    error.context(context)
}

fn create_format(backend: &dyn Backend, key: &Key) -> Result<()> {
    let format = Format {
        format: "lamella-store".to_owned(),
        version: FORMAT_VERSION,
        store_id: random_hex()?,
    };
    let bytes = serde_json::to_vec(&format)
        .map_err(|error| Error::new(ErrorKind::Internal, "encode FORMAT").with_source(error))?;
    let mut upload = backend.create(key)?;
    upload.write(&bytes)?;
    match upload.publish() {
        Err(error) if error.kind() != ErrorKind::Exists => Err(error),
        _ => Ok(()), // whoever was first has chosen the id
    }
}

pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::new(ErrorKind::Internal, format!("random bytes: {error}")))?;
    Ok(bytes)
}

/// 32 random hex digits.
pub(crate) fn random_hex() -> Result<String> {
    Ok(layer::PackId(random()?).to_string())
}

fn layer_key(id: &LayerId) -> Result<Key> {
    sharded("layers", &id.to_string())
}

fn environment_key(id: &EnvId) -> Result<Key> {
    sharded("envs", &id.to_string())
}

/// `<class>/<first two digits>/<id>`.
pub(crate) fn sharded(class: &str, id: &str) -> Result<Key> {
    Key::new(format!("{class}/{}/{id}", &id[..2]))
}
