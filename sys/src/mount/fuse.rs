//! A FUSE file system whose requests the caller answers.

use super::filesystem::Context;
use super::{Attributes, MountFd};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// A read-only FUSE file system that every user may enter; the kernel checks the rights itself.
///
/// It needs root, or to be root of a user namespace and of a mount namespace that belongs to it.
#[derive(Debug, Clone, Copy)]
pub struct Fuse<'a> {
    /// What the mount table shows as the source, and behind `fuse.` as the kind.
    pub name: &'a str,
}

impl Fuse<'_> {
    /// Makes the mount and the descriptor of its requests; the first of them, INIT, waits there. Once
    /// the last copy of the descriptor is closed, whoever uses the mount gets ENOTCONN.
    pub fn mount_detached(&self, attributes: Attributes) -> io::Result<(MountFd, OwnedFd)> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let device = rustix::fs::open("/dev/fuse", flags, Mode::empty())?;
        let context = Context::open("fuse")?;
        context.string("source", self.name)?;
        context.string("subtype", self.name)?;
        context.string("fd", &device.as_raw_fd().to_string())?;
        context.string("rootmode", "40000")?;
        context.string("user_id", &rustix::process::getuid().as_raw().to_string())?;
        context.string("group_id", &rustix::process::getgid().as_raw().to_string())?;
        context.flag("default_permissions")?;
        context.flag("allow_other")?;
        context.flag("ro")?;
        let mount = context.mount(Attributes { read_only: true, ..attributes })?;
        Ok((mount, device))
    }
}
