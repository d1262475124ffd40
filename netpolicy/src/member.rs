//! One sandbox on the network: its policy, what its names led to, what it has open, what it was refused.
//!
//! Locking: one mutex over policy, learned addresses and open flows, so that a change of the policy and the
//! opening of a connection never miss each other. The filter in the kernel is written under it.

use crate::denials::{Denial, DenialLog, Reason};
use crate::filter::{Filter, Guarded, TimedPorts};
use crate::name::DomainName;
use crate::policy::{MAX_PORTS, Policy};
use crate::ports::Protocol;
use crate::range::{self, Range};
use crate::space;
use layer::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, HashMap};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Addresses that names of one sandbox led to, at once.
const MAX_LEARNED: usize = 1024;
/// Connections and exchanges of one sandbox at once.
pub const MAX_FLOWS: usize = 512;
/// A client may use an answer for a while after its time; connections that are open go on.
const GRACE: Duration = Duration::from_secs(30);
/// Questions that one sandbox may have forwarded in a row, and how many more each second.
const QUESTIONS: (f64, f64) = (100.0, 20.0);

/// A sandbox on the network.
#[derive(Debug)]
pub struct Member {
    id: String,
    number: u32,
    filter: Arc<Filter>,
    /// What it was refused.
    pub log: Arc<DenialLog>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    policy: Arc<Policy>,
    learned: BTreeMap<Ipv4Addr, Vec<Learned>>,
    flows: HashMap<u64, Flow>,
    next_flow: u64,
    questions: f64,
    counted: Instant,
    guarded: Option<Guarded>,
    is_closed: bool,
}

/// An address that a name led to.
#[derive(Debug, Clone)]
struct Learned {
    name: DomainName,
    /// Monotonic nanoseconds.
    until: u64,
}

/// Why something is allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Grant {
    /// A rule for a range.
    Range,
    /// A rule for this name.
    Name(DomainName),
    /// The registries of this node.
    Registry,
}

#[derive(Debug)]
struct Flow {
    protocol: Protocol,
    address: Ipv4Addr,
    port: u16,
    grant: Grant,
    end: Option<oneshot::Sender<()>>,
}

/// An open connection or exchange; it is counted until this is dropped.
#[derive(Debug)]
pub struct OpenFlow {
    member: Arc<Member>,
    number: u64,
    /// Completes when it has to end at once.
    pub revoked: oneshot::Receiver<()>,
}

impl Drop for OpenFlow {
    fn drop(&mut self) {
        self.member.lock().flows.remove(&self.number);
    }
}

/// Nanoseconds on the clock that the filter reads.
fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

impl Member {
    pub(crate) fn new(id: &str, number: u32, filter: Arc<Filter>, log: Arc<DenialLog>) -> Self {
        let state = State {
            policy: Arc::default(),
            learned: BTreeMap::new(),
            flows: HashMap::new(),
            next_flow: 0,
            questions: QUESTIONS.0,
            counted: Instant::now(),
            guarded: None,
            is_closed: false,
        };
        Self { id: id.to_owned(), number, filter, log, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sandbox's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its number on this network, which gives its address.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Its address between itself and the node.
    pub fn address(&self) -> Ipv4Addr {
        space::address_of(self.number)
    }

    /// What it may reach now.
    pub fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.lock().policy)
    }

    /// Connections and exchanges that are open now.
    pub fn open_flows(&self) -> usize {
        self.lock().flows.len()
    }

    /// Packets that the filter refused.
    pub fn denied_packets(&self) -> u64 {
        self.lock().guarded.as_ref().map_or(0, |guarded| self.filter.denied(guarded))
    }

    /// Writes a denial down.
    pub fn deny(&self, denial: Denial) {
        self.log.add(&self.id, denial);
    }

    pub(crate) fn set_guarded(&self, guarded: Guarded) {
        self.lock().guarded = Some(guarded);
    }

