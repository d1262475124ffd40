//! Mounts of a history: attach, detach, release, and the takeover by a new fsd, in the steps in which the node
//! takes them, each of which others may run between.
//!
//! ```text
//! closed --attach--> mounted --detach--> lingering --nobody reads, durable--> closed --evict--> gone
//!                       ^                    |
//!                       |-------attach-------|
//! ```
//! A takeover opens the layers that the kernel has mounted one after the other, then fills and answers what the
//! dead one owed, and only then takes new events. Who reads meanwhile waits in the kernel's queue. What the dead
//! fsd answered itself ended with it: its readers got an error, and have to attach anew.

use super::disk::SimDisk;
use super::history::{Answer, History, Plane, Reader, lock};
use super::mutant::Mutant;
use crate::served::ServedLayer;
use std::sync::Arc;

/// What is left to do of a takeover.
#[derive(Debug, Default)]
pub struct Takeover {
    /// Layers that are mounted and not opened yet.
    layers: Vec<usize>,
    /// Readers whose events the dead one had read, each with where it is told: it may ask anew afterwards.
    owed: Vec<(usize, Answer)>,
    /// Whether the owed ones were asked for.
    asked: bool,
}

/// The mounts of a history.
#[derive(Debug, Default)]
pub struct Mounts {
    /// Whether each layer is mounted.
    mounted: Vec<bool>,
    /// Whether each layer is being released, under the lock that an attach waits for.
    releasing: Vec<bool>,
    /// Readers whose events nobody has read.
    queued: Vec<usize>,
    takeover: Option<Takeover>,
    /// What upkeep is about to write back, and has not begun with: it may be released meanwhile.
    late: Vec<Option<(Arc<ServedLayer>, Arc<SimDisk>)>>,
}

impl Mounts {
    /// Nothing is mounted.
    pub fn new(layers: usize) -> Self {
        Self {
            mounted: vec![false; layers],
            releasing: vec![false; layers],
            late: vec![None; layers],
            ..Self::default()
        }
    }
}

impl History {
    /// Whether a new fsd has not come to take events yet.
    pub(super) fn is_taking_over(&self) -> bool {
        lock(&self.mounts).takeover.is_some()
    }

    pub(super) fn is_mounted(&self, layer: usize) -> bool {
        lock(&self.mounts).mounted[layer]
    }

    /// An event that waits until somebody takes it.
    pub(super) fn queue(&self, reader: usize) {
        lock(&self.mounts).queued.push(reader);
    }

    /// Whether somebody reads from a mount of this layer, which then keeps its superblock.
    pub(super) fn is_read(&self, layer: usize) -> bool {
        let of = |reader: &Reader| matches!(reader, Reader::Waiting(read) if read.layer == layer);
        lock(&self.readers).iter().any(of)
    }

    /// Mounts a layer; false where that has to wait.
    pub(super) fn attach(&self, layer: usize) -> bool {
        if self.is_taking_over() || lock(&self.mounts).releasing[layer] {
            return false;
        }
        self.open(layer);
        if !std::mem::replace(&mut lock(&self.mounts).mounted[layer], true) {
            self.fate.note(|| format!("attach {layer}"));
            lock(&self.tally).mounts += 1;
        }
        true
    }

    /// Unmounts a layer and closes it where nobody reads it any more.
    pub(super) fn detach(&self, layer: usize) {
        if self.is_taking_over() {
            return;
        }
        self.fate.note(|| format!("detach {layer}"));
        lock(&self.mounts).mounted[layer] = false;
        self.release(layer);
    }

    /// Closes a layer that is neither mounted nor read, when what was filled is durable. Whoever fills it still
    /// has it open, and a late write-back may follow.
    fn release(&self, layer: usize) {
        if self.is_read(layer) || self.is_mounted(layer) || lock(&self.mounts).releasing[layer] {
            return;
        }
        let Some(open) = self.begin_flush(layer) else { return };
        lock(&self.mounts).releasing[layer] = true;
        let flushed = open.fetch().cached().make_durable();
        self.end_flush(layer);
        lock(&self.mounts).releasing[layer] = false;
        if flushed.is_ok() && !self.fate.is_dead() {
            self.fate.note(|| format!("released {layer}"));
            open.fetch().cached().retire();
            let closed = lock(&self.process).layers[layer].take();
            drop(closed);
        }
    }

