//! The directories of snapshots, and short names for what mounts are made of.
//!
//! ```text
//! snapshots/<number>/fs      what was written
//! snapshots/<number>/work    overlayfs's own
//! l/<number>                 link to the directory that shows the snapshot: `fs`, or where a layer is mounted
//! ```
//! Mounts name the links: overlayfs takes at most a page of options, so a stack of a hundred layers has to have
//! short names, and none of them may hold what separates options.
//!
//! CRASH: a directory is made before its record and removed after it; the next start removes what has none.

use crate::record::Usage;
use layer::{Context, Error, ErrorKind, Result};
use std::collections::HashSet;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// The folders below a root.
#[derive(Debug, Clone)]
pub struct Folders {
    snapshots: PathBuf,
    links: PathBuf,
}

fn private(path: &Path) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.context(|| format!("create {}", path.display()))
}

impl Folders {
    /// Makes what is absent. `root` is absolute; a path that options cannot hold is refused.
    pub fn open(root: &Path) -> Result<Self> {
        let text = root.to_str().filter(|text| !text.contains([':', ',', '\\', '"', '\n']));
        if text.is_none() || !root.is_absolute() {
            let text = format!(
                "{root:?} cannot be the directory of snapshots: it has to be an absolute path without \
                 colons, commas, quotes and backslashes, because mount options name it"
            );
            return Err(Error::invalid(text));
        }
        let folders = Self { snapshots: root.join("snapshots"), links: root.join("l") };
        private(&folders.snapshots)?;
        private(&folders.links)?;
        Ok(folders)
    }

    fn of(&self, id: u64) -> PathBuf {
        self.snapshots.join(id.to_string())
    }

    /// What was written in a snapshot.
    pub fn upper(&self, id: u64) -> PathBuf {
        self.of(id).join("fs")
    }

    /// What overlayfs needs beside it.
    pub fn work(&self, id: u64) -> PathBuf {
        self.of(id).join("work")
    }

    /// The short name.
    pub fn link(&self, id: u64) -> PathBuf {
        self.links.join(id.to_string())
    }

    /// Makes the directory of a snapshot, which shows itself. It is its root, so it gets owner and mode of the
    /// root below it.
    pub fn make(&self, id: u64, below: Option<u64>) -> Result<()> {
        let upper = self.upper(id);
        let name = || format!("create {}", upper.display());
        private(&self.of(id))?;
        fs::create_dir(&upper).context(name)?;
        fs::create_dir(self.work(id)).context(name)?;
        let mut permissions = fs::Permissions::from_mode(0o755);
        if let Some(below) = below {
            let root = fs::metadata(self.link(below)).context(name)?;
            std::os::unix::fs::chown(&upper, Some(root.uid()), Some(root.gid())).context(name)?;
            permissions = root.permissions();
        }
        fs::set_permissions(&upper, permissions).context(name)?;
        self.point(id, &upper)
    }

    /// Has the short name of a snapshot lead somewhere.
    pub fn point(&self, id: u64, to: &Path) -> Result<()> {
        let link = self.link(id);
        if fs::read_link(&link).is_ok_and(|found| found == to) {
            return Ok(());
        }
        let name = || format!("create {}", link.display());
        let temporary = link.with_extension("new");
        absent(fs::remove_file(&temporary)).context(name)?;
        symlink(to, &temporary).context(name)?;
        fs::rename(&temporary, &link).context(name)
    }

    /// Removes everything of a snapshot.
    pub fn remove(&self, id: u64) -> Result<()> {
        let name = || format!("remove {}", self.of(id).display());
        absent(fs::remove_file(self.link(id))).context(name)?;
        absent(fs::remove_dir_all(self.of(id))).context(name)
    }

    /// Removes what belongs to none of these. The first failure is told when all else is removed.
    pub fn remove_others(&self, known: &HashSet<u64>) -> Result<()> {
        let mut first = Ok(());
        for folder in [&self.snapshots, &self.links] {
            let name = || format!("list {}", folder.display());
            for entry in fs::read_dir(folder).context(name)? {
                let file_name = entry.context(name)?.file_name();
                let id = file_name.to_str().and_then(|text| text.parse::<u64>().ok());
                if id.is_some_and(|id| known.contains(&id)) {
                    continue;
                }
                let path = folder.join(&file_name);
                let removed = match id {
                    Some(id) => self.remove(id),
                    None => absent(fs::remove_file(&path))
                        .context(|| format!("remove {}", path.display())),
                };
                first = first.and(removed);
            }
        }
        first
    }

    /// The highest number that is in use here.
    pub fn highest(&self) -> Result<u64> {
        let name = || format!("list {}", self.snapshots.display());
        let mut highest = 0;
        for entry in fs::read_dir(&self.snapshots).context(name)? {
            let file_name = entry.context(name)?.file_name();
            let id = file_name.to_str().and_then(|text| text.parse().ok());
            highest = highest.max(id.unwrap_or(0));
        }
        Ok(highest)
    }
}

fn absent(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// What a tree occupies. What vanishes meanwhile is not counted.
pub fn usage(root: &Path) -> Result<Usage> {
    let mut usage = Usage::default();
    let mut seen = HashSet::new();
    let mut rest = vec![root.to_owned()];
    while let Some(path) = rest.pop() {
        let metadata = match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other.context(|| format!("look at {}", path.display()))?,
        };
        let is_folder = metadata.is_dir();
        if !is_folder && metadata.nlink() > 1 && !seen.insert((metadata.dev(), metadata.ino())) {
            continue;
        }
        usage.bytes += metadata.blocks() * 512;
        usage.inodes += 1;
        if is_folder {
            match fs::read_dir(&path) {
                Ok(entries) => rest.extend(entries.flatten().map(|entry| entry.path())),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(Error::io(format!("list {}", path.display()), error)),
            }
        }
    }
    Ok(usage)
}

/// Holds a root for this process alone.
pub fn lock(root: &Path) -> Result<fs::File> {
    private(root)?;
    let path = root.join("lock");
    let name = || format!("lock {}", path.display());
    let file = fs::File::options().create(true).append(true).open(&path).context(name)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => {
            let text = format!("another process has the snapshots in {}", root.display());
            Err(Error::new(ErrorKind::Busy, text))
        }
        Err(fs::TryLockError::Error(error)) => Err(Error::io(name(), error)),
    }
}
