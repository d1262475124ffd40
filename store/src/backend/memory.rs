//! A store in the memory of this process, for tests and trials.
//!
//! Stores have names (`memory:NAME`); opening a name twice gives the same objects. They live until the
//! process ends. One lock guards the map; objects are shared, so reads copy outside it.
//!
//! Nothing survives a crash here.

use super::{Backend, Upload, absent, taken, too_large, too_short};
use crate::key::{Key, check_prefix};
use layer::Result;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

type Objects = Mutex<BTreeMap<String, Arc<[u8]>>>;

/// Objects in memory.
#[derive(Clone)]
pub struct Memory {
    name: String,
    objects: Arc<Objects>,
}

fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    /// A store of its own that nobody else can name.
    pub fn new() -> Self {
        Self { name: "anonymous".to_owned(), objects: Arc::default() }
    }

    /// The store of this name in this process.
    pub fn named(name: &str) -> Self {
        static NAMED: OnceLock<Mutex<HashMap<String, Arc<Objects>>>> = OnceLock::new();
        let mut named = locked(NAMED.get_or_init(Mutex::default));
        let objects = named.entry(name.to_owned()).or_default().clone();
        Self { name: name.to_owned(), objects }
    }

    fn object(&self, key: &Key) -> Result<Arc<[u8]>> {
        let found = locked(&self.objects).get(key.as_str()).cloned();
        found.ok_or_else(|| absent(key, &self.describe()))
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({})", self.name)
    }
}

impl Backend for Memory {
    fn read_at(&self, key: &Key, offset: u64, into: &mut [u8]) -> Result<()> {
        let object = self.object(key)?;
        let range = usize::try_from(offset)
            .ok()
            .and_then(|start| Some(start..start.checked_add(into.len())?))
            .and_then(|range| object.get(range));
        let bytes = range.ok_or_else(|| too_short(key, offset, into.len()))?;
        into.copy_from_slice(bytes);
        Ok(())
    }

    fn read_all(&self, key: &Key, max_bytes: u64) -> Result<Vec<u8>> {
        let object = self.object(key)?;
        let size = object.len() as u64;
        if size > max_bytes {
            return Err(too_large(key, size, max_bytes));
        }
        Ok(object.to_vec())
    }

    fn size(&self, key: &Key) -> Result<u64> {
        Ok(self.object(key)?.len() as u64)
    }

    fn create(&self, key: &Key) -> Result<Box<dyn Upload>> {
        Ok(Box::new(MemoryUpload { store: self.clone(), key: key.clone(), bytes: Vec::new() }))
    }

    fn list(&self, prefix: &str, start_after: Option<&str>, limit: usize) -> Result<Vec<String>> {
        check_prefix(prefix)?;
        let start = match start_after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        let objects = locked(&self.objects);
        let names = objects.range::<str, _>((start, Bound::Unbounded)).map(|(name, _)| name);
        Ok(names.take_while(|name| name.starts_with(prefix)).take(limit).cloned().collect())
    }

    fn delete(&self, key: &Key) -> Result<()> {
        locked(&self.objects).remove(key.as_str());
        Ok(())
    }

    fn describe(&self) -> String {
        format!("memory:{}", self.name)
    }
}

struct MemoryUpload {
    store: Memory,
    key: Key,
    bytes: Vec<u8>,
}

impl Upload for MemoryUpload {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn publish(self: Box<Self>) -> Result<()> {
        use std::collections::btree_map::Entry;
        match locked(&self.store.objects).entry(self.key.as_str().to_owned()) {
            Entry::Occupied(_) => Err(taken(&self.key, &self.store.describe())),
            Entry::Vacant(place) => {
                place.insert(self.bytes.into());
                Ok(())
            }
        }
    }
}
