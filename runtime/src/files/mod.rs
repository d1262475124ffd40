//! Files of a sandbox from outside: in and out, listed, changed, watched; streamed with bounded memory.
//!
//! Every path is resolved by the kernel with the sandbox's root as the root, whatever symlinks say, and
//! magic links of /proc are refused. What is opened is looked at before it is read or cut: only regular
//! files and directories count, and never those of /proc or /sys, which would be read and written with
//! our rights. Runs on blocking threads, since a cold page may take its time; how many at once is bounded, and
//! a client that takes or gives nothing for a long while gives up its own.

mod archive;
mod change;
mod list;
mod read;
mod unpack;
mod watch;
mod write;

pub use change::{make_directory, remove, rename, set_attributes, stat};
pub use list::list;
pub use read::read;
pub use watch::Watches;
pub use write::{END, write};

use crate::ids::Ids;
use crate::sandbox::Sandbox;
use layer::{Context, Error, ErrorKind, Result};
use proto::v1::{self, file_chunk::Part};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;
use sys::file::space::FileSystemKind;
use sys::file::{FileKind, OFlags, Stat};
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};

/// Bytes in one message.
const PART_BYTES: usize = 256 << 10;
/// Messages that wait.
const QUEUE: usize = 4;
/// Transfers and listings at once; others wait for their turn.
const MAX_TRANSFERS: usize = 128;
/// Small calls at once.
const MAX_CALLS: usize = 64;
/// How long a client may take or give nothing.
const PATIENCE: Duration = Duration::from_secs(300);

const PROC_MAGIC: u64 = 0x9fa0;
const SYSFS_MAGIC: u64 = 0x6265_6572;

static TRANSFERS: Semaphore = Semaphore::const_new(MAX_TRANSFERS);
/// Small calls do not wait for transfers.
static CALLS: Semaphore = Semaphore::const_new(MAX_CALLS);

/// Answers of a stream.
type Answers<T> = mpsc::Sender<Result<T>>;
type Parts = Answers<v1::FileChunk>;

/// Its root, and whose the files in there are.
fn root_of(sandbox: &Sandbox) -> Result<(OwnedFd, Ids)> {
    let ended = || Error::not_found(format!("sandbox {} has ended", sandbox.id()));
    let instance = sandbox.instance().ok_or_else(ended)?;
    Ok((instance.root()?, instance.ids()))
}

async fn turn(turns: &'static Semaphore) -> Result<SemaphorePermit<'static>> {
    turns.acquire().await.map_err(|error| {
        Error::new(ErrorKind::Unavailable, "the node is closing").with_source(error)
    })
}

/// Something with files of a sandbox, on a thread that may block, when it is its turn.
async fn in_root<T: Send + 'static>(
    turns: &'static Semaphore,
    sandbox: &Sandbox,
    what: String,
    work: impl FnOnce(BorrowedFd<'_>, Ids) -> Result<T> + Send + 'static,
) -> Result<T> {
    let _use = sandbox.activity.begin();
    let _turn = turn(turns).await?;
    let (root, ids) = root_of(sandbox)?;
    let done = tokio::task::spawn_blocking(move || {
        let _as_its_root = ids.assume()?;
        work(root.as_fd(), ids)
    });
    let panicked =
        |error| Error::new(ErrorKind::Internal, "work on files panicked").with_source(error);
    done.await.map_err(panicked)?.context(|| what)
}

/// A stream of answers that is made on a thread that may block.
async fn stream<T: Send + 'static>(
    sandbox: &Sandbox,
    what: String,
    work: impl FnOnce(BorrowedFd<'_>, Ids, &Answers<T>) -> Result<()> + Send + 'static,
) -> Result<mpsc::Receiver<Result<T>>> {
    let in_use = sandbox.activity.begin();
    let turn = turn(&TRANSFERS).await?;
    let (root, ids) = root_of(sandbox)?;
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::task::spawn_blocking(move || {
        let (_turn, _use) = (turn, in_use);
        if let Err(error) = work(root.as_fd(), ids, &sender) {
            // A client that sleeps must not take half an answer for a whole one when it wakes.
            tokio::runtime::Handle::current().spawn(async move {
                let _left = sender.send(Err(error.context(what))).await;
            });
        }
    });
    Ok(receiver)
}

/// Sends one answer; waits for the client, but not for ever.
fn send<T: Send>(answers: &Answers<T>, answer: T) -> Result<()> {
    let answer = match answers.try_send(Ok(answer)) {
        Ok(()) => return Ok(()),
        Err(mpsc::error::TrySendError::Full(answer)) => answer,
        Err(mpsc::error::TrySendError::Closed(_)) => return Err(left()),
    };
    let wait = tokio::time::timeout(PATIENCE, answers.send(answer));
    match tokio::runtime::Handle::current().block_on(wait) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err(left()),
        Err(_) => Err(Error::new(ErrorKind::Timeout, "the client has taken nothing for minutes")),
    }
}

