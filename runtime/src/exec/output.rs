//! What a command printed: kept in files outside of the sandbox up to a bound, the oldest goes first, what went
//! is counted. Readers begin anywhere, and each is as slow as it likes.
//!
//! The files of one command are segments, named by the offset of their first byte (both streams counted
//! together). A segment is a row of frames: a byte for the stream, four for the length, the bytes.
//! Between two segments there may be a gap: what could not be written because the disk was full.
//!
//! Locking: one mutex over the list of segments, held for one write. CRASH: a frame is one write into the page
//! cache, so that it outlives this process; a torn tail is cut off at the next start.

use bytes::Bytes;
use layer::{Context, Result};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

const FRAME_HEADER: usize = 5;
/// The most bytes in one frame.
const MAX_FRAME_BYTES: usize = 64 << 10;
/// The bytes kept of a command are in so many segments.
const SEGMENTS: u64 = 4;
/// The least bytes of a segment.
const MIN_SEGMENT_BYTES: u64 = 256 << 10;

/// Bytes of all commands of one sandbox that are kept; beyond it each keeps its last segment only.
pub const MAX_SANDBOX_BYTES: u64 = 64 << 20;

#[derive(Debug, Clone)]
struct Segment {
    /// Offset of its first byte.
    start: u64,
    /// Offset after its last byte.
    end: u64,
    /// Length of the file.
    file_bytes: u64,
}

#[derive(Debug, Default)]
struct State {
    segments: VecDeque<Segment>,
    /// The last segment, open for writing.
    file: Option<Arc<File>>,
    /// Bytes ever printed.
    end: u64,
    /// The next frame begins a segment.
    has_gap: bool,
    is_removed: bool,
}

/// The output of one command.
#[derive(Debug)]
pub struct Output {
    /// Name of the segments without their offsets.
    prefix: PathBuf,
    segment_bytes: u64,
    /// Bytes on disk of all commands of the sandbox.
    shared: Arc<AtomicU64>,
    state: Mutex<State>,
    /// Bytes ever printed.
    progress: watch::Sender<u64>,
}

/// What a reader gets.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece {
    /// Some output; true for the error stream.
    Data(bool, Bytes),
    /// This many bytes are not kept any more.
    Dropped(u64),
}

impl Output {
    /// Nothing printed yet. `shared` counts for all commands of the sandbox.
    pub fn new(prefix: PathBuf, kept_bytes: u64, shared: Arc<AtomicU64>) -> Self {
        let segment_bytes = (kept_bytes / SEGMENTS).max(MIN_SEGMENT_BYTES);
        let (state, progress) = (Mutex::default(), watch::channel(0).0);
        Self { prefix, segment_bytes, shared, state, progress }
    }

    /// What an earlier runtime wrote. `starts`: the offsets of its segments.
    pub fn reopen(
        prefix: PathBuf,
        kept_bytes: u64,
        shared: Arc<AtomicU64>,
        mut starts: Vec<u64>,
    ) -> Self {
        let output = Self::new(prefix, kept_bytes, shared);
        starts.sort_unstable();
        let mut state = output.lock();
        for start in starts {
            match measure(&output.path(start)) {
                Ok((bytes, file_bytes)) => {
                    output.shared.fetch_add(file_bytes, Ordering::Relaxed);
                    let end = start + bytes;
                    state.segments.push_back(Segment { start, end, file_bytes });
                    state.end = end;
                }
                Err(error) => tracing::warn!(%error, "a piece of output cannot be read"),
            }
        }
        state.has_gap = true;
        let end = state.end;
        drop(state);
        output.progress.send_replace(end);
        output
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, start: u64) -> PathBuf {
        let mut name = self.prefix.clone().into_os_string();
        name.push(format!("-{start:016x}"));
        name.into()
    }

