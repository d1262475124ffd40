//! Reads of a layer's data space for those who answer readers themselves.
//!
//! A range that is present is answered at once, by the caller's thread; any other by the fill thread
//! that brings the last chunk of it. While the cache disk is full, bytes come from memory and nothing
//! is kept.

use crate::fetch::{Class, Engine, Failure, Met};
use crate::served::ServedLayer;
use layer::{ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Gives `answer` the bytes of a range, or why they did not come. Exactly once, from some thread; what
/// lies behind the end of the data is not in it.
pub fn read(
    engine: &Engine,
    layer: &Arc<ServedLayer>,
    offset: u64,
    bytes: u64,
    answer: impl FnOnce(Result<Vec<u8>>) + Send + 'static,
) {
    let reader = Arc::clone(layer);
    let answer = move |result: Result<Vec<u8>>| {
        if result.is_err() {
            reader.denials.fetch_add(1, Ordering::Relaxed);
        }
        answer(result);
    };
    let cached = layer.fetch().cached();
    let end = offset.saturating_add(bytes).min(cached.table().data_bytes());
    let bytes = end.saturating_sub(offset);
    if let Some(ahead) = layer.note_asked(offset, bytes) {
        engine.prefetch(layer.fetch(), ahead);
    }
    let chunks = cached.table().covering(offset, bytes);
    if cached.has_all(chunks.clone()) {
        layer.hits.fetch_add(1, Ordering::Relaxed);
        return answer(read_present(engine, layer, offset, bytes));
    }
    if !engine.has_room(bytes) {
        return answer(read_uncached(engine, layer, offset, bytes));
    }
    let (owner_engine, owner) = (engine.clone(), Arc::clone(layer));
    let done = Box::new(move |fetched: Result<(), Failure>| {
        answer(match fetched {
            Ok(()) => read_present(&owner_engine, &owner, offset, bytes),
            Err(failure) if failure.kind() == ErrorKind::NoSpace => {
                read_uncached(&owner_engine, &owner, offset, bytes)
            }
            Err(failure) => Err(failure.to_error()),
        });
    });
    if engine.request(layer.fetch(), chunks, Class::Demand, done) == Met::Joined {
        layer.waits.fetch_add(1, Ordering::Relaxed);
    }
}

/// As [`read_cached`]; what was evicted after the caller looked comes from the store once more.
fn read_present(
    engine: &Engine,
    layer: &Arc<ServedLayer>,
    offset: u64,
    bytes: u64,
) -> Result<Vec<u8>> {
    match read_cached(layer, offset, bytes) {
        Err(error) if error.kind() == ErrorKind::Busy => {
            read_uncached(engine, layer, offset, bytes)
        }
        other => other,
    }
}

/// `Busy` when something of it is not present any more.
fn read_cached(layer: &ServedLayer, offset: u64, bytes: u64) -> Result<Vec<u8>> {
    let mut content = vec![0; bytes as usize];
    layer.fetch().cached().read(offset, &mut content)?;
    Ok(content)
}

/// Takes present chunks from the cache file and all others from the store.
fn read_uncached(
    engine: &Engine,
    layer: &Arc<ServedLayer>,
    offset: u64,
    bytes: u64,
) -> Result<Vec<u8>> {
    let cached = layer.fetch().cached();
    let mut content = Vec::with_capacity(bytes as usize);
    let end = offset + bytes;
    for chunk in cached.table().covering(offset, bytes) {
        let range = cached.table().chunks()[chunk].byte_range();
        let (from, to) = (range.start.max(offset), range.end.min(end));
        match read_cached(layer, from, to - from) {
            Ok(part) => content.extend(part),
            Err(error) if error.kind() == ErrorKind::Busy => {
                let plain = engine.read_uncached(layer.fetch(), chunk)?;
                content.extend_from_slice(
                    &plain[(from - range.start) as usize..(to - range.start) as usize],
                );
            }
            Err(error) => return Err(error),
        }
    }
    Ok(content)
}
