//! One call, from its container to its answer.

use super::files;
use super::pool::{Class, Prepared};
use super::request::Call;
use super::streams::{self, Collected};
use crate::backends::{Command, Instance};
use crate::node::Node;
use crate::plan::{self, CommandDefaults};
use crate::record::End;
use crate::zygote::CommandStart;
use layer::{Error, ErrorKind, Result};
use proto::v1;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sys::process::Exit;
use tokio::sync::{oneshot, watch};

/// Between two looks at what a call writes. Most calls have ended before the first.
const LOOK: Duration = Duration::from_millis(100);
/// What a call may write that names no bound.
const DEFAULT_WRITABLE_BYTES: u64 = 256 << 20;
const DEFAULT_INODES: u64 = 50_000;
/// Nobody is stopped for less when the node's disk is nearly full.
const LITTLE_BYTES: u64 = 8 << 20;

/// How a command ended and what it left.
struct Ran {
    end: End,
    message: String,
    stdout: Collected,
    stderr: Collected,
}

/// Runs it. `left` completes when nobody waits for the answer any more.
pub async fn run(
    node: &Arc<Node>,
    call: Call,
    class: &Class,
    defaults: &CommandDefaults,
    left: oneshot::Sender<()>,
) -> Result<v1::CallResponse> {
    let prepared = node.functions.pools.take(node, class).await?;
    let Call { spec, stdin, files, outputs, timeout, output_limit, files_limit } = call;
    let command = plan::command(defaults, spec.argv, &[], None, None);
    let command = Command { is_main: true, ..command };
    let cwd = command.cwd.clone();
    let instance = &prepared.instance;
    // The descriptor outlives the container, and its overlay with it.
    let root = if outputs.is_empty() { None } else { Some(instance.root()?) };
    if !files.is_empty() {
        put(&prepared, cwd.clone(), files).await?;
    }
    let meter = instance.meter();
    let begin = Instant::now();
    let is_bounded = class.plan.limits.disk.is_some();
    let limits = Limits { deadline: begin + timeout, output: output_limit, is_bounded };
    let ran = execute(node, instance, command, stdin, limits, left).await?;
    let wall = begin.elapsed();
    let usage = meter.map(|meter| meter.read()).unwrap_or_default();
    let files = match root {
        None => Vec::new(),
        Some(root) => {
            instance.kill()?;
            instance.ended().await;
            blocking(move || Ok(files::take(root.as_fd(), &cwd, &outputs, files_limit))).await?
        }
    };
    node.meters.exec_ended(ran.end);
    Ok(v1::CallResponse {
        end: Some(ran.end.wire()),
        exit_code: ran.end.exit_code(),
        message: ran.message,
        stdout: ran.stdout.data,
        stderr: ran.stderr.data,
        stdout_truncated_bytes: ran.stdout.truncated,
        stderr_truncated_bytes: ran.stderr.truncated,
        files,
        usage: Some(v1::CallUsage {
            wall_us: wall.as_micros() as u64,
            cpu_us: usage.cpu.as_micros() as u64,
            max_memory_bytes: usage.max_memory_bytes,
        }),
    })
}

async fn put(prepared: &Prepared, cwd: String, list: Vec<v1::CallFile>) -> Result<()> {
    let (root, ids) = (prepared.instance.root()?, prepared.instance.ids());
    blocking(move || {
        let _as_its_root = ids.assume()?;
        files::put(root.as_fd(), &cwd, &list)
    })
    .await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let panicked =
        |error| Error::new(ErrorKind::Internal, "work on files panicked").with_source(error);
    tokio::task::spawn_blocking(work).await.map_err(panicked)?
}

#[derive(Debug, Clone, Copy)]
struct Limits {
    deadline: Instant,
    /// Of each stream.
    output: u64,
    /// Its disk bounds what it writes.
    is_bounded: bool,
}

