//! A file mapped for reading, as a virtual machine maps it: every access is a page fault or a cached
//! page, never a read(2).
//!
//! A page that its file system cannot bring ends the process with SIGBUS: map only what may do so.

use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::ptr::NonNull;

/// A whole file, shared with its page cache.
#[derive(Debug)]
pub struct FileMapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping lives until drop, and nothing here writes to it.
unsafe impl Send for FileMapping {}
// SAFETY: as for Send.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps the file in its present size; nothing is read. `InvalidInput` when it is empty.
    pub fn open(file: &File) -> io::Result<Self> {
        let bytes = usize::try_from(file.metadata()?.len()).unwrap_or(0);
        if bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "mapping of an empty file"));
        }
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ,
                MapFlags::SHARED,
                file,
                0,
            )?
        };
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| io::Error::other("mmap answered address zero"))?;
        Ok(Self { start, bytes })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies bytes out. `InvalidInput` when the range does not lie within.
    pub fn copy(&self, offset: usize, into: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(into.len()).is_none_or(|end| end > self.bytes) {
            let text = format!("{} bytes at {offset} of {}", into.len(), self.bytes);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        // SAFETY: the range lies within the mapping, as was checked. The file may be changed by others
        // meanwhile, so no reference to it is made: bytes are copied through pointers.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.start.as_ptr().add(offset),
                into.as_mut_ptr(),
                into.len(),
            );
        }
        Ok(())
    }
}

impl Drop for FileMapping {
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
    fn a_mapping_has_the_bytes_of_its_file() {
        let path = std::env::temp_dir().join(format!("lamella-mapping-{}", std::process::id()));
        std::fs::write(&path, b"twelve bytes").unwrap();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let mapping = FileMapping::open(&file).unwrap();
        let mut middle = [0; 5];
        mapping.copy(7, &mut middle).unwrap();
        assert_eq!((&middle, mapping.bytes()), (b"bytes", 12));
        assert!(mapping.copy(8, &mut middle).is_err());
        assert!(FileMapping::open(&File::open("/dev/null").unwrap()).is_err());
    }
}
