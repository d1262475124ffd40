//! One answer out of several parts of a layer's data, its image and holes.

use super::tree::Part;
use crate::fetch::Engine;
use crate::reads;
use crate::served::ServedLayer;
use layer::Result;
use std::sync::{Arc, Mutex, PoisonError};

type Answer = Box<dyn FnOnce(Result<Vec<u8>>) + Send>;

struct Gathered {
    pieces: Vec<Vec<u8>>,
    missing: usize,
    answer: Option<Answer>,
}

/// Gives `answer` the bytes of these parts in their order, or why some did not come. Exactly once, from
/// some thread; parts that are not present are fetched side by side.
pub fn gather(
    engine: &Engine,
    layer: &Arc<ServedLayer>,
    parts: Vec<Part>,
    answer: impl FnOnce(Result<Vec<u8>>) + Send + 'static,
) {
    if let [Part::Data { offset, bytes }] = parts[..] {
        return reads::read(engine, layer, offset, bytes, answer);
    }
    let gathered = Arc::new(Mutex::new(Gathered {
        pieces: vec![Vec::new(); parts.len()],
        // One more than there are: nobody is answered before every part was asked for.
        missing: parts.len() + 1,
        answer: Some(Box::new(answer)),
    }));
    for (index, part) in parts.into_iter().enumerate() {
        match part {
            Part::Inline(bytes) => arrived(&gathered, index, Ok(bytes)),
            Part::Hole(bytes) => arrived(&gathered, index, Ok(vec![0; bytes as usize])),
            Part::Data { offset, bytes } => {
                let gathered = Arc::clone(&gathered);
                reads::read(engine, layer, offset, bytes, move |result| {
                    arrived(&gathered, index, result);
                });
            }
        }
    }
    let index = usize::MAX;
    arrived(&gathered, index, Ok(Vec::new()));
}

/// Notes one part. The last one answers; a failure answers at once.
fn arrived(gathered: &Mutex<Gathered>, index: usize, result: Result<Vec<u8>>) {
    let mut state = gathered.lock().unwrap_or_else(PoisonError::into_inner);
    state.missing -= 1;
    let done = match result {
        Ok(bytes) => {
            if let Some(piece) = state.pieces.get_mut(index) {
                *piece = bytes;
            }
            (state.missing == 0).then(|| Ok(state.pieces.concat()))
        }
        Err(error) => Some(Err(error)),
    };
    let Some(done) = done else { return };
    let answer = state.answer.take();
    drop(state);
    if let Some(answer) = answer {
        answer(done);
    }
}
