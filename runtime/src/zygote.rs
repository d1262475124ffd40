//! The runtime's end of the socket to its zygote: starts it, sends requests, hands out answers.
//!
//! One task reads the socket and gives each answer to whoever waits for its request or its process.
//! Locking: one mutex over the two tables, held for look-ups only, never over a system call.
//!
//! CRASH: when the zygote dies, its processes live on as orphans. Waiters then follow their pidfd; the
//! next request starts a new zygote. When the runtime dies, the zygote stays as long as it has children; what
//! it leaves to the next runtime is in [`former`].

pub mod former;

use crate::ids::Ids;
use former::{Former, Notes};
use layer::{Context, Error, ErrorKind, Result};
use prost::Message;
use proto::launch::{
    Configure, ENVELOPE, Exec, Failed, FromZygote, Hold, Launch, MAX_DESCRIPTORS, MAX_INLINE_BYTES,
    MAX_REPLY_BYTES, Release, Reply, Request, ToZygote, Users,
};
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use sys::process::{Exit, Pid};
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot};

/// The program, as the build made it.
static GUEST: &[u8] = include_bytes!(env!("LAMELLA_GUEST"));

/// How long a healthy zygote may take to come up.
const START_DEADLINE: Duration = Duration::from_secs(10);

/// A process that the zygote made for us.
#[derive(Debug)]
pub struct Process {
    /// Its id on the host; for looking, never for signalling.
    pub pid: Pid,
    /// Stands for it.
    pub pidfd: Arc<OwnedFd>,
    exit: Option<oneshot::Receiver<Exit>>,
    told: Option<Exit>,
    former: Option<Arc<Former>>,
}

impl Process {
    /// A process that an earlier runtime started.
    pub fn adopted(pid: Pid, pidfd: OwnedFd, former: Arc<Former>) -> Self {
        Self { pid, pidfd: Arc::new(pidfd), exit: None, told: None, former: Some(former) }
    }

    /// Ends it, should it live.
    fn end_unwanted(&self) {
        const SIGKILL: i32 = 9;
        let reach = sys::process::Reach::Process;
        let _has_ended = sys::process::pidfd_signal(self.pidfd.as_fd(), SIGKILL, reach);
    }

    /// Waits for its end; may be dropped and asked again. `None`: it has ended, and nobody can tell how.
    pub async fn wait(&mut self) -> Option<Exit> {
        if let Some(pending) = self.exit.as_mut() {
            let told = pending.await;
            self.exit = None;
            self.told = told.ok();
        }
        match self.told {
            Some(exit) => Some(exit),
            None => wait_by_pidfd(self.pid, &self.pidfd, self.former.as_deref()).await,
        }
    }
}

/// Lets tokio watch a descriptor.
#[expect(
    deprecated,
    reason = "an owned descriptor stays open as long as its AsyncFd, which is all \
    that the unsafe successor asks for"
)]
pub fn watch<T: AsRawFd>(fd: T) -> std::io::Result<AsyncFd<T>> {
    AsyncFd::new(fd)
}