    /// After a death: what is taken over, and what is not.
    pub(super) fn begin_takeover(&self, power_cut: bool) {
        let mut mounts = lock(&self.mounts);
        mounts.releasing.fill(false);
        mounts.late.fill(None);
        if power_cut {
            // The machine starts with nothing mounted, and without readers.
            lock(&self.readers).fill_with(Reader::default);
            mounts.mounted.fill(false);
            mounts.queued.clear();
        }
        let mut takeover = Takeover::default();
        for layer in 0..mounts.mounted.len() {
            if self.planes[layer] == Plane::Fsd {
                mounts.mounted[layer] = false;
            }
        }
        for (index, reader) in lock(&self.readers).iter_mut().enumerate() {
            let Reader::Waiting(read) = reader else { continue };
            if lock(&read.answer).is_some() {
                continue;
            }
            if self.planes[read.layer] == Plane::Fsd {
                self.fate.note(|| format!("reader {index} has lost its mount"));
                lock(&self.tally).errors += 1;
                *reader = Reader::Idle;
                continue;
            }
            if !takeover.layers.contains(&read.layer) {
                takeover.layers.push(read.layer);
            }
            if !mounts.queued.contains(&index) {
                takeover.owed.push((index, Arc::clone(&read.answer)));
            }
        }
        for layer in 0..mounts.mounted.len() {
            if mounts.mounted[layer] && !takeover.layers.contains(&layer) {
                takeover.layers.push(layer);
            }
        }
        mounts.takeover = Some(takeover);
    }

    /// The next step of a takeover; true when it is over.
    pub(super) fn take_over(&self) -> bool {
        let mut mounts = lock(&self.mounts);
        let Some(takeover) = mounts.takeover.as_mut() else { return true };
        if let Some(layer) = takeover.layers.pop() {
            drop(mounts);
            self.fate.note(|| format!("takeover opens {layer}"));
            self.open(layer);
            return false;
        }
        if !std::mem::replace(&mut takeover.asked, true) {
            let owed: Vec<usize> = takeover.owed.iter().map(|(reader, _)| *reader).collect();
            drop(mounts);
            self.fate.note(|| format!("takeover fills for {owed:?}"));
            owed.into_iter().for_each(|reader| self.ask_again(reader));
            return false;
        }
        let waits = |(reader, answer): &(usize, Answer)| match &lock(&self.readers)[*reader] {
            Reader::Waiting(read) => {
                Arc::ptr_eq(&read.answer, answer) && lock(&read.answer).is_none()
            }
            Reader::Idle => false,
        };
        takeover.owed.retain(waits);
        if !takeover.owed.is_empty() {
            return false;
        }
        let queued = std::mem::take(&mut mounts.queued);
        mounts.takeover = None;
        drop(mounts);
        lock(&self.tally).takeovers += 1;
        self.fate.note(|| format!("takeover is over; events of {queued:?}"));
        queued.into_iter().for_each(|reader| self.ask_again(reader));
        true
    }

    fn ask_again(&self, reader: usize) {
        let waiting = match &lock(&self.readers)[reader] {
            Reader::Waiting(read) if lock(&read.answer).is_none() => Some(read.clone()),
            _ => None,
        };
        let Some(read) = waiting else { return };
        if self.mutant == Mutant::LetsTheOwedGo {
            read.disk.reader_let_go();
            *lock(&read.answer) = Some(Ok(None));
            return;
        }
        self.ask(reader, read);
    }

    /// Nothing of the engine is in the middle of something with this layer's file.
    pub(super) fn begin_flush(&self, layer: usize) -> Option<Arc<ServedLayer>> {
        let mut process = lock(&self.process);
        let open = process.layers[layer].clone()?;
        let busy = process.flushing[layer] || !lock(&self.disks)[layer].is_quiet();
        if busy {
            return None;
        }
        process.flushing[layer] = true;
        Some(open)
    }

    pub(super) fn end_flush(&self, layer: usize) {
        lock(&self.process).flushing[layer] = false;
    }
    pub(super) fn is_late(&self, layer: usize) -> bool {
        lock(&self.mounts).late[layer].is_some()
    }

    /// Upkeep has looked and comes to the write-back later.
    pub(super) fn keep_late(&self, layer: usize, open: Arc<ServedLayer>) {
        let disk = Arc::clone(&lock(&self.disks)[layer]);
        lock(&self.mounts).late[layer] = Some((open, disk));
        self.end_flush(layer);
    }

    /// The write-back of what upkeep had seen, whatever has become of the layer.
    pub(super) fn flush_late(&self, layer: usize) {
        let mut mounts = lock(&self.mounts);
        let quiet = mounts.late[layer].as_ref().is_some_and(|(_, disk)| disk.is_quiet());
        let mut process = lock(&self.process);
        if !quiet || process.flushing[layer] {
            return;
        }
        process.flushing[layer] = true;
        let late = mounts.late[layer].take();
        drop((mounts, process));
        self.fate.note(|| format!("late write-back of {layer}"));
        if let Some((open, _)) = late {
            let _ = open.fetch().cached().make_durable();
        }
        self.end_flush(layer);
    }
}
