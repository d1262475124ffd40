//! A file mapped privately, as a program loader maps it: pages come from the file, and what is written
//! stays in this process.
//!
//! A page that its file system cannot bring ends the process with SIGBUS: map only what may do so.

use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::ptr::NonNull;

/// A whole file, with changes of our own.
#[derive(Debug)]
pub struct PrivateMapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping lives until drop, and writing to it takes a unique reference.
unsafe impl Send for PrivateMapping {}

impl PrivateMapping {
    /// Maps the file in its present size; nothing is read. `InvalidInput` when it is empty.
    pub fn open(file: &File) -> io::Result<Self> {
        let bytes = usize::try_from(file.metadata()?.len()).unwrap_or(0);
        if bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "mapping of an empty file"));
        }
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, rights, MapFlags::PRIVATE, file, 0)?
        };
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| io::Error::other("mmap answered address zero"))?;
        Ok(Self { start, bytes })
    }

    /// Asks for all of it to be brought into memory soon.
    pub fn will_need(&self) -> io::Result<()> {
        // SAFETY: the range is our own mapping; this advice changes no content.
        unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), self.bytes, Advice::WillNeed) }
            .map_err(io::Error::from)
    }

    /// Copies bytes out. `InvalidInput` when the range does not lie within.
    pub fn copy(&self, offset: usize, into: &mut [u8]) -> io::Result<()> {
        self.check(offset, into.len())?;
        // SAFETY: the range was checked. Others may change the file, and with it pages that we have not
        // written, so no reference to it is made: bytes are copied through pointers.
        unsafe {
            let from = self.start.as_ptr().add(offset);
            std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len());
        }
        Ok(())
    }

    /// Writes bytes for ourselves; the file keeps its own. `InvalidInput` as for [`Self::copy`].
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        self.check(offset, bytes.len())?;
        // SAFETY: the range was checked, and `bytes` cannot lie within the mapping, to which no
        // reference exists.
        unsafe {
            let to = self.start.as_ptr().add(offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        Ok(())
    }

    fn check(&self, offset: usize, bytes: usize) -> io::Result<()> {
        if offset.checked_add(bytes).is_some_and(|end| end <= self.bytes) {
            return Ok(());
        }
        let text = format!("{bytes} bytes at {offset} of {}", self.bytes);
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    }
}

impl Drop for PrivateMapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nobody refers to any more.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_stays_ours() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"twelve bytes").unwrap();
        let mut mapping = PrivateMapping::open(&File::open(&path).unwrap()).unwrap();
        mapping.will_need().unwrap();
        mapping.write(7, b"BYTES").unwrap();
        let mut whole = [0; 12];
        mapping.copy(0, &mut whole).unwrap();
        assert_eq!(&whole, b"twelve BYTES");
        assert_eq!(std::fs::read(&path).unwrap(), b"twelve bytes");
        assert!(mapping.write(8, b"BYTES").is_err());
    }
}
