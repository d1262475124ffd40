//! System call filters: a table of verdicts compiled to classic BPF.
//!
//! For: what a sandbox may ask of the kernel; the tables are in [`crate::profile`]. The program is a binary
//! search over ranges of numbers, so it is short, quick to check when the kernel takes it, and almost every
//! call that is always allowed is answered from the kernel's own bitmap afterwards.
//!
//! A call that the table does not know or of another ABI answers ENOSYS, so that programs fall back.
//! Numbers are those of x86-64.

use std::io;

/// What the kernel does with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Runs it.
    Allow,
    /// Answers this errno. 0: does nothing, and answers that it is done.
    Errno(u16),
}

impl Action {
    pub(crate) fn value(self) -> u32 {
        match self {
            Self::Allow => libc::SECCOMP_RET_ALLOW,
            Self::Errno(errno) => libc::SECCOMP_RET_ERRNO | u32::from(errno),
        }
    }
}

/// Which 32 bits of an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// All that the kernel takes of an `int`.
    Low,
    /// The rest of a pointer.
    High,
}

/// A test of one half of an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Test {
    /// Which argument, from 0.
    pub argument: u8,
    /// Which half of it.
    pub half: Half,
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
    /// What stands beside the first test that holds, else `otherwise`.
    First {
        /// The tests, in order.
        of: Vec<(Test, Action)>,
        /// When none holds.
        otherwise: Action,
    },
}

/// The verdict over calls that nobody looked at.
pub(crate) const NO_CALL: Verdict = Verdict::Always(Action::Errno(libc::ENOSYS as u16));

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

    /// The profile of the init of a sandbox: what it takes to report, to give everything up and to sleep.
    /// Short, since the kernel translates it once more for every sandbox.
    pub fn init() -> Self {
        let mut table = vec![NO_CALL; libc::SYS_close_range as usize + 1];
        for number in INIT_CALLS {
            table[*number as usize] = Verdict::Always(Action::Allow);
        }
        Self::compile(&table)
    }

    /// How many instructions it has.
    pub fn length(&self) -> usize {
        self.program.len()
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
    let (tests, otherwise) = match verdict {
        Verdict::Always(always) => return vec![action(*always)],
        Verdict::First { of, otherwise } => (of, *otherwise),
    };
    let mut program = Vec::new();
    for (test, then) in tests {
        // Little endian: the low half lies first.
        let half = if test.half == Half::High { 4 } else { 0 };
        program.push(load(ARGUMENTS_OFFSET + 8 * u32::from(test.argument) + half));
        program.push(statement(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, test.mask));
        let (if_true, if_false) = if test.equal { (0, 1) } else { (1, 0) };
        program.push(jump(libc::BPF_JEQ, test.value, if_true, if_false));
        program.push(action(*then));
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

/// What the kernel would answer to a call under a filter.
#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Runs a program the way the kernel does, for the instructions that we emit.
    pub fn run(filter: &Filter, arch: u32, number: u32, arguments: [u64; 6]) -> u32 {
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

    /// [`run`] for our own ABI.
    pub fn call(filter: &Filter, number: libc::c_long, arguments: [u64; 6]) -> u32 {
        run(filter, AUDIT_ARCH_X86_64, number as u32, arguments)
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
    fn the_first_test_that_holds_decides_also_about_the_upper_half() {
        let test = |half, value| Test { argument: 1, half, mask: u32::MAX, equal: true, value };
        let done = Action::Errno(0);
        let of = vec![(test(Half::High, 7), done), (test(Half::Low, 5), Action::Errno(1))];
        let filter = Filter::compile(&[Verdict::First { of, otherwise: Action::Allow }]);
        assert_eq!(call(&filter, 0, [0, 7 << 32 | 5, 0, 0, 0, 0]), done.value());
        assert_eq!(call(&filter, 0, [0, 8 << 32 | 5, 0, 0, 0, 0]), Action::Errno(1).value());
        assert_eq!(call(&filter, 0, [0, 7, 0, 0, 0, 0]), Action::Allow.value());
    }

    #[test]
    fn other_abis_get_no_call_at_all() {
        let filter = Filter::init();
        let absent = Action::Errno(libc::ENOSYS as u16).value();
        assert_eq!(run(&filter, 0x4000_0003, 3, [0; 6]), absent);
        assert_eq!(run(&filter, AUDIT_ARCH_X86_64, 0x4000_0000, [0; 6]), absent);
    }
}
