//! Anonymous memory files, their seals, and memory that two processes share.
//!
//! For: programs run from a sealed file, and the journal that outlives the process that writes it.
//! Not for: mapping files that somebody else may shorten (that is a SIGBUS): [`SharedMapping`] only
//! maps memory files whose size is sealed.
//!
//! Locking: none. Shared words are atomics; shared bytes are copied byte by byte with relaxed atomic
//! accesses, so no Rust reference to memory that another process may change ever exists.
//!
//! What survives a crash: the bytes live as long as any process holds the descriptor or a mapping.

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Makes an empty memory file that can be sealed. It is closed on exec; `name` is for /proc only.
pub fn memfd(name: &str) -> io::Result<OwnedFd> {
    Ok(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?)
}

/// Makes a memory file with this content that nobody can change any more, with mode 0555 so that it
/// can be run.
pub fn sealed_memfd(name: &str, content: &[u8]) -> io::Result<OwnedFd> {
    let fd = memfd(name)?;
    let mut rest = content;
    while !rest.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::write(&fd, rest))?;
        rest = &rest[written..];
    }
    rustix::fs::fchmod(&fd, rustix::fs::Mode::from_raw_mode(0o555))?;
    rustix::fs::seek(&fd, rustix::fs::SeekFrom::Start(0))?;
    seal_content(fd.as_fd())?;
    Ok(fd)
}

/// Forbids every later change of the content, the size and the seals.
pub fn seal_content(fd: BorrowedFd<'_>) -> io::Result<()> {
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    Ok(rustix::fs::fcntl_add_seals(fd, seals)?)
}

/// Forbids every later change of the size and the seals; the bytes stay writable.
pub fn seal_size(fd: BorrowedFd<'_>) -> io::Result<()> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    Ok(rustix::fs::fcntl_add_seals(fd, seals)?)
}

/// Whether nobody can change the content of this file any more.
pub fn is_content_sealed(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let wanted = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW;
    Ok(rustix::fs::fcntl_get_seals(fd)?.contains(wanted))
}

fn out_of_bounds(offset: usize, bytes: usize, of: usize) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("{offset}+{bytes} does not fit into {of} bytes of shared memory, or is unaligned"),
    )
}

/// A memory file of fixed size, mapped for reading and writing and shared with whoever has the
/// descriptor.
#[derive(Debug)]
pub struct SharedMapping {
    fd: OwnedFd,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory that lives until drop; every access through a shared reference
// is an atomic one or is done by the kernel.
unsafe impl Send for SharedMapping {}
// SAFETY: as for Send.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Makes a memory file of `bytes` zero bytes, seals its size and maps it.
    pub fn create(name: &str, bytes: usize) -> io::Result<Self> {
        let fd = memfd(name)?;
        rustix::fs::ftruncate(&fd, bytes as u64)?;
        seal_size(fd.as_fd())?;
        Self::open(fd)
    }

    /// Maps a memory file that another process made. `InvalidInput` unless its size is sealed.
    pub fn open(fd: OwnedFd) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&fd)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            let text = "shared memory whose size is not sealed";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let bytes = usize::try_from(rustix::fs::fstat(&fd)?.st_size).unwrap_or(0);
        if bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "empty shared memory"));
        }
        // Populated at once: a page fault inside read(2) of a fanotify group that meets a fatal
        // signal would make the kernel deny the event.
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours; the
        // file cannot shrink below it.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                &fd,
                0,
            )?
        };
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| io::Error::other("mmap answered address zero"))?;
        Ok(Self { fd, start, bytes })
    }

    /// The descriptor, to be sent to another process.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The word at this byte offset, which must be a multiple of 4.
    pub fn atomic_u32(&self, offset: usize) -> io::Result<&AtomicU32> {
        let at = self.place(offset, 4)?;
        // SAFETY: in bounds and aligned (checked), alive as long as self, and only accessed atomically.
        Ok(unsafe { AtomicU32::from_ptr(at.cast().as_ptr()) })
    }

    /// The word at this byte offset, which must be a multiple of 8.
    pub fn atomic_u64(&self, offset: usize) -> io::Result<&AtomicU64> {
        let at = self.place(offset, 8)?;
        // SAFETY: in bounds and aligned (checked), alive as long as self, and only accessed atomically.
        Ok(unsafe { AtomicU64::from_ptr(at.cast().as_ptr()) })
    }

    /// Some bytes of the mapping.
    pub fn region(&self, offset: usize, bytes: usize) -> io::Result<Region<'_>> {
        let end = offset.checked_add(bytes).filter(|end| *end <= self.bytes);
        if end.is_none() {
            return Err(out_of_bounds(offset, bytes, self.bytes));
        }
        // SAFETY: offset <= self.bytes, so the sum stays inside the mapping or one past its end.
        let start = unsafe { self.start.add(offset) };
        Ok(Region { start, bytes, mapping: PhantomData })
    }

    fn place(&self, offset: usize, size: usize) -> io::Result<NonNull<u8>> {
        let end = offset.checked_add(size).filter(|end| *end <= self.bytes);
        if end.is_none() || !offset.is_multiple_of(size) {
            return Err(out_of_bounds(offset, size, self.bytes));
        }
        // SAFETY: offset + size <= self.bytes was checked. The mapping starts at a page border, so
        // the offset's alignment is the address's.
        Ok(unsafe { self.start.add(offset) })
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `open` made; all borrows of it have ended.
        let result = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        if let Err(error) = result {
            tracing::error!(%error, "munmap of shared memory failed");
        }
    }
}

