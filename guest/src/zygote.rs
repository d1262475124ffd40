//! The loop of the zygote: takes requests, forks, reaps, reports.
//!
//! It never waits for a child: a child reports by itself on the same socket, whose messages keep their
//! borders. A child is announced before it is reaped, so the runtime never hears of an unknown pid.

use crate::wire::{Failure, Incoming, Step, Wire};
use crate::{exec, init, stage};
use proto::launch::{Configure, Configured, Ended, Failed, Launch, Reply, Request, Started};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use sys::capability::{self, CapabilitySet};
use sys::cgroup;
use sys::process::{self, Exit, Fork, Forked, Namespaces, signals};
use sys::seccomp::Filter;

/// What every sandbox of this zygote shares.
pub struct Shared {
    /// The socket to the runtime.
    pub wire: Wire,
    /// Our group in each version 1 hierarchy.
    pub version_1: Vec<OwnedFd>,
    /// Our group in the version 2 hierarchy.
    pub version_2: Option<OwnedFd>,
    /// What a sandbox may ask of the kernel.
    pub filter: Filter,
    /// What an init may ask of the kernel.
    pub init_filter: Filter,
    /// Our own pid namespace, to come back to.
    pid_namespace: OwnedFd,
}

impl Shared {
    /// Moves the calling process into a group of every version 1 hierarchy.
    pub fn join_version_1(&self, group: &str) -> io::Result<()> {
        // A group without real-time budget refuses real-time processes, and a sandbox is none.
        process::use_ordinary_scheduling()?;
        self.version_1
            .iter()
            .try_for_each(|hierarchy| cgroup::join_version_1(hierarchy.as_fd(), Path::new(group)))
    }

    fn open_version_2(&self, group: &str) -> io::Result<Option<OwnedFd>> {
        let open = |root: &OwnedFd| cgroup::open_directory_at(root.as_fd(), Path::new(group));
        self.version_2.as_ref().map(open).transpose()
    }
}

/// Serves until the runtime closes the socket.
pub fn run() -> Result<(), Failure> {
    let wire = Wire::from_standard_input()
        .step(|| "this program is started by the runtime; standard input".into())?;
    prepare(&wire).step(|| "prepare the process".into())?;
    let shared = configure(wire)?;
    let exits = signals::child_exit_descriptor().step(|| "signalfd".into())?;
    shared
        .wire
        .send(Reply::Configured(Configured {}), &[])
        .step(|| "answer the configuration".into())?;
    loop {
        let (request, exit) =
            process::wait_either(shared.wire.descriptor(), exits.as_fd()).step(|| "wait".into())?;
        if exit {
            signals::drain(&exits);
            reap(&shared.wire).step(|| "report an exit".into())?;
        }
        if request {
            match shared.wire.receive().step(|| "receive a request".into())? {
                Some(incoming) => serve(&shared, incoming)?,
                None => return Ok(()),
            }
        }
    }
}

/// Leaves behind whatever the starter's terminal, signals, descriptors and limits were.
fn prepare(wire: &Wire) -> io::Result<()> {
    process::close_all_but(wire.descriptor())?;
    process::set_name("lamella-zygote")?;
    process::set_undumpable()?;
    // A child that is stopped on its way into a sandbox shows /proc/PID/net there: an empty one.
    process::unshare(Namespaces::NET)?;
    process::new_session()?;
    // Once for all that come of this process: each right costs a call to give up.
    capability::limit_bounding_set(CapabilitySet::SANDBOX)?;
    signals::reset()?;
    signals::block_all()?;
    // The modes that are asked for are the ones that count here; a command gets the usual mask.
    process::set_umask(0);
    let null = std::fs::File::open("/dev/null")?;
    process::set_standard_stream(0, null.as_fd())?;
    process::set_standard_stream(1, null.as_fd())?;
    let (_, hard) = process::limit_of(process::Resource::Descriptors)?;
    process::set_limit(process::Resource::Descriptors, hard, hard)
}

