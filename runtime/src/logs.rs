//! The output of a sandbox's own command: kept in memory up to a bound, the oldest goes first, what went
//! is counted. A reader that follows slowly misses bytes and is told how many; it slows nobody.

use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use tokio::sync::watch;

/// Bytes kept a sandbox.
const MAX_KEPT_BYTES: usize = 4 << 20;
/// Pieces kept a sandbox: one of a single byte costs about a hundred.
const MAX_KEPT_CHUNKS: usize = 64 << 10;

#[derive(Debug, Default)]
struct Kept {
    chunks: VecDeque<(bool, Bytes)>,
    bytes: usize,
    /// Number of the oldest chunk that is kept.
    first: u64,
    dropped_bytes: u64,
}

/// One log.
#[derive(Debug)]
pub struct Log {
    kept: Mutex<Kept>,
    /// Chunks ever added, and whether the log is closed.
    progress: watch::Sender<(u64, bool)>,
}

/// What a reader gets.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece {
    /// Some output; true for the error stream.
    Data(bool, Bytes),
    /// This many bytes were dropped before the reader came to them.
    Dropped(u64),
}

impl Default for Log {
    fn default() -> Self {
        Self { kept: Mutex::default(), progress: watch::channel((0, false)).0 }
    }
}

impl Log {
    /// Adds output.
    pub fn add(&self, is_error: bool, data: Bytes) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.bytes += data.len();
        kept.chunks.push_back((is_error, data));
        while (kept.bytes > MAX_KEPT_BYTES || kept.chunks.len() > MAX_KEPT_CHUNKS)
            && let Some((_, oldest)) = kept.chunks.pop_front()
        {
            kept.bytes -= oldest.len();
            kept.dropped_bytes += oldest.len() as u64;
            kept.first += 1;
        }
        drop(kept);
        self.progress.send_modify(|(count, _)| *count += 1);
    }

    /// No more will come.
    pub fn close(&self) {
        self.progress.send_modify(|(_, closed)| *closed = true);
    }

    /// A reader at the beginning.
    pub fn reader(&self) -> Reader<'_> {
        Reader { log: self, next: 0, dropped_before: 0, progress: self.progress.subscribe() }
    }
}

/// Reads a log from its beginning.
#[derive(Debug)]
pub struct Reader<'a> {
    log: &'a Log,
    next: u64,
    dropped_before: u64,
    progress: watch::Receiver<(u64, bool)>,
}

impl Reader<'_> {
    /// What is there now. `None`: nothing more at present.
    pub fn now(&mut self) -> Option<Piece> {
        let kept = self.log.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if self.next < kept.first {
            let missed = kept.dropped_bytes - self.dropped_before;
            self.next = kept.first;
            self.dropped_before = kept.dropped_bytes;
            return Some(Piece::Dropped(missed));
        }
        let index = usize::try_from(self.next - kept.first).ok()?;
        let (is_error, data) = kept.chunks.get(index)?.clone();
        self.next += 1;
        self.dropped_before = kept.dropped_bytes;
        Some(Piece::Data(is_error, data))
    }

    /// The next piece, waiting for it. `None`: the log is closed and read.
    pub async fn next(&mut self) -> Option<Piece> {
        loop {
            let closed = self.progress.borrow_and_update().1;
            if let Some(piece) = self.now() {
                return Some(piece);
            }
            if closed || self.progress.changed().await.is_err() {
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_full_log_drops_the_oldest_and_says_so() {
        let log = Log::default();
        let chunk = Bytes::from(vec![7; 1 << 20]);
        log.add(true, Bytes::from_static(b"first"));
        for _ in 0..5 {
            log.add(false, chunk.clone());
        }
        log.close();
        let mut reader = log.reader();
        assert_eq!(reader.next().await, Some(Piece::Dropped((1 << 20) + 5)));
        for _ in 0..4 {
            assert_eq!(reader.next().await, Some(Piece::Data(false, chunk.clone())));
        }
        assert_eq!(reader.next().await, None);
    }

    #[tokio::test]
    async fn many_small_pieces_are_bounded_too() {
        let log = Log::default();
        for _ in 0..MAX_KEPT_CHUNKS + 10 {
            log.add(false, Bytes::from_static(b"x"));
        }
        assert_eq!(log.kept.lock().unwrap().chunks.len(), MAX_KEPT_CHUNKS);
        assert_eq!(log.reader().next().await, Some(Piece::Dropped(10)));
    }

    #[tokio::test]
    async fn a_follower_sees_what_comes_later() {
        let log = std::sync::Arc::new(Log::default());
        let writer = std::sync::Arc::clone(&log);
        let task = tokio::spawn(async move {
            writer.add(false, Bytes::from_static(b"a"));
            tokio::task::yield_now().await;
            writer.add(true, Bytes::from_static(b"b"));
            writer.close();
        });
        let mut reader = log.reader();
        assert_eq!(reader.next().await, Some(Piece::Data(false, Bytes::from_static(b"a"))));
        assert_eq!(reader.next().await, Some(Piece::Data(true, Bytes::from_static(b"b"))));
        assert_eq!(reader.next().await, None);
        task.await.unwrap();
    }
}
