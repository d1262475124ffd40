//! Which users of the host a sandbox's users are: each slot has a range of its own, which begins with the
//! sandbox's root.
//!
//! The files of layers and what a sandbox writes keep the numbers that the sandbox knows: mounts shift
//! them. Whoever acts on a sandbox's tree from outside asks here for the number to use.

use layer::{Context, Error, ErrorKind, Result};
use proto::launch::IDS;
use sys::identity::FileIdentity;
use sys::mount::{IdMap, IdRange};

/// The ids of one sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ids {
    /// What its id 0 is on the host; 0: its ids are those of the host.
    first: u32,
}

/// The first id that is given away: above everything that distributions use, and above what useradd(8)
/// writes into /etc/subuid.
const LOWEST: u32 = 0x1000_0000;
/// How many ranges there are.
const RANGES: u32 = 0x6000_0000 / IDS;
/// How an id outside of the range shows inside.
const NOBODY: u32 = 65_534;

impl Ids {
    /// For a sandbox without a user namespace.
    pub const OF_HOST: Self = Self { first: 0 };

    /// Those of a slot. Nodes on one host have different seeds, so that their ranges rarely meet.
    pub fn of_slot(number: u32, seed: u64) -> Result<Self> {
        if number >= RANGES {
            return Err(Error::new(ErrorKind::NoSpace, "no range of users is left for a sandbox"));
        }
        let start = (seed % u64::from(RANGES)) as u32;
        Ok(Self { first: LOWEST + (start + number) % RANGES * IDS })
    }

    /// Those of a living process, as the kernel tells them.
    pub fn of_process(pid: i32) -> Result<Self> {
        let path = format!("/proc/{pid}/uid_map");
        let text = std::fs::read_to_string(&path).context(|| format!("read {path}"))?;
        let mut words = text.split_whitespace();
        let first = words.nth(1).and_then(|word| word.parse().ok());
        let first = first.ok_or_else(|| Error::invalid(format!("{path}: {text:?}")))?;
        Ok(Self { first })
    }

    /// What its id 0 is on the host, and 0 without a user namespace.
    pub fn first(self) -> u32 {
        self.first
    }

    /// Whether it has a user namespace.
    pub fn are_shifted(self) -> bool {
        self.first != 0
    }

    /// What an id of the sandbox is on the host. Invalid: a sandbox has no such id.
    pub fn outer(self, inner: u32) -> Result<u32> {
        if !self.are_shifted() || inner < IDS {
            return Ok(self.first + inner);
        }
        Err(Error::invalid(format!("user or group {inner}: a sandbox has the numbers below {IDS}")))
    }

    /// What an id of the host is in the sandbox: nobody's, if it is none of the sandbox's.
    pub fn inner(self, outer: u32) -> u32 {
        if !self.are_shifted() {
            return outer;
        }
        outer.checked_sub(self.first).filter(|inner| *inner < IDS).unwrap_or(NOBODY)
    }

    /// Lets this thread make files as the sandbox's root; others it cannot make in there. It keeps its
    /// rights.
    pub fn assume(self) -> Result<Option<FileIdentity>> {
        let assume = || FileIdentity::assume(self.first, self.first);
        let assumed = self.are_shifted().then(assume).transpose();
        assumed.context(|| "act as the sandbox's root".into())
    }

    /// From the ids of the sandbox to those of the host.
    pub fn map(self) -> IdMap {
        let range = IdRange { from: 0, to: self.first, count: IDS };
        IdMap { users: vec![range], groups: vec![range] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_slots_never_meet_and_stay_below_the_signed_numbers() {
        let seed = u64::from(RANGES) - 2;
        let all: Vec<u32> =
            (0..5).map(|number| Ids::of_slot(number, seed).unwrap().first()).collect();
        for (at, first) in all.iter().enumerate() {
            assert!(*first >= LOWEST && *first <= i32::MAX as u32 - IDS, "{all:?}");
            assert!(all[..at].iter().all(|other| first.abs_diff(*other) >= IDS), "{all:?}");
        }
        assert!(Ids::of_slot(RANGES, 0).is_err());
    }

    #[test]
    fn numbers_go_out_and_in() {
        let ids = Ids::of_slot(3, 0).unwrap();
        let outer = ids.outer(1000).unwrap();
        assert_eq!((outer - ids.first(), ids.inner(outer)), (1000, 1000));
        assert_eq!(ids.inner(0), NOBODY);
        assert!(ids.outer(IDS).is_err());
        assert_eq!(Ids::OF_HOST.outer(70_000).unwrap(), 70_000);
        assert_eq!(Ids::OF_HOST.inner(70_000), 70_000);
        assert_eq!(Ids::of_process(std::process::id() as i32).unwrap(), Ids::OF_HOST);
    }
}
