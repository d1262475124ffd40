//! The collector's lease: of all daemons on one store, at most one deletes at a time.
//!
//! `collector/<n>`: one immutable entry for each taking, renewing and giving back; the highest n counts. A
//! new one is created without replacing, so of two that want the lease one gets it.
//!
//! A lease whose holder died ends by its time, on the same host as soon as the process is gone.
//!
//! INVARIANT: numbers never start again, because the newest entry is never removed.

use crate::checked::{seal, unseal};
use crate::number;
use crate::objects::{Store, random_hex};
use crate::writer::WriterName;
use layer::{Context, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::time::Duration;

const DIRECTORY: &str = "collector/";
const MAX_ENTRY_BYTES: u64 = 4096;
/// How long a lease lasts without being renewed.
const TTL: Duration = Duration::from_secs(120);
/// After how long of that it is renewed.
const RENEWED_AFTER: Duration = Duration::from_secs(30);
/// A holder does nothing that others must not see when its lease has less than this left: longer than any
/// request to a store and any difference between clocks that is put up with.
const MARGIN: Duration = Duration::from_secs(60);
/// How far the clocks of hosts that share a store may differ.
pub const MAX_CLOCK_SKEW: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    version: u32,
    nonce: String,
    /// The process, as temporary files name it.
    process: String,
    made_unix_ns: u64,
    /// 0 where the lease was given back.
    expires_unix_ns: u64,
}

/// The right to delete from a store. Given back by [`Collector::release`], or ends by time.
#[derive(Debug)]
pub struct Collector {
    store: Store,
    nonce: String,
    number: u64,
    expires_unix_ns: u64,
}

impl Store {
    /// Takes the collector's lease. `Busy` when another collector has it.
    pub fn collect_alone(&self) -> Result<Collector> {
        let newest = self.newest_entry()?;
        let number = newest.as_ref().map_or(0, |(number, _)| *number);
        if let Some(entry) = newest.and_then(|(_, entry)| entry) {
            let now = self.now_unix_ns();
            let lasts = entry.expires_unix_ns.saturating_add(nanoseconds(MAX_CLOCK_SKEW)) > now;
            let gone = WriterName::of_this_process()?.has_abandoned(&entry.process);
            if entry.expires_unix_ns > 0 && lasts && !gone {
                let left = entry.expires_unix_ns.saturating_sub(now) / 1_000_000_000;
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!(
                        "another collection runs on this store; it ends or is given up within {left} s"
                    ),
                ));
            }
        }
        let mut collector =
            Collector { store: self.clone(), nonce: random_hex()?, number, expires_unix_ns: 0 };
        collector.extend(TTL)?;
        Ok(collector)
    }

    fn newest_number(&self) -> Result<Option<u64>> {
        let names = self.backend().list(DIRECTORY, None, 1)?;
        names.first().map(|name| number::number_of(name)).transpose()
    }

    /// An unreadable entry counts as one that has ended: its number is taken all the same.
    fn newest_entry(&self) -> Result<Option<(u64, Option<Entry>)>> {
        let Some(number) = self.newest_number()? else { return Ok(None) };
        let what = || format!("entry {number} of the collector's lease");
        let read = self.read_object(&number::key_in(DIRECTORY, number)?, MAX_ENTRY_BYTES, what);
        let entry = read.and_then(|bytes| {
            serde_json::from_slice::<Entry>(unseal(&bytes).context(what)?)
                .map_err(|error| Error::corrupt(what()).with_source(error))
        });
        match entry {
            Ok(entry) => Ok(Some((number, Some(entry)))),
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => {
                tracing::warn!("{}", error.chain());
                Ok(Some((number, None)))
            }
            Err(error) => Err(error),
        }
    }
}

impl Collector {
    /// Renews the lease where that is due. An error means that this is not the collector any more, and that
    /// nothing may be deleted.
    pub fn check(&mut self) -> Result<()> {
        let left = self.expires_unix_ns.saturating_sub(self.store.now_unix_ns());
        if left == 0 {
            return Err(lost());
        }
        if left < nanoseconds(TTL - RENEWED_AFTER) {
            self.extend(TTL)?;
        }
        self.in_time()
    }

