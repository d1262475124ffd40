//! What the zygotes of earlier runtimes left: how their children ended, and the pipes and terminals that
//! those that still live hold.
//!
//! Each zygote has one file in a folder ([`proto::exits`]). The file of a dead one is read once and removed;
//! that of a living one stays, since it goes on writing. Locking: a mutex over the held descriptors.

use layer::{Context, Result};
use proto::exits::{FILE_BYTES, Header, RECORD_BYTES};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use sys::process::{Exit, Pid};

/// Tells a pipe or a terminal from all others that live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StreamId {
    major: u32,
    minor: u32,
    inode: u64,
    /// Of a terminal, whose inode all terminals of one sandbox share.
    terminal: Option<u32>,
}

impl StreamId {
    /// Of an open pipe or the outer end of a terminal.
    pub fn of(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let stat = sys::file::stat_fd(fd)?;
        let terminal = match stat.kind {
            sys::file::FileKind::CharDevice => Some(sys::pty::index(fd)?),
            _ => None,
        };
        let (major, minor) = (stat.device.major, stat.device.minor);
        Ok(Self { major, minor, inode: stat.inode, terminal })
    }

    /// Whether it is a terminal.
    pub fn is_terminal(&self) -> bool {
        self.terminal.is_some()
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Former {
    ended: HashMap<u64, Exit>,
    living: Vec<File>,
    held: Mutex<HashMap<StreamId, OwnedFd>>,
}

impl Former {
    /// Reads what there is in the folder, and makes the folder.
    pub fn open(folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder).context(|| format!("make {}", folder.display()))?;
        let mut former = Self::default();
        let mut held = HashMap::new();
        for entry in std::fs::read_dir(folder).context(|| format!("list {}", folder.display()))? {
            let path = entry.context(|| format!("list {}", folder.display()))?.path();
            let Ok(file) = File::open(&path) else { continue };
            match zygote_of(&file) {
                Some((pid, pidfd)) => {
                    // This process may have started it, as another program.
                    super::reap_late(pid)?;
                    take_descriptors(pid, pidfd.as_fd(), &mut held);
                    former.ended.extend(read(&file));
                    former.living.push(file);
                }
                None => {
                    former.ended.extend(read(&file));
                    let _next_start_tries_again = std::fs::remove_file(&path);
                }
            }
        }
        former.held = Mutex::new(held);
        Ok(former)
    }

    /// How a process ended, by the kernel's number for it.
    pub fn exit_of(&self, number: u64) -> Option<Exit> {
        let known = self.ended.get(&number).copied();
        known.or_else(|| {
            self.living
                .iter()
                .find_map(|file| read(file).find(|(known, _)| *known == number))
                .map(|(_, exit)| exit)
        })
    }

    /// A stream that a former zygote holds. Once.
    pub fn take(&self, stream: &StreamId) -> Option<OwnedFd> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).remove(stream)
    }

    /// Lets go of streams that nobody asked for.
    pub fn drop_held(&self) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// The zygote that writes into this file, if it lives.
fn zygote_of(file: &File) -> Option<(Pid, OwnedFd)> {
    let mut bytes = [0; RECORD_BYTES];
    file.read_exact_at(&mut bytes, 0).ok()?;
    let header = Header::decode(&bytes)?;
    let pidfd = sys::process::pidfd_open(header.pid).ok()?;
    let is_same = sys::process::pidfd_number(pidfd.as_fd()).ok()? == header.number;
    let has_ended = sys::wait_readable(pidfd.as_fd(), Some(Duration::ZERO)).unwrap_or(true);
    (is_same && !has_ended).then_some((header.pid, pidfd))
}

