//! What to fetch beside what is asked: ahead of a layer that is read in sequence, and around a miss
//! where much has been read.
//!
//! The kernel asks for one readahead window at a time and waits for it, so a lone sequential reader
//! would pay the store's latency for each. What is fetched ahead is at most half of what the stream
//! has read already: a guess that is wrong costs at most that. A program that jumps about in a library
//! has no sequence, but it comes back to where it was: what is near is fetched with the same request.
//!
//! Locking: none; the owner has a mutex around it.

use layer::chunk::Chunk;
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

/// How far on both sides of a miss is looked for what is here already.
const NEAR_BYTES: u64 = 512 << 10;
/// A layer of which less than this was asked is not guessed about.
const MIN_ASKED_BYTES: u64 = 1 << 20;
/// The most that is guessed on either side of a miss.
const MAX_SIDE_BYTES: u64 = 256 << 10;
/// Bytes guessed of a layer for each byte that was asked of it beyond the first.
const GUESSED_PER_ASKED: u64 = 2;

/// What is fetched along with a miss: where much around it is here already, some of the rest.
///
/// On either side at most what is near and here, and over the life of a layer never more than twice of what
/// was asked of it beyond the first bytes.
#[derive(Debug, Default)]
pub struct Neighbours {
    guessed: u64,
}

impl Neighbours {
    /// The chunks of a miss with those around it that are worth fetching along; nothing when there are
    /// none. `asked` counts the bytes that were asked of the layer so far.
    pub fn around(
        &mut self,
        chunks: &[Chunk],
        missed: Range<usize>,
        asked: u64,
        has: impl Fn(usize) -> bool,
    ) -> Option<Range<usize>> {
        let allowed = asked.saturating_sub(MIN_ASKED_BYTES).saturating_mul(GUESSED_PER_ASKED);
        let mut budget = allowed.saturating_sub(self.guessed);
        if budget == 0 || missed.clone().all(&has) {
            return None;
        }
        let bytes = |chunk: usize| u64::from(chunks[chunk].plain_bytes());
        let here = |side: &mut dyn Iterator<Item = usize>| {
            let mut left = NEAR_BYTES;
            let near = side.take_while(|chunk| {
                let near = left > 0;
                left = left.saturating_sub(bytes(*chunk));
                near
            });
            near.filter(|chunk| has(*chunk)).map(bytes).sum::<u64>()
        };
        let here = here(&mut (missed.end..chunks.len())) + here(&mut (0..missed.start).rev());
        let mut along = |side: &mut dyn Iterator<Item = usize>| {
            let mut room = here.min(MAX_SIDE_BYTES);
            side.take_while(|chunk| {
                let fits = !has(*chunk) && bytes(*chunk) <= room.min(budget);
                if fits {
                    room -= bytes(*chunk);
                    budget -= bytes(*chunk);
                }
                fits
            })
            .count()
        };
        let end = missed.end + along(&mut (missed.end..chunks.len()));
        let start = missed.start - along(&mut (0..missed.start).rev());
        let guessed = (start..missed.start).chain(missed.end..end).map(bytes).sum::<u64>();
        self.guessed += guessed;
        (guessed > 0).then_some(start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use layer::ChunkDigest;

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

    const CHUNK: u64 = 64 << 10;

    fn chunks(count: u32) -> Vec<Chunk> {
        let chunk =
            |index| Chunk { start_block: index * 16, blocks: 16, digest: ChunkDigest::ZERO };
        (0..count).map(chunk).collect()
    }

    #[test]
    fn a_miss_takes_along_what_lies_around_it_where_much_is_here() {
        let chunks = chunks(100);
        let much = 64 << 20;
        let around = |missed: Range<usize>, asked, here: &[usize]| {
            Neighbours::default().around(&chunks, missed, asked, |chunk| here.contains(&chunk))
        };
        let here = [44, 45, 46, 47];
        assert_eq!(
            around(50..51, much, &here),
            Some(48..55),
            "up to what is here, or as much of it"
        );
        assert_eq!(around(50..51, much, &[]), None, "nothing is near");
        assert_eq!(around(50..51, much, &[40, 41, 59, 60]), None, "what is here is far");
        assert_eq!(around(45..46, much, &here), None, "no miss");
        assert_eq!(around(0..1, much, &[1, 2, 3]), None, "no room on either side");
        assert_eq!(around(99..100, much, &[93, 94, 95, 96]), Some(97..100));
        assert_eq!(around(50..51, MIN_ASKED_BYTES, &here), None, "little was asked so far");
        let little = MIN_ASKED_BYTES + CHUNK;
        assert_eq!(around(50..51, little, &here), Some(50..53), "a budget of two chunks");
    }

    #[test]
    fn what_is_guessed_is_never_more_than_twice_of_what_was_asked() {
        let chunks = chunks(10_000);
        let mut neighbours = Neighbours::default();
        let mut here = std::collections::BTreeSet::new();
        let (mut asked, mut fetched) = (0, 0);
        for step in 0..4_000 {
            let missed = (step * 7_919) % 10_000;
            let fresh = !here.contains(&missed);
            asked += CHUNK / 4;
            let has = |chunk: usize| here.contains(&chunk);
            let found = neighbours.around(&chunks, missed..missed + 1, asked, has);
            let range = found.unwrap_or(missed..missed + 1);
            assert!(range.contains(&missed));
            assert!(fresh || range.len() == 1);
            let guessed = range.filter(|chunk| here.insert(*chunk) && *chunk != missed).count();
            fetched += guessed as u64 * CHUNK;
            assert!(fetched <= 2 * asked.saturating_sub(MIN_ASKED_BYTES));
        }
        assert!(fetched > 0);
    }
}
