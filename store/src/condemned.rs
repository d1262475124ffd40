//! What collection is about to delete: the list of what was found without a use, and the notice of what is
//! being deleted at this moment. Nothing is moved; taking a list away undoes it.
//!
//! `condemned/list/<n>`: everything without a use, with the time it was first found so; the highest n counts.
//! `condemned/doomed/<n>`: what is being deleted now. Whoever begins to use something writes down the use
//! first (a lease) and looks here afterwards; whoever deletes writes here first and looks at the uses
//! afterwards. So one of the two sees the other, whatever the clocks say.
//!
//! Written only by the holder of the collector's lease ([`crate::Collector`]).
//!
//! // CRASH: a list is one object. A notice whose writer died is taken away by the next collector, or by
//! whoever waits for it and finds the collector's lease free.

use crate::checked::{seal, unseal};
use crate::key::Key;
use crate::number;
use crate::objects::Store;
use layer::{Context, Digest, EnvId, Error, ErrorKind, LayerId, PackId, Result};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

const LISTS: &str = "condemned/list/";
const DOOMED: &str = "condemned/doomed/";
const HEADER: &str = "lamella-condemned 1";
/// Three million objects and more.
const MAX_LIST_BYTES: u64 = 256 << 20;

/// Something that can be collected. A layer stands for all that has its name: the layer file, its location
/// hints, its plain data space, its profiles and what is kept of its archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Collectable {
    /// An environment, with its profiles.
    Environment(EnvId),
    /// The kept documents of a container image.
    Image(Digest),
    /// A layer.
    Layer(LayerId),
    /// How a tar was compressed: all that is kept under a diffID, whose name has this digest.
    Tar(Digest),
    /// A pack.
    Pack(PackId),
}

impl fmt::Display for Collectable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Environment(id) => write!(f, "env {id}"),
            Self::Image(id) => write!(f, "image {id}"),
            Self::Layer(id) => write!(f, "layer {id}"),
            Self::Tar(id) => write!(f, "tar {id}"),
            Self::Pack(id) => write!(f, "pack {id}"),
        }
    }
}

impl FromStr for Collectable {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.split_once(' ') {
            Some(("env", id)) => id.parse().map(Self::Environment),
            Some(("image", id)) => id.parse().map(Self::Image),
            Some(("tar", id)) => id.parse().map(Self::Tar),
            Some(("layer", id)) => id.parse().map(Self::Layer),
            Some(("pack", id)) => id.parse().map(Self::Pack),
            _ => Err(Error::corrupt(format!("{text:?} is nothing that is collected"))),
        }
    }
}

/// What is condemned, and since when (nanoseconds since 1970, by the collector's clock).
pub type Condemned = BTreeMap<Collectable, u64>;

impl Store {
    /// The list that counts; empty when there is none or when it cannot be read: then everything that has no
    /// use is condemned anew, which costs time and nothing else.
    pub fn condemned(&self) -> Result<Condemned> {
        let Some(number) = self.newest(LISTS)? else { return Ok(Condemned::new()) };
        match self.read_list(LISTS, number) {
            Ok(list) => Ok(list),
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound) => {
                tracing::warn!("list {number} of what is condemned: {}", error.chain());
                Ok(Condemned::new())
            }
            Err(error) => Err(error),
        }
    }

    /// Replaces the list.
    pub fn put_condemned(&self, list: &Condemned) -> Result<()> {
        let newest = self.newest(LISTS)?.unwrap_or(0);
        self.put_new(&number::key_in(LISTS, newest + 1)?, &seal(encode(list)))?;
        self.forget_lists(LISTS, newest)
    }

    /// Says what is being deleted from now on. Returns the number of the notice.
    pub fn put_doomed(&self, list: &Condemned) -> Result<u64> {
        let number = self.newest(DOOMED)?.unwrap_or(0) + 1;
        self.put_new(&number::key_in(DOOMED, number)?, &seal(encode(list)))?;
        Ok(number)
    }

    /// What is being deleted now. `Corrupt` where a notice cannot be read: then it may be anything.
    pub fn doomed(&self) -> Result<Condemned> {
        let mut doomed = Condemned::new();
        for name in self.list_names(DOOMED)? {
            match self.read_list(DOOMED, number::number_of(&name)?) {
                Ok(list) => doomed.extend(list),
                Err(error) if error.kind() == ErrorKind::NotFound => {} // done meanwhile
                Err(error) => return Err(error),
            }
        }
        Ok(doomed)
    }

    /// Takes all notices away.
    pub fn clear_doomed(&self) -> Result<()> {
        match self.newest(DOOMED)? {
            Some(newest) => self.forget_lists(DOOMED, newest),
            None => Ok(()),
        }
    }

    fn newest(&self, directory: &str) -> Result<Option<u64>> {
        let names = self.backend().list(directory, None, 1)?;
        names.first().map(|name| number::number_of(name)).transpose()
    }

    /// Removes what is numbered `newest` or lower.
    fn forget_lists(&self, directory: &str, newest: u64) -> Result<()> {
        for name in self.list_names(directory)? {
            let number = number::number_of(&name)?;
            if number <= newest {
                self.backend().delete(&number::key_in(directory, number)?)?;
            }
        }
        Ok(())
    }

    fn read_list(&self, directory: &str, number: u64) -> Result<Condemned> {
        let what = || format!("{directory}{number}");
        let key: Key = number::key_in(directory, number)?;
        let bytes = self.read_object(&key, MAX_LIST_BYTES, what)?;
        unseal(&bytes).and_then(decode).context(what)
    }
}

