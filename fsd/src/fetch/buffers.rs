//! Memory for what is read and decoded, used again and again: a fresh buffer costs its zeros, and a large one
//! a page fault for each of its pages, for every chunk.
//!
//! Bounded: what lies ready is at most [`MAX_SPARE_BYTES`]; more is given back to the system.
//!
//! Locking: one mutex, held to take a buffer out or to put one in.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// The most that lies ready.
const MAX_SPARE_BYTES: usize = 2 << 20;
/// Smaller ones are made this large, so that any of them does for nearly every chunk.
const MIN_BYTES: usize = 128 << 10;

/// Buffers that lie ready.
#[derive(Debug, Default)]
pub struct Buffers {
    spare: Mutex<Vec<Vec<u8>>>,
}

/// A piece of memory that goes back when it is dropped. Holds old bytes until it is written.
#[derive(Debug)]
pub struct Buffer {
    memory: Vec<u8>,
    bytes: usize,
    home: Arc<Buffers>,
}

impl Buffers {
    /// A buffer of this many bytes, whatever is in them.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Buffer {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let found = spare.iter().rposition(|memory| memory.len() >= bytes);
        let memory = found.map(|at| spare.swap_remove(at));
        drop(spare);
        let memory = memory.unwrap_or_else(|| vec![0; bytes.max(MIN_BYTES)]);
        Buffer { memory, bytes, home: Arc::clone(self) }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[..self.bytes]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.bytes]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.memory);
        let mut spare = self.home.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.iter().map(Vec::len).sum::<usize>() + memory.len() <= MAX_SPARE_BYTES {
            spare.push(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_and_what_lies_ready_is_bounded() {
        let buffers = Arc::new(Buffers::default());
        let mut first = buffers.take(5000);
        first.fill(7);
        let at = first.as_ptr();
        drop(first);
        let again = buffers.take(4000);
        assert_eq!((again.as_ptr(), again.len()), (at, 4000));
        assert_eq!(buffers.take(MIN_BYTES + 1).len(), MIN_BYTES + 1, "no spare one is that large");
        let many: Vec<_> = (0..100).map(|_| buffers.take(100 << 10)).collect();
        drop(many);
        let spare = buffers.spare.lock().unwrap();
        assert!(spare.iter().map(Vec::len).sum::<usize>() <= MAX_SPARE_BYTES && spare.len() > 8);
    }
}
