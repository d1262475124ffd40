//! The writer: one thread that takes what others left for it, gives each event its number, and writes.
//!
//! Whoever reports an event puts a line into a bounded buffer under a mutex and goes on: no disk is waited for.
//! When the buffer is full the event is counted, and a `dropped` event tells how many. The same when the disk
//! is full: what was to be written is counted, and told as soon as there is room.
//!
//! Durable: events are on the disk's way at once (they survive a killed node), and flushed every five seconds, when a
//! file is full and when the node ends; a power cut takes the last five seconds at most.
//!
//! CRASH: a killed writer leaves whole lines and perhaps a part of one, which the next start cuts off
//! ([`super::files::open`]).

use super::files::{self, Current, Rotation};
use super::record::{What, encode};
use layer::{Context, Error, Result};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Bytes of events that wait for the writer.
const MAX_WAITING_BYTES: usize = 8 << 20;
/// Between two flushes.
const FLUSH_EVERY: Duration = Duration::from_secs(5);
/// Between two tries on a disk that refuses.
const RETRY: Duration = Duration::from_millis(500);

/// What waits to be written.
#[derive(Debug, Default)]
struct Waiting {
    /// Lines without number; see [`encode`].
    lines: Vec<u8>,
    /// Events that had no room in here.
    dropped: u64,
    /// Events that were ever left here.
    count: u64,
    is_closing: bool,
}

/// How far the writer is.
#[derive(Debug, Clone, Copy, Default)]
pub struct Written {
    /// The number of the last event that is written: readers may see it and all before.
    pub last: u64,
    /// Events that were taken from the inbox, and are written or counted as lost.
    pub taken: u64,
}

/// Where events are left.
#[derive(Debug)]
pub struct Inbox {
    waiting: Mutex<Waiting>,
    news: Condvar,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves an event; false when it had no room and was counted.
    pub fn put(&self, line: &[u8]) -> bool {
        let mut waiting = self.lock();
        let fits = waiting.lines.len() + line.len() <= MAX_WAITING_BYTES && !waiting.is_closing;
        if fits {
            waiting.lines.extend_from_slice(line);
            waiting.count += 1;
        } else {
            waiting.dropped += 1;
        }
        drop(waiting);
        self.news.notify_one();
        fits
    }

    /// Events that were ever left here.
    pub fn count(&self) -> u64 {
        self.lock().count
    }

    /// Takes all that waits; sleeps until there is something, until it closes, or for so long.
    fn take(&self, patience: Option<Duration>) -> Waiting {
        let mut waiting = self.lock();
        let is_idle = |waiting: &mut Waiting| {
            waiting.lines.is_empty() && waiting.dropped == 0 && !waiting.is_closing
        };
        waiting = match patience {
            None => self.news.wait_while(waiting, is_idle).unwrap_or_else(PoisonError::into_inner),
            Some(patience) => {
                self.news
                    .wait_timeout_while(waiting, patience, is_idle)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            }
        };
        let Waiting { count, is_closing, .. } = *waiting;
        std::mem::replace(&mut waiting, Waiting { count, is_closing, ..Waiting::default() })
    }
}

