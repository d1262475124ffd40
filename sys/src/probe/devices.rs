//! Attempts at character devices: FUSE, KVM, vsock, cachefiles.

use super::{Attempt, Scratch, failed};
use crate::cachefiles::Device;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

fn open(path: &str) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

/// What FUSE is asked about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FuseFeature {
    /// That it mounts.
    Mount,
    /// Reads that bypass the daemon.
    Passthrough,
    /// Requests over io_uring.
    IoUring,
}

/// Makes a detached FUSE mount and reads the kernel's first request, which offers its features.
pub(super) fn fuse(feature: FuseFeature) -> Attempt {
    // linux/fuse.h: bits of the second word of flags.
    const PASSTHROUGH: u32 = 1 << 5;
    const OVER_IO_URING: u32 = 1 << 9;
    let device = open("/dev/fuse")?;
    let context = rustix::mount::fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in [
        ("fd", device.as_raw_fd().to_string()),
        ("rootmode", "40000".to_owned()),
        ("user_id", "0".to_owned()),
        ("group_id", "0".to_owned()),
    ] {
        rustix::mount::fsconfig_set_string(&context, key, value)?;
    }
    rustix::mount::fsconfig_create(&context)?;
    let mount = rustix::mount::fsmount(
        &context,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV,
    )?;
    let mut request = vec![0u8; 64 << 10];
    let length = rustix::io::retry_on_intr(|| rustix::io::read(&device, &mut request[..]))?;
    // The connection ends with its device; then the mount has nobody left to ask.
    drop(device);
    drop((mount, context));
    let word = |at: usize| {
        let bytes = request.get(at..at + 4).filter(|_| at + 4 <= length);
        let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
        bytes.map(u32::from_ne_bytes).ok_or_else(|| failed("the first request is too short"))
    };
    // A header of 40 bytes, then major, minor, max_readahead, flags, flags2.
    let (major, minor, flags) = (word(40)?, word(44)?, word(56)?);
    let offered = match feature {
        FuseFeature::Mount => true,
        FuseFeature::Passthrough => flags & PASSTHROUGH != 0,
        FuseFeature::IoUring => flags & OVER_IO_URING != 0,
    };
    if !offered {
        return Err(failed("the kernel does not offer it"));
    }
    Ok(match feature {
        FuseFeature::Mount => format!("protocol {major}.{minor}"),
        FuseFeature::Passthrough | FuseFeature::IoUring => "offered by the kernel".to_owned(),
    })
}

pub(super) fn erofs_fscache(scratch: &Path) -> Attempt {
    let device = Device::open().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => failed("there is no /dev/cachefiles"),
        io::ErrorKind::ResourceBusy => failed("/dev/cachefiles is in use by another process"),
        _ => error,
    })?;
    // The device alone does not prove on-demand mode: a cache is bound, and ends with the device.
    let scratch = Scratch::new(scratch)?;
    device.command(&format!("dir {}", scratch.path.display()))?;
    device.command("bind ondemand").map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => failed("cachefiles has no on-demand mode"),
        _ => error,
    })?;
    drop(device);
    Ok("cachefiles bound on demand".to_owned())
}

pub(super) fn kvm() -> Attempt {
    const GET_API_VERSION: libc::c_ulong = 0xAE00;
    const CREATE_VM: libc::c_ulong = 0xAE01;
    let device = open("/dev/kvm")?;
    // SAFETY: this request takes no argument and touches no memory of ours.
    let version = unsafe { libc::ioctl(device.as_raw_fd(), GET_API_VERSION, 0) };
    if version < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the argument is a machine type, a number; no memory of ours is touched.
    let machine = unsafe { libc::ioctl(device.as_raw_fd(), CREATE_VM, 0) };
    if machine < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    drop(unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(machine) });
    Ok(format!("API {version}, a machine was made"))
}

pub(super) fn vhost_vsock() -> Attempt {
    open("/dev/vhost-vsock")?;
    Ok("/dev/vhost-vsock".to_owned())
}
