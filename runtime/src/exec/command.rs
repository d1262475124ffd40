//! One command, as clients see it: who it is, what it printed, its input, signals to it, its end.
//!
//! Locking: mutexes over the record and over the tree, held for a copy; an asynchronous one over the input, held
//! while bytes are written, so that the bytes of two clients do not mix.

use super::output::Output;
use super::record::{CommandRecord, Ended};
use crate::backends::{Instance, Tree};
use crate::stream::End;
use layer::{Context, Error, ErrorKind, Result};
use proto::v1;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use sys::process::Reach;
use tokio::sync::watch;

/// A command that runs or has ended.
#[derive(Debug)]
pub struct Command {
    id: String,
    record: Mutex<CommandRecord>,
    /// What it printed.
    pub output: Arc<Output>,
    input: tokio::sync::Mutex<Input>,
    /// Its terminal, for settings that must not wait behind input.
    terminal: Mutex<Option<Arc<End>>>,
    /// Its first process; none of one that had ended before this runtime began.
    pidfd: Option<Arc<OwnedFd>>,
    tree: Mutex<Option<Arc<dyn Tree>>>,
    is_over: watch::Sender<bool>,
    attached: AtomicUsize,
}

/// Where input goes.
#[derive(Debug, Default)]
pub struct Input {
    /// The pipe or the terminal, until it is closed.
    pub end: Option<Arc<End>>,
    /// Whether it is a terminal, whose output must go on when the input ends.
    pub is_terminal: bool,
    /// The last line is whole.
    is_whole_line: bool,
}

impl Input {
    /// Nothing was written yet.
    pub fn new(end: Option<End>, is_terminal: bool) -> Self {
        Self { end: end.map(Arc::new), is_terminal, is_whole_line: true }
    }
}

/// Counts a client that is attached while it lives.
#[derive(Debug)]
pub struct Attached(Arc<Command>);

impl Drop for Attached {
    fn drop(&mut self) {
        self.0.attached.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Command {
    /// A command that runs, or one that has ended if its record says so.
    pub fn new(
        record: CommandRecord,
        output: Output,
        input: Input,
        pidfd: Option<Arc<OwnedFd>>,
        tree: Option<Arc<dyn Tree>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id: record.names().1.to_owned(),
            is_over: watch::channel(record.ended.is_some()).0,
            record: Mutex::new(record),
            output: Arc::new(output),
            terminal: Mutex::new(input.end.clone().filter(|_| input.is_terminal)),
            input: tokio::sync::Mutex::new(input),
            pidfd,
            tree: Mutex::new(tree),
            attached: AtomicUsize::new(0),
        })
    }

    /// Its name in its sandbox.
    pub fn id(&self) -> &str {
        &self.id
    }

    fn lock(&self) -> MutexGuard<'_, CommandRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known of it.
    pub fn record(&self) -> CommandRecord {
        self.lock().clone()
    }

    /// Changes what is known of it.
    pub fn update(&self, change: impl FnOnce(&mut CommandRecord)) -> CommandRecord {
        let mut record = self.lock();
        change(&mut record);
        record.clone()
    }

    /// Whether it has ended, and its end is known to all.
    pub fn is_over(&self) -> bool {
        *self.is_over.borrow()
    }

    /// Tells whoever waits that it has ended.
    pub fn set_over(&self) {
        self.is_over.send_replace(true);
    }

    /// For waiting.
    pub fn over(&self) -> watch::Receiver<bool> {
        self.is_over.subscribe()
    }

    /// Completes when it has ended.
    pub async fn wait_over(&self) {
        let mut over = self.over();
        let _watched = over.wait_for(|over| *over).await;
    }

    /// Its end.
    pub fn ended(&self) -> Option<Ended> {
        self.lock().ended.clone()
    }

    /// Its processes, however they detached themselves.
    pub fn tree(&self) -> Option<Arc<dyn Tree>> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Gives up its tree, so that the next command can have its group.
    pub fn take_tree(&self) -> Option<Arc<dyn Tree>> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Counts a client that is attached.
    pub fn attach(self: &Arc<Self>) -> Attached {
        self.attached.fetch_add(1, Ordering::Relaxed);
        Attached(Arc::clone(self))
    }

