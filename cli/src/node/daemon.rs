//! Keeps fsd alive: starts it as a process of its own, adopts one that a dead node left, and starts it
//! again when it dies.
//!
//! ```text
//!  (absent) --spawn--> running --dies--> backoff --spawn--> running
//!  (left by a dead node) --adopt--> running
//!  running --finish, nothing attached--> drained, ended
//!  running --finish, layers in use--> left alone, the next node adopts it
//!  (left by a node of another program) --ended, nothing unmounted--> running, another process
//! ```
//! fsd outlives a node that is killed on purpose: sandboxes read through it.

use crate::node::options::FsdOptions;
use crate::node::start::{own_command, stray_output};
use crate::node::upgrade::Program;
use crate::settings::Settings;
use layer::{Context, Error, ErrorKind, Result};
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::{DrainRequest, StatsRequest};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// How long fsd may take to answer on its socket after a start. A takeover after a crash fills what
/// the dead one left unanswered first.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// How long fsd may take to end when it is told to.
const END_TIMEOUT: Duration = Duration::from_secs(20);
/// The pause before a restart, doubled with each death in a row.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A daemon that lived this long does not count as dying in a row.
const STEADY: Duration = Duration::from_secs(30);
/// How long and how often a drain is tried.
const DRAIN_PATIENCE: Duration = Duration::from_millis(500);
const DRAIN_RETRY: Duration = Duration::from_millis(50);
const RETRY: Duration = Duration::from_millis(10);

/// One fsd process, ours or adopted.
struct Process {
    pid: u32,
    pidfd: Arc<OwnedFd>,
    /// Told by a thread that waits for the end.
    end: oneshot::Receiver<()>,
    /// Present when it is our child and must be reaped.
    child: Option<std::process::Child>,
    since: Instant,
}

/// Resolves when the process behind `pidfd` has ended.
pub fn end_of(pidfd: &Arc<OwnedFd>) -> oneshot::Receiver<()> {
    let (told, end) = oneshot::channel();
    let pidfd = Arc::clone(pidfd);
    std::thread::spawn(move || {
        _ = sys::wait_readable(pidfd.as_fd(), None);
        _ = told.send(());
    });
    end
}

impl Process {
    fn of(pid: u32, child: Option<std::process::Child>) -> Result<Self> {
        let name = || format!("watch fsd, process {pid}");
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let raw = raw.ok_or_else(|| Error::invalid(name()))?;
        let pidfd = pidfd_open(raw, PidfdFlags::NONBLOCK).map_err(std::io::Error::from);
        let pidfd = Arc::new(pidfd.context(name)?);
        let end = end_of(&pidfd);
        Ok(Self { pid, pidfd, end, child, since: Instant::now() })
    }

    fn spawn(settings: &Settings, options: &FsdOptions) -> Result<Self> {
        let mut command = own_command(settings, "fsd");
        command.args(options.words());
        command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null());
        // The node serves them for both.
        command.env_remove("LAMELLA_METRICS");
        command.stderr(stray_output(&settings.run("fsd.log"))?);
        let child = command.spawn().context(|| "start fsd".to_owned())?;
        Self::of(child.id(), Some(child))
    }

    /// The fsd that answers on the socket, if one does.
    async fn adopt(settings: &Settings) -> Option<Self> {
        let channel = proto::connect::unix(&settings.fsd_socket()).await.ok()?;
        let stats = LayerFsClient::new(channel).stats(StatsRequest {}).await.ok()?;
        Self::of(stats.into_inner().pid, None).ok()
    }

    /// Whether it was started for this store; [`own_command`] says so on its command line.
    fn serves(&self, settings: &Settings) -> bool {
        self.told("--store").as_deref() == Some(settings.store_url().as_bytes())
    }

    /// Whether it requires the signatures that this node requires.
    fn trusts(&self, options: &FsdOptions) -> bool {
        self.told("--require-signature").as_deref()
            == options.require_signature.as_ref().map(String::as_bytes)
    }

    /// What stands behind a word of its command line.
    fn told(&self, name: &str) -> Option<Vec<u8>> {
        let line = std::fs::read(format!("/proc/{}/cmdline", self.pid)).unwrap_or_default();
        let mut words = line.split(|byte| *byte == 0).skip_while(|word| *word != name.as_bytes());
        words.nth(1).map(<[u8]>::to_vec)
    }

    fn is_this_program(&self) -> bool {
        let theirs = Program::of_process(self.pid);
        Program::own().is_ok_and(|own| theirs.is_ok_and(|theirs| theirs == own))
    }

    /// Resolves when the process has ended, and says how.
    async fn ended(&mut self) -> String {
        _ = (&mut self.end).await;
        match self.child.as_mut().map(std::process::Child::wait) {
            Some(Ok(status)) => status.to_string(),
            Some(Err(error)) => error.to_string(),
            None => {
                // A child all the same, when this process has become another program meanwhile.
                let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
                _ = rustix::process::waitpid(pid, rustix::process::WaitOptions::NOHANG);
                "unknown status".to_owned()
            }
        }
    }

    fn signal(&self, signal: Signal) {
        _ = pidfd_send_signal(&*self.pidfd, signal);
    }
}

/// fsd under supervision.
pub struct Daemon {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Option<Process>>,
    settings: Settings,
}

