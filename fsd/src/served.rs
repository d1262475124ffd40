//! A layer while it is served: what the event threads need to find and to count.
//!
//! Locking: the registry is read on every event and written on attach and release; counters are
//! atomics; the asked ranges have their own mutex.

use crate::fetch::FetchLayer;
use crate::journal::FileKey;
use crate::profile::Recorder;
use crate::ranges::Ranges;
use crate::readahead::{BackingDevice, Readahead};
use crate::streams::{Neighbours, Streams};
use layer::LayerId;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// Rounds of upkeep that a layer may put off its flush for.
const LONGEST_UNREST: u32 = 4;

/// What the last round of upkeep saw.
#[derive(Debug, Default)]
struct Settling {
    filled_bytes: Option<u64>,
    calls: u32,
}

impl Settling {
    fn is_restless(&mut self, filled_bytes: u64) -> bool {
        let moved = self.filled_bytes.replace(filled_bytes) != Some(filled_bytes);
        let restless = moved && self.calls < LONGEST_UNREST;
        self.calls = if restless { self.calls + 1 } else { 0 };
        restless
    }
}

/// One layer that a plane serves.
#[derive(Debug)]
pub struct ServedLayer {
    fetch: Arc<FetchLayer>,
    marked: AtomicBool,
    asked: Mutex<Asked>,
    recorder: Arc<Recorder>,
    readahead: Readahead,
    settling: Mutex<Settling>,
    /// Reads that found everything present.
    pub hits: AtomicU64,
    /// Reads that joined what others had asked for.
    pub waits: AtomicU64,
    /// Reads that were answered with an error.
    pub denials: AtomicU64,
}

impl ServedLayer {
    /// Nothing was asked yet.
    pub fn new(fetch: Arc<FetchLayer>, marked: bool, recorder: Arc<Recorder>) -> Arc<Self> {
        Arc::new(Self {
            fetch,
            marked: AtomicBool::new(marked),
            asked: Mutex::default(),
            recorder,
            readahead: Readahead::default(),
            settling: Mutex::default(),
            hits: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            denials: AtomicU64::new(0),
        })
    }

    /// The layer.
    pub fn id(&self) -> LayerId {
        self.fetch.cached().id()
    }

    /// How its chunks are fetched.
    pub fn fetch(&self) -> &Arc<FetchLayer> {
        &self.fetch
    }

    /// Whether the kernel asks before it reads the data file.
    pub fn is_marked(&self) -> bool {
        self.marked.load(Ordering::Acquire)
    }

    /// Whether the kernel has to ask for reads: some data is not here for good, or somebody records.
    pub fn needs_events(&self) -> bool {
        !self.fetch.cached().is_durably_complete() || self.recorder.wants(&self.id())
    }

    /// Notes that the mark was set or dropped.
    pub fn set_marked(&self, marked: bool) {
        self.marked.store(marked, Ordering::Release);
    }

    /// Notes a range that somebody reads. Answers the chunks that are worth fetching ahead now.
    pub fn note_asked(&self, offset: u64, bytes: u64) -> Option<Range<usize>> {
        let table = self.fetch.cached().table();
        let end = offset.saturating_add(bytes).min(table.data_bytes());
        self.recorder.note(&self.id(), offset, end);
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.ranges.add(offset..end);
        let total = asked.ranges.total();
        let chunks = match asked.streams.note(offset, end.saturating_sub(offset)) {
            Some(ahead) => Some(table.covering(ahead.start, ahead.end - ahead.start)),
            None => {
                let missed = table.covering(offset, end.saturating_sub(offset));
                let has = |chunk| self.fetch.cached().has(chunk);
                asked.neighbours.around(table.chunks(), missed, total, has)
            }
        };
        drop(asked);
        self.readahead.follow(total, self.fetch.cached().is_durably_complete());
        chunks.filter(|chunks| !self.fetch.cached().has_all(chunks.clone()))
    }

    /// Notes the backing device of a fresh mount, and sets its readahead.
    pub fn set_device(&self, device: Option<BackingDevice>) {
        self.readahead.adopt(device);
        self.adapt_readahead();
    }

    /// Sets the readahead that the layer should have now.
    pub fn adapt_readahead(&self) {
        self.readahead.follow(self.asked_bytes(), self.fetch.cached().is_durably_complete());
    }

    /// Whether it was opened or filled since the last call: then a flush would meet the readers on the disk.
    /// For a few calls in a row at most.
    pub fn is_restless(&self) -> bool {
        let filled = self.fetch.cached().filled_bytes();
        self.settling.lock().unwrap_or_else(PoisonError::into_inner).is_restless(filled)
    }

    /// Bytes of the union of all ranges that were asked.
    pub fn asked_bytes(&self) -> u64 {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).ranges.total()
    }
}

/// What was asked, and in which order.
#[derive(Debug, Default)]
struct Asked {
    ranges: Ranges,
    streams: Streams,
    neighbours: Neighbours,
}

/// All served layers by the file that their events name.
#[derive(Debug, Default)]
pub struct Registry {
    layers: RwLock<HashMap<FileKey, Arc<ServedLayer>>>,
}

impl Registry {
    /// From now on events of this layer's data file find it.
    pub fn insert(&self, layer: &Arc<ServedLayer>) {
        let key = layer.fetch.cached().key();
        self.layers.write().unwrap_or_else(PoisonError::into_inner).insert(key, Arc::clone(layer));
    }

    /// Events of this file find nothing any more.
    pub fn remove(&self, key: FileKey) {
        self.layers.write().unwrap_or_else(PoisonError::into_inner).remove(&key);
    }

    /// The layer whose data file this is.
    pub fn find(&self, key: FileKey) -> Option<Arc<ServedLayer>> {
        self.layers.read().unwrap_or_else(PoisonError::into_inner).get(&key).map(Arc::clone)
    }

    /// All layers that the kernel asks for.
    pub fn marked(&self) -> Vec<Arc<ServedLayer>> {
        let layers = self.layers.read().unwrap_or_else(PoisonError::into_inner);
        layers.values().filter(|layer| layer.is_marked()).map(Arc::clone).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_that_is_filled_puts_off_its_flush_a_few_times_only() {
        let mut settling = Settling::default();
        assert!(settling.is_restless(0), "it was opened a moment ago");
        assert!(!settling.is_restless(0));
        assert!(settling.is_restless(1));
        assert!(!settling.is_restless(1), "it has come to a rest");
        let rounds: Vec<bool> = (2..12).map(|filled| settling.is_restless(filled)).collect();
        let (unrest, rest) = (LONGEST_UNREST as usize, LONGEST_UNREST as usize + 1);
        assert_eq!(rounds.iter().position(|restless| !restless), Some(unrest));
        assert_eq!(rounds.iter().filter(|restless| !**restless).count(), 10 / rest);
    }
}
