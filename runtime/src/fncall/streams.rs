//! The pipes of a call: what the command reads is written into one, what it prints is kept up to a bound.

use crate::stream::{End, until_readable};
use layer::{Context, Result};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;
use tokio::sync::watch;

/// Read at once: little at first, since most commands print little.
const FIRST_BUFFER_BYTES: usize = 4 << 10;
const BUFFER_BYTES: usize = 64 << 10;
/// Between two full reads of what nobody keeps: a command that prints without end costs its node little.
const BRAKE: Duration = Duration::from_millis(2);

/// What a command printed.
#[derive(Debug, Default)]
pub struct Collected {
    /// The first bytes.
    pub data: Vec<u8>,
    /// Bytes beyond the bound.
    pub truncated: u64,
}

/// A pipe that the command writes to: its end and ours.
pub fn output() -> Result<(OwnedFd, End)> {
    let (reader, writer) = io::pipe().context(|| "make a pipe".into())?;
    Ok((writer.into(), End::new(reader.into())?))
}

/// What the command reads: its end and, if there is anything to read, ours.
pub fn input(data: &[u8]) -> Result<(OwnedFd, Option<End>)> {
    if data.is_empty() {
        let null = std::fs::File::open("/dev/null").context(|| "open /dev/null".into())?;
        return Ok((null.into(), None));
    }
    let (reader, writer) = io::pipe().context(|| "make a pipe".into())?;
    Ok((reader.into(), Some(End::new(writer.into())?)))
}

/// Writes all, unless nobody reads any more, and closes.
pub async fn feed(to: End, data: Vec<u8>) {
    let _nobody_reads = to.write_all(&data).await;
}

/// Reads until nobody writes any more, or `ended` says that the command has and what was in the pipe then is
/// read: what it left running keeps nobody waiting.
pub async fn collect(from: End, limit: u64, mut ended: watch::Receiver<bool>) -> Collected {
    let mut collected = Collected::default();
    let mut buffer = vec![0; FIRST_BUFFER_BYTES];
    let mut rest = None;
    loop {
        if rest.is_none() && *ended.borrow_and_update() {
            rest = Some(sys::bytes_to_read(from.file().as_fd()).unwrap_or(0));
        }
        let room = rest.map_or(buffer.len() as u64, |rest| rest.min(buffer.len() as u64));
        if room == 0 {
            return collected;
        }
        match from.file().read(&mut buffer[..room as usize]) {
            Ok(0) => return collected,
            Ok(count) => {
                rest = rest.map(|rest| rest - count as u64);
                let left = limit.saturating_sub(collected.data.len() as u64);
                let kept = left.min(count as u64) as usize;
                collected.data.extend_from_slice(&buffer[..kept]);
                collected.truncated += (count - kept) as u64;
                if count == buffer.len() {
                    buffer.resize(BUFFER_BYTES, 0);
                    if kept == 0 {
                        tokio::time::sleep(BRAKE).await;
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if rest.is_some() {
                    return collected;
                }
                tokio::select! {
                    is_ready = until_readable(&from) => if !is_ready { return collected },
                    _ = ended.changed() => {}
                }
            }
            Err(_) => return collected,
        }
    }
}
