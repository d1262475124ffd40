//! Recordings: which blocks of which layers were asked for first, and when.
//!
//! Every read that a plane sees is noted here, whether its blocks are present or not. While nothing is
//! recorded that is one load of an atomic.
//!
//! Locking: one mutex around all recordings, held for map operations only. CRASH: recordings live in
//! memory; one that was running when fsd died is gone, and stopping it says so.

use crate::ranges::Ranges;
use layer::chunk::BLOCK_BYTES;
use layer::profile::{MAX_LAYERS, MAX_TOUCHES, Run, Touch};
use layer::{EnvId, Error, ErrorKind, LayerId, Result};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Recordings that run at once.
const MAX_RECORDINGS: usize = 16;
/// The longest name of a recording.
const MAX_NAME_BYTES: usize = 256;
/// Neighbouring reads closer in time than this are one touch.
const JOIN_MS: u32 = 20;
/// The longest touch that is joined from several reads, in blocks.
const JOIN_BLOCKS: u32 = 256;

/// A finished recording.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// What was touched.
    pub run: Run,
    /// Whose profile it is, beside the layers' own.
    pub environment: Option<EnvId>,
    /// More was touched than a run holds.
    pub truncated: bool,
}

#[derive(Debug)]
struct Recording {
    begin: Instant,
    started_unix_ms: u64,
    environment: Option<EnvId>,
    layers: HashMap<LayerId, u32>,
    seen: Vec<Ranges>,
    touches: Vec<Touch>,
    truncated: bool,
}

impl Recording {
    fn note(&mut self, layer: u32, start: u64, end: u64) {
        let at_ms = u32::try_from(self.begin.elapsed().as_millis()).unwrap_or(u32::MAX);
        let seen = &mut self.seen[layer as usize];
        for part in seen.missing(start..end) {
            // INVARIANT: a data space has at most 2^32-1 blocks.
            let (Ok(start_block), Ok(blocks)) =
                (u32::try_from(part.start), u32::try_from(part.end - part.start))
            else {
                continue;
            };
            let is_full = self.touches.len() == MAX_TOUCHES;
            match self.touches.last_mut() {
                Some(last)
                    if last.layer == layer
                        && last.start_block + last.blocks == start_block
                        && at_ms - last.at_ms < JOIN_MS
                        && last.blocks + blocks <= JOIN_BLOCKS =>
                {
                    last.blocks += blocks;
                }
                _ if is_full => {
                    self.truncated = true;
                    return;
                }
                _ => self.touches.push(Touch { layer, start_block, blocks, at_ms }),
            }
            seen.add(part);
        }
    }

    fn finish(self) -> Result<Recorded> {
        let mut layers: Vec<(LayerId, u32)> = self.layers.into_iter().collect();
        layers.sort_unstable_by_key(|(_, index)| *index);
        let layers = layers.into_iter().map(|(layer, _)| layer).collect();
        let run = Run::new(self.started_unix_ms, layers, self.touches)?;
        Ok(Recorded { run, environment: self.environment, truncated: self.truncated })
    }
}

/// All recordings of the node.
#[derive(Debug, Default)]
pub struct Recorder {
    running: AtomicUsize,
    recordings: Mutex<BTreeMap<String, Recording>>,
}

impl Recorder {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Recording>> {
        self.recordings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a recording of these layers. `Exists` when one of this name runs, `NoSpace` when too
    /// many do.
    pub fn begin(&self, name: &str, layers: &[LayerId], environment: Option<EnvId>) -> Result<()> {
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            return Err(Error::invalid("the name of a recording has 1 to 256 bytes"));
        }
        if layers.is_empty() || layers.len() > MAX_LAYERS {
            return Err(Error::invalid(format!("a recording of {} layers", layers.len())));
        }
        let mut recordings = self.lock();
        if recordings.contains_key(name) {
            return Err(Error::new(ErrorKind::Exists, format!("recording {name:?} runs already")));
        }
        if recordings.len() == MAX_RECORDINGS {
            let text = format!("{MAX_RECORDINGS} recordings run already");
            return Err(Error::new(ErrorKind::NoSpace, text));
        }
        let mut indexes = HashMap::new();
        for layer in layers {
            let next = indexes.len() as u32;
            indexes.entry(*layer).or_insert(next);
        }
        let recording = Recording {
            begin: Instant::now(),
            started_unix_ms: store::now_unix_ns() / 1_000_000,
            environment,
            seen: indexes.iter().map(|_| Ranges::default()).collect(),
            layers: indexes,
            touches: Vec::new(),
            truncated: false,
        };
        recordings.insert(name.to_owned(), recording);
        self.running.store(recordings.len(), Ordering::Release);
        Ok(())
    }

