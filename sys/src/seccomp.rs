//! System call filters: a table of verdicts compiled to classic BPF.
//!
//! For: the profile of what a sandbox may ask of the kernel. The program is a binary search over ranges
//! of numbers, so it is short, quick to check when the kernel takes it, and almost every call that is
//! always allowed is answered from the kernel's own bitmap afterwards.
//!
//! A denied call answers EPERM; a call that this profile does not know, that must be probed for, or of
//! another ABI answers ENOSYS, so that programs fall back. Numbers are those of x86-64.

use std::io;

/// What the kernel does with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Runs it.
    Allow,
    /// Answers this errno.
    Errno(u16),
}

impl Action {
    fn value(self) -> u32 {
        match self {
            Self::Allow => libc::SECCOMP_RET_ALLOW,
            Self::Errno(errno) => libc::SECCOMP_RET_ERRNO | u32::from(errno),
        }
    }
}

/// A test of the low 32 bits of an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Test {
    /// Which argument, from 0.
    pub argument: u8,
    /// Bits that count.
    pub mask: u32,
    /// Whether the masked argument must equal `value` or must differ from it.
    pub equal: bool,
    /// What it is compared with.
    pub value: u32,
}

/// What happens to one system call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The same for all arguments.
    Always(Action),
    /// `then` when any test holds, else `otherwise`.
    If {
        /// The tests.
        any: Vec<Test>,
        /// When one holds.
        then: Action,
        /// When none holds.
        otherwise: Action,
    },
}

const NO_CALL: Verdict = Verdict::Always(Action::Errno(libc::ENOSYS as u16));
const DENIED: Action = Action::Errno(libc::EPERM as u16);

/// A compiled filter.
#[derive(Debug, Clone)]
pub struct Filter {
    program: Vec<libc::sock_filter>,
}

impl Filter {
    /// Compiles verdicts for the calls 0, 1, 2, ...; calls beyond the table answer ENOSYS.
    pub fn compile(verdicts: &[Verdict]) -> Self {
        let mut ranges: Vec<(u32, &Verdict)> = Vec::new();
        for (number, verdict) in verdicts.iter().enumerate() {
            if ranges.last().is_none_or(|(_, last)| *last != verdict) {
                ranges.push((number as u32, verdict));
            }
        }
        if ranges.last().is_none_or(|(_, last)| **last != NO_CALL) {
            ranges.push((verdicts.len() as u32, &NO_CALL));
        }
        let foreign = action(Action::Errno(libc::ENOSYS as u16));
        let mut program = vec![
            load(ARCH_OFFSET),
            jump(libc::BPF_JEQ, AUDIT_ARCH_X86_64, 1, 0),
            foreign,
            load(NUMBER_OFFSET),
        ];
        program.extend(search(&ranges));
        Self { program }
    }

    /// The default profile of a sandbox.
    pub fn sandbox() -> Self {
        Self::compile(&sandbox_verdicts())
    }

    /// The profile of the init of a sandbox: what it takes to report, to give everything up and to sleep.
    /// Short, since the kernel translates it once more for every sandbox.
    pub fn init() -> Self {
        let mut table = vec![NO_CALL; libc::SYS_close_range as usize + 1];
        for number in INIT_CALLS {
            table[*number as usize] = Verdict::Always(Action::Allow);
        }
        Self::compile(&table)
    }

