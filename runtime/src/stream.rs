//! Byte streams between a command's pipes or terminal and whoever reads or feeds them.
//!
//! A pump ends when its source does, or when the command has ended and nothing is left in the source: a
//! background child that still holds the pipe keeps nobody waiting, and no byte written before the end is
//! lost. A reader that does not read stops the command it reads from, and nothing else.

use crate::logs::Log;
use crate::zygote::watch as watch_fd;
use bytes::Bytes;
use layer::{Context, Result};
use proto::v1::{ExecOutput, exec_output::Output};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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
pub enum Sink {
    /// To a client, up to a number of bytes that both streams share.
    Client {
        /// Bounded: a slow client slows its command.
        outputs: mpsc::Sender<ExecOutput>,
        /// Bytes that may still be sent.
        left: Arc<AtomicU64>,
        /// Bytes that were not sent.
        truncated: Arc<AtomicU64>,
    },
    /// To the log of a sandbox.
    Log(Arc<Log>),
}

impl Sink {
    /// False when nobody wants more.
    async fn push(&self, is_error: bool, data: &[u8]) -> bool {
        match self {
            Self::Log(log) => {
                log.add(is_error, Bytes::copy_from_slice(data));
                true
            }
            Self::Client { outputs, left, truncated } => {
                let wanted = data.len() as u64;
                let take = |left: u64| Some(left.saturating_sub(wanted));
                let before = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
                let allowed = before.unwrap_or(0).min(wanted);
                if allowed < wanted {
                    truncated.fetch_add(wanted - allowed, Ordering::Relaxed);
                }
                if allowed == 0 {
                    return !outputs.is_closed();
                }
                let data = data[..allowed as usize].to_vec();
                let output = if is_error { Output::Stderr(data) } else { Output::Stdout(data) };
                outputs.send(ExecOutput { output: Some(output) }).await.is_ok()
            }
        }
    }
}

/// Read at once: little at first, since most commands print little, and more after a full read.
const FIRST_BUFFER_BYTES: usize = 4 << 10;
const BUFFER_BYTES: usize = 64 << 10;

/// Moves everything from `source` to `sink`; see the module. `ended` tells of the command's end.
pub async fn pump(source: End, is_error: bool, sink: Sink, mut ended: watch::Receiver<bool>) {
    let mut buffer = vec![0; FIRST_BUFFER_BYTES];
    loop {
        // Asked before the read: what was written before the end is in the source by then.
        let has_ended = *ended.borrow();
        match source.0.get_ref().read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => {
                if !sink.push(is_error, &buffer[..count]).await {
                    return;
                }
                if count == buffer.len() {
                    buffer.resize(BUFFER_BYTES, 0);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if has_ended {
                    return;
                }
                tokio::select! {
                    ready = source.0.readable() => match ready {
                        Ok(mut guard) => {
                            // Forgets the readiness unless there is something now.
                            let empty = |file: &AsyncFd<File>| match file.get_ref().read(&mut buffer) {
                                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(error),
                                read => Ok(read),
                            };
                            match guard.try_io(empty) {
                                Ok(Ok(Ok(count))) if count > 0 => {
                                    if !sink.push(is_error, &buffer[..count]).await {
                                        return;
                                    }
                                }
                                Ok(_) => return,
                                Err(_would_block) => {}
                            }
                        }
                        Err(_) => return,
                    },
                    _ = ended.changed() => {}
                }
            }
            // A terminal whose inner ends are all closed answers EIO.
            Err(_) => return,
        }
    }
}
