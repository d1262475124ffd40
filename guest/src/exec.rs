//! The process of a command, from its birth to execve(2): enters the sandbox, takes its streams, its
//! user and its limits, and becomes the command.
//!
//! Until then it is a copy of the zygote inside the sandbox's pid namespace. It cannot be read or traced
//! there: its memory is undumpable, and root of the sandbox lacks the right to overrule that. It gives up
//! our descriptors and our rights before it follows any name. The image's shell has no part in this.

use crate::user::{self, User};
use crate::users;
use crate::wire::{Failure, Step};
use crate::zygote::Shared;
use proto::launch::{Exec, Refused, Reply, Running};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use sys::capability::{self, CapabilitySet};
use sys::process::{self, Namespaces, Resource, signals};
use sys::profile::Profile;
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
    rare_groups: &[OwnedFd],
) -> ! {
    let joined = rare_groups
        .iter()
        .try_for_each(|group| sys::cgroup::join_version_1(group.as_fd(), Path::new("")))
        .step(|| "join the groups of rare limits".into());
    let start = |()| become_inner(shared, request, sandbox, streams);
    let refusal = match joined.map_err(Refusal::from).and_then(start) {
        Ok(never) => match never {},
        Err(refusal) => refusal,
    };
    let Refusal { code, message } = refusal;
    let refused = Reply::Refused(Refused { request: request.request, code, message });
    let _runtime_gone = shared.wire.send(refused, &[]);
    let _none_left = process::close_from(0);
    std::process::exit(code);
}

