//! Named profiles: which rights root inside a sandbox keeps, and what a sandbox may ask of the kernel.
//!
//! For: one table that says it all. `default` is for most work; `strict` for code that only computes: no
//! right of root, no tracing, no change of users, and without a network no socket but Unix ones; `build` for
//! builds of packages, whose tools set odd personalities and compare processes. Not for: how a filter is made
//! of a table ([`crate::seccomp`]).
//!
//! INVARIANT: `strict` allows nothing that `default` does not, and `build` adds nothing that reaches beyond a
//! sandbox.

use crate::capability::CapabilitySet;
use crate::seccomp::{Action, Filter, Half, NO_CALL, Test, Verdict};
use std::fmt;
use std::str::FromStr;

/// A profile as a sandbox has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Profile {
    /// For most work.
    #[default]
    Default,
    /// For code that only computes.
    Strict,
    /// The same where there is no network policy: no sockets of the Internet, not even on loopback.
    StrictOffline,
    /// For builds of packages.
    Build,
}

impl Profile {
    /// All of them; each is at its own number.
    pub const ALL: [Self; 4] = [Self::Default, Self::Strict, Self::StrictOffline, Self::Build];

    /// The number that stands for it between processes and in records.
    pub fn number(self) -> u32 {
        self as u32
    }

    /// The inverse of [`Profile::number`].
    pub fn of_number(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }

    /// What it is where nothing outside can be reached.
    #[must_use]
    pub fn without_network(self) -> Self {
        if self == Self::Strict { Self::StrictOffline } else { self }
    }

    /// Whether commands of one sandbox are kept from each other, too.
    pub fn separates_commands(self) -> bool {
        matches!(self, Self::Strict | Self::StrictOffline)
    }

    /// The name of its AppArmor profile.
    pub fn security_label(self) -> &'static str {
        match self {
            Self::Default => "lamella-default",
            Self::Strict => "lamella-strict",
            Self::StrictOffline => "lamella-strict-offline",
            Self::Build => "lamella-build",
        }
    }

    /// What root keeps.
    pub fn capabilities(self) -> CapabilitySet {
        match self {
            Self::Default | Self::Build => CapabilitySet::SANDBOX,
            Self::Strict | Self::StrictOffline => CapabilitySet::NONE,
        }
    }

    /// Compiles its table.
    pub fn filter(self) -> Filter {
        Filter::compile(&self.verdicts())
    }

    fn verdicts(self) -> Vec<Verdict> {
        let mut table = default_verdicts();
        match self {
            Self::Default => {}
            Self::Strict => make_strict(&mut table, &UNIX_AND_INTERNET),
            Self::StrictOffline => make_strict(&mut table, &[libc::AF_UNIX]),
            Self::Build => {
                for call in BUILD_CALLS {
                    table[*call as usize] = Verdict::Always(Action::Allow);
                }
            }
        }
        table
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "default",
            Self::Strict | Self::StrictOffline => "strict",
            Self::Build => "build",
        })
    }
}

impl FromStr for Profile {
    type Err = UnknownProfile;

    fn from_str(text: &str) -> Result<Self, UnknownProfile> {
        match text {
            "" | "default" => Ok(Self::Default),
            "strict" => Ok(Self::Strict),
            "build" => Ok(Self::Build),
            _ => Err(UnknownProfile),
        }
    }
}

/// Not the name of a profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnknownProfile;

impl fmt::Display for UnknownProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a profile is strict, default or build")
    }
}

impl std::error::Error for UnknownProfile {}

const DENIED: Action = Action::Errno(libc::EPERM as u16);
/// Nothing is done, and the answer is that it is done.
const PRETENDED: Action = Action::Errno(0);

/// Calls that no program in a sandbox needs and that reach beyond it: modules, kexec, swap, clocks,
/// mounts, namespaces, keys, BPF, tracing of the machine, raw ports, quotas.
const DENIED_CALLS: &[libc::c_long] = &[
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_adjtimex,
    libc::SYS_bpf,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_ioperm,
    libc::SYS_iopl,
    libc::SYS_kcmp,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pivot_root,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_setns,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
    libc::SYS_vhangup,
];

/// Calls that programs probe for and do without: io_uring by policy, clone3 because its flags cannot
/// be seen by a filter, cachestat because the page cache of a layer is shared by sandboxes, and those
/// that only old kernels had.
const ABSENT_CALLS: &[libc::c_long] = &[
    CACHESTAT,
    libc::SYS__sysctl,
    libc::SYS_afs_syscall,
    libc::SYS_clone3,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_lookup_dcookie,
    libc::SYS_memfd_secret,
    libc::SYS_modify_ldt,
    libc::SYS_security,
    libc::SYS_sysfs,
    libc::SYS_uselib,
    libc::SYS_ustat,
    libc::SYS_vserver,
];

// Calls without a name in libc.
const CACHESTAT: libc::c_long = 451;
const OPEN_TREE_ATTR: libc::c_long = 467;
const FILE_SETATTR: libc::c_long = 469;
/// create_module, get_kernel_syms, query_module, nfsservctl, getpmsg, putpmsg, tuxcall.
const OLD_CALLS: [usize; 7] = [174, 177, 178, 180, 181, 182, 184];
/// lsm_get_self_attr, lsm_set_self_attr, lsm_list_modules.
const LSM_CALLS: [usize; 3] = [459, 460, 461];

/// Numbers that were looked at: the first and the last of each run.
const KNOWN: [(usize, usize); 2] = [(0, 334), (424, 469)];