async fn execute(
    node: &Arc<Node>,
    instance: &Arc<dyn Instance>,
    command: Command,
    stdin: Vec<u8>,
    limits: Limits,
    mut left: oneshot::Sender<()>,
) -> Result<Ran> {
    let (their_input, input) = streams::input(&stdin)?;
    let (their_output, output) = streams::output()?;
    let (their_error, error) = streams::output()?;
    let borrowed = [their_input.as_fd(), their_output.as_fd(), their_error.as_fd()];
    let deadline = tokio::time::Instant::from_std(limits.deadline);
    let started = tokio::select! {
        started = instance.exec(command, &borrowed) => started,
        () = tokio::time::sleep_until(deadline) => return Ok(never_ran(End::Timeout)),
        () = left.closed() => return Ok(never_ran(End::Killed)),
    };
    drop((their_input, their_output, their_error));
    let started = match started {
        Err(_) if instance.oom_kills() > 0 => return Ok(never_ran(End::Oom)),
        started => started?.start,
    };
    let mut child = match started {
        CommandStart::Refused(code, message) => {
            return Ok(Ran { message, ..never_ran(End::Exited(code)) });
        }
        CommandStart::Started(child) => child,
    };
    let (tell_end, ended) = watch::channel(false);
    let feeder = input.map(|input| tokio::spawn(streams::feed(input, stdin)));
    let collect = |pipe| tokio::spawn(streams::collect(pipe, limits.output, ended.clone()));
    let (output, error) = (collect(output), collect(error));
    let forced = tokio::select! {
        exit = child.process.wait() => Err(exit),
        () = tokio::time::sleep_until(deadline) => Ok(End::Timeout),
        () = left.closed() => Ok(End::Killed),
        end = watch_disk(node, instance, limits.is_bounded) => Ok(end),
    };
    let end = match forced {
        Err(exit) => end_of(&**instance, exit),
        Ok(end) => {
            instance.kill()?;
            child.process.wait().await;
            end
        }
    };
    let _collectors_listen = tell_end.send(true);
    if let Some(feeder) = feeder {
        feeder.abort();
    }
    let refusal = child.refusal();
    let lost =
        |error| Error::new(ErrorKind::Internal, "reading output panicked").with_source(error);
    Ok(Ran {
        end,
        message: refusal.map_or_else(|| explain(end).to_owned(), |(_, message)| message),
        stdout: output.await.map_err(lost)?,
        stderr: error.await.map_err(lost)?,
    })
}

fn never_ran(end: End) -> Ran {
    let (stdout, stderr) = (Collected::default(), Collected::default());
    Ran { end, message: explain(end).to_owned(), stdout, stderr }
}

fn explain(end: End) -> &'static str {
    match end {
        End::Oom => "out of memory",
        End::Timeout => "the time was over",
        End::DiskFull(_) => "it may not write as much",
        _ => "",
    }
}

fn end_of(instance: &dyn Instance, exit: Option<Exit>) -> End {
    match exit {
        // A shell whose child was killed answers 137 in its place.
        Some(Exit::Signal(9) | Exit::Code(137)) | None if instance.oom_kills() > 0 => End::Oom,
        Some(Exit::Code(code)) if code != 0 && instance.is_disk_full() => End::DiskFull(code),
        Some(Exit::Code(code)) => End::Exited(code),
        Some(Exit::Signal(signal)) => End::Signal(signal),
        None => End::Lost,
    }
}

/// Completes when it has written more than it may: a bound of its own is the disk's to keep; without one there is
/// a usual one, and the reserve of the node's disk.
async fn watch_disk(node: &Arc<Node>, instance: &Arc<dyn Instance>, is_bounded: bool) -> End {
    const FULL: End = End::DiskFull(137);
    loop {
        tokio::time::sleep(LOOK).await;
        let counted = Arc::clone(instance);
        let Ok(written) = tokio::task::spawn_blocking(move || counted.written()).await else {
            return FULL;
        };
        let is_much = !is_bounded
            && (written.bytes > DEFAULT_WRITABLE_BYTES || written.inodes > DEFAULT_INODES);
        let is_short = node.room.admit().is_err() && written.bytes > LITTLE_BYTES;
        if is_much || is_short {
            return FULL;
        }
    }
}
