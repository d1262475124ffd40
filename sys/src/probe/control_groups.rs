//! Attempts at control groups, each on an empty group of its own.

use super::{Attempt, failed, unique_name};
use crate::cgroup::{Group, Hierarchies};
use crate::process::{Fork, Forked, Namespaces, fork};
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

/// Runs `with` on a new group and removes it, however that ends.
fn with_group<T>(with: impl FnOnce(&Group<'_>) -> io::Result<T>) -> io::Result<(T, &'static str)> {
    struct Removed<'a>(Group<'a>);
    impl Drop for Removed<'_> {
        fn drop(&mut self) {
            if let Err(error) = self.0.remove() {
                tracing::warn!(group = %self.0.name().display(), %error, "a probe left its group");
            }
        }
    }
    let hierarchies = Hierarchies::detect()?;
    let group = Removed(hierarchies.group(unique_name("lamella-probe")));
    group.0.create()?;
    let done = with(&group.0)?;
    let has_old = !hierarchies.version_1_roots().is_empty();
    let layout = match (has_old, hierarchies.version_2_root().is_some()) {
        (true, true) => "hybrid of version 1 and 2",
        (true, false) => "version 1",
        (false, true) => "version 2",
        (false, false) => return Err(failed("no cgroup hierarchy is mounted")),
    };
    Ok((done, layout))
}

pub(super) fn memory() -> Attempt {
    let ((), layout) = with_group(|group| group.set_memory(Some(16 << 20)))?;
    Ok(layout.to_owned())
}

pub(super) fn pids() -> Attempt {
    let ((), layout) = with_group(|group| group.set_pids(Some(4)))?;
    Ok(layout.to_owned())
}

pub(super) fn cpu() -> Attempt {
    let ((), layout) = with_group(|group| group.set_cpu(Some(500)))?;
    Ok(layout.to_owned())
}

pub(super) fn freezer() -> Attempt {
    let (frozen, layout) = with_group(|group| {
        group.freeze(true)?;
        let frozen = group.wait_frozen(Duration::from_secs(5));
        group.freeze(false)?;
        frozen
    })?;
    if !frozen {
        return Err(failed("an empty group did not freeze"));
    }
    Ok(layout.to_owned())
}

pub(super) fn clone_into() -> Attempt {
    with_group(|group| {
        let Some(place) = group.open_version_2()? else {
            return Err(failed("no cgroup version 2 is mounted"));
        };
        let how = Fork { namespaces: Namespaces::NONE, cgroup: Some(place.as_fd()) };
        // SAFETY: other threads may exist, but the child calls nothing but _exit, which takes no lock.
        let child = unsafe { fork(&how)? };
        match child {
            // SAFETY: _exit is always safe; nothing of this copy of the process runs any more.
            Forked::Child => unsafe { libc::_exit(0) },
            Forked::Parent { pidfd, .. } => {
                use rustix::process::{WaitId, WaitIdOptions, waitid};
                let status = rustix::io::retry_on_intr(|| {
                    waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED)
                })?;
                match status.and_then(|status| status.exit_status()) {
                    Some(0) => Ok(()),
                    _ => Err(failed("the child did not end well")),
                }
            }
        }
    })?;
    Ok("a process was born in a group".to_owned())
}
