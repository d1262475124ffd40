//! User namespaces that exist only to carry the id map of a mount.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// A run of ids: `count` ids from `from` on appear as those from `to` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdRange {
    /// First id as it is stored on the file system.
    pub from: u32,
    /// First id as it is seen through the mount.
    pub to: u32,
    /// How many.
    pub count: u32,
}

/// The map of owners and groups of a mount. Ids outside of it appear as the overflow id and cannot be
/// written.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IdMap {
    /// Owners.
    pub users: Vec<IdRange>,
    /// Groups.
    pub groups: Vec<IdRange>,
}

impl IdMap {
    /// Makes a user namespace with this map, for [`super::AttributeChange::idmap`].
    ///
    /// One child process exists while this runs; the namespace lives as long as the descriptor.
    pub fn user_namespace(&self) -> io::Result<OwnedFd> {
        let child = WaitingChild::spawn()?;
        self.give_to(child.pid)
    }

    /// Gives this map to the new user namespace of a process, which has none yet; answers the namespace.
    pub fn give_to(&self, pid: crate::process::Pid) -> io::Result<OwnedFd> {
        let folder = format!("/proc/{pid}");
        write_once(&format!("{folder}/uid_map"), &lines(&self.users))?;
        write_once(&format!("{folder}/gid_map"), &lines(&self.groups))?;
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
        let mode = rustix::fs::Mode::empty();
        Ok(rustix::fs::open(format!("{folder}/ns/user"), flags, mode)?)
    }
}

fn lines(ranges: &[IdRange]) -> String {
    ranges.iter().map(|range| format!("{} {} {}\n", range.from, range.to, range.count)).collect()
}

/// The kernel takes a map in one write only.
fn write_once(path: &str, text: &str) -> io::Result<()> {
    let file = std::fs::File::options().write(true).open(path)?;
    let written = rustix::io::write(&file, text.as_bytes())?;
    if written == text.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// A child in a new user namespace that does nothing until it is dropped.
struct WaitingChild {
    pid: libc::pid_t,
    /// The child ends when this end closes.
    _keep_alive: OwnedFd,
}

impl WaitingChild {
    fn spawn() -> io::Result<Self> {
        let (ready_read, ready_write) = pipe()?;
        let (life_read, life_write) = pipe()?;
        // SAFETY: the child calls only async-signal-safe functions (close, unshare, write, read,
        // _exit) and touches no memory that another thread could have left half-written.
        let pid = unsafe { libc::fork() };
        if pid < 0 {
            return Err(io::Error::last_os_error());
        }
        if pid == 0 {
            // SAFETY: as above; the descriptors are this process's copies.
            unsafe {
                libc::close(life_write.as_raw_fd());
                let mut byte = 0u8;
                if libc::unshare(libc::CLONE_NEWUSER) != 0 {
                    byte = u8::try_from(*libc::__errno_location()).unwrap_or(u8::MAX);
                }
                libc::write(ready_write.as_raw_fd(), (&raw const byte).cast(), 1);
                libc::read(life_read.as_raw_fd(), (&raw mut byte).cast(), 1);
                libc::_exit(0);
            }
        }
        let child = Self { pid, _keep_alive: life_write };
        drop((ready_write, life_read));
        let mut status = [0u8; 1];
        let length = rustix::io::retry_on_intr(|| rustix::io::read(&ready_read, &mut status))?;
        match (length, status[0]) {
            (1, 0) => Ok(child),
            (1, errno) => Err(io::Error::from_raw_os_error(errno.into())),
            _ => Err(io::Error::other("the child that makes a user namespace died")),
        }
    }
}

impl Drop for WaitingChild {
    fn drop(&mut self) {
        // SAFETY: the pid is our own child that nobody else reaps, so it cannot name another process;
        // a null status is allowed.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            while libc::waitpid(self.pid, std::ptr::null_mut(), 0) < 0
                && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
            {}
        }
    }
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}
