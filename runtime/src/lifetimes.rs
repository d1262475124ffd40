//! When sandboxes end or sleep by themselves: time to live, idle time-out, the lease of their owner.
//!
//! One task for a node looks at whoever is due; a sandbox that is merely used costs nothing here, since its
//! deadline is computed anew when the old one comes. All decisions are pure functions of a time.
//!
//! Times are those since the machine started, its sleep included: nobody can set that clock, and no sandbox
//! outlives the machine's start. Wall time appears in answers only.
//!
//! Locking: one mutex over schedule and leases, held for look-ups. CRASH: the end of a time to live is part of
//! a sandbox's record, a lease is a line in a journal of its own; the next runtime goes on with both. How long a
//! sandbox was idle begins anew with it, because its clients had to connect anew.

use crate::journal::{Entry, Journal};
use crate::node::Node;
use crate::record::{End, State};
use crate::sandbox::Sandbox;
use layer::{Context, Error, ErrorKind, Result};
use proto::v1;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use sys::clock::since_boot_ns;
use tokio::sync::{Notify, Semaphore};

const NS_IN_MS: u64 = 1_000_000;
const SECOND_NS: u64 = 1_000_000_000;
/// The longest time that may be asked for: ten years.
const MAX_MS: u64 = 10 * 366 * 24 * 3600 * 1000;
/// The longest name of an owner.
const MAX_OWNER_BYTES: usize = 256;
/// Owners with a lease.
const MAX_OWNERS: usize = 1 << 16;
/// Sandboxes that are ended at once.
const MAX_ENDING: usize = 16;
/// The task looks at the clock at least so often, since its own timer does not count the machine's sleep.
const MAX_WAIT: Duration = Duration::from_secs(5);

/// What happens to a sandbox that nobody uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IdleAction {
    /// It is paused; the next request wakes it.
    #[default]
    Pause,
    /// It is ended.
    Kill,
}

/// How long a sandbox lives, part of its record.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Lifetime {
    /// Milliseconds from the request on; 0 is for ever.
    pub ttl_ms: u64,
    /// Milliseconds without use; 0 is for ever.
    pub idle_ms: u64,
    /// What happens then.
    pub idle_action: IdleAction,
    /// Who answers for it.
    pub owner: Option<String>,
    /// When its time to live is over, since the machine started.
    pub ends_ns: Option<u64>,
}

impl Lifetime {
    /// From a request, checked; with the lease that its owner gets.
    pub fn read(request: &v1::CreateRequest) -> Result<(Self, u64)> {
        let idle_action = match v1::IdleAction::try_from(request.idle_action) {
            Ok(v1::IdleAction::Pause) => IdleAction::Pause,
            Ok(v1::IdleAction::Kill) => IdleAction::Kill,
            Err(_) => {
                return Err(Error::invalid(format!("idle action {}", request.idle_action)));
            }
        };
        let owner = request.owner.clone().unwrap_or_default();
        if request.ttl_ms.max(request.idle_timeout_ms).max(owner.lease_ms) > MAX_MS {
            return Err(Error::invalid("a time beyond ten years"));
        }
        if owner.name.is_empty() && owner.lease_ms > 0 {
            return Err(Error::invalid("a lease without an owner"));
        }
        if !owner.name.is_empty() {
            check_name(&owner.name)?;
        }
        let lifetime = Self {
            ttl_ms: request.ttl_ms,
            idle_ms: request.idle_timeout_ms,
            idle_action,
            owner: (!owner.name.is_empty()).then_some(owner.name),
            ends_ns: None,
        };
        Ok((lifetime, owner.lease_ms))
    }

    /// The same, beginning now.
    pub fn begun(&self) -> Self {
        let ends_ns = (self.ttl_ms > 0).then(|| later(since_boot_ns(), self.ttl_ms));
        Self { ends_ns, ..self.clone() }
    }

    /// The end of its time to live as wall time, as far as that clock is right now.
    pub fn expires_unix_ns(&self) -> u64 {
        self.ends_ns.map_or(0, unix_ns)
    }

    fn is_bounded(&self) -> bool {
        self.ends_ns.is_some() || self.idle_ms > 0 || self.owner.is_some()
    }
}

fn check_name(name: &str) -> Result<()> {
    if name.is_empty() || name.len() > MAX_OWNER_BYTES || name.chars().any(char::is_control) {
        return Err(Error::invalid("the name of an owner has 1 to 256 bytes, all printable"));
    }
    Ok(())
}