/// The notes of a file, in no order.
fn read(file: &File) -> impl Iterator<Item = (u64, Exit)> {
    let mut bytes = vec![0; FILE_BYTES as usize];
    let read = file.read_at(&mut bytes, 0).unwrap_or(0);
    bytes.truncate(read);
    let records = bytes.chunks_exact(RECORD_BYTES).skip(1);
    let notes: Vec<(u64, Exit)> = records
        .filter_map(proto::exits::Exit::decode)
        .map(|note| {
            let exit =
                if note.is_signal { Exit::Signal(note.value) } else { Exit::Code(note.value) };
            (note.number, exit)
        })
        .collect();
    notes.into_iter()
}

/// Copies of every pipe and terminal that the zygote holds.
fn take_descriptors(pid: Pid, pidfd: BorrowedFd<'_>, held: &mut HashMap<StreamId, OwnedFd>) {
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
        let number = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        let target = target.as_os_str().as_encoded_bytes();
        if !target.starts_with(b"pipe:") && !target.ends_with(b"ptmx") {
            continue;
        }
        let copy = number.and_then(|number| sys::process::descriptor_of(pidfd, number).ok());
        let Some(copy) = copy else { continue };
        if let Ok(stream) = StreamId::of(copy.as_fd()) {
            held.insert(stream, copy);
        }
    }
}

/// The file for a new zygote.
#[derive(Debug)]
pub struct Notes {
    /// Open for both directions.
    pub file: File,
    path: PathBuf,
}

impl Notes {
    /// Makes it, with room for all that it may ever hold.
    pub fn create(folder: &Path) -> Result<Self> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| {
            layer::Error::new(layer::ErrorKind::Internal, format!("random numbers: {error}"))
        })?;
        let path = folder.join(format!("{:016x}", u64::from_le_bytes(random)));
        let context = || format!("make {}", path.display());
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.context(context)?;
        sys::file::space::allocate(file.as_fd(), 0, FILE_BYTES)
            .or_else(|_| file.set_len(FILE_BYTES))
            .context(context)?;
        Ok(Self { file, path })
    }

    /// Says whose it is.
    pub fn name(&self, pid: Pid) -> Result<()> {
        let number = sys::process::pidfd_open(pid)
            .and_then(|pidfd| sys::process::pidfd_number(pidfd.as_fd()))
            .context(|| "look at the zygote".into())?;
        let header = Header { pid, number }.encode();
        self.file.write_all_at(&header, 0).context(|| format!("write {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_notes_of_a_dead_zygote_are_read_once_and_those_of_a_living_one_again() {
        let folder = tempfile::tempdir().unwrap();
        let note = |number, value| proto::exits::Exit { number, value, is_signal: false };
        let living = Notes::create(folder.path()).unwrap();
        living.name(std::process::id() as Pid).unwrap();
        living.file.write_all_at(&note(1, 7).encode(), proto::exits::Exit::offset(0)).unwrap();
        let dead = Notes::create(folder.path()).unwrap();
        dead.file.write_all_at(&Header { pid: 1, number: 0 }.encode(), 0).unwrap();
        dead.file.write_all_at(&note(2, 8).encode(), proto::exits::Exit::offset(0)).unwrap();
        let former = Former::open(folder.path()).unwrap();
        assert_eq!(former.exit_of(1), Some(Exit::Code(7)));
        assert_eq!(former.exit_of(2), Some(Exit::Code(8)));
        assert_eq!(former.exit_of(3), None);
        living.file.write_all_at(&note(3, 9).encode(), proto::exits::Exit::offset(1)).unwrap();
        assert_eq!(former.exit_of(3), Some(Exit::Code(9)));
        assert!(living.path.exists() && !dead.path.exists());
    }

    #[tokio::test]
    async fn a_stream_is_found_again_by_what_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let notes = Notes::create(folder.path()).unwrap();
        notes.name(std::process::id() as Pid).unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        let stream = StreamId::of(writer.as_fd()).unwrap();
        assert_eq!(StreamId::of(reader.as_fd()).unwrap(), stream);
        let former = Former::open(folder.path()).unwrap();
        let found = former.take(&stream).unwrap();
        assert_eq!(StreamId::of(found.as_fd()).unwrap(), stream);
        assert!(former.take(&stream).is_none());
    }
}
