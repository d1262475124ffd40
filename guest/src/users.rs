//! User namespaces: the numbers that a sandbox's users and groups have on the host, and how a process
//! becomes one of them.
//!
//! All other namespaces of a sandbox belong to the host's own user namespace, so that root of the sandbox
//! has no right over them: it is entered last. It belongs to the sandbox's own root as the host knows it,
//! so that what the kernel counts by user is counted for this sandbox alone.

use crate::wire::{Failure, Step};
use crate::zygote::{Shared, failed};
use proto::launch::{self, Ready, Reply, Started};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;
use sys::mount::{AttributeChange, MountFd};
use sys::process::{self, Fork, Forked, Namespaces};

/// How long a new user namespace waits for the runtime.
const HELD: Duration = Duration::from_secs(30);

/// The user namespace of a sandbox.
pub struct Users {
    /// What its id 0 is on the host.
    pub first_id: u32,
    pub namespace: OwnedFd,
}

impl Users {
    /// Shows the files of a detached mount as those of the sandbox's users.
    pub fn shift(&self, mount: &MountFd) -> io::Result<()> {
        let idmap = Some(self.namespace.as_fd());
        mount.set_attributes(&AttributeChange { idmap, ..AttributeChange::default() })
    }

    /// Becomes root of it, with every right over it and none over the host.
    pub fn enter(&self) -> io::Result<()> {
        process::enter_namespace(self.namespace.as_fd())?;
        process::become_user(0, 0, &[])
    }
}

/// The sandbox's users enter by its init: becomes root of its user namespace.
pub fn enter_those_of(init: &OwnedFd) -> io::Result<()> {
    process::enter_namespaces_of(init.as_fd(), Namespaces::USER)?;
    process::become_user(0, 0, &[])
}

/// Starts the process that holds a new user namespace until the runtime has it.
pub fn start(shared: &Shared, wanted: &launch::Users) -> Result<(), Failure> {
    let how = Fork { namespaces: Namespaces::NONE, cgroup: None };
    // SAFETY: this program never starts a thread.
    match unsafe { process::fork(&how) }.step(|| "clone3 for a user namespace".into())? {
        Forked::Child => hold(shared, wanted),
        Forked::Parent { pid, pidfd } => {
            let started = Reply::Launched(Started { request: wanted.request, pid });
            shared.wire.send(started, &[pidfd.as_fd()]).step(|| "announce a user namespace".into())
        }
    }
}

fn hold(shared: &Shared, wanted: &launch::Users) -> ! {
    let made = process::become_user(wanted.owner, wanted.owner, &[])
        .and_then(|()| process::unshare(Namespaces::USER))
        .step(|| "make a user namespace".into());
    let reply = match &made {
        Ok(()) => Reply::Ready(Ready { request: wanted.request }),
        Err(failure) => failed(wanted.request, failure),
    };
    let sent = shared.wire.send(reply, &[]);
    let _none_left = process::close_from(0);
    if made.is_err() || sent.is_err() {
        std::process::exit(1);
    }
    // The runtime takes it at once, unless it has died.
    std::thread::sleep(HELD);
    std::process::exit(0);
}
