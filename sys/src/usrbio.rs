//! USRBIO, the ring interface of 3FS, by its library when the host has it.
//!
//! `libhf3fs_api_shared.so` is loaded at run time: nothing of ours needs it to start. Only reading is here.
//! The interface is that of `hf3fs_usrbio.h` (deepseek-ai/3FS, `src/lib/api`).
//!
//! A [`ReadRing`] serves one thread at a time, which `&mut` sees to. When a read left requests behind (its
//! deadline passed, the 3FS daemon was restarted), the ring is broken for good: it refuses further reads,
//! and its owner makes another.

mod abi;

use self::abi::{Calls, Cqe, FORBID_READ_HOLES, Ior, Iov};
use std::collections::VecDeque;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The name by which the loader finds the library.
pub const LIBRARY: &str = "libhf3fs_api_shared.so";
/// The longest mount point, as the interface has room for no longer one.
const MAX_MOUNT_POINT_BYTES: usize = 256;
/// Memory near whichever processor asks.
const ANY_NODE: i32 = -1;
/// Requests are begun as soon as they are seen.
const AT_ONCE: i32 = 0;

/// The loaded library. It stays loaded for as long as anything of it is used.
pub struct Library {
    calls: Calls,
    path: PathBuf,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Library({})", self.path.display())
    }
}

impl Library {
    /// Loads the library from a path, or, by a bare name, from where the loader looks. `NotFound` when it is
    /// not there or lacks a function; the text says which.
    pub fn load(path: &Path) -> io::Result<Arc<Self>> {
        let calls = Calls::load(path).map_err(|error| {
            io::Error::new(io::ErrorKind::NotFound, format!("{}: {error}", path.display()))
        })?;
        Ok(Arc::new(Self { calls, path: path.to_owned() }))
    }

    /// The mount point of the 3FS that a path lies on; `Unsupported` when it lies on none.
    pub fn mount_point(&self, path: &Path) -> io::Result<PathBuf> {
        let path = c_path(path)?;
        let mut point = [0_u8; MAX_MOUNT_POINT_BYTES];
        // SAFETY: the buffer has the length that is passed, and the path ends with a zero.
        let length = unsafe {
            (self.calls.extract_mount_point)(
                point.as_mut_ptr().cast(),
                MAX_MOUNT_POINT_BYTES as i32,
                path.as_ptr(),
            )
        };
        let length =
            usize::try_from(length).ok().filter(|length| (2..=point.len()).contains(length));
        let Some(length) = length else {
            let text = format!("{} does not lie on a 3FS", path.to_string_lossy());
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        };
        Ok(PathBuf::from(std::ffi::OsStr::from_bytes(&point[..length - 1])))
    }

    /// Makes a file known to the library, so that rings can read it.
    pub fn register(self: &Arc<Self>, file: File) -> io::Result<Registered> {
        // SAFETY: a call with an open descriptor and no flags.
        let errno = unsafe { (self.calls.reg_fd)(file.as_raw_fd(), 0) };
        if errno > 0 {
            return Err(io::Error::from_raw_os_error(errno));
        }
        Ok(Registered { library: self.clone(), file })
    }

    /// A ring for reading files of the 3FS at `mount_point`.
    pub fn read_ring(self: &Arc<Self>, mount_point: &Path, shape: Shape) -> io::Result<ReadRing> {
        if mount_point.as_os_str().len() >= MAX_MOUNT_POINT_BYTES {
            return Err(io::ErrorKind::InvalidFilename.into());
        }
        let point = c_path(mount_point)?;
        let mut ior = Box::new(MaybeUninit::<Ior>::zeroed());
        // SAFETY: the structure is ours to be filled, the mount point ends with a zero and is short enough.
        let made = unsafe {
            (self.calls.iorcreate4)(
                ior.as_mut_ptr(),
                point.as_ptr(),
                shape.slots as i32,
                true,
                AT_ONCE,
                0,
                ANY_NODE,
                FORBID_READ_HOLES,
            )
        };
        checked(made)?;
        let mut ring = ReadRing { library: self.clone(), ior, iov: None, shape, broken: false };
        let mut iov = Box::new(MaybeUninit::<Iov>::zeroed());
        // SAFETY: as above. A slot is a block, so no request crosses the border of one.
        let made = unsafe {
            (self.calls.iovcreate)(
                iov.as_mut_ptr(),
                point.as_ptr(),
                shape.slots * shape.slot_bytes,
                shape.slot_bytes,
                ANY_NODE,
            )
        };
        checked(made)?;
        ring.iov = Some(iov);
        Ok(ring)
    }
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Zero or a count; below it is an errno.
fn checked(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(result) }
}