/// For a process whose parent is not ours.
async fn wait_by_pidfd(pid: Pid, pidfd: &OwnedFd, former: Option<&Former>) -> Option<Exit> {
    let copy = pidfd.try_clone().ok()?;
    let ended = watch(copy).ok()?;
    let _ready = ended.readable().await.ok()?;
    // Its pidfd tells the exit once its parent has reaped it, /proc until then.
    const ROUNDS: u32 = 50;
    for _ in 0..ROUNDS {
        let exit = sys::process::pidfd_exit(pidfd.as_fd())
            .or_else(|| sys::process::unreaped_exit(pid, pidfd.as_fd()));
        if exit.is_some() {
            return exit;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let number = sys::process::pidfd_number(pidfd.as_fd()).ok()?;
    former.and_then(|former| former.exit_of(number))
}

/// An answer and its descriptors.
#[derive(Debug)]
struct Answer {
    reply: Reply,
    descriptors: Vec<OwnedFd>,
    process: Option<Process>,
}

#[derive(Debug, Default)]
struct Tables {
    requests: HashMap<u64, mpsc::UnboundedSender<Answer>>,
    /// Who waits for the end of a process, and the request that made it.
    processes: HashMap<Pid, (oneshot::Sender<Exit>, u64)>,
    is_lost: bool,
}

/// A running zygote.
#[derive(Debug)]
pub struct Zygote {
    socket: AsyncFd<OwnedFd>,
    tables: Mutex<Tables>,
    next_request: AtomicU64,
}

/// A command that has been started.
#[derive(Debug)]
pub struct StartedCommand {
    /// The process.
    pub process: Process,
    /// Its id inside the sandbox.
    pub inner_pid: i32,
    /// The outer end of its terminal.
    pub terminal: Option<OwnedFd>,
    late: LateRefusal,
}

impl StartedCommand {
    /// After the end of the process: the code and text when it could not become the command after all.
    pub fn refusal(&mut self) -> Option<(i32, String)> {
        self.late.take()
    }
}

/// Answers that may come after `Running`.
#[derive(Debug)]
struct LateRefusal(mpsc::UnboundedReceiver<Answer>);

impl LateRefusal {
    fn take(&mut self) -> Option<(i32, String)> {
        while let Ok(answer) = self.0.try_recv() {
            if let Reply::Refused(refused) = answer.reply {
                return Some((refused.code, refused.message));
            }
        }
        None
    }
}

/// What became of a request to run a command.
#[derive(Debug)]
pub enum CommandStart {
    /// It runs, or is about to.
    Started(StartedCommand),
    /// It does not: exit code as a shell would give it, and one line.
    Refused(i32, String),
}

/// The process that a request is about, when it is as asked for.
async fn until_ready(mut answers: mpsc::UnboundedReceiver<Answer>) -> Result<Process> {
    // The zygote and the new process send on their own, so either may be heard first.
    let (mut process, mut is_ready) = (None, false);
    while let Some(answer) = answers.recv().await {
        match answer.reply {
            Reply::Launched(_) => process = answer.process,
            Reply::Ready(_) => is_ready = true,
            Reply::Failed(failed) => return Err(of_failed(failed)),
            _ => return Err(unexpected("launch")),
        }
        if is_ready && let Some(process) = process.take() {
            return Ok(process);
        }
    }
    Err(lost())
}

impl Zygote {
    /// Starts a zygote and configures it. `descriptors`: our group in each version 1 hierarchy, then, if
    /// `version_2`, in the version 2 one. `folder`: where zygotes have their files of ends.
    pub async fn start(
        folder: &Path,
        descriptors: &[OwnedFd],
        version_2: bool,
        apparmor: bool,
    ) -> Result<Arc<Self>> {
        let (ours, theirs) =
            sys::socket::Seqpacket::pair().context(|| "socket pair for the zygote".into())?;
        ours.set_nonblocking(true).context(|| "socket of the zygote".into())?;
        let program = sys::memory::sealed_memfd("lamella", GUEST)
            .context(|| "memory file for the zygote".into())?;
        let path = format!("/proc/self/fd/{}", program.as_raw_fd());
        let notes = Notes::create(folder)?;
        let child = spawn(Path::new(&path), theirs.into_fd())
            .context(|| "start the zygote from a sealed memory file".into())?;
        notes.name(child.id() as Pid)?;
        reap_late(child.id() as Pid)?;
        let socket = watch(ours.into_fd()).context(|| "watch the zygote".into())?;
        let zygote = Arc::new(Self {
            socket,
            tables: Mutex::new(Tables::default()),
            next_request: AtomicU64::new(1),
        });
        let version_1 = descriptors.len() - usize::from(version_2);
        let configure = Configure { version_1: version_1 as u32, version_2, apparmor };
        let ours = descriptors.iter().map(AsFd::as_fd);
        let borrowed: Vec<_> = std::iter::once(notes.file.as_fd()).chain(ours).collect();
        zygote.send(Request::Configure(configure), &borrowed).await?;
        let first = tokio::time::timeout(START_DEADLINE, zygote.receive())
            .await
            .map_err(|_| Error::new(ErrorKind::Timeout, "the zygote does not come up"))??;
        if first.is_none() {
            return Err(Error::new(ErrorKind::Unavailable, "the zygote ended at its start"));
        }
        tokio::spawn(read_answers(Arc::clone(&zygote)));
        Ok(zygote)
    }

    /// Whether it has died.
    pub fn is_lost(&self) -> bool {
        self.lock().is_lost
    }

    /// Has it hold the outer end of a command's terminal until [`Zygote::release`].
    pub async fn hold(&self, pid: Pid, terminal: BorrowedFd<'_>) -> Result<()> {
        self.send(Request::Hold(Hold { pid }), &[terminal]).await
    }

    /// Has it let go of all streams of a command.
    pub async fn release(&self, pid: Pid, number: u64) -> Result<()> {
        self.send(Request::Release(Release { pid, number }), &[]).await
    }

    /// Lets the zygote end, and with it the task that listens to it. Its processes live on, and it stays to
    /// reap them.
    pub fn close(&self) {
        let copy = self.socket.get_ref().try_clone().map(std::os::unix::net::UnixStream::from);
        let closed = copy.and_then(|socket| socket.shutdown(std::net::Shutdown::Both));
        if let Err(error) = closed {
            tracing::warn!(%error, "the zygote cannot be told to end");
        }
    }

    /// Makes a sandbox; answers when commands can run in it. `users`: its user namespace, if
    /// `launch.first_id` is set.
    pub async fn launch(
        &self,
        mut launch: Launch,
        root: BorrowedFd<'_>,
        users: Option<BorrowedFd<'_>>,
        network: Option<BorrowedFd<'_>>,
    ) -> Result<Process> {
        let (number, answers) = self.register();
        launch.request = number;
        launch.has_network = network.is_some();
        let mut descriptors = vec![root];
        descriptors.extend(users);
        descriptors.extend(network);
        let _forget = Forget { zygote: self, number };
        self.send(Request::Launch(launch), &descriptors).await?;
        until_ready(answers).await
    }

    /// Makes a user namespace with these ids.
    pub async fn users(&self, ids: Ids) -> Result<OwnedFd> {
        let (number, answers) = self.register();
        let _forget = Forget { zygote: self, number };
        let users = Users { request: number, owner: ids.first() };
        self.send(Request::Users(users), &[]).await?;
        let holder = until_ready(answers).await?;
        let namespace = ids.map().give_to(holder.pid).context(|| "map users".into());
        holder.end_unwanted();
        namespace
    }

    /// Runs a command in the sandbox of this init. `streams` are empty for a terminal.
    pub async fn exec(
        &self,
        mut exec: Exec,
        init: BorrowedFd<'_>,
        streams: &[BorrowedFd<'_>],
    ) -> Result<CommandStart> {
        let (number, mut answers) = self.register();
        exec.request = number;
        let mut descriptors = vec![init];
        descriptors.extend(streams);
        let mut unborn = Unborn { zygote: self, number, process: None };
        self.send(Request::Exec(exec), &descriptors).await?;
        // Either sender may be heard first. The channel closes when the process has ended.
        let mut running = None;
        while let Some(answer) = answers.recv().await {
            match answer.reply {
                Reply::Started(_) => unborn.process = answer.process,
                Reply::Running(run) => {
                    running = Some((run.inner_pid, answer.descriptors.into_iter().next()));
                }
                Reply::Refused(refused) => {
                    return Ok(CommandStart::Refused(refused.code, refused.message));
                }
                Reply::Failed(failed) => return Err(of_failed(failed)),
                _ => return Err(unexpected("exec")),
            }
            if unborn.process.is_some() && running.is_some() {
                break;
            }
        }
        if let (Some(process), Some((inner_pid, terminal))) = (unborn.process.take(), running) {
            std::mem::forget(unborn);
            let late = LateRefusal(answers);
            return Ok(CommandStart::Started(StartedCommand {
                process,
                inner_pid,
                terminal,
                late,
            }));
        }
        if self.is_lost() {
            return Err(lost());
        }
        let text = "the process ended before it could become the command: \
                    the sandbox ended, or has no memory left";
        Err(Error::new(ErrorKind::Unavailable, text))
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn register(&self) -> (u64, mpsc::UnboundedReceiver<Answer>) {
        // The answers to one request are four at most.
        let (sender, receiver) = mpsc::unbounded_channel();
        let number = self.next_request.fetch_add(1, Ordering::Relaxed);
        self.lock().requests.insert(number, sender);
        (number, receiver)
    }

    fn forget(&self, number: u64) {
        self.lock().requests.remove(&number);
    }

    async fn send(&self, request: Request, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let bytes = ToZygote { request: Some(request) }.encode_to_vec();
        let file;
        let mut all = descriptors.to_vec();
        let packet = if bytes.len() > MAX_INLINE_BYTES {
            file = sys::memory::sealed_memfd("lamella-request", &bytes)
                .context(|| "memory file for a request".into())?;
            all.insert(0, file.as_fd());
            ENVELOPE
        } else {
            &bytes
        };
        let sent = self.socket.async_io(tokio::io::Interest::WRITABLE, |socket| {
            sys::socket::send_with_descriptors(socket.as_fd(), packet, &all)
        });
        sent.await.map(drop).context(|| "send to the zygote".into())
    }

    async fn receive(&self) -> Result<Option<(FromZygote, Vec<OwnedFd>)>> {
        let message = self.socket.async_io(tokio::io::Interest::READABLE, |socket| {
            sys::socket::receive_with_descriptors(socket.as_fd(), MAX_REPLY_BYTES, MAX_DESCRIPTORS)
        });
        let Some(message) = message.await.context(|| "receive from the zygote".into())? else {
            return Ok(None);
        };
        let decoded = FromZygote::decode(message.bytes.as_slice()).map_err(|error| {
            Error::new(ErrorKind::Internal, "answer of the zygote").with_source(error)
        })?;
        Ok(Some((decoded, message.descriptors)))
    }

    fn dispatch(&self, reply: Reply, mut descriptors: Vec<OwnedFd>) {
        let mut tables = self.lock();
        let number = match &reply {
            Reply::Configured(_) => return,
            Reply::Ended(ended) => {
                if let Some((waiter, request)) = tables.processes.remove(&ended.pid) {
                    // All that the process had to say was sent before its end.
                    tables.requests.remove(&request);
                    let exit = if ended.is_signal {
                        Exit::Signal(ended.value)
                    } else {
                        Exit::Code(ended.value)
                    };
                    let _nobody_waits = waiter.send(exit);
                }
                return;
            }
            Reply::Launched(started) | Reply::Started(started) => started.request,
            Reply::Ready(ready) => ready.request,
            Reply::Failed(failed) => failed.request,
            Reply::Running(running) => running.request,
            Reply::Refused(refused) => refused.request,
        };
        let mut process = None;
        if let Reply::Launched(started) | Reply::Started(started) = &reply {
            let Some(pidfd) = descriptors.pop() else { return };
            let (sender, receiver) = oneshot::channel();
            tables.processes.insert(started.pid, (sender, number));
            let (pid, pidfd) = (started.pid, Arc::new(pidfd));
            let exit = Some(receiver);
            process = Some(Process { pid, pidfd, exit, told: None, former: None });
        }
        let Some(waiter) = tables.requests.get(&number) else {
            drop(tables);
            if let (Reply::Started(_), Some(process)) = (&reply, &process) {
                process.end_unwanted();
            }
            return;
        };
        if waiter.send(Answer { reply, descriptors, process }).is_err() {
            tables.requests.remove(&number);
        }
    }
}

/// A command whose start is not finished: ended when nobody waits for it any more, since the sandbox can
/// stop it on its way for as long as it likes.
struct Unborn<'a> {
    zygote: &'a Zygote,
    number: u64,
    process: Option<Process>,
}

impl Drop for Unborn<'_> {
    fn drop(&mut self) {
        // Heard of later, it is ended where the answer is taken.
        self.zygote.forget(self.number);
        if let Some(process) = &self.process {
            process.end_unwanted();
        }
    }
}

/// Takes a request out of the table whatever way its waiter leaves.
struct Forget<'a> {
    zygote: &'a Zygote,
    number: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.zygote.forget(self.number);
    }
}

