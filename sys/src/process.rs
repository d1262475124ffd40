//! Processes: creation with namespaces and a cgroup in one call, pidfds, signals, limits, identity.
//!
//! What it does not do: it knows nothing of sandboxes, and it starts no program on its own. Everything
//! that can be raced by a recycled pid takes a pidfd instead. No state, no locks.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// A process id as the caller's pid namespace sees it.
pub type Pid = i32;

/// Sets of kernel namespaces, as the `CLONE_NEW*` flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Namespaces(u64);

impl Namespaces {
    /// No namespace at all.
    pub const NONE: Self = Self(0);
    /// Process ids.
    pub const PID: Self = Self(libc::CLONE_NEWPID as u64);
    /// The mount table.
    pub const MOUNT: Self = Self(libc::CLONE_NEWNS as u64);
    /// System V IPC and POSIX message queues.
    pub const IPC: Self = Self(libc::CLONE_NEWIPC as u64);
    /// The host name.
    pub const UTS: Self = Self(libc::CLONE_NEWUTS as u64);
    /// Interfaces, routes, ports and abstract Unix sockets.
    pub const NET: Self = Self(libc::CLONE_NEWNET as u64);
    /// The view of the cgroup trees.
    pub const CGROUP: Self = Self(libc::CLONE_NEWCGROUP as u64);
    /// Users, groups and rights.
    pub const USER: Self = Self(libc::CLONE_NEWUSER as u64);

    /// Both sets together.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// How [`fork`] makes its child.
#[derive(Debug, Clone, Copy)]
pub struct Fork<'fd> {
    /// Namespaces that are new for the child.
    pub namespaces: Namespaces,
    /// Directory of a cgroup v2 that the child is born in.
    pub cgroup: Option<BorrowedFd<'fd>>,
}

/// Which side of a [`fork`] the caller is on.
#[derive(Debug)]
pub enum Forked {
    /// This is the new process.
    Child,
    /// This is the old process.
    Parent {
        /// The new process, as the caller's pid namespace sees it.
        pid: Pid,
        /// Stands for the new process even when its pid is used again.
        pidfd: OwnedFd,
    },
}

