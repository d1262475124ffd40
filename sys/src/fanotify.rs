//! Pre-content events of fanotify: the kernel asks before a read reaches the bytes of a marked file.
//!
//! For: filling sparse files on demand. A [`Group`] marks files, [`Group::read_into`] takes one event
//! straight into a [`Region`](crate::memory::Region) of shared memory, [`Event`] owns the obligation
//! to answer it. Not for: any notification-only use of fanotify, directories, mounts.
//!
//! Locking: none here; the kernel serialises reads of the queue and answers. Any thread may answer.
//!
//! What survives a crash: an unanswered event lives as long as *some* process holds the group
//! descriptor. Its reader stays blocked meanwhile. A successor answers by the number alone with
//! [`Group::respond_raw`]; the number is the file descriptor in the process that read the event, and is
//! in the raw record. When the last holder goes away the kernel allows everything, so readers see what
//! the file holds: keep a second holder, and unmount before the last one closes.
//!
//! ```text
//! queued --read_into--> Event --allow/deny--> answered --> descriptor closed
//!                        | drop: answered with EIO
//!                        | process died: answered by number, by a successor
//! ```

use crate::memory::Region;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

/// Size in bytes of the record of one pre-content event: the metadata and the range record.
///
/// A buffer of exactly this size takes one event and never two.
pub const EVENT_BYTES: usize = METADATA_BYTES + RANGE_BYTES;

const METADATA_BYTES: usize = 24;
const RANGE_BYTES: usize = 24;
const METADATA_VERSION: u8 = 3;
const INFO_TYPE_RANGE: u8 = 6;
// linux/fanotify.h since 6.14; neither libc nor Debian 12's headers have them.
const FAN_PRE_ACCESS: u64 = 0x0010_0000;
const FAN_Q_OVERFLOW: u64 = 0x4000;

/// What a reader is told when its read is refused. The kernel takes no other errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denial {
    /// EIO.
    Io,
    /// EPERM.
    NotPermitted,
    /// EBUSY.
    Busy,
    /// ETXTBSY.
    TextBusy,
    /// EAGAIN.
    Again,
    /// ENOSPC.
    NoSpace,
    /// EDQUOT.
    Quota,
}

impl Denial {
    /// The denial for an errno; EIO for every errno that the kernel does not take.
    pub fn from_errno(errno: i32) -> Self {
        match errno {
            libc::EPERM => Self::NotPermitted,
            libc::EBUSY => Self::Busy,
            libc::ETXTBSY => Self::TextBusy,
            libc::EAGAIN => Self::Again,
            libc::ENOSPC => Self::NoSpace,
            libc::EDQUOT => Self::Quota,
            _ => Self::Io,
        }
    }

    /// The errno that the reader gets.
    pub fn errno(self) -> i32 {
        match self {
            Self::Io => libc::EIO,
            Self::NotPermitted => libc::EPERM,
            Self::Busy => libc::EBUSY,
            Self::TextBusy => libc::ETXTBSY,
            Self::Again => libc::EAGAIN,
            Self::NoSpace => libc::ENOSPC,
            Self::Quota => libc::EDQUOT,
        }
    }
}

/// An answer to an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Response {
    /// The read goes on and takes what the file holds now.
    Allow,
    /// The read fails.
    Deny(Denial),
}

impl Response {
    fn to_bits(self) -> u32 {
        match self {
            Self::Allow => libc::FAN_ALLOW,
            Self::Deny(denial) => libc::FAN_DENY | ((denial.errno() as u32 & 0xff) << 24),
        }
    }
}

/// What one raw record says, as numbers only: nothing is owned, nothing is answered by dropping it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// A process waits for this range of a marked file.
    PreAccess(PreAccess),
    /// The queue overflowed. Cannot happen with [`Group::new`]'s unlimited queue unless memory is out.
    Overflow,
    /// An event of a kind that was never asked for, with the number to answer if there is one.
    Foreign {
        /// The event's descriptor number, absent for events that carry none.
        number: Option<RawFd>,
    },
}

/// The numbers of one pre-content event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PreAccess {
    /// Descriptor number of the file, valid in the process that read the event; the name under which
    /// it is answered.
    pub number: RawFd,
    /// Process id of the reader, in the pid namespace of the process that made the group.
    pub pid: i32,
    /// Where the range starts, in bytes.
    pub offset: u64,
    /// Length of the range in bytes.
    pub count: u64,
}

