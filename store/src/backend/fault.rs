//! A test double: wraps any backend and makes it fail as real stores do, by a seed.
//!
//! It can refuse operations, answer late, end reads early, flip a bit of what is read, lose an upload before
//! it is published, publish an upload with its end missing (a disk that lied about its flush), report a
//! publish that happened as failed, and be away altogether. It never invents other failures: what it does to
//! an object, a real disk, network or store could do.
//!
//! Which operation fails is decided by the seed, the operation, the class of the object (first component of
//! its key) and a running number within these, so random object names do not change it; with several threads
//! the same decisions fall, on whichever thread comes at that moment.
//!
//! Locking: one lock around the plan and the counters, never held over I/O or sleep.

use super::{Backend, Upload};
use crate::key::Key;
use layer::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// How often each fault strikes, in operations of a thousand.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// Decides which operations are struck.
    pub seed: u64,
    /// Any operation fails as `Unavailable` and does nothing.
    pub error_per_mille: u32,
    /// A read ends early, which is `Corrupt`.
    pub short_read_per_mille: u32,
    /// One bit of what was read is wrong; the object itself is not harmed.
    pub bit_flip_per_mille: u32,
    /// A published object lacks its end for ever.
    pub torn_write_per_mille: u32,
    /// An upload vanishes before it is published.
    pub lost_upload_per_mille: u32,
    /// A publish happens and is reported as `Unavailable`.
    pub lost_answer_per_mille: u32,
    /// Operations that are late.
    pub delay_per_mille: u32,
    /// How late at most.
    pub max_delay: Duration,
    /// Only objects of this class (first component of the key) are struck; empty is all.
    pub only_class: String,
    /// Everything fails while this is set: the store is away.
    pub away: bool,
    /// Everything fails while a file of this name exists: a switch for tests in other processes.
    pub away_while_exists: Option<PathBuf>,
}

#[derive(Debug, Default)]
struct State {
    plan: FaultPlan,
    counters: HashMap<(&'static str, String), u64>,
    struck: u64,
}

/// A store that fails on purpose.
#[derive(Debug, Clone)]
pub struct Fault {
    inner: Arc<dyn Backend>,
    state: Arc<Mutex<State>>,
}

impl Fault {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn Backend>, plan: FaultPlan) -> Self {
        Self { inner, state: Arc::new(Mutex::new(State { plan, ..State::default() })) }
    }

    /// Changes what happens from now on; counters go on.
    pub fn set_plan(&self, plan: FaultPlan) {
        self.state().plan = plan;
    }

    /// How many faults have struck so far, so that a test can tell whether it tested anything.
    pub fn struck(&self) -> u64 {
        self.state().struck
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Some random bits when this fault strikes the operation.
    fn strikes(
        &self,
        fault: &'static str,
        class: &str,
        per_mille: impl Fn(&FaultPlan) -> u32,
    ) -> Option<u64> {
        let mut state = self.state();
        let rate = per_mille(&state.plan);
        if rate == 0 || !(state.plan.only_class.is_empty() || state.plan.only_class == class) {
            return None;
        }
        let counter = state.counters.entry((fault, class.to_owned())).or_default();
        *counter += 1;
        let number = *counter;
        let digest =
            layer::Digest::of(format!("{} {fault} {class} {number}", state.plan.seed).as_bytes());
        let [chance, bits] = [0, 8].map(|at| {
            let mut word = [0; 8];
            word.copy_from_slice(&digest.as_bytes()[at..at + 8]);
            u64::from_le_bytes(word)
        });
        if chance % 1000 >= u64::from(rate) {
            return None;
        }
        state.struck += 1;
        Some(bits)
    }

    /// What may happen to any operation before it does anything.
    fn before(&self, operation: &str, name: &str) -> Result<()> {
        let class = name.split('/').next().unwrap_or_default();
        let away = {
            let state = self.state();
            let switched = state.plan.away_while_exists.as_ref().is_some_and(|path| path.exists());
            state.plan.away || switched
        };
        if away {
            return Err(injected(operation, name, "the store is away"));
        }
        if let Some(bits) = self.strikes("delay", class, |plan| plan.delay_per_mille) {
            let most = self.state().plan.max_delay;
            thread::sleep(most.mul_f64((bits % 1000) as f64 / 1000.0));
        }
        match self.strikes("error", class, |plan| plan.error_per_mille) {
            Some(_) => Err(injected(operation, name, "refused")),
            None => Ok(()),
        }
    }

    fn spoil(&self, key: &Key, bytes: &mut [u8]) -> Result<()> {
        if let Some(bits) = self.strikes("bit flip", key.class(), |plan| plan.bit_flip_per_mille)
            && !bytes.is_empty()
        {
            let at = (bits >> 3) as usize % bytes.len();
            bytes[at] ^= 1 << (bits & 7);
        }
        match self.strikes("short read", key.class(), |plan| plan.short_read_per_mille) {
            Some(_) => Err(Error::corrupt(format!("injected fault: read of {key} ended early"))),
            None => Ok(()),
        }
    }
}

fn injected(operation: &str, name: &str, what: &str) -> Error {
    Error::new(ErrorKind::Unavailable, format!("injected fault: {operation} {name}: {what}"))
}

impl Backend for Fault {
    fn read_at(&self, key: &Key, offset: u64, into: &mut [u8]) -> Result<()> {
        self.before("read", key.as_str())?;
        self.inner.read_at(key, offset, into)?;
        self.spoil(key, into)
    }

