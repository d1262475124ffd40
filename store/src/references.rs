//! References on the store: every move is one immutable entry, and the entry with the highest number is
//! current.
//!
//! A move creates entry n+1 without replacing: compare-and-swap without a lock, with the history for free.
//! An entry carries a random nonce, so that a writer whose first try was reported as failed, and whose second
//! finds the number taken, knows whether the entry is its own.
//!
//! `refs/<kind>/<name>/<tag>/<number>`: slashes in the name are written as `+`, which no name has, so that
//! every entry lies at the same depth and no tag can be taken for a part of another's name.
//!
//! INVARIANT: entry n+1 is only created by a writer that saw entry n, so numbers have no gaps.

use crate::checked::{seal, unseal};
use crate::number;
use crate::objects::{Store, random_hex};
use layer::reference::{MAX_ENTRY_BYTES, RefKind, Reference, ReferenceEntry, Target};
use layer::{Context, Error, ErrorKind, Result};

/// Tries against other writers of the same reference.
const MAX_ATTEMPTS: u32 = 64;
/// Tries against a store that does not say whether it did it.
const MAX_UNSURE: u32 = 3;
/// The longest name of an author.
const MAX_AUTHOR_BYTES: usize = 256;

impl Store {
    /// The newest entry of a reference. One without a target says that it was untagged.
    pub fn current(&self, reference: &Reference) -> Result<Option<ReferenceEntry>> {
        match self.current_number(reference)? {
            0 => Ok(None),
            number => self.read_entry(reference, number).map(Some),
        }
    }

    /// All entries, the newest first.
    pub fn history(&self, reference: &Reference) -> Result<Vec<ReferenceEntry>> {
        let numbers = self.history_numbers(reference)?;
        numbers.into_iter().map(|number| self.read_entry(reference, number)).collect()
    }

    /// The numbers of all entries, the newest first.
    pub fn history_numbers(&self, reference: &Reference) -> Result<Vec<u64>> {
        let names = self.list_names(&directory(reference))?;
        names.iter().map(|name| number::number_of(name)).collect()
    }

    /// All references of a kind, or of every kind, with the numbers of their newest entries; untagged ones
    /// included.
    pub fn list_references(&self, kind: Option<RefKind>) -> Result<Vec<(Reference, u64)>> {
        let prefix = kind.map_or("refs/".to_owned(), |kind| format!("refs/{kind}/"));
        let mut found: Vec<(Reference, u64)> = Vec::new();
        for name in self.list_names(&prefix)? {
            match parse(&name) {
                // The newest entry of a reference is listed first.
                Ok((reference, _)) if found.last().is_some_and(|(last, _)| *last == reference) => {}
                Ok(entry) => found.push(entry),
                Err(error) => tracing::warn!("{}: {}", self.backend().describe(), error.chain()),
            }
        }
        Ok(found)
    }