/// Bytes inside a [`SharedMapping`], which other processes and the kernel may change at any time.
#[derive(Debug, Clone, Copy)]
pub struct Region<'mapping> {
    start: NonNull<u8>,
    bytes: usize,
    mapping: PhantomData<&'mapping SharedMapping>,
}

impl<'mapping> Region<'mapping> {
    /// Size in bytes.
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// A part of it.
    pub fn sub(self, offset: usize, bytes: usize) -> io::Result<Region<'mapping>> {
        let end = offset.checked_add(bytes).filter(|end| *end <= self.bytes);
        if end.is_none() {
            return Err(out_of_bounds(offset, bytes, self.bytes));
        }
        // SAFETY: offset <= self.bytes was checked.
        let start = unsafe { self.start.add(offset) };
        Ok(Region { start, bytes, mapping: PhantomData })
    }

    fn byte(self, index: usize) -> &'mapping AtomicU8 {
        debug_assert!(index < self.bytes);
        // SAFETY: callers pass an index below self.bytes; the mapping outlives 'mapping and is only
        // accessed atomically.
        unsafe { AtomicU8::from_ptr(self.start.add(index).as_ptr()) }
    }

    /// Copies the first bytes out, as many as both sides have.
    pub fn load(self, into: &mut [u8]) {
        for (index, byte) in into.iter_mut().take(self.bytes).enumerate() {
            *byte = self.byte(index).load(Ordering::Relaxed);
        }
    }

    /// Copies bytes in from the start, as many as both sides have.
    pub fn store(self, from: &[u8]) {
        for (index, byte) in from.iter().take(self.bytes).enumerate() {
            self.byte(index).store(*byte, Ordering::Relaxed);
        }
    }

    /// Sets every byte to zero.
    pub fn clear(self) {
        for index in 0..self.bytes {
            self.byte(index).store(0, Ordering::Relaxed);
        }
    }

    /// One `read(2)` straight into the region; answers the number of bytes. Retries on EINTR.
    pub fn read_from_fd(self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        loop {
            // SAFETY: the kernel writes at most self.bytes bytes from self.start, all inside the
            // mapping; no Rust reference to those bytes exists except atomics.
            let length =
                unsafe { libc::read(fd.as_raw_fd(), self.start.as_ptr().cast(), self.bytes) };
            if let Ok(length) = usize::try_from(length) {
                return Ok(length);
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_file_keeps_its_content_and_runs() {
        let fd = sealed_memfd("program", b"#!/bin/true\n").unwrap();
        assert!(is_content_sealed(fd.as_fd()).unwrap());
        assert!(rustix::io::pwrite(&fd, b"x", 0).is_err());
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
        let mut text = [0; 12];
        assert_eq!(rustix::io::pread(&fd, &mut text, 0).unwrap(), 12);
        assert_eq!(&text, b"#!/bin/true\n");
    }

    #[test]
    fn two_mappings_of_one_file_see_each_other() {
        let first = SharedMapping::create("shared", 8192).unwrap();
        let second = SharedMapping::open(first.descriptor().try_clone_to_owned().unwrap()).unwrap();
        first.atomic_u64(4096).unwrap().store(7, Ordering::Release);
        assert_eq!(second.atomic_u64(4096).unwrap().load(Ordering::Acquire), 7);
        first.region(100, 5).unwrap().store(b"hello world");
        let mut text = [0; 8];
        second.region(100, 8).unwrap().load(&mut text);
        assert_eq!(&text, b"hello\0\0\0");
        second.region(100, 5).unwrap().clear();
        first.region(100, 8).unwrap().load(&mut text);
        assert_eq!(text, [0; 8]);
    }

    #[test]
    fn nothing_outside_the_mapping_can_be_reached() {
        let shared = SharedMapping::create("shared", 4096).unwrap();
        assert!(shared.atomic_u32(4096).is_err());
        assert!(shared.atomic_u32(4092).is_ok());
        assert!(shared.atomic_u32(2).is_err());
        assert!(shared.atomic_u64(4092).is_err());
        assert!(shared.region(4000, 97).is_err());
        assert!(shared.region(usize::MAX, 2).is_err());
        assert!(shared.region(4000, 96).unwrap().sub(90, 7).is_err());
    }

    #[test]
    fn memory_that_could_shrink_is_refused() {
        let fd = memfd("loose").unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        assert_eq!(SharedMapping::open(fd).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn read_goes_straight_into_the_region() {
        let shared = SharedMapping::create("shared", 4096).unwrap();
        let source = sealed_memfd("source", b"0123456789").unwrap();
        let region = shared.region(16, 4).unwrap();
        assert_eq!(region.read_from_fd(source.as_fd()).unwrap(), 4);
        let mut text = [0; 4];
        region.load(&mut text);
        assert_eq!(&text, b"0123");
    }
}
