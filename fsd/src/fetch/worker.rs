//! The threads of the engine: they carry each fill from its first step to its last.
//!
//! Locking: none is held here while anything blocks.

use super::queue::{Duty, Job, Piece};
use super::steps::{Next, Step};
use super::waiter::Class;
use super::{FetchLayer, Inner};
use std::sync::Arc;

/// Reads that bring at least this many plain bytes are decoded by several threads.
const SHARE_BYTES: usize = 128 << 10;

/// How far the background threads stand back: with all processors busy they get a tenth of what another
/// thread gets. Not less, as a reader may wait for a chunk that one of them has begun to decode.
const BACKGROUND_NICE: i32 = 10;

/// The body of a thread for the background lane.
pub fn run_background(inner: &Arc<Inner>) {
    // Of this thread alone, as Linux has it.
    if let Err(error) = rustix::process::setpriority_process(None, BACKGROUND_NICE) {
        tracing::debug!(%error, "background work has the priority of demand");
    }
    run(inner, Duty::Background);
}

/// The body of a fill thread.
pub fn run(inner: &Arc<Inner>, duty: Duty) {
    loop {
        match inner.queue.wait(duty) {
            Job::Read(ticket, class) => {
                carry(inner, Step::Take(ticket, class), class);
                if class != Class::Demand {
                    inner.queue.low_read_over();
                }
            }
            Job::Decode(piece) => carry(inner, Step::Decode(piece), Class::Demand),
        }
    }
}

/// The body of the timer thread.
pub fn run_timer(inner: &Arc<Inner>) {
    loop {
        let due = inner.timer.wait(&*inner.clock);
        inner.ring(due);
    }
}

/// Takes the oldest demand and fills it; leaves the rest to the fill threads.
pub fn fill_one_demand(inner: &Arc<Inner>) {
    if let Some(ticket) = inner.queue.try_demand() {
        carry(inner, Step::Take(ticket, Class::Demand), Class::Demand);
    }
    inner.queue.wake_for_rest();
}

/// Carries a step and what follows from it. What nobody waits for is left to be decoded in its turn.
pub fn carry(inner: &Arc<Inner>, mut step: Step, class: Class) {
    loop {
        match step.advance(inner) {
            Next::Over => return,
            Next::Then(next) => step = next,
            // The reader goes on with what it waits for; what the read took along is decoded beside it.
            Next::Decode(pieces) => return line_up(inner, pieces, class.max(Class::Prefetch)),
        }
    }
}

/// Leaves what was read for nobody who waits to be decoded in its turn; what is urgent, or became so
/// meanwhile, is decoded now.
fn line_up(inner: &Arc<Inner>, pieces: Vec<Piece>, class: Class) {
    let (urgent, rest): (Vec<_>, Vec<_>) =
        pieces.into_iter().partition(|piece| piece.layer.flights.is_demanded(piece.chunk));
    inner.queue.push_pieces(class, rest.into_iter());
    share(inner, urgent);
}

/// Decodes what was read; large reads together with other threads.
fn share(inner: &Arc<Inner>, pieces: Vec<Piece>) {
    let plain: usize =
        pieces.iter().map(|piece| plain_bytes(&piece.layer, piece.chunk) as usize).sum();
    let mut pieces = pieces.into_iter();
    let Some(first) = pieces.next() else { return };
    let demand = Class::Demand;
    if pieces.len() > 0 && plain >= SHARE_BYTES {
        inner.queue.push_pieces(demand, pieces);
        carry(inner, Step::Decode(first), demand);
        while let Some(piece) = inner.queue.try_piece() {
            carry(inner, Step::Decode(piece), demand);
        }
    } else {
        carry(inner, Step::Decode(first), demand);
        pieces.for_each(|piece| carry(inner, Step::Decode(piece), demand));
    }
}

fn plain_bytes(layer: &FetchLayer, chunk: usize) -> u32 {
    layer.cached.table().chunks()[chunk].plain_bytes()
}