/// The writer's end of a log.
#[derive(Debug)]
pub struct Writer {
    inbox: Arc<Inbox>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Writer {
    /// Starts it on a folder. Answers it, where events are left, and how far it is.
    pub fn start(
        folder: PathBuf,
        rotation: Rotation,
    ) -> Result<(Self, Arc<Inbox>, watch::Receiver<Written>)> {
        let current = files::open(&folder)?;
        let inbox = Arc::new(Inbox { waiting: Mutex::default(), news: Condvar::new() });
        let (written, progress) = watch::channel(Written { last: current.next - 1, taken: 0 });
        let work = Work {
            inbox: Arc::clone(&inbox),
            written,
            folder,
            rotation,
            current,
            is_torn: false,
            unflushed_since: None,
            lost: 0,
            full: 0,
        };
        let thread = std::thread::Builder::new().name("events".to_owned());
        let thread = thread.spawn(|| work.run()).context(|| "start the writer of events".into())?;
        Ok((Self { inbox: Arc::clone(&inbox), thread: Mutex::new(Some(thread)) }, inbox, progress))
    }

    /// Writes what waits, flushes, and ends. What is reported later is lost.
    pub fn close(&self) {
        self.inbox.lock().is_closing = true;
        self.inbox.news.notify_one();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the writer of events panicked");
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.close();
    }
}

struct Work {
    inbox: Arc<Inbox>,
    written: watch::Sender<Written>,
    folder: PathBuf,
    rotation: Rotation,
    current: Current,
    /// The end of the file is half a batch.
    is_torn: bool,
    unflushed_since: Option<Instant>,
    /// Events that a disk refused, not told yet.
    lost: u64,
    /// Events that found the buffer full, not told yet.
    full: u64,
}

impl Work {
    fn run(mut self) {
        loop {
            let to_flush = self.unflushed_since.map(|since| {
                FLUSH_EVERY.saturating_sub(since.elapsed()).max(Duration::from_millis(1))
            });
            let patience = if self.lost + self.full > 0 { Some(RETRY) } else { to_flush };
            let taken = self.inbox.take(patience);
            self.full += taken.dropped;
            let batch = self.batch(&taken.lines);
            if let Err(error) = self.write(&batch) {
                if self.lost == 0 {
                    tracing::error!(error = %error.chain(), "events are lost until there is room");
                }
                self.lost += count(&taken.lines);
            }
            self.tell(count(&taken.lines));
            if self.current.bytes >= self.rotation.file_bytes
                && let Err(error) = self.rotate()
            {
                tracing::error!(error = %error.chain(), "go on in another file of events");
            }
            let is_due = self.unflushed_since.is_some_and(|since| since.elapsed() >= FLUSH_EVERY);
            if is_due || taken.is_closing {
                self.flush();
            }
            if taken.is_closing {
                return;
            }
        }
    }

    /// What is missing first, then what was taken, each with its number.
    fn batch(&self, lines: &[u8]) -> Batch {
        let mut batch = Batch { bytes: Vec::new(), next: self.current.next };
        for (count, reason) in [(self.lost, "disk"), (self.full, "buffer")] {
            if count > 0 {
                batch.event(&What::Dropped { count, reason });
            }
        }
        for line in lines.split_inclusive(|byte| *byte == b'\n') {
            batch.line(line);
        }
        batch
    }

    /// All of it or nothing.
    fn write(&mut self, batch: &Batch) -> Result<()> {
        if batch.bytes.is_empty() {
            return Ok(());
        }
        if self.is_torn {
            // Half a batch would be read as all of it.
            self.current.file.set_len(self.current.bytes).context(|| "cut events".into())?;
            self.is_torn = false;
        }
        if let Err(error) = self.current.file.write_all(&batch.bytes) {
            self.is_torn = true;
            return Err(Error::io("write events", error));
        }
        self.current.bytes += batch.bytes.len() as u64;
        self.current.next = batch.next;
        (self.lost, self.full) = (0, 0);
        self.unflushed_since.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Tells readers how far it is.
    fn tell(&self, taken: u64) {
        self.written.send_modify(|written| {
            written.last = self.current.next - 1;
            written.taken += taken;
        });
    }

    /// Goes on in a new file, and lets go of the oldest.
    fn rotate(&mut self) -> Result<()> {
        self.flush();
        self.current = files::begin(&self.folder, self.current.next)?;
        let Some(through) = files::expire(&self.folder, self.rotation.files)? else {
            return Ok(());
        };
        let mut batch = Batch { bytes: Vec::new(), next: self.current.next };
        batch.event(&What::Expired { through });
        self.write(&batch)?;
        self.tell(0);
        Ok(())
    }

    fn flush(&mut self) {
        if self.unflushed_since.take().is_none() {
            return;
        }
        if let Err(error) = File::sync_data(&self.current.file) {
            tracing::error!(%error, "flush events");
        }
    }
}

fn count(lines: &[u8]) -> u64 {
    lines.iter().filter(|byte| **byte == b'\n').count() as u64
}

struct Batch {
    bytes: Vec<u8>,
    next: u64,
}

impl Batch {
    fn line(&mut self, line: &[u8]) {
        // Writing to a vector cannot fail.
        let _ = write!(self.bytes, "{{\"seq\":{},", self.next);
        self.bytes.extend_from_slice(line);
        self.next += 1;
    }

    fn event(&mut self, what: &What) {
        let mut line = Vec::new();
        if let Err(error) = encode(super::now_unix_ns(), "", what, &mut line) {
            tracing::error!(error = %error.chain(), "an event is lost");
            return;
        }
        self.line(&line);
    }
}
