//! What is in use whatever nothing else says: references with their history window, and leases.
//!
//! Reading them again finds what is new since; the order of reading matters. Whoever names something holds a
//! lease until the name is written, so leases are read first and names afterwards: who is missed there is found
//! here.

use crate::images::Images;
use layer::reference::{Reference, Target};
use layer::{Digest, ErrorKind, PackId, Result};
use std::collections::{HashMap, HashSet};
use store::MAX_CLOCK_SKEW;

/// Who holds the leases of publishes.
const PUBLISH: &str = "publish/";
/// How long it takes at most from the decision to condemn to the list that says so, beside clocks that differ.
const PUBLICATION_NS: u64 = 300 * 1_000_000_000;

/// New roots.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// What references point to now: it must be there.
    pub(super) current: Vec<(Reference, Target)>,
    /// What references pointed to within the window.
    pub(super) former: Vec<Target>,
    /// Ids of layers, environments or documents of images that leases keep; they need not exist.
    pub(super) leased: Vec<Digest>,
    /// Packs that leases keep.
    pub(super) packs: Vec<PackId>,
}

/// The roots read so far.
#[derive(Debug)]
pub(super) struct Roots {
    window_ns: u64,
    entries: HashMap<Reference, u64>,
    leases: HashSet<String>,
    /// When the publishes that go on began.
    publishes: Vec<u64>,
    latest_unix_ns: u64,
}

impl Roots {
    pub(super) fn new(window_ns: u64) -> Self {
        Self {
            window_ns,
            entries: HashMap::new(),
            leases: HashSet::new(),
            publishes: Vec::new(),
            latest_unix_ns: 0,
        }
    }

    /// The latest time that a lease says it began at.
    pub(super) fn latest_unix_ns(&self) -> u64 {
        self.latest_unix_ns
    }

    /// Whether a publish goes on that may have found something in use that was condemned at this time.
    pub(super) fn may_have_seen(&self, condemned_unix_ns: u64) -> bool {
        let latest = condemned_unix_ns.saturating_add(PUBLICATION_NS + skew_ns());
        self.publishes.iter().any(|since| *since <= latest)
    }

    /// Reads what is new since the last time.
    pub(super) fn read(&mut self, images: &Images) -> Result<Found> {
        let mut found = Found::default();
        self.read_leases(images, &mut found)?;
        for (reference, number) in images.store.list_references(None)? {
            if self.entries.get(&reference) != Some(&number) {
                self.read_reference(images, &reference, number, &mut found)?;
                self.entries.insert(reference, number);
            }
        }
        Ok(found)
    }

    /// A lease that cannot be read could be on anything: then nothing is collected.
    fn read_leases(&mut self, images: &Images, found: &mut Found) -> Result<()> {
        let now = images.now();
        for id in images.store.list_lease_ids()? {
            if self.leases.contains(&id) {
                continue;
            }
            let lease = match images.store.read_lease(&id) {
                Ok(lease) => lease,
                // It ended meanwhile; whoever had it has written the name, which is read after this.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(error.context("a lease that may keep anything")),
            };
            self.leases.insert(id);
            if lease.has_expired(now.saturating_sub(skew_ns())) {
                continue;
            }
            self.latest_unix_ns = self.latest_unix_ns.max(lease.since_unix_ns);
            if lease.id.starts_with(PUBLISH) {
                self.publishes.push(lease.since_unix_ns);
            }
            found.leased.extend(lease.ids);
            found.packs.extend(lease.packs);
        }
        Ok(())
    }

    /// An entry that cannot be read could point anywhere: then nothing is collected.
    fn read_reference(
        &self,
        images: &Images,
        reference: &Reference,
        number: u64,
        found: &mut Found,
    ) -> Result<()> {
        let mut entry = images.entry(reference, number)?;
        found.current.extend(entry.target.map(|target| (reference.clone(), target)));
        let horizon = images.now().saturating_sub(self.window_ns);
        // An entry counts until the one after it was written.
        while entry.number > 1 && entry.time_unix_ns > horizon {
            entry = images.entry(reference, entry.number - 1)?;
            found.former.extend(entry.target);
        }
        Ok(())
    }
}

fn skew_ns() -> u64 {
    u64::try_from(MAX_CLOCK_SKEW.as_nanos()).unwrap_or(u64::MAX)
}
