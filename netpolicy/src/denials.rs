//! Denials: who was refused what, when. Kept per sandbox, bounded, outside of it.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::watch;

/// Denials that are kept of one sandbox.
const MAX_KEPT: usize = 512;
/// Denials of one sandbox that are written down in one second; the others are counted.
const PER_SECOND: u32 = 32;

/// Why something was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The policy does not allow it.
    NotAllowed,
    /// No policy can allow it.
    Never,
    /// A packet that was not from the sandbox's own address.
    Spoofed,
    /// Neither TCP nor UDP.
    Protocol,
    /// IPv6.
    Ipv6,
    /// A packet or a question that is not well formed.
    Malformed,
    /// Too many at once.
    Limit,
    /// The registry does not show this package, or not this version of it.
    Hidden,
    /// Ended because the policy changed.
    Revoked,
}

impl Reason {
    /// One word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::NotAllowed => "not_allowed",
            Self::Never => "never",
            Self::Spoofed => "spoofed",
            Self::Protocol => "protocol",
            Self::Ipv6 => "ipv6",
            Self::Malformed => "malformed",
            Self::Limit => "limit",
            Self::Hidden => "hidden",
            Self::Revoked => "revoked",
        }
    }
}

/// One denial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denial {
    /// Its number in the sandbox's life, from 1.
    pub number: u64,
    /// When.
    pub at: SystemTime,
    /// Why.
    pub reason: Reason,
    /// `tcp`, `udp`, `dns`, `http` or the number of another protocol.
    pub protocol: String,
    /// Where to, if it was an address.
    pub address: Option<IpAddr>,
    /// The port there; 0 where there is none.
    pub port: u16,
    /// The name that was asked for, or the package.
    pub name: String,
    /// Denials before this one that were not written down.
    pub suppressed: u64,
}

impl Denial {
    /// A denial that happens now.
    pub fn now(reason: Reason, protocol: &str) -> Self {
        Self {
            number: 0,
            at: SystemTime::now(),
            reason,
            protocol: protocol.to_owned(),
            address: None,
            port: 0,
            name: String::new(),
            suppressed: 0,
        }
    }

    /// Of this place.
    pub fn to(self, address: impl Into<IpAddr>, port: u16) -> Self {
        Self { address: Some(address.into()), port, ..self }
    }

    /// Of this name, cut to a sensible length.
    pub fn named(self, name: &str) -> Self {
        Self { name: name.chars().take(256).collect(), ..self }
    }
}

/// Who is told of each denial that is written down, under no lock of theirs that adds one.
pub trait Listener: Send + Sync + std::fmt::Debug {
    /// There was one.
    fn denied(&self, denial: &Denial);
}

/// The denials of one sandbox.
#[derive(Debug)]
pub struct DenialLog {
    state: Mutex<State>,
    listener: Option<Box<dyn Listener>>,
    last: watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    kept: VecDeque<Denial>,
    count: u64,
    suppressed: u64,
    second: Instant,
    in_second: u32,
}

impl Default for DenialLog {
    fn default() -> Self {
        let state = State {
            kept: VecDeque::new(),
            count: 0,
            suppressed: 0,
            second: Instant::now(),
            in_second: 0,
        };
        Self { state: Mutex::new(state), listener: None, last: watch::channel(0).0 }
    }
}

impl DenialLog {
    /// Empty, and tells this one of what comes.
    pub fn told_to(listener: Box<dyn Listener>) -> Self {
        Self { listener: Some(listener), ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes one down, or counts it.
    pub fn add(&self, sandbox: &str, mut denial: Denial) {
        let mut state = self.lock();
        if state.second.elapsed() >= Duration::from_secs(1) {
            (state.second, state.in_second) = (Instant::now(), 0);
        }
        state.suppressed += denial.suppressed;
        if state.in_second >= PER_SECOND {
            state.suppressed += 1;
            return;
        }
        state.in_second += 1;
        state.count += 1;
        denial.number = state.count;
        denial.suppressed = std::mem::take(&mut state.suppressed);
        tracing::info!(
            sandbox,
            reason = denial.reason.word(),
            protocol = denial.protocol,
            address = denial.address.map(|address| address.to_string()),
            port = denial.port,
            name = denial.name.escape_default().to_string(),
            suppressed = denial.suppressed,
            "network denied"
        );
        if let Some(listener) = &self.listener {
            listener.denied(&denial);
        }
        if state.kept.len() == MAX_KEPT {
            state.kept.pop_front();
        }
        state.kept.push_back(denial);
        let count = state.count;
        drop(state);
        let _before = self.last.send_replace(count);
    }

    /// Those after this number that are still kept.
    pub fn after(&self, number: u64) -> Vec<Denial> {
        self.lock().kept.iter().filter(|denial| denial.number > number).cloned().collect()
    }

    /// Tells of new ones: the number of the last.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_counted_and_bounded() {
        let log = DenialLog::default();
        for _ in 0..100_000 {
            log.add("a", Denial::now(Reason::Never, "tcp"));
        }
        log.lock().second = Instant::now() - Duration::from_secs(2);
        log.add("a", Denial::now(Reason::Limit, "dns").named("x"));
        let all = log.after(0);
        assert!(all.len() <= MAX_KEPT);
        let last = all.last().unwrap();
        assert_eq!((last.reason, last.name.as_str()), (Reason::Limit, "x"));
        let told: u64 = log.lock().count;
        let suppressed: u64 = all.iter().map(|denial| denial.suppressed).sum();
        assert!(suppressed + told >= 100_001 - MAX_KEPT as u64 && told <= 100_001);
        assert_eq!(log.after(told).len(), 0);
    }
}
