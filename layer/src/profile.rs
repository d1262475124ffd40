//! Access profiles: which blocks of which layers a workload touched first, in which order and when.
//!
//! A profile holds some recorded runs; what to fetch in which order is a pure function of them
//! ([`Profile::order`]). It is advice: nothing that it says decides about a byte, so it is no part of any
//! identity, and a damaged one is refused as a whole and ignored by those who only wanted advice.
//!
//! Blocks, not chunks, are recorded, so that a profile tells single small files of a bundle apart and so
//! serves the builder too.

mod merge;

pub use merge::Step;

use crate::error::{Error, Result};
use crate::id::{Digest, LayerId};
use crate::input::{Input, checked, put_checksum, put_varint};
use std::cmp::Reverse;
use std::collections::BTreeMap;

const MAGIC: &[u8; 8] = b"LMLPROF\0";
const VERSION: u32 = 1;
/// Runs that a profile keeps: the newest.
pub const MAX_RUNS: usize = 8;
/// Touches that a run holds: half a gigabyte in windows of 32 KiB.
pub const MAX_TOUCHES: usize = 16_384;
/// Layers that a run names.
pub const MAX_LAYERS: usize = 256;
/// The longest stored form that is read.
pub const MAX_PROFILE_BYTES: u64 = 8 << 20;

/// Some blocks that were touched for the first time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Touch {
    /// Index into [`Run::layers`].
    pub layer: u32,
    /// First block in the layer's data space.
    pub start_block: u32,
    /// How many.
    pub blocks: u32,
    /// Milliseconds since the run began.
    pub at_ms: u32,
}

/// One recorded run, in the order of first touch.
///
/// INVARIANT of [`Run::new`]: times do not fall, every touch names a layer and has a block, and no block
/// is touched twice.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Run {
    started_unix_ms: u64,
    layers: Vec<LayerId>,
    touches: Vec<Touch>,
}

impl Run {
    /// Checks the invariant; `Invalid` where it does not hold or a bound is passed.
    pub fn new(started_unix_ms: u64, layers: Vec<LayerId>, touches: Vec<Touch>) -> Result<Self> {
        let refuse = |why: String| Err(Error::invalid(format!("profile: {why}")));
        if layers.len() > MAX_LAYERS || touches.len() > MAX_TOUCHES {
            return refuse(format!("{} layers, {} touches", layers.len(), touches.len()));
        }
        if layers.iter().collect::<std::collections::BTreeSet<_>>().len() != layers.len() {
            return refuse("a layer is named twice".to_owned());
        }
        let mut before = 0;
        for touch in &touches {
            let end = touch.start_block.checked_add(touch.blocks);
            if touch.blocks == 0 || end.is_none() || touch.layer as usize >= layers.len() {
                return refuse(format!("{touch:?} is none"));
            }
            if touch.at_ms < before {
                return refuse("time runs backwards".to_owned());
            }
            before = touch.at_ms;
        }
        let mut sorted: Vec<&Touch> = touches.iter().collect();
        sorted.sort_unstable_by_key(|touch| (touch.layer, touch.start_block));
        let overlap = sorted.windows(2).find(|pair| {
            pair[0].layer == pair[1].layer
                && pair[0].start_block + pair[0].blocks > pair[1].start_block
        });
        if let Some(pair) = overlap {
            return refuse(format!("block {} is touched twice", pair[1].start_block));
        }
        Ok(Self { started_unix_ms, layers, touches })
    }

    /// When it began.
    pub fn started_unix_ms(&self) -> u64 {
        self.started_unix_ms
    }

    /// The layers that its touches name.
    pub fn layers(&self) -> &[LayerId] {
        &self.layers
    }

    /// What was touched, in order.
    pub fn touches(&self) -> &[Touch] {
        &self.touches
    }

    fn of_layer(&self, layer: &LayerId) -> Option<Self> {
        let index = self.layers.iter().position(|known| known == layer)? as u32;
        let own = self.touches.iter().filter(|touch| touch.layer == index);
        let touches: Vec<_> = own.map(|touch| Touch { layer: 0, ..*touch }).collect();
        (!touches.is_empty()).then(|| Self {
            started_unix_ms: self.started_unix_ms,
            layers: vec![*layer],
            touches,
        })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        put_varint(out, self.started_unix_ms);
        put_varint(out, self.layers.len() as u64);
        for layer in &self.layers {
            out.extend_from_slice(layer.as_bytes());
        }
        put_varint(out, self.touches.len() as u64);
        let mut ends: BTreeMap<u32, u32> = BTreeMap::new();
        let mut before = 0;
        for touch in &self.touches {
            let end = ends.entry(touch.layer).or_default();
            put_varint(out, u64::from(touch.layer));
            let step = i64::from(touch.start_block) - i64::from(*end);
            put_varint(out, ((step << 1) ^ (step >> 63)) as u64);
            put_varint(out, u64::from(touch.blocks));
            put_varint(out, u64::from(touch.at_ms - before));
            // INVARIANT: `new` refused ends above 32 bits.
            *end = touch.start_block + touch.blocks;
            before = touch.at_ms;
        }
    }

