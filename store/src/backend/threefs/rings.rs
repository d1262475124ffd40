//! Reads of 3FS by USRBIO: rings, each used by one thread at a time, and the files that they know.
//!
//! A ring that failed is dropped with all idle ones and all open files, because a restart of the 3FS daemon
//! takes them all; the read is tried once more with new ones. If that fails too, rings rest for a while: who
//! reads meanwhile is not kept waiting for deadlines.
//!
//! Locking: one lock around idle rings and open files, never held over a read. A ring in use belongs to the
//! thread that uses it.

use super::Usrbio;
use crate::backend::open_files::OpenFiles;
use crate::key::Key;
use layer::{Error, ErrorKind, Result};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use sys::usrbio::{LIBRARY, Library, ReadRing, Registered, Shape};

/// One request asks for at most a 3FS read buffer; four keep several storage targets busy.
const SHAPE: Shape = Shape { slots: 4, slot_bytes: 1 << 20 };
/// Idle rings that are kept; each has 4 MiB of shared memory.
const MAX_IDLE: usize = 16;
/// What a read may take.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// How long rings rest after they failed twice.
const REST: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Rings {
    library: Arc<Library>,
    mount_point: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<ReadRing>,
    files: OpenFiles<Registered>,
    rests_until: Option<Instant>,
    /// Goes up when everything was dropped: rings from before are not kept.
    age: u64,
}

/// The library, and the mount point of the 3FS that `path` lies on.
pub(super) fn load(path: &Path, usrbio: &Usrbio) -> Result<(Arc<Library>, PathBuf)> {
    let file = match usrbio {
        Usrbio::Off => {
            return Err(Error::new(ErrorKind::Unsupported, "USRBIO is turned off"));
        }
        Usrbio::IfThere => Path::new(LIBRARY),
        Usrbio::Library(file) => file,
    };
    let missing = |error: io::Error| {
        Error::new(ErrorKind::Unsupported, "no reads by USRBIO").with_source(error)
    };
    let library = Library::load(file).map_err(missing)?;
    let mount_point = library.mount_point(path).map_err(missing)?;
    Ok((library, mount_point))
}

impl Rings {
    /// None when they are turned off; an error says why there can be none.
    pub(super) fn open(root: &Path, usrbio: &Usrbio) -> Result<Option<Self>> {
        if *usrbio == Usrbio::Off {
            return Ok(None);
        }
        let (library, mount_point) = load(root, usrbio)?;
        Ok(Some(Self { library, mount_point, state: Mutex::default() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn forget(&self, key: &Key) {
        self.state().files.forget(key);
    }

    /// Fills `into`. False when the mount has to do it: rings rest or failed, or the file seems to end
    /// early, which the mount knows best.
    pub(super) fn read(
        &self,
        key: &Key,
        open: impl Fn() -> Result<File>,
        offset: u64,
        into: &mut [u8],
    ) -> Result<bool> {
        if self.state().rests_until.is_some_and(|until| Instant::now() < until) {
            return Ok(false);
        }
        for last in [false, true] {
            let file = match self.registered(key, &open)? {
                Ok(file) => file,
                Err(error) => {
                    self.failed(key, &error, last);
                    continue;
                }
            };
            match self.read_once(&file, offset, into) {
                Ok(()) => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
                Err(error) => self.failed(key, &error, last),
            }
        }
        Ok(false)
    }

    fn read_once(&self, file: &Registered, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let (idle, age) = {
            let mut state = self.state();
            (state.idle.pop(), state.age)
        };
        let mut ring = match idle {
            Some(ring) => ring,
            None => self.library.read_ring(&self.mount_point, SHAPE)?,
        };
        let result = ring.read(file, offset, into, READ_TIMEOUT);
        let sound = matches!(&result, Ok(()))
            || matches!(&result, Err(error) if error.kind() == io::ErrorKind::UnexpectedEof);
        let mut state = self.state();
        if sound && state.age == age && state.idle.len() < MAX_IDLE {
            state.idle.push(ring);
        }
        result
    }

    /// The outer error is the file's, the inner one is USRBIO's.
    fn registered(
        &self,
        key: &Key,
        open: impl Fn() -> Result<File>,
    ) -> Result<io::Result<Arc<Registered>>> {
        if let Some(file) = self.state().files.get(key) {
            return Ok(Ok(file));
        }
        let registered = match self.library.register(open()?) {
            Ok(registered) => Arc::new(registered),
            Err(error) => return Ok(Err(error)),
        };
        self.state().files.put(key, &registered);
        Ok(Ok(registered))
    }

    fn failed(&self, key: &Key, error: &io::Error, last: bool) {
        let what = if last { "reading through the mount" } else { "trying with a new ring" };
        tracing::warn!("USRBIO at {}: {key}: {error}; {what}", self.mount_point.display());
        let mut state = self.state();
        state.age += 1;
        state.files.forget_all();
        if last {
            state.rests_until = Some(Instant::now() + REST);
        }
        let idle = std::mem::take(&mut state.idle);
        drop(state);
        // Their ends are calls of the library.
        drop(idle);
    }
}
