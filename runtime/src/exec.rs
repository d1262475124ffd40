//! Running a command in a sandbox for a client: streams, signals, time-out, end.
//!
//! One task drives a command; it ends with the command. A client that goes away takes its command along.

use crate::backends::{Started, Tree};
use crate::meters::Meters;
use crate::plan;
use crate::record::End as EndKind;
use crate::sandbox::Sandbox;
use crate::stream::{End, Sink, pump};
use crate::zygote::{CommandStart, StartedCommand};
use layer::{Context, Error, Result};
use proto::v1::exec_input::Input;
use proto::v1::exec_output::Output;
use proto::v1::{ExecEnded, ExecInput, ExecOutput, ExecStart};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use sys::process::{Exit, Reach};
use tokio::sync::{mpsc, watch};

/// Output messages that wait for a client; each is 64 KiB at most.
const OUTPUT_QUEUE: usize = 8;

const TIME_OVER: &str = "the time was over";

/// Our ends of a command's streams.
struct Streams {
    input: Option<End>,
    outputs: Vec<(bool, End)>,
}

/// Starts a command. The outputs end with `ended`.
pub async fn start(
    sandbox: Arc<Sandbox>,
    start: ExecStart,
    inputs: mpsc::Receiver<ExecInput>,
    default_limit_bytes: u64,
    meters: Arc<Meters>,
) -> Result<mpsc::Receiver<ExecOutput>> {
    crate::spec::strings(&start.argv, &start.env)?;
    if start.argv.is_empty() {
        return Err(Error::invalid("no command is given"));
    }
    let instance = sandbox.running_instance().await?;
    meters.execs.add(1);
    let defaults = sandbox.defaults();
    let mut command = plan::command(&defaults, start.argv, &start.env, start.cwd, start.user);
    let (outputs, receiver) = mpsc::channel(OUTPUT_QUEUE);
    let limit = match start.output_limit_bytes {
        0 => default_limit_bytes,
        limit => limit,
    };
    let sink = Sink::Client {
        outputs: outputs.clone(),
        left: Arc::new(AtomicU64::new(limit)),
        truncated: Arc::default(),
    };
    let timeout = (start.timeout_ms != 0).then(|| Duration::from_millis(start.timeout_ms));
    let starting = async {
        if start.tty {
            command.terminal = Some((start.rows, start.cols));
            Ok((instance.exec(command, &[]).await?, None))
        } else {
            let (theirs, ours) = pipes(start.stdin)?;
            let borrowed: Vec<_> = theirs.iter().map(AsFd::as_fd).collect();
            Ok((instance.exec(command, &borrowed).await?, Some(ours)))
        }
    };
    // The time-out counts from here: the sandbox can stop the process before it is the command.
    let Some(started) = within(timeout, starting).await else {
        meters.exec_ended(EndKind::Timeout);
        end_at_once(&outputs, EndKind::Timeout, TIME_OVER.to_owned());
        return Ok(receiver);
    };
    let (Started { start: how, tree }, streams) = started?;
    let command = match how {
        CommandStart::Refused(code, message) => {
            meters.exec_refused();
            end_at_once(&outputs, EndKind::Exited(code), message);
            return Ok(receiver);
        }
        CommandStart::Started(command) => command,
    };
    let run = Run { sandbox, command, tree, sink, outputs, timeout, meters };
    tokio::spawn(run.drive(streams, inputs));
    Ok(receiver)
}

/// `None`: the time was over first.
async fn within<T>(
    timeout: Option<Duration>,
    starting: impl Future<Output = Result<T>>,
) -> Option<Result<T>> {
    match timeout {
        Some(timeout) => tokio::time::timeout(timeout, starting).await.ok(),
        None => Some(starting.await),
    }
}

/// Tells the end of a command that never ran.
fn end_at_once(outputs: &mpsc::Sender<ExecOutput>, end: EndKind, message: String) {
    let (exit_code, end) = (end.exit_code(), Some(end.wire()));
    let ended = ExecEnded { end, exit_code, message, truncated_bytes: 0 };
    // The queue is empty, so there is room.
    let _receiver_is_here = outputs.try_send(ExecOutput { output: Some(Output::Ended(ended)) });
}

/// The command's ends and ours: input, output, error.
fn pipes(with_input: bool) -> Result<([OwnedFd; 3], Streams)> {
    let pipe = || std::io::pipe().context(|| "make a pipe".into());
    let (their_input, input) = if with_input {
        let (reader, writer) = pipe()?;
        (OwnedFd::from(reader), Some(End::new(writer.into())?))
    } else {
        let null = std::fs::File::open("/dev/null").context(|| "open /dev/null".into())?;
        (OwnedFd::from(null), None)
    };
    let (out_reader, out_writer) = pipe()?;
    let (error_reader, error_writer) = pipe()?;
    let outputs =
        vec![(false, End::new(out_reader.into())?), (true, End::new(error_reader.into())?)];
    let theirs = [their_input, out_writer.into(), error_writer.into()];
    Ok((theirs, Streams { input, outputs }))
}

/// One running command.
struct Run {
    sandbox: Arc<Sandbox>,
    command: StartedCommand,
    tree: Option<Box<dyn Tree>>,
    sink: Sink,
    outputs: mpsc::Sender<ExecOutput>,
    timeout: Option<Duration>,
    meters: Arc<Meters>,
}

