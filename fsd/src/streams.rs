//! Noticing that a layer is read in sequence, and how far ahead it pays to fetch.
//!
//! The kernel asks for one readahead window at a time and waits for it, so a lone sequential reader
//! would pay the store's latency for each. What is fetched ahead is at most half of what the stream
//! has read already: a guess that is wrong costs at most that.
//!
//! Locking: none; the owner has a mutex around it.

use std::ops::Range;

/// Streams that are followed at once in one layer.
const STREAMS: usize = 8;
/// Bytes in sequence before anything is fetched ahead.
const MIN_RUN_BYTES: u64 = 192 << 10;
/// The most that is fetched ahead of a stream.
const MAX_AHEAD_BYTES: u64 = 1 << 20;
/// Less than this is not worth a request.
const MIN_AHEAD_BYTES: u64 = 64 << 10;

#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    end: u64,
    run_bytes: u64,
    ahead: u64,
    used: u64,
}

/// The streams of one layer.
#[derive(Debug, Default)]
pub struct Streams {
    streams: [Stream; STREAMS],
    clock: u64,
}

impl Streams {
    /// Notes a read; answers what should be fetched ahead now.
    pub fn note(&mut self, offset: u64, bytes: u64) -> Option<Range<u64>> {
        self.clock += 1;
        let end = offset + bytes;
        let Some(stream) =
            self.streams.iter_mut().find(|stream| stream.end == offset && stream.used > 0)
        else {
            let fresh = Stream { end, run_bytes: bytes, ahead: end, used: self.clock };
            if let Some(oldest) = self.streams.iter_mut().min_by_key(|stream| stream.used) {
                *oldest = fresh;
            }
            return None;
        };
        stream.end = end;
        stream.used = self.clock;
        stream.run_bytes += bytes;
        if stream.run_bytes < MIN_RUN_BYTES {
            return None;
        }
        let from = stream.ahead.max(end);
        let to = end + (stream.run_bytes / 2).min(MAX_AHEAD_BYTES);
        if to < from + MIN_AHEAD_BYTES {
            return None;
        }
        stream.ahead = to;
        Some(from..to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequential_reader_is_fetched_ahead_for_and_a_random_one_is_not() {
        let mut streams = Streams::default();
        let window = 128 << 10;
        let mut ahead = 0;
        let mut asked: u64 = 0;
        for index in 0..100 {
            if let Some(range) = streams.note(index * window, window) {
                assert!(range.start >= ahead && range.end > range.start);
                asked += range.end - range.start;
                ahead = range.end;
            }
        }
        let read = 100 * window;
        assert!(ahead > read && ahead - read <= MAX_AHEAD_BYTES);
        assert!(asked <= read + MAX_AHEAD_BYTES);
        let mut random = Streams::default();
        assert!((0..1000u64).all(|at| random.note((at * 7919 % 1000) << 20, 4096).is_none()));
    }

    #[test]
    fn several_streams_are_told_apart() {
        let mut streams = Streams::default();
        let mut fetched = [0; 4];
        for index in 0..20 {
            for (stream, count) in fetched.iter_mut().enumerate() {
                let base = (stream as u64) << 30;
                *count += u32::from(streams.note(base + index * 65_536, 65_536).is_some());
            }
        }
        assert!(fetched.iter().all(|count| *count > 3), "{fetched:?}");
    }
}
