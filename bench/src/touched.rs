//! What a command needs of an image: the pages of the unpacked trees' files that are in the page cache
//! after it ran from a dropped cache with readahead off.
//!
//! Readahead is switched off for the whole device (`/sys/class/bdi/MAJOR:MINOR/read_ahead_kb`) and put
//! back on drop. Fault-around needs no switch: it maps pages that are resident already and reads none.

use crate::{measure, walk};
use anyhow::Context;
use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Readahead of the device below a path, switched off.
#[derive(Debug)]
pub struct WithoutReadahead {
    knob: PathBuf,
    before: String,
}

impl WithoutReadahead {
    /// Switches it off.
    pub fn below(path: &Path) -> anyhow::Result<Self> {
        let (major, minor) = measure::device_below(path)?;
        let knob = PathBuf::from(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"));
        let shown = knob.display().to_string();
        let before = fs::read_to_string(&knob).with_context(|| shown.clone())?;
        fs::write(&knob, "0").with_context(|| shown)?;
        Ok(Self { knob, before })
    }
}

impl Drop for WithoutReadahead {
    fn drop(&mut self) {
        if let Err(error) = fs::write(&self.knob, &self.before) {
            crate::shell::say(format!(
                "readahead stays off: write {} to {}: {error}",
                self.before.trim(),
                self.knob.display()
            ));
        }
    }
}

/// Bytes of all regular files of a tree that are in the page cache; hard links count once.
pub fn resident_bytes(root: &Path) -> anyhow::Result<u64> {
    let mut seen = HashSet::new();
    let mut total = 0;
    walk::entries(root, &mut |path, metadata| {
        if metadata.is_file() && metadata.len() > 0 && seen.insert(metadata.ino()) {
            let file = File::open(path)?;
            total += sys::measure::resident_bytes(&file, metadata.len())
                .with_context(|| path.display().to_string())?;
        }
        Ok(())
    })?;
    Ok(total)
}
