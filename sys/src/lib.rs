//! The only unsafe code of Lamella: kernel interfaces of Linux behind safe, typed functions.
//!
//! Everything here answers [`std::io::Result`]: callers add what they were doing and turn it into
//! their own error. [`errno_of`] finds the errno also in errors that carry the kernel's explanation.
//! No function here keeps global state; none prints; none decides policy.
//!
//! Descriptors that this crate opens are closed on exec. Paths are taken as bytes, not as text.

pub mod cachefiles;
pub mod capability;
pub mod cgroup;
pub mod clock;
pub mod datagram;
pub mod fanotify;
pub mod file;
pub mod footprint;
pub mod identity;
pub mod inotify;
pub mod landlock;
pub mod lease;
pub mod loop_device;
pub mod mapping;
pub mod measure;
pub mod memory;
pub mod mount;
pub mod netlink;
pub mod probe;
pub mod process;
pub mod profile;
pub mod pty;
pub mod reflink;
pub mod seccomp;
pub mod socket;
pub mod swap;
pub mod usrbio;

use std::ffi::CString;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// The errno behind an error of this crate, also when the kernel's own words were added to it.
pub fn errno_of(error: &io::Error) -> Option<i32> {
    error
        .raw_os_error()
        .or_else(|| error.get_ref()?.downcast_ref::<Explained>().map(|explained| explained.errno))
}

/// An errno with what was done and what the kernel said about it.
#[derive(Debug)]
pub(crate) struct Explained {
    errno: i32,
    text: String,
}

impl Explained {
    /// The errno as an error with a text; the kind is the errno's.
    pub(crate) fn wrap(error: &io::Error, text: String) -> io::Error {
        match errno_of(error) {
            Some(errno) => {
                let kind = io::Error::from_raw_os_error(errno).kind();
                io::Error::new(kind, Self { errno, text })
            }
            None => io::Error::new(error.kind(), format!("{text}: {error}")),
        }
    }
}

impl std::fmt::Display for Explained {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.text, io::Error::from_raw_os_error(self.errno))
    }
}

impl std::error::Error for Explained {}

/// Waits until `fd` can be read or has hung up; false when the time is over. `None` waits without end.
pub fn wait_readable(fd: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    loop {
        let rest = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let rest = rest.map(|rest| Timespec {
            tv_sec: rest.as_secs().min(i32::MAX as u64) as i64,
            tv_nsec: i64::from(rest.subsec_nanos()),
        });
        match rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], rest.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// How many bytes a pipe or a terminal has for its reader now.
pub fn bytes_to_read(fd: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(rustix::io::ioctl_fionread(fd)?)
}

/// A path as the C string that a system call takes. `InvalidInput` when it holds a zero byte.
pub(crate) fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "path with a zero byte"))
}

/// A name as the C string that a system call takes. `InvalidInput` when it holds a zero byte.
pub(crate) fn c_name(name: &[u8]) -> io::Result<CString> {
    CString::new(name)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "name with a zero byte"))
}