fn later(from_ns: u64, ms: u64) -> u64 {
    from_ns.saturating_add(ms.saturating_mul(NS_IN_MS))
}

fn unix_ns(at_ns: u64) -> u64 {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let wall = u64::try_from(wall.as_nanos()).unwrap_or(u64::MAX);
    wall.saturating_add(at_ns).saturating_sub(since_boot_ns())
}

/// Who uses a sandbox now, and when somebody did last.
#[derive(Debug)]
pub struct Activity {
    users: AtomicUsize,
    last_ns: AtomicU64,
}

impl Default for Activity {
    fn default() -> Self {
        Self { users: AtomicUsize::new(0), last_ns: AtomicU64::new(since_boot_ns()) }
    }
}

/// Somebody uses a sandbox, until this is dropped.
#[derive(Debug)]
pub struct InUse(Arc<Activity>);

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.touch();
        self.0.users.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Activity {
    /// Somebody begins to use it.
    pub fn begin(self: &Arc<Self>) -> InUse {
        self.users.fetch_add(1, Ordering::SeqCst);
        InUse(Arc::clone(self))
    }

    /// It was used right now.
    pub fn touch(&self) {
        self.last_ns.store(since_boot_ns(), Ordering::SeqCst);
    }

    fn look(&self) -> Use {
        match self.users.load(Ordering::SeqCst) {
            0 => Use::Since(self.last_ns.load(Ordering::SeqCst)),
            _ => Use::Now,
        }
    }

    /// Whether somebody uses it.
    pub fn is_used(&self) -> bool {
        self.users.load(Ordering::SeqCst) > 0
    }
}

/// When a sandbox was used last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    Now,
    Since(u64),
}

/// Why a sandbox is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    Ttl,
    Idle,
    Owner,
}

impl Over {
    fn end(self) -> End {
        match self {
            Self::Ttl | Self::Idle => End::Timeout,
            Self::Owner => End::Killed,
        }
    }

    fn reason(self, lifetime: &Lifetime) -> String {
        match self {
            Self::Ttl => "its time to live is over".to_owned(),
            Self::Idle => format!("nobody used it for {} ms", lifetime.idle_ms),
            Self::Owner => {
                let owner = lifetime.owner.as_deref().unwrap_or_default();
                format!("the lease of its owner {owner} ran out")
            }
        }
    }
}

/// What is to be done about a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Nothing before this time.
    LookAgain(u64),
    /// Nothing, ever.
    Leave,
    Pause,
    End(Over),
}

/// `lease_ns`: when that of its owner ends; none, it has ended.
fn judge(now: u64, life: &Lifetime, used: Use, is_paused: bool, lease_ns: Option<u64>) -> Verdict {
    let mut next = None::<u64>;
    let mut wait = |at: u64| next = Some(next.map_or(at, |before| before.min(at)));
    if life.owner.is_some() {
        match lease_ns.filter(|lease| *lease > now) {
            None => return Verdict::End(Over::Owner),
            Some(lease) => wait(lease),
        }
    }
    match life.ends_ns {
        Some(ends) if ends <= now => return Verdict::End(Over::Ttl),
        Some(ends) => wait(ends),
        None => {}
    }
    if life.idle_ms > 0 {
        let is_asleep = is_paused && life.idle_action == IdleAction::Pause;
        match used {
            Use::Since(last) if !is_asleep && later(last, life.idle_ms) <= now => {
                return match life.idle_action {
                    IdleAction::Pause => Verdict::Pause,
                    IdleAction::Kill => Verdict::End(Over::Idle),
                };
            }
            Use::Since(last) if !is_asleep => wait(later(last, life.idle_ms)),
            // It will not be idle for long enough before that.
            Use::Since(_) | Use::Now => wait(later(now, life.idle_ms)),
        }
    }
    next.map_or(Verdict::Leave, Verdict::LookAgain)
}

/// Who is due when. A name is in it once.
#[derive(Debug, Default)]
struct Schedule {
    due: BTreeSet<(u64, String)>,
    at: HashMap<String, u64>,
}

impl Schedule {
    fn set(&mut self, id: &str, at: u64) {
        if let Some(before) = self.at.insert(id.to_owned(), at) {
            self.due.remove(&(before, id.to_owned()));
        }
        self.due.insert((at, id.to_owned()));
    }

    /// Unless somebody has set another time since it was taken out.
    fn add(&mut self, id: &str, at: u64) {
        if !self.at.contains_key(id) {
            self.set(id, at);
        }
    }

