//! Files that several test processes make and share.

use std::path::{Path, PathBuf};

/// A file in the folder that the build has for tests: made beside its name, then given it, as other test
/// processes make the same.
pub fn in_folder(name: &str, make: impl FnOnce(&Path)) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let own = path.with_extension(std::process::id().to_string());
    make(&own);
    std::fs::rename(&own, &path).unwrap();
    path
}