    fn read_all(&self, key: &Key, max_bytes: u64) -> Result<Vec<u8>> {
        self.before("read", key.as_str())?;
        let mut bytes = self.inner.read_all(key, max_bytes)?;
        self.spoil(key, &mut bytes)?;
        Ok(bytes)
    }

    fn size(&self, key: &Key) -> Result<u64> {
        self.before("measure", key.as_str())?;
        self.inner.size(key)
    }

    fn create(&self, key: &Key) -> Result<Box<dyn Upload>> {
        self.before("create", key.as_str())?;
        let inner = self.inner.create(key)?;
        let torn = self.strikes("torn write", key.class(), |plan| plan.torn_write_per_mille);
        Ok(Box::new(FaultyUpload {
            inner,
            store: self.clone(),
            key: key.clone(),
            torn,
            held: Vec::new(),
        }))
    }

    fn list(&self, prefix: &str, start_after: Option<&str>, limit: usize) -> Result<Vec<String>> {
        self.before("list", prefix)?;
        self.inner.list(prefix, start_after, limit)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.before("delete", key.as_str())?;
        self.inner.delete(key)
    }

    fn describe(&self) -> String {
        format!("{} with injected faults", self.inner.describe())
    }
}

struct FaultyUpload {
    inner: Box<dyn Upload>,
    store: Fault,
    key: Key,
    torn: Option<u64>,
    /// The last write, held back because a torn object lacks a part of it.
    held: Vec<u8>,
}

impl Upload for FaultyUpload {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.store.before("write", self.key.as_str())?;
        if self.torn.is_none() {
            return self.inner.write(bytes);
        }
        let before = std::mem::replace(&mut self.held, bytes.to_vec());
        self.inner.write(&before)
    }

    fn publish(mut self: Box<Self>) -> Result<()> {
        let name = self.key.as_str();
        self.store.before("publish", name)?;
        if let Some(bits) = self.torn {
            let kept = bits as usize % self.held.len().max(1);
            self.inner.write(&self.held[..kept])?;
        }
        let class = self.key.class();
        if self.store.strikes("lost upload", class, |plan| plan.lost_upload_per_mille).is_some() {
            return Err(injected("publish", name, "the unfinished object is lost"));
        }
        self.inner.publish()?;
        match self.store.strikes("lost answer", class, |plan| plan.lost_answer_per_mille) {
            Some(_) => Err(injected("publish", name, "the answer is lost")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::memory::Memory;

    fn put(store: &dyn Backend, name: &str, bytes: &[u8]) -> Result<()> {
        let mut upload = store.create(&Key::new(name)?)?;
        upload.write(bytes)?;
        upload.publish()
    }

    fn outcomes(plan: &FaultPlan) -> Vec<bool> {
        let store = Fault::new(Arc::new(Memory::new()), plan.clone());
        (0..200).map(|number| put(&store, &format!("packs/{number}"), b"abc").is_ok()).collect()
    }

    #[test]
    fn the_same_seed_fails_the_same_operations() {
        let plan = FaultPlan { seed: 7, error_per_mille: 100, ..FaultPlan::default() };
        assert_eq!(outcomes(&plan), outcomes(&plan));
        assert!(outcomes(&plan).contains(&true) && outcomes(&plan).contains(&false));
        assert_ne!(outcomes(&plan), outcomes(&FaultPlan { seed: 8, ..plan }));
    }

    #[test]
    fn every_fault_does_what_it_says() {
        let memory = Memory::new();
        let store = Fault::new(Arc::new(memory.clone()), FaultPlan::default());
        put(&store, "a", &[0; 64]).unwrap();
        let key = Key::new("a").unwrap();
        let always = |change: fn(&mut FaultPlan)| {
            let mut plan = FaultPlan::default();
            change(&mut plan);
            store.set_plan(plan);
        };
        always(|plan| plan.bit_flip_per_mille = 1000);
        let ones: u32 =
            store.read_all(&key, 64).unwrap().iter().map(|byte| byte.count_ones()).sum();
        assert_eq!(ones, 1);
        always(|plan| plan.short_read_per_mille = 1000);
        assert_eq!(store.read_at(&key, 0, &mut [0; 8]).unwrap_err().kind(), ErrorKind::Corrupt);
        always(|plan| plan.away = true);
        assert_eq!(store.size(&key).unwrap_err().kind(), ErrorKind::Unavailable);
        always(|plan| plan.lost_upload_per_mille = 1000);
        assert!(put(&store, "lost", b"abc").is_err());
        assert!(memory.size(&Key::new("lost").unwrap()).is_err());
        always(|plan| plan.lost_answer_per_mille = 1000);
        assert!(put(&store, "unsure", b"abc").is_err());
        assert_eq!(memory.size(&Key::new("unsure").unwrap()).unwrap(), 3);
        always(|plan| plan.torn_write_per_mille = 1000);
        put(&store, "torn", b"abc").unwrap();
        assert!(memory.size(&Key::new("torn").unwrap()).unwrap() < 3);
        assert_eq!(store.struck(), 5, "{store:?}");
    }
}