    /// Takes out everyone whose time has come.
    fn take_due(&mut self, now: u64) -> Vec<String> {
        let rest = self.due.split_off(&(now.saturating_add(1), String::new()));
        let due: Vec<String> =
            std::mem::replace(&mut self.due, rest).into_iter().map(|(_, id)| id).collect();
        for id in &due {
            self.at.remove(id);
        }
        due
    }

    fn next(&self) -> Option<u64> {
        self.due.first().map(|(at, _)| *at)
    }
}

/// The lease of an owner, as its journal keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Lease {
    owner: String,
    since_unix_ns: u64,
    /// Which start of the machine the end counts from.
    boot: String,
    ends_ns: u64,
}

impl Entry for Lease {
    const NAME: &'static str = "owners";

    fn key(&self) -> &str {
        &self.owner
    }

    fn since(&self) -> u64 {
        self.since_unix_ns
    }
}

#[derive(Debug, Default)]
struct Table {
    schedule: Schedule,
    leases: HashMap<String, Lease>,
}

/// Deadlines of all sandboxes of a node.
#[derive(Debug)]
pub struct Lifetimes {
    table: Mutex<Table>,
    journal: Journal<Lease>,
    boot: String,
    changed: Arc<Notify>,
    ending: Arc<Semaphore>,
}

