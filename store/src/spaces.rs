//! Plain data spaces: a layer's whole data space as one uncompressed object, `spaces/<layer id>`, so
//! that a kernel can read it with nobody in between. Opt-in, derived from the packs, replaceable.
//!
//! The name does not commit to the bytes: they are verified chunk by chunk when the object is made and
//! by [`Store::check_space`], and not when the kernel reads them.
//!
//! // CRASH: the object appears whole or not at all; whoever died is repeated.

use crate::codec;
use crate::key::Key;
use crate::objects::Store;
use layer::chunk::{Chunk, ChunkTable};
use layer::location::Locations;
use layer::{ChunkDigest, Context, Error, ErrorKind, LayerId, Result};
use std::path::PathBuf;

/// A plain data space that is on the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Space {
    /// Its length.
    pub bytes: u64,
    /// The file that it is, where the backend is a mounted directory.
    pub path: Option<PathBuf>,
}

/// What [`Store::put_space`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpaceMade {
    /// The length of the object.
    pub bytes: u64,
    /// A whole one was there already.
    pub existed: bool,
}

fn space_key(layer: &LayerId) -> Result<Key> {
    Key::new(format!("spaces/{layer}"))
}

impl Store {
    /// The plain data space of a layer, where somebody made one.
    pub fn space(&self, layer: &LayerId) -> Result<Option<Space>> {
        let key = space_key(layer)?;
        match self.backend().size(&key) {
            Ok(bytes) => Ok(Some(Space { bytes, path: self.backend().local_path(&key) })),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes the plain data space of a layer out of its packs. One that is there is verified, and
    /// made again when it is damaged.
    ///
    /// `NotFound` when chunks are not where the location hint says.
    pub fn put_space(&self, layer: &LayerId) -> Result<SpaceMade> {
        let what = || format!("make the plain data space of layer {layer}");
        let (_, table) = self.read_layer_tables(layer)?;
        let bytes = table.data_bytes();
        let key = space_key(layer)?;
        if self.space(layer)?.is_some() {
            let damages = self.check_space(layer, &table)?;
            let Some(first) = damages.first() else {
                return Ok(SpaceMade { bytes, existed: true });
            };
            tracing::warn!("{first}: made again");
            self.backend().delete(&key)?;
        }
        let locations = match self.read_locations(layer)? {
            Some(locations) => locations,
            None if table.is_empty() => Locations::default(),
            None => return Err(Error::not_found(format!("no locations of layer {layer}"))),
        };
        let mut upload = self.backend().create(&key)?;
        for (index, chunk) in table.chunks().iter().enumerate() {
            upload.write(&self.plain_chunk(&locations, index, chunk).context(what)?)?;
        }
        match upload.publish() {
            // Somebody else was faster, with the same verified bytes.
            Err(error) if error.kind() == ErrorKind::Exists => {
                Ok(SpaceMade { bytes, existed: true })
            }
            other => other.map(|()| SpaceMade { bytes, existed: false }),
        }
    }

    fn plain_chunk(&self, locations: &Locations, index: usize, chunk: &Chunk) -> Result<Vec<u8>> {
        if chunk.is_zero() {
            return Ok(vec![0; chunk.plain_bytes() as usize]);
        }
        let (pack, placement) = locations
            .get(index)
            .ok_or_else(|| Error::not_found(format!("chunk {index} is not located")))?;
        let mut payload = vec![0; placement.stored_bytes as usize];
        self.read_pack(&pack, placement.offset, &mut payload)?;
        codec::decode_chunk(&payload, placement.codec, chunk.plain_bytes(), &chunk.digest)
    }

    /// Reads a plain data space and compares every chunk with its digest. Answers what is damaged;
    /// nothing when there is no such object.
    pub fn check_space(&self, layer: &LayerId, table: &ChunkTable) -> Result<Vec<String>> {
        let Some(space) = self.space(layer)? else { return Ok(Vec::new()) };
        if space.bytes != table.data_bytes() {
            return Ok(vec![wrong_length(layer, space.bytes, table.data_bytes())]);
        }
        let key = space_key(layer)?;
        let mut damages = Vec::new();
        let mut plain = Vec::new();
        for (index, chunk) in table.chunks().iter().enumerate() {
            plain.resize(chunk.plain_bytes() as usize, 0);
            self.backend().read_at(&key, chunk.offset(), &mut plain)?;
            let whole = match chunk.is_zero() {
                true => plain.iter().all(|byte| *byte == 0),
                false => ChunkDigest::of(&plain) == chunk.digest,
            };
            if !whole {
                damages.push(format!("chunk {index} in the plain data space of layer {layer}"));
            }
        }
        Ok(damages)
    }
}

/// What is said of a plain data space that was cut or grew.
pub fn wrong_length(layer: &LayerId, bytes: u64, right: u64) -> String {
    format!("the plain data space of layer {layer} has {bytes} bytes, not {right}")
}
