//! The bits in memory: which chunks of a layer are in its data file now.
//!
//! Read on every event without a lock. A bit is set only after its chunk was written, with release
//! order, so whoever sees it also sees the bytes. Says nothing about durability: that is `present`.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A bitmap of fixed size that threads set and read at once.
#[derive(Debug)]
pub struct Bits {
    words: Vec<AtomicU64>,
    bits: usize,
    count: AtomicUsize,
}

impl Bits {
    /// All clear.
    pub fn new(bits: usize) -> Self {
        let words = (0..bits.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { words, bits, count: AtomicUsize::new(0) }
    }

    /// How many are set.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Whether all are set.
    pub fn is_full(&self) -> bool {
        self.count() == self.bits
    }

    /// Whether this one is set; false outside the map.
    pub fn get(&self, index: usize) -> bool {
        self.words
            .get(index / 64)
            .is_some_and(|word| word.load(Ordering::Acquire) & (1 << (index % 64)) != 0)
    }

    /// Whether all of a range are set.
    pub fn covers(&self, mut range: Range<usize>) -> bool {
        range.all(|index| self.get(index))
    }

    /// Sets one; false when it was set already.
    pub fn set(&self, index: usize) -> bool {
        self.change(index, true)
    }

    /// Clears one; false when it was clear already.
    pub fn clear(&self, index: usize) -> bool {
        self.change(index, false)
    }

    fn change(&self, index: usize, to: bool) -> bool {
        debug_assert!(index < self.bits);
        let Some(word) = self.words.get(index / 64) else { return false };
        let mask = 1 << (index % 64);
        let before = if to {
            word.fetch_or(mask, Ordering::AcqRel)
        } else {
            word.fetch_and(!mask, Ordering::AcqRel)
        };
        let changed = (before & mask != 0) != to;
        if changed && to {
            self.count.fetch_add(1, Ordering::AcqRel);
        } else if changed {
            self.count.fetch_sub(1, Ordering::AcqRel);
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_follow_sets_and_clears() {
        let bits = Bits::new(130);
        assert!(!bits.is_full());
        for index in 0..130 {
            assert!(bits.set(index));
            assert!(!bits.set(index));
        }
        assert!(bits.is_full() && bits.covers(0..130));
        assert!(bits.clear(129) && !bits.clear(129));
        assert!(!bits.covers(0..130) && bits.covers(0..129));
        assert_eq!(bits.count(), 129);
        assert!(!bits.get(1000));
        assert!(Bits::new(0).is_full());
    }
}
