//! One sandbox: its record, its running instance, and the transitions between its states.
//!
//! Locking: the record and the instance have a mutex each, held for a copy or a change, never over an
//! await. `turn` is an asynchronous mutex that lets one transition (pause, resume, stop, pack) happen at
//! a time. CRASH: every change of the state is in the journal before anybody is told of it.

use crate::backends::Instance;
use crate::events::{EventLog, What, record as audit};
use crate::exec::{CommandStore, Commands};
use crate::journal::Journal;
use crate::lifetimes::{Activity, Lifetime};
use crate::plan::CommandDefaults;
use crate::reclaim;
use crate::record::{End, Record, State};
use layer::{Error, ErrorKind, Result};
use proto::v1;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use sys::process::Reach;
use tokio::sync::watch;

/// How long processes may take to stop for a pause.
const PAUSE_DEADLINE: Duration = Duration::from_secs(10);

/// One sandbox.
#[derive(Debug)]
pub struct Sandbox {
    id: String,
    record: Mutex<Record>,
    journal: Arc<Journal<Record>>,
    state: watch::Sender<State>,
    instance: Mutex<Option<Arc<dyn Instance>>>,
    /// Its commands.
    pub commands: Arc<Commands>,
    main: Mutex<Option<Arc<OwnedFd>>>,
    running: watch::Sender<usize>,
    oom_kills_seen: AtomicU64,
    refused_forks_seen: AtomicU64,
    is_stop_asked: AtomicBool,
    /// Where what happens to it is reported.
    pub events: Arc<EventLog>,
    reported: Mutex<Reported>,
    /// Who uses it.
    pub activity: Arc<Activity>,
    /// One transition at a time.
    pub turn: tokio::sync::Mutex<()>,
}

/// What of its life was reported.
#[derive(Debug, Default)]
struct Reported {
    state: Option<State>,
    paused_at: Option<Instant>,
}

/// Counts a command while it runs.
#[derive(Debug)]
pub struct CountedCommand(Arc<Sandbox>);

impl Drop for CountedCommand {
    fn drop(&mut self) {
        self.0.running.send_modify(|count| *count -= 1);
    }
}

impl Sandbox {
    /// A sandbox in the state that its record says, and nothing running yet.
    pub fn new(
        record: Record,
        journal: Arc<Journal<Record>>,
        store: &Arc<CommandStore>,
        events: &Arc<EventLog>,
    ) -> Self {
        let known = Some(record.state).filter(|state| *state != State::Creating);
        Self {
            events: Arc::clone(events),
            reported: Mutex::new(Reported { state: known, paused_at: None }),
            refused_forks_seen: AtomicU64::new(0),
            commands: Arc::new(Commands::new(&record.id, store)),
            id: record.id.clone(),
            state: watch::channel(record.state).0,
            record: Mutex::new(record),
            journal,
            instance: Mutex::new(None),
            main: Mutex::new(None),
            running: watch::channel(0).0,
            oom_kills_seen: AtomicU64::new(0),
            is_stop_asked: AtomicBool::new(false),
            activity: Arc::default(),
            turn: tokio::sync::Mutex::new(()),
        }
    }

