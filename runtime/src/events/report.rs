//! What parts of the runtime say of what they do: commands, transfers, changes of files, packs.

use super::record::{DeniedBy, HowEnded, Limit, What, cut, cut_all, result_of};
use super::{EventLog, now_unix_ns};
use crate::exec::record::{CommandRecord, Ended};
use crate::record::End;
use crate::sandbox::Sandbox;
use layer::{Error, LayerId, Result};
use netpolicy::Denial;
use proto::v1;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;
use tokio_stream::Stream;

/// The result of what nobody waited for.
const LEFT: &str = "the client left";

fn length(argv: &[String]) -> u64 {
    argv.iter().map(|word| word.len() as u64).sum()
}

/// A command is about to be started. Each has an end, in [`exec_ended`].
pub fn exec_started(
    sandbox: &Sandbox,
    record: &CommandRecord,
    argv: &[String],
    user: &str,
    cwd: &str,
) {
    sandbox.report(&What::ExecStart {
        command: record.names().1.to_owned(),
        argv: cut_all(argv),
        argv_bytes: length(argv),
        user: cut(user),
        cwd: cut(cwd),
        tty: record.is_terminal,
        background: record.is_background,
    });
}

/// How it ended, with the limits that it reached.
pub fn exec_ended(sandbox: &Sandbox, record: &CommandRecord, ended: &Ended, output_bytes: u64) {
    let command = record.names().1.to_owned();
    let ran_ns = now_unix_ns().saturating_sub(record.started_unix_ns);
    let limit = |limit, count| {
        sandbox.report(&What::Limit { limit, command: command.clone(), count });
    };
    match ended.end {
        End::Oom => limit(Limit::Oom, 1),
        End::DiskFull(_) => limit(Limit::DiskFull, 1),
        _ => {}
    }
    if ended.truncated_bytes > 0 {
        limit(Limit::Output, ended.truncated_bytes);
    }
    let refused = sandbox.new_refused_forks();
    if refused > 0 {
        limit(Limit::Pids, refused);
    }
    sandbox.report(&What::ExecEnd {
        command: command.clone(),
        end: HowEnded::from(ended.end),
        exit_code: ended.end.exit_code(),
        message: cut(&ended.message),
        output_bytes: output_bytes + ended.truncated_bytes,
        truncated_bytes: ended.truncated_bytes,
        ran_ms: ran_ns / 1_000_000,
    });
}

/// A file or a tree on its way into a sandbox or out of it. Reported at its end, or when this is dropped.
#[derive(Debug)]
pub struct Transfer {
    sandbox: Arc<Sandbox>,
    direction: &'static str,
    path: String,
    /// Bytes so far.
    pub bytes: u64,
    is_told: bool,
}

impl Transfer {
    /// Begins.
    pub fn begin(sandbox: &Arc<Sandbox>, is_in: bool, path: &str) -> Self {
        let direction = if is_in { "in" } else { "out" };
        let sandbox = Arc::clone(sandbox);
        Self { sandbox, direction, path: cut(path), bytes: 0, is_told: false }
    }

    /// It has come to its end.
    pub fn end<T>(&mut self, result: &Result<T>) {
        self.tell(result_of(result));
    }

    /// It has come to a bad end.
    pub fn failed(&mut self, error: &Error) {
        self.tell(cut(&error.chain()));
    }

    fn tell(&mut self, result: String) {
        if std::mem::replace(&mut self.is_told, true) {
            return;
        }
        let (direction, bytes) = (self.direction, self.bytes);
        let path = std::mem::take(&mut self.path);
        self.sandbox.report(&What::FileTransfer { direction, path, bytes, result });
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.tell(LEFT.to_owned());
    }
}

/// Parts of a file on its way out, counted.
#[derive(Debug)]
pub struct Counted<S> {
    parts: S,
    transfer: Transfer,
}

impl<S> Counted<S> {
    /// Counts them.
    pub fn new(parts: S, transfer: Transfer) -> Self {
        Self { parts, transfer }
    }
}

impl<S: Stream<Item = Result<v1::FileChunk>> + Unpin> Stream for Counted<S> {
    type Item = Result<v1::FileChunk>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let polled = Pin::new(&mut self.parts).poll_next(context);
        match &polled {
            Poll::Ready(Some(Ok(v1::FileChunk {
                part: Some(v1::file_chunk::Part::Data(data)),
            }))) => {
                self.transfer.bytes += data.len() as u64;
            }
            Poll::Ready(Some(result @ Err(_))) => self.transfer.end(result),
            Poll::Ready(None) => self.transfer.end(&Ok(())),
            _ => {}
        }
        polled
    }
}