fn become_inner(
    shared: &Shared,
    request: &Exec,
    sandbox: &OwnedFd,
    streams: &[OwnedFd],
) -> Result<std::convert::Infallible, Refusal> {
    enter(shared, request, sandbox).step(|| "enter the sandbox".into())?;
    enter_users(request, sandbox, streams).step(|| "become a user of the sandbox".into())?;
    process::new_session().step(|| "start a session".into())?;
    if !request.terminal {
        take_streams(streams).step(|| "standard streams".into())?;
    }
    let profile = Profile::of_number(request.profile)
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
        .step(|| "choose the profile".into())?;
    give_up_ours(shared).step(|| "give up what is ours".into())?;
    let master = if request.terminal { Some(take_terminal(request)?) } else { None };
    own_null_input().step(|| "open the sandbox's /dev/null".into())?;
    let user = user::resolve(&request.user)
        .and_then(|user| user.within(request.first_id))
        .map_err(|message| Refusal { code: NOT_EXECUTABLE, message })?;
    if !request.terminal && user.uid != 0 {
        give_streams(&user);
    }
    change_directory(&request.cwd)?;
    let command = Command::prepare(request, &user)?;
    if let Some(slave) = &master {
        give_terminal(slave, &user);
    }
    // Last, because from here on the sandbox's own rules hold for this process too.
    let running =
        Reply::Running(Running { request: request.request, inner_pid: process::own_pid() });
    let confined = confine(shared, profile, &user).step(|| "confine the command".into());
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

/// Becomes root of the sandbox's users, who own the pipes to the runtime, or its /dev/stdout could not be
/// opened. Last of all namespaces, and before anything is named: the rights over the host are gone then.
fn enter_users(request: &Exec, sandbox: &OwnedFd, streams: &[OwnedFd]) -> io::Result<()> {
    if request.first_id == 0 {
        return Ok(());
    }
    let owner = Some(request.first_id);
    for pipe in streams.iter().filter(|stream| is_pipe(stream)) {
        std::os::unix::fs::fchown(pipe, owner, owner)?;
    }
    users::enter_those_of(sandbox)
}

fn is_pipe(stream: &OwnedFd) -> bool {
    let file = stream.try_clone().map(std::fs::File::from);
    let metadata = file.and_then(|file| file.metadata());
    metadata.is_ok_and(|metadata| metadata.file_type().is_fifo())
}

fn take_streams(streams: &[OwnedFd]) -> io::Result<()> {
    let mut numbered = (0..=2).zip(streams);
    numbered.try_for_each(|(number, stream)| process::set_standard_stream(number, stream.as_fd()))
}

/// Closes every descriptor but the standard streams and the socket, and stops using rights that root of
/// the sandbox lacks.
///
/// INVARIANT: nothing that the image or the sandbox names is looked up before this. A working directory, a
/// file of users or the interpreter of a script may be a link into /proc: to a descriptor of ours, and with
/// our rights also to one of another process that is being started. From the folder of a group `..`
/// leads to the root of the host.
fn give_up_ours(shared: &Shared) -> io::Result<()> {
    // A limit of one byte also keeps the kernel from starting the host's core dump program.
    process::set_limit(Resource::Core, 1, 1)?;
    // The init has the sandbox's bound.
    const INIT: process::Pid = 1;
    let (_, bound) = process::limit_of_process(INIT, Resource::Descriptors)?;
    process::set_limit(Resource::Descriptors, bound.min(1024), bound)?;
    for counted_by_user in [Resource::MessageQueues, Resource::PendingSignals] {
        // The host's own root is the same user to the kernel, and must not find it all taken.
        let (_, hard) = process::limit_of(counted_by_user)?;
        process::set_limit(counted_by_user, hard / 4, hard / 4)?;
    }
    process::close_all_but(shared.wire.descriptor())?;
    capability::limit_bounding_set(CapabilitySet::SANDBOX)?;
    // Not the permitted ones: see `confine`.
    capability::set_effective(CapabilitySet::SANDBOX)
}

/// The host's null device stands for no input; the sandbox's own takes its place. Root of the sandbox is
/// root of the host to the kernel, and could change mode and owner of the host's through a descriptor.
fn own_null_input() -> io::Result<()> {
    /// Major 1, minor 3.
    const NULL_DEVICE: u64 = 0x103;
    // A pipe without a writer does not hold us, should it be in the place of the device.
    const O_NONBLOCK_NOCTTY: i32 = 0o4000 | 0o400;
    let given = std::fs::File::from(io::stdin().as_fd().try_clone_to_owned()?).metadata()?;
    if given.file_type().is_char_device() && given.rdev() == NULL_DEVICE {
        let mut how = std::fs::OpenOptions::new();
        let own = how.read(true).custom_flags(O_NONBLOCK_NOCTTY).open("/dev/null")?;
        process::set_standard_stream(0, own.as_fd())?;
    }
    Ok(())
}

/// A terminal of the sandbox's own.
fn take_terminal(request: &Exec) -> Result<pty::Pair, Failure> {
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
    Ok(pair)
}

/// The terminal belongs to the user of the command, as login(1) arranges it.
fn give_terminal(pair: &pty::Pair, user: &User) {
    const TTY_GROUP: u32 = 5;
    let owned = std::os::unix::fs::fchown(&pair.slave, Some(user.uid), Some(TTY_GROUP));
    // A terminal that stays root's works too, for all but programs that open it by name.
    drop(owned);
}

/// Pipes belong to the user of the command, so that it can open /dev/stdout.
fn give_streams(user: &User) {
    let copies = [
        io::stdin().as_fd().try_clone_to_owned(),
        io::stdout().as_fd().try_clone_to_owned(),
        io::stderr().as_fd().try_clone_to_owned(),
    ];
    for pipe in copies.into_iter().flatten().filter(is_pipe) {
        // One that stays root's works too, for all but programs that open it by name.
        drop(std::os::unix::fs::fchown(&pipe, Some(user.uid), Some(user.gid)));
    }
}

fn change_directory(cwd: &[u8]) -> Result<(), Refusal> {
    let cwd = if cwd.is_empty() { b"/" } else { cwd };
    let path = Path::new(std::ffi::OsStr::from_bytes(cwd));
    std::env::set_current_dir(path).map_err(|error| Refusal {
        code: NOT_EXECUTABLE,
        message: format!("working directory {}: {error}", path.display()),
    })
}

fn confine(shared: &Shared, profile: Profile, user: &User) -> io::Result<()> {
    process::set_umask(0o022);
    if shared.apparmor {
        // Counts from execve on.
        let label = format!("exec {}", profile.security_label());
        std::fs::write("/proc/thread-self/attr/apparmor/exec", label)?;
    }
    capability::limit_bounding_set(profile.capabilities())?;
    // INVARIANT: until execve has closed our descriptors this process is permitted more than anybody in
    // the sandbox, so that nobody there can reach them, even while it is being killed (a process without
    // memory is no longer protected by being undumpable). execve itself cuts the rights down: those of
    // root to the bounding set, those of others to none.
    process::keep_rights_until_exec()?;
    process::become_user(user.uid, user.gid, &user.groups)?;
    process::set_undumpable()?;
    process::set_no_new_privileges()?;
    signals::reset()?;
    if profile.separates_commands() {
        // An older kernel cannot; the other walls stand.
        let _separated = sys::landlock::separate()?;
    }
    shared.filters[profile.number() as usize].install()
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
