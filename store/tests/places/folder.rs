//! Files that several tests make and share, of one process or of many.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A file in the folder that the build has for tests: made beside its name, then given it, as others make the
/// same at the same moment.
pub fn in_folder(name: &str, make: impl FnOnce(&Path)) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let own = path.with_extension(format!("{}-{number}", std::process::id()));
    make(&own);
    std::fs::rename(&own, &path).unwrap();
    path
}
