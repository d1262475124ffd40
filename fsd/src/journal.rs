//! The memory that fsd shares with its keepers: which events were read and not yet answered.
//!
//! A thread takes a slot, reads one event from the group straight into it, and the slot stays taken
//! until the event is answered. The next fsd finds in it what the dead one still owed.
//!
//! Locking: a slot belongs to the one thread that took it; the list of free slots is a channel. All
//! words that two processes see are atomics.
//!
//! ```text
//! header   0 magic u64 | 8 version u32 | 12 slots u32 | 16 numbers u32
//! slot     0 state u32 | 8 device u64 | 16 inode u64 | 64 the kernel's record, 48 bytes
//!
//! FREE --take--> ARMED --read(2) fills the record--> ARMED --name_file--> NAMED --answered--> FREE
//! ```
// CRASH: at any point between the read and the answer the record is in the slot. A slot that is ARMED
// with an empty record holds no event; with a record but no name, the event's file is unknown, so a
// successor fills the range in every marked layer.

use crossbeam_channel::{Receiver, Sender};
use layer::{Context, Error, Result};
use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use sys::fanotify::{EVENT_BYTES, PreAccess, Record, parse_record};
use sys::memory::SharedMapping;

/// Events that may be read and unanswered at once. More wait in the kernel's queue.
pub const SLOTS: usize = 8192;

const MAGIC: u64 = u64::from_le_bytes(*b"lmlajrnl");
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 4096;
const SLOT_BYTES: usize = 128;
const RECORD_AT: usize = 64;
const JOURNAL_BYTES: usize = HEADER_BYTES + SLOTS * SLOT_BYTES;

const FREE: u32 = 0;
const ARMED: u32 = 1;
const NAMED: u32 = 2;

/// Device and inode of a file: how an event is matched to a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileKey {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
}

/// An event that a dead fsd has read and not answered.
#[derive(Debug)]
pub struct Outstanding {
    /// What to answer, and the range that has to be filled first.
    pub access: PreAccess,
    /// Whose range; absent when the dead fsd did not come to say.
    pub file: Option<FileKey>,
    slot: Option<Slot>,
}

impl Outstanding {
    /// The event was answered: its slot is free again.
    pub fn answered(mut self) {
        drop(self.slot.take());
    }
}

impl Drop for Outstanding {
    fn drop(&mut self) {
        // Not answered: the slot stays taken, so that the next fsd finds it.
        std::mem::forget(self.slot.take());
    }
}

/// How many events were read and not answered, seen from outside: `memory` is a journal's file, for
/// instance a keeper's descriptor. Changes nothing.
pub fn count_unanswered(memory: &File) -> Result<usize> {
    let mut bytes = vec![0; JOURNAL_BYTES];
    memory.read_exact_at(&mut bytes, 0).context(|| "read an event journal".to_owned())?;
    let slots = bytes[HEADER_BYTES..].chunks_exact(SLOT_BYTES);
    let owed = slots.filter(|slot| {
        let record = &slot[RECORD_AT..RECORD_AT + EVENT_BYTES];
        slot[..4] != FREE.to_ne_bytes() && matches!(parse_record(record), Ok(Record::PreAccess(_)))
    });
    Ok(owed.count())
}

/// The shared memory.
#[derive(Debug)]
pub struct Journal {
    memory: SharedMapping,
    free: Receiver<usize>,
    give_back: Sender<usize>,
}

impl Journal {
    /// An empty journal in fresh memory.
    pub fn create() -> Result<Arc<Self>> {
        let name = || "create the event journal".to_owned();
        let memory = SharedMapping::create("lamella-journal", JOURNAL_BYTES).context(name)?;
        memory.atomic_u64(0).context(name)?.store(MAGIC, Ordering::Release);
        memory.atomic_u32(8).context(name)?.store(VERSION, Ordering::Release);
        memory.atomic_u32(12).context(name)?.store(SLOTS as u32, Ordering::Release);
        let (give_back, free) = crossbeam_channel::bounded(SLOTS);
        for index in 0..SLOTS {
            // The channel holds exactly SLOTS entries, so there is always room.
            let _ = give_back.try_send(index);
        }
        Ok(Arc::new(Self { memory, free, give_back }))
    }

