//! Access profiles by layer and by environment: advice, written again as runs are added.
//!
//! A new run is merged into what is there and published under the next number; whoever loses a race
//! merges again. A damaged profile is passed over, and replaced by the next one that is added.

use crate::number;
use crate::objects::Store;
use layer::profile::{MAX_PROFILE_BYTES, Profile};
use layer::{EnvId, Error, ErrorKind, LayerId, Result};
use std::fmt;

/// Tries to add to a profile while others do the same.
const MAX_ATTEMPTS: u32 = 64;
/// Older states that are kept for readers that have just listed them.
const KEPT: u64 = 2;

/// What a profile is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Profiled {
    /// One layer, whatever environment it was used in.
    Layer(LayerId),
    /// All layers of one environment.
    Environment(EnvId),
}

impl fmt::Display for Profiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layer(id) => write!(f, "layer/{id}"),
            Self::Environment(id) => write!(f, "env/{id}"),
        }
    }
}

impl Profiled {
    fn directory(&self) -> String {
        format!("profiles/{self}/")
    }
}

impl Store {
    /// Merges `added` into the profile and answers the result.
    pub fn add_profile(&self, of: &Profiled, added: &Profile) -> Result<Profile> {
        for _ in 0..MAX_ATTEMPTS {
            let numbers = self.profile_numbers(of)?;
            let merged = self.first_readable(of, &numbers)?.unwrap_or_default().merged(added);
            let number = numbers.first().copied().unwrap_or(0) + 1;
            match self.put_new(&number::key_in(&of.directory(), number)?, &merged.encode()) {
                Ok(()) => {
                    self.forget_old_profiles(of, &numbers, number);
                    return Ok(merged);
                }
                Err(error) if error.kind() == ErrorKind::Exists => {}
                Err(error) => return Err(error),
            }
        }
        Err(Error::new(ErrorKind::Busy, format!("others keep writing the profile of {of}")))
    }

    /// The newest readable profile, if there is any. A damaged one is passed over with a warning.
    pub fn read_profile(&self, of: &Profiled) -> Result<Option<Profile>> {
        self.first_readable(of, &self.profile_numbers(of)?)
    }

    /// Removes a profile; false when there was none.
    pub fn delete_profile(&self, of: &Profiled) -> Result<bool> {
        let numbers = self.profile_numbers(of)?;
        for number in &numbers {
            self.backend().delete(&number::key_in(&of.directory(), *number)?)?;
        }
        Ok(!numbers.is_empty())
    }

    fn first_readable(&self, of: &Profiled, numbers: &[u64]) -> Result<Option<Profile>> {
        for number in numbers {
            let key = number::key_in(&of.directory(), *number)?;
            let read = self.backend().read_all(&key, MAX_PROFILE_BYTES);
            match read.and_then(|bytes| Profile::decode(&bytes)) {
                Ok(profile) => return Ok(Some(profile)),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::Corrupt | ErrorKind::Unsupported | ErrorKind::Invalid
                    ) =>
                {
                    tracing::warn!("profile {number} of {of} is ignored: {}", error.chain());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Numbers, the highest first.
    fn profile_numbers(&self, of: &Profiled) -> Result<Vec<u64>> {
        let names = self.list_names(&of.directory())?;
        Ok(names.iter().filter_map(|name| number::number_of(name).ok()).collect())
    }

    /// Old states only cost space, so a failure is told and no more.
    fn forget_old_profiles(&self, of: &Profiled, numbers: &[u64], newest: u64) {
        for number in numbers.iter().filter(|number| **number + KEPT < newest) {
            let key = number::key_in(&of.directory(), *number);
            if let Err(error) = key.and_then(|key| self.backend().delete(&key)) {
                tracing::warn!("an old profile of {of} stays: {}", error.chain());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Key;
    use crate::backend::memory::Memory;
    use layer::profile::{Run, Touch};
    use std::sync::Arc;

    fn profile(started: u64) -> Profile {
        let touch = Touch { layer: 0, start_block: 0, blocks: 1, at_ms: 0 };
        Profile::new(vec![Run::new(started, vec![LayerId([7; 32])], vec![touch]).unwrap()])
    }

    #[test]
    fn runs_are_added_and_damage_is_passed_over() {
        let store = Store::open(Arc::new(Memory::new())).unwrap();
        let of = Profiled::Layer(LayerId([7; 32]));
        assert_eq!(store.read_profile(&of).unwrap(), None);
        for started in 1..=6 {
            store.add_profile(&of, &profile(started)).unwrap();
        }
        assert_eq!(store.read_profile(&of).unwrap().unwrap().runs().len(), 6);
        let kept = store.backend().list(&of.directory(), None, 100).unwrap();
        assert_eq!(kept.len(), 1 + KEPT as usize);

        let garbage = Key::new(format!("{}{}", of.directory(), number::name_of(7))).unwrap();
        store.put_new(&garbage, b"garbage").unwrap();
        assert_eq!(store.read_profile(&of).unwrap().unwrap().runs().len(), 6);
        store.add_profile(&of, &profile(9)).unwrap();
        assert_eq!(store.read_profile(&of).unwrap().unwrap().runs().len(), 7);
        assert!(store.delete_profile(&of).unwrap());
        assert!(!store.delete_profile(&of).unwrap());
    }
}
