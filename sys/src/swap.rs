//! Compressed memory as swap (zram), and what the kernel is asked about the memory of other processes.
//!
//! For: hosts without swap, where the memory of a resting sandbox could go nowhere. Needs CONFIG_ZRAM.
//! Locking: none. What survives a crash: the device stays in use under its number, which the caller writes down.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// The size of a page in the header of a swap area.
const PAGE_BYTES: u64 = 4096;
/// Ranges in one call; the kernel's own bound.
const MAX_RANGES: usize = 1024;

/// A compressed block device in memory that is used as swap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Zram {
    number: u32,
}

impl Zram {
    /// Makes one, without room yet.
    pub fn make() -> io::Result<Self> {
        let number = std::fs::read_to_string("/sys/class/zram-control/hot_add")?;
        Ok(Self { number: number.trim().parse().map_err(io::Error::other)? })
    }

    /// One that was made before.
    pub fn with_number(number: u32) -> Self {
        Self { number }
    }

    /// What finds it again.
    pub fn number(self) -> u32 {
        self.number
    }

    fn device(self) -> PathBuf {
        PathBuf::from(format!("/dev/zram{}", self.number))
    }

    /// Gives it room for this many bytes before compression, and swaps to it.
    pub fn start(self, bytes: u64) -> io::Result<()> {
        let pages = (bytes / PAGE_BYTES).clamp(16, u64::from(u32::MAX));
        let size = format!("/sys/block/zram{}/disksize", self.number);
        std::fs::write(size, (pages * PAGE_BYTES).to_string())?;
        self.make_node()?;
        let device = std::fs::OpenOptions::new().write(true).open(self.device())?;
        device.write_all_at(&header(pages), 0)?;
        drop(device);
        let path = crate::c_name(self.device().as_os_str().as_encoded_bytes())?;
        // SAFETY: `path` is a C string that outlives the call.
        let done = unsafe { libc::swapon(path.as_ptr(), 0) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Its name in /dev, where no daemon of the host makes it.
    fn make_node(self) -> io::Result<()> {
        if self.device().exists() {
            return Ok(());
        }
        let numbers = std::fs::read_to_string(format!("/sys/block/zram{}/dev", self.number))?;
        let bad = || io::Error::from(io::ErrorKind::InvalidData);
        let (major, minor) = numbers.trim().split_once(':').ok_or_else(bad)?;
        let number = |text: &str| text.parse().map_err(io::Error::other);
        let device = crate::file::Device { major: number(major)?, minor: number(minor)? };
        let folder = crate::file::Folder::open(std::path::Path::new("/dev"))?.into_fd();
        let (name, kind) = (format!("zram{}", self.number), crate::file::FileKind::BlockDevice);
        crate::file::make_node_at(
            std::os::fd::AsFd::as_fd(&folder),
            name.as_bytes(),
            kind,
            0o600,
            device,
        )
    }

    /// Whether it is in use as swap.
    pub fn is_on(self) -> bool {
        areas().is_ok_and(|areas| areas.contains(&self.device()))
    }

    /// Brings back what lies in it, and removes it. Out of memory, and it stays, when there is no room.
    pub fn stop(self) -> io::Result<()> {
        if self.is_on() {
            let path = crate::c_name(self.device().as_os_str().as_encoded_bytes())?;
            // SAFETY: `path` is a C string that outlives the call.
            if unsafe { libc::swapoff(path.as_ptr()) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        self.remove()
    }

    fn remove(self) -> io::Result<()> {
        std::fs::write(format!("/sys/block/zram{}/reset", self.number), "1")?;
        std::fs::write("/sys/class/zram-control/hot_remove", self.number.to_string())
    }
}

/// The first page of a swap area, as mkswap(8) writes it.
fn header(pages: u64) -> Vec<u8> {
    const AT_VERSION: usize = 1024;
    const MAGIC: &[u8] = b"SWAPSPACE2";
    let mut page = vec![0; PAGE_BYTES as usize];
    let last = u32::try_from(pages - 1).unwrap_or(u32::MAX);
    page[AT_VERSION..AT_VERSION + 4].copy_from_slice(&1u32.to_ne_bytes());
    page[AT_VERSION + 4..AT_VERSION + 8].copy_from_slice(&last.to_ne_bytes());
    let at = page.len() - MAGIC.len();
    page[at..].copy_from_slice(MAGIC);
    page
}

fn areas() -> io::Result<Vec<PathBuf>> {
    let text = std::fs::read_to_string("/proc/swaps")?;
    let paths = text.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    Ok(paths.map(PathBuf::from).collect())
}

/// Whether this host has any swap. A kernel without it has none.
pub fn is_any() -> bool {
    areas().is_ok_and(|areas| !areas.is_empty())
}

/// Bytes of a process that lie in swap.
pub fn swapped_bytes(pid: crate::process::Pid) -> io::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmSwap:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).unwrap_or("0");
    kib.parse::<u64>().map(|kib| kib * 1024).map_err(io::Error::other)
}

/// Asks for the anonymous memory of another process that lies in swap. Files are not asked for: their pages come
/// when they are touched, and may have to be fetched from afar.
pub fn bring_back(pid: crate::process::Pid, pidfd: BorrowedFd<'_>) -> io::Result<()> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let ranges: Vec<libc::iovec> = maps.lines().filter_map(anonymous_range).collect();
    for ranges in ranges.chunks(MAX_RANGES) {
        // SAFETY: the kernel reads the array of ranges; the addresses in it are those of another process, and
        // nothing is read or written there.
        let done = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                pidfd.as_raw_fd(),
                ranges.as_ptr(),
                ranges.len(),
                libc::MADV_WILLNEED,
                0,
            )
        };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// The range of a line of /proc/PID/maps that belongs to no file.
fn anonymous_range(line: &str) -> Option<libc::iovec> {
    let mut words = line.split_ascii_whitespace();
    let (from, to) = words.next()?.split_once('-')?;
    let inode = words.nth(3)?;
    let name = words.next().unwrap_or("");
    if inode != "0" || name.starts_with("[v") {
        return None;
    }
    let number = |text| usize::from_str_radix(text, 16).ok();
    let (from, to) = (number(from)?, number(to)?);
    let base = std::ptr::without_provenance_mut(from);
    Some(libc::iovec { iov_base: base, iov_len: to.checked_sub(from)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn only_memory_of_no_file_is_asked_for() {
        let range =
            |line| anonymous_range(line).map(|range| (range.iov_base as usize, range.iov_len));
        assert_eq!(range("1000-3000 rw-p 00000000 00:00 0 "), Some((0x1000, 0x2000)));
        assert_eq!(range("1000-3000 rw-p 00000000 00:00 0    [heap]"), Some((0x1000, 0x2000)));
        assert_eq!(range("1000-3000 r-xp 00000000 fe:00 77   /bin/sh"), None);
        assert_eq!(range("1000-3000 r-xp 00000000 00:00 0    [vdso]"), None);
        assert_eq!(range("nonsense"), None);
    }

    #[test]
    fn own_memory_can_be_asked_for() {
        let pid = crate::process::own_pid();
        let pidfd = crate::process::pidfd_open(pid).unwrap();
        match bring_back(pid, pidfd.as_fd()) {
            // A kernel older than 5.10.
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {}
            done => done.unwrap(),
        }
        swapped_bytes(pid).unwrap();
    }

    #[test]
    fn the_header_says_how_large_it_is() {
        let page = header(16);
        assert_eq!(page[1028..1032], 15u32.to_ne_bytes());
        assert!(page.ends_with(b"SWAPSPACE2"));
    }
}
