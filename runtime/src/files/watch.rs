//! Changes below a directory of a sandbox, as they happen.
//!
//! All watches of a node share one inotify instance, since the kernel allows a user few of them. Directories
//! are watched, each by its inode; a table says which watches of clients it belongs to. A client that does
//! not read, a queue of the kernel that overflows and a directory too many are told as `overflow`: the client
//! then looks again by itself.
//!
//! Locking: one mutex over the table, held for look-ups and while a new directory is opened. No descriptor of a
//! sandbox's file system is kept, so that nothing of it outlives the sandbox.

use super::{open, refuse_kernel_files, root_of};
use crate::sandbox::Sandbox;
use layer::{Context, Error, ErrorKind, Result};
use proto::v1::{FileEvent, FileEventKind as Kind, WatchFilesRequest};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use sys::file::{FileKind, Folder, OFlags};
use sys::inotify::{Event, Inotify};
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;

/// Events that wait for a client.
const QUEUE: usize = 1024;
/// Directories of one client.
const MAX_FOLDERS: usize = 4096;
/// Directories of all clients.
const MAX_ALL_FOLDERS: usize = 32 << 10;

/// The watches of a node.
#[derive(Debug, Default)]
pub struct Watches {
    shared: OnceLock<std::result::Result<Arc<Shared>, String>>,
}

#[derive(Debug)]
struct Shared {
    inotify: AsyncFd<Inotify>,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// Who watches a directory, and as which path below what it asked for.
    folders: HashMap<i32, Vec<(u64, Vec<u8>)>>,
    clients: HashMap<u64, Arc<Client>>,
    next: u64,
}

/// One client's watch.
#[derive(Debug)]
struct Client {
    sandbox: Arc<Sandbox>,
    path: PathBuf,
    is_recursive: bool,
    told: Told,
}

/// What a client is told.
#[derive(Debug)]
struct Told {
    events: mpsc::Sender<Result<FileEvent>>,
    /// Something could not be told.
    has_overflow: AtomicBool,
}

impl Client {
    fn tell(&self, kind: Kind, path: Vec<u8>, is_directory: bool, cookie: u32) {
        self.told.tell(kind, path, is_directory, cookie);
    }
}

impl Told {
    fn tell(&self, kind: Kind, path: Vec<u8>, is_directory: bool, cookie: u32) {
        let event = |kind: Kind, path| FileEvent { kind: kind.into(), path, is_directory, cookie };
        if self.has_overflow.load(Ordering::Relaxed) {
            // The client hears of what it missed before it hears of anything else.
            if self.events.try_send(Ok(event(Kind::FileEventOverflow, Vec::new()))).is_err() {
                return;
            }
            self.has_overflow.store(false, Ordering::Relaxed);
        }
        if self.events.try_send(Ok(event(kind, path))).is_err() {
            self.has_overflow.store(true, Ordering::Relaxed);
        }
    }
}

/// Ends a client's watch.
struct Ended(Arc<Shared>, u64);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.remove(self.1);
    }
}

impl Watches {
    fn shared(&self) -> Result<Arc<Shared>> {
        let made = self.shared.get_or_init(|| {
            let inotify = Inotify::new().and_then(crate::zygote::watch);
            let inotify = inotify.map_err(|error| error.to_string())?;
            let shared = Arc::new(Shared { inotify, table: Mutex::default() });
            tokio::spawn(read_events(Arc::clone(&shared)));
            Ok(shared)
        });
        let refused = |text: &String| {
            let text = format!("inotify: {text}; fs.inotify.max_user_instances bounds it");
            Error::new(ErrorKind::NoSpace, text)
        };
        made.clone().map_err(|text| refused(&text))
    }

