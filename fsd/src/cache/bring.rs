//! Bringing a layer's description from the store: manifest, chunk table and metadata image, each
//! verified, and the empty data file of its final size.
//!
//! Few large requests: the header, then everything behind it in parts that fit into memory. What came of
//! the image is taken to its place by several threads, frame by frame: from the stored bytes to the page
//! cache without a copy of the whole in between.
// CRASH: the caller names the folder only when all of it is there.

use super::descriptions::Description;
use super::{CHUNKS, DATA, MANIFEST, METADATA, create_file};
use layer::chunk::ChunkTable;
use layer::frames::{Frame, FrameReader};
use layer::layer_file::{HEADER_BYTES, Layout};
use layer::manifest::Manifest;
use layer::{Context, Digest, Error, LayerId, Result};
use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use store::Store;

/// The longest single request.
const READ_BYTES: u64 = 4 << 20;
/// Images are hashed in parts of this size.
const HASH_BYTES: usize = 256 << 10;
/// The most threads that take one image to its place.
const MAX_THREADS: usize = 4;
/// With fewer frames a thread costs more than it saves.
const FRAMES_A_THREAD: usize = 3;

static CORES: LazyLock<usize> =
    LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));

/// A layer file on the store.
#[derive(Clone, Copy)]
struct Stored<'a> {
    store: &'a Store,
    id: &'a LayerId,
    file_bytes: u64,
}

/// A part of a layer file that was read.
#[derive(Default)]
struct Window {
    start: u64,
    bytes: Vec<u8>,
}

impl Window {
    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }
}

impl Stored<'_> {
    /// Reads from here on.
    fn read(&self, start: u64) -> Result<Window> {
        let bytes = self.file_bytes.saturating_sub(start).min(READ_BYTES);
        let mut window = Window { start, bytes: vec![0; bytes as usize] };
        self.store.read_layer_part(self.id, start, &mut window.bytes)?;
        Ok(window)
    }

    /// A part of the file, through the window that was read last. No more is allocated than was read.
    fn take(&self, part: Range<u64>, window: &mut Window) -> Result<Vec<u8>> {
        let (mut taken, mut next) = (Vec::new(), part.start);
        while next < part.end {
            if !(window.start..window.end()).contains(&next) {
                *window = self.read(next)?;
            }
            let end = part.end.min(window.end());
            let range = (next - window.start) as usize..(end - window.start) as usize;
            taken.extend_from_slice(&window.bytes[range]);
            next = end;
        }
        Ok(taken)
    }
}

/// Writes all files of a layer but `present` into an empty folder. Answers what they say, and the bytes
/// that were read.
pub(super) fn bring_into(id: &LayerId, store: &Store, folder: &Path) -> Result<(Description, u64)> {
    let mut header = [0; HEADER_BYTES];
    store.read_layer_part(id, 0, &mut header)?;
    let layout = Layout::decode(&header)?;
    let file_bytes = layout.file_bytes();
    let stored = Stored { store, id, file_bytes };
    let mut window = Window::default();
    let stored_manifest = stored.take(layout.manifest.clone(), &mut window)?;
    let manifest = Manifest::decode(&stored_manifest)?;
    if manifest.id() != *id {
        return Err(Error::corrupt(format!("layer file {id} holds layer {}", manifest.id())));
    }
    let chunks = stored.take(layout.chunk_table.clone(), &mut window)?;
    let frames = layout.frame_table(manifest.metadata_bytes)?;
    let frames = layout.frames(&manifest, &stored.take(frames, &mut window)?)?;
    let metadata = folder.join(METADATA);
    let file = create_file(&metadata)?;
    file.set_len(manifest.metadata_bytes).context(|| format!("size {}", metadata.display()))?;
    let image = Image { file: &file, path: &metadata, at: layout.metadata.start };
    let mut table = None;
    let mut rest = frames.list();
    loop {
        let (here, later) = image.arrived(rest, &window);
        // What one thread does beside the frames: it reads the next ones, and takes care of the tables.
        let next = image.keep(here, &window, || {
            let at = later.first().map(|frame| image.at + frame.stored.start);
            let next = at.map(|at| stored.read(at)).transpose()?;
            if table.is_none() {
                table = Some(describe(folder, &manifest, &stored_manifest, &chunks)?);
            }
            Ok(next)
        })?;
        // INVARIANT: a window has room for every frame, so that this comes to its end.
        let Some(next) = next else { break };
        (window, rest) = (next, later);
    }
    let table = table.unwrap_or_default();
    Ok((Description { manifest, table: Arc::new(table) }, file_bytes))
}

/// The chunk table from its stored bytes, if it is the one that the manifest names.
pub(super) fn read_table(manifest: &Manifest, stored: &[u8]) -> Result<ChunkTable> {
    if Digest::of(stored) != manifest.chunk_table_digest {
        return Err(Error::corrupt(format!("chunk table of layer {}", manifest.id())));
    }
    ChunkTable::decode(stored)
}

/// Writes what is small, and the data file.
fn describe(
    folder: &Path,
    manifest: &Manifest,
    stored_manifest: &[u8],
    chunks: &[u8],
) -> Result<ChunkTable> {
    let table = read_table(manifest, chunks)?;
    for (name, bytes) in [(MANIFEST, stored_manifest), (CHUNKS, chunks)] {
        let path = folder.join(name);
        create_file(&path)?.write_all(bytes).context(|| format!("write {}", path.display()))?;
    }
    // INVARIANT: the final size before anything is mounted; the kernel fills short reads with zeros.
    let data = folder.join(DATA);
    let sized = create_file(&data)?.set_len(table.data_bytes());
    sized.context(|| format!("size {}", data.display())).map(|()| table)
}

/// A metadata image on its way into a file.
#[derive(Debug, Clone, Copy)]
struct Image<'a> {
    file: &'a File,
    path: &'a Path,
    /// Where the stored image begins in the layer file.
    at: u64,
}

impl Image<'_> {
    /// Of these frames those that are in the window, and the others.
    fn arrived<'f>(&self, frames: &'f [Frame], window: &Window) -> (&'f [Frame], &'f [Frame]) {
        let end = window.end().saturating_sub(self.at);
        frames.split_at(frames.partition_point(|frame| frame.stored.end <= end))
    }

    /// Opens these frames and writes them, on several threads if that pays; `work` is done beside it.
    fn keep<T>(
        self,
        frames: &[Frame],
        window: &Window,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let next = AtomicUsize::new(0);
        let threads = (*CORES).min(MAX_THREADS).min(frames.len() / FRAMES_A_THREAD);
        std::thread::scope(|scope| {
            let keep = || self.keep_some(frames, &next, window);
            let helpers: Vec<_> = (1..threads).map(|_| scope.spawn(keep)).collect();
            let done = work().and_then(|done| keep().map(|()| done));
            let helped = helpers.into_iter().map(|helper| {
                helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            helped.collect::<Result<()>>().and(done)
        })
    }

    /// Takes one of these frames after the other, until none is left.
    fn keep_some(self, frames: &[Frame], next: &AtomicUsize, window: &Window) -> Result<()> {
        let mut reader = FrameReader::new()?;
        while let Some(frame) = frames.get(next.fetch_add(1, Ordering::Relaxed)) {
            let at = |offset: u64| (self.at + offset - window.start) as usize;
            let stored = &window.bytes[at(frame.stored.start)..at(frame.stored.end)];
            let plain = reader.open(frame, stored)?;
            let written = self.file.write_all_at(plain, frame.plain.start);
            written.context(|| format!("write {}", self.path.display()))?;
        }
        Ok(())
    }
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
