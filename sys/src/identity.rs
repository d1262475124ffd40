//! Whom a thread acts as towards file systems, without a change of what else it may do.
//!
//! For: making files that belong to another user, on file systems and mounts that know the caller's own
//! number not at all. Not for: giving up rights; the thread keeps every one it has.
//!
//! The kernel marks the memory of a process whose threads do this as undumpable.

use crate::capability;
use std::io;
use std::marker::PhantomData;

/// While it lives, what this thread makes belongs to the given user and group. Threads are reused, so the
/// former identity comes back with its drop.
#[derive(Debug)]
pub struct FileIdentity {
    user: u32,
    group: u32,
    rights: capability::CapabilitySet,
    /// It holds for the thread that made it.
    _stays: PhantomData<*const ()>,
}

impl FileIdentity {
    /// Acts as this user and group towards file systems, with the rights that the thread has.
    pub fn assume(user: u32, group: u32) -> io::Result<Self> {
        let rights = capability::effective()?;
        let before =
            Self { group: set_group(group), user: set_user(user), rights, _stays: PhantomData };
        // The calls tell no error, but who one is.
        if (set_user(u32::MAX), set_group(u32::MAX)) != (user, group) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        // With root's number went the rights over files.
        capability::set_effective(rights)?;
        Ok(before)
    }
}

impl Drop for FileIdentity {
    fn drop(&mut self) {
        set_user(self.user);
        set_group(self.group);
        if let Err(error) = capability::set_effective(self.rights) {
            tracing::error!(%error, "a thread has lost rights");
        }
    }
}

/// Answers the former one. An id that is none changes nothing.
fn set_user(user: u32) -> u32 {
    // SAFETY: an integer only; the libraries make the call for the calling thread alone.
    unsafe { libc::setfsuid(user) as u32 }
}

fn set_group(group: u32) -> u32 {
    // SAFETY: as above.
    unsafe { libc::setfsgid(group) as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn files_belong_to_whom_the_thread_acts_as() {
        let folder = tempfile::tempdir().unwrap();
        let owner = |name: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, "x").unwrap();
            let metadata = std::fs::metadata(path).unwrap();
            (metadata.uid(), metadata.gid())
        };
        let rights = capability::effective().unwrap();
        let identity = FileIdentity::assume(4242, 4343).unwrap();
        assert_eq!(owner("theirs"), (4242, 4343));
        assert_eq!(capability::effective().unwrap(), rights);
        drop(identity);
        assert_eq!(owner("ours"), (0, 0));
        assert_eq!(capability::effective().unwrap(), rights);
    }
}