    /// Whether the lease lasts long enough for one more deletion, by the clock alone.
    pub fn in_time(&self) -> Result<()> {
        let left = self.expires_unix_ns.saturating_sub(self.store.now_unix_ns());
        if left > nanoseconds(MARGIN) { Ok(()) } else { Err(lost()) }
    }

    /// Gives the lease back.
    pub fn release(mut self) -> Result<()> {
        self.extend(Duration::ZERO)
    }

    fn extend(&mut self, ttl: Duration) -> Result<()> {
        let now = self.store.now_unix_ns();
        let expires = if ttl.is_zero() { 0 } else { now.saturating_add(nanoseconds(ttl)) };
        let entry = Entry {
            version: 1,
            nonce: self.nonce.clone(),
            // Dated anew each time: one of another host counts as gone when it is a day old.
            process: WriterName::of_this_process()?.temporary_name(0),
            made_unix_ns: now,
            expires_unix_ns: expires,
        };
        let bytes = serde_json::to_vec(&entry).map_err(|error| {
            Error::new(ErrorKind::Internal, "encode the collector's lease").with_source(error)
        })?;
        let number = self.number + 1;
        match self.store.put_new(&number::key_in(DIRECTORY, number)?, &seal(bytes)) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::Exists => {
                // Somebody else's, or our own whose answer was lost.
                match self.store.newest_entry()? {
                    Some((newest, Some(found)))
                        if newest == number && found.nonce == self.nonce => {}
                    _ => return Err(lost()),
                }
            }
            Err(error) => return Err(error.context("take the collector's lease")),
        }
        // Old entries are removed, so a number that is free may be one that others have passed long ago.
        if self.store.newest_number()? != Some(number) {
            self.expires_unix_ns = 0;
            return Err(lost());
        }
        let before = std::mem::replace(&mut self.number, number);
        self.expires_unix_ns = expires;
        if before > 0 {
            self.store.backend().delete(&number::key_in(DIRECTORY, before)?)?;
        }
        Ok(())
    }
}

fn lost() -> Error {
    Error::new(ErrorKind::Busy, "the collector's lease has ended or is another's; collect again")
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::memory::Memory;
    use crate::clock::Clock;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[derive(Debug, Default)]
    struct Hand(AtomicU64);

    impl Clock for Hand {
        fn now_unix_ns(&self) -> u64 {
            self.0.load(Ordering::Relaxed)
        }

        fn sleep(&self, time: Duration) {
            self.0.fetch_add(nanoseconds(time), Ordering::Relaxed);
        }
    }

    #[test]
    fn one_collects_and_a_dead_one_is_replaced_after_its_time() {
        let clock = Arc::new(Hand(AtomicU64::new(1 << 60)));
        let store = Store::open(Arc::new(Memory::new())).unwrap().with_clock(clock.clone());
        let mut one = store.collect_alone().unwrap();
        one.check().unwrap();
        assert_eq!(store.collect_alone().unwrap_err().kind(), ErrorKind::Busy);
        clock.sleep(Duration::from_secs(50));
        one.check().unwrap();
        clock.sleep(TTL);
        assert!(one.check().is_err(), "an ended lease is never renewed");
        assert_eq!(store.collect_alone().unwrap_err().kind(), ErrorKind::Busy, "clocks may differ");
        clock.sleep(MAX_CLOCK_SKEW);
        let two = store.collect_alone().unwrap();
        assert!(one.release().is_err());
        two.release().unwrap();
        store.collect_alone().unwrap();
        assert_eq!(store.list_names(DIRECTORY).unwrap().len(), 1);
    }

    #[test]
    fn of_two_that_want_it_one_gets_it() {
        let memory = Memory::new();
        let stores = [0; 8].map(|_| Store::open(Arc::new(memory.clone())).unwrap());
        let taken: usize = std::thread::scope(|scope| {
            let tries = stores.each_ref().map(|store| scope.spawn(|| store.collect_alone().ok()));
            // The takers are kept until all have tried.
            let tried = tries.map(|tried| tried.join().unwrap());
            tried.iter().filter(|taken| taken.is_some()).count()
        });
        assert_eq!(taken, 1);
    }
}
