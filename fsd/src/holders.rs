//! Who holds which layer: files that outlive fsd but not the node's boot.
//!
//! ```text
//! run/holders/<layer>/<holder, escaped>     empty
//! run/holders/<layer>/.mortal               no later fsd can serve what is mounted
//! run/holders/<layer>/.alone                what is mounted needs no fsd
//! run/holders/<layer>/.device               the backing device of what is mounted, by name
//! run/exported/<layer>/<holder, escaped>    the same for exports
//! run/exported/<layer>/.plain               what is exported are plain files of the cache
//! run/exported/.boot                        the boot of the machine in which that was so
//! ```
//! Nothing is flushed: after a crash of the machine nothing is mounted either, and the next start
//! removes what names no mount.
//!
//! Locking: the files of one layer change under the attachments' lock of that layer.

use crate::cache::create_folder;
use layer::{Context, Error, LayerId, Result};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const MORTAL: &str = ".mortal";
const ALONE: &str = ".alone";
const DEVICE: &str = ".device";
const PLAIN: &str = ".plain";
const BOOT: &str = ".boot";
/// Another one after each boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Longest name of a holder in bytes, escaped.
const MAX_NAME_BYTES: usize = 240;

/// The folder of holders.
#[derive(Debug, Clone)]
pub struct Holders {
    folder: PathBuf,
}

impl Holders {
    /// Uses this folder, made when it is absent.
    pub fn open(folder: &Path) -> Result<Self> {
        create_folder(folder)?;
        Ok(Self { folder: folder.to_owned() })
    }

    fn of(&self, layer: &LayerId) -> PathBuf {
        self.folder.join(layer.to_string())
    }

    /// Layers that have a folder here.
    pub fn layers(&self) -> Result<Vec<LayerId>> {
        let name = || format!("list {}", self.folder.display());
        let mut layers = Vec::new();
        for entry in std::fs::read_dir(&self.folder).context(name)? {
            let file_name = entry.context(name)?.file_name();
            if let Some(id) = file_name.to_str().and_then(|text| text.parse().ok()) {
                layers.push(id);
            }
        }
        Ok(layers)
    }

    /// Who holds a layer.
    pub fn list(&self, layer: &LayerId) -> Result<BTreeSet<String>> {
        let folder = self.of(layer);
        let name = || format!("list {}", folder.display());
        let entries = match std::fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(BTreeSet::new());
            }
            Err(error) => return Err(Error::io(name(), error)),
        };
        let mut holders = BTreeSet::new();
        for entry in entries {
            let file_name = entry.context(name)?.file_name();
            if let Some(text) = file_name.to_str().filter(|text| !text.starts_with('.')) {
                holders.insert(unescape(text));
            }
        }
        Ok(holders)
    }

    /// Adds a holder; one that is there stays one.
    pub fn add(&self, layer: &LayerId, holder: &str) -> Result<()> {
        let folder = self.of(layer);
        let path = folder.join(escape(holder)?);
        let made = std::fs::File::create(&path).or_else(|error| {
            if error.kind() != std::io::ErrorKind::NotFound {
                return Err(error);
            }
            std::fs::create_dir(&folder)?;
            std::fs::File::create(&path)
        });
        made.map(|_| ()).context(|| format!("note holder {holder:?} of layer {layer}"))
    }

    /// Removes a holder; false when there was none of that name.
    pub fn remove(&self, layer: &LayerId, holder: &str) -> Result<bool> {
        let path = self.of(layer).join(escape(holder)?);
        match std::fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => {
                Err(Error::io(format!("forget holder {holder:?} of layer {layer}"), error))
            }
        }
    }

    /// Removes everything about a layer.
    pub fn clear(&self, layer: &LayerId) -> Result<()> {
        let folder = self.of(layer);
        match std::fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io(format!("remove {}", folder.display()), error))
            }
            _ => Ok(()),
        }
    }

    /// Whether what is mounted ended with the fsd that mounted it.
    pub fn is_mortal(&self, layer: &LayerId) -> bool {
        self.of(layer).join(MORTAL).exists()
    }

    /// Notes whether what is mounted ends with this fsd.
    pub fn set_mortal(&self, layer: &LayerId, mortal: bool) -> Result<()> {
        self.set_mark(layer, MORTAL, mortal.then_some(""))
    }

    /// Whether what is mounted reads right without any fsd.
    pub fn is_alone(&self, layer: &LayerId) -> bool {
        self.of(layer).join(ALONE).exists()
    }

    /// Notes whether what is mounted needs no fsd.
    pub fn set_alone(&self, layer: &LayerId, alone: bool) -> Result<()> {
        self.set_mark(layer, ALONE, alone.then_some(""))
    }

    /// The backing device of what is mounted, when it is known.
    pub fn device(&self, layer: &LayerId) -> Option<String> {
        std::fs::read_to_string(self.of(layer).join(DEVICE)).ok()
    }

    /// Notes the backing device of what is mounted.
    pub fn set_device(&self, layer: &LayerId, name: Option<&str>) -> Result<()> {
        self.set_mark(layer, DEVICE, name)
    }

    /// Whether what is exported needs no fsd.
    pub fn is_plain(&self, layer: &LayerId) -> bool {
        self.of(layer).join(PLAIN).exists()
    }

    /// Notes whether what is exported needs no fsd.
    pub fn set_plain(&self, layer: &LayerId, plain: bool) -> Result<()> {
        self.set_mark(layer, PLAIN, plain.then_some(""))
    }

    /// Whether all this was noted since the machine was booted; from now on it was.
    pub fn is_of_this_boot(&self) -> Result<bool> {
        let path = self.folder.join(BOOT);
        let name = || format!("note the boot in {}", path.display());
        let boot = std::fs::read(BOOT_ID).context(|| format!("read {BOOT_ID}"))?;
        if std::fs::read(&path).is_ok_and(|noted| noted == boot) {
            return Ok(true);
        }
        std::fs::write(&path, boot).context(name)?;
        Ok(false)
    }

    fn set_mark(&self, layer: &LayerId, mark: &str, content: Option<&str>) -> Result<()> {
        let path = self.of(layer).join(mark);
        let changed = match content {
            Some(content) => {
                create_folder(&self.of(layer))?;
                std::fs::write(&path, content)
            }
            None => std::fs::remove_file(&path),
        };
        match changed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io(format!("note the plane of layer {layer}"), error))
            }
            _ => Ok(()),
        }
    }
}

