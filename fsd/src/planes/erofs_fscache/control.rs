//! Where messages come from and answers go to: the kernel's device, or a scripted peer in tests.

use std::io;
use std::path::Path;
use sys::cachefiles::{CacheFile as KernelFile, Device};

/// The control side of a cache.
pub trait Control: Send + Sync {
    /// Waits for a message and takes it; none when there will be no more.
    fn receive(&self, into: &mut [u8]) -> io::Result<Option<Received>>;

    /// Gives one command. EINVAL when it answers what nobody waits for any more.
    fn command(&self, text: &str) -> io::Result<()>;

    /// Whether old cache files have to go.
    fn is_short_of_room(&self) -> io::Result<bool>;

    /// Drops one cache file. EBUSY when it is in use.
    fn cull(&self, folder: &Path, name: &str) -> io::Result<()>;
}

/// One message, and the file that an opening brings.
pub struct Received {
    /// Its length.
    pub bytes: usize,
    /// What is filled for the object.
    pub file: Option<Box<dyn CacheFile>>,
}

/// The cache file of an open object. Dropping it gives it up.
pub trait CacheFile: Send + Sync {
    /// Writes whole blocks at a block border.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Lets the reader of message `number` go: it takes what is in the file now, or gets an error.
    fn complete(&self, number: u32) -> io::Result<()>;
}

impl Control for Device {
    fn receive(&self, into: &mut [u8]) -> io::Result<Option<Received>> {
        let received = Self::receive(self, into)?;
        let file = received.file.map(|file| Box::new(file) as Box<dyn CacheFile>);
        Ok(Some(Received { bytes: received.bytes, file }))
    }

    fn command(&self, text: &str) -> io::Result<()> {
        Self::command(self, text)
    }

    fn is_short_of_room(&self) -> io::Result<bool> {
        Self::is_short_of_room(self)
    }

    fn cull(&self, folder: &Path, name: &str) -> io::Result<()> {
        Self::cull(self, folder, name)
    }
}

impl CacheFile for KernelFile {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        Self::write_at(self, bytes, offset)
    }

    fn complete(&self, number: u32) -> io::Result<()> {
        Self::complete(self, number)
    }
}
