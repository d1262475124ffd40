//! Files mapped into memory, as virtual machines and program loaders do it: every access is a page fault
//! or a cached page, never a read(2).
//!
//! A page that its file system cannot bring ends the process with SIGBUS: map only what may do so.

use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::ptr::NonNull;

/// A whole file. Others may change it at any time, so no reference to its bytes is ever made: they are
/// copied through pointers.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping lives until drop, and writing to it takes a unique reference.
unsafe impl Send for Mapping {}
// SAFETY: through a shared reference it is only read.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn open(file: &File, rights: ProtFlags, how: MapFlags) -> io::Result<Self> {
        let bytes = usize::try_from(file.metadata()?.len()).unwrap_or(0);
        if bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "mapping of an empty file"));
        }
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, rights, how, file, 0)? };
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| io::Error::other("mmap answered address zero"))?;
        Ok(Self { start, bytes })
    }

    fn copy(&self, offset: usize, into: &mut [u8]) -> io::Result<()> {
        let from = self.at(offset, into.len())?;
        // SAFETY: the range was checked, and `into` cannot lie within the mapping, to which no reference
        // exists.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Where `bytes` bytes at `offset` lie. `InvalidInput` when they do not lie within.
    fn at(&self, offset: usize, bytes: usize) -> io::Result<*mut u8> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            let text = format!("{bytes} bytes at {offset} of {}", self.bytes);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        // SAFETY: the offset lies within the mapping or at its end.
        Ok(unsafe { self.start.as_ptr().add(offset) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nobody refers to any more.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

/// A whole file, shared with its page cache.
#[derive(Debug)]
pub struct FileMapping(Mapping);

impl FileMapping {
    /// Maps the file in its present size; nothing is read. `InvalidInput` when it is empty.
    pub fn open(file: &File) -> io::Result<Self> {
        Ok(Self(Mapping::open(file, ProtFlags::READ, MapFlags::SHARED)?))
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// Copies bytes out. `InvalidInput` when the range does not lie within.
    pub fn copy(&self, offset: usize, into: &mut [u8]) -> io::Result<()> {
        self.0.copy(offset, into)
    }
}

/// A whole file whose pages come from the file, and what is written stays in this process.
#[derive(Debug)]
pub struct PrivateMapping(Mapping);

impl PrivateMapping {
    /// Maps the file in its present size; nothing is read. `InvalidInput` when it is empty.
    pub fn open(file: &File) -> io::Result<Self> {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        Ok(Self(Mapping::open(file, rights, MapFlags::PRIVATE)?))
    }

    /// Asks for all of it to be brought into memory soon.
    pub fn will_need(&self) -> io::Result<()> {
        let Mapping { start, bytes } = &self.0;
        // SAFETY: the range is our own mapping; this advice changes no content.
        unsafe { rustix::mm::madvise(start.as_ptr().cast(), *bytes, Advice::WillNeed) }
            .map_err(io::Error::from)
    }

    /// Copies bytes out. `InvalidInput` when the range does not lie within.
    pub fn copy(&self, offset: usize, into: &mut [u8]) -> io::Result<()> {
        self.0.copy(offset, into)
    }

    /// Writes bytes for ourselves; the file keeps its own. `InvalidInput` as for [`Self::copy`].
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        let to = self.0.at(offset, bytes.len())?;
        // SAFETY: the range was checked and can be written to, and `bytes` cannot lie within the mapping,
        // to which no reference exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_of_twelve_bytes() -> (tempfile::TempDir, File) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"twelve bytes").unwrap();
        let file = File::open(path).unwrap();
        (folder, file)
    }

    #[test]
    fn a_mapping_has_the_bytes_of_its_file() {
        let (_folder, file) = file_of_twelve_bytes();
        let mapping = FileMapping::open(&file).unwrap();
        let mut middle = [0; 5];
        mapping.copy(7, &mut middle).unwrap();
        assert_eq!((&middle, mapping.bytes()), (b"bytes", 12));
        assert!(mapping.copy(8, &mut middle).is_err());
        assert!(mapping.copy(usize::MAX, &mut middle).is_err());
        assert!(FileMapping::open(&File::open("/dev/null").unwrap()).is_err());
    }

    #[test]
    fn what_is_written_stays_ours() {
        let (folder, file) = file_of_twelve_bytes();
        let mut mapping = PrivateMapping::open(&file).unwrap();
        mapping.will_need().unwrap();
        mapping.write(7, b"BYTES").unwrap();
        let mut whole = [0; 12];
        mapping.copy(0, &mut whole).unwrap();
        assert_eq!(&whole, b"twelve BYTES");
        assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), b"twelve bytes");
        assert!(mapping.write(8, b"BYTES").is_err());
    }
}
