//! What cache files are called, what is in them, and which ones the kernel has open.
//!
//! Locking: one mutex around each table, held for look-ups.

use super::control::CacheFile;
use crate::served::ServedLayer;
use layer::chunk::BLOCK_BYTES;
use layer::{Context, Error, LayerId, Result};
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The name of a cache file: `<layer id>.data`, or `<layer id>.meta-<n>` for the n-th of several mounts,
/// because a domain has one image of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name {
    /// Of which layer.
    pub layer: LayerId,
    /// Which part of it.
    pub part: Part,
}

/// Part of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The EROFS metadata image, for one mount.
    Metadata(u32),
    /// The data space.
    Data,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.part {
            Part::Metadata(mount) => write!(f, "{}.meta-{mount}", self.layer),
            Part::Data => write!(f, "{}.data", self.layer),
        }
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let unknown = || Error::not_found(format!("no cache file of ours is called {text:?}"));
        let (layer, part) = text.split_once('.').ok_or_else(unknown)?;
        let part = match part.strip_prefix("meta-") {
            Some(mount) => Part::Metadata(mount.parse().map_err(|_| unknown())?),
            None if part == "data" => Part::Data,
            None => return Err(unknown()),
        };
        Ok(Self { layer: layer.parse().map_err(|_| unknown())?, part })
    }
}

/// What a cache file is filled from.
#[derive(Debug)]
pub enum Content {
    /// A complete local file of this length.
    Local(File, u64),
    /// The layer's data, fetched when it is asked for.
    Fetched,
}

/// A cache file that the kernel has open.
pub struct Object {
    /// What it is.
    pub name: Name,
    /// The layer, served for as long as this exists.
    pub layer: Arc<ServedLayer>,
    /// Where its bytes are.
    pub content: Content,
    /// Where they go.
    pub file: Box<dyn CacheFile>,
}

impl Content {
    /// What the part of a layer is filled from.
    pub fn of(layer: &ServedLayer, part: Part) -> Result<Self> {
        match part {
            Part::Data => Ok(Self::Fetched),
            Part::Metadata(_) => {
                let path = layer.fetch().cached().metadata_path();
                let name = || format!("open {}", path.display());
                let file = File::open(&path).context(name)?;
                let bytes = file.metadata().context(name)?.len();
                Ok(Self::Local(file, bytes))
            }
        }
    }

    /// Its length in bytes.
    pub fn bytes(&self, layer: &ServedLayer) -> u64 {
        match self {
            Self::Local(_, bytes) => *bytes,
            Self::Fetched => layer.fetch().cached().table().data_bytes(),
        }
    }
}

/// Reads whole blocks of a local file; zeros behind its end up to the next border.
pub fn read_local(file: &File, length: u64, offset: u64, bytes: u64) -> Result<Vec<u8>> {
    let end = offset.saturating_add(bytes).min(length);
    let mut content = vec![0; end.saturating_sub(offset) as usize];
    file.read_exact_at(&mut content, offset).context(|| "read a metadata image".to_owned())?;
    content.resize(content.len().next_multiple_of(BLOCK_BYTES as usize), 0);
    Ok(content)
}

/// The cache files that are open, by their numbers.
#[derive(Default)]
pub struct Objects {
    by_number: Mutex<HashMap<u32, Arc<Object>>>,
}

impl Objects {
    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Arc<Object>>> {
        self.by_number.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers what had the number before.
    pub fn insert(&self, number: u32, object: Arc<Object>) -> Option<Arc<Object>> {
        self.lock().insert(number, object)
    }

    /// The object of this number.
    pub fn find(&self, number: u32) -> Option<Arc<Object>> {
        self.lock().get(&number).map(Arc::clone)
    }

    /// Takes one away.
    pub fn remove(&self, number: u32) -> Option<Arc<Object>> {
        self.lock().remove(&number)
    }

    /// Takes away an object that the kernel closed, with every earlier opening of the same name: the
    /// kernel forgot their numbers when it opened it again.
    pub fn close(&self, number: u32) -> Option<Vec<Arc<Object>>> {
        let mut objects = self.lock();
        let name = objects.get(&number)?.name;
        let gone = objects.extract_if(|_, object| object.name == name);
        Some(gone.map(|(_, object)| object).collect())
    }

    /// The open parts of a layer.
    pub fn parts(&self, layer: &LayerId) -> Vec<Part> {
        let objects = self.lock();
        let of_layer = objects.values().filter(|object| object.name.layer == *layer);
        of_layer.map(|object| object.name.part).collect()
    }
}

/// The layers whose cache files may be opened.
#[derive(Debug, Default)]
pub struct Layers {
    by_id: Mutex<HashMap<LayerId, Arc<ServedLayer>>>,
}

impl Layers {
    fn lock(&self) -> MutexGuard<'_, HashMap<LayerId, Arc<ServedLayer>>> {
        self.by_id.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False when it is there already.
    pub fn insert(&self, layer: &Arc<ServedLayer>) -> bool {
        self.lock().insert(layer.id(), Arc::clone(layer)).is_none()
    }

    /// What is open of it stays so.
    pub fn remove(&self, id: &LayerId) {
        self.lock().remove(id);
    }

    /// The layer of this id. `NotFound` when it is not served.
    pub fn find(&self, id: &LayerId) -> Result<Arc<ServedLayer>> {
        let found = self.lock().get(id).map(Arc::clone);
        found.ok_or_else(|| Error::not_found(format!("layer {id} is not served")))
    }
}
