//! Layers that must stay in the cache: an empty file each, `<cache>/pins/<layer id>`.
//!
//! A pin outlives the layer's folder: a damaged one that is fetched anew is pinned still, and a layer can
//! be pinned before it is on the node.
//!
//! Locking: one mutex around the set in memory, held while a file is made or removed.

use super::create_folder;
use layer::{Context, Error, LayerId, Result};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The pins of a node cache.
#[derive(Debug)]
pub struct Pins {
    folder: PathBuf,
    pinned: Mutex<BTreeSet<LayerId>>,
}

impl Pins {
    /// Reads the pins below a cache folder.
    pub fn open(cache: &Path) -> Result<Self> {
        let folder = cache.join("pins");
        create_folder(&folder)?;
        let name = || format!("list {}", folder.display());
        let mut pinned = BTreeSet::new();
        for entry in std::fs::read_dir(&folder).context(name)? {
            let entry = entry.context(name)?;
            pinned.extend(entry.file_name().to_str().and_then(|name| name.parse::<LayerId>().ok()));
        }
        Ok(Self { folder, pinned: Mutex::new(pinned) })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<LayerId>> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this layer is pinned.
    pub fn contains(&self, id: &LayerId) -> bool {
        self.lock().contains(id)
    }

    /// Pins a layer or lets it go, durably. Answers whether that changed anything.
    pub fn set(&self, id: &LayerId, to: bool) -> Result<bool> {
        let path = self.folder.join(id.to_string());
        let name = || format!("pin {}", path.display());
        let mut pinned = self.lock();
        if pinned.contains(id) == to {
            return Ok(false);
        }
        if to {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(false).mode(0o600);
            options.open(&path).context(name)?;
        } else {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::io(name(), error));
                }
                _ => {}
            }
        }
        File::open(&self.folder).and_then(|folder| folder.sync_all()).context(name)?;
        if to {
            pinned.insert(*id)
        } else {
            pinned.remove(id)
        };
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_survive_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (LayerId([1; 32]), LayerId([2; 32]));
        let pins = Pins::open(folder.path()).unwrap();
        assert!(pins.set(&one, true).unwrap() && !pins.set(&one, true).unwrap());
        pins.set(&two, true).unwrap();
        assert!(pins.set(&two, false).unwrap());
        let again = Pins::open(folder.path()).unwrap();
        assert!(again.contains(&one) && !again.contains(&two));
    }
}
