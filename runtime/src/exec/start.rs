//! The start of a command for a client.

use super::attach::feed;
use super::command::{Command, Input};
use super::record::{CommandRecord, Ended, now_unix_ns};
use super::run::{Child, Run, TIME_OVER};
use super::streams::{self, Streams};
use crate::backends::Started;
use crate::events::report;
use crate::meters::Meters;
use crate::plan;
use crate::record::End as EndKind;
use crate::sandbox::Sandbox;
use crate::stream::Sink;
use crate::zygote::CommandStart;
use layer::{Error, Result};
use proto::v1::exec_output::Output as Out;
use proto::v1::{ExecInput, ExecOutput, ExecStart};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Output messages that wait for a client; each is 64 KiB at most.
const OUTPUT_QUEUE: usize = 8;
/// Bytes of output that are kept of a command whose client reads it.
const FOREGROUND_BYTES: u64 = 2 << 20;
/// Bytes of output that are kept of any other.
const BACKGROUND_BYTES: u64 = 16 << 20;
/// Commands of one sandbox that run at once.
const MAX_RUNNING: usize = 1024;

/// Starts a command. The outputs begin with its id and end with `ended`; those of a command in the
/// background end when it has begun.
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
    let _use = sandbox.activity.begin();
    let instance = sandbox.running_instance().await?;
    if sandbox.running_commands() >= MAX_RUNNING {
        let text = format!("sandbox {} runs {MAX_RUNNING} commands already", sandbox.id());
        return Err(Error::new(layer::ErrorKind::NoSpace, text));
    }
    meters.execs.add(1);
    let id = sandbox.commands.new_id()?;
    let mut record = CommandRecord::new(sandbox.id(), &id, &start.argv);
    let timeout = (start.timeout_ms != 0).then(|| Duration::from_millis(start.timeout_ms));
    record.is_background = start.background;
    record.is_terminal = start.tty;
    record.deadline_unix_ns =
        (start.timeout_ms != 0).then(|| now_unix_ns().saturating_add(start.timeout_ms * 1_000_000));
    record.kept_bytes = match (start.background, start.kept_bytes) {
        (false, _) => FOREGROUND_BYTES,
        (true, 0) => BACKGROUND_BYTES,
        (true, bytes) => bytes.min(BACKGROUND_BYTES),
    };
    let (outputs, receiver) = mpsc::channel(OUTPUT_QUEUE);
    tell(&outputs, Out::CommandId(id.clone()));

    let defaults = sandbox.defaults();
    let mut command = plan::command(&defaults, start.argv, &start.env, start.cwd, start.user);
    report::exec_started(&sandbox, &record, &command.argv, &command.user, &command.cwd);
    command.is_held = true;
    let starting = async {
        if start.tty {
            command.terminal = Some((start.rows, start.cols));
            Ok((instance.exec(command, &[]).await?, None))
        } else {
            let (theirs, ours) = streams::pipes(start.stdin)?;
            let borrowed: Vec<_> = theirs.iter().map(AsFd::as_fd).collect();
            Ok((instance.exec(command, &borrowed).await?, Some(ours)))
        }
    };
    // The time-out counts from here: the sandbox can stop the process before it is the command.
    let Some(started) = within(timeout, starting).await else {
        meters.exec_ended(EndKind::Timeout);
        let ended = Ended::now(EndKind::Timeout, TIME_OVER.to_owned(), 0);
        end_at_once(&outputs, &sandbox, &record, &ended);
        return Ok(receiver);
    };
    let (Started { start: how, tree }, streams) = match started {
        Err(error) if sandbox.has_new_oom_kill() => {
            meters.exec_ended(EndKind::Oom);
            let ended = Ended::now(EndKind::Oom, format!("out of memory: {}", error.chain()), 0);
            end_at_once(&outputs, &sandbox, &record, &ended);
            return Ok(receiver);
        }
        started => started.inspect_err(|error| report::exec_failed(&sandbox, &record, error))?,
    };
    let mut child = match how {
        CommandStart::Refused(code, message) => {
            meters.exec_refused();
            let ended = Ended::now(EndKind::Exited(code), message, 0);
            end_at_once(&outputs, &sandbox, &record, &ended);
            return Ok(receiver);
        }
        CommandStart::Started(child) => child,
    };
    let streams = match (streams, child.terminal.take()) {
        (Some(streams), _) => Ok(streams),
        (None, Some(master)) => Streams::of_terminal(master),
        (None, None) => Ok(Streams::default()),
    };
    let streams = streams.unwrap_or_else(|error| {
        tracing::warn!(error = %error.chain(), "the streams of a command are lost");
        Streams::default()
    });
    let pidfd = Arc::clone(&child.process.pidfd);
    record.pid = child.process.pid;
    record.process_number = sys::process::pidfd_number(pidfd.as_fd()).unwrap_or(0);
    record.inner_pid = child.inner_pid;
    record.group = tree.as_ref().and_then(|tree| tree.number());
    record.outputs = streams.ids;
    // CRASH: from here on the next runtime finds it. Nobody has heard of it before.
    if let Err(error) = sandbox.commands.store().append(&record) {
        tracing::warn!(error = %error.chain(), "a command would not survive this process");
    }
    let output = sandbox.commands.output(&id, record.kept_bytes);
    let (tree, inner_pid) = (tree.map(Arc::from), record.inner_pid as u32);
    let input = Input::new(streams.input, streams.is_terminal);
    let command = Command::new(record, output, input, Some(pidfd), tree);
    sandbox.commands.insert(&command);
    tell(&outputs, Out::StartedPid(inner_pid));
    let limit = match start.output_limit_bytes {
        0 => default_limit_bytes,
        limit => limit,
    };
    let client = (!start.background).then(|| outputs.clone());
    let run = Run {
        sink: Sink::new(Arc::clone(&command.output), client.clone(), limit),
        sandbox,
        instance,
        command: Arc::clone(&command),
        child: Child::Started(child),
        outputs: streams.outputs,
        is_terminal: streams.is_terminal,
        client,
        timeout,
        meters: Some(meters),
    };
    let feeder = (!start.background).then(|| {
        let instance = Arc::clone(&run.instance);
        tokio::spawn(async move {
            feed(inputs, Arc::clone(&command), instance).await;
            // A client that says no more says no more input.
            if !start.tty {
                command.close_input().await;
            }
        })
    });
    tokio::spawn(async move {
        run.drive().await;
        if let Some(feeder) = feeder {
            feeder.abort();
        }
    });
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

/// The queue is nearly empty at the start, so there is room.
fn tell(outputs: &mpsc::Sender<ExecOutput>, output: Out) {
    let _receiver_is_here = outputs.try_send(ExecOutput { output: Some(output) });
}

/// Tells the end of a command that never ran.
fn end_at_once(
    outputs: &mpsc::Sender<ExecOutput>,
    sandbox: &Sandbox,
    record: &CommandRecord,
    ended: &Ended,
) {
    report::exec_ended(sandbox, record, ended, 0);
    tell(outputs, Out::Ended(ended.wire()));
}
