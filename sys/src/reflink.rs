//! Sharing blocks between two files of one file system (FICLONERANGE), where it can.
//!
//! For: copying a part of a file without reading or writing it. Not for: copying where the file system
//! cannot share; the caller does that.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Makes `bytes` at `to` of the target the same blocks as those at `from` of the source. Offsets and
/// length are multiples of the file system's block. Fails with EOPNOTSUPP, EXDEV, EINVAL or ENOTTY where
/// these files cannot share.
pub fn clone_range(
    source: BorrowedFd<'_>,
    from: u64,
    bytes: u64,
    target: BorrowedFd<'_>,
    to: u64,
) -> io::Result<()> {
    let range = libc::file_clone_range {
        src_fd: i64::from(source.as_raw_fd()),
        src_offset: from,
        src_length: bytes,
        dest_offset: to,
    };
    // SAFETY: the kernel reads one `file_clone_range`, which lives until the call returns.
    let done = unsafe { libc::ioctl(target.as_raw_fd(), libc::FICLONERANGE, &range) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether an error of [`clone_range`] says that these files cannot share at all.
pub fn cannot_share(error: &io::Error) -> bool {
    let cannot = [libc::EOPNOTSUPP, libc::EXDEV, libc::EINVAL, libc::ENOTTY, libc::ENOSYS];
    error.raw_os_error().is_some_and(|errno| cannot.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_range_is_shared_or_the_error_says_that_it_cannot_be() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        std::fs::write(&one, vec![7; 8192]).unwrap();
        std::fs::write(&two, vec![0; 8192]).unwrap();
        let source = std::fs::File::open(&one).unwrap();
        let target = std::fs::OpenOptions::new().write(true).open(&two).unwrap();
        match clone_range(source.as_fd(), 0, 4096, target.as_fd(), 4096) {
            Ok(()) => assert_eq!(std::fs::read(&two).unwrap()[4096..], [7; 4096]),
            Err(error) => assert!(cannot_share(&error), "{error}"),
        }
    }
}
