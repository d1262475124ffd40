//! The snapshots: a forest in memory, and on disk a record of each.
//!
//! The rules are those of containerd's own snapshotters: names are unique whatever their kind, one stands on
//! committed ones only, what others stand on is not removed, labels are replaced by a commit.
//!
//! Locking: the caller's; everything here blocks. CRASH: a directory exists before its record and after it, the
//! record decides.

use crate::folders::{self, Folders};
use crate::labels::{self, Labels, TARGET};
use crate::record::{Kind, Records, Shown, Snapshot, Usage};
use layer::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// The longest name of a snapshot.
const MAX_NAME_BYTES: usize = 4096;

/// What is to become a snapshot.
#[derive(Debug)]
pub struct Wanted {
    /// Its name.
    pub name: String,
    /// What it stands on; empty for nothing.
    pub parent: String,
    /// What it is for.
    pub kind: Kind,
    /// What is noted about it.
    pub labels: Labels,
    /// The layer that it shows, mounted already.
    pub shown: Option<Shown>,
}

/// All snapshots of one root.
#[derive(Debug)]
pub struct State {
    folders: Folders,
    records: Records,
    by_name: BTreeMap<String, Snapshot>,
    last_id: u64,
}

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn check_name(what: &str, name: &str) -> Result<()> {
    match name.len() {
        0 => Err(Error::invalid(format!("a {what} without a name"))),
        1..=MAX_NAME_BYTES => Ok(()),
        length => Err(Error::invalid(format!("a {what} with a name of {length} bytes"))),
    }
}

fn exists(name: &str) -> Error {
    Error::new(ErrorKind::Exists, format!("snapshot {name:?} exists"))
}

impl State {
    /// Reads what there is, and removes what a crash left.
    pub fn open(root: &Path) -> Result<Self> {
        let folders = Folders::open(root)?;
        let records = Records::open(root.join("records"))?;
        let mut by_name = BTreeMap::new();
        let mut last_id = folders.highest()?;
        for snapshot in records.read_all()? {
            last_id = last_id.max(snapshot.id);
            if let Some(other) = by_name.insert(snapshot.name.clone(), snapshot) {
                return Err(Error::corrupt(format!("two records of snapshot {:?}", other.name)));
            }
        }
        let state = Self { folders, records, by_name, last_id };
        state.remove_leftovers()?;
        Ok(state)
    }

    /// Where things lie.
    pub fn folders(&self) -> &Folders {
        &self.folders
    }

    /// All, by name.
    pub fn all(&self) -> impl Iterator<Item = &Snapshot> {
        self.by_name.values()
    }

    /// The one of this name.
    pub fn get(&self, name: &str) -> Result<&Snapshot> {
        let found = self.by_name.get(name);
        found.ok_or_else(|| Error::not_found(format!("snapshot {name:?}")))
    }

    /// What a snapshot stands on, the nearest first.
    pub fn below(&self, snapshot: &Snapshot) -> Result<Vec<Snapshot>> {
        self.line(&snapshot.parent)
    }

    /// A snapshot and what it stands on; nothing for the empty name.
    pub fn line(&self, name: &str) -> Result<Vec<Snapshot>> {
        let mut found = Vec::new();
        let mut name = name;
        while !name.is_empty() {
            // Each one was made on one that was there, so this comes to an end, unless a record was forged.
            if found.len() > self.by_name.len() {
                return Err(Error::corrupt(format!("snapshot {name:?} stands on itself")));
            }
            let next = self.get(name)?;
            found.push(next.clone());
            name = &next.parent;
        }
        Ok(found)
    }

    /// A number for what is to come.
    pub fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Whether `parent` can be stood on.
    pub fn check_parent(&self, parent: &str) -> Result<Option<&Snapshot>> {
        if parent.is_empty() {
            return Ok(None);
        }
        let found = self.get(parent).map_err(|error| error.context("parent"))?;
        if found.kind != Kind::Committed {
            return Err(Error::invalid(format!("parent {parent:?} is not committed")));
        }
        Ok(Some(found))
    }

    /// The committed snapshots that were prepared for a ChainID.
    pub fn targets<'a>(&'a self, chain: &'a str) -> impl Iterator<Item = &'a Snapshot> {
        let committed = self.by_name.values().filter(|it| it.kind == Kind::Committed);
        committed.filter(move |it| it.labels.get(TARGET).is_some_and(|target| target == chain))
    }

    /// A name for the snapshot of a ChainID: the ChainID itself unless that stands elsewhere already.
    pub fn name_for(&self, chain: &str, id: u64) -> String {
        match self.by_name.contains_key(chain) {
            true => format!("{chain}@{id}"),
            false => chain.to_owned(),
        }
    }

