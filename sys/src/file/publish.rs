//! Files that appear complete or not at all, and names that are never taken from somebody else.
//!
//! What survives a crash: an [`Unnamed`] file is gone; a published one has its name once the folder
//! is synced. [`Unnamed::publish`] syncs the bytes before the name exists, never the folder: the caller
//! says when with [`super::space::sync_all`] on it.

use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// A file without a name (`O_TMPFILE`).
#[derive(Debug)]
pub struct Unnamed {
    fd: OwnedFd,
}

impl Unnamed {
    /// Makes one on the file system of `folder`. EOPNOTSUPP where the file system cannot.
    pub fn create(folder: BorrowedFd<'_>, mode: u32) -> io::Result<Self> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(mode & 0o7777);
        Ok(Self { fd: rustix::fs::openat(folder, ".", flags, mode)? })
    }

    /// Makes its bytes durable and gives it a name that must not exist (EEXIST). On an error the file
    /// is gone.
    // CRASH: before linkat returns nothing is visible; after it the whole file is.
    pub fn publish(self, folder: BorrowedFd<'_>, name: &[u8]) -> io::Result<OwnedFd> {
        super::space::sync_data(self.fd.as_fd())?;
        self.publish_without_sync(folder, name)
    }

    /// [`Unnamed::publish`] for content that may be lost with the machine.
    pub fn publish_without_sync(self, folder: BorrowedFd<'_>, name: &[u8]) -> io::Result<OwnedFd> {
        // By the /proc name: linking a bare descriptor would need one more capability.
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        rustix::fs::linkat(rustix::fs::CWD, path, folder, name, AtFlags::SYMLINK_FOLLOW)?;
        Ok(self.fd)
    }
}

impl AsFd for Unnamed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Renames without ever replacing: EEXIST when the new name is taken.
pub fn rename_without_replacing(
    old_folder: BorrowedFd<'_>,
    old_name: &[u8],
    folder: BorrowedFd<'_>,
    name: &[u8],
) -> io::Result<()> {
    let flags = RenameFlags::NOREPLACE;
    Ok(rustix::fs::renameat_with(old_folder, old_name, folder, name, flags)?)
}

/// Renames, replacing what has the new name.
pub fn rename(
    old_folder: BorrowedFd<'_>,
    old_name: &[u8],
    folder: BorrowedFd<'_>,
    name: &[u8],
) -> io::Result<()> {
    Ok(rustix::fs::renameat(old_folder, old_name, folder, name)?)
}

/// Swaps two names at one instant.
pub fn exchange(
    left_folder: BorrowedFd<'_>,
    left_name: &[u8],
    right_folder: BorrowedFd<'_>,
    right_name: &[u8],
) -> io::Result<()> {
    let flags = RenameFlags::EXCHANGE;
    Ok(rustix::fs::renameat_with(left_folder, left_name, right_folder, right_name, flags)?)
}
