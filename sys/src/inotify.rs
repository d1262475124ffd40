//! Watching files and folders for changes (`inotify(7)`).
//!
//! For: one instance for a whole process, since the kernel counts instances by user and allows few. Watches
//! are set by descriptor, so that no name is looked up twice. Not for: knowing what a watch number stands
//! for; that is the caller's table. No state, no locks.

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

const BUFFER_BYTES: usize = 64 << 10;

/// What happened, as the kernel says it: the bits of [`What`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The watch; -1 for an overflow, which concerns all.
    pub watch: i32,
    /// Which of the bits below.
    pub what: What,
    /// Joins the two halves of a rename.
    pub cookie: u32,
    /// The name in the watched folder; empty for the watched inode itself.
    pub name: Vec<u8>,
}

/// The kinds of one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct What {
    pub created: bool,
    pub written: bool,
    pub removed: bool,
    pub moved_from: bool,
    pub moved_to: bool,
    pub attributes: bool,
    /// The watched inode itself was removed, moved or unmounted.
    pub is_self_gone: bool,
    /// The watch exists no more; its number may be used again.
    pub is_ended: bool,
    /// Events were lost.
    pub overflow: bool,
    /// The name is that of a folder.
    pub is_folder: bool,
}

/// An instance.
#[derive(Debug)]
pub struct Inotify(OwnedFd);

impl Inotify {
    /// A new instance that does not block. EMFILE when the user has too many.
    pub fn new() -> io::Result<Self> {
        Ok(Self(inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?))
    }

    /// Watches the folder (or file) behind a descriptor, which may have been opened with `O_PATH` and may be
    /// closed afterwards. The same inode again answers the same number. ENOSPC when the user has too many.
    pub fn watch(&self, place: BorrowedFd<'_>) -> io::Result<i32> {
        let flags = WatchFlags::CREATE
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::MODIFY
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::EXCL_UNLINK;
        let path = format!("/proc/self/fd/{}", place.as_raw_fd());
        Ok(inotify::add_watch(&self.0, path, flags)?)
    }

    /// Ends a watch; one that has ended by itself is no error.
    pub fn unwatch(&self, watch: i32) {
        let _ended_by_itself = inotify::remove_watch(&self.0, watch);
    }

    /// The events that are there now; none is no error.
    pub fn read(&self) -> io::Result<Vec<Event>> {
        let mut buffer = vec![MaybeUninit::uninit(); BUFFER_BYTES];
        let mut reader = inotify::Reader::new(&self.0, &mut buffer);
        let mut events = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => {
                    let bits = event.events();
                    let has = |flag: ReadFlags| bits.contains(flag);
                    events.push(Event {
                        watch: event.wd(),
                        what: What {
                            created: has(ReadFlags::CREATE),
                            written: has(ReadFlags::MODIFY) || has(ReadFlags::CLOSE_WRITE),
                            removed: has(ReadFlags::DELETE),
                            moved_from: has(ReadFlags::MOVED_FROM),
                            moved_to: has(ReadFlags::MOVED_TO),
                            attributes: has(ReadFlags::ATTRIB),
                            is_self_gone: has(ReadFlags::DELETE_SELF)
                                || has(ReadFlags::MOVE_SELF)
                                || has(ReadFlags::UNMOUNT),
                            is_ended: has(ReadFlags::IGNORED),
                            overflow: has(ReadFlags::QUEUE_OVERFLOW),
                            is_folder: has(ReadFlags::ISDIR),
                        },
                        cookie: event.cookie(),
                        name: event.file_name().map(|n| n.to_bytes().to_vec()).unwrap_or_default(),
                    });
                    if reader.is_buffer_empty() {
                        return Ok(events);
                    }
                }
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(events),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Inotify {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Inotify {
    fn as_raw_fd(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happens_in_a_folder_is_told_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let inotify = Inotify::new().unwrap();
        let place = std::fs::File::open(folder.path()).unwrap();
        let watch = inotify.watch(place.as_fd()).unwrap();
        assert_eq!(inotify.watch(place.as_fd()).unwrap(), watch);
        assert!(inotify.read().unwrap().is_empty());
        std::fs::write(folder.path().join("a"), "x").unwrap();
        std::fs::create_dir(folder.path().join("d")).unwrap();
        std::fs::rename(folder.path().join("a"), folder.path().join("b")).unwrap();
        std::fs::remove_file(folder.path().join("b")).unwrap();
        let events = inotify.read().unwrap();
        let find = |name: &str, test: fn(&What) -> bool| {
            events.iter().find(|event| event.name == name.as_bytes() && test(&event.what)).cloned()
        };
        assert!(find("a", |what| what.created).is_some());
        assert!(find("a", |what| what.written).is_some());
        assert!(find("d", |what| what.created && what.is_folder).is_some());
        let from = find("a", |what| what.moved_from).unwrap();
        assert_eq!(find("b", |what| what.moved_to).unwrap().cookie, from.cookie);
        assert!(find("b", |what| what.removed).is_some());
        inotify.unwatch(watch);
        assert!(inotify.read().unwrap().iter().any(|event| event.what.is_ended));
    }
}
