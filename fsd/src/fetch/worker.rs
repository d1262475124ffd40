//! What a fill thread does with a ticket: take a run, read it, decode and verify it, write it, tell.
//!
//! Locking: none is held here while anything blocks.

use super::flights::{History, Run};
use super::queue::{Job, Piece, Ticket};
use super::waiter::{Class, Failure};
use super::{FetchLayer, Inner};
use layer::location::Locations;
use layer::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The longest read for blocked readers, in stored bytes.
const DEMAND_READ_BYTES: usize = 1 << 20;
/// The longest read for everything else.
const BACKGROUND_READ_BYTES: usize = 4 << 20;
/// Reads that bring at least this many plain bytes are decoded by several threads.
const SHARE_BYTES: usize = 128 << 10;
const FIRST_REST: Duration = Duration::from_millis(50);
const LONGEST_REST: Duration = Duration::from_secs(2);

/// The body of a fill thread.
pub fn run(inner: &Arc<Inner>) {
    loop {
        match inner.queue.wait() {
            Job::Decode(piece) => decode(inner, &piece),
            Job::Read(ticket, class) => {
                read(inner, &ticket, class);
                if class == Class::Background {
                    inner.queue.background_over();
                }
            }
        }
    }
}

/// The body of the timer thread.
pub fn run_timer(inner: &Arc<Inner>) {
    loop {
        let due = inner.timer.wait();
        for waiter in due.expired {
            waiter.expire();
        }
        let now = Instant::now();
        for Ticket { layer, chunk } in due.rested {
            if let Some(class) = layer.flights.wake(chunk, now) {
                inner.queue.push(&layer, &[chunk], class, true);
            }
        }
    }
}

/// Takes the oldest demand and fills it; leaves the rest to the fill threads.
pub fn fill_one_demand(inner: &Arc<Inner>) {
    if let Some(ticket) = inner.queue.try_demand() {
        read(inner, &ticket, Class::Demand);
    }
    inner.queue.wake_for_rest();
}

fn read(inner: &Arc<Inner>, ticket: &Ticket, class: Class) {
    let layer = &ticket.layer;
    if !layer.flights.is_queued(ticket.chunk) {
        return;
    }
    let longest = if class == Class::Demand { DEMAND_READ_BYTES } else { BACKGROUND_READ_BYTES };
    let locations = match layer.source.locations() {
        Ok(locations) => locations,
        Err(error) => {
            let nowhere = Locations { packs: Vec::new(), placements: Vec::new() };
            if let Some(run) = layer.flights.take(ticket.chunk, &nowhere, 0) {
                settle(inner, layer, &run, &Arc::new(nowhere), error);
            }
            return;
        }
    };
    let Some(run) = layer.flights.take(ticket.chunk, &locations, longest) else { return };
    let Some(run) = copy_from_siblings(inner, layer, run, &locations) else { return };
    match read_run(layer, &run, &locations) {
        Ok(pieces) => {
            inner.store_away.over();
            share(inner, pieces);
        }
        Err(error) => settle(inner, layer, &run, &locations, error),
    }
}

/// Takes the chunks off both ends of a run that another layer on this node holds. Answers what is left
/// to be read; chunks in the middle are read along with their neighbours.
fn copy_from_siblings(
    inner: &Arc<Inner>,
    layer: &Arc<FetchLayer>,
    mut run: Run,
    locations: &Locations,
) -> Option<Run> {
    let stored = |chunk| locations.get(chunk).map_or(0, |(_, place)| place.stored_bytes as usize);
    let copied = |chunk: usize| {
        let plain = inner.siblings.copy(&layer.cached.table().chunks()[chunk].digest);
        plain.is_some_and(|plain| {
            inner.counters.copies.fetch_add(1, Ordering::Relaxed);
            write(inner, layer, chunk, &plain);
            true
        })
    };
    while !run.chunks.is_empty() && copied(run.chunks.start) {
        run.bytes = run.bytes.saturating_sub(stored(run.chunks.start));
        run.chunks.start += 1;
    }
    while !run.chunks.is_empty() && copied(run.chunks.end - 1) {
        run.bytes = run.bytes.saturating_sub(stored(run.chunks.end - 1));
        run.chunks.end -= 1;
    }
    (!run.chunks.is_empty()).then_some(run)
}

