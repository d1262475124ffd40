//! ext4 on a block device: the file system of writable layers with a size of their own.

use super::filesystem::Context;
use super::{Attributes, MountFd};
use std::io;
use std::path::Path;

/// An ext4 on a device.
#[derive(Debug, Clone, Copy)]
pub struct Ext4<'a> {
    /// The device.
    pub device: &'a Path,
}

impl Ext4<'_> {
    /// Makes the mount. Tables that nobody has used yet are not written.
    pub fn mount_detached(&self, attributes: Attributes) -> io::Result<MountFd> {
        let context = Context::open("ext4")?;
        context.path("source", self.device)?;
        context.flag("noinit_itable")?;
        context.mount(attributes)
    }
}