    /// Points a reference to `target`, or nowhere. With `expected`, only if that entry is current now (0: the
    /// reference never existed), else `Exists`. The target has to be on the store.
    pub fn move_reference(
        &self,
        reference: &Reference,
        target: Option<Target>,
        author: &str,
        expected: Option<u64>,
    ) -> Result<ReferenceEntry> {
        self.check_target(reference, target)?;
        if author.len() > MAX_AUTHOR_BYTES {
            return Err(Error::invalid(format!("an author of {} bytes", author.len())));
        }
        let nonce = random_hex()?;
        let mut current = self.current_number(reference)?;
        let mut unsure = 0;
        for _ in 0..MAX_ATTEMPTS {
            if let Some(expected) = expected.filter(|expected| *expected != current) {
                return Err(Error::new(
                    ErrorKind::Exists,
                    format!(
                        "{reference} is at entry {current}, not {expected}: somebody moved it; look at its history and try again"
                    ),
                ));
            }
            let entry = ReferenceEntry {
                number: current + 1,
                target,
                time_unix_ns: self.now_unix_ns(),
                author: author.to_owned(),
                nonce: nonce.clone(),
            };
            let key = number::key_in(&directory(reference), entry.number)?;
            match self.put_new(&key, &seal(entry.encode())) {
                Ok(()) => return Ok(entry),
                Err(error) if error.kind() == ErrorKind::Exists => {
                    if let Some(own) = self.own_entry(reference, entry.number, &nonce)? {
                        return Ok(own);
                    }
                    current += 1;
                }
                Err(error) => {
                    let again = matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout);
                    unsure += 1;
                    if !again || unsure > MAX_UNSURE {
                        return Err(error.context(format!("move {reference}")));
                    }
                }
            }
        }
        Err(Error::new(ErrorKind::Busy, format!("others keep moving {reference}; try again")))
    }

    fn check_target(&self, reference: &Reference, target: Option<Target>) -> Result<()> {
        let Some(target) = target else { return Ok(()) };
        if !target.fits(reference.kind()) {
            return Err(Error::invalid(format!("{reference} cannot point to {target}")));
        }
        let exists = match &target {
            Target::Layer(id) => self.has_layer(id)?,
            Target::Environment(id) => self.has_environment(id)?,
        };
        if exists { Ok(()) } else { Err(Error::not_found(format!("{target} is not on the store"))) }
    }

    /// The entry of this number if this writer made it. A damaged one is nobody's.
    fn own_entry(
        &self,
        reference: &Reference,
        number: u64,
        nonce: &str,
    ) -> Result<Option<ReferenceEntry>> {
        match self.read_entry(reference, number) {
            Ok(entry) => Ok(Some(entry).filter(|entry| entry.nonce == nonce)),
            Err(error) if error.kind() == ErrorKind::Corrupt => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The number of the newest entry; 0 when there is none.
    pub fn current_number(&self, reference: &Reference) -> Result<u64> {
        let newest = self.backend().list(&directory(reference), None, 1)?;
        newest.first().map_or(Ok(0), |name| number::number_of(name))
    }

    /// One entry. Entries never change.
    pub fn read_entry(&self, reference: &Reference, number: u64) -> Result<ReferenceEntry> {
        let key = number::key_in(&directory(reference), number)?;
        let what = || format!("entry {number} of {reference}");
        let bytes = self.read_object(&key, MAX_ENTRY_BYTES as u64 + 128, what)?;
        let entry = unseal(&bytes).and_then(ReferenceEntry::decode).context(what)?;
        if entry.number != number {
            return Err(Error::corrupt(format!(
                "{}: the object holds entry {}",
                what(),
                entry.number
            )));
        }
        Ok(entry)
    }
}

impl Store {
    /// Puts an entry whose object here is damaged as another store has it. False where a sound one was here.
    pub fn restore_entry(&self, reference: &Reference, entry: &ReferenceEntry) -> Result<bool> {
        let key = number::key_in(&directory(reference), entry.number)?;
        let sound = |found: &[u8]| {
            let found = unseal(found).and_then(ReferenceEntry::decode);
            found.is_ok_and(|found| found.number == entry.number)
        };
        let bytes = seal(entry.encode());
        self.put_sound(&key, &bytes, MAX_ENTRY_BYTES as u64 + 128, sound).map(|there| !there)
    }
}

fn directory(reference: &Reference) -> String {
    let name = reference.name().replace('/', "+");
    format!("refs/{}/{name}/{}/", reference.kind(), reference.tag())
}

fn parse(name: &str) -> Result<(Reference, u64)> {
    let mut parts = name.split('/').skip(1);
    let mut part = || parts.next();
    let (Some(kind), Some(stem), Some(tag), Some(_), None) =
        (part(), part(), part(), part(), part())
    else {
        return Err(Error::corrupt(format!("object {name} is no entry of a reference")));
    };
    let reference =
        kind.parse().and_then(|kind| Reference::new(kind, &stem.replace('+', "/"), tag));
    let reference = reference
        .map_err(|error| Error::corrupt(format!("object {name} is no entry")).with_source(error))?;
    Ok((reference, number::number_of(name)?))
}
