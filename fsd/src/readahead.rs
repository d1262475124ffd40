//! How much the kernel reads ahead on a layer: little while little of it was asked for, so that a
//! small command fetches little; the usual amount once the layer is busy or complete.
//!
//! The kernel gives every EROFS superblock on a plain file a backing device of its own, with a
//! `read_ahead_kb` that counts for files opened afterwards. Nothing says which device belongs to which
//! mount, so the one that appeared during our mount is taken, and none when several did.
//!
//! Locking: one mutex around the mounts of this process, one a layer around its device; neither is
//! held while anything but the mount or the write to sysfs blocks.
//! What survives a crash: the name of the device, beside the holders; the next fsd begins quietly.

use layer::{Context, Result};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Readahead of a layer of which little was asked.
const QUIET_BYTES: u64 = 16 << 10;
/// Readahead of a layer that is read much, and of a complete one: the kernel's own default.
const USUAL_BYTES: u64 = 128 << 10;
/// A layer of which this much was asked is read much.
pub const BUSY_BYTES: u64 = 2 << 20;

/// The backing devices of the kernel.
#[derive(Debug)]
pub struct BackingDevices {
    folder: PathBuf,
    mounting: Mutex<()>,
}

/// One superblock's backing device. Its name is not used again before
/// the next boot.
#[derive(Debug)]
pub struct BackingDevice {
    folder: PathBuf,
    name: String,
}

impl Default for BackingDevices {
    fn default() -> Self {
        Self { folder: "/sys/class/bdi".into(), mounting: Mutex::default() }
    }
}

impl BackingDevices {
    /// Mounts, and finds the device that came with it. None when none came, or when somebody else
    /// mounted at the same moment, so that it is not known which one is ours.
    pub fn around(&self, mount: impl FnOnce() -> Result<()>) -> Result<Option<BackingDevice>> {
        let _one_mount = self.mounting.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.names();
        mount()?;
        let after = self.names();
        let mut fresh = after.difference(&before);
        Ok(match (fresh.next(), fresh.next()) {
            (Some(name), None) => Some(self.device(name)),
            _ => None,
        })
    }

    /// The device that a former fsd noted, if it exists still.
    pub fn known(&self, name: &str) -> Option<BackingDevice> {
        self.names().contains(name).then(|| self.device(name))
    }

    fn device(&self, name: &str) -> BackingDevice {
        BackingDevice { folder: self.folder.clone(), name: name.to_owned() }
    }

    fn names(&self) -> BTreeSet<String> {
        let names = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let names = names.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| name.starts_with("erofs-")).collect()
    }
}

/// The readahead of one layer.
#[derive(Debug, Default)]
pub struct Readahead {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    device: Option<BackingDevice>,
    bytes: u64,
}

impl Readahead {
    /// From now on this is the layer's device; what the kernel set for it counts as unknown.
    pub fn adopt(&self, device: Option<BackingDevice>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        *state = State { device, bytes: 0 };
    }

    /// Sets what a layer in this state should have. An error costs time only, so it is logged.
    pub fn follow(&self, asked_bytes: u64, complete: bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = wanted(asked_bytes, complete);
        let Some(device) = state.device.as_ref().filter(|_| state.bytes != wanted) else { return };
        match device.set(wanted) {
            Ok(()) => state.bytes = wanted,
            Err(error) => {
                tracing::warn!(error = %error.chain(), "the readahead of a layer stays");
                state.device = None;
            }
        }
    }
}

impl BackingDevice {
    /// The kernel's name of it.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn set(&self, bytes: u64) -> Result<()> {
        let knob = self.folder.join(&self.name).join("read_ahead_kb");
        std::fs::write(&knob, (bytes >> 10).to_string())
            .context(|| format!("write {}", knob.display()))
    }
}

fn wanted(asked_bytes: u64, complete: bool) -> u64 {
    if complete || asked_bytes >= BUSY_BYTES { USUAL_BYTES } else { QUIET_BYTES }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(folder: &tempfile::TempDir) -> BackingDevices {
        BackingDevices { folder: folder.path().to_owned(), mounting: Mutex::default() }
    }

    fn appears(folder: &tempfile::TempDir, name: &str) {
        let device = folder.path().join(name);
        std::fs::create_dir(&device).unwrap();
        std::fs::write(device.join("read_ahead_kb"), "128\n").unwrap();
    }

    fn shown(folder: &tempfile::TempDir, name: &str) -> String {
        std::fs::read_to_string(folder.path().join(name).join("read_ahead_kb")).unwrap()
    }

    #[test]
    fn readahead_is_small_until_a_layer_is_busy_or_complete() {
        let folder = tempfile::tempdir().unwrap();
        appears(&folder, "erofs-1");
        appears(&folder, "8:0");
        let mount = || {
            appears(&folder, "erofs-2");
            appears(&folder, "overlay-7");
            Ok(())
        };
        let device = devices(&folder).around(mount).unwrap().unwrap();
        assert_eq!(device.name(), "erofs-2");
        let readahead = Readahead::default();
        readahead.follow(0, false);
        readahead.adopt(Some(device));
        let steps = [(0, false, "16"), (BUSY_BYTES - 1, false, "16"), (BUSY_BYTES, false, "128")];
        for (asked, complete, kib) in steps.into_iter().chain([(0, false, "16"), (0, true, "128")])
        {
            readahead.follow(asked, complete);
            assert_eq!(shown(&folder, "erofs-2"), kib, "{asked} asked, complete: {complete}");
        }
        assert_eq!(shown(&folder, "erofs-1"), "128\n");
        readahead.adopt(devices(&folder).known("erofs-2"));
        readahead.follow(0, false);
        assert_eq!(shown(&folder, "erofs-2"), "16", "a later fsd");
        std::fs::remove_dir_all(folder.path().join("erofs-2")).unwrap();
        readahead.follow(0, true);
        readahead.follow(0, false);
        for gone in ["erofs-2", "8:0", "../erofs-1", ""] {
            assert!(devices(&folder).known(gone).is_none(), "{gone:?}");
        }
    }

    #[test]
    fn a_device_that_may_be_somebody_elses_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let devices = devices(&folder);
        let both = || {
            appears(&folder, "erofs-1");
            appears(&folder, "erofs-2");
            Ok(())
        };
        assert!(devices.around(both).unwrap().is_none());
        assert!(devices.around(|| Ok(())).unwrap().is_none());
        let failed = devices.around(|| Err(layer::Error::invalid("no mount")));
        assert!(failed.is_err());
    }
}