fn encode(list: &Condemned) -> Vec<u8> {
    let mut text = HEADER.to_owned();
    for (what, since) in list {
        text.push_str(&format!("\n{what} {since}"));
    }
    text.into_bytes()
}

fn decode(bytes: &[u8]) -> Result<Condemned> {
    let refuse = || Error::corrupt("not a list of what is condemned");
    let text = std::str::from_utf8(bytes).map_err(|_| refuse())?;
    let mut lines = text.split('\n');
    if lines.next() != Some(HEADER) {
        return Err(refuse());
    }
    lines
        .map(|line| {
            let (what, since) = line.rsplit_once(' ').ok_or_else(refuse)?;
            Ok((what.parse()?, since.parse::<u64>().map_err(|_| refuse())?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::memory::Memory;
    use std::sync::Arc;

    fn list() -> Condemned {
        [
            (Collectable::Environment(EnvId([1; 32])), 5),
            (Collectable::Image(Digest([4; 32])), 6),
            (Collectable::Layer(LayerId([2; 32])), 7),
            (Collectable::Tar(Digest([5; 32])), 8),
            (Collectable::Pack(PackId([3; 16])), u64::MAX),
        ]
        .into()
    }

    #[test]
    fn the_newest_list_counts_and_a_damaged_one_is_empty() {
        let store = Store::open(Arc::new(Memory::new())).unwrap();
        assert!(store.condemned().unwrap().is_empty());
        store.put_condemned(&list()).unwrap();
        assert_eq!(store.condemned().unwrap(), list());
        store.put_condemned(&Condemned::new()).unwrap();
        assert!(store.condemned().unwrap().is_empty());
        assert_eq!(store.list_names(LISTS).unwrap().len(), 1);
        store.put_new(&number::key_in(LISTS, 9).unwrap(), b"garbage").unwrap();
        assert!(store.condemned().unwrap().is_empty());
        store.put_condemned(&list()).unwrap();
        assert_eq!(store.condemned().unwrap(), list());
    }

    #[test]
    fn a_notice_stands_until_it_is_taken_away_and_an_unreadable_one_is_no_silence() {
        let store = Store::open(Arc::new(Memory::new())).unwrap();
        store.clear_doomed().unwrap();
        assert!(store.doomed().unwrap().is_empty());
        let number = store.put_doomed(&list()).unwrap();
        assert_eq!(store.doomed().unwrap(), list());
        store.put_new(&number::key_in(DOOMED, number + 1).unwrap(), b"garbage").unwrap();
        assert_eq!(store.doomed().unwrap_err().kind(), ErrorKind::Corrupt);
        store.clear_doomed().unwrap();
        assert!(store.doomed().unwrap().is_empty());
    }

    #[test]
    fn lists_round_trip_and_garbage_is_refused() {
        assert_eq!(decode(&encode(&list())).unwrap(), list());
        for bad in ["", "x", "lamella-condemned 1\n", "lamella-condemned 1\npack 00 1"] {
            assert!(decode(bad.as_bytes()).is_err(), "{bad:?}");
        }
    }
}