/// Denied by `strict` beyond [`DENIED_CALLS`]: looking into other processes, becoming another user, another
/// root, placing memory, and what only debuggers and emulators ask for.
const STRICT_CALLS: &[libc::c_long] = &[
    libc::SYS_chroot,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_name_to_handle_at,
    libc::SYS_personality,
    libc::SYS_pidfd_getfd,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_setfsgid,
    libc::SYS_setfsuid,
    libc::SYS_setgid,
    libc::SYS_setgroups,
    libc::SYS_setregid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_setreuid,
    libc::SYS_setuid,
];

/// Allowed by `build`: any personality (cross builds, `setarch`), and comparing own processes (debuggers and
/// graphics libraries in test suites).
const BUILD_CALLS: &[libc::c_long] = &[libc::SYS_kcmp, libc::SYS_personality];

const ALL: u32 = u32::MAX;

/// What `strict` speaks where there is a network.
const UNIX_AND_INTERNET: [libc::c_int; 3] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6];

fn test(argument: u8, mask: u32, value: u32) -> Test {
    Test { argument, half: Half::Low, mask, equal: true, value }
}

/// Denied when a test holds.
fn deny(tests: impl IntoIterator<Item = Test>) -> Verdict {
    let of = tests.into_iter().map(|test| (test, DENIED)).collect();
    Verdict::First { of, otherwise: Action::Allow }
}

/// Allowed when a test holds.
fn allow(tests: impl IntoIterator<Item = Test>, otherwise: Action) -> Verdict {
    let of = tests.into_iter().map(|test| (test, Action::Allow)).collect();
    Verdict::First { of, otherwise }
}

fn families(table: &mut [Verdict], known: &[libc::c_int]) {
    let tests = known.iter().map(|family| test(0, ALL, *family as u32));
    let verdict = allow(tests, Action::Errno(libc::EAFNOSUPPORT as u16));
    for call in [libc::SYS_socket, libc::SYS_socketpair] {
        table[call as usize] = verdict.clone();
    }
}

fn make_strict(table: &mut [Verdict], known: &[libc::c_int]) {
    for call in STRICT_CALLS {
        table[*call as usize] = Verdict::Always(DENIED);
    }
    let devices = |mode| [libc::S_IFCHR, libc::S_IFBLK].map(|kind| test(mode, libc::S_IFMT, kind));
    table[libc::SYS_mknod as usize] = deny(devices(1));
    table[libc::SYS_mknodat as usize] = deny(devices(2));
    families(table, known);
}

fn default_verdicts() -> Vec<Verdict> {
    let mut table = vec![NO_CALL; KNOWN[1].1 + 1];
    for (first, last) in KNOWN {
        table[first..=last].fill(Verdict::Always(Action::Allow));
    }
    for number in DENIED_CALLS.iter().chain([&OPEN_TREE_ATTR, &FILE_SETATTR]) {
        table[*number as usize] = Verdict::Always(DENIED);
    }
    for number in ABSENT_CALLS {
        table[*number as usize] = NO_CALL;
    }
    for number in OLD_CALLS.into_iter().chain(LSM_CALLS) {
        table[number] = NO_CALL;
    }
    // New namespaces would bring back the rights that were dropped. CLONE_PARENT would make a child of
    // our zygote, which has to reap it and to tell the runtime, at the expense of everybody else.
    const NAMESPACES_AND_PARENT: u32 = 0x7e02_8000;
    table[libc::SYS_clone as usize] =
        deny([Test { equal: false, ..test(0, NAMESPACES_AND_PARENT, 0) }]);
    // Others know no network namespace (AF_VSOCK reaches the hypervisor) or are little else than a way
    // into rarely used kernel code (AF_ALG, AF_TIPC, AF_RDS, AF_QIPCRTR, ...).
    families(&mut table, &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK]);
    table[libc::SYS_ioctl as usize] = deny([
        test(1, ALL, 0x5412),    // TIOCSTI: typing into the terminal of somebody else
        test(1, ALL, 0x541c),    // TIOCLINUX
        test(1, 0xffff, 0x586d), // XFS_IOC_SWAPEXT
        test(1, 0xffff, 0x5881), // XFS_IOC_EXCHANGE_RANGE
        test(1, 0xffff, 0x5882), // XFS_IOC_START_COMMIT
        test(1, 0xffff, 0x5883), // XFS_IOC_COMMIT_RANGE
        test(1, 0xffff, 0x660f), // EXT4_IOC_MOVE_EXT
        test(1, 0xffff, 0x5820), // FS_IOC_FSSETXATTR: project ids, and with them the quota
    ]);
    let personas = [0, 0x8, 0x2_0000, 0x2_0008, 0x4_0000, ALL];
    table[libc::SYS_personality as usize] =
        allow(personas.map(|persona| test(0, ALL, persona)), DENIED);
    core_limit(&mut table);
    table
}

/// With a limit of one byte the kernel does not start the host's program for core dumps, with zero bytes it
/// does. So nobody changes it: who asks hears that it is done, since programs that hold secrets ask for zero
/// and give up when that fails, and what they want is so: nothing is dumped.
fn core_limit(table: &mut [Verdict]) {
    let core = libc::RLIMIT_CORE;
    let set = vec![(test(0, ALL, core), PRETENDED)];
    table[libc::SYS_setrlimit as usize] = Verdict::First { of: set, otherwise: Action::Allow };
    // A pointer to the new limit is null when the old one is asked for.
    let is_set = |half| Test { half, equal: false, ..test(2, ALL, 0) };
    let other = Test { equal: false, ..test(1, ALL, core) };
    let of = vec![
        (other, Action::Allow),
        (is_set(Half::Low), PRETENDED),
        (is_set(Half::High), PRETENDED),
    ];
    table[libc::SYS_prlimit64 as usize] = Verdict::First { of, otherwise: Action::Allow };
}

#[cfg(test)]
mod tests;