    /// Adds output. Blocks for the disk, if it must. What cannot be written is counted.
    pub fn add(&self, is_error: bool, data: &[u8]) {
        let mut state = self.lock();
        for frame in data.chunks(MAX_FRAME_BYTES) {
            if state.is_removed {
                break;
            }
            if let Err(error) = self.write(&mut state, is_error, frame) {
                tracing::debug!(%error, "output is not kept");
                state.has_gap = true;
            }
            state.end += frame.len() as u64;
        }
        let end = state.end;
        drop(state);
        self.progress.send_replace(end);
    }

    fn write(&self, state: &mut State, is_error: bool, frame: &[u8]) -> io::Result<()> {
        let is_full = |last: &Segment| last.file_bytes >= self.segment_bytes;
        if state.has_gap || state.file.is_none() || state.segments.back().is_none_or(is_full) {
            self.begin_segment(state)?;
        }
        let (Some(file), Some(last)) = (state.file.clone(), state.segments.back_mut()) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let mut bytes = Vec::with_capacity(FRAME_HEADER + frame.len());
        bytes.push(u8::from(is_error));
        bytes.extend((frame.len() as u32).to_le_bytes());
        bytes.extend(frame);
        if let Err(error) = (&*file).write_all(&bytes) {
            // Half a frame would spoil what comes after it.
            file.set_len(last.file_bytes)?;
            return Err(error);
        }
        last.file_bytes += bytes.len() as u64;
        last.end += frame.len() as u64;
        self.shared.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn begin_segment(&self, state: &mut State) -> io::Result<()> {
        // At the bound of the sandbox every command keeps what it is about to begin, and nothing else.
        let is_crowded = self.shared.load(Ordering::Relaxed) > MAX_SANDBOX_BYTES;
        let kept = if is_crowded { 0 } else { SEGMENTS as usize - 1 };
        while state.segments.len() > kept
            && let Some(oldest) = state.segments.pop_front()
        {
            self.remove_segment(&oldest);
        }
        let start = state.end;
        let path = self.path(start);
        let file = File::options().append(true).create(true).open(&path)?;
        file.set_len(0)?;
        // One with the same start was empty.
        state.segments.retain(|segment| segment.start != start);
        state.segments.push_back(Segment { start, end: start, file_bytes: 0 });
        state.file = Some(Arc::new(file));
        state.has_gap = false;
        Ok(())
    }

    fn remove_segment(&self, segment: &Segment) {
        self.shared.fetch_sub(segment.file_bytes, Ordering::Relaxed);
        // Whoever reads it has it open.
        let _next_start_removes_it = std::fs::remove_file(self.path(segment.start));
    }

    /// Closes the open file; the next write begins a new one.
    pub fn rest(&self) {
        self.lock().file = None;
    }

    /// Removes all of it; what is added later is dropped.
    pub fn remove(&self) {
        let mut state = self.lock();
        state.is_removed = true;
        state.file = None;
        while let Some(segment) = state.segments.pop_front() {
            self.remove_segment(&segment);
        }
        drop(state);
        self.progress.send_modify(|_| {});
    }

    /// Offset of the first byte that is kept, and the number of bytes ever printed.
    pub fn range(&self) -> (u64, u64) {
        let state = self.lock();
        (state.segments.front().map_or(state.end, |segment| segment.start), state.end)
    }

    /// Changes with every output.
    pub fn progress(&self) -> watch::Receiver<u64> {
        self.progress.subscribe()
    }

    /// A reader at an offset.
    pub fn reader(self: &Arc<Self>, offset: u64) -> Reader {
        Reader { output: Arc::clone(self), offset, segment: None }
    }
}

/// Reads output from an offset on.
#[derive(Debug)]
pub struct Reader {
    output: Arc<Output>,
    offset: u64,
    /// Start of the segment at hand, its file, the place in the file, and the offset that is there.
    segment: Option<(u64, File, u64, u64)>,
}

impl Reader {
    /// What is there now. `None`: nothing more at present. Blocks for the disk, if it must.
    pub fn now(&mut self) -> Option<Piece> {
        loop {
            let (found, end) = {
                let state = self.output.lock();
                let at = |segment: &&Segment| segment.end > self.offset;
                (state.segments.iter().find(at).cloned(), state.end)
            };
            let Some(segment) = found.filter(|segment| segment.start < end) else {
                let missed = end.saturating_sub(self.offset);
                self.offset = end.max(self.offset);
                return (missed > 0).then_some(Piece::Dropped(missed));
            };
            if segment.start > self.offset {
                let missed = segment.start - self.offset;
                self.offset = segment.start;
                return Some(Piece::Dropped(missed));
            }
            match self.read(&segment) {
                Ok(Some(piece)) => return Some(piece),
                Ok(None) => {}
                Err(error) => {
                    // It went meanwhile, or the disk is broken: then it is as good as gone.
                    let is_gone = error.kind() == io::ErrorKind::NotFound;
                    self.segment = None;
                    if !is_gone {
                        tracing::warn!(%error, "output cannot be read");
                        let missed = segment.end - self.offset;
                        self.offset = segment.end;
                        return Some(Piece::Dropped(missed));
                    }
                    let state = self.output.lock();
                    if state.segments.iter().any(|known| known.start == segment.start) {
                        // Listed and not there: somebody removed it by hand.
                        drop(state);
                        let missed = segment.end - self.offset;
                        self.offset = segment.end;
                        return Some(Piece::Dropped(missed));
                    }
                }
            }
        }
    }

