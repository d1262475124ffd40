//! One seed decides everything of a history: which fault strikes, whose turn it is, what time it is.
//!
//! Locking: one mutex, held for a decision only.

use crate::clock::Clock;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// What can go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A read of the store fails and does nothing.
    StoreRefuses,
    /// The store is gone for a while.
    StoreAway,
    /// A read takes long.
    StoreSlow,
    /// A bit of what was read is wrong.
    BitFlip,
    /// A read ends early.
    ShortRead,
    /// A pack is missing, cut or damaged from the start.
    BadPack,
    /// The disk is full in the middle of a write.
    WriteFull,
    /// The disk has no room above the reserve.
    NoRoom,
    /// The data cannot be written back.
    SyncFails,
    /// The presence file cannot be written.
    PresenceFails,
    /// `kill -9` of fsd.
    Kill,
    /// The machine loses its power.
    PowerCut,
    /// Others run in the middle of an operation.
    Interrupt,
}

/// How many kinds of faults there are.
pub const FAULTS: usize = Fault::Interrupt as usize + 1;
/// How often a kind strikes in a history, in a thousand chances: often not at all, so that the others
/// are seen alone too.
const RATES: [u64; 6] = [0, 0, 10, 40, 120, 300];
/// Kills and power cuts are rarer: a history that only dies shows little.
const CRASH_RATES: [u64; 4] = [0, 3, 8, 20];
/// Operations in the middle of which others may run, one inside the other.
const MAX_DEPTH: usize = 3;

/// Runs somebody else in the middle of an operation.
pub trait Interrupt: Send + Sync {
    /// One action of anybody who is not in the middle of one.
    fn act(&self);
}

#[derive(Debug)]
struct State {
    random: u64,
    passed: Duration,
    rates: [u64; FAULTS],
    struck: [u64; FAULTS],
    calm: bool,
    dead: bool,
    depth: usize,
    log: Option<String>,
    violation: Option<String>,
}

/// The fate of one history.
pub struct Fate {
    start: Instant,
    state: Mutex<State>,
    others: OnceLock<Weak<dyn Interrupt>>,
}

impl std::fmt::Debug for Fate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fate")
    }
}

impl Fate {
    /// What `seed` decides; `logged` keeps a record of what happens.
    pub fn new(seed: u64, logged: bool) -> Self {
        let state = State {
            random: seed,
            passed: Duration::ZERO,
            rates: [0; FAULTS],
            struck: [0; FAULTS],
            calm: false,
            dead: false,
            depth: 0,
            log: logged.then(String::new),
            violation: None,
        };
        let fate =
            Self { start: Instant::now(), state: Mutex::new(state), others: OnceLock::new() };
        for fault in 0..FAULTS {
            let crash = fault == Fault::Kill as usize || fault == Fault::PowerCut as usize;
            let rates: &[u64] = if crash { &CRASH_RATES } else { &RATES };
            let rate = rates[fate.below(rates.len() as u64) as usize];
            fate.lock().rates[fault] = rate;
        }
        fate
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who may run in the middle of operations.
    pub fn set_others(&self, others: Weak<dyn Interrupt>) {
        let _ = self.others.set(others);
    }

    /// A number below `bound`.
    pub fn below(&self, bound: u64) -> u64 {
        let mut state = self.lock();
        // SplitMix64: every seed, also a small one, gives an unrelated sequence.
        state.random = state.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound.max(1)
    }

    /// Whether this fault strikes now.
    pub fn strikes(&self, fault: Fault) -> bool {
        let strikes = {
            let state = self.lock();
            let rate = state.rates[fault as usize];
            (!state.calm && !state.dead && rate > 0).then_some(rate)
        };
        let strikes = strikes.is_some_and(|rate| self.below(1000) < rate);
        if strikes {
            self.lock().struck[fault as usize] += 1;
            if fault != Fault::Interrupt {
                self.note(|| format!("  ! {fault:?}"));
            }
        }
        strikes
    }

    /// From now on no fault strikes.
    pub fn calm(&self) {
        self.lock().calm = true;
    }

    /// Whether faults are over.
    pub fn is_calm(&self) -> bool {
        self.lock().calm
    }

    /// The process is dead: nothing that it still does has an effect.
    pub fn die(&self) {
        self.lock().dead = true;
    }

    /// Another process lives.
    pub fn revive(&self) {
        self.lock().dead = false;
    }

    /// Whether the process is dead.
    pub fn is_dead(&self) -> bool {
        self.lock().dead
    }

    /// Time goes by.
    pub fn pass(&self, time: Duration) {
        self.lock().passed += time;
    }

    /// Lets others run now, sometimes.
    pub fn interrupt(&self) {
        if self.lock().depth >= MAX_DEPTH || !self.strikes(Fault::Interrupt) {
            return;
        }
        if let Some(others) = self.others.get().and_then(Weak::upgrade) {
            self.lock().depth += 1;
            others.act();
            self.lock().depth -= 1;
        }
    }

    /// Records what happens, where that is wanted.
    pub fn note(&self, line: impl FnOnce() -> String) {
        let mut state = self.lock();
        let (depth, passed) = (state.depth, state.passed);
        if let Some(log) = &mut state.log {
            let _ = writeln!(log, "{passed:>10.0?} {:1$}{2}", "", depth * 4, line());
        }
    }

    /// What must never happen has happened. The first one counts.
    pub fn violated(&self, what: String) {
        self.note(|| format!("VIOLATED: {what}"));
        self.lock().violation.get_or_insert(what);
    }

    /// What was violated, if anything was.
    pub fn violation(&self) -> Option<String> {
        self.lock().violation.clone()
    }

    /// The record.
    pub fn log(&self) -> String {
        self.lock().log.clone().unwrap_or_default()
    }

    /// How often each fault struck.
    pub fn struck(&self) -> [u64; FAULTS] {
        self.lock().struck
    }
}

impl Clock for Fate {
    fn now(&self) -> Instant {
        self.start + self.lock().passed
    }
}
