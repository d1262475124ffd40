//! The event threads: take one event, answer it at once when its range is there, else let the engine
//! answer it.
//!
//! A thread that has a miss reads the first part itself while another thread keeps taking events; so
//! a lone cold read wakes nobody, and hits never wait behind a fetch. The kernel wakes one thread an event
//! ([`Turn`]).
//!
//! Locking: none. Every event is owned by exactly one closure or thread until it is answered; its
//! journal slot goes with it.

use super::turn::Turn;
use crate::fetch::{Engine, Failure, Met, spawn};
use crate::journal::{FileKey, Journal, Slot};
use crate::served::{Registry, ServedLayer};
use layer::chunk::BLOCK_BYTES;
use layer::{ErrorKind, Result};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use sys::fanotify::{Denial, Event, Group, Taken};

/// Pause after the group could not be read, so that a lasting error does not burn a core.
const ERROR_PAUSE: Duration = Duration::from_millis(20);

/// What the event threads did.
#[derive(Debug, Default)]
pub struct EventCounters {
    /// Events answered.
    pub events: AtomicU64,
    /// Of them, with an error.
    pub errors: AtomicU64,
    /// Of those, because the cache disk is full.
    pub full: AtomicU64,
}

/// What the event threads share.
#[derive(Debug)]
pub struct Events {
    group: Group,
    journal: Arc<Journal>,
    registry: Arc<Registry>,
    engine: Engine,
    counters: Arc<EventCounters>,
    /// Threads that wait for an event or take one.
    idle: AtomicUsize,
}

impl Events {
    /// Starts the threads. Only after a takeover has answered everything that was owed.
    pub fn start(
        group: Group,
        journal: Arc<Journal>,
        registry: Arc<Registry>,
        engine: Engine,
        counters: Arc<EventCounters>,
        threads: usize,
    ) -> Result<()> {
        let idle = AtomicUsize::new(0);
        let events = Arc::new(Self { group, journal, registry, engine, counters, idle });
        for index in 0..threads.max(2) {
            let events = Arc::clone(&events);
            let turn = Turn::of(&events.group)?;
            spawn(&format!("events-{index}"), move || events.run(&turn))?;
        }
        Ok(())
    }

    fn run(&self, turn: &Turn) {
        loop {
            if let Err(error) = self.take_one(turn) {
                tracing::error!(error = %error.chain(), "take an event");
                std::thread::sleep(ERROR_PAUSE);
            }
        }
    }

    fn take_one(&self, turn: &Turn) -> Result<()> {
        self.idle.fetch_add(1, Ordering::AcqRel);
        let taken = turn.wait().and_then(|()| self.read());
        let others = self.idle.fetch_sub(1, Ordering::AcqRel) - 1;
        let (taken, slot) = taken?;
        match taken {
            Taken::Event(event) => self.serve(event, slot, others > 0),
            Taken::Overflow => tracing::error!("the event queue overflowed"),
            Taken::Nothing => {}
        }
        Ok(())
    }

    fn read(&self) -> Result<(Taken, Slot)> {
        let slot = self.journal.take()?;
        let taken = self.group.read_into(slot.arm()?);
        let taken = taken.map_err(|error| layer::Error::io("read the fanotify group", error))?;
        Ok((taken, slot))
    }

    fn serve(&self, mut event: Event, slot: Slot, may_fill: bool) {
        let named = file_key(&event).and_then(|key| slot.name_file(key).map(|()| key));
        event.keep_until_answered(slot);
        let found = named.map(|key| self.registry.find(key));
        let layer = match found {
            Ok(Some(layer)) => layer,
            Ok(None) => {
                tracing::error!(access = ?event.access(), "an event of an unknown file");
                return self.deny(event, Denial::Io);
            }
            Err(error) => {
                tracing::error!(error = %error.chain(), "identify the file of an event");
                return self.deny(event, Denial::Io);
            }
        };
        let (offset, count) = (event.offset(), event.count().max(1));
        let ahead = layer.note_asked(offset, count);
        let cached = layer.fetch().cached();
        let chunks = cached.table().covering(offset, count);
        // First, so that it is on its way while this thread fills the demand.
        if let Some(ahead) = ahead {
            self.engine.prefetch(layer.fetch(), ahead);
        }
        if cached.has_all(chunks) {
            layer.hits.fetch_add(1, Ordering::Relaxed);
            allow(event, &self.counters);
        } else {
            self.fetch(event, &layer, may_fill);
        }
    }

    fn fetch(&self, event: Event, layer: &Arc<ServedLayer>, may_fill: bool) {
        let pages = pages_of(&event, layer.fetch().cached().table().data_bytes());
        let counters = Arc::clone(&self.counters);
        let owner = Arc::clone(layer);
        let done = Box::new(move |result: Result<(), Failure>| match result {
            Ok(()) => allow(event, &counters),
            Err(failure) => refuse(event, &owner, &failure, &counters),
        });
        if self.engine.page_in(layer.fetch(), pages, may_fill, done) == Met::Joined {
            layer.waits.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn deny(&self, event: Event, denial: Denial) {
        self.counters.errors.fetch_add(1, Ordering::Relaxed);
        self.counters.events.fetch_add(1, Ordering::Relaxed);
        settle(event.deny(denial));
    }
}

/// The whole pages that the reader of an event reads from the data file.
fn pages_of(event: &Event, data_bytes: u64) -> Range<u64> {
    let block = u64::from(BLOCK_BYTES);
    let end = event.offset().saturating_add(event.count().max(1)).min(data_bytes);
    event.offset() / block * block..end.next_multiple_of(block)
}

fn file_key(event: &Event) -> Result<FileKey> {
    let found = rustix::fs::fstat(event.file())
        .map_err(|error| layer::Error::io("stat the file of an event", error.into()))?;
    Ok(FileKey { device: found.st_dev, inode: found.st_ino })
}

fn allow(event: Event, counters: &EventCounters) {
    counters.events.fetch_add(1, Ordering::Relaxed);
    settle(event.allow());
}

fn refuse(event: Event, layer: &ServedLayer, failure: &Failure, counters: &EventCounters) {
    tracing::error!(
        layer = %layer.id(),
        offset = event.offset(),
        count = event.count(),
        pid = event.access().pid,
        reason = %failure.chain(),
        "a read was refused"
    );
    layer.denials.fetch_add(1, Ordering::Relaxed);
    if failure.kind() == ErrorKind::NoSpace {
        counters.full.fetch_add(1, Ordering::Relaxed);
    }
    counters.errors.fetch_add(1, Ordering::Relaxed);
    counters.events.fetch_add(1, Ordering::Relaxed);
    settle(event.deny(Denial::from_errno(failure.kind().errno())));
}

fn settle(answered: std::io::Result<bool>) {
    match answered {
        Ok(true) => {}
        Ok(false) => tracing::debug!("the reader of an event has gone"),
        Err(error) => tracing::error!(%error, "answer an event"),
    }
}
