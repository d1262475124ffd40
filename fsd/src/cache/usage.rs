//! When the chunks of a layer were used last, by groups of neighbours.
//!
//! Locking: atomics; a time that is a little wrong costs a fetch at worst. Nothing survives a restart:
//! what was not used since counts as used when the layer was opened.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Chunks that are evicted together.
const GROUP_CHUNKS: usize = 16;

/// Milliseconds since 1970: the same clock as the times of folders.
pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// The last use of every group of one layer.
#[derive(Debug)]
pub struct Usage {
    last: Vec<AtomicU64>,
    chunks: usize,
}

impl Usage {
    /// All used now.
    pub fn new(chunks: usize) -> Self {
        let now = now_ms();
        let last = (0..chunks.div_ceil(GROUP_CHUNKS)).map(|_| AtomicU64::new(now)).collect();
        Self { last, chunks }
    }

    /// These chunks are used.
    pub fn touch(&self, chunks: Range<usize>) {
        if chunks.is_empty() {
            return;
        }
        let now = now_ms();
        let groups = chunks.start / GROUP_CHUNKS..chunks.end.div_ceil(GROUP_CHUNKS);
        for last in self.last.get(groups).unwrap_or_default() {
            last.store(now, Ordering::Relaxed);
        }
    }

    /// Every group: its chunks, and when it was used.
    pub fn groups(&self) -> impl Iterator<Item = (Range<usize>, u64)> {
        self.last.iter().enumerate().map(|(group, last)| {
            let start = group * GROUP_CHUNKS;
            (start..(start + GROUP_CHUNKS).min(self.chunks), last.load(Ordering::Relaxed))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_cover_all_chunks_and_remember_their_last_use() {
        let usage = Usage::new(GROUP_CHUNKS * 2 + 3);
        let groups: Vec<_> = usage.groups().map(|(chunks, _)| chunks).collect();
        assert_eq!(groups.len(), 3);
        assert_eq!(groups[2], GROUP_CHUNKS * 2..GROUP_CHUNKS * 2 + 3);
        let before: Vec<u64> = usage.groups().map(|(_, last)| last).collect();
        std::thread::sleep(std::time::Duration::from_millis(3));
        usage.touch(GROUP_CHUNKS + 1..GROUP_CHUNKS + 2);
        let after: Vec<u64> = usage.groups().map(|(_, last)| last).collect();
        assert!(after[1] > before[1] && after[0] == before[0] && after[2] == before[2]);
        usage.touch(0..0);
        assert_eq!(Usage::new(0).groups().count(), 0);
    }
}
