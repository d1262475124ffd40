//! Who acts next: a baton that passes before every request to the store, by a seed; and a clock in its hand.

use layer::{Error, ErrorKind, Result};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use store::backend::memory::Memory;
use store::{Backend, Clock, Key, Upload};

/// Numbers that only look random.
#[derive(Debug, Clone)]
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(super) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    pub(super) fn one_in(&mut self, count: u64) -> bool {
        self.next().is_multiple_of(count)
    }
}

/// A clock that goes on when somebody waits, and when the stage says so.
#[derive(Debug)]
pub(super) struct Hand(AtomicU64);

impl Hand {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(1_700_000_000 * 1_000_000_000))
    }

    pub(super) fn advance(&self, time: Duration) {
        self.0.fetch_add(time.as_nanos() as u64, Ordering::SeqCst);
    }
}

impl Clock for Hand {
    fn now_unix_ns(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn sleep(&self, time: Duration) {
        self.advance(time);
    }
}

#[derive(Debug, Default)]
struct State {
    dice: Option<Dice>,
    /// Processes that act in this history.
    acting: Vec<usize>,
    baton: Option<usize>,
    /// The requests that a process has left before it is killed.
    left: Vec<Option<u64>>,
    dead: Vec<bool>,
}

/// The stage of one world.
#[derive(Debug)]
pub(super) struct Stage {
    state: Mutex<State>,
    /// One for each process.
    passed: Vec<Condvar>,
    pub(super) clock: Arc<Hand>,
}

impl Stage {
    pub(super) fn new(processes: usize) -> Arc<Self> {
        let state =
            State { left: vec![None; processes], dead: vec![false; processes], ..State::default() };
        Arc::new(Self {
            state: Mutex::new(state),
            passed: (0..processes).map(|_| Condvar::new()).collect(),
            clock: Arc::new(Hand::new()),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a history. `kills` says after how many requests which process dies.
    pub(super) fn open(&self, seed: u64, acting: &[usize], kills: &[(usize, u64)]) {
        let mut state = self.state();
        let mut dice = Dice::new(seed);
        state.baton = Some(acting[dice.below(acting.len())]);
        state.acting = acting.to_vec();
        state.dice = Some(dice);
        for (process, after) in kills {
            state.left[*process] = Some(*after);
        }
    }

    /// Ends it: requests pass freely again. Returns who was killed.
    pub(super) fn close(&self) -> Vec<usize> {
        let mut state = self.state();
        state.dice = None;
        state.baton = None;
        state.acting.clear();
        state.left.fill(None);
        let dead = (0..state.dead.len()).filter(|process| state.dead[*process]).collect();
        state.dead.fill(false);
        self.passed.iter().for_each(Condvar::notify_all);
        dead
    }

    /// A process has nothing more to do in this history.
    pub(super) fn leave(&self, process: usize) {
        let mut state = self.state();
        state.acting.retain(|acting| *acting != process);
        if state.baton == Some(process) {
            self.pass(&mut state);
        }
    }

    fn pass(&self, state: &mut State) {
        let acting = state.acting.clone();
        if let (Some(dice), false) = (&mut state.dice, acting.is_empty()) {
            let next = acting[dice.below(acting.len())];
            state.baton = Some(next);
            self.passed[next].notify_all();
            if dice.one_in(8) {
                self.clock.advance(Duration::from_millis(dice.next() % 2000));
            }
            if dice.one_in(2000) {
                self.clock.advance(Duration::from_secs(dice.next() % 400));
            }
        }
    }

    fn step(&self, process: usize) -> Result<()> {
        let mut state = self.state();
        if state.dice.is_none() {
            return Ok(());
        }
        let killed = || Err(Error::new(ErrorKind::Unavailable, "this process was killed"));
        if state.dead[process] {
            return killed();
        }
        if let Some(left) = &mut state.left[process] {
            *left = left.saturating_sub(1);
            if *left == 0 {
                state.dead[process] = true;
                return killed();
            }
        }
        if state.baton == Some(process) {
            self.pass(&mut state);
        }
        while state.dice.is_some() && state.baton != Some(process) {
            state = self.passed[process].wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }
}

/// The store as one process sees it.
#[derive(Debug, Clone)]
pub(super) struct Stepped {
    pub(super) inner: Memory,
    pub(super) process: usize,
    pub(super) stage: Arc<Stage>,
}

impl Backend for Stepped {
    fn read_at(&self, key: &Key, offset: u64, into: &mut [u8]) -> Result<()> {
        self.stage.step(self.process)?;
        self.inner.read_at(key, offset, into)
    }

    fn read_all(&self, key: &Key, max_bytes: u64) -> Result<Vec<u8>> {
        self.stage.step(self.process)?;
        self.inner.read_all(key, max_bytes)
    }

    fn size(&self, key: &Key) -> Result<u64> {
        self.stage.step(self.process)?;
        self.inner.size(key)
    }

    fn create(&self, key: &Key) -> Result<Box<dyn Upload>> {
        Ok(Box::new(SteppedUpload { inner: self.inner.create(key)?, store: self.clone() }))
    }

    /// In pages of at most three names: a listing is no look at one moment.
    fn list(&self, prefix: &str, start_after: Option<&str>, limit: usize) -> Result<Vec<String>> {
        let mut names: Vec<String> = Vec::new();
        while names.len() < limit {
            self.stage.step(self.process)?;
            let after = names.last().map(String::as_str).or(start_after);
            let page = self.inner.list(prefix, after, 3.min(limit - names.len()))?;
            let last = page.len() < 3;
            names.extend(page);
            if last {
                break;
            }
        }
        Ok(names)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.stage.step(self.process)?;
        self.inner.delete(key)
    }

    fn local_path(&self, _key: &Key) -> Option<PathBuf> {
        None
    }

    fn describe(&self) -> String {
        format!("process {}", self.process)
    }
}

struct SteppedUpload {
    inner: Box<dyn Upload>,
    store: Stepped,
}

impl Upload for SteppedUpload {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.inner.write(bytes)
    }

    fn publish(self: Box<Self>) -> Result<()> {
        self.store.stage.step(self.store.process)?;
        self.inner.publish()
    }
}
