//! The process of a command, from its birth to execve(2): enters the sandbox, takes its streams, its
//! user and its limits, and becomes the command.
//!
//! Until then it is a copy of the zygote inside the sandbox's pid namespace. It cannot be read or traced
//! there: its memory is undumpable, and root of the sandbox lacks the right to overrule that. Its
//! descriptors are closed by execve. The image's shell has no part in this.

use crate::user::{self, User};
use crate::wire::{Failure, Step};
use crate::zygote::Shared;
use proto::launch::{Exec, Refused, Reply, Running};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use sys::capability::{self, CapabilitySet};
use sys::process::{self, Namespaces, Resource, signals};
use sys::pty;

const MISSING: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;
const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Why a process does not become its command.
struct Refusal {
    code: i32,
    message: String,
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        Self { code: NOT_EXECUTABLE, message: failure.to_string() }
    }
}

/// Becomes the command that `request` asks for. Never returns.
pub fn become_command(
    shared: &Shared,
    request: &Exec,
    sandbox: &OwnedFd,
    streams: &[OwnedFd],
) -> ! {
    let refusal = match become_inner(shared, request, sandbox, streams) {
        Ok(never) => match never {},
        Err(refusal) => refusal,
    };
    let Refusal { code, message } = refusal;
    let refused = Reply::Refused(Refused { request: request.request, code, message });
    let _runtime_gone = shared.wire.send(refused, &[]);
    std::process::exit(code);
}

fn become_inner(
    shared: &Shared,
    request: &Exec,
    sandbox: &OwnedFd,
    streams: &[OwnedFd],
) -> Result<std::convert::Infallible, Refusal> {
    enter(shared, request, sandbox).step(|| "enter the sandbox".into())?;
    process::new_session().step(|| "start a session".into())?;
    let master = take_streams(request, streams)?;
    let user = user::resolve(&request.user)
        .map_err(|message| Refusal { code: NOT_EXECUTABLE, message })?;
    change_directory(&request.cwd)?;
    let command = Command::prepare(request, &user)?;
    if let Some(slave) = &master {
        give_terminal(slave, &user);
    }
    // Last, because from here on the sandbox's own rules hold for this process too.
    let running =
        Reply::Running(Running { request: request.request, inner_pid: process::own_pid() });
    let confined = confine(shared, &user).step(|| "confine the command".into());
    let descriptors: Vec<_> = master.iter().map(|pair| pair.master.as_fd()).collect();
    confined?;
    shared.wire.send(running, &descriptors).step(|| "report".into())?;
    Err(command.run())
}

fn enter(shared: &Shared, request: &Exec, sandbox: &OwnedFd) -> io::Result<()> {
    shared.join_version_1(&request.group)?;
    let all = Namespaces::MOUNT
        .with(Namespaces::IPC)
        .with(Namespaces::UTS)
        .with(Namespaces::NET)
        .with(Namespaces::CGROUP);
    process::enter_namespaces_of(sandbox.as_fd(), all)
}

/// Standard streams: the given ones, or a terminal of the sandbox's own, which is returned.
fn take_streams(request: &Exec, streams: &[OwnedFd]) -> Result<Option<pty::Pair>, Failure> {
    if !request.terminal {
        for (number, stream) in (0..=2).zip(streams) {
            process::set_standard_stream(number, stream.as_fd())
                .step(|| "standard streams".into())?;
        }
        return Ok(None);
    }
    let pair = pty::open(Path::new("/dev/pts/ptmx")).step(|| "open a terminal".into())?;
    let size = |value: u32, default: u16| match u16::try_from(value) {
        Ok(0) | Err(_) => default,
        Ok(value) => value,
    };
    pty::resize(pair.master.as_fd(), size(request.rows, 24), size(request.columns, 80))
        .and_then(|()| pty::make_controlling(pair.slave.as_fd()))
        .step(|| "take the terminal".into())?;
    for number in 0..=2 {
        process::set_standard_stream(number, pair.slave.as_fd())
            .step(|| "standard streams".into())?;
    }
    Ok(Some(pair))
}

/// The terminal belongs to the user of the command, as login(1) arranges it.
fn give_terminal(pair: &pty::Pair, user: &User) {
    const TTY_GROUP: u32 = 5;
    let owned = std::os::unix::fs::fchown(&pair.slave, Some(user.uid), Some(TTY_GROUP));
    // A terminal that stays root's works too, for all but programs that open it by name.
    drop(owned);
}

