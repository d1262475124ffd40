//! What is kept of a snapshot: one file each, `records/<number>.json`.
//!
//! The file is named by a number that no two living snapshots share, so that no name ever becomes a path,
//! and a snapshot changes its name by the one rename that replaces its file.
//!
//! CRASH: a file is written beside its place, flushed and renamed, and the folder is flushed; whoever dies in
//! between leaves a `.new` file, which the next start removes.

use crate::labels::Labels;
use layer::{Context, EnvId, Error, ErrorKind, LayerId, Result};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// What a snapshot is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// To be looked at.
    View,
    /// To be written.
    Active,
    /// Finished; others stand on it.
    Committed,
}

impl Kind {
    /// The word that containerd's filters use.
    pub fn word(self) -> &'static str {
        match self {
            Self::View => "view",
            Self::Active => "active",
            Self::Committed => "committed",
        }
    }
}

/// What a snapshot occupies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// On disk.
    pub bytes: u64,
    /// Files, directories and so on; each hard-linked one once.
    pub inodes: u64,
}

/// The layer that a snapshot shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shown {
    /// The layer.
    pub layer: LayerId,
    /// What it belongs to; says what will be read of it.
    pub environment: Option<EnvId>,
}

/// One snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Its number.
    pub id: u64,
    /// Its name; containerd says key as long as it is not committed.
    pub name: String,
    /// The name of what it stands on; empty at the bottom.
    pub parent: String,
    /// What it is for.
    pub kind: Kind,
    /// Nanoseconds since the epoch.
    pub created_ns: u64,
    /// The same.
    pub updated_ns: u64,
    /// What containerd notes about it.
    pub labels: Labels,
    /// The layer that it shows. `None` for a directory of its own.
    pub shown: Option<Shown>,
    /// Of a committed directory.
    pub usage: Option<Usage>,
}

/// The folder of records.
#[derive(Debug)]
pub struct Records {
    folder: PathBuf,
}

impl Records {
    /// Uses this folder, made when it is absent; what an interrupted write left goes.
    pub fn open(folder: PathBuf) -> Result<Self> {
        fs::create_dir_all(&folder).context(|| format!("create {}", folder.display()))?;
        Ok(Self { folder })
    }

    fn path(&self, id: u64) -> PathBuf {
        self.folder.join(format!("{id}.json"))
    }

    /// All of them. A record that cannot be read is an error: what it names could not be given back.
    pub fn read_all(&self) -> Result<Vec<Snapshot>> {
        let name = || format!("list {}", self.folder.display());
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.folder).context(name)? {
            let path = entry.context(name)?.path();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("json") => found.push(read(&path)?),
                Some("new") => fs::remove_file(&path).context(name)?,
                _ => {}
            }
        }
        Ok(found)
    }

    /// Writes one, or writes it again; durable when this returns.
    pub fn write(&self, snapshot: &Snapshot) -> Result<()> {
        let path = self.path(snapshot.id);
        let name = || format!("write {}", path.display());
        let text = serde_json::to_vec(snapshot)
            .map_err(|error| Error::new(ErrorKind::Internal, name()).with_source(error))?;
        let temporary = path.with_extension("new");
        let mut file = File::create(&temporary).context(name)?;
        file.write_all(&text).and_then(|()| file.sync_all()).context(name)?;
        fs::rename(&temporary, &path).context(name)?;
        self.sync()
    }

    /// Removes one; gone for good when this returns.
    pub fn remove(&self, id: u64) -> Result<()> {
        let path = self.path(id);
        fs::remove_file(&path).context(|| format!("remove {}", path.display()))?;
        self.sync()
    }

    fn sync(&self) -> Result<()> {
        let synced = File::open(&self.folder).and_then(|folder| folder.sync_all());
        synced.context(|| format!("flush {}", self.folder.display()))
    }
}

fn read(path: &Path) -> Result<Snapshot> {
    let name = || format!("read {}", path.display());
    let bytes = fs::read(path).context(name)?;
    serde_json::from_slice(&bytes).map_err(|error| Error::corrupt(name()).with_source(error))
}
