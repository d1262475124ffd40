//! Culling: when the cache disk is nearly full, the kernel asks for old cache files to be dropped.
//!
//! The kernel keeps them as `cache/I<volume>/@<2 hex>/<name>` below the folder that it was given. Those in
//! use are refused, so the round simply goes from the one that was not read for longest to the latest.

use super::control::Control;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Drops files until there is room. Answers how many.
pub fn cull(control: &dyn Control, folder: &Path) -> io::Result<usize> {
    let mut culled = 0;
    let mut files: Option<Vec<Candidate>> = None;
    while control.is_short_of_room()? {
        let files = files.get_or_insert_with(|| candidates(&folder.join("cache")));
        let Some(oldest) = files.pop() else { return Ok(culled) };
        match control.cull(&oldest.folder, &oldest.name) {
            Ok(()) => culled += 1,
            Err(error) => tracing::debug!(%error, name = oldest.name, "a cache file stays"),
        }
    }
    Ok(culled)
}

struct Candidate {
    accessed: i64,
    folder: PathBuf,
    name: String,
}

/// The oldest last.
fn candidates(cache: &Path) -> Vec<Candidate> {
    let mut found = Vec::new();
    for volume in folders(cache) {
        for folder in folders(&volume) {
            for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
                // What vanishes meanwhile is simply not there.
                if let (Ok(name), Ok(metadata)) =
                    (entry.file_name().into_string(), entry.metadata())
                    && metadata.is_file()
                {
                    let (accessed, folder) = (metadata.atime(), folder.clone());
                    found.push(Candidate { accessed, folder, name });
                }
            }
        }
    }
    found.sort_by_key(|candidate| std::cmp::Reverse(candidate.accessed));
    found
}

fn folders(parent: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}