fn left() -> Error {
    Error::new(ErrorKind::Unavailable, "the client has left")
}

/// Opens a path that resolves in the sandbox's root.
pub fn open(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> Result<OwnedFd> {
    sys::file::open_in_root(root, path, flags | OFlags::CLOEXEC, 0)
        .context(|| format!("open {}", path.display()))
}

/// Opens for real what was only looked at, and nothing that took its place.
pub fn reopen(place: &OwnedFd, flags: OFlags) -> Result<OwnedFd> {
    use std::os::unix::fs::OpenOptionsExt;
    let extra = flags | OFlags::NONBLOCK | OFlags::NOCTTY;
    let is_writing = flags.contains(OFlags::WRONLY);
    std::fs::OpenOptions::new()
        .read(!is_writing)
        .write(is_writing)
        .custom_flags((extra - OFlags::WRONLY).bits() as i32)
        .open(format!("/proc/self/fd/{}", place.as_raw_fd()))
        .map(OwnedFd::from)
        .context(|| "open".into())
}

fn is_kernel_file(place: BorrowedFd<'_>) -> Result<bool> {
    let system = sys::file::space::file_system(place);
    let kind = system.context(|| "look at the file system".into())?.kind;
    Ok(matches!(kind, FileSystemKind::Other(PROC_MAGIC | SYSFS_MAGIC)))
}

/// Denied for what lies in /proc or /sys.
pub fn refuse_kernel_files(place: BorrowedFd<'_>) -> Result<()> {
    if is_kernel_file(place)? {
        return Err(Error::new(ErrorKind::Denied, "files of the kernel are not transferred"));
    }
    Ok(())
}

/// Folder and name; the path may be absolute.
fn split(path: &Path) -> Result<(&Path, &[u8])> {
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => Ok((parent, name.as_bytes())),
        _ => Err(Error::invalid("the path names no file")),
    }
}

/// The folder of a name, open, and the name.
fn folder_of<'a>(root: BorrowedFd<'_>, path: &'a Path) -> Result<(OwnedFd, &'a [u8])> {
    let (parent, name) = split(path)?;
    let folder = open(root, parent, OFlags::RDONLY | OFlags::DIRECTORY)?;
    refuse_kernel_files(folder.as_fd())?;
    Ok((folder, name))
}

/// Opens a folder, making what is missing of its path.
pub fn make_folders(root: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let mut made = PathBuf::from("/");
    let mut folder = open(root, &made, flags)?;
    for component in path.components() {
        match component {
            Component::Normal(name) => made.push(name),
            Component::ParentDir => made.push(".."),
            _ => continue,
        }
        folder = match sys::file::open_in_root(root, &made, flags | OFlags::CLOEXEC, 0) {
            Ok(next) => next,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                refuse_kernel_files(folder.as_fd())?;
                let name = made.file_name().unwrap_or_default().as_bytes();
                match sys::file::make_folder_at(folder.as_fd(), name, 0o755) {
                    // Somebody else was quicker.
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    made_now => made_now.context(|| format!("make {}", made.display()))?,
                }
                open(root, &made, flags)?
            }
            Err(error) => return Err(Error::io(format!("open {}", made.display()), error)),
        };
    }
    Ok(folder)
}

/// What is known of a file, as a message.
fn entry(path: Vec<u8>, stat: &Stat, target: Vec<u8>, ids: Ids) -> v1::FileEntry {
    let kind = match stat.kind {
        FileKind::Regular => v1::FileKind::Regular,
        FileKind::Directory => v1::FileKind::Directory,
        FileKind::Symlink => v1::FileKind::Symlink,
        FileKind::CharDevice => v1::FileKind::CharDevice,
        FileKind::BlockDevice => v1::FileKind::BlockDevice,
        FileKind::Fifo => v1::FileKind::Fifo,
        FileKind::Socket => v1::FileKind::Socket,
    };
    v1::FileEntry {
        path,
        kind: kind.into(),
        mode: stat.mode,
        uid: ids.inner(stat.uid),
        gid: ids.inner(stat.gid),
        size_bytes: stat.size,
        mtime_unix_s: stat.mtime.secs,
        mtime_nanos: stat.mtime.nanos,
        target,
        links: stat.links,
    }
}