impl Run {
    async fn drive(mut self, streams: Option<Streams>, inputs: mpsc::Receiver<ExecInput>) {
        let _counted = self.sandbox.count_command();
        let pid = self.command.inner_pid as u32;
        self.send(Output::StartedPid(pid)).await;
        let terminal = self.command.terminal.take();
        let streams = match (streams, terminal) {
            (Some(streams), _) => Ok(streams),
            (None, Some(master)) => terminal_streams(master),
            (None, None) => Ok(Streams { input: None, outputs: Vec::new() }),
        };
        let Streams { input, outputs } = streams.unwrap_or_else(|error| {
            tracing::warn!(error = %error.chain(), "the streams of a command are lost");
            Streams { input: None, outputs: Vec::new() }
        });
        let (tell_end, ended) = watch::channel(false);
        let mut pumps = tokio::task::JoinSet::new();
        for (is_error, source) in outputs {
            pumps.spawn(pump(source, is_error, self.sink.clone(), ended.clone()));
        }
        let is_terminal = pumps.len() == 1;
        let pidfd = Arc::clone(&self.command.process.pidfd);
        let feeder = tokio::spawn(feed(inputs, input, is_terminal, pidfd));
        let end = self.wait().await;
        let _pumps_listen = tell_end.send(true);
        while pumps.join_next().await.is_some() {}
        feeder.abort();
        self.report(end).await;
    }

    /// Waits for the end of the command, and brings it about when its time is over or its client left.
    async fn wait(&mut self) -> EndKind {
        let timeout = async {
            match self.timeout {
                Some(timeout) => tokio::time::sleep(timeout).await,
                None => std::future::pending().await,
            }
        };
        let forced = tokio::select! {
            exit = self.command.process.wait() => return self.end_of(exit),
            () = timeout => EndKind::Timeout,
            () = self.outputs.closed() => EndKind::Killed,
        };
        let killed = match &self.tree {
            Some(tree) => tree.kill(),
            None => Ok(()),
        };
        if let Err(error) = killed {
            tracing::warn!(error = %error.chain(), "kill a command by its group");
            let pidfd = self.command.process.pidfd.as_fd();
            // It may have ended meanwhile.
            let _ended = sys::process::pidfd_signal(pidfd, 9, Reach::Group);
        }
        self.command.process.wait().await;
        forced
    }

    fn end_of(&self, exit: Option<Exit>) -> EndKind {
        match exit {
            // A shell whose child was killed answers 137 in its place.
            Some(Exit::Signal(9) | Exit::Code(137)) | None if self.sandbox.has_new_oom_kill() => {
                EndKind::Oom
            }
            Some(Exit::Code(code)) => EndKind::Exited(code),
            Some(Exit::Signal(signal)) => EndKind::Signal(signal),
            None => EndKind::Killed,
        }
    }

    async fn report(&mut self, end: EndKind) {
        let refusal = self.command.refusal();
        match refusal {
            Some(_) => self.meters.exec_refused(),
            None => self.meters.exec_ended(end),
        }
        // Before the client hears of the end, so that the next command finds the group free.
        self.tree = None;
        let truncated_bytes = match &self.sink {
            Sink::Client { truncated, .. } => truncated.load(Ordering::Relaxed),
            Sink::Log(_) => 0,
        };
        let message = match (refusal, end) {
            (Some((_, message)), _) => message,
            (None, EndKind::Oom) => "out of memory".to_owned(),
            (None, EndKind::Timeout) => TIME_OVER.to_owned(),
            (None, _) => String::new(),
        };
        let (exit_code, end) = (end.exit_code(), Some(end.wire()));
        self.send(Output::Ended(ExecEnded { end, exit_code, message, truncated_bytes })).await;
    }

    async fn send(&self, output: Output) {
        // A client that has left needs nothing.
        let _left = self.outputs.send(ExecOutput { output: Some(output) }).await;
    }
}

fn terminal_streams(master: OwnedFd) -> Result<Streams> {
    let input = End::new(master)?;
    let output = input.try_clone()?;
    Ok(Streams { input: Some(input), outputs: vec![(false, output)] })
}

/// Carries out what the client says while the command runs.
async fn feed(
    mut inputs: mpsc::Receiver<ExecInput>,
    mut input: Option<End>,
    is_terminal: bool,
    pidfd: Arc<OwnedFd>,
) {
    while let Some(ExecInput { input: Some(what) }) = inputs.recv().await {
        match what {
            Input::Stdin(bytes) => {
                if let Some(end) = &input
                    && !end.write_all(&bytes).await
                {
                    input = None;
                }
            }
            // A terminal has one open file for both directions; its output must go on.
            Input::CloseStdin(_) if is_terminal => {}
            Input::CloseStdin(_) => input = None,
            Input::Resize(size) => {
                let cells = |count: u32| u16::try_from(count).unwrap_or(u16::MAX);
                if let Some(end) = input.as_ref().filter(|_| is_terminal) {
                    // A terminal that has just been closed has no size.
                    let _closed =
                        sys::pty::resize(end.file().as_fd(), cells(size.rows), cells(size.cols));
                }
            }
            Input::Signal(signal) => {
                // A command that has ended needs none.
                let _ended = sys::process::pidfd_signal(pidfd.as_fd(), signal, Reach::Group);
            }
            Input::Start(_) => {}
        }
    }
    if is_terminal {
        // The terminal stays open for its output until the command ends.
        std::future::pending::<()>().await;
    }
}