/// A file that rings can read.
///
/// INVARIANT: the descriptor is not closed while it is registered, as the library would take the next file
/// with its number for this one.
#[derive(Debug)]
pub struct Registered {
    library: Arc<Library>,
    file: File,
}

impl Registered {
    /// The file itself.
    pub fn file(&self) -> &File {
        &self.file
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: the descriptor is open and was registered by us; `file` is closed after this.
        unsafe { (self.library.calls.dereg_fd)(self.file.as_raw_fd()) };
    }
}

/// How much a ring reads at once.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Requests at once.
    pub slots: usize,
    /// The longest request, in bytes.
    pub slot_bytes: usize,
}

/// A ring and the memory that its requests fill.
pub struct ReadRing {
    library: Arc<Library>,
    ior: Box<MaybeUninit<Ior>>,
    /// `None` only while it is being made.
    iov: Option<Box<MaybeUninit<Iov>>>,
    shape: Shape,
    broken: bool,
}

// SAFETY: the library ties neither structure to a thread; it asks that only one uses them at a time, and every
// use here takes `&mut`.
unsafe impl Send for ReadRing {}

impl std::fmt::Debug for ReadRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ReadRing({:?}, broken: {})", self.shape, self.broken)
    }
}

/// A part of a read: where in the destination, and how long.
#[derive(Debug, Clone, Copy)]
struct Piece {
    start: usize,
    bytes: usize,
}

/// What one read has on its way.
struct Flight {
    waiting: VecDeque<Piece>,
    slots: Vec<Option<Piece>>,
    flying: usize,
    error: Option<io::Error>,
}

impl ReadRing {
    /// Fills `into` from `offset` of the file. `UnexpectedEof` when the file ends before that; `TimedOut` when
    /// not everything came in time. Any error but the first may leave the ring broken.
    pub fn read(
        &mut self,
        file: &Registered,
        offset: u64,
        into: &mut [u8],
        timeout: Duration,
    ) -> io::Result<()> {
        if self.broken {
            return Err(io::Error::other("this ring was left with requests in it"));
        }
        let deadline = (SystemTime::now() + timeout).duration_since(UNIX_EPOCH).unwrap_or_default();
        let starts = (0..into.len()).step_by(self.shape.slot_bytes);
        let piece = |start| Piece { start, bytes: self.shape.slot_bytes.min(into.len() - start) };
        let mut flight = Flight {
            waiting: starts.map(piece).collect(),
            slots: vec![None; self.shape.slots],
            flying: 0,
            error: None,
        };
        // Whatever happens in between: a ring with requests of somebody else in it serves nobody.
        self.broken = true;
        self.transfer(file, offset, into, &mut flight, deadline)?;
        self.broken = false;
        flight.error.map_or(Ok(()), Err)
    }

    /// Ends when nothing is on its way any more, or with an error when something still is.
    fn transfer(
        &mut self,
        file: &Registered,
        offset: u64,
        into: &mut [u8],
        flight: &mut Flight,
        deadline: Duration,
    ) -> io::Result<()> {
        loop {
            self.prepare(file, offset, flight)?;
            if flight.flying == 0 {
                return match flight.waiting.is_empty() {
                    true => Ok(()),
                    false => Err(io::ErrorKind::WouldBlock.into()),
                };
            }
            for done in self.wait(deadline)? {
                let slot = done.userdata.addr();
                let piece = flight.slots.get_mut(slot).and_then(Option::take);
                let piece = piece.ok_or_else(|| io::Error::other("an answer to no request"))?;
                flight.flying -= 1;
                self.arrived(slot, piece, done.result, into, flight)?;
            }
        }
    }