fn read_run(layer: &Arc<FetchLayer>, run: &Run, locations: &Arc<Locations>) -> Result<Vec<Piece>> {
    let Some((pack, first)) = locations.get(run.chunks.start) else {
        let text =
            format!("no location for chunk {} of layer {}", run.chunks.start, layer.cached.id());
        return Err(Error::not_found(text));
    };
    let payload = Arc::new(layer.source.read(&pack, first.offset, run.bytes)?);
    let mut pieces = Vec::with_capacity(run.chunks.len());
    for chunk in run.chunks.clone() {
        let Some((_, placement)) = locations.get(chunk) else { continue };
        let start = (placement.offset - first.offset) as usize;
        pieces.push(Piece {
            layer: Arc::clone(layer),
            chunk,
            payload: Arc::clone(&payload),
            part: start..start + placement.stored_bytes as usize,
            placement,
            locations: Arc::clone(locations),
        });
    }
    Ok(pieces)
}

/// Decodes what was read; large reads together with other threads.
fn share(inner: &Arc<Inner>, pieces: Vec<Piece>) {
    let plain: usize =
        pieces.iter().map(|piece| plain_bytes(&piece.layer, piece.chunk) as usize).sum();
    let mut pieces = pieces.into_iter();
    let Some(first) = pieces.next() else { return };
    if pieces.len() > 0 && plain >= SHARE_BYTES {
        inner.queue.push_pieces(pieces);
        decode(inner, &first);
        while let Some(piece) = inner.queue.try_piece() {
            decode(inner, &piece);
        }
    } else {
        decode(inner, &first);
        pieces.for_each(|piece| decode(inner, &piece));
    }
}

fn plain_bytes(layer: &FetchLayer, chunk: usize) -> u32 {
    layer.cached.table().chunks()[chunk].plain_bytes()
}

fn decode(inner: &Arc<Inner>, piece: &Piece) {
    let Piece { layer, chunk, payload, part, placement, locations } = piece;
    let entry = &layer.cached.table().chunks()[*chunk];
    let stored = &payload[part.clone()];
    match store::codec::decode_chunk(stored, placement.codec, entry.plain_bytes(), &entry.digest) {
        Ok(plain) => write(inner, layer, *chunk, &plain),
        Err(error) => {
            inner.counters.verify_failures.fetch_add(1, Ordering::Relaxed);
            let error =
                error.context(format!("chunk {chunk} of layer {} on the store", layer.cached.id()));
            tracing::warn!(error = %error.chain(), "a chunk is damaged");
            damaged(inner, layer, *chunk, locations, error);
        }
    }
}

fn write(inner: &Arc<Inner>, layer: &Arc<FetchLayer>, chunk: usize, plain: &[u8]) {
    let written =
        inner.space.check(plain.len() as u64).and_then(|()| layer.cached.fill(chunk, plain));
    match written {
        Ok(()) => {
            inner.disk_full.over();
            layer.fills.fetch_add(1, Ordering::Relaxed);
            inner.counters.fills.fetch_add(1, Ordering::Relaxed);
            inner.counters.filled_bytes.fetch_add(plain.len() as u64, Ordering::Relaxed);
            layer.flights.landed(chunk);
        }
        Err(error) if error.kind() == ErrorKind::NoSpace => rest(inner, layer, chunk, error),
        Err(error) => give_up(layer, chunk, error),
    }
}

/// The stored bytes are wrong: once more from the store, then from another place.
fn damaged(
    inner: &Arc<Inner>,
    layer: &Arc<FetchLayer>,
    chunk: usize,
    locations: &Arc<Locations>,
    error: Error,
) {
    let history = layer.flights.history(chunk);
    if history.reread {
        return elsewhere(inner, layer, chunk, locations, error);
    }
    let history = History { reread: true, ..history };
    if let Some(class) = layer.flights.put_back(chunk, history, None) {
        inner.queue.push(layer, &[chunk], class, true);
    }
}