    /// Ends a recording. `NotFound` when none of this name runs.
    pub fn end(&self, name: &str) -> Result<Recorded> {
        let mut recordings = self.lock();
        let found = recordings.remove(name);
        self.running.store(recordings.len(), Ordering::Release);
        drop(recordings);
        let lost = || Error::not_found(format!("no recording {name:?} runs"));
        found.ok_or_else(lost)?.finish()
    }

    /// Notes that bytes `offset..end` of a layer's data space are read.
    pub fn note(&self, layer: &LayerId, offset: u64, end: u64) {
        if self.running.load(Ordering::Acquire) == 0 || offset >= end {
            return;
        }
        let block = u64::from(BLOCK_BYTES);
        for recording in self.lock().values_mut() {
            if let Some(index) = recording.layers.get(layer).copied() {
                recording.note(index, offset / block, end.div_ceil(block));
            }
        }
    }

    /// Whether reads of this layer are recorded: then the kernel has to ask for them, even where
    /// everything is present.
    pub fn wants(&self, layer: &LayerId) -> bool {
        self.running.load(Ordering::Acquire) > 0
            && self.lock().values().any(|recording| recording.layers.contains_key(layer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYERS: [LayerId; 2] = [LayerId([1; 32]), LayerId([2; 32])];

    #[test]
    fn first_touches_are_kept_in_order() {
        let recorder = Recorder::default();
        recorder.note(&LAYERS[0], 0, 4096);
        assert!(!recorder.wants(&LAYERS[0]));
        recorder.begin("a", &LAYERS, None).unwrap();
        assert!(recorder.wants(&LAYERS[0]));
        recorder.note(&LAYERS[1], 8192, 12288);
        recorder.note(&LAYERS[0], 4096, 4097);
        recorder.note(&LAYERS[1], 0, 16384);
        recorder.note(&LAYERS[1], 0, 16384);
        recorder.note(&LayerId([3; 32]), 0, 4096);
        let run = recorder.end("a").unwrap().run;
        let seen: Vec<_> = run
            .touches()
            .iter()
            .map(|touch| (run.layers()[touch.layer as usize].0[0], touch.start_block, touch.blocks))
            .collect();
        assert_eq!(seen, [(2, 2, 1), (1, 1, 1), (2, 0, 2), (2, 3, 1)]);
        assert_eq!(recorder.end("a").unwrap_err().kind(), ErrorKind::NotFound);
        assert!(!recorder.wants(&LAYERS[0]));
    }

    #[test]
    fn recordings_are_bounded() {
        let recorder = Recorder::default();
        for index in 0..MAX_RECORDINGS {
            recorder.begin(&index.to_string(), &LAYERS, None).unwrap();
        }
        assert_eq!(recorder.begin("0", &LAYERS, None).unwrap_err().kind(), ErrorKind::Exists);
        assert_eq!(recorder.begin("x", &LAYERS, None).unwrap_err().kind(), ErrorKind::NoSpace);
        assert_eq!(recorder.begin("", &LAYERS, None).unwrap_err().kind(), ErrorKind::Invalid);
        for touch in 0..=MAX_TOUCHES as u64 {
            recorder.note(&LAYERS[0], touch * 8192, touch * 8192 + 4096);
        }
        let recorded = recorder.end("0").unwrap();
        assert!(recorded.truncated);
        assert_eq!(recorded.run.touches().len(), MAX_TOUCHES);
    }
}
