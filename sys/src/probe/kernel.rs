//! Attempts at system calls that need neither files nor devices.

use super::{Attempt, Untried, failed};
use crate::mount::{IdMap, IdRange};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// The result of a system call that answers -1 and errno.
fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Owns the descriptor that a system call has just answered.
fn own(fd: libc::c_long) -> OwnedFd {
    // SAFETY: callers pass what the kernel made for them in the call just before.
    unsafe { OwnedFd::from_raw_fd(fd as i32) }
}

pub(super) fn pidfd() -> Attempt {
    crate::process::pidfd_open(crate::process::own_pid())?;
    Ok("pidfd_open".to_owned())
}

pub(super) fn seccomp() -> Attempt {
    const GET_ACTION_AVAILABLE: libc::c_uint = 2;
    let kill_process = 0x8000_0000_u32;
    // SAFETY: the kernel reads one u32 that outlives the call; nothing is installed.
    check(unsafe {
        libc::syscall(libc::SYS_seccomp, GET_ACTION_AVAILABLE, 0, &raw const kill_process)
    })?;
    Ok("filters that kill the process".to_owned())
}

pub(super) fn landlock() -> Attempt {
    Ok(format!("ABI {}", crate::landlock::version()?))
}

pub(super) fn security_module(name: &str) -> Attempt {
    let active = active_security_modules()?;
    if active.trim().split(',').any(|module| module == name) {
        Ok(format!("active: {}", active.trim()))
    } else {
        Err(failed(&format!("not among the active modules: {}", active.trim())))
    }
}

/// That the module is active does not prove that programs can be loaded, and loading one needs the
/// kernel's type information, which this crate does not read.
pub(super) fn bpf_lsm() -> Result<Attempt, Untried> {
    match security_module("bpf") {
        Ok(_) => Err(Untried("the module is active; loading a program was not tried")),
        missing => Ok(missing),
    }
}

/// Reads the list from a securityfs of our own, because the usual place may have none.
fn active_security_modules() -> io::Result<String> {
    use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
    let context = rustix::mount::fsopen("securityfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let mount = rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    let path = std::path::Path::new("lsm");
    let list = crate::file::open_beneath(mount.as_fd(), path, crate::file::OFlags::RDONLY, 0)?;
    io::read_to_string(std::fs::File::from(list))
}

pub(super) fn bpf_cgroup() -> Attempt {
    const PROG_LOAD: libc::c_int = 5;
    const TYPE_CGROUP_SOCK_ADDR: u32 = 18;
    const CGROUP_INET4_CONNECT: u32 = 10;
    /// The first fields of `union bpf_attr` for loading a program.
    #[repr(C)]
    struct Load {
        program_type: u32,
        instructions: u32,
        code: u64,
        license: u64,
        log_level: u32,
        log_bytes: u32,
        log: u64,
        kernel_version: u32,
        flags: u32,
        name: [u8; 16],
        interface: u32,
        attach_type: u32,
    }
    // r0 = 1; exit: every connection is allowed.
    let code: [u64; 2] = [0x0000_0001_0000_00b7, 0x95];
    let license = c"GPL";
    let load = Load {
        program_type: TYPE_CGROUP_SOCK_ADDR,
        instructions: code.len() as u32,
        code: code.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log_level: 0,
        log_bytes: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
        name: [0; 16],
        interface: 0,
        attach_type: CGROUP_INET4_CONNECT,
    };
    // SAFETY: the kernel reads `load`, the two instructions and the licence; all outlive the call.
    let program = check(unsafe {
        libc::syscall(libc::SYS_bpf, PROG_LOAD, &raw const load, size_of::<Load>())
    })?;
    drop(own(program));
    Ok("a connect4 program was loaded".to_owned())
}

pub(super) fn nftables() -> Attempt {
    const NETLINK_NETFILTER: libc::c_int = 12;
    const GET_GENERATION: u16 = 10 << 8 | 16;
    const ERROR: u16 = 2;
    // SAFETY: three numbers, no memory.
    let socket = own(check(libc::c_long::from(unsafe {
        libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, NETLINK_NETFILTER)
    }))?);
    let mut request = [0u8; 20];
    request[..4].copy_from_slice(&20u32.to_ne_bytes());
    request[4..6].copy_from_slice(&GET_GENERATION.to_ne_bytes());
    request[6..8].copy_from_slice(&1u16.to_ne_bytes()); // NLM_F_REQUEST
    rustix::io::write(&socket, &request)?;
    let mut answer = [0u8; 256];
    let length = rustix::io::retry_on_intr(|| rustix::io::read(&socket, &mut answer[..]))?;
    if length < 20 {
        return Err(failed("netfilter's answer is too short"));
    }
    if u16::from_ne_bytes([answer[4], answer[5]]) == ERROR {
        let errno = i32::from_ne_bytes([answer[16], answer[17], answer[18], answer[19]]);
        return Err(io::Error::from_raw_os_error(-errno));
    }
    Ok("the generation of its tables was read".to_owned())
}

