//! What is kept of container images beside their layers, so that they can be exported as they came.
//!
//! - `framings/<diffID>/<layer id>`: what of a layer's tar is not the contents of files, so that the tar can be
//!   written again; whoever imports the tar once more finds the layer that was made of it.
//! - `streams/<diffID>/<blob digest>`: how that tar was compressed, or the compressed blob itself.
//! - `images/<2 hex>/<digest>`: the documents of an image, named by an environment.
//!
//! A diffID or blob digest `sha256:<hex>` is the component `sha256-<hex>`. The bytes are the builder's business.
//! A framing is in use as long as its layer is, a stream as long as a framing of its diffID is, documents as
//! long as an environment names them.
//!
//! // CRASH: each is one published object, whole or not there.

use crate::backend::{Backend, Upload};
use crate::key::Key;
use crate::objects::Store;
use layer::{Digest, Error, ErrorKind, LayerId, Result};
use std::io::Read;
use std::sync::Arc;

/// The longest documents of one image.
pub const MAX_IMAGE_BYTES: u64 = 64 << 20;
/// How much of an object is read at once.
const PART_BYTES: u64 = 1 << 20;

/// An object beside the layers of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kept {
    /// The framing of the tar with this diffID, in terms of this layer.
    Framing(String, LayerId),
    /// The compression of the tar with this diffID into the blob with this digest.
    Stream(String, String),
}

impl Kept {
    fn key(&self) -> Result<Key> {
        Key::new(match self {
            Self::Framing(diff_id, layer) => format!("framings/{}/{layer}", component(diff_id)?),
            Self::Stream(diff_id, blob) => {
                format!("streams/{}/{}", component(diff_id)?, component(blob)?)
            }
        })
    }
}

/// `sha256:<hex>` as a part of a name.
fn component(digest: &str) -> Result<String> {
    match digest.split_once(':') {
        Some((algorithm @ ("sha256" | "sha512"), hex))
            if hex.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)) =>
        {
            Ok(format!("{algorithm}-{hex}"))
        }
        _ => Err(Error::invalid(format!("{digest:?} is no sha256 or sha512 digest"))),
    }
}

impl Store {
    /// Starts an object; publishing one that is there already is `Exists` and does no harm.
    pub fn create_kept(&self, kept: &Kept) -> Result<Box<dyn Upload>> {
        self.backend().create(&kept.key()?)
    }

    /// Whether the object is there.
    pub fn has_kept(&self, kept: &Kept) -> Result<bool> {
        self.has(&kept.key()?)
    }

    /// Reads an object from its start; `None` when there is none.
    pub fn open_kept(&self, kept: &Kept) -> Result<Option<KeptReader>> {
        let key = kept.key()?;
        match self.backend().size(&key) {
            Ok(size) => Ok(Some(KeptReader {
                backend: Arc::clone(self.backend()),
                key,
                size,
                position: 0,
                part: Vec::new(),
                used: 0,
            })),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The layers that were made of the tar with this diffID.
    pub fn layers_of_tar(&self, diff_id: &str) -> Result<Vec<LayerId>> {
        self.list_ids(&format!("framings/{}/", component(diff_id)?))
    }

    /// The digests of the blobs that the tar with this diffID came in.
    pub fn streams_of_tar(&self, diff_id: &str) -> Result<Vec<String>> {
        let names = self.list_names(&format!("streams/{}/", component(diff_id)?))?;
        let digests = names.iter().filter_map(|name| name.rsplit('/').next()?.split_once('-'));
        Ok(digests.map(|(algorithm, hex)| format!("{algorithm}:{hex}")).collect())
    }

    /// Keeps the documents of an image; the digest is what an environment names them by.
    pub fn put_image_documents(&self, bytes: &[u8]) -> Result<Digest> {
        if bytes.len() as u64 > MAX_IMAGE_BYTES {
            return Err(Error::invalid(format!("{} bytes of image documents", bytes.len())));
        }
        let digest = Digest::of(bytes);
        self.put_content(&image_key(&digest)?, bytes)?;
        Ok(digest)
    }

    /// The documents of an image, compared with their digest.
    pub fn read_image_documents(&self, digest: &Digest) -> Result<Vec<u8>> {
        let what = || format!("the documents {digest} of an image");
        let bytes = self.read_object(&image_key(digest)?, MAX_IMAGE_BYTES, what)?;
        if Digest::of(&bytes) != *digest {
            return Err(Error::corrupt(format!("{} are damaged", what())));
        }
        Ok(bytes)
    }
}

fn image_key(digest: &Digest) -> Result<Key> {
    let digest = digest.to_string();
    Key::new(format!("images/{}/{digest}", &digest[..2]))
}

/// Reads a kept object in large parts.
#[derive(Debug)]
pub struct KeptReader {
    backend: Arc<dyn Backend>,
    key: Key,
    size: u64,
    /// Where the next part begins.
    position: u64,
    part: Vec<u8>,
    used: usize,
}

impl KeptReader {
    /// The length of the object.
    pub fn size(&self) -> u64 {
        self.size
    }
}

impl Read for KeptReader {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.used == self.part.len() {
            let length = PART_BYTES.min(self.size - self.position);
            self.part.resize(length as usize, 0);
            self.used = 0;
            if length > 0 {
                let read = self.backend.read_at(&self.key, self.position, &mut self.part);
                read.map_err(std::io::Error::other)?;
            }
            self.position += length;
        }
        let length = buffer.len().min(self.part.len() - self.used);
        buffer[..length].copy_from_slice(&self.part[self.used..self.used + length]);
        self.used += length;
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::memory::Memory;

    #[test]
    fn what_is_kept_of_images_is_found_again() {
        let store = Store::open(Arc::new(Memory::new())).unwrap();
        let (tar, blob) =
            (format!("sha256:{}", "a".repeat(64)), format!("sha512:{}", "b".repeat(128)));
        let layer = LayerId([3; 32]);
        let framing = Kept::Framing(tar.clone(), layer);
        assert!(store.open_kept(&framing).unwrap().is_none());
        assert!(store.layers_of_tar(&tar).unwrap().is_empty());
        let bytes: Vec<u8> = (0..2_500_000_u32).map(|at| at as u8).collect();
        for kept in [&framing, &Kept::Stream(tar.clone(), blob.clone())] {
            let mut upload = store.create_kept(kept).unwrap();
            upload.write(&bytes).unwrap();
            upload.publish().unwrap();
            assert!(store.has_kept(kept).unwrap());
        }
        let mut found = Vec::new();
        store.open_kept(&framing).unwrap().unwrap().read_to_end(&mut found).unwrap();
        assert_eq!(found, bytes);
        assert_eq!(store.layers_of_tar(&tar).unwrap(), [layer]);
        assert_eq!(store.streams_of_tar(&tar).unwrap(), [blob]);
        let digest = store.put_image_documents(b"{}").unwrap();
        assert_eq!(store.read_image_documents(&digest).unwrap(), b"{}");
        for bad in ["sha256", "md5:00", "sha256:../x", "sha256:AB"] {
            assert!(store.layers_of_tar(bad).is_err(), "{bad}");
        }
    }
}
