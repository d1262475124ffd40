//! The least that a filled page costs on this kernel: a minimal program that answers pre-content events.
//!
//! A file lies in an EROFS image whose data device is a sparse file; a thread copies what is asked for, and
//! no more, from a full copy into it and lets the reader go on. No store, no chunks, no digests, no journal.
//!
//! Not for anything but being measured: when the thread dies, readers get the zeros of the sparse file.

use crate::shell;
use anyhow::Context;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use sys::fanotify::{EVENT_BYTES, Event, Group, Taken};
use sys::memory::SharedMapping;
use sys::mount::{Attributes, Erofs, Unmount};

/// The most that one event is answered with at once.
const ROOM: usize = 8 << 20;

/// What the probe serves: a metadata image, and the data that belongs beside it.
#[derive(Debug)]
pub struct Served {
    metadata: PathBuf,
    full: PathBuf,
    sparse: PathBuf,
}

impl Served {
    /// Splits a tree into metadata below `disk` and data below `memory`. The data must not repeat itself.
    pub fn make(tree: &Path, disk: &Path, memory: &Path) -> anyhow::Result<Self> {
        let metadata = disk.join("probe.erofs");
        let (full, sparse) = (memory.join("probe.data"), disk.join("probe.sparse"));
        let device = format!("--blobdev={}", shell::text(&full)?);
        let words = ["mkfs.erofs", "--quiet", "--chunksize=4096", &device];
        shell::run(&[&words[..], &[shell::text(&metadata)?, shell::text(tree)?]].concat())?;
        Ok(Self { metadata, full, sparse })
    }
}

/// The probe at work: its mount, and the thread that answers.
#[derive(Debug)]
pub struct Probe {
    at: PathBuf,
    sparse: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Probe {
    /// Starts to serve with nothing filled, mounted at `at`.
    pub fn start(served: &Served, at: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(at)?;
        let full = File::open(&served.full)?;
        let sparse = File::create(&served.sparse)?;
        sparse.set_len(full.metadata()?.len())?;
        let group = Group::new().context("make a fanotify group")?;
        group.mark(std::os::fd::AsFd::as_fd(&sparse)).context("mark the sparse file")?;
        drop(sparse);
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let thread = std::thread::spawn(move || answer(&group, &full, &stopping));
        let probe = Self {
            at: at.to_path_buf(),
            sparse: served.sparse.clone(),
            stop,
            thread: Some(thread),
        };
        let image = Erofs { metadata: &served.metadata, device: Some(&served.sparse) };
        image.mount_detached(Attributes::LAYER).context("mount the probe")?.attach(at)?;
        Ok(probe)
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.at
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // A mount that did not come about, or is gone already, is as well.
        let _ = sys::mount::unmount(&self.at, Unmount::Lazy);
        self.stop.store(true, Ordering::Release);
        // The thread waits for an event: any read of the marked file is one, filled or not.
        if let Ok(file) = File::open(&self.sparse) {
            let _ = file.read_at(&mut [0], 0);
        }
        if let Some(Ok(Err(error))) = self.thread.take().map(JoinHandle::join) {
            shell::say(format!("the probe failed: {error:#}"));
        }
    }
}

fn answer(group: &Group, full: &File, stop: &AtomicBool) -> anyhow::Result<()> {
    let slot = SharedMapping::create("bench-probe", 4096)?;
    let mut buffer = vec![0; ROOM];
    while !stop.load(Ordering::Acquire) {
        if let Taken::Event(event) = group.read_into(slot.region(0, EVENT_BYTES)?)? {
            fill(&event, full, &mut buffer)?;
            event.allow()?;
        }
    }
    Ok(())
}

/// Copies the pages of an event's range.
fn fill(event: &Event, full: &File, buffer: &mut [u8]) -> anyhow::Result<()> {
    let start = event.offset() & !4095;
    let end = (event.offset() + event.count()).next_multiple_of(4096);
    let bytes = usize::try_from(end - start)?.min(buffer.len());
    let count = full.read_at(&mut buffer[..bytes], start)?;
    rustix::io::pwrite(event.file(), &buffer[..count], start)?;
    Ok(())
}
