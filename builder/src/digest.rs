//! First reading of the contents: what is equal, what is zero, what is small enough to be inlined.
//!
//! The identity of a file is a BLAKE3 over its bytes without its zero pieces, then the list of
//! those pieces and the size. So a hole and written zeros are the same, and a sparse terabyte costs
//! no more than its data. It is used inside one build and decides where bundles end; it is stored
//! nowhere.
//!
//! Of some files it is also found what git calls their content, in the same reading.

use crate::content::{Content, Origin, Place};
use crate::git::Blobs;
use crate::git::blob::{Algorithm, Hasher};
use crate::options::ChunkingOptions;
use crate::parallel::for_each;
use crate::progress::{Cancel, Progress};
use layer::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// How much is read at once; a multiple of every piece.
const READ_BYTES: usize = 1 << 20;

/// What one reading of a file tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Facts {
    /// The whole content, for files that are inlined.
    Inline(Vec<u8>),
    /// Equal files have equal facts.
    Digested(Identity),
    /// The content is given by reference to chunks.
    Referenced,
}

/// What makes two contents equal.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    /// See the module.
    pub digest: [u8; 32],
    /// Runs of zero pieces (offset, bytes), ascending and not touching. Pieces have the chunk size
    /// and lie at multiples of it; the last one ends with the file.
    pub zeros: Vec<(u64, u64)>,
}

/// What to read.
pub(crate) struct Reading<'a> {
    pub contents: &'a [&'a Content],
    pub origins: &'a [Arc<Origin>],
    pub chunking: &'a ChunkingOptions,
    /// Contents whose name in git is wanted.
    pub blobs: &'a HashMap<usize, Algorithm>,
    pub threads: usize,
    pub cancel: &'a Cancel,
}

/// Reads all contents once, in parallel; the facts come in the order of the contents.
pub(crate) fn digest_all(
    reading: &Reading<'_>,
    progress: &dyn Progress,
) -> Result<(Vec<Facts>, Blobs)> {
    let Reading { contents, chunking, threads, cancel, .. } = *reading;
    let slots: Vec<Mutex<Option<Facts>>> = contents.iter().map(|_| Mutex::new(None)).collect();
    let blobs = Mutex::new(Blobs::new());
    let scratch = || vec![0_u8; READ_BYTES.max(chunking.chunk_bytes as usize)];
    for_each(threads, contents.len(), cancel, scratch, |buffer, task| {
        let (facts, blob) = digest_one(reading, task, buffer)?;
        *slots[task].lock().unwrap_or_else(PoisonError::into_inner) = Some(facts);
        if let Some(blob) = blob {
            blobs.lock().unwrap_or_else(PoisonError::into_inner).insert(task, blob);
        }
        progress.advance(1, contents[task].size);
        Ok(())
    })?;
    let facts: Result<Vec<Facts>> = slots
        .into_iter()
        .map(|slot| {
            slot.into_inner()
                .unwrap_or_else(PoisonError::into_inner)
                .ok_or_else(|| Error::new(ErrorKind::Internal, "a file was not read"))
        })
        .collect();
    Ok((facts?, blobs.into_inner().unwrap_or_else(PoisonError::into_inner)))
}