    /// Watches a directory. The first event is `ready`.
    pub async fn watch(
        &self,
        sandbox: &Arc<Sandbox>,
        request: WatchFilesRequest,
    ) -> Result<mpsc::Receiver<Result<FileEvent>>> {
        let shared = self.shared()?;
        let (events, receiver) = mpsc::channel(QUEUE);
        let client = Arc::new(Client {
            sandbox: Arc::clone(sandbox),
            path: PathBuf::from(&request.path),
            is_recursive: request.recursive,
            told: Told { events: events.clone(), has_overflow: AtomicBool::new(false) },
        });
        let begin = {
            let (shared, client) = (Arc::clone(&shared), Arc::clone(&client));
            move || shared.begin(&client)
        };
        let panicked =
            |error| Error::new(ErrorKind::Internal, "watching panicked").with_source(error);
        let begun = tokio::task::spawn_blocking(begin).await.map_err(panicked)?;
        let number = begun.context(|| format!("watch {:?} in the sandbox", request.path))?;
        let ended = Ended(shared, number);
        let sandbox = Arc::clone(sandbox);
        tokio::spawn(async move {
            let _ended = (ended, sandbox.activity.begin());
            tokio::select! {
                () = sandbox.wait_over() => {
                    client.tell(Kind::FileEventGone, Vec::new(), true, 0);
                }
                () = events.closed() => {}
            }
        });
        Ok(receiver)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, client: &Arc<Client>) -> Result<u64> {
        let number = {
            let mut table = self.lock();
            table.next += 1;
            let number = table.next;
            table.clients.insert(number, Arc::clone(client));
            number
        };
        let added = self.add_folder(client, number, &[], &mut |_, _| {});
        if let Err(error) = added {
            self.remove(number);
            return Err(error);
        }
        client.tell(Kind::FileEventReady, Vec::new(), true, 0);
        Ok(number)
    }

    fn remove(&self, number: u64) {
        let mut table = self.lock();
        table.clients.remove(&number);
        table.folders.retain(|watch, owners| {
            owners.retain(|(owner, _)| *owner != number);
            if owners.is_empty() {
                self.inotify.get_ref().unwatch(*watch);
            }
            !owners.is_empty()
        });
    }

    /// Watches a directory and, if asked for, those below it. `found`: what was in there already.
    fn add_folder(
        &self,
        client: &Client,
        number: u64,
        below: &[u8],
        found: &mut dyn FnMut(&[u8], bool),
    ) -> Result<()> {
        let (root, _) = root_of(&client.sandbox)?;
        let mut waiting = vec![below.to_vec()];
        while let Some(path) = waiting.pop() {
            let whole = client.path.join(OsStr::from_bytes(&path));
            let folder = match open_folder(root.as_fd(), &whole) {
                // It went meanwhile, or is something else.
                Err(_) if path != below => continue,
                folder => folder?,
            };
            if !self.add(number, &folder, &path)? {
                client.tell(Kind::FileEventOverflow, path, true, 0);
                return Ok(());
            }
            // After it is watched, so that nothing made in between is missed.
            let listed = folder.visit(&mut |entry| {
                let path = join(&path, &entry.name);
                let is_folder = match entry.kind {
                    Some(kind) => kind == FileKind::Directory,
                    None => folder.stat(&entry.name)?.kind == FileKind::Directory,
                };
                found(&path, is_folder);
                if is_folder && client.is_recursive && waiting.len() < MAX_FOLDERS {
                    waiting.push(path);
                }
                Ok(())
            });
            listed.context(|| format!("list {}", whole.display()))?;
        }
        Ok(())
    }

    /// False: there are too many.
    fn add(&self, number: u64, folder: &Folder, path: &[u8]) -> Result<bool> {
        let mut table = self.lock();
        let of_client = |owners: &&Vec<(u64, Vec<u8>)>| owners.iter().any(|(o, _)| *o == number);
        if table.folders.len() >= MAX_ALL_FOLDERS
            || table.folders.values().filter(of_client).take(MAX_FOLDERS).count() >= MAX_FOLDERS
        {
            return Ok(false);
        }
        const ENOSPC: i32 = 28;
        match self.inotify.get_ref().watch(folder.as_fd()) {
            Ok(watch) => {
                let owners = table.folders.entry(watch).or_default();
                // A directory that was moved has another path by now.
                owners.retain(|(owner, _)| *owner != number);
                owners.push((number, path.to_vec()));
                Ok(true)
            }
            Err(error) if error.raw_os_error() == Some(ENOSPC) => Ok(false),
            Err(error) => Err(Error::io("watch", error)),
        }
    }