/// Makes a process with `clone3(2)`. The child gets SIGCHLD as its exit signal.
///
/// # Safety
/// The calling process must have one thread only: locks that other threads hold (the allocator's, for
/// one) would stay locked for ever in the child.
pub unsafe fn fork(how: &Fork<'_>) -> io::Result<Forked> {
    const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
    let mut pidfd: libc::c_int = -1;
    // SAFETY: clone_args is a plain C structure; all zero is its "nothing asked" value.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = how.namespaces.0 | libc::CLONE_PIDFD as u64;
    args.pidfd = &raw mut pidfd as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    if let Some(cgroup) = how.cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: without CLONE_VM the child runs on its own copy of the address space; the caller promises
    // that no other thread exists whose locks the copy would freeze.
    let pid =
        unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) };
    match pid {
        0 => Ok(Forked::Child),
        1.. => {
            // SAFETY: the kernel stored a new descriptor in `pidfd`; nobody else owns it.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            Ok(Forked::Parent { pid: pid as Pid, pidfd })
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// Enters the namespaces of the process behind a pidfd. `PID` holds for later children only.
pub fn enter_namespaces_of(pidfd: BorrowedFd<'_>, namespaces: Namespaces) -> io::Result<()> {
    // SAFETY: setns takes two integers.
    check(unsafe { libc::setns(pidfd.as_raw_fd(), namespaces.0 as libc::c_int) })
}

/// Enters the one namespace that `fd` (a file of /proc/PID/ns) names.
pub fn enter_namespace(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: setns takes two integers.
    check(unsafe { libc::setns(fd.as_raw_fd(), 0) })
}

/// Leaves the namespaces of the set for new ones.
pub fn unshare(namespaces: Namespaces) -> io::Result<()> {
    // SAFETY: unshare takes an integer.
    check(unsafe { libc::unshare(namespaces.0 as libc::c_int) })
}

/// A pidfd for a living process or an unreaped one.
pub fn pidfd_open(pid: Pid) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers; the result is checked before it becomes an owner.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that only we know.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// The kernel's own number for the process behind a pidfd, never used again until the machine starts
/// anew (Linux 6.9). It tells a living process from a later one with the same pid.
pub fn pidfd_number(pidfd: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(rustix::fs::fstat(pidfd)?.st_ino)
}

/// The network namespace of the process behind a pidfd (Linux 6.11).
pub fn network_namespace_of(pidfd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // _IO(0xFF, 4): PIDFD_GET_NET_NAMESPACE.
    const REQUEST: libc::c_ulong = 0xff << 8 | 4;
    // SAFETY: the request takes no argument; a result of zero or more is a new descriptor.
    let fd = unsafe { libc::ioctl(pidfd.as_raw_fd(), REQUEST, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that only we know.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whom a signal reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// The process alone.
    Process,
    /// Its process group (Linux 6.9).
    Group,
}

/// Sends a signal through a pidfd, so that a recycled pid is never hit.
pub fn pidfd_signal(pidfd: BorrowedFd<'_>, signal: i32, reach: Reach) -> io::Result<()> {
    const PIDFD_SIGNAL_PROCESS_GROUP: libc::c_uint = 4;
    let flags = match reach {
        Reach::Process => 0,
        Reach::Group => PIDFD_SIGNAL_PROCESS_GROUP,
    };
    // SAFETY: no pointer but a null siginfo, which the kernel allows.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            signal,
            std::ptr::null::<libc::siginfo_t>(),
            flags,
        )
    };
    check(result as libc::c_int)
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It returned this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
}

impl Exit {
    /// From the status word of wait(2).
    pub fn of_status(status: i32) -> Self {
        if libc::WIFSIGNALED(status) {
            Self::Signal(libc::WTERMSIG(status))
        } else {
            Self::Code(libc::WEXITSTATUS(status))
        }
    }
}

/// Reaps one ended child of the caller, if there is one now. `None`: none has ended, or none exists.
///
/// A child that only stops is not reported: one that made its parent its tracer (PTRACE_TRACEME) would
/// look ended while it lives.
pub fn reap_any() -> io::Result<Option<(Pid, Exit)>> {
    let mut status: libc::c_int = 0;
    loop {
        // SAFETY: `status` outlives the call.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
        if pid > 0 && (libc::WIFEXITED(status) || libc::WIFSIGNALED(status)) {
            return Ok(Some((pid, Exit::of_status(status))));
        }
        if pid > 0 {
            continue;
        }
        if pid == 0 {
            return Ok(None);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::ECHILD) => return Ok(None),
            _ => return Err(error),
        }
    }
}

/// Reaps a child of the caller that has ended; does nothing for any other process.
pub fn reap_child(pidfd: BorrowedFd<'_>) {
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    let _no_child_of_ours = waitid(WaitId::PidFd(pidfd), options);
}

/// A copy of descriptor `number` of the process behind a pidfd (`pidfd_getfd`). Needs the right to trace it.
pub fn descriptor_of(pidfd: BorrowedFd<'_>, number: i32) -> io::Result<OwnedFd> {
    use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
    Ok(pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty())?)
}

/// The exit of a process that somebody else reaped (Linux 6.15). `None`: it lives, is not reaped yet,
/// or the kernel does not tell.
pub fn pidfd_exit(pidfd: BorrowedFd<'_>) -> Option<Exit> {
    const PIDFD_INFO_EXIT: u64 = 1 << 3;
    #[repr(C)]
    #[derive(Default)]
    struct PidfdInfo {
        mask: u64,
        cgroup_id: u64,
        ids: [u32; 11],
        exit_code: i32,
    }
    // _IOWR(0xFF, 11, struct pidfd_info) with the size of the structure's first version.
    const REQUEST: libc::c_ulong =
        (3 << 30) | ((size_of::<PidfdInfo>() as libc::c_ulong) << 16) | (0xff << 8) | 11;
    let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..PidfdInfo::default() };
    // SAFETY: the request carries the size of `info`, which the kernel fills at most.
    let result = unsafe { libc::ioctl(pidfd.as_raw_fd(), REQUEST, &raw mut info) };
    (result == 0 && info.mask & PIDFD_INFO_EXIT != 0).then(|| Exit::of_status(info.exit_code))
}

