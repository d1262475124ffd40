//! Numbers about a daemon: counters, histograms, and how they are written down for a collector (the text format
//! of Prometheus). [`calls`] measures the calls of a service.
//!
//! Bounded: every set of labels is named when a meter is made; what has no name is not counted. Locking: none,
//! every number is an atomic of its own, so two numbers of one page may be a moment apart.

pub mod calls;

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to it.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    /// Its value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Sets it, for what is a state rather than a count.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }
}

/// A counter for each of some words.
#[derive(Debug)]
pub struct Counters(Vec<(&'static str, Counter)>);

impl Counters {
    /// Counters of these words.
    pub fn of(words: &[&'static str]) -> Self {
        Self(words.iter().map(|word| (*word, Counter::default())).collect())
    }

    /// Counts one more; a word that is not known is not counted.
    pub fn count(&self, word: &str) {
        if let Some((_, counter)) = self.0.iter().find(|(known, _)| *known == word) {
            counter.add(1);
        }
    }
}

/// Upper ends of the buckets of a histogram, in milliseconds; the last bucket has none.
const BOUNDS_MS: [u64; 9] = [1, 4, 16, 64, 256, 1_000, 4_000, 16_000, 64_000];

/// How long something takes.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BOUNDS_MS.len() + 1],
    total_us: AtomicU64,
}

impl Histogram {
    /// Counts one duration.
    pub fn observe(&self, took: Duration) {
        let bound = |bound: &u64| took <= Duration::from_millis(*bound);
        let bucket = BOUNDS_MS.iter().position(bound).unwrap_or(BOUNDS_MS.len());
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.total_us.fetch_add(us, Ordering::Relaxed);
    }

    /// Counts the time since then.
    pub fn observe_since(&self, begin: Instant) {
        self.observe(begin.elapsed());
    }

    fn counts(&self) -> [u64; BOUNDS_MS.len() + 1] {
        std::array::from_fn(|bucket| self.buckets[bucket].load(Ordering::Relaxed))
    }

    /// How many durations were counted.
    pub fn count(&self) -> u64 {
        self.counts().iter().sum()
    }
}

/// What kind of number a family is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Durations in seconds.
    Histogram,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A page of numbers in the making. Every name gets `lamella_` before it. Values of labels are words and ids of
/// ours: nothing in them needs an escape.
#[derive(Debug, Default)]
pub struct Page(String);

impl Page {
    /// Begins a family: its name, what it is, and its kind. Its values follow at once.
    pub fn family(&mut self, name: &str, what: &str, kind: Kind) {
        // Writing to a string cannot fail.
        let _ =
            writeln!(self.0, "# HELP lamella_{name} {what}\n# TYPE lamella_{name} {}", kind.word());
    }

    /// A value of the family that was begun last.
    pub fn value(&mut self, name: &str, labels: &[(&str, &str)], value: u64) {
        self.line(name, labels, &value.to_string());
    }

    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: &str) {
        let labels: Vec<_> =
            labels.iter().map(|(label, value)| format!("{label}=\"{value}\"")).collect();
        let labels = match labels.is_empty() {
            true => String::new(),
            false => format!("{{{}}}", labels.join(",")),
        };
        let _ = writeln!(self.0, "lamella_{name}{labels} {value}");
    }

    /// A counter as a family of its own.
    pub fn counter(&mut self, name: &str, what: &str, value: u64) {
        self.family(name, what, Kind::Counter);
        self.value(name, &[], value);
    }

    /// A gauge as a family of its own.
    pub fn gauge(&mut self, name: &str, what: &str, value: u64) {
        self.family(name, what, Kind::Gauge);
        self.value(name, &[], value);
    }

    /// Counters of words as a family of its own.
    pub fn counters(&mut self, name: &str, what: &str, label: &str, counters: &Counters) {
        self.family(name, what, Kind::Counter);
        for (word, counter) in &counters.0 {
            self.value(name, &[(label, word)], counter.get());
        }
    }

    /// A histogram as a family of its own.
    pub fn histogram(&mut self, name: &str, what: &str, histogram: &Histogram) {
        self.family(name, what, Kind::Histogram);
        self.buckets(name, &[], histogram);
    }

    /// The values of a histogram in the family that was begun last.
    pub fn buckets(&mut self, name: &str, labels: &[(&str, &str)], histogram: &Histogram) {
        let counts = histogram.counts();
        let bounds = BOUNDS_MS.iter().map(|ms| seconds(ms * 1000)).chain(["+Inf".to_owned()]);
        let mut so_far = 0;
        for (bound, count) in bounds.zip(counts) {
            so_far += count;
            let labels = [labels, &[("le", &bound)]].concat();
            self.value(&format!("{name}_bucket"), &labels, so_far);
        }
        let total = seconds(histogram.total_us.load(Ordering::Relaxed));
        self.line(&format!("{name}_sum"), labels, &total);
        self.value(&format!("{name}_count"), labels, so_far);
    }

    /// The page.
    pub fn into_text(self) -> String {
        self.0
    }
}

/// Microseconds as seconds, exactly.
fn seconds(us: u64) -> String {
    let text = format!("{}.{:06}", us / 1_000_000, us % 1_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_what_a_collector_reads() {
        let mut page = Page::default();
        page.gauge("a", "An a.", 3);
        let ends = Counters::of(&["well", "badly"]);
        ends.count("well");
        ends.count("well");
        ends.count("otherwise");
        page.counters("ends_total", "Ends.", "how", &ends);
        let times = Histogram::default();
        times.observe(Duration::from_micros(1_500));
        times.observe(Duration::from_secs(100));
        page.histogram("times", "Times.", &times);
        let text = page.into_text();
        for line in [
            "# HELP lamella_a An a.\n# TYPE lamella_a gauge\nlamella_a 3\n",
            "lamella_ends_total{how=\"well\"} 2\nlamella_ends_total{how=\"badly\"} 0\n",
            "lamella_times_bucket{le=\"0.001\"} 0\nlamella_times_bucket{le=\"0.004\"} 1\n",
            "lamella_times_bucket{le=\"64\"} 1\nlamella_times_bucket{le=\"+Inf\"} 2\n",
            "lamella_times_sum 100.0015\nlamella_times_count 2\n",
        ] {
            assert!(text.contains(line), "{line:?} is not in {text}");
        }
        assert!(!text.contains("otherwise"));
    }
}