/// Reads the numbers out of one raw record, as `read(2)` left it in memory.
///
/// `InvalidData` for bytes that are no record: all zero, cut, or of another version.
pub fn parse_record(bytes: &[u8]) -> io::Result<Record> {
    let malformed = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    if bytes.len() < METADATA_BYTES {
        return Err(malformed("fanotify record is shorter than its metadata"));
    }
    let event_len = number_at::<4>(bytes, 0).map_or(0, u32::from_ne_bytes) as usize;
    let metadata_len = number_at::<2>(bytes, 6).map_or(0, u16::from_ne_bytes) as usize;
    if bytes[4] != METADATA_VERSION {
        return Err(malformed("fanotify record has another version than 3"));
    }
    if metadata_len < METADATA_BYTES || event_len < metadata_len || event_len > bytes.len() {
        return Err(malformed("fanotify record has impossible lengths"));
    }
    let mask = number_at::<8>(bytes, 8).map_or(0, u64::from_ne_bytes);
    let number = number_at::<4>(bytes, 16).map_or(-1, i32::from_ne_bytes);
    let pid = number_at::<4>(bytes, 20).map_or(0, i32::from_ne_bytes);
    if mask & FAN_Q_OVERFLOW != 0 {
        return Ok(Record::Overflow);
    }
    let range = find_range(&bytes[metadata_len..event_len]);
    match range {
        Some((offset, count)) if mask & FAN_PRE_ACCESS != 0 && number >= 0 => {
            Ok(Record::PreAccess(PreAccess { number, pid, offset, count }))
        }
        _ => Ok(Record::Foreign { number: (number >= 0).then_some(number) }),
    }
}

fn number_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

fn find_range(mut infos: &[u8]) -> Option<(u64, u64)> {
    while infos.len() >= 4 {
        let length = usize::from(u16::from_ne_bytes([infos[2], infos[3]]));
        if length < 4 || length > infos.len() {
            return None;
        }
        if infos[0] == INFO_TYPE_RANGE && length >= RANGE_BYTES {
            let offset = number_at::<8>(infos, 8).map(u64::from_ne_bytes)?;
            let count = number_at::<8>(infos, 16).map(u64::from_ne_bytes)?;
            return Some((offset, count));
        }
        infos = &infos[length..];
    }
    None
}

/// What [`Group::read_into`] found.
#[derive(Debug)]
pub enum Taken {
    /// An event, and the duty to answer it.
    Event(Event),
    /// The queue overflowed: events that nobody saw were lost to us. The kernel has answered them.
    Overflow,
    /// Nothing waits (nonblocking groups only).
    Nothing,
}

/// A notification group: the queue of events and the right to answer them.
///
/// Cloning shares the same descriptor; [`Group::descriptor`] is what is sent to another process.
#[derive(Debug, Clone)]
pub struct Group {
    fd: Arc<OwnedFd>,
}