/// The exit of a process that has ended and that nobody has reaped yet. `None`: it is no such one.
///
/// `pid` and `pidfd` must stand for the same process; the pid of an unreaped process is not used again.
pub fn unreaped_exit(pid: Pid, pidfd: BorrowedFd<'_>) -> Option<Exit> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Names may contain anything, so the fields begin after the last parenthesis.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    // It was this process that was read if it is still there now.
    pidfd_signal(pidfd, 0, Reach::Process).ok()?;
    (fields.first() == Some(&"Z")).then_some(())?;
    Some(Exit::of_status(fields.last()?.parse().ok()?))
}

/// A process cannot be traced, read through /proc or dumped by its equals from now on.
pub fn set_undumpable() -> io::Result<()> {
    // SAFETY: integers only.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) })
}

/// Programs started from now on gain no rights by setuid bits or file capabilities.
pub fn set_no_new_privileges() -> io::Result<()> {
    // SAFETY: integers only.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })
}

/// The name that `ps` shows; cut to 15 bytes.
pub fn set_name(name: &str) -> io::Result<()> {
    let name = CString::new(name)?;
    // SAFETY: a C string that outlives the call.
    check(unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr(), 0, 0, 0) })
}

/// Starts a new session; the caller leads it and has no terminal.
pub fn new_session() -> io::Result<()> {
    // SAFETY: no arguments.
    check(unsafe { libc::setsid() })
}

/// The caller's own pid in its own pid namespace.
pub fn own_pid() -> Pid {
    // SAFETY: getpid cannot fail.
    unsafe { libc::getpid() }
}

/// Leaves any real-time or idle class that was inherited for the ordinary one.
pub fn use_ordinary_scheduling() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the structure outlives the call; 0 is the caller itself.
    check(unsafe { libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const parameters) })
}

/// Sets the file mode mask.
pub fn set_umask(mask: u32) {
    // SAFETY: umask cannot fail.
    unsafe { libc::umask(mask) };
}

/// Sets the host name of the UTS namespace.
pub fn set_host_name(name: &[u8]) -> io::Result<()> {
    // SAFETY: pointer and length belong together.
    check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) })
}

/// Becomes a user: supplementary groups, group, user; real, effective and saved ids.
pub fn become_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    // SAFETY: pointer and length belong together.
    check(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) })?;
    // SAFETY: integers only.
    check(unsafe { libc::setresgid(gid, gid, gid) })?;
    // SAFETY: integers only.
    check(unsafe { libc::setresuid(uid, uid, uid) })
}

/// A change of user takes no permitted right away until the next execve(2).
pub fn keep_rights_until_exec() -> io::Result<()> {
    // SAFETY: integers only.
    check(unsafe { libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0) })
}

/// A resource that setrlimit(2) bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// Bytes of a core dump.
    Core,
    /// Open descriptors.
    Descriptors,
    /// Bytes of POSIX message queues, counted a user.
    MessageQueues,
    /// Queued signals and timers, counted a user.
    PendingSignals,
}

impl Resource {
    fn raw(self) -> libc::__rlimit_resource_t {
        match self {
            Self::Core => libc::RLIMIT_CORE,
            Self::Descriptors => libc::RLIMIT_NOFILE,
            Self::MessageQueues => libc::RLIMIT_MSGQUEUE,
            Self::PendingSignals => libc::RLIMIT_SIGPENDING,
        }
    }
}

/// The soft and the hard limit of a resource.
pub fn limit_of(resource: Resource) -> io::Result<(u64, u64)> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` outlives the call.
    check(unsafe { libc::getrlimit(resource.raw(), &raw mut limit) })?;
    Ok((limit.rlim_cur, limit.rlim_max))
}

/// The soft and the hard limit of another process. The caller is of the same user, or may do more.
pub fn limit_of_process(pid: Pid, resource: Resource) -> io::Result<(u64, u64)> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` outlives the call; a null pointer sets nothing.
    check(unsafe { libc::prlimit(pid, resource.raw(), std::ptr::null(), &raw mut limit) })?;
    Ok((limit.rlim_cur, limit.rlim_max))
}

/// Sets both limits of a resource.
pub fn set_limit(resource: Resource, soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
    // SAFETY: `limit` outlives the call.
    check(unsafe { libc::setrlimit(resource.raw(), &raw const limit) })
}