impl Daemon {
    /// Adopts or starts fsd and answers when its socket accepts.
    pub async fn start(settings: &Settings, options: &FsdOptions) -> Result<Self> {
        let mut process = match Process::adopt(settings).await {
            Some(process)
                if process.serves(settings)
                    && process.is_this_program()
                    && process.trusts(options) =>
            {
                tracing::info!("adopted the running fsd");
                process
            }
            Some(process) if process.serves(settings) => {
                tracing::info!(
                    pid = process.pid,
                    "an fsd of another program, or with other keys, makes way"
                );
                terminate(process).await;
                Process::spawn(settings, options)?
            }
            Some(process) => {
                replace(settings, process).await?;
                Process::spawn(settings, options)?
            }
            None => Process::spawn(settings, options)?,
        };
        await_socket(settings, &mut process).await?;
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(supervise(settings.clone(), options.clone(), process, stopped));
        Ok(Self { stop, task, settings: settings.clone() })
    }

    /// Leaves fsd as it is, to whoever comes next.
    pub async fn leave(self) {
        _ = self.stop.send(());
        if let Err(error) = self.task.await {
            tracing::error!(%error, "the supervision of fsd died");
        }
    }

    /// Ends fsd and its keepers unless layers are in use; says whether it ended.
    pub async fn finish(self) -> Result<bool> {
        _ = self.stop.send(());
        let Ok(Some(process)) = self.task.await else { return Ok(true) };
        match drain(&self.settings).await {
            Err(error) if error.kind() == ErrorKind::Busy => {
                tracing::info!("layers are in use: fsd stays for the next node");
                return Ok(false);
            }
            Err(error) => tracing::warn!(error = error.chain(), "drain fsd"),
            Ok(()) => {}
        }
        terminate(process).await;
        Ok(true)
    }
}

/// Unmounts everything and lets the keepers go; `Busy` while layers are in use. A failure is tried again
/// for a moment: what just let go of a layer may not be gone yet.
async fn drain(settings: &Settings) -> Result<()> {
    let deadline = Instant::now() + DRAIN_PATIENCE;
    loop {
        match drain_once(settings).await {
            Err(error) if Instant::now() < deadline => {
                tracing::debug!(error = error.chain(), "drain fsd again");
                tokio::time::sleep(DRAIN_RETRY).await;
            }
            drained => return drained,
        }
    }
}

async fn drain_once(settings: &Settings) -> Result<()> {
    let channel = proto::connect::unix(&settings.fsd_socket()).await?;
    let drained = LayerFsClient::new(channel).drain(DrainRequest { force: false }).await;
    drained.map(|_| ()).map_err(proto::status::from_status)
}

async fn terminate(mut process: Process) {
    process.signal(Signal::TERM);
    if tokio::time::timeout(END_TIMEOUT, process.ended()).await.is_err() {
        tracing::warn!("fsd does not end; killing it");
        process.signal(Signal::KILL);
        process.ended().await;
    }
}

/// Ends an fsd that an earlier node started for another store.
async fn replace(settings: &Settings, process: Process) -> Result<()> {
    drain(settings).await.map_err(|error| {
        let pid = process.pid;
        error.context(format!("fsd, process {pid}, still has layers of another store in use"))
    })?;
    terminate(process).await;
    Ok(())
}

async fn await_socket(settings: &Settings, process: &mut Process) -> Result<()> {
    let deadline = Instant::now() + READY_TIMEOUT;
    let log = settings.run("fsd.log");
    while proto::connect::unix(&settings.fsd_socket()).await.is_err() {
        if Instant::now() > deadline {
            process.signal(Signal::KILL);
            process.ended().await;
            let context = format!("fsd does not come up; see {}", log.display());
            return Err(Error::new(ErrorKind::Timeout, context));
        }
        tokio::select! {
            how = process.ended() => {
                return Err(Error::new(ErrorKind::Unavailable, last_words(&log, &how)));
            }
            () = tokio::time::sleep(RETRY) => {}
        }
    }
    Ok(())
}

/// Why an fsd ended at its start: what it said last, or where it may be read.
fn last_words(log: &Path, how: &str) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    match text.lines().last().and_then(|line| line.strip_prefix("lamella: ")) {
        Some(said) => format!("fsd does not start: {said}"),
        None => format!("fsd ended at its start ({how}); see {}", log.display()),
    }
}

/// Restarts fsd until told to stop; gives back the process that is alive then.
async fn supervise(
    settings: Settings,
    options: FsdOptions,
    process: Process,
    mut stopped: oneshot::Receiver<()>,
) -> Option<Process> {
    let mut process = Some(process);
    let mut pause = FIRST_PAUSE;
    loop {
        if let Some(alive) = &mut process {
            tokio::select! {
                how = alive.ended() => {
                    tracing::error!(how, "fsd died; starting it again");
                    if alive.since.elapsed() > STEADY {
                        pause = FIRST_PAUSE;
                    }
                }
                _ = &mut stopped => return process,
            }
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = &mut stopped => return None,
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
        // Another fsd may have been started by hand meanwhile; there can be only one.
        process = match Process::adopt(&settings).await {
            Some(process) => Some(process),
            None => Process::spawn(&settings, &options)
                .inspect_err(|error| tracing::error!(error = error.chain(), "restart fsd"))
                .ok(),
        };
    }
}