    /// Takes over the memory of a dead fsd. Slots with unanswered events are not free.
    pub fn adopt(fd: OwnedFd) -> Result<(Arc<Self>, Vec<Outstanding>)> {
        let name = || "adopt the event journal".to_owned();
        let memory = SharedMapping::open(fd).context(name)?;
        let fits = memory.bytes() == JOURNAL_BYTES
            && memory.atomic_u64(0).context(name)?.load(Ordering::Acquire) == MAGIC
            && memory.atomic_u32(8).context(name)?.load(Ordering::Acquire) == VERSION
            && memory.atomic_u32(12).context(name)?.load(Ordering::Acquire) == SLOTS as u32;
        if !fits {
            return Err(Error::corrupt("the event journal has another layout"));
        }
        let (give_back, free) = crossbeam_channel::bounded(SLOTS);
        let journal = Arc::new(Self { memory, free, give_back });
        let mut outstanding = Vec::new();
        for index in 0..SLOTS {
            let slot = Slot { journal: Arc::clone(&journal), index };
            match slot.owed()? {
                Some((access, file)) => {
                    outstanding.push(Outstanding { access, file, slot: Some(slot) });
                }
                None => drop(slot),
            }
        }
        Ok((journal, outstanding))
    }

    /// The descriptor that keepers hold.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.memory.descriptor()
    }

    /// Waits for a free slot.
    pub fn take(self: &Arc<Self>) -> Result<Slot> {
        let index = self.free.recv().map_err(|_| Error::corrupt("the event journal is gone"))?;
        Ok(Slot { journal: Arc::clone(self), index })
    }

    /// Raises the bound of the descriptor numbers that any reader of the group has used.
    pub fn note_numbers(&self, below: u32) -> Result<()> {
        let word = self.memory.atomic_u32(16).context(|| "event journal header".to_owned())?;
        word.fetch_max(below, Ordering::AcqRel);
        Ok(())
    }

    /// Every event number ever given out is below this.
    pub fn numbers(&self) -> Result<u32> {
        let word = self.memory.atomic_u32(16).context(|| "event journal header".to_owned())?;
        Ok(word.load(Ordering::Acquire))
    }
}

/// One slot, taken. Dropping it frees it: only after its event was answered.
#[derive(Debug)]
pub struct Slot {
    journal: Arc<Journal>,
    index: usize,
}

impl Slot {
    fn at(&self) -> usize {
        HEADER_BYTES + self.index * SLOT_BYTES
    }

    fn set_state(&self, state: u32) -> Result<()> {
        let word = self.journal.memory.atomic_u32(self.at()).context(|| self.name())?;
        word.store(state, Ordering::Release);
        Ok(())
    }

    fn name(&self) -> String {
        format!("slot {} of the event journal", self.index)
    }