/// Closes every descriptor from `first` on.
pub fn close_from(first: i32) -> io::Result<()> {
    // SAFETY: closes descriptors by number; the caller holds no owner that it still uses.
    check(unsafe { libc::close_range(first as u32, u32::MAX, 0) })
}

/// Closes every descriptor but the standard streams and `kept`.
pub fn close_all_but(kept: BorrowedFd<'_>) -> io::Result<()> {
    let kept = kept.as_raw_fd() as u32;
    let close = |first: u32, last: u32| {
        // SAFETY: closes descriptors by number; the caller holds no owner that it still uses.
        if first > last { Ok(()) } else { check(unsafe { libc::close_range(first, last, 0) }) }
    };
    close(3, kept.saturating_sub(1))?;
    close(kept.saturating_add(1).max(3), u32::MAX)
}

/// Makes `fd` the standard stream `number` (0, 1 or 2), which then survives exec.
pub fn set_standard_stream(number: i32, fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: dup2 replaces a descriptor number that the standard library does not own.
    check(unsafe { libc::dup2(fd.as_raw_fd(), number) })?;
    if fd.as_raw_fd() == number {
        // dup2 onto itself changes no flag, so the close-on-exec bit must go by hand.
        // SAFETY: integers only.
        check(unsafe { libc::fcntl(number, libc::F_SETFD, 0) })?;
    }
    Ok(())
}

/// Lets reads and writes of this open file answer EAGAIN instead of waiting.
pub fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::io::ioctl_fionbio(fd, true)?)
}

