//! Byte streams between a command's pipes or terminal and whoever reads or feeds them.
//!
//! A pump ends when its source does, or when the command has ended and what it left in the source is read: a
//! background child that still holds the pipe keeps nobody waiting, and no byte written before the end is
//! lost. A reader that does not read stops the command it reads from, and nothing else.

use crate::exec::Output;
use crate::zygote::watch as watch_fd;
use bytes::Bytes;
use layer::{Context, Result};
use proto::v1::{ExecOutput, exec_output::Output as Out};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, watch};

/// A non-blocking end of a pipe, or the outer end of a terminal.
#[derive(Debug)]
pub struct End(AsyncFd<File>);

impl End {
    /// Takes over a descriptor.
    pub fn new(fd: OwnedFd) -> Result<Self> {
        sys::process::set_nonblocking(fd.as_fd()).context(|| "set up a stream".into())?;
        watch_fd(File::from(fd)).map(Self).context(|| "watch a stream".into())
    }

    /// The same open file again.
    pub fn try_clone(&self) -> Result<Self> {
        let copy = self.0.get_ref().try_clone().context(|| "copy a stream".into())?;
        watch_fd(copy).map(Self).context(|| "watch a stream".into())
    }

    /// For settings of a terminal.
    pub fn file(&self) -> &File {
        self.0.get_ref()
    }

    /// Writes all of it; false when nobody reads any more.
    pub async fn write_all(&self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let wrote =
                self.0.async_io(tokio::io::Interest::WRITABLE, |mut file| file.write(bytes));
            match wrote.await {
                Ok(count) if count > 0 => bytes = &bytes[count..],
                _ => return false,
            }
        }
        true
    }
}

/// Where output goes.
#[derive(Debug, Clone)]
pub struct Sink {
    /// What is kept of it.
    output: Arc<Output>,
    /// Bounded: a slow client slows its command.
    client: Option<mpsc::Sender<ExecOutput>>,
    /// Bytes that both streams may still take.
    left: Arc<AtomicU64>,
    /// Bytes beyond that.
    truncated: Arc<AtomicU64>,
}

/// Output that is read for nobody who could slow it: so many bytes a second, so that a command that prints
/// without end costs its node little.
const UNHEARD_BYTES_PER_S: u64 = 32 << 20;
/// Bytes that may come at once without being slowed.
const UNHEARD_BURST: u64 = 8 << 20;
/// Larger pieces are written where waiting for a disk holds nobody up.
const INLINE_WRITE: usize = 8 << 10;

impl Sink {
    /// `limit`: the most bytes that are kept or sent.
    pub fn new(output: Arc<Output>, client: Option<mpsc::Sender<ExecOutput>>, limit: u64) -> Self {
        Self { output, client, left: Arc::new(AtomicU64::new(limit)), truncated: Arc::default() }
    }

    /// Bytes beyond the limit so far.
    pub fn truncated(&self) -> u64 {
        self.truncated.load(Ordering::Relaxed)
    }

    /// The same without a client.
    pub fn kept_only(&self) -> Self {
        Self { client: None, ..self.clone() }
    }

    /// Whether a client paced it.
    async fn push(&mut self, is_error: bool, data: &[u8]) -> bool {
        let wanted = data.len() as u64;
        let take = |left: u64| Some(left.saturating_sub(wanted));
        let before = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        let allowed = before.unwrap_or(0).min(wanted);
        if allowed < wanted {
            self.truncated.fetch_add(wanted - allowed, Ordering::Relaxed);
        }
        if allowed == 0 {
            return false;
        }
        let data = &data[..allowed as usize];
        if data.len() <= INLINE_WRITE {
            self.output.add(is_error, data);
        } else {
            let (output, copy) = (Arc::clone(&self.output), Bytes::copy_from_slice(data));
            let kept = tokio::task::spawn_blocking(move || output.add(is_error, &copy)).await;
            if let Err(error) = kept {
                tracing::error!(%error, "keeping output panicked");
            }
        }
        let Some(client) = &self.client else { return false };
        let message =
            if is_error { Out::Stderr(data.to_vec()) } else { Out::Stdout(data.to_vec()) };
        if client.send(ExecOutput { output: Some(message) }).await.is_err() {
            // Whether the command goes on without its client is decided elsewhere.
            self.client = None;
        }
        true
    }
}

