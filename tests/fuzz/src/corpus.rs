//! What earlier runs found: one archive of inputs for each target, `corpus/NAME.tar.zst`.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Where a target's corpus lies.
pub fn path(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(format!("{target}.tar.zst"))
}

/// The inputs of a target's corpus, in the order of the archive.
pub fn load(target: &str) -> io::Result<Vec<Vec<u8>>> {
    let file = File::open(path(target))?;
    let mut archive = tar::Archive::new(zstd::Decoder::new(file)?);
    let mut inputs = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        if entry.header().entry_type().is_file() {
            let mut input = Vec::new();
            entry.read_to_end(&mut input)?;
            inputs.push(input);
        }
    }
    Ok(inputs)
}