    /// Makes a snapshot with this number.
    pub fn create(&mut self, id: u64, wanted: Wanted) -> Result<Snapshot> {
        check_name("snapshot", &wanted.name)?;
        labels::check(&wanted.labels)?;
        let below = self.check_parent(&wanted.parent)?.map(|parent| parent.id);
        if self.by_name.contains_key(&wanted.name) {
            return Err(exists(&wanted.name));
        }
        let now = now_ns();
        let Wanted { name, parent, kind, labels, shown } = wanted;
        let snapshot = Snapshot {
            id,
            name,
            parent,
            kind,
            created_ns: now,
            updated_ns: now,
            labels,
            shown,
            usage: None,
        };
        let made = match &snapshot.shown {
            Some(_) => Ok(()),
            None => self.folders.make(id, below),
        };
        if let Err(error) = made.and_then(|()| self.records.write(&snapshot)) {
            self.clear(id);
            return Err(error);
        }
        self.by_name.insert(snapshot.name.clone(), snapshot.clone());
        Ok(snapshot)
    }

    /// An active snapshot that can be committed under this name.
    pub fn committable(&self, key: &str, name: &str) -> Result<&Snapshot> {
        check_name("snapshot", name)?;
        let active = self.get(key)?;
        if active.kind != Kind::Active {
            let text = format!("snapshot {key:?} is {}, not active", active.kind.word());
            return Err(Error::new(ErrorKind::Busy, text));
        }
        if self.by_name.contains_key(name) {
            return Err(exists(name));
        }
        Ok(active)
    }

    /// Finishes an active snapshot under a name that is free.
    pub fn commit(&mut self, key: &str, name: &str, labels: Labels, usage: Usage) -> Result<()> {
        labels::check(&labels)?;
        let active = self.committable(key, name)?;
        let now = now_ns();
        let committed = Snapshot {
            name: name.to_owned(),
            kind: Kind::Committed,
            created_ns: now,
            updated_ns: now,
            labels: set(labels),
            usage: Some(usage),
            ..active.clone()
        };
        self.records.write(&committed)?;
        self.by_name.remove(key);
        self.by_name.insert(committed.name.clone(), committed);
        Ok(())
    }

    /// Changes labels: those that `paths` name, or all.
    pub fn update(&mut self, name: &str, labels: &Labels, paths: &[String]) -> Result<Snapshot> {
        let mut updated = self.get(name)?.clone();
        if paths.is_empty() {
            updated.labels.clone_from(labels);
        }
        for path in paths {
            match path.strip_prefix("labels.") {
                Some(label) => {
                    let value = labels.get(label).cloned().unwrap_or_default();
                    updated.labels.insert(label.to_owned(), value);
                }
                None if path == "labels" => updated.labels.clone_from(labels),
                None => {
                    let text = format!("{path:?} of snapshot {name:?} cannot be changed");
                    return Err(Error::invalid(text));
                }
            }
        }
        updated.labels = set(updated.labels);
        labels::check(&updated.labels)?;
        updated.updated_ns = now_ns();
        self.records.write(&updated)?;
        self.by_name.insert(name.to_owned(), updated.clone());
        Ok(updated)
    }

    /// Forgets a snapshot that nothing stands on. Its directory is the caller's to remove, without a lock.
    pub fn remove(&mut self, name: &str) -> Result<Snapshot> {
        let snapshot = self.get(name)?.clone();
        if let Some(child) = self.by_name.values().find(|it| it.parent == name) {
            let text = format!("snapshot {name:?} carries {:?}", child.name);
            return Err(Error::new(ErrorKind::Busy, text));
        }
        self.records.remove(snapshot.id)?;
        self.by_name.remove(name);
        Ok(snapshot)
    }

    /// Removes directories that no record names.
    pub fn remove_leftovers(&self) -> Result<()> {
        let known: HashSet<u64> = self.by_name.values().map(|snapshot| snapshot.id).collect();
        self.folders.remove_others(&known)
    }

    fn clear(&self, id: u64) {
        if let Err(error) = self.folders.remove(id) {
            tracing::warn!(error = error.chain(), "left until the next clean-up");
        }
    }
}

/// A label without a value is none, as in containerd.
fn set(labels: Labels) -> Labels {
    labels.into_iter().filter(|(_, value)| !value.is_empty()).collect()
}

/// What a snapshot that shows no layer occupies now.
pub fn measure(folders: &Folders, snapshot: &Snapshot) -> Result<Usage> {
    match snapshot.usage {
        Some(usage) => Ok(usage),
        None => folders::usage(&folders.upper(snapshot.id)),
    }
}