    /// One frame, or what is left of it. `None`: it lies before the offset.
    fn read(&mut self, segment: &Segment) -> io::Result<Option<Piece>> {
        if self.segment.as_ref().is_none_or(|(start, ..)| *start != segment.start) {
            let file = File::open(self.output.path(segment.start))?;
            self.segment = Some((segment.start, file, 0, segment.start));
        }
        let Some((_, file, place, at)) = &mut self.segment else { return Ok(None) };
        let mut header = [0; FRAME_HEADER];
        file.read_exact_at(&mut header, *place)?;
        let (is_error, length) = decode(&header)?;
        let (begin, end) = (*at, *at + length as u64);
        let skipped = self.offset.saturating_sub(begin).min(length as u64);
        let data_place = *place + FRAME_HEADER as u64 + skipped;
        *place += (FRAME_HEADER + length) as u64;
        *at = end;
        if self.offset >= end {
            return Ok(None);
        }
        let mut data = vec![0; length - skipped as usize];
        file.read_exact_at(&mut data, data_place)?;
        self.offset = end;
        Ok(Some(Piece::Data(is_error, data.into())))
    }
}

fn decode(header: &[u8; FRAME_HEADER]) -> io::Result<(bool, usize)> {
    let [stream, length @ ..] = *header;
    let length = u32::from_le_bytes(length) as usize;
    if stream > 1 || length == 0 || length > MAX_FRAME_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok((stream == 1, length))
}

/// Bytes of output in a segment and the length of its file, whose torn tail is cut off.
fn measure(path: &Path) -> Result<(u64, u64)> {
    let context = || format!("read {}", path.display());
    let file = File::options().read(true).write(true).open(path).context(context)?;
    let whole = file.metadata().context(context)?.len();
    let (mut bytes, mut length) = (0, 0);
    let mut reader = io::BufReader::new(&file);
    let mut header = [0; FRAME_HEADER];
    while reader.read_exact(&mut header).is_ok() {
        let Ok((_, frame)) = decode(&header) else { break };
        let next = length + (FRAME_HEADER + frame) as u64;
        if next > whole || reader.seek_relative(frame as i64).is_err() {
            break;
        }
        bytes += frame as u64;
        length = next;
    }
    if length < whole {
        file.set_len(length).context(context)?;
    }
    Ok((bytes, length))
}

#[cfg(test)]
mod tests;