    /// Its name.
    pub fn id(&self) -> &str {
        &self.id
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of what is known of it.
    pub fn record(&self) -> Record {
        self.lock().clone()
    }

    /// Where it is in its life.
    pub fn state(&self) -> State {
        *self.state.borrow()
    }

    /// How long it lives.
    pub fn lifetime(&self) -> Lifetime {
        self.lock().lifetime.clone()
    }

    /// What commands start from.
    pub fn defaults(&self) -> CommandDefaults {
        self.lock().defaults.clone()
    }

    /// Whether it has all of these labels.
    pub fn has_labels(&self, wanted: &HashMap<String, String>) -> bool {
        let record = self.lock();
        wanted.iter().all(|(key, value)| record.labels.get(key) == Some(value))
    }

    /// As a message.
    pub fn wire(&self) -> v1::Sandbox {
        let memory = self.instance().map_or(0, |instance| instance.memory_in_use());
        self.lock().wire(memory)
    }

    /// Changes the record, writes it down, then tells whoever waits.
    pub fn update(&self, change: impl FnOnce(&mut Record)) -> Result<()> {
        let mut record = self.lock();
        change(&mut record);
        let written = self.journal.append(&record);
        let state = record.state;
        self.report_state(&record);
        drop(record);
        self.state.send_replace(state);
        written
    }

    /// Reports something that happened to it or in it.
    pub fn report(&self, what: &What) {
        self.events.report(&self.id, what);
    }

    /// Reports its state if it is another one than before.
    fn report_state(&self, record: &Record) {
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        let before = reported.state.replace(record.state);
        if before == Some(record.state) {
            return;
        }
        let reason = audit::cut(&record.reason);
        let what = match record.state {
            State::Creating => What::Creating {
                environment: audit::cut(&record.environment),
                labels: audit::cut_labels(&record.labels),
            },
            State::Running if before == Some(State::Paused) => {
                let paused = reported.paused_at.take().map(|since| since.elapsed());
                What::Resumed { paused_ms: paused.map(|paused| paused.as_millis() as u64) }
            }
            State::Running => What::Running {},
            State::Paused => {
                reported.paused_at = Some(Instant::now());
                What::Paused {}
            }
            State::Stopping => What::Stopping {},
            State::Gone => What::Gone { end: record.end.map(audit::HowEnded::from), reason },
            State::Failed => What::Failed { reason },
            State::Lost => What::Lost { reason },
        };
        self.report(&what);
    }

    /// Forks that were refused for its limit of tasks since this was asked last.
    pub fn new_refused_forks(&self) -> u64 {
        let Some(instance) = self.instance() else { return 0 };
        let now = instance.refused_forks();
        now.saturating_sub(self.refused_forks_seen.swap(now, Ordering::Relaxed))
    }

    /// Nothing of it needs to be known any more.
    pub fn forget(&self) -> Result<()> {
        self.commands.forget_all();
        self.journal.forget(&self.id)
    }

    /// What runs it, while it runs.
    pub fn instance(&self) -> Option<Arc<dyn Instance>> {
        self.instance.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets or takes away what runs it; answers the former.
    pub fn set_instance(&self, instance: Option<Arc<dyn Instance>>) -> Option<Arc<dyn Instance>> {
        if let Some(instance) = &instance {
            // What was counted before is no news.
            self.refused_forks_seen.store(instance.refused_forks(), Ordering::Relaxed);
        }
        let mut place = self.instance.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *place, instance)
    }

    /// The process of its own command, for signals.
    pub fn set_main(&self, pidfd: Arc<OwnedFd>) {
        *self.main.lock().unwrap_or_else(PoisonError::into_inner) = Some(pidfd);
    }

    /// Counts a command while the answer lives.
    pub fn count_command(self: &Arc<Self>) -> CountedCommand {
        self.running.send_modify(|count| *count += 1);
        CountedCommand(Arc::clone(self))
    }

    /// Commands that run now.
    pub fn running_commands(&self) -> usize {
        *self.running.borrow()
    }

    /// Whether the kernel ended a process for lack of memory since this was asked last.
    pub fn has_new_oom_kill(&self) -> bool {
        let Some(instance) = self.instance() else { return false };
        let now = instance.oom_kills();
        self.oom_kills_seen.swap(now, Ordering::Relaxed) < now
    }

    /// Whether its end was asked for.
    pub fn is_stop_asked(&self) -> bool {
        self.is_stop_asked.load(Ordering::Relaxed)
    }

    /// The instance of a sandbox that can run commands now. A paused one is resumed first.
    pub async fn running_instance(&self) -> Result<Arc<dyn Instance>> {
        if self.state() == State::Paused {
            self.resume().await?;
        }
        self.expect_alive()
    }

    fn expect_alive(&self) -> Result<Arc<dyn Instance>> {
        let state = self.state();
        let refuse =
            |kind, what: &str| Err(Error::new(kind, format!("sandbox {} {what}", self.id)));
        match (state, self.instance()) {
            (State::Running | State::Paused, Some(instance)) => Ok(instance),
            (State::Creating, _) => refuse(ErrorKind::Busy, "is being created"),
            (State::Stopping, _) => refuse(ErrorKind::Busy, "is being stopped"),
            _ => refuse(ErrorKind::NotFound, "has ended"),
        }
    }

    /// Freezes it, and gives its memory back. Doing it twice is no error.
    pub async fn pause(&self) -> Result<()> {
        let _turn = self.turn.lock().await;
        let instance = self.expect_alive()?;
        if self.state() == State::Paused {
            return Ok(());
        }
        instance.freeze(PAUSE_DEADLINE).await?;
        self.update(|record| record.state = State::Paused)?;
        reclaim::give_back(&self.id, &instance).await;
        Ok(())
    }

    /// Pauses it unless somebody uses it. `is_wanted` is asked once nothing else can change it.
    pub async fn pause_idle(&self, is_wanted: impl Fn() -> bool) -> Result<()> {
        let _turn = self.turn.lock().await;
        let instance = self.expect_alive()?;
        if self.state() == State::Paused || !is_wanted() {
            return Ok(());
        }
        instance.freeze(PAUSE_DEADLINE).await?;
        self.update(|record| record.state = State::Paused)?;
        // INVARIANT: whoever uses it counts itself before it looks at the state. So either it has seen a paused
        // sandbox, and wakes it when it is its turn, or it is seen here.
        if self.activity.is_used() {
            instance.thaw()?;
            return self.update(|record| record.state = State::Running);
        }
        reclaim::give_back(&self.id, &instance).await;
        Ok(())
    }

    /// Lets it go on. Doing it twice is no error.
    pub async fn resume(&self) -> Result<()> {
        let _turn = self.turn.lock().await;
        let instance = self.expect_alive()?;
        if self.state() == State::Running {
            return Ok(());
        }
        reclaim::bring_back(&self.id, &instance).await;
        instance.thaw()?;
        self.activity.touch();
        self.update(|record| record.state = State::Running)
    }

    /// Ends it at once, for a reason that is not its own and that nobody asked for.
    pub async fn end(&self, end: End, reason: String) -> Result<()> {
        if self.state() == State::Creating {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("sandbox {} is being created", self.id),
            ));
        }
        self.update(|record| {
            if !record.state.is_over() && record.end.is_none() {
                record.end = Some(end);
                record.reason = reason;
            }
        })?;
        self.stop(Duration::ZERO).await
    }

    /// Ends it: asks its own command, and whatever a client runs in it, to end; after `grace` it is
    /// killed. Answers when it has ended.
    pub async fn stop(&self, grace: Duration) -> Result<()> {
        let turn = self.turn.lock().await;
        if self.state().is_over() {
            return Ok(());
        }
        let Some(instance) = self.instance() else {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("sandbox {} is being created", self.id),
            ));
        };
        self.is_stop_asked.store(true, Ordering::Relaxed);
        let was_paused = self.state() == State::Paused;
        self.update(|record| record.state = State::Stopping)?;
        drop(turn);
        if was_paused {
            instance.thaw()?;
        }
        if !grace.is_zero() {
            self.ask_to_end(&*instance, grace).await?;
        }
        instance.kill()?;
        self.wait_over().await;
        Ok(())
    }

    async fn ask_to_end(&self, instance: &dyn Instance, grace: Duration) -> Result<()> {
        let main = self.main.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let has_main = main.is_some();
        if let Some(main) = main {
            let signal = self.defaults().stop_signal;
            // It may have ended by itself.
            let _ended = sys::process::pidfd_signal(main.as_fd(), signal, Reach::Group);
        } else if *self.running.borrow() > 0 {
            const SIGTERM: i32 = 15;
            instance.signal_all(SIGTERM)?;
        }
        let idle = async {
            if has_main {
                instance.ended().await;
            } else {
                let mut commands = self.running.subscribe();
                let _watched = commands.wait_for(|count| *count == 0).await;
            }
        };
        // The time being over is as good as the end.
        let _over = tokio::time::timeout(grace, idle).await;
        Ok(())
    }

    /// Completes when nothing of it runs any more.
    pub async fn wait_over(&self) {
        let mut state = self.state.subscribe();
        let _watched = state.wait_for(|state| state.is_over()).await;
    }

    /// Completes when it is not being created any more.
    pub async fn wait_created(&self) {
        let mut state = self.state.subscribe();
        let _watched = state.wait_for(|state| *state != State::Creating).await;
    }

    /// The end that is written down when the instance is gone.
    pub fn final_end(&self) -> End {
        match self.lock().end {
            Some(end) => end,
            None if self.instance().is_some_and(|instance| instance.is_stopped_for_room()) => {
                End::DiskFull(137)
            }
            None if !self.is_stop_asked() && self.has_new_oom_kill() => End::Oom,
            None => End::Killed,
        }
    }
}
