//! A journal of things that have a name: one file, one line of JSON a change, the last line of a name counts.
//! There is one of all sandboxes of a node ([`crate::record::Record`]) and one of their commands.
//!
//! One file for all, because making and removing a file for each costs more than everything that is written
//! into it. It is written anew when most of it is out of date.
//!
//! Locking: one mutex, held for one write. CRASH: a line is one write, so a killed process leaves whole
//! lines or a tail that the next start cuts off. Nothing is flushed: after a crash of the machine no sandbox
//! lives anyway.

use layer::{Context, Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a journal is of.
pub trait Entry: Serialize + DeserializeOwned {
    /// Name of the file.
    const NAME: &'static str;

    /// Tells it from all others.
    fn key(&self) -> &str;

    /// When it began, in nanoseconds since 1970.
    fn since(&self) -> u64;
}

/// A journal below this length is never written anew.
const MIN_COMPACT_BYTES: u64 = 4 << 20;
/// A journal that is this many times as long as when it was last written anew is due again.
const MAX_GROWTH: u64 = 4;

/// One line, to be written.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Line<'a, E> {
    /// What is known now.
    Now(&'a E),
    /// Nothing is known of it any more.
    Forgotten(&'a str),
}

/// A [`Line`] as it is read.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ReadLine<E> {
    Now(Box<E>),
    Forgotten(String),
}

/// The journal, open.
#[derive(Debug)]
pub struct Journal<E> {
    path: PathBuf,
    open: Mutex<Open>,
    entries: PhantomData<fn(E)>,
}

#[derive(Debug)]
struct Open {
    file: File,
    /// Length of the file: whole lines only.
    bytes: u64,
    /// Its length when it was last written anew.
    compact_bytes: u64,
}

impl<E: Entry> Journal<E> {
    /// Opens the journal of a folder, or makes one; answers what it says of each name, the oldest first.
    pub fn open(folder: &Path) -> Result<(Self, Vec<E>)> {
        let path = folder.join(E::NAME);
        let records = read(&path)?;
        let open = write_anew(&path, &records)?;
        Ok((Self { path, open: Mutex::new(open), entries: PhantomData }, records))
    }

    /// Writes down what is known now.
    pub fn append(&self, record: &E) -> Result<()> {
        self.write(&Line::Now(record))
    }

    /// Writes down that nothing needs to be known of a name any more.
    pub fn forget(&self, key: &str) -> Result<()> {
        self.write(&Line::Forgotten(key))
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, line: &Line<'_, E>) -> Result<()> {
        let context = || format!("write {}", self.path.display());
        let bytes = encode(line)?;
        let mut open = self.lock();
        if let Err(error) = open.file.write_all(&bytes) {
            // Half a line would spoil the next one.
            open.file.set_len(open.bytes).context(context)?;
            return Err(error).context(context);
        }
        open.bytes += bytes.len() as u64;
        if open.bytes > MIN_COMPACT_BYTES.max(MAX_GROWTH * open.compact_bytes) {
            let anew = read::<E>(&self.path).and_then(|records| write_anew(&self.path, &records));
            match anew {
                Ok(anew) => *open = anew,
                // Everything is still in the long one; the next try is after as many lines again.
                Err(error) => {
                    tracing::warn!(error = %error.chain(), "the journal stays long");
                    open.compact_bytes = open.bytes;
                }
            }
        }
        Ok(())
    }
}

fn encode<E: Entry>(line: &Line<'_, E>) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(line)
        .map_err(|error| Error::invalid("write a journal").with_source(error))?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// What the journal says last of each name. Lines that cannot be read are passed over.
fn read<E: Entry>(path: &Path) -> Result<Vec<E>> {
    let context = || format!("read {}", path.display());
    let file = match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        file => file.context(context)?,
    };
    let mut known = BTreeMap::new();
    for line in BufReader::new(file).split(b'\n') {
        match serde_json::from_slice::<ReadLine<E>>(&line.context(context)?) {
            Ok(ReadLine::Now(record)) => {
                known.insert(record.key().to_owned(), *record);
            }
            Ok(ReadLine::Forgotten(id)) => {
                known.remove(&id);
            }
            Err(error) => tracing::debug!(%error, "a line of the journal cannot be read"),
        }
    }
    let mut records: Vec<E> = known.into_values().collect();
    records.sort_by_key(E::since);
    Ok(records)
}

/// CRASH: the new journal takes the place of the old one when it is whole.
fn write_anew<E: Entry>(path: &Path, records: &[E]) -> Result<Open> {
    let context = || format!("write {}", path.display());
    let fresh = path.with_extension("new");
    match std::fs::remove_file(&fresh) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        removed => removed.context(context)?,
    }
    let file = File::options().append(true).create_new(true).open(&fresh).context(context)?;
    let mut writer = BufWriter::new(file);
    for record in records {
        let line = encode(&Line::Now(record))?;
        writer.write_all(&line).context(context)?;
    }
    let file = writer.into_inner().map_err(std::io::IntoInnerError::into_error).context(context)?;
    let bytes = file.metadata().context(context)?.len();
    std::fs::rename(&fresh, path).context(context)?;
    Ok(Open { file, bytes, compact_bytes: bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Record, State, tests::record};

    fn named(id: &str, state: State) -> Record {
        Record { id: id.into(), ..record(state) }
    }

    #[test]
    fn the_last_whole_line_counts() {
        let folder = tempfile::tempdir().unwrap();
        let (journal, records) = Journal::<Record>::open(folder.path()).unwrap();
        assert!(records.is_empty());
        journal.append(&named("a", State::Creating)).unwrap();
        journal.append(&named("b", State::Creating)).unwrap();
        journal.append(&named("a", State::Running)).unwrap();
        journal.append(&named("c", State::Running)).unwrap();
        journal.forget("c").unwrap();
        let path = folder.path().join(Record::NAME);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.extend_from_slice(b"{\"now\":{\"version\":1,\"id\":\"b\"");
        std::fs::write(&path, bytes).unwrap();
        let expected = [named("a", State::Running), named("b", State::Creating)];
        let (journal, records) = Journal::<Record>::open(folder.path()).unwrap();
        assert_eq!(records, expected);
        // What is added after a torn line is not lost with it.
        journal.append(&named("b", State::Gone)).unwrap();
        let (_, records) = Journal::<Record>::open(folder.path()).unwrap();
        assert_eq!(records, [named("a", State::Running), named("b", State::Gone)]);
    }

    #[test]
    fn it_does_not_grow_with_what_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let (journal, _) = Journal::<Record>::open(folder.path()).unwrap();
        journal.append(&named("kept", State::Running)).unwrap();
        let long = Record { reason: "x".repeat(64 << 10), ..named("gone", State::Gone) };
        for _ in 0..200 {
            journal.append(&long).unwrap();
            journal.forget("gone").unwrap();
        }
        let length = std::fs::metadata(folder.path().join(Record::NAME)).unwrap().len();
        assert!(length <= MIN_COMPACT_BYTES + (80 << 10), "{length}");
        journal.append(&named("late", State::Running)).unwrap();
        let (_, records) = Journal::<Record>::open(folder.path()).unwrap();
        assert_eq!(records, [named("kept", State::Running), named("late", State::Running)]);
    }

    #[test]
    fn a_line_that_does_not_fit_spoils_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let (journal, _) = Journal::<Record>::open(folder.path()).unwrap();
        journal.append(&named("a", State::Running)).unwrap();
        // A file opened for reading refuses the write like a full disk does.
        let readable = File::open(folder.path().join(Record::NAME)).unwrap();
        let whole = std::mem::replace(&mut journal.lock().file, readable);
        assert!(journal.append(&named("b", State::Running)).is_err());
        journal.lock().file = whole;
        journal.append(&named("c", State::Running)).unwrap();
        let (_, records) = Journal::<Record>::open(folder.path()).unwrap();
        assert_eq!(records, [named("a", State::Running), named("c", State::Running)]);
    }
}