/// Looks for a chunk under a fresh hint, once.
fn elsewhere(
    inner: &Arc<Inner>,
    layer: &Arc<FetchLayer>,
    chunk: usize,
    stale: &Arc<Locations>,
    error: Error,
) {
    let history = layer.flights.history(chunk);
    if history.relocated {
        return give_up(layer, chunk, error);
    }
    match layer.source.relocate(stale) {
        Ok(_) => {
            let history = History { relocated: true, reread: false, ..history };
            if let Some(class) = layer.flights.put_back(chunk, history, None) {
                inner.queue.push(layer, &[chunk], class, true);
            }
        }
        Err(missing) => {
            tracing::debug!(error = %missing.chain(), "no other location");
            give_up(layer, chunk, error);
        }
    }
}

/// A run could not be read.
fn settle(
    inner: &Arc<Inner>,
    layer: &Arc<FetchLayer>,
    run: &Run,
    locations: &Arc<Locations>,
    error: Error,
) {
    let failure = Failure::from(error);
    for chunk in run.chunks.clone() {
        let error = failure.to_error();
        match error.kind() {
            ErrorKind::NotFound | ErrorKind::Corrupt => {
                elsewhere(inner, layer, chunk, locations, error);
            }
            ErrorKind::Unavailable
            | ErrorKind::Timeout
            | ErrorKind::Busy
            | ErrorKind::Internal
            | ErrorKind::NoSpace => rest(inner, layer, chunk, error),
            ErrorKind::Exists | ErrorKind::Invalid | ErrorKind::Unsupported | ErrorKind::Denied => {
                give_up(layer, chunk, error);
            }
        }
    }
}

/// Tries again after a pause that grows.
fn rest(inner: &Arc<Inner>, layer: &Arc<FetchLayer>, chunk: usize, error: Error) {
    let full = error.kind() == ErrorKind::NoSpace;
    let outage = if full { &inner.disk_full } else { &inner.store_away };
    if outage.failed(inner.settings.deadline) && layer.flights.is_demanded(chunk) {
        return give_up(layer, chunk, error);
    }
    let history = layer.flights.history(chunk);
    let failure = Failure::from(error);
    if history.rests == 0 {
        let chain = failure.chain();
        tracing::warn!(layer = %layer.cached.id(), chunk, error = %chain, "a fill has to wait");
    }
    let delay = FIRST_REST.saturating_mul(1 << history.rests.min(16)).min(LONGEST_REST);
    let history = History { rests: history.rests + 1, ..history };
    if layer.flights.put_back(chunk, history, Some(&failure)).is_some() {
        inner.timer.rest(Ticket { layer: Arc::clone(layer), chunk }, delay);
    }
}

fn give_up(layer: &Arc<FetchLayer>, chunk: usize, error: Error) {
    let error = error.context(format!("chunk {chunk} of layer {}", layer.cached.id()));
    tracing::error!(error = %error.chain(), "a fill failed");
    layer.flights.failed(chunk, &error.into());
}

/// Reads and verifies one chunk without keeping it.
pub fn read_uncached(inner: &Arc<Inner>, layer: &Arc<FetchLayer>, chunk: usize) -> Result<Vec<u8>> {
    let entry = layer.cached.table().chunks().get(chunk).copied();
    let entry = entry.ok_or_else(|| Error::invalid(format!("chunk {chunk}")))?;
    if entry.is_zero() {
        return Ok(vec![0; entry.plain_bytes() as usize]);
    }
    let mut last = None;
    for _ in 0..2 {
        let locations = layer.source.locations()?;
        let Some((pack, placement)) = locations.get(chunk) else { break };
        let stored = layer.source.read(&pack, placement.offset, placement.stored_bytes as usize)?;
        match store::codec::decode_chunk(
            &stored,
            placement.codec,
            entry.plain_bytes(),
            &entry.digest,
        ) {
            Ok(plain) => return Ok(plain),
            Err(error) => {
                inner.counters.verify_failures.fetch_add(1, Ordering::Relaxed);
                last = Some(error);
            }
        }
    }
    Err(last.unwrap_or_else(|| Error::not_found(format!("no location for chunk {chunk}"))))
}