/// A file was changed from outside, or could not be.
pub fn changed<T>(
    sandbox: &Sandbox,
    change: &'static str,
    path: &str,
    to: &str,
    result: &Result<T>,
) {
    sandbox.report(&What::FileChange {
        change,
        path: cut(path),
        to: cut(to),
        result: result_of(result),
    });
}

/// A call of a function. Reported when this is dropped.
#[derive(Debug)]
pub struct Called {
    log: Arc<EventLog>,
    environment: String,
    argv: Vec<String>,
    argv_bytes: u64,
    begin: Instant,
    exit_code: i32,
    result: Option<String>,
}

impl Called {
    /// It begins.
    pub fn begin(log: &Arc<EventLog>, request: &v1::CallRequest) -> Self {
        Self {
            log: Arc::clone(log),
            environment: cut(&request.environment),
            argv: cut_all(&request.argv),
            argv_bytes: length(&request.argv),
            begin: Instant::now(),
            exit_code: 0,
            result: None,
        }
    }

    /// It is over.
    pub fn end(&mut self, result: &Result<v1::CallResponse>) {
        self.exit_code = result.as_ref().map_or(0, |answer| answer.exit_code);
        self.result = Some(result_of(result));
    }
}

impl Drop for Called {
    fn drop(&mut self) {
        let call = What::Call {
            environment: std::mem::take(&mut self.environment),
            argv: std::mem::take(&mut self.argv),
            argv_bytes: self.argv_bytes,
            exit_code: self.exit_code,
            ran_ms: self.begin.elapsed().as_millis() as u64,
            result: self.result.take().unwrap_or_else(|| LEFT.to_owned()),
        };
        self.log.report("", &call);
    }
}

/// A pack is over.
pub fn packed(sandbox: &Sandbox, name: &str, result: &Result<v1::PackDiffResponse>) {
    let id = |bytes: &[u8]| LayerId::from_slice(bytes).map(|id| id.to_string()).unwrap_or_default();
    let answer = result.as_ref().cloned().unwrap_or_default();
    sandbox.report(&What::PackDiff {
        name: cut(name),
        layer: id(&answer.layer_id),
        environment: id(&answer.env_id),
        files: answer.files,
        plain_bytes: answer.plain_bytes,
        new_bytes: answer.new_bytes,
        frozen_ms: answer.frozen_us / 1000,
        result: result_of(result),
    });
}

/// A fork is over, but for the starts of what it made.
pub fn forked<T>(sandbox: &Sandbox, count: u32, frozen_us: u64, result: &Result<T>) {
    sandbox.report(&What::Fork { count, frozen_ms: frozen_us / 1000, result: result_of(result) });
}

/// What a name stands for is signed by nobody who is trusted.
pub fn unsigned(log: &EventLog, name: &str, error: &Error) {
    log.report(
        "",
        &What::Denied {
            by: DeniedBy::Signature,
            reason: cut(&error.chain()),
            protocol: String::new(),
            address: String::new(),
            port: 0,
            name: cut(name),
            suppressed: 0,
        },
    );
}

/// A command could not even be tried.
pub fn exec_failed(sandbox: &Sandbox, record: &CommandRecord, error: &Error) {
    exec_ended(sandbox, record, &Ended::now(End::Lost, error.chain(), 0), 0);
}

/// A sandbox is stopped, since the disk of the data directory has no room for what it wrote.
pub fn stopped_for_room(sandbox: &Sandbox, bytes: u64) {
    sandbox.report(&What::Limit { limit: Limit::DiskFull, command: String::new(), count: bytes });
}

/// What a sandbox may reach was changed.
pub fn network(sandbox: &Sandbox, allow: &[String]) {
    sandbox.report(&What::Network { allow: cut_all(allow) });
}

/// Takes the network's denials of a sandbox into the log.
pub fn network_denials(sandbox: &Sandbox) -> Box<dyn netpolicy::denials::Listener> {
    let (sandbox, log) = (sandbox.id().to_owned(), Arc::clone(&sandbox.events));
    Box::new(NetworkDenials { sandbox, log })
}

#[derive(Debug)]
struct NetworkDenials {
    sandbox: String,
    log: Arc<EventLog>,
}

impl netpolicy::denials::Listener for NetworkDenials {
    fn denied(&self, denial: &Denial) {
        let what = What::Denied {
            by: DeniedBy::Network,
            reason: denial.reason.word().to_owned(),
            protocol: cut(&denial.protocol),
            address: denial.address.map(|address| address.to_string()).unwrap_or_default(),
            port: denial.port,
            name: cut(&denial.name),
            suppressed: denial.suppressed,
        };
        self.log.report(&self.sandbox, &what);
    }
}

/// A port of the host was opened for a sandbox, or closed.
pub fn port(sandbox: &Sandbox, port: &str, is_open: bool) {
    let change = if is_open { "opened" } else { "closed" };
    sandbox.report(&What::Port { port: cut(port), change });
}
