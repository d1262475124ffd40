//! The threads of the engine: they carry each fill from its first step to its last.
//!
//! Locking: none is held here while anything blocks.

use super::queue::Piece;
use super::steps::{Next, Step};
use super::waiter::Class;
use super::{FetchLayer, Inner};
use std::sync::Arc;

/// Reads that bring at least this many plain bytes are decoded by several threads.
const SHARE_BYTES: usize = 128 << 10;

/// The body of a fill thread.
pub fn run(inner: &Arc<Inner>) {
    loop {
        let step = Step::from(inner.queue.wait());
        let background = matches!(step, Step::Take(_, Class::Background));
        carry(inner, step);
        if background {
            inner.queue.background_over();
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
        carry(inner, Step::Take(ticket, Class::Demand));
    }
    inner.queue.wake_for_rest();
}

fn carry(inner: &Arc<Inner>, mut step: Step) {
    loop {
        match step.advance(inner) {
            Next::Over => return,
            Next::Then(next) => step = next,
            Next::Decode(pieces) => return share(inner, pieces),
        }
    }
}

/// Decodes what was read; large reads together with other threads.
fn share(inner: &Arc<Inner>, pieces: Vec<Piece>) {
    let plain: usize =
        pieces.iter().map(|piece| plain_bytes(&piece.layer, piece.chunk) as usize).sum();
    let mut pieces = pieces.into_iter();
    let Some(first) = pieces.next() else { return };
    if pieces.len() > 0 && plain >= SHARE_BYTES {
        inner.queue.push_pieces(pieces);
        carry(inner, Step::Decode(first));
        while let Some(piece) = inner.queue.try_piece() {
            carry(inner, Step::Decode(piece));
        }
    } else {
        carry(inner, Step::Decode(first));
        pieces.for_each(|piece| carry(inner, Step::Decode(piece)));
    }
}

fn plain_bytes(layer: &FetchLayer, chunk: usize) -> u32 {
    layer.cached.table().chunks()[chunk].plain_bytes()
}