impl Group {
    /// Makes a group for pre-content events with an unlimited queue and unlimited marks.
    ///
    /// Event descriptors are readable and writable and raise no events themselves. EINVAL means a
    /// kernel before 6.14 or without `CONFIG_FANOTIFY_ACCESS_PERMISSIONS`, EPERM a missing
    /// `CAP_SYS_ADMIN` in the initial user namespace.
    pub fn new() -> io::Result<Self> {
        let flags = libc::FAN_CLASS_PRE_CONTENT
            | libc::FAN_CLOEXEC
            | libc::FAN_UNLIMITED_QUEUE
            | libc::FAN_UNLIMITED_MARKS;
        let event_flags = (libc::O_RDWR | libc::O_LARGEFILE | libc::O_CLOEXEC) as u32;
        // SAFETY: fanotify_init takes two numbers and touches no memory of ours.
        let fd = unsafe { libc::fanotify_init(flags, event_flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us and nobody else knows it.
        Ok(Self::from_fd(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Takes over a group that another process made and sent.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd: Arc::new(fd) }
    }

    /// The descriptor, to be sent to another holder.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Makes reads of an empty queue return [`Taken::Nothing`] instead of waiting, or undoes it.
    ///
    /// The flag belongs to the open file, so all holders of the group share it.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        let mut flags = rustix::fs::fcntl_getfl(&*self.fd)?;
        flags.set(rustix::fs::OFlags::NONBLOCK, nonblocking);
        Ok(rustix::fs::fcntl_setfl(&*self.fd, flags)?)
    }

    /// Asks for events before reads of this file. Mark before the file is opened by whoever will read
    /// it: a file that was opened while nobody watched never raises an event.
    ///
    /// EOPNOTSUPP means a file system that cannot (tmpfs, overlayfs, FUSE).
    pub fn mark(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.change_mark(libc::FAN_MARK_ADD, file)
    }

    /// Stops events for this file. Events that wait already still need their answers.
    pub fn unmark(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.change_mark(libc::FAN_MARK_REMOVE, file)
    }

    fn change_mark(&self, action: u32, file: BorrowedFd<'_>) -> io::Result<()> {
        // SAFETY: a null path makes the descriptor itself the object; no memory of ours is touched.
        let result = unsafe {
            libc::fanotify_mark(
                self.fd.as_raw_fd(),
                action,
                FAN_PRE_ACCESS,
                file.as_raw_fd(),
                std::ptr::null(),
            )
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Waits until an event can be read; false when the time is over. `None` waits without end.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        crate::wait_readable(self.fd.as_fd(), timeout)
    }

    /// Takes one event straight into `slot`, whose raw bytes then name it for a successor.
    ///
    /// The slot must be at least [`EVENT_BYTES`] long; only that many bytes are used, so two events can
    /// never arrive in one read. An event that this crate does not know is answered with EIO here and
    /// reported as an error of kind `InvalidData`. When this process has no descriptor left (EMFILE) the
    /// kernel refuses the read that waited with EPERM: raise the limit before the first mark.
    // CRASH: the kernel writes the record before read(2) returns, so the event is in shared memory from
    // the moment at which it leaves the queue.
    pub fn read_into(&self, slot: Region<'_>) -> io::Result<Taken> {
        let slot = slot.sub(0, EVENT_BYTES)?;
        let length = match slot.read_from_fd(self.fd.as_fd()) {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Taken::Nothing),
            Err(error) => return Err(error),
        };
        let mut bytes = [0; EVENT_BYTES];
        slot.load(&mut bytes);
        match parse_record(bytes.get(..length).unwrap_or(&bytes))? {
            Record::Overflow => Ok(Taken::Overflow),
            Record::PreAccess(access) => {
                // SAFETY: the kernel opened this descriptor for this process in the read above, and
                // the record is the only place that named it.
                let file = unsafe { OwnedFd::from_raw_fd(access.number) };
                Ok(Taken::Event(Event {
                    group: self.clone(),
                    file: Some(file),
                    access,
                    token: None,
                }))
            }
            Record::Foreign { number } => {
                if let Some(number) = number {
                    self.respond_raw(number, Response::Deny(Denial::Io))?;
                    // SAFETY: as above; dropping it closes it, after the answer.
                    drop(unsafe { OwnedFd::from_raw_fd(number) });
                }
                Err(io::Error::new(io::ErrorKind::InvalidData, "fanotify event of another kind"))
            }
        }
    }

    /// Answers an event by its number alone; false when no event with that number waits (ENOENT).
    ///
    /// For a successor of the process that read the event. Before its own first read it must answer
    /// every number that can be outstanding: a new event could get the same number, and the kernel
    /// matches by nothing else.
    pub fn respond_raw(&self, number: RawFd, response: Response) -> io::Result<bool> {
        let mut message = [0; 8];
        message[..4].copy_from_slice(&number.to_ne_bytes());
        message[4..].copy_from_slice(&response.to_bits().to_ne_bytes());
        loop {
            match rustix::io::write(&*self.fd, &message) {
                Ok(_) => return Ok(true),
                Err(rustix::io::Errno::NOENT) => return Ok(false),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for Group {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// One event and the duty to answer it.
///
/// INVARIANT: answered exactly once, and its descriptor is closed only after the answer. Dropping it
/// answers EIO.
#[must_use = "dropping an event answers it with EIO"]
pub struct Event {
    group: Group,
    file: Option<OwnedFd>,
    access: PreAccess,
    token: Option<Box<dyn Send>>,
}

impl Event {
    /// The numbers of the event.
    pub fn access(&self) -> PreAccess {
        self.access
    }

    /// Where the range starts, in bytes.
    pub fn offset(&self) -> u64 {
        self.access.offset
    }

    /// Length of the range in bytes.
    pub fn count(&self) -> u64 {
        self.access.count
    }

    /// The file, readable and writable, through a descriptor that raises no events.
    pub fn file(&self) -> BorrowedFd<'_> {
        // INVARIANT: the file is taken out only by `answer`, which consumes the event or runs in drop.
        match &self.file {
            Some(file) => file.as_fd(),
            None => unreachable!("an answered event has no users"),
        }
    }

    /// Keeps `token` until the answer is given and drops it before the descriptor is closed: the
    /// place for what frees the event's slot in a journal.
    pub fn keep_until_answered(&mut self, token: impl Send + 'static) {
        self.token = Some(Box::new(token));
    }

    /// Lets the read go on. False when a successor has answered already.
    pub fn allow(mut self) -> io::Result<bool> {
        self.answer(Response::Allow)
    }

    /// Fails the read. False when a successor has answered already.
    pub fn deny(mut self, denial: Denial) -> io::Result<bool> {
        self.answer(Response::Deny(denial))
    }

    fn answer(&mut self, response: Response) -> io::Result<bool> {
        let Some(file) = self.file.take() else { return Ok(false) };
        match self.group.respond_raw(self.access.number, response) {
            Ok(known) => {
                // The order matters: the slot is free before the kernel can give the number to a new
                // event, so no two live slots ever hold the same number.
                drop(self.token.take());
                drop(file);
                Ok(known)
            }
            Err(error) => {
                // Without an answer the number must never be used again, or a later event with the
                // same number would release this reader. The descriptor and the slot stay taken.
                std::mem::forget(file);
                std::mem::forget(self.token.take());
                tracing::error!(number = self.access.number, %error, "fanotify answer failed");
                Err(error)
            }
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.file.is_some() {
            // The failure is in the log already; nothing else can be done in a drop.
            let _ = self.answer(Response::Deny(Denial::Io));
        }
    }
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Event").field("access", &self.access).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
