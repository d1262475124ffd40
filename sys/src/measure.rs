//! What a process used and what the kernel keeps in memory: for benches.
//!
//! Reads only; nothing here changes what it looks at.

use rustix::fd::{AsFd, AsRawFd};
use std::io;
use std::process::{Child, ExitStatus};
use std::time::Duration;

/// What one child used until it ended.
#[derive(Debug, Clone, Copy)]
pub struct Usage {
    /// How it ended.
    pub status: ExitStatus,
    /// The most memory that was resident at once, in bytes, in it or in any one child it waited for.
    pub peak_rss_bytes: u64,
    /// Processor time in user space, its waited-for children's included.
    pub user: Duration,
    /// Processor time in the kernel, likewise.
    pub system: Duration,
}

/// Waits for a child and takes its account with it. The child is gone afterwards: do not wait again.
pub fn wait_with_usage(child: Child) -> io::Result<Usage> {
    let pid = child.id() as libc::pid_t;
    let mut status = 0;
    // SAFETY: rusage is plain data, for which all zeros is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: both pointers are to live locals of the right types; the pid is our own child's,
        // which nobody else waits for because this function owns it.
        if unsafe { libc::wait4(pid, &raw mut status, 0, &raw mut usage) } == pid {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    drop(child);
    let time = |value: libc::timeval| {
        Duration::new(value.tv_sec.max(0) as u64, value.tv_usec.clamp(0, 999_999) as u32 * 1000)
    };
    Ok(Usage {
        status: std::os::unix::process::ExitStatusExt::from_raw(status),
        peak_rss_bytes: usage.ru_maxrss.max(0) as u64 * 1024,
        user: time(usage.ru_utime),
        system: time(usage.ru_stime),
    })
}

/// How many bytes of the first `len` bytes of a file are in the page cache (`mincore`), in whole pages.
/// The file must be our own or open for writing, or the kernel claims that all of it is resident.
pub fn resident_bytes(file: impl AsFd, len: u64) -> io::Result<u64> {
    let len = usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    if len == 0 {
        return Ok(0);
    }
    // SAFETY: asks for a number, touches nothing.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) })
        .map_err(|_| io::Error::last_os_error())?;
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: a fresh mapping at an address of the kernel's choice; nobody reads or writes through it.
    let start =
        unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, libc::MAP_SHARED, fd, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let mut pages = vec![0_u8; len.div_ceil(page)];
    // SAFETY: the range is exactly the mapping made above; the vector has a byte for each of its pages.
    let code = unsafe { libc::mincore(start, len, pages.as_mut_ptr()) };
    let result = if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: unmaps exactly the mapping made above, which nothing refers to.
    unsafe { libc::munmap(start, len) };
    result?;
    Ok(pages.iter().filter(|page| **page & 1 == 1).count() as u64 * page as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_file_just_written_is_resident_and_a_hole_is_not() -> io::Result<()> {
        let mut file = tempfile::tempfile()?;
        file.write_all(&[1; 10_000])?;
        file.set_len(1 << 20)?;
        assert_eq!(resident_bytes(&file, 1 << 20)?, 12_288);
        assert_eq!(resident_bytes(&file, 0)?, 0);
        Ok(())
    }

    #[test]
    fn usage_of_a_child_has_its_code_and_memory() -> io::Result<()> {
        let child = std::process::Command::new("sh").args(["-c", "exit 7"]).spawn()?;
        let usage = wait_with_usage(child)?;
        assert_eq!(usage.status.code(), Some(7));
        assert!(usage.peak_rss_bytes > 100_000);
        Ok(())
    }
}