fn change_directory(cwd: &[u8]) -> Result<(), Refusal> {
    let cwd = if cwd.is_empty() { b"/" } else { cwd };
    let path = Path::new(std::ffi::OsStr::from_bytes(cwd));
    std::env::set_current_dir(path).map_err(|error| Refusal {
        code: NOT_EXECUTABLE,
        message: format!("working directory {}: {error}", path.display()),
    })
}

fn confine(shared: &Shared, user: &User) -> io::Result<()> {
    // A limit of one byte also keeps the kernel from starting the host's core dump program.
    process::set_limit(Resource::Core, 1, 1)?;
    let (_, hard) = process::limit_of(Resource::Descriptors)?;
    process::set_limit(Resource::Descriptors, hard.min(1024), hard)?;
    process::set_umask(0o022);
    capability::limit_bounding_set(CapabilitySet::SANDBOX)?;
    process::become_user(user.uid, user.gid, &user.groups)?;
    let keep = if user.uid == 0 { CapabilitySet::SANDBOX } else { CapabilitySet::NONE };
    capability::set(keep)?;
    process::set_undumpable()?;
    process::set_no_new_privileges()?;
    signals::reset()?;
    shared.filter.install()
}

/// Everything that execve needs, made before the rights are gone.
struct Command {
    name: Vec<u8>,
    /// What to try, in order.
    candidates: Vec<CString>,
    argv: Vec<CString>,
    env: Vec<CString>,
}

impl Command {
    fn prepare(request: &Exec, user: &User) -> Result<Self, Refusal> {
        let strings = |list: &[Vec<u8>]| -> Result<Vec<CString>, Refusal> {
            list.iter().map(|text| c_string(text.clone())).collect()
        };
        let argv = strings(&request.argv)?;
        let name = request.argv.first().filter(|name| !name.is_empty()).cloned();
        let name =
            name.ok_or_else(|| Refusal { code: MISSING, message: "empty command".into() })?;
        let mut env = strings(&request.env)?;
        let lookup =
            |key: &[u8]| {
                request.env.iter().rev().find_map(|entry| {
                    entry.strip_prefix(key).and_then(|rest| rest.strip_prefix(b"="))
                })
            };
        if lookup(b"HOME").is_none() {
            let home: &[u8] = if user.home.is_empty() { b"/" } else { &user.home };
            env.push(c_string([b"HOME=", home].concat())?);
        }
        if lookup(b"PATH").is_none() {
            env.push(c_string([b"PATH=", DEFAULT_PATH].concat())?);
        }
        if request.terminal && lookup(b"TERM").is_none() {
            env.push(c_string(b"TERM=xterm".to_vec())?);
        }
        let path = lookup(b"PATH").unwrap_or(DEFAULT_PATH);
        let candidates = candidates(&name, path)?;
        Ok(Self { name, candidates, argv, env })
    }

    /// Returns only when no candidate can be executed.
    fn run(&self) -> Refusal {
        let mut worst: Option<io::Error> = None;
        for candidate in &self.candidates {
            let error = process::execve(candidate, &self.argv, &self.env);
            let is_absent =
                matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory);
            let exists = || {
                Path::new(std::ffi::OsStr::from_bytes(candidate.as_bytes()))
                    .symlink_metadata()
                    .is_ok()
            };
            if !is_absent || exists() {
                worst.get_or_insert(error);
            }
        }
        let name = String::from_utf8_lossy(&self.name);
        match worst {
            None => Refusal { code: MISSING, message: format!("{name}: command not found") },
            Some(error) if error.kind() == io::ErrorKind::NotFound => Refusal {
                code: MISSING,
                message: format!("{name}: its interpreter or its target does not exist"),
            },
            Some(error) => Refusal { code: NOT_EXECUTABLE, message: format!("{name}: {error}") },
        }
    }
}

fn candidates(name: &[u8], path: &[u8]) -> Result<Vec<CString>, Refusal> {
    if name.contains(&b'/') {
        return Ok(vec![c_string(name.to_vec())?]);
    }
    path.split(|byte| *byte == b':')
        .map(|folder| {
            let folder = if folder.is_empty() { b"." } else { folder };
            c_string([folder, b"/", name].concat())
        })
        .collect()
}

fn c_string(bytes: Vec<u8>) -> Result<CString, Refusal> {
    CString::new(bytes).map_err(|_| Refusal {
        code: NOT_EXECUTABLE,
        message: "a zero byte in the command or its environment".into(),
    })
}