/// Takes standard input as a descriptor of its own, closed on exec; number 0 stays open.
pub fn take_standard_input() -> io::Result<OwnedFd> {
    // SAFETY: integers only; 3 is the lowest number the copy may get.
    let fd = unsafe { libc::fcntl(0, libc::F_DUPFD_CLOEXEC, 3) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that only we know.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Replaces the calling program. Returns only when that fails.
pub fn execve(program: &CString, argv: &[CString], env: &[CString]) -> io::Error {
    let pointers = |strings: &[CString]| {
        let mut list: Vec<*const libc::c_char> = strings.iter().map(|s| s.as_ptr()).collect();
        list.push(std::ptr::null());
        list
    };
    let (argv, env) = (pointers(argv), pointers(env));
    // SAFETY: null-terminated arrays of C strings that outlive the call.
    unsafe { libc::execve(program.as_ptr(), argv.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

/// Signals, as far as a supervisor must arrange them.
pub mod signals {
    use super::{check, io};
    use std::os::fd::{FromRawFd, OwnedFd};

    fn full() -> libc::sigset_t {
        // SAFETY: sigfillset initialises the set that it is given.
        unsafe {
            let mut set = std::mem::zeroed();
            libc::sigfillset(&raw mut set);
            set
        }
    }

    /// Blocks every signal that can be blocked.
    pub fn block_all() -> io::Result<()> {
        let set = full();
        // SAFETY: `set` outlives the call, no old set is asked for.
        check(unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut()) })
    }

    /// Every signal at its default and none blocked, as a program expects at its start.
    pub fn reset() -> io::Result<()> {
        for signal in 1..=64 {
            // SAFETY: the default action holds no pointer; numbers that cannot be set answer EINVAL.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        // SAFETY: sigemptyset initialises the set; it outlives the call.
        check(unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut())
        })
    }

    /// Children are reaped by the kernel from now on, without waking the caller.
    pub fn ignore_child_exits() -> io::Result<()> {
        // SAFETY: the ignore action holds no pointer.
        let old = unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
        if old == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// A descriptor that is readable while a child exit is pending. The signal must be blocked.
    pub fn child_exit_descriptor() -> io::Result<OwnedFd> {
        // SAFETY: sigemptyset and sigaddset initialise the set that signalfd reads.
        let fd = unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, libc::SIGCHLD);
            libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that only we know.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Takes all pending notices out of a descriptor of [`child_exit_descriptor`].
    pub fn drain(fd: &OwnedFd) {
        let mut buffer = [0u8; 1024];
        while rustix::io::read(fd, &mut buffer).is_ok_and(|bytes| bytes > 0) {}
    }

    /// Sleeps for ever; signals that are ignored or blocked do not end it.
    pub fn sleep_forever() -> ! {
        loop {
            // SAFETY: no arguments.
            unsafe { libc::pause() };
        }
    }
}

/// Brings the loopback interface of the caller's network namespace up.
pub fn loopback_up() -> io::Result<()> {
    // SAFETY: integers only.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that only we know.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: ifreq is a plain C structure; all zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads an ifreq.
    check(unsafe {
        libc::ioctl(socket.as_fd().as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request)
    })
}

/// Waits for one of two descriptors; answers which of them can be read or hung up.
pub fn wait_either(first: BorrowedFd<'_>, second: BorrowedFd<'_>) -> io::Result<(bool, bool)> {
    let entry =
        |fd: BorrowedFd<'_>| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut entries = [entry(first), entry(second)];
    loop {
        // SAFETY: the array and its length belong together and outlive the call.
        let ready = unsafe { libc::poll(entries.as_mut_ptr(), 2, -1) };
        if ready > 0 {
            return Ok((entries[0].revents != 0, entries[1].revents != 0));
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINTR) {
            return Err(error);
        }
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pidfd_tells_how_a_reaped_child_ended() {
        let mut child = std::process::Command::new("sh").args(["-c", "exit 7"]).spawn().unwrap();
        let pidfd = pidfd_open(child.id() as Pid).unwrap();
        crate::wait_readable(pidfd.as_fd(), None).unwrap();
        let unreaped = unreaped_exit(child.id() as Pid, pidfd.as_fd());
        assert_eq!(unreaped, Some(Exit::Code(7)));
        assert_eq!(child.wait().unwrap().code(), Some(7));
        assert_eq!(pidfd_exit(pidfd.as_fd()), Some(Exit::Code(7)));
    }

    #[test]
    fn a_signal_through_a_pidfd_ends_the_group() {
        use std::os::unix::process::{CommandExt, ExitStatusExt};
        let mut child =
            std::process::Command::new("sleep").arg("60").process_group(0).spawn().unwrap();
        let pidfd = pidfd_open(child.id() as Pid).unwrap();
        pidfd_signal(pidfd.as_fd(), 15, Reach::Group).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(15));
    }

    #[test]
    fn a_stopped_child_that_is_traced_is_not_taken_for_an_ended_one() {
        // SAFETY: the child calls async-signal-safe functions only and ends with _exit.
        let tracer = unsafe { libc::fork() };
        if tracer == 0 {
            // SAFETY: as above.
            let verdict = unsafe {
                let child = libc::fork();
                if child == 0 {
                    libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
                    libc::raise(libc::SIGSTOP);
                    libc::_exit(3);
                }
                // The stop is pending or was taken; either way nobody has ended.
                let mut calm = true;
                for _ in 0..100 {
                    calm &= matches!(reap_any(), Ok(None));
                    libc::usleep(1000);
                }
                libc::kill(child, libc::SIGKILL);
                let killed = loop {
                    if let Ok(Some((pid, exit))) = reap_any() {
                        break pid == child && exit == Exit::Signal(libc::SIGKILL);
                    }
                };
                i32::from(!(calm && killed))
            };
            // SAFETY: as above.
            unsafe { libc::_exit(verdict) };
        }
        let mut status = 0;
        // SAFETY: `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(tracer, &raw mut status, 0) }, tracer);
        assert_eq!(Exit::of_status(status), Exit::Code(0));
    }

    #[test]
    fn only_the_kept_descriptor_stays_open() {
        // SAFETY: the child calls async-signal-safe functions only and ends with _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above; nothing of the test's own descriptors is used afterwards.
            let verdict = unsafe {
                let kept = libc::dup(0);
                let (below, above) = (libc::fcntl(0, libc::F_DUPFD, 3), libc::dup(0));
                let closed = close_all_but(BorrowedFd::borrow_raw(kept)).is_ok();
                let is_open = |fd| libc::fcntl(fd, libc::F_GETFD) >= 0;
                i32::from(!closed || !is_open(kept) || is_open(below) || is_open(above))
            };
            // SAFETY: as above.
            unsafe { libc::_exit(verdict) };
        }
        let mut status = 0;
        // SAFETY: `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(Exit::of_status(status), Exit::Code(0));
    }

    #[test]
    fn descriptor_limits_read_back() {
        let (soft, hard) = limit_of(Resource::Descriptors).unwrap();
        assert!(soft <= hard && soft > 0);
    }
}
