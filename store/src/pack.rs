//! Packs on the store: large files of many chunks, written once from front to back.
//!
//! // CRASH: a pack that is not finished has no name; one that is finished describes itself.

use crate::backend::Upload;
use crate::key::Key;
use crate::objects::{Store, random, sharded};
use layer::pack::{
    self, Codec, HEADER_BYTES, MAX_ENTRIES, PackEntry, TRAILER_BYTES, decode_footer, decode_header,
    decode_trailer,
};
use layer::{ChunkDigest, Context, Error, ErrorKind, PackId, Result};

/// Bytes read from the end of a pack at first: enough for the footer of most.
const TAIL_BYTES: u64 = 64 << 10;

/// A pack in the making. Dropping it abandons it.
///
/// Chunks are not decoded here: the caller has checked that a payload decodes to its digest.
pub struct PackWriter {
    id: PackId,
    upload: Box<dyn Upload>,
    entries: Vec<PackEntry>,
    offset: u64,
}

/// A finished pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealedPack {
    /// Its name.
    pub id: PackId,
    /// Its chunks in their order.
    pub entries: Vec<PackEntry>,
}

impl PackWriter {
    /// The id that the pack will have.
    pub fn id(&self) -> PackId {
        self.id
    }

    /// Bytes written so far, without the footer.
    pub fn stored_bytes(&self) -> u64 {
        self.offset
    }

    /// True until the first chunk.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Chunks written so far.
    pub fn entries(&self) -> &[PackEntry] {
        &self.entries
    }

    /// Appends one chunk in its stored form.
    pub fn append(
        &mut self,
        digest: ChunkDigest,
        codec: Codec,
        plain_bytes: u32,
        payload: &[u8],
    ) -> Result<()> {
        let stored_bytes = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        codec.check_sizes(stored_bytes, plain_bytes)?;
        if digest == ChunkDigest::ZERO {
            return Err(Error::invalid("a chunk of zeros lies in no pack"));
        }
        if self.entries.len() >= MAX_ENTRIES as usize {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("pack {} is full of chunks", self.id),
            ));
        }
        self.upload.write(payload)?;
        self.entries.push(PackEntry {
            digest,
            offset: self.offset,
            stored_bytes,
            plain_bytes,
            codec,
        });
        self.offset += u64::from(stored_bytes);
        Ok(())
    }

    /// Writes the footer and publishes the pack. An empty pack is `Invalid`: it would serve nobody.
    pub fn finish(mut self) -> Result<SealedPack> {
        if self.entries.is_empty() {
            return Err(Error::invalid("a pack without chunks"));
        }
        self.upload.write(&pack::encode_footer(&self.entries))?;
        let id = self.id;
        self.upload.publish().context(|| format!("publish pack {id}"))?;
        Ok(SealedPack { id, entries: self.entries })
    }
}

impl Store {
    /// Opens a pack under a new random id.
    pub fn pack_writer(&self) -> Result<PackWriter> {
        let id = PackId(random()?);
        let mut upload = self.backend().create(&pack_key(&id)?)?;
        let header = pack::encode_header(id);
        upload.write(&header)?;
        Ok(PackWriter { id, upload, entries: Vec::new(), offset: header.len() as u64 })
    }

    /// Which chunks a pack holds; header, trailer and footer are checked, the chunks are not.
    pub fn read_pack_footer(&self, id: &PackId) -> Result<Vec<PackEntry>> {
        self.footer(id).context(|| format!("pack {id}"))
    }

    fn footer(&self, id: &PackId) -> Result<Vec<PackEntry>> {
        let key = pack_key(id)?;
        let size = self.backend().size(&key)?;
        if size < (HEADER_BYTES + TRAILER_BYTES) as u64 {
            return Err(Error::corrupt(format!("{size} bytes are no pack")));
        }
        let mut header = [0; HEADER_BYTES];
        self.backend().read_at(&key, 0, &mut header)?;
        let inside = decode_header(&header)?;
        if inside != *id {
            return Err(Error::corrupt(format!("the object holds pack {inside}")));
        }
        let mut tail = vec![0; size.min(TAIL_BYTES) as usize];
        self.backend().read_at(&key, size - tail.len() as u64, &mut tail)?;
        let trailer = decode_trailer(&tail[tail.len() - TRAILER_BYTES..], size)?;
        let wanted = trailer.footer_bytes + TRAILER_BYTES;
        if wanted <= tail.len() {
            let start = tail.len() - wanted;
            return decode_footer(&trailer, &tail[start..start + trailer.footer_bytes]);
        }
        let mut footer = vec![0; trailer.footer_bytes];
        self.backend().read_at(&key, trailer.footer_offset, &mut footer)?;
        decode_footer(&trailer, &footer)
    }

    /// Raw bytes of a pack. The caller checks them: chunks by [`crate::codec::decode_chunk`].
    pub fn read_pack(&self, id: &PackId, offset: u64, into: &mut [u8]) -> Result<()> {
        self.backend().read_at(&pack_key(id)?, offset, into)
    }

    /// Whether the pack is published.
    pub fn has_pack(&self, id: &PackId) -> Result<bool> {
        self.has(&pack_key(id)?)
    }

    /// All packs, in the order of their ids.
    pub fn list_packs(&self) -> Result<Vec<PackId>> {
        self.list_ids("packs/")
    }
}

fn pack_key(id: &PackId) -> Result<Key> {
    sharded("packs", &id.to_string())
}