    /// Whether a client is attached.
    pub fn is_attached(&self) -> bool {
        self.attached.load(Ordering::Relaxed) > 0
    }

    /// Writes to its input; what nobody reads any more is dropped.
    pub async fn write(&self, bytes: &[u8]) {
        let mut input = self.input.lock().await;
        if let Some(last) = bytes.last() {
            input.is_whole_line = *last == b'\n';
        }
        let Some(end) = &input.end else { return };
        let mut over = self.over();
        let is_written = tokio::select! {
            is_written = end.write_all(bytes) => is_written,
            // A background child may hold the other end for ever without reading.
            _ = over.wait_for(|over| *over) => false,
        };
        if !is_written && !input.is_terminal {
            input.end = None;
        }
    }

    /// Ends its input. A terminal's goes on giving output: who reads it by lines reads the end of a file.
    pub async fn close_input(&self) {
        let mut input = self.input.lock().await;
        if !input.is_terminal {
            input.end = None;
            return;
        }
        let Some(end) = &input.end else { return };
        if let Ok(Some(character)) = sys::pty::end_of_file(end.file().as_fd()) {
            // The first one after half a line only passes the half.
            let count = if input.is_whole_line { 1 } else { 2 };
            end.write_all(&vec![character; count]).await;
            input.is_whole_line = true;
        }
    }

    /// Gives its terminal another size.
    pub fn resize(&self, size: v1::Resize) {
        let cells = |count: u32| u16::try_from(count).unwrap_or(u16::MAX);
        let terminal = self.terminal.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(end) = terminal {
            // A terminal that has just been closed has no size.
            let _closed = sys::pty::resize(end.file().as_fd(), cells(size.rows), cells(size.cols));
        }
    }

    /// Closes its input for good.
    pub async fn drop_input(&self) {
        self.terminal.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.input.lock().await.end = None;
    }

    /// Sends a signal. Never reaches a process that has a recycled number.
    pub async fn signal(
        &self,
        instance: &Arc<dyn Instance>,
        signal: i32,
        reach: v1::Reach,
    ) -> Result<()> {
        if !(1..=64).contains(&signal) {
            return Err(Error::invalid(format!("there is no signal {signal}")));
        }
        if self.is_over() {
            return Err(Error::not_found(format!("command {} has ended", self.id)));
        }
        let by_pidfd = |reach| {
            let gone = || Error::not_found(format!("command {} has ended", self.id));
            let pidfd = self.pidfd.as_ref().ok_or_else(gone)?;
            match sys::process::pidfd_signal(pidfd.as_fd(), signal, reach) {
                // It has just ended.
                Err(error) if error.raw_os_error() == Some(ESRCH) => Ok(()),
                sent => sent.context(|| format!("signal {signal} to command {}", self.id)),
            }
        };
        match (reach, self.tree()) {
            (v1::Reach::Leader, _) => by_pidfd(Reach::Process),
            (v1::Reach::Group, _) => by_pidfd(Reach::Group),
            (v1::Reach::Tree, Some(tree)) => blocking(move || tree.signal(signal)).await,
            (v1::Reach::Tree, None) if self.id == super::table::MAIN => {
                let instance = Arc::clone(instance);
                blocking(move || instance.signal_all(signal)).await
            }
            (v1::Reach::Tree, None) => by_pidfd(Reach::Group),
        }
    }

    /// As a message.
    pub fn wire(&self) -> v1::Command {
        let record = self.record();
        let (sandbox, id) = record.names();
        let (first, bytes) = self.output.range();
        v1::Command {
            id: id.to_owned(),
            sandbox_id: sandbox.to_owned(),
            pid: record.inner_pid as u32,
            background: record.is_background,
            tty: record.is_terminal,
            started_unix_ns: record.started_unix_ns,
            ended_unix_ns: record.ended.as_ref().map_or(0, |ended| ended.unix_ns),
            ended: record.ended.as_ref().map(Ended::wire),
            output_bytes: bytes,
            first_kept_byte: first,
            argv: record.argv,
        }
    }
}

const ESRCH: i32 = 3;

/// Does something on a thread that may block.
async fn blocking(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let panicked = |error| Error::new(ErrorKind::Internal, "a signal panicked").with_source(error);
    tokio::task::spawn_blocking(work).await.map_err(panicked)?
}