    /// Gives the ring what it has room for.
    fn prepare(&mut self, file: &Registered, offset: u64, flight: &mut Flight) -> io::Result<()> {
        let before = flight.flying;
        for slot in 0..self.shape.slots {
            if flight.slots[slot].is_some() {
                continue;
            }
            let Some(piece) = flight.waiting.pop_front() else { break };
            let Some(iov) = &self.iov else { break };
            // SAFETY: both structures were filled by the library and live as long as this ring; the slot lies
            // within the memory of `iov`; the descriptor is open and registered.
            let prepared = unsafe {
                (self.library.calls.prep_io)(
                    self.ior.as_ptr(),
                    iov.as_ptr(),
                    true,
                    self.slot(slot).cast(),
                    file.file.as_raw_fd(),
                    (offset + piece.start as u64) as usize,
                    piece.bytes as u64,
                    std::ptr::without_provenance(slot),
                )
            };
            match checked(prepared) {
                Ok(_) => {
                    flight.slots[slot] = Some(piece);
                    flight.flying += 1;
                }
                // Full: what is on its way comes first.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    flight.waiting.push_front(piece);
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        if flight.flying > before {
            // SAFETY: the ring was filled by the library.
            checked(unsafe { (self.library.calls.submit_ios)(self.ior.as_ptr()) })?;
        }
        Ok(())
    }

    fn slot(&self, slot: usize) -> *mut u8 {
        let Some(iov) = &self.iov else { return std::ptr::null_mut() };
        // SAFETY: the library filled the structure, with memory for all slots.
        unsafe { (*iov.as_ptr()).base.add(slot * self.shape.slot_bytes) }
    }

    /// At least one answer. The deadline is an instant since 1970.
    fn wait(&mut self, deadline: Duration) -> io::Result<Vec<Cqe>> {
        let until = libc::timespec {
            tv_sec: deadline.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(deadline.subsec_nanos()),
        };
        let mut answers = vec![Cqe::EMPTY; self.shape.slots];
        loop {
            // SAFETY: the array has the length that is passed.
            let count = checked(unsafe {
                (self.library.calls.wait_for_ios)(
                    self.ior.as_ptr(),
                    answers.as_mut_ptr(),
                    answers.len() as i32,
                    1,
                    &raw const until,
                )
            });
            match count {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(count) => {
                    answers.truncate(count as usize);
                    return Ok(answers);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes what a request brought; a short one is asked for its rest.
    fn arrived(
        &self,
        slot: usize,
        piece: Piece,
        result: i64,
        into: &mut [u8],
        flight: &mut Flight,
    ) -> io::Result<()> {
        let error = match result {
            0 => io::ErrorKind::UnexpectedEof.into(),
            errno if errno < 0 => io::Error::from_raw_os_error((-errno) as i32),
            bytes if bytes as u64 > piece.bytes as u64 => {
                return Err(io::Error::other("an answer longer than its request"));
            }
            bytes => {
                let bytes = bytes as usize;
                let part = &mut into[piece.start..piece.start + bytes];
                // SAFETY: the request is done, so nobody writes to its slot, which is at least so long.
                unsafe {
                    std::ptr::copy_nonoverlapping(self.slot(slot), part.as_mut_ptr(), bytes);
                }
                if bytes < piece.bytes && flight.error.is_none() {
                    let rest = Piece { start: piece.start + bytes, bytes: piece.bytes - bytes };
                    flight.waiting.push_front(rest);
                }
                return Ok(());
            }
        };
        // What is on its way still has to land.
        flight.error.get_or_insert(error);
        flight.waiting.clear();
        Ok(())
    }
}

impl Drop for ReadRing {
    fn drop(&mut self) {
        // SAFETY: both structures were filled by the library and are used by nobody else. Requests that were
        // left behind write to the daemon's own mapping of the memory.
        unsafe {
            if let Some(iov) = &mut self.iov {
                (self.library.calls.iovdestroy)(iov.as_mut_ptr());
            }
            (self.library.calls.iordestroy)(self.ior.as_mut_ptr());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_the_library_is_told_so() {
        let error = Library::load(Path::new("/no/such/library.so")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(error.to_string().contains("/no/such/library.so"), "{error}");
        // The C library is no 3FS.
        let error = Library::load(Path::new("libc.so.6")).unwrap_err();
        assert!(error.to_string().contains("hf3fs_"), "{error}");
    }
}
