//! The loop of the zygote: takes requests, forks, reaps, reports.
//!
//! It never waits for a child: a child reports by itself on the same socket, whose messages keep their
//! borders. A child is announced before it is reaped, so the runtime never hears of an unknown pid.
//!
//! CRASH: when the runtime dies, the zygote lives on without taking requests until its last child has
//! ended: it reaps them, notes how they ended, and holds what they print into ([`Children`]).

use crate::children::Children;
use crate::users::Users;
use crate::wire::{Failure, Incoming, Step, Wire};
use crate::{exec, init, stage, users};
use proto::launch::{Configure, Configured, Ended, Failed, Launch, Reply, Request, Started};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use sys::capability::{self, CapabilitySet};
use sys::cgroup;
use sys::process::{self, Exit, Fork, Forked, Namespaces, signals};
use sys::profile::Profile;
use sys::seccomp::Filter;

/// What every sandbox of this zygote shares.
pub struct Shared {
    /// The socket to the runtime.
    pub wire: Wire,
    /// Our group in each version 1 hierarchy.
    pub version_1: Vec<OwnedFd>,
    /// Our group in the version 2 hierarchy.
    pub version_2: Option<OwnedFd>,
    /// What a sandbox may ask of the kernel, by the number of its profile.
    pub filters: [Filter; Profile::ALL.len()],
    /// Whether commands are put under AppArmor profiles.
    pub apparmor: bool,
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
    let (shared, mut children) = configure(wire)?;
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
            // A runtime that is gone is noticed below.
            let _told = reap(&mut children, Some(&shared.wire)).step(|| "reap".into())?;
        }
        if request {
            match shared.wire.receive() {
                Ok(Some(incoming)) => match serve(&shared, &mut children, incoming) {
                    Err(failure) if !failure.is_lost_runtime() => return Err(failure),
                    _ => {}
                },
                Ok(None) => break,
                Err(error) => {
                    let failure = Failure { step: "receive a request".into(), error };
                    if failure.is_lost_runtime() {
                        break;
                    }
                    return Err(failure);
                }
            }
        }
    }
    drop(shared);
    while !children.is_empty() {
        sys::wait_readable(exits.as_fd(), None).step(|| "wait for the last children".into())?;
        signals::drain(&exits);
        reap(&mut children, None).step(|| "reap".into())?;
    }
    Ok(())
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

fn configure(wire: Wire) -> Result<(Shared, Children), Failure> {
    let missing = || io::Error::from(io::ErrorKind::InvalidData);
    let mut incoming = wire
        .receive()
        .and_then(|incoming| incoming.ok_or_else(missing))
        .step(|| "receive the configuration".into())?;
    let Request::Configure(Configure { version_1, version_2, apparmor }) = incoming.request.clone()
    else {
        return Err(missing()).step(|| "the first request configures".into());
    };
    let mut take = || incoming.take().step(|| "descriptors of the configuration".into());
    let ends = std::fs::File::from(take()?);
    let version_1 = (0..version_1).map(|_| take()).collect::<Result<Vec<_>, _>>()?;
    let version_2 = if version_2 { Some(take()?) } else { None };
    let pid_namespace = std::fs::File::open("/proc/self/ns/pid")
        .map(OwnedFd::from)
        .step(|| "open the pid namespace".into())?;
    stage::build()?;
    // Once, for all sandboxes that there will be.
    let (filters, init_filter) = (Profile::ALL.map(Profile::filter), Filter::init());
    let shared =
        Shared { wire, version_1, version_2, filters, apparmor, init_filter, pid_namespace };
    Ok((shared, Children::new(ends)))
}

/// Whether the runtime has heard of every end.
fn reap(children: &mut Children, wire: Option<&Wire>) -> io::Result<bool> {
    let mut told = true;
    while let Some((pid, exit)) = process::reap_any()? {
        children.ended(pid, exit);
        let (value, is_signal) = match exit {
            Exit::Code(code) => (code, false),
            Exit::Signal(signal) => (signal, true),
        };
        let tell = |wire: &Wire| wire.send(Reply::Ended(Ended { pid, value, is_signal }), &[]);
        told &= wire.is_some_and(|wire| tell(wire).is_ok());
    }
    Ok(told)
}

/// One request. A request that fails is answered; only a lost socket ends the zygote.
fn serve(shared: &Shared, children: &mut Children, mut incoming: Incoming) -> Result<(), Failure> {
    let (number, result) = match incoming.request.clone() {
        Request::Launch(launch) => {
            (launch.request, start_init(shared, children, &launch, incoming))
        }
        Request::Exec(exec) => (exec.request, start_command(shared, children, &exec, incoming)),
        Request::Hold(hold) => {
            if let Ok(descriptor) = incoming.take() {
                children.hold(hold.pid, descriptor);
            }
            return Ok(());
        }
        Request::Release(release) => {
            children.release(release.pid, release.number);
            return Ok(());
        }
        Request::Users(wanted) => (wanted.request, users::start(shared, &wanted)),
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

fn start_init(
    shared: &Shared,
    children: &mut Children,
    launch: &Launch,
    mut incoming: Incoming,
) -> Result<(), Failure> {
    let root = incoming.take().step(|| "the root of the sandbox".into())?;
    let users = match launch.first_id {
        0 => None,
        first_id => {
            let namespace = incoming.take().step(|| "the users of the sandbox".into())?;
            Some(Users { first_id, namespace })
        }
    };
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
        Forked::Child => init::become_init(shared, launch, root, users.as_ref(), network.as_ref()),
        Forked::Parent { pid, pidfd } => {
            children.born(pid, &pidfd, Vec::new());
            let started = Reply::Launched(Started { request: launch.request, pid });
            shared.wire.send(started, &[pidfd.as_fd()]).step(|| "announce an init".into())
        }
    }
}

fn start_command(
    shared: &Shared,
    children: &mut Children,
    request: &proto::launch::Exec,
    mut incoming: Incoming,
) -> Result<(), Failure> {
    let sandbox = incoming.take().step(|| "the init of the sandbox".into())?;
    let mut streams: Vec<OwnedFd> = incoming.descriptors.collect();
    let rare = streams.split_off(streams.len().saturating_sub(request.rare_groups as usize));
    let cgroup = shared
        .open_version_2(&request.own_group)
        .step(|| format!("open group {}", request.own_group))?;
    process::enter_namespaces_of(sandbox.as_fd(), Namespaces::PID)
        .step(|| "enter the pid namespace".into())?;
    let how = Fork { namespaces: Namespaces::NONE, cgroup: cgroup.as_ref().map(AsFd::as_fd) };
    // SAFETY: this program never starts a thread.
    let forked = unsafe { process::fork(&how) };
    if let Ok(Forked::Child) = forked {
        exec::become_command(shared, request, &sandbox, &streams, &rare);
    }
    // INVARIANT: outside of this function the zygote's children are born in its own pid namespace.
    process::enter_namespace(shared.pid_namespace.as_fd())
        .step(|| "leave the pid namespace".into())?;
    match forked.step(|| "clone3 the command".into())? {
        Forked::Child => Ok(()),
        Forked::Parent { pid, pidfd } => {
            // Of the streams only what the command writes to.
            let outputs = streams.into_iter().skip(1);
            let held = if request.hold { outputs.collect() } else { Vec::new() };
            children.born(pid, &pidfd, held);
            let started = Reply::Started(Started { request: request.request, pid });
            shared.wire.send(started, &[pidfd.as_fd()]).step(|| "announce a command".into())
        }
    }
}
