//! Linux capabilities: which rights of root a process keeps.
//!
//! For: reducing what root inside a sandbox may do, and asking what this process may do. Not for: file
//! capabilities, user namespaces. No state.

use std::io;

/// A set of capabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CapabilitySet(u64);

const CHOWN: u32 = 0;
const DAC_OVERRIDE: u32 = 1;
const FOWNER: u32 = 3;
const FSETID: u32 = 4;
const KILL: u32 = 5;
const SETGID: u32 = 6;
const SETUID: u32 = 7;
const SETPCAP: u32 = 8;
const NET_BIND_SERVICE: u32 = 10;
const SYS_CHROOT: u32 = 18;
const MKNOD: u32 = 27;
const SETFCAP: u32 = 31;

impl CapabilitySet {
    /// No right of root.
    pub const NONE: Self = Self(0);

    /// What root inside a sandbox keeps: rights over the sandbox's own files, users and processes. It
    /// is the usual container default without raw sockets and without writing to the host's audit log.
    /// INVARIANT: nothing in it reaches beyond the sandbox's namespaces and its mounts.
    pub const SANDBOX: Self = Self(
        1 << CHOWN
            | 1 << DAC_OVERRIDE
            | 1 << FOWNER
            | 1 << FSETID
            | 1 << KILL
            | 1 << SETGID
            | 1 << SETUID
            | 1 << SETPCAP
            | 1 << NET_BIND_SERVICE
            | 1 << SYS_CHROOT
            | 1 << MKNOD
            | 1 << SETFCAP,
    );

    /// From the bit mask that /proc/PID/status shows.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The bit mask that /proc/PID/status shows.
    pub const fn bits(self) -> u64 {
        self.0
    }

    fn has(self, capability: u32) -> bool {
        self.0 & (1 << capability) != 0
    }
}

/// Takes everything outside of `keep` away from what later programs can ever get, and forgets ambient
/// and inherited rights. The caller needs CAP_SETPCAP.
pub fn limit_bounding_set(keep: CapabilitySet) -> io::Result<()> {
    for capability in 0..64 {
        if keep.has(capability) {
            continue;
        }
        // SAFETY: integers only.
        if unsafe { libc::prctl(libc::PR_CAPBSET_READ, capability, 0, 0, 0) } == 0 {
            // Asking is cheap; giving up makes new credentials, even when there is nothing to give up.
            continue;
        }
        // SAFETY: integers only.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } < 0 {
            let error = io::Error::last_os_error();
            // The first number that the kernel does not know ends the list.
            if error.raw_os_error() == Some(libc::EINVAL) {
                break;
            }
            return Err(error);
        }
    }
    // SAFETY: integers only.
    let result =
        unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Makes `set` the permitted and effective rights of the caller, and none inheritable.
pub fn set(set: CapabilitySet) -> io::Result<()> {
    let header = Header { version: VERSION_3, pid: 0 };
    let data = [0, 32].map(|shift| {
        let word = (set.0 >> shift) as u32;
        Data { effective: word, permitted: word, inheritable: 0 }
    });
    // SAFETY: a header of version 3 and the two data words that it asks for outlive the call.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Makes `set` the effective rights of the caller, as far as it is permitted them. It stays permitted what
/// it is, so a process that has less still cannot look into it.
pub fn set_effective(set: CapabilitySet) -> io::Result<()> {
    let header = Header { version: VERSION_3, pid: 0 };
    let mut data = get(&header)?;
    for (word, shift) in data.iter_mut().zip([0, 32]) {
        word.effective = word.permitted & (set.0 >> shift) as u32;
    }
    // SAFETY: a header of version 3 and the two data words that it asks for outlive the call.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The rights that the caller can use now.
pub fn effective() -> io::Result<CapabilitySet> {
    let data = get(&Header { version: VERSION_3, pid: 0 })?;
    Ok(CapabilitySet(u64::from(data[0].effective) | u64::from(data[1].effective) << 32))
}

fn get(header: &Header) -> io::Result<[Data; 2]> {
    let mut data = [Data::default(), Data::default()];
    // SAFETY: a header of version 3 and room for the two data words that the kernel writes.
    let result = unsafe { libc::syscall(libc::SYS_capget, &raw const *header, data.as_mut_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(data) }
}

const VERSION_3: u32 = 0x2008_0522;

#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Default)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_effective_set_is_what_proc_says() {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
        let bits = u64::from_str_radix(line.trim(), 16).unwrap();
        assert_eq!(effective().unwrap().bits(), bits);
    }

    #[test]
    fn effective_rights_shrink_and_come_back_while_permitted() {
        // Rights belong to a thread, so this one takes its own away.
        std::thread::spawn(|| {
            let before = effective().unwrap();
            set_effective(CapabilitySet::SANDBOX).unwrap();
            assert_eq!(effective().unwrap().bits(), before.bits() & CapabilitySet::SANDBOX.bits());
            set_effective(before).unwrap();
            assert_eq!(effective().unwrap(), before);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn the_sandbox_set_has_no_right_over_the_host() {
        const FORBIDDEN: [u32; 12] = [9, 12, 13, 14, 16, 17, 19, 21, 22, 23, 25, 29];
        for capability in FORBIDDEN {
            assert!(!CapabilitySet::SANDBOX.has(capability), "{capability}");
        }
    }
}