    /// Empties the slot and marks it as one that an event may be read into.
    pub fn arm(&self) -> Result<sys::memory::Region<'_>> {
        let record = self
            .journal
            .memory
            .region(self.at() + RECORD_AT, EVENT_BYTES)
            .context(|| self.name())?;
        record.clear();
        self.set_state(ARMED)?;
        Ok(record)
    }

    /// Notes which file the event in the slot is about.
    pub fn name_file(&self, file: FileKey) -> Result<()> {
        let memory = &self.journal.memory;
        let store = |at, value| -> Result<()> {
            memory.atomic_u64(at).context(|| self.name())?.store(value, Ordering::Release);
            Ok(())
        };
        store(self.at() + 8, file.device)?;
        store(self.at() + 16, file.inode)?;
        self.set_state(NAMED)
    }

    fn owed(&self) -> Result<Option<(PreAccess, Option<FileKey>)>> {
        let memory = &self.journal.memory;
        let load = |at| -> Result<u64> {
            Ok(memory.atomic_u64(at).context(|| self.name())?.load(Ordering::Acquire))
        };
        let state = memory.atomic_u32(self.at()).context(|| self.name())?.load(Ordering::Acquire);
        if state == FREE {
            return Ok(None);
        }
        let mut bytes = [0; EVENT_BYTES];
        memory.region(self.at() + RECORD_AT, EVENT_BYTES).context(|| self.name())?.load(&mut bytes);
        let file = FileKey { device: load(self.at() + 8)?, inode: load(self.at() + 16)? };
        match parse_record(&bytes) {
            Ok(Record::PreAccess(access)) => Ok(Some((access, (state == NAMED).then_some(file)))),
            // Nothing was read into it, or nothing that is answered by number.
            _ => Ok(None),
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Err(error) = self.set_state(FREE) {
            tracing::error!(error = %error.chain(), "free a journal slot");
        }
        // The channel has room for every slot there is.
        let _ = self.journal.give_back.try_send(self.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record as the kernel writes it: metadata, then the range record.
    fn record(number: i32, offset: u64, count: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&48u32.to_ne_bytes());
        bytes.extend_from_slice(&[3, 0]);
        bytes.extend_from_slice(&24u16.to_ne_bytes());
        bytes.extend_from_slice(&0x0010_0000u64.to_ne_bytes());
        bytes.extend_from_slice(&number.to_ne_bytes());
        bytes.extend_from_slice(&77i32.to_ne_bytes());
        bytes.extend_from_slice(&[6, 0, 24, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(&offset.to_ne_bytes());
        bytes.extend_from_slice(&count.to_ne_bytes());
        bytes
    }

    fn successor(journal: &Journal) -> Vec<Outstanding> {
        Journal::adopt(journal.descriptor().try_clone_to_owned().unwrap()).unwrap().1
    }

    #[test]
    fn a_successor_finds_what_was_read_and_not_answered() {
        let journal = Journal::create().unwrap();
        let armed = journal.take().unwrap();
        armed.arm().unwrap();
        let unnamed = journal.take().unwrap();
        unnamed.arm().unwrap().store(&record(9, 4096, 8192));
        let named = journal.take().unwrap();
        named.arm().unwrap().store(&record(10, 0, 100));
        let file = FileKey { device: 3, inode: 4 };
        named.name_file(file).unwrap();
        let answered = journal.take().unwrap();
        answered.arm().unwrap().store(&record(11, 0, 1));
        drop(answered);

        let outside = File::from(journal.descriptor().try_clone_to_owned().unwrap());
        assert_eq!(count_unanswered(&outside).unwrap(), 2);
        let owed = successor(&journal);
        assert_eq!(owed.len(), 2);
        let find = |number| owed.iter().find(|event| event.access.number == number).unwrap();
        assert_eq!((find(9).file, find(9).access.offset, find(9).access.count), (None, 4096, 8192));
        assert_eq!(find(10).file, Some(file));
        drop(owed);
        let again = successor(&journal);
        assert_eq!(again.len(), 2, "dropping without an answer keeps the slot");
        again.into_iter().for_each(Outstanding::answered);
        assert!(successor(&journal).is_empty());
    }

    #[test]
    fn a_reused_slot_does_not_show_its_former_file() {
        let journal = Journal::create().unwrap();
        for _ in 0..SLOTS {
            let slot = journal.take().unwrap();
            slot.arm().unwrap().store(&record(5, 0, 1));
            slot.name_file(FileKey { device: 1, inode: 1 }).unwrap();
        }
        let slot = journal.take().unwrap();
        slot.arm().unwrap().store(&record(6, 0, 1));
        let owed = successor(&journal);
        assert_eq!(owed.len(), 1);
        assert_eq!(owed[0].file, None);
    }

    #[test]
    fn the_bound_of_numbers_only_grows() {
        let journal = Journal::create().unwrap();
        journal.note_numbers(500).unwrap();
        journal.note_numbers(20).unwrap();
        assert_eq!(journal.numbers().unwrap(), 500);
    }
}