pub(super) fn user_namespaces() -> Attempt {
    let range = IdRange { from: 0, to: 100_000, count: 65536 };
    IdMap { users: vec![range], groups: vec![range] }.user_namespace()?;
    Ok("65536 ids were mapped".to_owned())
}

pub(super) fn network_namespaces() -> Attempt {
    // A thread of its own: the namespace ends with it, and this one stays where it is.
    let thread = std::thread::spawn(|| crate::process::unshare(crate::process::Namespaces::NET));
    thread.join().map_err(|_| failed("the thread died"))??;
    Ok("one was made".to_owned())
}

pub(super) fn memfd_seals() -> Attempt {
    let fd = crate::memory::sealed_memfd("probe", b"content")?;
    match rustix::io::pwrite(&fd, b"x", 0) {
        Err(rustix::io::Errno::PERM) => Ok("a sealed file refused a write".to_owned()),
        _ => Err(failed("a sealed file took a write")),
    }
}

pub(super) fn userfaultfd() -> Attempt {
    const API: libc::c_ulong = 0xc018_aa3f;
    // SAFETY: one number, no memory.
    let fd = own(check(unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) })?);
    // struct uffdio_api: version, features, ioctls.
    let mut api = [0xaa_u64, 0, 0];
    // SAFETY: the kernel reads and writes three u64, which `api` is.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), API, api.as_mut_ptr()) };
    check(libc::c_long::from(result))?;
    Ok(format!("features {:#x}", api[1]))
}

pub(super) fn io_uring() -> Attempt {
    // struct io_uring_params: 120 bytes, features at byte 20.
    let mut parameters = [0u32; 30];
    // SAFETY: the kernel reads and writes 120 bytes, which `parameters` has.
    let ring =
        own(check(unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()) })?);
    drop(ring);
    Ok(format!("features {:#x}", parameters[5]))
}

pub(super) fn swap() -> Attempt {
    let table = std::fs::read_to_string("/proc/swaps")?;
    let sizes = table.lines().skip(1).filter_map(|line| line.split_whitespace().nth(2));
    let kib: u64 = sizes.filter_map(|size| size.parse::<u64>().ok()).sum();
    if kib == 0 { Err(failed("no swap is on")) } else { Ok(format!("{} MiB", kib >> 10)) }
}

pub(super) fn core_scheduling() -> Result<Attempt, Untried> {
    const SCHED_CORE: libc::c_int = 62;
    let mut cookie = 0u64;
    // SAFETY: GET (0) of the calling task (pid 0, kind 0) writes one u64.
    let result = unsafe { libc::prctl(SCHED_CORE, 0, 0, 0, &raw mut cookie) };
    match check(libc::c_long::from(result)) {
        Ok(_) => Ok(Ok("a cookie was read".to_owned())),
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {
            Err(Untried("the cores of this machine have no hardware threads"))
        }
        Err(error) => Ok(Err(error)),
    }
}

pub(super) fn lower_oom_score() -> Attempt {
    const FILE: &str = "/proc/self/oom_score_adj";
    let now = std::fs::read_to_string(FILE)?;
    let score: i32 = now.trim().parse().map_err(|_| failed("oom_score_adj is no number"))?;
    std::fs::write(FILE, (score - 1).max(-1000).to_string())?;
    std::fs::write(FILE, now.trim())?;
    Ok(format!("from {score} downwards"))
}

pub(super) fn descriptor_limit() -> Attempt {
    const WANTED: u64 = 65536;
    let (soft, hard) = crate::process::limit_of(crate::process::Resource::Descriptors)?;
    if hard < WANTED {
        return Err(failed(&format!("the hard limit is {hard}")));
    }
    Ok(format!("soft {soft}, hard {hard}"))
}