/// Reaps a zygote whenever it ends; also one of this process under an earlier program (exec).
pub fn reap_late(pid: Pid) -> Result<()> {
    let pidfd = sys::process::pidfd_open(pid).context(|| "look at the zygote".into())?;
    let ended = watch(pidfd).context(|| "watch the zygote".into())?;
    tokio::spawn(async move {
        let _ready = ended.readable().await;
        sys::process::reap_child(ended.get_ref().as_fd());
    });
    Ok(())
}

fn spawn(program: &Path, socket: OwnedFd) -> std::io::Result<std::process::Child> {
    use std::os::unix::process::CommandExt;
    std::process::Command::new(program)
        .arg0("lamella")
        .env_clear()
        .current_dir("/")
        .stdin(socket)
        .stdout(std::process::Stdio::null())
        .spawn()
}

async fn read_answers(zygote: Arc<Zygote>) {
    loop {
        match zygote.receive().await {
            Ok(Some((FromZygote { reply: Some(reply) }, descriptors))) => {
                zygote.dispatch(reply, descriptors);
            }
            Ok(Some(_)) => {}
            Ok(None) => break,
            Err(error) => {
                tracing::error!(error = %error.chain(), "the zygote cannot be heard any more");
                break;
            }
        }
    }
    let mut tables = zygote.lock();
    tables.is_lost = true;
    tables.requests.clear();
    tables.processes.clear();
}

fn of_failed(failed: Failed) -> Error {
    const EAGAIN: i32 = 11;
    if failed.errno == EAGAIN && failed.step.starts_with("clone3") {
        let text = "the sandbox is at its limit of processes; --pids gives more";
        return Error::new(ErrorKind::NoSpace, text);
    }
    if failed.step.starts_with("protect ") {
        // The request names what cannot be protected.
        return Error::invalid(failed.step);
    }
    let error = std::io::Error::from_raw_os_error(failed.errno);
    Error::new(ErrorKind::of_io(&error), failed.step)
}

fn lost() -> Error {
    Error::new(ErrorKind::Unavailable, "the zygote died during the request")
}

fn unexpected(what: &str) -> Error {
    Error::new(ErrorKind::Internal, format!("unexpected answer of the zygote to {what}"))
}