    /// The program as the bytes that [`Filter::from_bytes`] takes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.program.len() * 8);
        for line in &self.program {
            bytes.extend(line.code.to_ne_bytes());
            bytes.extend([line.jt, line.jf]);
            bytes.extend(line.k.to_ne_bytes());
        }
        bytes
    }

    /// The inverse of [`Filter::to_bytes`]. The kernel checks the program when it is installed.
    pub fn from_bytes(bytes: &[u8]) -> io::Result<Self> {
        let (lines, rest) = bytes.as_chunks::<8>();
        if lines.is_empty() || lines.len() > 4096 || !rest.is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no BPF program"));
        }
        let program = lines.iter().map(|line| libc::sock_filter {
            code: u16::from_ne_bytes([line[0], line[1]]),
            jt: line[2],
            jf: line[3],
            k: u32::from_ne_bytes([line[4], line[5], line[6], line[7]]),
        });
        Ok(Self { program: program.collect() })
    }

    /// Puts the filter over the calling thread and all that it starts, for ever. The caller must have
    /// given up new privileges, or hold CAP_SYS_ADMIN.
    pub fn install(&self) -> io::Result<()> {
        let program = libc::sock_fprog {
            len: self.program.len() as u16,
            filter: self.program.as_ptr().cast_mut(),
        };
        // SAFETY: the program and its length belong together; the kernel copies and checks it.
        let result = unsafe {
            libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
const NUMBER_OFFSET: u32 = 0;
const ARCH_OFFSET: u32 = 4;
const ARGUMENTS_OFFSET: u32 = 16;

fn load(offset: u32) -> libc::sock_filter {
    statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset)
}

fn action(action: Action) -> libc::sock_filter {
    statement(libc::BPF_RET | libc::BPF_K, action.value())
}

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

fn jump(kind: u32, k: u32, if_true: u8, if_false: u8) -> libc::sock_filter {
    let code = (libc::BPF_JMP | kind | libc::BPF_K) as u16;
    libc::sock_filter { code, jt: if_true, jf: if_false, k }
}

/// Finds the range that the loaded number lies in. Jumps over a whole half use the unconditional jump,
/// whose distance has no limit of 255.
fn search(ranges: &[(u32, &Verdict)]) -> Vec<libc::sock_filter> {
    if let [(_, verdict)] = ranges {
        return answer(verdict);
    }
    let (low, high) = ranges.split_at(ranges.len() / 2);
    let (low, first_high) = (search(low), high[0].0);
    let mut program = vec![
        jump(libc::BPF_JGE, first_high, 0, 1),
        statement(libc::BPF_JMP | libc::BPF_JA, low.len() as u32),
    ];
    program.extend(low);
    program.extend(search(high));
    program
}

fn answer(verdict: &Verdict) -> Vec<libc::sock_filter> {
    let (any, then, otherwise) = match verdict {
        Verdict::Always(always) => return vec![action(*always)],
        Verdict::If { any, then, otherwise } => (any, *then, *otherwise),
    };
    let mut program = Vec::new();
    for test in any {
        program.push(load(ARGUMENTS_OFFSET + 8 * u32::from(test.argument)));
        program.push(statement(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, test.mask));
        let (if_true, if_false) = if test.equal { (0, 1) } else { (1, 0) };
        program.push(jump(libc::BPF_JEQ, test.value, if_true, if_false));
        program.push(action(then));
    }
    program.push(action(otherwise));
    program
}

/// Calls of an init: a message, memory for it, the end of its descriptors and rights, and sleep.
const INIT_CALLS: &[libc::c_long] = &[
    libc::SYS_brk,
    libc::SYS_capset,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_exit_group,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_pause,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigreturn,
    libc::SYS_sendmsg,
];

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

fn sandbox_verdicts() -> Vec<Verdict> {
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
    let equals = |argument, mask, value| Test { argument, mask, equal: true, value };
    let deny = |any| Verdict::If { any, then: DENIED, otherwise: Action::Allow };
    const ALL: u32 = u32::MAX;
    // New namespaces would bring back the rights that were dropped. CLONE_PARENT would make a child of
    // our zygote, which has to reap it and to tell the runtime, at the expense of everybody else.
    const NAMESPACES_AND_PARENT: u32 = 0x7e02_8000;
    table[libc::SYS_clone as usize] =
        deny(vec![Test { argument: 0, mask: NAMESPACES_AND_PARENT, equal: false, value: 0 }]);
    // Others know no network namespace (AF_VSOCK reaches the hypervisor) or are little else than a way
    // into rarely used kernel code (AF_ALG, AF_TIPC, AF_RDS, AF_QIPCRTR, ...).
    let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
    for call in [libc::SYS_socket, libc::SYS_socketpair] {
        table[call as usize] = Verdict::If {
            any: families.map(|family| equals(0, ALL, family as u32)).to_vec(),
            then: Action::Allow,
            otherwise: Action::Errno(libc::EAFNOSUPPORT as u16),
        };
    }
    table[libc::SYS_ioctl as usize] = deny(vec![
        equals(1, ALL, 0x5412), // TIOCSTI: typing into the terminal of somebody else
        equals(1, ALL, 0x541c), // TIOCLINUX
        equals(1, 0xffff, 0x586d), // XFS_IOC_SWAPEXT
        equals(1, 0xffff, 0x5881), // XFS_IOC_EXCHANGE_RANGE
        equals(1, 0xffff, 0x5882), // XFS_IOC_START_COMMIT
        equals(1, 0xffff, 0x5883), // XFS_IOC_COMMIT_RANGE
        equals(1, 0xffff, 0x660f), // EXT4_IOC_MOVE_EXT
        equals(1, 0xffff, 0x5820), // FS_IOC_FSSETXATTR: project ids, and with them the quota
    ]);
    let personas = [0, 0x8, 0x2_0000, 0x2_0008, 0x4_0000, ALL];
    table[libc::SYS_personality as usize] = Verdict::If {
        any: personas.map(|persona| equals(0, ALL, persona)).to_vec(),
        then: Action::Allow,
        otherwise: DENIED,
    };
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a program the way the kernel does, for the instructions that we emit.
    fn run(filter: &Filter, arch: u32, number: u32, arguments: [u64; 6]) -> u32 {
        let mut data = [0u8; 64];
        data[..4].copy_from_slice(&number.to_ne_bytes());
        data[4..8].copy_from_slice(&arch.to_ne_bytes());
        for (index, argument) in arguments.iter().enumerate() {
            data[16 + 8 * index..24 + 8 * index].copy_from_slice(&argument.to_ne_bytes());
        }
        let (mut pc, mut a) = (0usize, 0u32);
        loop {
            let line = filter.program[pc];
            pc += 1;
            let code = u32::from(line.code);
            let branch = |taken: bool| usize::from(if taken { line.jt } else { line.jf });
            if code == libc::BPF_LD | libc::BPF_W | libc::BPF_ABS {
                let at = line.k as usize;
                a = u32::from_ne_bytes(data[at..at + 4].try_into().unwrap());
            } else if code == libc::BPF_ALU | libc::BPF_AND | libc::BPF_K {
                a &= line.k;
            } else if code == libc::BPF_RET | libc::BPF_K {
                return line.k;
            } else if code == libc::BPF_JMP | libc::BPF_JA {
                pc += line.k as usize;
            } else if code == libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K {
                pc += branch(a >= line.k);
            } else {
                assert_eq!(code, libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K);
                pc += branch(a == line.k);
            }
        }
    }

    #[test]
    fn every_number_gets_the_verdict_of_the_table() {
        let (filter, table) = (Filter::sandbox(), sandbox_verdicts());
        for number in 0..1000u32 {
            let expected = match table.get(number as usize) {
                Some(Verdict::Always(action)) => *action,
                Some(Verdict::If { .. }) => continue,
                None => Action::Errno(libc::ENOSYS as u16),
            };
            let found = run(&filter, AUDIT_ARCH_X86_64, number, [0; 6]);
            assert_eq!(found, expected.value(), "{number}");
        }
        assert!(filter.program.len() < 400, "{}", filter.program.len());
    }

    #[test]
    fn an_init_may_do_what_it_needs_and_nothing_else() {
        let filter = Filter::init();
        for number in 0..1000u32 {
            let allowed = INIT_CALLS.contains(&libc::c_long::from(number));
            let expected = if allowed { Action::Allow } else { Action::Errno(libc::ENOSYS as u16) };
            let found = run(&filter, AUDIT_ARCH_X86_64, number, [0; 6]);
            assert_eq!(found, expected.value(), "{number}");
        }
        assert!(filter.program.len() < 70, "{}", filter.program.len());
    }

    #[test]
    fn arguments_decide_where_they_must() {
        let filter = Filter::sandbox();
        let call = |number: libc::c_long, arguments| {
            run(&filter, AUDIT_ARCH_X86_64, number as u32, arguments)
        };
        let denied = DENIED.value();
        let swap_extents = 0xc0c0_586d;
        assert_eq!(call(libc::SYS_ioctl, [3, swap_extents, 0, 0, 0, 0]), denied);
        assert_eq!(call(libc::SYS_ioctl, [3, 0x5401, 0, 0, 0, 0]), libc::SECCOMP_RET_ALLOW);
        assert_eq!(call(libc::SYS_clone, [0x1000_0011, 0, 0, 0, 0, 0]), denied);
        assert_eq!(call(libc::SYS_clone, [0x11, 0, 0, 0, 0, 0]), libc::SECCOMP_RET_ALLOW);
        // CLONE_PARENT.
        assert_eq!(call(libc::SYS_clone, [0x8011, 0, 0, 0, 0, 0]), denied);
        let no_family = Action::Errno(libc::EAFNOSUPPORT as u16).value();
        for family in 0..64 {
            let known = [1, 2, 10, 16].contains(&family);
            let expected = if known { libc::SECCOMP_RET_ALLOW } else { no_family };
            assert_eq!(call(libc::SYS_socket, [family, 1, 0, 0, 0, 0]), expected, "{family}");
            assert_eq!(call(libc::SYS_socketpair, [family, 1, 0, 0, 0, 0]), expected, "{family}");
        }
        assert_eq!(call(libc::SYS_personality, [5, 0, 0, 0, 0, 0]), denied);
    }

    #[test]
    fn other_abis_get_no_call_at_all() {
        let filter = Filter::sandbox();
        let absent = Action::Errno(libc::ENOSYS as u16).value();
        assert_eq!(run(&filter, 0x4000_0003, 3, [0; 6]), absent);
        assert_eq!(run(&filter, AUDIT_ARCH_X86_64, 0x4000_0000, [0; 6]), absent);
    }

    #[test]
    fn bytes_round_trip_and_rubbish_is_refused() {
        let filter = Filter::sandbox();
        let bytes = filter.to_bytes();
        assert_eq!(Filter::from_bytes(&bytes).unwrap().to_bytes(), bytes);
        assert!(Filter::from_bytes(&[]).is_err());
        assert!(Filter::from_bytes(&[0; 9]).is_err());
    }
}