fn configure(wire: Wire) -> Result<Shared, Failure> {
    let missing = || io::Error::from(io::ErrorKind::InvalidData);
    let mut incoming = wire
        .receive()
        .and_then(|incoming| incoming.ok_or_else(missing))
        .step(|| "receive the configuration".into())?;
    let Request::Configure(Configure { version_1, version_2, seccomp }) = incoming.request.clone()
    else {
        return Err(missing()).step(|| "the first request configures".into());
    };
    let mut take = || incoming.take().step(|| "descriptors of the configuration".into());
    let version_1 = (0..version_1).map(|_| take()).collect::<Result<Vec<_>, _>>()?;
    let version_2 = if version_2 { Some(take()?) } else { None };
    let filter = Filter::from_bytes(&seccomp).step(|| "system call filter".into())?;
    let pid_namespace = std::fs::File::open("/proc/self/ns/pid")
        .map(OwnedFd::from)
        .step(|| "open the pid namespace".into())?;
    stage::build()?;
    let init_filter = Filter::init();
    Ok(Shared { wire, version_1, version_2, filter, init_filter, pid_namespace })
}

fn reap(wire: &Wire) -> io::Result<()> {
    while let Some((pid, exit)) = process::reap_any()? {
        let (value, is_signal) = match exit {
            Exit::Code(code) => (code, false),
            Exit::Signal(signal) => (signal, true),
        };
        wire.send(Reply::Ended(Ended { pid, value, is_signal }), &[])?;
    }
    Ok(())
}

/// One request. A request that fails is answered; only a lost socket ends the zygote.
fn serve(shared: &Shared, incoming: Incoming) -> Result<(), Failure> {
    let (number, result) = match incoming.request.clone() {
        Request::Launch(launch) => (launch.request, start_init(shared, &launch, incoming)),
        Request::Exec(exec) => (exec.request, start_command(shared, &exec, incoming)),
        Request::Configure(_) => return Ok(()),
    };
    let Err(failure) = result else { return Ok(()) };
    shared.wire.send(failed(number, &failure), &[]).step(|| "report a failure".into())
}

/// A failure as the runtime gets it.
pub fn failed(request: u64, failure: &Failure) -> Reply {
    Reply::Failed(Failed {
        request,
        errno: sys::errno_of(&failure.error).unwrap_or(0),
        step: failure.to_string(),
    })
}

fn start_init(shared: &Shared, launch: &Launch, mut incoming: Incoming) -> Result<(), Failure> {
    let root = incoming.take().step(|| "the root of the sandbox".into())?;
    let network = if launch.has_network {
        Some(incoming.take().step(|| "the network of the sandbox".into())?)
    } else {
        None
    };
    let cgroup =
        shared.open_version_2(&launch.group).step(|| format!("open group {}", launch.group))?;
    let mut namespaces =
        Namespaces::PID.with(Namespaces::MOUNT).with(Namespaces::IPC).with(Namespaces::UTS);
    if network.is_none() {
        namespaces = namespaces.with(Namespaces::NET);
    }
    let how = Fork { namespaces, cgroup: cgroup.as_ref().map(AsFd::as_fd) };
    // SAFETY: this program never starts a thread.
    match unsafe { process::fork(&how) }.step(|| "clone3 the init".into())? {
        Forked::Child => init::become_init(shared, launch, root, network.as_ref()),
        Forked::Parent { pid, pidfd } => {
            let started = Reply::Launched(Started { request: launch.request, pid });
            shared.wire.send(started, &[pidfd.as_fd()]).step(|| "announce an init".into())
        }
    }
}

fn start_command(
    shared: &Shared,
    request: &proto::launch::Exec,
    mut incoming: Incoming,
) -> Result<(), Failure> {
    let sandbox = incoming.take().step(|| "the init of the sandbox".into())?;
    let streams: Vec<OwnedFd> = incoming.descriptors.collect();
    let cgroup = shared
        .open_version_2(&request.own_group)
        .step(|| format!("open group {}", request.own_group))?;
    process::enter_namespaces_of(sandbox.as_fd(), Namespaces::PID)
        .step(|| "enter the pid namespace".into())?;
    let how = Fork { namespaces: Namespaces::NONE, cgroup: cgroup.as_ref().map(AsFd::as_fd) };
    // SAFETY: this program never starts a thread.
    let forked = unsafe { process::fork(&how) };
    if let Ok(Forked::Child) = forked {
        exec::become_command(shared, request, &sandbox, &streams);
    }
    // INVARIANT: outside of this function the zygote's children are born in its own pid namespace.
    process::enter_namespace(shared.pid_namespace.as_fd())
        .step(|| "leave the pid namespace".into())?;
    match forked.step(|| "clone3 the command".into())? {
        Forked::Child => Ok(()),
        Forked::Parent { pid, pidfd } => {
            let started = Reply::Started(Started { request: request.request, pid });
            shared.wire.send(started, &[pidfd.as_fd()]).step(|| "announce a command".into())
        }
    }
}
