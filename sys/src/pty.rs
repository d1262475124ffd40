//! Pseudo terminals.
//!
//! For: giving a command a terminal of the devpts that its own sandbox has mounted, so that the name
//! it asks for exists there. Not for: line discipline or escape codes. No state.

use rustix::fs::{Mode, OFlags};
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

/// Both ends of a new terminal.
#[derive(Debug)]
pub struct Pair {
    /// What a person or a program at the outside holds.
    pub master: OwnedFd,
    /// What the command gets as its streams.
    pub slave: OwnedFd,
}

/// Makes a terminal with the `ptmx` at `path`.
pub fn open(path: &std::path::Path) -> io::Result<Pair> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let master = rustix::fs::open(path, flags, Mode::empty())?;
    rustix::pty::unlockpt(&master)?;
    // By descriptor, because the name of the slave could be anything where the master was made.
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
    Ok(Pair { master, slave })
}

/// Sets the size in characters; the foreground processes get SIGWINCH.
pub fn resize(terminal: BorrowedFd<'_>, rows: u16, columns: u16) -> io::Result<()> {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(rustix::termios::tcsetwinsize(terminal, size)?)
}

/// Which terminal of its file system a master belongs to; tells two masters apart, whose inode is one.
pub fn index(master: BorrowedFd<'_>) -> io::Result<u32> {
    const TIOCGPTN: libc::c_ulong = 0x8004_5430;
    let mut index: libc::c_uint = 0;
    // SAFETY: the request stores one unsigned integer, which outlives the call.
    let result = unsafe { libc::ioctl(master.as_raw_fd(), TIOCGPTN, &raw mut index) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(index) }
}

/// The character that ends the input of whoever reads lines from the terminal; none while it is read
/// raw.
pub fn end_of_file(terminal: BorrowedFd<'_>) -> io::Result<Option<u8>> {
    use rustix::termios::{LocalModes, SpecialCodeIndex, tcgetattr};
    let settings = tcgetattr(terminal)?;
    let by_lines = settings.local_modes.contains(LocalModes::ICANON);
    Ok(by_lines.then(|| settings.special_codes[SpecialCodeIndex::VEOF]))
}

/// Makes the terminal the controlling one of the session that the caller leads.
pub fn make_controlling(terminal: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::process::ioctl_tiocsctty(terminal)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn bytes_pass_and_the_size_reads_back() {
        let pair = open(std::path::Path::new("/dev/pts/ptmx"))
            .or_else(|_| open(std::path::Path::new("/dev/ptmx")))
            .unwrap();
        resize(pair.master.as_fd(), 40, 132).unwrap();
        let size = rustix::termios::tcgetwinsize(&pair.slave).unwrap();
        assert_eq!((size.ws_row, size.ws_col), (40, 132));
        rustix::io::write(&pair.slave, b"hello").unwrap();
        let mut buffer = [0; 16];
        let length = rustix::io::read(&pair.master, &mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"hello");
    }
}