fn digest_one(
    reading: &Reading<'_>,
    task: usize,
    buffer: &mut [u8],
) -> Result<(Facts, Option<Vec<u8>>)> {
    let Reading { origins, chunking, cancel, .. } = *reading;
    let content = reading.contents[task];
    if matches!(content.place, Place::Chunks(_)) {
        return Ok((Facts::Referenced, None));
    }
    let wanted = reading.blobs.get(&task).copied();
    let open = content.open(origins)?;
    let size = content.size;
    if size <= u64::from(chunking.inline_bytes) {
        let mut bytes = vec![0; size as usize];
        open.read_at(0, &mut bytes)?;
        open.finish()?;
        let blob = wanted.map(|algorithm| algorithm.blob(&bytes));
        return Ok((Facts::Inline(bytes), blob));
    }
    let mut blob = wanted.map(|algorithm| Hasher::blob(algorithm, size));
    let piece = u64::from(chunking.chunk_bytes);
    let mut hasher = blake3::Hasher::new();
    let mut zeros: Vec<(u64, u64)> = Vec::new();
    let mut offset = 0;
    while offset < size {
        cancel.check()?;
        // Everything before the next data is zero, as far as whole pieces go.
        let data = content.next_data(offset).map_or(size, |(start, _)| start / piece * piece);
        if data > offset {
            extend(&mut zeros, offset, data - offset);
            if let Some(blob) = &mut blob {
                blob.update_zeros(data - offset);
            }
            offset = data;
            continue;
        }
        let length = (size - offset).min(buffer.len() as u64);
        let bytes = &mut buffer[..length as usize];
        open.read_at(offset, bytes)?;
        if let Some(blob) = &mut blob {
            blob.update(bytes);
        }
        for part in bytes.chunks(piece as usize) {
            if is_zero(part) {
                extend(&mut zeros, offset, part.len() as u64);
            } else {
                hasher.update(part);
            }
            offset += part.len() as u64;
        }
    }
    open.finish()?;
    for (start, bytes) in &zeros {
        hasher.update(&start.to_le_bytes());
        hasher.update(&bytes.to_le_bytes());
    }
    hasher.update(&(zeros.len() as u64).to_le_bytes());
    hasher.update(&size.to_le_bytes());
    let identity = Identity { digest: *hasher.finalize().as_bytes(), zeros };
    Ok((Facts::Digested(identity), blob.map(Hasher::finish)))
}

fn extend(zeros: &mut Vec<(u64, u64)>, offset: u64, bytes: u64) {
    match zeros.last_mut() {
        Some((start, length)) if *start + *length == offset => *length += bytes,
        _ => zeros.push((offset, bytes)),
    }
}

/// Whether all bytes are zero. Most data shows otherwise in its first bytes.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (head, rest) = bytes.split_at(bytes.len().min(16));
    head.iter().all(|&byte| byte == 0)
        && rest.chunks(256).all(|chunk| chunk.iter().fold(0, |seen, byte| seen | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::Piece;
    use crate::progress::Silent;

    fn facts(content: &Content, origins: &[Arc<Origin>]) -> (Facts, Vec<u8>) {
        let reading = Reading {
            contents: &[content],
            origins,
            chunking: &ChunkingOptions::default(),
            blobs: &HashMap::from([(0, Algorithm::Sha1)]),
            threads: 1,
            cancel: &Cancel::new(),
        };
        let (mut facts, blobs) = digest_all(&reading, &Silent).unwrap();
        (facts.remove(0), blobs[&0].clone())
    }

    #[test]
    fn holes_and_written_zeros_are_the_same() {
        let mut bytes = vec![0_u8; 1 << 20];
        bytes[300_000..300_010].fill(7);
        let written = Content::bytes(bytes.clone());
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[7; 10], 5).unwrap();
        let origins = [Arc::new(Origin::Archive { file, name: "test".into(), stamp: None })];
        let sparse = Content {
            size: 1 << 20,
            place: Place::Archive {
                origin: 0,
                pieces: vec![Piece { offset: 300_000, bytes: 10, at: 5 }],
            },
        };
        assert_eq!(facts(&written, &origins), facts(&sparse, &origins));
        let (Facts::Digested(identity), blob) = facts(&sparse, &origins) else { panic!() };
        assert_eq!(blob, Algorithm::Sha1.blob(&bytes));
        let chunk = u64::from(ChunkingOptions::default().chunk_bytes);
        let (start, end) = (300_000 / chunk * chunk, 300_010_u64.next_multiple_of(chunk));
        assert_eq!(identity.zeros, [(0, start), (end, (1 << 20) - end)]);
        bytes[0] = 1;
        assert_ne!(facts(&Content::bytes(bytes), &[]), facts(&written, &[]));
    }

    #[test]
    fn small_files_are_taken_whole() {
        let (facts, blob) = facts(&Content::bytes(b"hi".to_vec()), &[]);
        assert_eq!((facts, blob), (Facts::Inline(b"hi".to_vec()), Algorithm::Sha1.blob(b"hi")));
    }
}
