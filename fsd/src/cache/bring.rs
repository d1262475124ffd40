//! Bringing a layer's description from the store: manifest, chunk table and metadata image, each
//! verified, and the empty data file of its final size.
//!
//! Few large requests: the header, then everything behind it in parts that fit into memory.
// CRASH: the caller names the folder only when all of it is there.

use super::{CHUNKS, DATA, MANIFEST, METADATA, create_file};
use crossbeam_channel::{Receiver, Sender};
use layer::chunk::ChunkTable;
use layer::layer_file::{HEADER_BYTES, Layout};
use layer::manifest::Manifest;
use layer::{Context, Digest, Error, LayerId, Result};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use store::Store;

/// The longest single request.
const READ_BYTES: u64 = 4 << 20;
/// Images are hashed in parts of this size.
const HASH_BYTES: usize = 256 << 10;
/// Parts of an image that are decompressed and not written.
const QUEUED_PARTS: usize = 4;

/// Bytes of a layer file from the store, in order.
struct Stored<'a> {
    store: &'a Store,
    id: &'a LayerId,
    next: u64,
    end: u64,
    part: std::io::Cursor<Vec<u8>>,
}

impl Stored<'_> {
    fn refill(&mut self) -> Result<()> {
        let bytes = (self.end - self.next).min(READ_BYTES);
        let mut part = std::mem::take(&mut self.part).into_inner();
        part.resize(bytes as usize, 0);
        self.store.read_layer_part(self.id, self.next, &mut part)?;
        self.next += bytes;
        self.part = std::io::Cursor::new(part);
        Ok(())
    }

    fn is_empty(&self) -> bool {
        self.part.position() == self.part.get_ref().len() as u64
    }
}

impl Read for Stored<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        if self.is_empty() && self.next < self.end {
            self.refill().map_err(std::io::Error::other)?;
        }
        self.part.read(into)
    }
}

/// Writes all files of a layer but `present` into an empty folder. Answers the bytes that were read.
pub(super) fn bring_into(id: &LayerId, store: &Store, folder: &Path) -> Result<u64> {
    let mut header = [0; HEADER_BYTES];
    store.read_layer_part(id, 0, &mut header)?;
    let layout = Layout::decode(&header)?;
    let (next, end) = (layout.manifest.start, layout.file_bytes());
    let mut stored = Stored { store, id, next, end, part: std::io::Cursor::default() };
    let mut part = |bytes: u64| {
        let mut part = Vec::new();
        stored.by_ref().take(bytes).read_to_end(&mut part).map_err(read_error).map(|_| part)
    };
    let manifest = part(layout.manifest.end - layout.manifest.start)?;
    let decoded = Manifest::decode(&manifest)?;
    if decoded.id() != *id {
        return Err(Error::corrupt(format!("layer file {id} holds layer {}", decoded.id())));
    }
    let chunks = part(layout.chunk_table.end - layout.chunk_table.start)?;
    let table = ChunkTable::decode(&chunks)?;
    if table.digest() != decoded.chunk_table_digest {
        return Err(Error::corrupt(format!("chunk table of layer {id}")));
    }
    part(layout.metadata.start - layout.chunk_table.end)?;
    layout.check_metadata_bytes(decoded.metadata_bytes)?;
    let image = layout.open_metadata(stored)?;
    write_image(image, &decoded, &folder.join(METADATA))?;
    for (name, bytes) in [(MANIFEST, manifest), (CHUNKS, chunks)] {
        let path = folder.join(name);
        create_file(&path)?.write_all(&bytes).context(|| format!("write {}", path.display()))?;
    }
    // INVARIANT: the final size before anything is mounted; the kernel fills short reads with zeros.
    let data = folder.join(DATA);
    create_file(&data)?
        .set_len(table.data_bytes())
        .context(|| format!("size {}", data.display()))?;
    Ok(end)
}

/// The store's own error where it has one, else what the decompression found.
fn read_error(error: std::io::Error) -> Error {
    match error.downcast::<Error>() {
        Ok(error) => error,
        Err(error) => Error::corrupt("metadata image on the store").with_source(error),
    }
}

/// Writes the image while it is decompressed: hashing and writing are another thread's.
fn write_image(image: impl Read, manifest: &Manifest, to: &Path) -> Result<()> {
    let file = create_file(to)?;
    let image = image.take(manifest.metadata_bytes + 1);
    let (parts, arriving) = crossbeam_channel::bounded::<Vec<u8>>(QUEUED_PARTS);
    let (decompressed, digest) = std::thread::scope(|scope| {
        let keeper = scope.spawn(move || keep(file, &arriving, to));
        let decompressed = decompress(image, &parts);
        // The other thread ends when nothing can come any more.
        drop(parts);
        (decompressed, keeper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    decompressed?;
    if digest?.as_bytes() != manifest.metadata_digest.as_bytes() {
        return Err(Error::corrupt(format!("metadata image of layer {}", manifest.id())));
    }
    Ok(())
}

/// Sends an image part by part, until it ends or nobody takes it.
fn decompress(mut image: impl Read, parts: &Sender<Vec<u8>>) -> Result<()> {
    loop {
        let mut part = Vec::with_capacity(HASH_BYTES);
        let read = image.by_ref().take(HASH_BYTES as u64).read_to_end(&mut part);
        // Who took them goes away early only with an error, which it answers.
        if read.map_err(read_error)? == 0 || parts.send(part).is_err() {
            return Ok(());
        }
    }
}

/// Hashes and writes what comes, to the end.
fn keep(mut file: File, parts: &Receiver<Vec<u8>>, to: &Path) -> Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&part);
        file.write_all(&part).context(|| format!("write {}", to.display()))?;
    }
    Ok(hasher.finalize())
}

/// `Corrupt` for a file with other bytes.
pub(super) fn verify_file(path: &Path, digest: &Digest) -> Result<()> {
    let name = || format!("read {}", path.display());
    let mut hasher = blake3::Hasher::new();
    let mut file = File::open(path).context(name)?;
    let mut buffer = vec![0; HASH_BYTES];
    loop {
        let bytes = file.read(&mut buffer).context(name)?;
        if bytes == 0 {
            break;
        }
        hasher.update(&buffer[..bytes]);
    }
    if hasher.finalize().as_bytes() != digest.as_bytes() {
        return Err(Error::corrupt(format!(
            "{} has other bytes than its digest says",
            path.display()
        )));
    }
    Ok(())
}
