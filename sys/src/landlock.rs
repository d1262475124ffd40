//! Landlock: a process takes rights away from itself and from all that it starts.
//!
//! For: keeping the commands of one sandbox from each other ([`separate`]). Not for: files, which mounts
//! decide, since rules of Landlock allow whole trees and cannot take a path out of one. No state.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Connecting to abstract Unix sockets of others.
const SCOPE_ABSTRACT_UNIX_SOCKET: u64 = 1;
/// Signals to others.
const SCOPE_SIGNAL: u64 = 2;
/// The first version with scopes (Linux 6.12).
const VERSION_WITH_SCOPES: i64 = 6;

/// The kernel's `struct landlock_ruleset_attr` as of version 6.
#[repr(C)]
struct Ruleset {
    files: u64,
    network: u64,
    scopes: u64,
}

/// The version of the kernel's Landlock; an error where there is none.
pub fn version() -> io::Result<i64> {
    const VERSION: libc::c_uint = 1;
    let no_rules = std::ptr::null::<Ruleset>();
    // SAFETY: with this flag the kernel takes no memory and answers a number.
    let version =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, no_rules, 0usize, VERSION) };
    if version < 0 { Err(io::Error::last_os_error()) } else { Ok(version) }
}

/// Puts the calling thread, and all that it starts, behind a wall of their own: no signal to processes
/// outside, no abstract Unix socket of theirs, no tracing of them. Those outside can still do all that
/// inwards. The caller must have given up new privileges. Answers whether this kernel can do it.
pub fn separate() -> io::Result<bool> {
    if version().unwrap_or(0) < VERSION_WITH_SCOPES {
        return Ok(false);
    }
    let rules = Ruleset { files: 0, network: 0, scopes: SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL };
    let size = size_of::<Ruleset>();
    // SAFETY: the kernel reads `size` bytes of `rules`, which outlives the call.
    let made = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, &raw const rules, size, 0 as libc::c_uint)
    };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that only we know.
    let ruleset = unsafe { OwnedFd::from_raw_fd(made as i32) };
    // SAFETY: two integers.
    let result = unsafe {
        libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0 as libc::c_uint)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(true) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_separated_reaches_no_abstract_socket_of_others() {
        use std::os::linux::net::SocketAddrExt;
        use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
        if version().unwrap_or(0) < VERSION_WITH_SCOPES {
            return;
        }
        let name = format!("lamella-landlock-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let _listener = UnixListener::bind_addr(&address).unwrap();
        // Rules belong to a thread, so this one is not affected.
        std::thread::spawn(move || {
            UnixStream::connect_addr(&address).unwrap();
            crate::process::set_no_new_privileges().unwrap();
            assert!(separate().unwrap());
            let error = UnixStream::connect_addr(&address).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        })
        .join()
        .unwrap();
    }
}
