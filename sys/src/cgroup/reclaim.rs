//! Asking the kernel for the memory of a group whose processes rest: page cache is let go of, the rest goes to
//! swap where there is some.
//!
//! Locking: none. What survives a crash: the bound of swap, which the next [`Group::set_memory`] sets anew.

use super::{Group, allow_absent};
use std::io;

impl Group<'_> {
    /// Gives back what the kernel takes. Blocks until it takes no more; with version 1 no signal ends that early.
    ///
    /// A group with a bound of memory uses no swap otherwise, so with version 2 it may from here on until
    /// [`Group::keep_memory`]. With version 1 the bound is one of memory and swap together, and nothing changes.
    pub fn reclaim_memory(&self) -> io::Result<()> {
        let place = &self.hierarchies.memory;
        if !place.as_ref().is_some_and(|place| place.unified) {
            return self.drop_memory();
        }
        allow_absent(std::fs::write(self.file(place, "", "memory.swap.max")?, "max"))?;
        let bytes = self.memory_in_use()?;
        let reclaimed = std::fs::write(self.file(place, "", "memory.reclaim")?, bytes.to_string());
        match reclaimed {
            // It took less than all, or is older than Linux 5.19.
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(()),
            other => allow_absent(other),
        }
    }

    /// Uses no more swap than it does now.
    pub fn keep_memory(&self) -> io::Result<()> {
        let place = &self.hierarchies.memory;
        if !place.as_ref().is_some_and(|place| place.unified) {
            return Ok(());
        }
        allow_absent(std::fs::write(self.file(place, "", "memory.swap.max")?, "0"))
    }
}
