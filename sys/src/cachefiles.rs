//! The control device of the kernel's cachefiles in on-demand mode, and the cache files that it hands
//! out. Linux 5.19 to 7.1 with `CONFIG_CACHEFILES_ONDEMAND`; linux/cachefiles.h is the source.
//!
//! Messages are read whole, commands are written whole; both may be done by any thread. The device can
//! be open once on a host. With its last descriptor the cache ends: waiting readers get EIO.

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Where the device is.
pub const DEVICE: &str = "/dev/cachefiles";
/// No message is longer.
pub const MAX_MESSAGE_BYTES: usize = 1024;
/// What opens an object; the only kind of message that carries a descriptor.
const OPCODE_OPEN: u32 = 0;
/// A header of four words, then the sizes of two keys, then the descriptor.
const OPCODE_AT: usize = 4;
const DESCRIPTOR_AT: usize = 24;
/// Cache files are written around the page cache, which takes only whole pages of memory.
const ALIGNMENT: usize = 4096;
const PIECE_BYTES: usize = 1 << 20;
const READ_COMPLETE: rustix::ioctl::Opcode = rustix::ioctl::opcode::write::<libc::c_int>(0x98, 1);

/// The device.
#[derive(Debug)]
pub struct Device {
    fd: OwnedFd,
}

/// One message.
#[derive(Debug)]
pub struct Received {
    /// Its length.
    pub bytes: usize,
    /// The cache file of an object that is opened.
    pub file: Option<CacheFile>,
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(u32::from_ne_bytes(bytes))
}

impl Device {
    /// EBUSY when somebody has it open, ENOENT where the kernel has no cachefiles.
    pub fn open() -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Ok(Self { fd: rustix::fs::open(DEVICE, flags, Mode::empty())? })
    }

    /// Gives one command. EINVAL when it answers a message that nobody waits for any more.
    pub fn command(&self, text: &str) -> io::Result<()> {
        rustix::io::retry_on_intr(|| rustix::io::write(&self.fd, text.as_bytes()))?;
        Ok(())
    }

    /// Waits for a message and takes it.
    pub fn receive(&self, into: &mut [u8]) -> io::Result<Received> {
        loop {
            let bytes = rustix::io::retry_on_intr(|| rustix::io::read(&self.fd, &mut *into))?;
            if bytes > 0 {
                return Ok(Received { bytes, file: taken(&into[..bytes]) });
            }
            self.poll(PollFlags::IN, None)?;
        }
    }

    /// Whether the kernel asks for old cache files to be culled.
    pub fn is_short_of_room(&self) -> io::Result<bool> {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        Ok(self.poll(PollFlags::OUT, Some(&now))?.contains(PollFlags::OUT))
    }

    fn poll(&self, events: PollFlags, timeout: Option<&Timespec>) -> io::Result<PollFlags> {
        let mut wanted = [PollFd::new(&self.fd, events)];
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut wanted, timeout))?;
        Ok(wanted[0].revents())
    }

    /// Drops one cache file. EBUSY when it is in use.
    ///
    /// The kernel looks the name up in the current directory of the caller, so a thread with a
    /// directory of its own gives the command.
    pub fn cull(&self, folder: &Path, name: &str) -> io::Result<()> {
        let give = || {
            // SAFETY: unshare takes an integer; only this short-lived thread is affected.
            let result = unsafe { libc::unshare(libc::CLONE_FS) };
            if result != 0 {
                return Err(io::Error::last_os_error());
            }
            std::env::set_current_dir(folder)?;
            self.command(&format!("cull {name}"))
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().spawn_scoped(scope, give)?;
            thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread died")))
        })
    }
}

/// Takes over the descriptor that a message brought.
fn taken(message: &[u8]) -> Option<CacheFile> {
    if word(message, OPCODE_AT)? != OPCODE_OPEN {
        return None;
    }
    let number = i32::try_from(word(message, DESCRIPTOR_AT)?).ok()?;
    // SAFETY: the kernel has just put this descriptor into our table for the message that was read from
    // the device, each message is read once, and nothing else knows the number.
    Some(CacheFile { file: unsafe { File::from_raw_fd(number) } })
}

/// A cache file that is filled for the kernel. The object stays open at least as long as this does.
#[derive(Debug)]
pub struct CacheFile {
    file: File,
}

impl CacheFile {
    /// Writes whole blocks at a block border.
    pub fn write_at(&self, bytes: &[u8], mut offset: u64) -> io::Result<()> {
        let room = PIECE_BYTES.min(bytes.len()) + ALIGNMENT;
        let mut memory = vec![0; room];
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        for piece in bytes.chunks(PIECE_BYTES) {
            let aligned = &mut memory[start..start + piece.len()];
            aligned.copy_from_slice(piece);
            self.file.write_all_at(aligned, offset)?;
            offset += piece.len() as u64;
        }
        Ok(())
    }

    /// Lets the reader go that message number `message` is about. EINVAL when it went already.
    pub fn complete(&self, message: u32) -> io::Result<()> {
        let argument = libc::c_ulong::from(message);
        // SAFETY: the argument of this request is a number; no memory of ours is touched.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), READ_COMPLETE as _, argument) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_has_the_number_of_the_header_file() {
        assert_eq!(READ_COMPLETE, 0x4004_9801);
    }

    #[test]
    fn only_an_open_brings_a_descriptor() {
        let mut message = [0u8; 32];
        message[OPCODE_AT] = 2;
        assert!(taken(&message).is_none());
        assert!(taken(&message[..10]).is_none());
        message[OPCODE_AT] = 0;
        assert!(taken(&message[..DESCRIPTOR_AT]).is_none(), "cut");
        message[DESCRIPTOR_AT..DESCRIPTOR_AT + 4].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert!(taken(&message).is_none(), "no number of a descriptor");
    }
}
