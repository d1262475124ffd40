//! Asking the kernel whether anybody else has a file open, a mounted file system included.
//!
//! For: knowing when the last clone of a mount is gone, so that what backs it may go too. A write lease
//! is granted only to the sole opener of a file, and the image of a file-backed mount counts as opened
//! by its superblock, in whatever mount namespace its clones are. Not for: keeping others out.
//!
//! The lease lives for the time of one call. No locks, nothing survives a crash.

use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

// linux/fcntl.h; libc does not have it.
const F_SETSIG: libc::c_int = 10;

/// Whether anybody but the calling function has the file open. Needs `CAP_LEASE` or the file's owner.
pub fn is_open_elsewhere(path: &Path) -> io::Result<bool> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let number = file.as_raw_fd();
    // Whoever opens the file while the lease is held has a signal sent to us; one that is ignored by
    // default, because the kernel's own choice would end the process.
    // SAFETY: fcntl with two numbers touches no memory of ours.
    if unsafe { libc::fcntl(number, F_SETSIG, libc::SIGURG) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above; the lease goes away with the descriptor at the end of this function.
    if unsafe { libc::fcntl(number, libc::F_SETLEASE, libc::F_WRLCK) } == 0 {
        return Ok(false);
    }
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_file_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "x").unwrap();
        assert!(!is_open_elsewhere(&path).unwrap());
        let reader = std::fs::File::open(&path).unwrap();
        assert!(is_open_elsewhere(&path).unwrap());
        drop(reader);
        assert!(!is_open_elsewhere(&path).unwrap());
        assert!(is_open_elsewhere(&folder.path().join("none")).is_err());
    }
}
