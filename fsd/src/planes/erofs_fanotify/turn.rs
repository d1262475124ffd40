//! Waiting for an event so that one thread is woken for one event.
//!
//! Threads that wait in read(2) on a group are all woken for every event, and all but one go back to sleep: with
//! four of them that is a good part of what a cold page costs. So each waits in an epoll of its own, to
//! which the kernel tells an event exclusively: the first one that is idle gets it.
//!
//! Locking: none. Level-triggered: an event that came while all were busy is told to the next one that
//! waits. Who is told may find nothing, and then waits in read(2): that costs a wake-up, and no event.

use layer::{Context, Error, Result};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use sys::fanotify::Group;

/// One thread's place among those who wait for events of a group.
#[derive(Debug)]
pub struct Turn {
    epoll: OwnedFd,
}

impl Turn {
    /// A place for one thread.
    pub fn of(group: &Group) -> Result<Self> {
        let failed = |error: Errno| Error::io("wait for the fanotify group", error.into());
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(failed)?;
        let events = EventFlags::IN | EventFlags::EXCLUSIVE;
        epoll::add(&epoll, group, EventData::new_u64(0), events).map_err(failed)?;
        Ok(Self { epoll })
    }

    /// Waits until an event is there, most probably for this thread.
    pub fn wait(&self) -> Result<()> {
        let nothing = epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) };
        loop {
            match epoll::wait(&self.epoll, &mut [nothing], None) {
                Err(Errno::INTR) => {}
                waited => {
                    let waited = waited.map(|_| ()).map_err(std::io::Error::from);
                    return waited.context(|| "wait for an event".to_owned());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;
    use sys::fanotify::{EVENT_BYTES, Taken};
    use sys::memory::SharedMapping;
    use sys::probe::{Capability, skip_test};

    #[test]
    fn events_that_came_while_nobody_waited_are_told_to_whoever_waits_next() {
        let needed = [Capability::FanotifyPreContent];
        if skip_test("turn::tests", &std::env::temp_dir(), &needed) {
            return;
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 16).unwrap();
        let group = Group::new().unwrap();
        let turns = [Turn::of(&group).unwrap(), Turn::of(&group).unwrap()];
        group.mark(file.as_file().as_fd()).unwrap();
        let readers: Vec<_> = (0..5)
            .map(|_| {
                let path = file.path().to_owned();
                std::thread::spawn(move || File::open(path).unwrap().read(&mut [0; 10]).unwrap())
            })
            .collect();
        assert!(group.wait(None).unwrap());
        let slot = SharedMapping::create("turns", 4096).unwrap();
        for index in 0..readers.len() {
            // The other one never comes back to take what it was told about.
            turns[usize::from(index > 0)].wait().unwrap();
            let taken = group.read_into(slot.region(0, EVENT_BYTES).unwrap()).unwrap();
            let Taken::Event(event) = taken else { panic!("no event") };
            assert!(event.allow().unwrap());
        }
        assert!(readers.into_iter().all(|reader| reader.join().unwrap() == 10));
    }
}