    fn handle(&self, event: &Event) {
        if event.what.overflow {
            let clients: Vec<_> = self.lock().clients.values().cloned().collect();
            for client in clients {
                client.tell(Kind::FileEventOverflow, Vec::new(), true, 0);
            }
            return;
        }
        let owners: Vec<(u64, Arc<Client>, Vec<u8>)> = {
            let mut table = self.lock();
            let owners = match event.what.is_ended {
                true => table.folders.remove(&event.watch).unwrap_or_default(),
                false => table.folders.get(&event.watch).cloned().unwrap_or_default(),
            };
            let known = |(number, path): (u64, Vec<u8>)| {
                table.clients.get(&number).map(|client| (number, Arc::clone(client), path))
            };
            owners.into_iter().filter_map(known).collect()
        };
        for (number, client, path) in owners {
            if event.what.is_ended || event.what.is_self_gone {
                if path.is_empty() {
                    client.tell(Kind::FileEventGone, Vec::new(), true, 0);
                    self.remove(number);
                }
                continue;
            }
            self.tell(number, &client, &join(&path, &event.name), event);
        }
    }

    fn tell(&self, number: u64, client: &Client, path: &[u8], event: &Event) {
        let what = &event.what;
        let kinds = [
            (what.created, Kind::FileEventCreated),
            (what.moved_from, Kind::FileEventMovedFrom),
            (what.moved_to, Kind::FileEventMovedTo),
            (what.written, Kind::FileEventWritten),
            (what.attributes, Kind::FileEventAttributes),
            (what.removed, Kind::FileEventRemoved),
        ];
        for (_, kind) in kinds.into_iter().filter(|(is_it, _)| *is_it) {
            client.tell(kind, path.to_vec(), what.is_folder, event.cookie);
        }
        if what.is_folder && client.is_recursive && (what.created || what.moved_to) {
            let mut found = |path: &[u8], is_folder: bool| {
                client.tell(Kind::FileEventCreated, path.to_vec(), is_folder, 0);
            };
            // One that went meanwhile says so by its own event.
            if let Err(error) = self.add_folder(client, number, path, &mut found) {
                tracing::debug!(error = %error.chain(), "a new directory is not watched");
            }
        }
    }
}

fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    match (path.is_empty(), name.is_empty()) {
        (true, _) => name.to_vec(),
        (false, true) => path.to_vec(),
        (false, false) => [path, b"/", name].concat(),
    }
}

fn open_folder(root: BorrowedFd<'_>, path: &Path) -> Result<Folder> {
    let folder = open(root, path, OFlags::RDONLY | OFlags::DIRECTORY)?;
    refuse_kernel_files(folder.as_fd())?;
    Folder::from_fd(folder).context(|| "open".into())
}

async fn read_events(shared: Arc<Shared>) {
    loop {
        let Ok(mut guard) = shared.inotify.readable().await else { return };
        let read = guard.try_io(|inotify| match inotify.get_ref().read() {
            Ok(events) if events.is_empty() => Err(io::ErrorKind::WouldBlock.into()),
            events => events,
        });
        let events = match read {
            Ok(Ok(events)) => events,
            Ok(Err(error)) => {
                tracing::error!(%error, "changes of files cannot be read");
                return;
            }
            Err(_would_block) => continue,
        };
        // New directories are opened on the way, and a cold one may take its time.
        let handler = Arc::clone(&shared);
        let handled = tokio::task::spawn_blocking(move || {
            for event in &events {
                handler.handle(event);
            }
        });
        if let Err(error) = handled.await {
            tracing::error!(%error, "telling of changed files panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_that_does_not_read_is_told_what_it_missed_first() {
        let (events, mut receiver) = mpsc::channel(2);
        let told = Told { events, has_overflow: AtomicBool::new(false) };
        for number in 0..5 {
            told.tell(Kind::FileEventCreated, vec![b'0' + number], false, 0);
        }
        let mut next = async || {
            let event = receiver.recv().await.unwrap().unwrap();
            (event.kind(), event.path)
        };
        assert_eq!(next().await, (Kind::FileEventCreated, b"0".to_vec()));
        assert_eq!(next().await, (Kind::FileEventCreated, b"1".to_vec()));
        told.tell(Kind::FileEventCreated, b"5".to_vec(), false, 0);
        assert_eq!(next().await, (Kind::FileEventOverflow, Vec::new()));
        assert_eq!(next().await, (Kind::FileEventCreated, b"5".to_vec()));
    }
}