/// Slows what nobody else slows.
#[derive(Debug)]
struct Brake {
    burst: u64,
}

impl Brake {
    async fn passed(&mut self, bytes: usize) {
        let bytes = bytes as u64;
        if self.burst >= bytes {
            self.burst -= bytes;
            return;
        }
        let wait = bytes.saturating_mul(1_000_000) / UNHEARD_BYTES_PER_S;
        tokio::time::sleep(Duration::from_micros(wait)).await;
    }
}

/// Read at once: little at first, since most commands print little, and more after a full read.
const FIRST_BUFFER_BYTES: usize = 4 << 10;
const BUFFER_BYTES: usize = 64 << 10;
/// How long the output of a terminal may take from the command to us.
const TERMINAL_GRACE: Duration = Duration::from_millis(100);
/// The most bytes that a terminal holds.
const TERMINAL_BYTES: u64 = 1 << 20;

/// Moves output from `source` to `sink` until the source ends, or `ended` says that the command has and what
/// was in the source then is moved. Answers the source if somebody still holds its other end.
pub async fn pump(
    source: End,
    is_error: bool,
    mut sink: Sink,
    is_terminal: bool,
    mut ended: watch::Receiver<bool>,
) -> Option<End> {
    let mut buffer = vec![0; FIRST_BUFFER_BYTES];
    let mut brake = Brake { burst: UNHEARD_BURST };
    // What is left to read, once the command has ended.
    let mut rest = None;
    loop {
        if rest.is_none() && *ended.borrow_and_update() {
            let in_pipe = || sys::bytes_to_read(source.file().as_fd()).unwrap_or(0);
            rest = Some(if is_terminal { TERMINAL_BYTES } else { in_pipe() });
        }
        let room = rest.map_or(buffer.len() as u64, |rest| rest.min(buffer.len() as u64));
        if room == 0 {
            return Some(source);
        }
        match source.file().read(&mut buffer[..room as usize]) {
            Ok(0) => return None,
            Ok(count) => {
                if let Some(rest) = &mut rest {
                    *rest -= count as u64;
                }
                if !sink.push(is_error, &buffer[..count]).await {
                    brake.passed(count).await;
                }
                if count == buffer.len() {
                    buffer.resize(BUFFER_BYTES, 0);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if rest.is_some() {
                    if !is_terminal || !becomes_readable(&source, TERMINAL_GRACE).await {
                        return Some(source);
                    }
                    continue;
                }
                tokio::select! {
                    is_ready = until_readable(&source) => if !is_ready { return None },
                    _ = ended.changed() => {}
                }
            }
            // A terminal whose inner ends are all closed answers EIO.
            Err(_) => return None,
        }
    }
}

/// Waits until something is there; false when it never will be.
pub async fn until_readable(source: &End) -> bool {
    loop {
        let Ok(mut guard) = source.0.readable().await else { return false };
        // Forgets the readiness unless there is something now, or the end.
        match sys::wait_readable(source.file().as_fd(), Some(Duration::ZERO)) {
            Ok(true) => return true,
            Ok(false) => guard.clear_ready(),
            Err(_) => return false,
        }
    }
}

async fn becomes_readable(source: &End, within: Duration) -> bool {
    tokio::time::timeout(within, until_readable(source)).await.unwrap_or(false)
}

/// Goes on reading what the children of an ended command print, so that they neither wait nor break; until
/// nobody holds the other end, or `is_held` says so. It goes to `sink` if there is one.
pub async fn drain(
    source: End,
    is_error: bool,
    mut sink: Option<Sink>,
    is_held: impl Fn() -> bool + Send,
) {
    const LOOK: Duration = Duration::from_secs(5);
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut brake = Brake { burst: UNHEARD_BURST };
    loop {
        match source.file().read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => {
                if let Some(sink) = &mut sink {
                    sink.push(is_error, &buffer[..count]).await;
                }
                brake.passed(count).await;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !becomes_readable(&source, LOOK).await && !is_held() {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}