    fn decode(input: &mut Input<'_>) -> Result<Self> {
        let started_unix_ms = input.varint()?;
        let layers = bounded(input, MAX_LAYERS)?;
        let layers: Vec<_> =
            (0..layers).map(|_| input.array().map(LayerId)).collect::<Result<_>>()?;
        let count = bounded(input, MAX_TOUCHES)?;
        let mut touches = Vec::with_capacity(count.min(input.left() / 4));
        let mut ends: BTreeMap<u32, u32> = BTreeMap::new();
        let mut before = 0_u32;
        for _ in 0..count {
            let layer = small(input)?;
            let coded = input.varint()?;
            let step = (coded >> 1) as i64 ^ -((coded & 1) as i64);
            let blocks = small(input)?;
            let pause = small(input)?;
            let end = ends.entry(layer).or_default();
            let start = i64::from(*end).checked_add(step).and_then(|at| u32::try_from(at).ok());
            let at_ms = before.checked_add(pause);
            let (Some(start_block), Some(at_ms)) = (start, at_ms) else {
                return Err(input.corrupt("a touch outside of space or time"));
            };
            *end = start_block
                .checked_add(blocks)
                .ok_or_else(|| input.corrupt("a touch outside of space"))?;
            before = at_ms;
            touches.push(Touch { layer, start_block, blocks, at_ms });
        }
        Self::new(started_unix_ms, layers, touches)
            .map_err(|error| Error::corrupt("profile").with_source(error))
    }
}

fn bounded(input: &mut Input<'_>, most: usize) -> Result<usize> {
    let count = input.varint()?;
    let found = usize::try_from(count).ok().filter(|count| *count <= most);
    found.ok_or_else(|| input.corrupt(format!("{count} is more than {most}")))
}

fn small(input: &mut Input<'_>) -> Result<u32> {
    let value = input.varint()?;
    u32::try_from(value).map_err(|_| input.corrupt(format!("{value} is above 32 bits")))
}

/// What some runs touched.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Profile {
    runs: Vec<Run>,
}

impl Profile {
    /// Of these runs the [`MAX_RUNS`] newest; equal ones count once.
    pub fn new(runs: Vec<Run>) -> Self {
        let mut coded: Vec<(Reverse<u64>, Vec<u8>, Run)> = runs
            .into_iter()
            .filter(|run| !run.touches.is_empty())
            .map(|run| {
                let mut bytes = Vec::new();
                run.encode(&mut bytes);
                (Reverse(run.started_unix_ms), bytes, run)
            })
            .collect();
        coded.sort_by(|one, other| (one.0, &one.1).cmp(&(other.0, &other.1)));
        coded.dedup_by(|one, other| one.1 == other.1);
        coded.truncate(MAX_RUNS);
        Self { runs: coded.into_iter().map(|(_, _, run)| run).collect() }
    }

    /// The runs, the newest first.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Nothing was ever touched.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The runs of both. The order in which profiles are merged does not matter.
    pub fn merged(&self, other: &Self) -> Self {
        Self::new(self.runs.iter().chain(&other.runs).cloned().collect())
    }

    /// Only what concerns one layer.
    pub fn of_layer(&self, layer: &LayerId) -> Self {
        Self::new(self.runs.iter().filter_map(|run| run.of_layer(layer)).collect())
    }

    /// Every layer that is named.
    pub fn layers(&self) -> Vec<LayerId> {
        let mut layers: Vec<_> = self.runs.iter().flat_map(|run| run.layers.clone()).collect();
        layers.sort_unstable();
        layers.dedup();
        layers
    }

    /// What to fetch first, and what then: see [`Step`].
    pub fn order(&self) -> Vec<Step> {
        merge::order(&self.runs)
    }

    /// The stored form.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        put_varint(&mut bytes, self.runs.len() as u64);
        for run in &self.runs {
            run.encode(&mut bytes);
        }
        put_checksum(&mut bytes);
        bytes
    }

    /// The inverse of [`Profile::encode`]; errors are `Corrupt` or `Unsupported`.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut input = Input::new("profile", checked("profile", bytes)?);
        input.magic(MAGIC)?;
        input.version(VERSION)?;
        let count = bounded(&mut input, MAX_RUNS)?;
        let runs = (0..count).map(|_| Run::decode(&mut input)).collect::<Result<Vec<_>>>()?;
        input.end()?;
        let given = runs.len();
        let profile = Self::new(runs);
        if profile.runs.len() != given {
            return Err(Error::corrupt("profile: an empty or repeated run"));
        }
        Ok(profile)
    }

    /// BLAKE3 of the stored form, for those whose result depends on a profile.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.encode())
    }
}

#[cfg(test)]
mod tests;