impl Lifetimes {
    /// With the leases that an earlier runtime wrote down in `folder`.
    pub fn open(folder: &Path) -> Result<Self> {
        let boot = sys::clock::boot_id().context(|| "read the boot id".into())?;
        let (journal, leases) = Journal::open(folder)?;
        let leases = leases.into_iter().filter(|lease: &Lease| lease.boot == boot);
        let leases = leases.map(|lease| (lease.owner.clone(), lease)).collect();
        Ok(Self {
            table: Mutex::new(Table { schedule: Schedule::default(), leases }),
            journal,
            boot,
            changed: Arc::default(),
            ending: Arc::new(Semaphore::new(MAX_ENDING)),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks after a sandbox from now on.
    pub fn watch(&self, sandbox: &Sandbox) {
        if sandbox.lifetime().is_bounded() {
            self.lock().schedule.set(sandbox.id(), 0);
            self.changed.notify_one();
        }
    }

    /// For a create: its owner has a lease, which ends no sooner than `lease_ms` from now.
    pub fn claim(&self, lifetime: &Lifetime, lease_ms: u64) -> Result<()> {
        let Some(owner) = &lifetime.owner else { return Ok(()) };
        let (now, mut table) = (since_boot_ns(), self.lock());
        let has = table.leases.get(owner).map(|lease| lease.ends_ns).filter(|ends| *ends > now);
        match (has, later(now, lease_ms)) {
            (None, _) if lease_ms == 0 => {
                Err(Error::invalid(format!("owner {owner:?} has no lease; say for how long")))
            }
            (Some(ends), wanted) if ends >= wanted => Ok(()),
            (_, wanted) => self.write(&mut table, owner, wanted),
        }
    }

    /// Has the lease of an owner end `lease_ms` from now, whether it has one or not; 0 ends it at once.
    /// Answers the time as wall time.
    pub fn renew(&self, owner: &str, lease_ms: u64) -> Result<u64> {
        check_name(owner)?;
        if lease_ms > MAX_MS {
            return Err(Error::invalid("a time beyond ten years"));
        }
        let ends = later(since_boot_ns(), lease_ms);
        self.write(&mut self.lock(), owner, ends)?;
        Ok(unix_ns(ends))
    }

    fn write(&self, table: &mut Table, owner: &str, ends_ns: u64) -> Result<()> {
        self.forget_ended(table);
        if !table.leases.contains_key(owner) && table.leases.len() >= MAX_OWNERS {
            let text = format!("{MAX_OWNERS} owners have leases already");
            return Err(Error::new(ErrorKind::NoSpace, text));
        }
        let since_unix_ns = unix_ns(since_boot_ns());
        let (owner, boot) = (owner.to_owned(), self.boot.clone());
        let lease = Lease { owner, since_unix_ns, boot, ends_ns };
        // CRASH: nobody is told of a lease that is not written down.
        self.journal.append(&lease)?;
        table.leases.insert(lease.owner.clone(), lease);
        Ok(())
    }

    /// No lease is as good as one that has ended.
    fn forget_ended(&self, table: &mut Table) {
        const MANY: usize = 64;
        if table.leases.len() < MANY {
            return;
        }
        let now = since_boot_ns();
        table.leases.retain(|owner, lease| {
            let lives = lease.ends_ns > now;
            if !lives && let Err(error) = self.journal.forget(owner) {
                tracing::warn!(error = %error.chain(), "forget a lease");
            }
            lives
        });
    }

    /// Has these looked at again, whatever was known of them.
    pub fn reconsider(&self, sandboxes: &[Arc<Sandbox>]) {
        let mut table = self.lock();
        for sandbox in sandboxes {
            table.schedule.set(sandbox.id(), 0);
        }
        drop(table);
        self.changed.notify_one();
    }

    fn verdict(&self, now: u64, sandbox: &Sandbox) -> Verdict {
        let life = sandbox.lifetime();
        let lease = life.owner.as_ref().and_then(|owner| {
            let table = self.lock();
            table.leases.get(owner).map(|lease| lease.ends_ns)
        });
        let is_paused = sandbox.state() == State::Paused;
        judge(now, &life, sandbox.activity.look(), is_paused, lease)
    }

    /// Does what is due; answers how long nothing will be.
    fn look_around(self: &Arc<Self>, node: &Arc<Node>) -> Duration {
        let now = since_boot_ns();
        let due = self.lock().schedule.take_due(now);
        for id in due {
            let Some(sandbox) = node.sandbox(&id).filter(|sandbox| !sandbox.state().is_over())
            else {
                continue;
            };
            let verdict = self.verdict(now, &sandbox);
            let again = match verdict {
                Verdict::Leave => continue,
                Verdict::LookAgain(at) => at,
                Verdict::Pause | Verdict::End(_) => {
                    tokio::spawn(carry_out(Arc::clone(self), sandbox));
                    // In case that it fails.
                    now + SECOND_NS
                }
            };
            self.lock().schedule.add(&id, again);
        }
        let next = self.lock().schedule.next();
        next.map_or(MAX_WAIT, |at| {
            Duration::from_nanos(at.saturating_sub(since_boot_ns())).min(MAX_WAIT)
        })
    }
}

/// Looks once more, when it is its turn, and does what is to be done.
async fn carry_out(lifetimes: Arc<Lifetimes>, sandbox: Arc<Sandbox>) {
    let Ok(_permit) = lifetimes.ending.acquire().await else { return };
    let is_over = || lifetimes.verdict(since_boot_ns(), &sandbox);
    let done = match is_over() {
        Verdict::Leave | Verdict::LookAgain(_) => Ok(()),
        Verdict::Pause => sandbox.pause_idle(|| is_over() == Verdict::Pause).await,
        Verdict::End(over) => {
            let reason = over.reason(&sandbox.lifetime());
            tracing::info!(id = sandbox.id(), reason, "a sandbox is ended");
            sandbox.end(over.end(), reason).await
        }
    };
    match done {
        // Being created or stopped; the next look is a second away.
        Err(error) if error.kind() == ErrorKind::Busy || error.kind() == ErrorKind::NotFound => {}
        Err(error) => {
            tracing::warn!(id = sandbox.id(), error = %error.chain(), "at the end of its time");
        }
        Ok(()) => {}
    }
}

/// Looks after all sandboxes while the node lives.
pub async fn run(node: Weak<Node>) {
    loop {
        let Some(living) = node.upgrade() else { return };
        let lifetimes = Arc::clone(&living.lifetimes);
        let wait = lifetimes.look_around(&living);
        drop(living);
        let changed = Arc::clone(&lifetimes.changed);
        drop(lifetimes);
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = changed.notified() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life() -> Lifetime {
        Lifetime::default()
    }

    #[test]
    fn a_time_to_live_ends_it_used_or_not() {
        let bounded = Lifetime { ends_ns: Some(50), ..life() };
        for (used, is_paused) in [(Use::Now, false), (Use::Since(49), false), (Use::Since(0), true)]
        {
            let at = |now| judge(now, &bounded, used, is_paused, None);
            assert_eq!(at(49), Verdict::LookAgain(50));
            assert_eq!(at(50), Verdict::End(Over::Ttl));
        }
        assert_eq!(judge(u64::MAX, &life(), Use::Since(0), false, None), Verdict::Leave);
    }

    #[test]
    fn only_who_is_not_used_is_idle() {
        let pause = Lifetime { idle_ms: 2, ..life() };
        let kill = Lifetime { idle_action: IdleAction::Kill, ..pause.clone() };
        let (second, third) = (2 * NS_IN_MS, 3 * NS_IN_MS);
        for life in [&pause, &kill] {
            assert_eq!(judge(third, life, Use::Now, false, None), Verdict::LookAgain(5 * NS_IN_MS));
            let used_at = Use::Since(NS_IN_MS);
            assert_eq!(judge(second, life, used_at, false, None), Verdict::LookAgain(third));
        }
        let idle = Use::Since(NS_IN_MS);
        assert_eq!(judge(third, &pause, idle, false, None), Verdict::Pause);
        assert_eq!(judge(third, &kill, idle, false, None), Verdict::End(Over::Idle));
        // One that sleeps is looked at again, in case that somebody wakes it; one that is to be killed is.
        let asleep = judge(third, &pause, idle, true, None);
        assert_eq!(asleep, Verdict::LookAgain(5 * NS_IN_MS));
        assert_eq!(judge(third, &kill, idle, true, None), Verdict::End(Over::Idle));
    }

    #[test]
    fn what_belongs_to_nobody_is_ended() {
        let owned = Lifetime { owner: Some("job".into()), ends_ns: Some(90), ..life() };
        let at = |now, lease| judge(now, &owned, Use::Now, false, lease);
        assert_eq!(at(10, Some(50)), Verdict::LookAgain(50));
        assert_eq!(at(10, Some(95)), Verdict::LookAgain(90));
        assert_eq!(at(50, Some(50)), Verdict::End(Over::Owner));
        assert_eq!(at(10, None), Verdict::End(Over::Owner));
    }

    #[test]
    fn a_name_is_due_once_and_at_the_last_time_that_was_set() {
        let mut schedule = Schedule::default();
        for (id, at) in [("a", 5), ("b", 3), ("a", 9), ("c", 3)] {
            schedule.set(id, at);
        }
        assert_eq!(schedule.next(), Some(3));
        assert_eq!(schedule.take_due(2), Vec::<String>::new());
        assert_eq!(schedule.take_due(8), ["b", "c"]);
        assert_eq!(schedule.take_due(9), ["a"]);
        assert_eq!((schedule.next(), schedule.at.len()), (None, 0));
        schedule.add("a", u64::MAX);
        schedule.add("a", 1);
        assert_eq!(schedule.take_due(u64::MAX - 1), Vec::<String>::new());
    }

    #[test]
    fn leases_survive_the_runtime_and_not_the_machine() {
        let folder = tempfile::tempdir().unwrap();
        let owned = Lifetime { owner: Some("job".into()), ..life() };
        let lifetimes = Lifetimes::open(folder.path()).unwrap();
        assert_eq!(lifetimes.claim(&owned, 0).unwrap_err().kind(), ErrorKind::Invalid);
        lifetimes.claim(&owned, 1_000_000).unwrap();
        let ends = |lifetimes: &Lifetimes| lifetimes.lock().leases.get("job").map(|l| l.ends_ns);
        let first = ends(&lifetimes).unwrap();
        // A create never shortens it, and without a lease of its own uses what there is.
        lifetimes.claim(&owned, 1).unwrap();
        lifetimes.claim(&owned, 0).unwrap();
        assert_eq!(ends(&lifetimes), Some(first));
        drop(lifetimes);
        let mut lifetimes = Lifetimes::open(folder.path()).unwrap();
        assert_eq!(ends(&lifetimes), Some(first));
        lifetimes.boot = "another".into();
        lifetimes.renew("job", 5_000_000).unwrap();
        drop(lifetimes);
        assert_eq!(ends(&Lifetimes::open(folder.path()).unwrap()), None);
    }

    #[test]
    fn bad_times_and_names_are_refused() {
        let owner = |name: &str, lease_ms| Some(v1::Owner { name: name.into(), lease_ms });
        let requests = [
            v1::CreateRequest { ttl_ms: MAX_MS + 1, ..Default::default() },
            v1::CreateRequest { idle_action: 7, ..Default::default() },
            v1::CreateRequest { owner: owner("", 5), ..Default::default() },
            v1::CreateRequest { owner: owner("a\n", 5), ..Default::default() },
            v1::CreateRequest { owner: owner("a", u64::MAX), ..Default::default() },
        ];
        for request in requests {
            assert_eq!(Lifetime::read(&request).unwrap_err().kind(), ErrorKind::Invalid);
        }
    }

    #[test]
    fn use_is_over_when_the_last_user_has_left() {
        let activity = Arc::new(Activity::default());
        let (one, two) = (activity.begin(), activity.begin());
        drop(one);
        assert_eq!(activity.look(), Use::Now);
        let before = since_boot_ns();
        drop(two);
        assert!(matches!(activity.look(), Use::Since(at) if at >= before));
    }
}
