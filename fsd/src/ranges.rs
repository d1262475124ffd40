//! A union of ranges: as many entries as there are gaps between what was added.

use std::collections::BTreeMap;
use std::ops::Range;

/// The union.
#[derive(Debug, Default)]
pub struct Ranges {
    ends: BTreeMap<u64, u64>,
    total: u64,
}

impl Ranges {
    /// Length of the union.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The parts of a range that are not in the union, in order.
    pub fn missing(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut parts = Vec::new();
        let mut at = range.start;
        if let Some((_, end)) = self.ends.range(..=range.start).next_back() {
            at = at.max(*end);
        }
        for (start, end) in self.ends.range(range.start..range.end) {
            if at < *start {
                parts.push(at..*start);
            }
            at = at.max(*end);
        }
        if at < range.end {
            parts.push(at..range.end);
        }
        parts
    }

    /// Adds a range.
    pub fn add(&mut self, range: Range<u64>) {
        let Range { mut start, mut end } = range;
        if start >= end {
            return;
        }
        let before = self.ends.range(..=start).next_back().map(|(start, end)| (*start, *end));
        if let Some((before_start, before_end)) = before
            && before_end >= start
        {
            if before_end >= end {
                return;
            }
            start = before_start;
        }
        while let Some((next_start, next_end)) =
            self.ends.range(start..=end).next().map(|(start, end)| (*start, *end))
        {
            self.ends.remove(&next_start);
            self.total -= next_end - next_start;
            end = end.max(next_end);
        }
        self.ends.insert(start, end);
        self.total += end - start;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_united() {
        let mut ranges = Ranges::default();
        for (start, end, total) in [
            (10, 20, 10),
            (30, 40, 20),
            (12, 15, 20),
            (15, 35, 30),
            (0, 5, 35),
            (5, 10, 40),
            (0, 100, 100),
            (50, 50, 100),
        ] {
            ranges.add(start..end);
            assert_eq!(ranges.total(), total, "{start}..{end}");
        }
        assert_eq!(ranges.ends.len(), 1);
    }

    #[test]
    fn what_is_missing_lies_between() {
        let mut ranges = Ranges::default();
        ranges.add(10..20);
        ranges.add(30..40);
        let missing = |range| -> Vec<(u64, u64)> {
            ranges.missing(range).into_iter().map(|range| (range.start, range.end)).collect()
        };
        assert_eq!(missing(0..50), [(0, 10), (20, 30), (40, 50)]);
        assert_eq!(missing(12..18), []);
        assert_eq!(missing(15..35), [(20, 30)]);
        assert_eq!(missing(20..30), [(20, 30)]);
        assert_eq!(missing(40..41), [(40, 41)]);
    }
}