/// A file name for any text: bytes other than letters, digits, `-`, `_`, `:` and inner dots as `%XX`.
fn escape(holder: &str) -> Result<String> {
    if holder.is_empty() {
        return Err(Error::invalid("a holder without a name"));
    }
    let mut name = String::with_capacity(holder.len());
    for byte in holder.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b':' => name.push(byte as char),
            b'.' if !name.is_empty() => name.push('.'),
            _ => name.push_str(&format!("%{byte:02X}")),
        }
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(Error::invalid(format!("holder name of {} bytes", holder.len())));
    }
    Ok(name)
}

fn unescape(name: &str) -> String {
    let mut bytes = Vec::with_capacity(name.len());
    let mut rest = name.as_bytes();
    while let [first, after @ ..] = rest {
        let code = after.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match code.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) if *first == b'%' => {
                bytes.push(byte);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_survive_reopening() {
        let folder = tempfile::tempdir().unwrap();
        let holders = Holders::open(folder.path()).unwrap();
        let layer = LayerId([3; 32]);
        for name in ["sandbox-1", "mount:/mnt/a b", "..", ".mortal", "50%", "ü"] {
            holders.add(&layer, name).unwrap();
            holders.add(&layer, name).unwrap();
        }
        holders.set_mortal(&layer, true).unwrap();
        let again = Holders::open(folder.path()).unwrap();
        assert_eq!(again.layers().unwrap(), [layer]);
        assert_eq!(again.list(&layer).unwrap().len(), 6);
        assert!(again.list(&layer).unwrap().contains("mount:/mnt/a b"));
        assert!(again.is_mortal(&layer));
        again.set_mortal(&layer, false).unwrap();
        assert!(!again.is_mortal(&layer));
        again.set_device(&layer, Some("erofs-7")).unwrap();
        assert_eq!(again.device(&layer).as_deref(), Some("erofs-7"));
        again.set_device(&layer, None).unwrap();
        assert_eq!(again.device(&layer), None);
        assert!(again.remove(&layer, "..").unwrap());
        assert!(!again.remove(&layer, "..").unwrap());
        assert!(again.add(&layer, "").is_err());
        assert!(again.add(&layer, &"/".repeat(200)).is_err());
        again.clear(&layer).unwrap();
        assert!(again.list(&layer).unwrap().is_empty());
    }
}
