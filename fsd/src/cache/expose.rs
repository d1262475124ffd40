//! A complete layer as plain files for somebody who maps them: a virtual machine's memory.
//!
//! The data file is lengthened to what a mapping wants, which costs nothing, and the metadata image is copied
//! with zeros behind it. From then on whoever maps them needs no fsd, and nobody is told when he ends.
//!
//! Locking: the layer's durable state, for the one moment in which completeness is made sure of.
// INVARIANT: the copy in the folder says that the data file may be mapped, also to later processes: no block of
// it is ever given back. The layer leaves whole, by its name, and a mapping keeps the file.
// CRASH: the copy is made under another name first. An export that was not answered is simply asked for again.

use super::entry::CachedLayer;
use layer::{Context, Error, ErrorKind, Result};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

/// The metadata image with zeros up to the wanted length; present once the layer was exposed.
const PADDED: &str = "meta.padded";

/// The plain files of an exposed layer.
#[derive(Debug)]
pub struct Exposed {
    /// The EROFS metadata image and zeros.
    pub metadata: PathBuf,
    /// The data space and zeros.
    pub data: PathBuf,
}

/// Whether the folder of a layer says that its files may be mapped.
pub(super) fn is_exposed(folder: &Path) -> bool {
    folder.join(PADDED).exists()
}

impl CachedLayer {
    /// Whether somebody may have the data file mapped, so that its blocks stay.
    pub fn is_exposed(&self) -> bool {
        is_exposed(self.folder())
    }

    /// Makes both files multiples of `alignment` long. `Busy` for a layer that is not durably complete.
    pub fn expose(&self, alignment: u64) -> Result<Exposed> {
        let name = || format!("expose layer {}", self.id());
        let (image, padded) = (self.metadata_path(), self.folder().join(PADDED));
        let fresh = self.folder().join(format!(".{PADDED}"));
        let mut source = std::fs::File::open(&image).context(name)?;
        let mut options = std::fs::OpenOptions::new();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        let mut copy = options.open(&fresh).context(name)?;
        let bytes = std::io::copy(&mut source, &mut copy).context(name)?;
        copy.set_len(bytes.next_multiple_of(alignment)).context(name)?;
        std::fs::rename(&fresh, &padded).context(name)?;
        // An eviction of chunks holds this throughout, and looks for the copy first.
        let durable = self.durable.lock().unwrap_or_else(PoisonError::into_inner);
        if !durable.presence.is_complete() {
            let text = format!("layer {} is not complete", self.id());
            return Err(Error::new(ErrorKind::Busy, text));
        }
        let bytes = self.table().data_bytes().next_multiple_of(alignment);
        let lengthened = rustix::fs::ftruncate(self.quiet_data(), bytes);
        lengthened.map_err(|error| Error::io(name(), error.into()))?;
        Ok(Exposed { metadata: padded, data: self.data_path() })
    }
}