    /// Puts another policy in place of this one. What it does not allow is closed when this returns, open
    /// connections included.
    pub fn set_policy(&self, policy: Policy) -> Result<()> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(Error::not_found("the sandbox has no network any more"));
        }
        let before = std::mem::replace(&mut state.policy, Arc::new(policy));
        let (old, new) = (before.ranges(), state.policy.ranges());
        for range in old.keys().filter(|range| !new.contains_key(range)) {
            self.filter.forbid(self.number, *range);
        }
        let mut written = Ok(());
        for (range, ports) in &new {
            let ports: Vec<TimedPorts> = ports.iter().map(|ports| (0, *ports)).collect();
            written = written.and(self.filter.allow(self.number, *range, &ports));
        }
        let policy = Arc::clone(&state.policy);
        let learned = std::mem::take(&mut state.learned);
        for (address, mut names) in learned {
            names.retain(|learned| !policy.ports_of_name(&learned.name).is_empty());
            written = written.and(self.write_address(&policy, address, &names));
            if !names.is_empty() {
                state.learned.insert(address, names);
            }
        }
        for flow in state.flows.values_mut().filter(|flow| !flow.is_allowed_by(&policy)) {
            if let Some(end) = flow.end.take() {
                let _ended_by_itself = end.send(());
                let denial = Denial::now(Reason::Revoked, &flow.protocol.to_string());
                self.log.add(&self.id, denial.to(flow.address, flow.port));
            }
        }
        written
    }

    /// Tells the filter what holds for one address.
    fn write_address(&self, policy: &Policy, address: Ipv4Addr, names: &[Learned]) -> Result<()> {
        let range = Range::of(address);
        let by_range = policy.ports_of_address(address).into_iter().map(|ports| (0, ports));
        let mut all: Vec<TimedPorts> = by_range.collect();
        if names.is_empty() && !policy.ranges().contains_key(&range) {
            self.filter.forbid(self.number, range);
            return Ok(());
        }
        for learned in names {
            let ports = policy.ports_of_name(&learned.name);
            all.extend(ports.into_iter().map(|ports| (learned.until, ports)));
        }
        all.dedup();
        // Those that hold longest first: the filter reads so many and no more.
        all.sort_by_key(|(until, _)| std::cmp::Reverse(until.wrapping_sub(1)));
        all.truncate(MAX_PORTS);
        self.filter.allow(self.number, range, &all)
    }

    /// Remembers that an allowed name led to these addresses, and tells the filter. Answers those that the
    /// sandbox may hear of; the others are written down as denials.
    pub fn learn(
        &self,
        name: &DomainName,
        addresses: &[Ipv4Addr],
        ttl: Duration,
    ) -> Result<Vec<Ipv4Addr>> {
        let mut state = self.lock();
        let policy = Arc::clone(&state.policy);
        if policy.ports_of_name(name).is_empty() || state.is_closed {
            // It was allowed when the question was asked.
            return Ok(Vec::new());
        }
        let now = now_ns();
        let until = now + (ttl + GRACE).as_nanos() as u64;
        let mut told = Vec::new();
        for &address in addresses {
            let is_closed =
                range::is_private(address) && policy.ports_of_address(address).is_empty();
            if range::is_never_allowed(address) || is_closed || space::is_of_this_host(address) {
                let denial = Denial::now(Reason::Never, "dns").to(address, 0);
                self.log.add(&self.id, denial.named(name.as_str()));
                continue;
            }
            if state.learned.len() >= MAX_LEARNED && !state.learned.contains_key(&address) {
                self.forget_expired(&mut state, now);
                if state.learned.len() >= MAX_LEARNED {
                    return Err(Error::new(ErrorKind::NoSpace, "too many addresses of names"));
                }
            }
            let names = state.learned.entry(address).or_default();
            names.retain(|known| known.until > now && known.name != *name);
            // Names of one server; more than the filter reads are of no use.
            names.truncate(MAX_PORTS - 1);
            names.push(Learned { name: name.clone(), until });
            let names = names.clone();
            self.write_address(&policy, address, &names)?;
            told.push(address);
        }
        Ok(told)
    }

    fn forget_expired(&self, state: &mut State, now: u64) {
        let policy = Arc::clone(&state.policy);
        state.learned.retain(|address, names| {
            names.retain(|learned| learned.until > now);
            if names.is_empty() {
                let _told = self.write_address(&policy, *address, names);
            }
            !names.is_empty()
        });
    }

    /// Opens a connection or an exchange, if the policy allows it now. The same question that the filter has
    /// answered already: two walls, written twice.
    pub fn open(
        self: &Arc<Self>,
        protocol: Protocol,
        address: Ipv4Addr,
        port: u16,
    ) -> Result<OpenFlow, Reason> {
        if range::is_never_allowed(address) || space::is_of_this_host(address) {
            return Err(Reason::Never);
        }
        let mut state = self.lock();
        let grant = state.grant(protocol, address, port).ok_or(Reason::NotAllowed)?;
        self.count(&mut state, Flow { protocol, address, port, grant, end: None })
    }

    /// Counts a connection to the registries of this node.
    pub fn open_registry(self: &Arc<Self>) -> Result<OpenFlow, Reason> {
        let flow = Flow {
            protocol: Protocol::Tcp,
            address: range::GATEWAY,
            port: 80,
            grant: Grant::Registry,
            end: None,
        };
        self.count(&mut self.lock(), flow)
    }

    fn count(self: &Arc<Self>, state: &mut State, mut flow: Flow) -> Result<OpenFlow, Reason> {
        if state.is_closed || state.flows.len() >= MAX_FLOWS {
            return Err(Reason::Limit);
        }
        let (end, revoked) = oneshot::channel();
        flow.end = Some(end);
        let number = state.next_flow;
        state.next_flow += 1;
        state.flows.insert(number, flow);
        Ok(OpenFlow { member: Arc::clone(self), number, revoked })
    }

    /// Whether one more question may be forwarded now.
    pub fn may_ask(&self) -> bool {
        let mut state = self.lock();
        let (most, each_second) = QUESTIONS;
        let passed = std::mem::replace(&mut state.counted, Instant::now()).elapsed();
        state.questions = (state.questions + passed.as_secs_f64() * each_second).min(most);
        if state.questions < 1.0 {
            return false;
        }
        state.questions -= 1.0;
        true
    }

    /// Closes everything. Answers the interface, whose filter is still in place.
    pub(crate) fn close(&self) -> Option<Guarded> {
        let mut state = self.lock();
        state.is_closed = true;
        for range in state.policy.ranges().keys() {
            self.filter.forbid(self.number, *range);
        }
        for address in std::mem::take(&mut state.learned).into_keys() {
            self.filter.forbid(self.number, Range::of(address));
        }
        state.policy = Arc::default();
        for flow in state.flows.values_mut() {
            if let Some(end) = flow.end.take() {
                let _ended_by_itself = end.send(());
            }
        }
        state.guarded.take()
    }
}

impl State {
    fn grant(&self, protocol: Protocol, address: Ipv4Addr, port: u16) -> Option<Grant> {
        let includes = |ports: Vec<crate::ports::Ports>| {
            ports.iter().any(|ports| ports.include(protocol, port))
        };
        if includes(self.policy.ports_of_address(address)) {
            return Some(Grant::Range);
        }
        let now = now_ns();
        let names = self.learned.get(&address)?.iter().filter(|learned| learned.until > now);
        let mut allowed =
            names.filter(|learned| includes(self.policy.ports_of_name(&learned.name)));
        allowed.next().map(|learned| Grant::Name(learned.name.clone()))
    }
}

impl Flow {
    fn is_allowed_by(&self, policy: &Policy) -> bool {
        let ports = match &self.grant {
            Grant::Range => policy.ports_of_address(self.address),
            Grant::Name(name) => policy.ports_of_name(name),
            Grant::Registry => return !policy.registries().is_empty(),
        };
        ports.iter().any(|ports| ports.include(self.protocol, self.port))
    }
}
