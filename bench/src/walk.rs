//! Going through a tree of files.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Shows every entry below a folder, the folder itself left out; crosses no file system border.
///
/// # Errors
/// What cannot be listed or looked at; what `each` answers.
pub fn entries(
    root: &Path,
    each: &mut dyn FnMut(&Path, &Metadata) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let device = fs::symlink_metadata(root)?.dev();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            if metadata.dev() != device {
                continue;
            }
            each(&entry.path(), &metadata)?;
            if metadata.is_dir() {
                folders.push(entry.path());
            }
        }
    }
    Ok(())
}
