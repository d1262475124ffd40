//! Collection: what nothing uses goes away, and nothing that something uses.
//!
//! ```text
//!  stock ─▶ roots ─▶ marks ─▶ compaction ─▶ condemned list ─▶ after the grace, in another run: doomed ─▶ deleted
//!  what      references, history window, leases                 │                              │
//!  there is  (roots)                                            └── used again: off the list ──┘
//! ```
//! One collector at a time, by a lease on the store. Deleting needs two runs: one that condemned, and one that began
//! at least the grace later and found no use either. What is deleted is said before the uses are looked at a last
//! time, so whoever begins to use something either is seen here or sees it there (`protect`,
//! docs/decisions/0011).
//!
//! Two things hold for all that has a name, referenced or not, at any moment: a layer has all its chunks, and an
//! environment has all its layers. So layers that stay keep their packs, and environments that stay their layers.
//!
//! Memory: one bit a chunk, and the ids of layers, environments and packs.
//!
//! // CRASH: the list is one object; deletions can be cut off anywhere and go on in the next run. A notice of
//! deletions is taken away by whoever finds the collector's lease free.

mod compact;
mod marks;
mod roots;
mod sweep;

use crate::images::Images;
use layer::{Digest, Error, ErrorKind, LayerId, Result};
use marks::Marks;
use roots::Roots;
use std::collections::{BTreeSet, HashSet};
use std::time::{Duration, Instant};
use store::{Collectable, Collector, Condemned, MAX_CLOCK_SKEW, Stock};

/// What is listed by name; more is only counted.
const MAX_LISTED: usize = 10_000;

/// How to collect.
#[derive(Debug, Clone)]
pub struct CollectOptions {
    /// Look, and change nothing.
    pub dry_run: bool,
    /// How long something must have been without a use.
    pub grace: Duration,
    /// For how long a reference keeps what it pointed to.
    pub history: Duration,
    /// A pack of which a smaller part is in use, in percent, is copied; 0 copies none.
    pub compact_below_percent: u32,
}

impl Default for CollectOptions {
    fn default() -> Self {
        let day = 24 * 3600;
        Self {
            dry_run: false,
            grace: Duration::from_secs(3600),
            history: Duration::from_secs(7 * day),
            compact_below_percent: 50,
        }
    }
}

/// What was found and done. In a dry run, what would be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Environments in use.
    pub live_environments: u64,
    /// Layers in use.
    pub live_layers: u64,
    /// Packs with chunks in use.
    pub live_packs: u64,
    /// Chunks in use, each once.
    pub live_chunks: u64,
    /// Their stored bytes.
    pub live_bytes: u64,
    /// Found without a use for the first time.
    pub condemned: u64,
    /// Condemned before and used again.
    pub reprieved: u64,
    /// Condemned before, whose grace is not over or which something that stays still needs.
    pub waiting: u64,
    /// Deleted.
    pub deleted: u64,
    /// Bytes of what was deleted.
    pub freed_bytes: u64,
    /// Packs whose chunks in use were copied to others.
    pub compacted_packs: u64,
    /// Bytes copied for that.
    pub copied_bytes: u64,
    /// Chunks that layers in use need and no pack has: damage.
    pub missing_chunks: u64,
    /// What was condemned, reprieved and deleted, for people; at most ten thousand lines.
    pub lines: Vec<String>,
}

impl Collected {
    fn note(&mut self, what: &str, thing: &Collectable) {
        if self.lines.len() < MAX_LISTED {
            self.lines.push(format!("{what} {thing}"));
        }
    }
}

/// One run.
struct Run<'a> {
    images: &'a Images,
    options: &'a CollectOptions,
    begin_unix_ns: u64,
    stock: Stock,
    roots: Roots,
    marks: Marks<'a>,
    /// Tars with a framing of a layer that stays.
    tars: HashSet<Digest>,
    /// As the last run left it, minus what is used again, plus what this run adds.
    condemned: Condemned,
    done: Collected,
}

impl Images {
    /// Collects. `Busy` when another collector is at work.
    pub(crate) fn collect(&self, options: &CollectOptions) -> Result<Collected> {
        if options.dry_run {
            return Run::look(self, options)?.report();
        }
        let begin = Instant::now();
        let mut collector = self.store.collect_alone()?;
        let collected = self.collect_alone(options, &mut collector);
        if let Ok(collected) = &collected {
            self.meters.collected(collected, begin);
        }
        match collector.release() {
            Ok(()) => {}
            Err(error) => tracing::warn!("the collector's lease ends by itself: {}", error.chain()),
        }
        collected
    }

    fn collect_alone(
        &self,
        options: &CollectOptions,
        collector: &mut Collector,
    ) -> Result<Collected> {
        // Of a collector that died.
        self.store.clear_doomed()?;
        let mut run = Run::look(self, options)?;
        let compacted = run.compact(collector)?;
        run.condemn(collector, &compacted)?;
        run.sweep(collector)?;
        Ok(run.done)
    }

    /// Takes everything off the list: nothing is condemned any more.
    pub(crate) fn undo_collection(&self) -> Result<u64> {
        let collector = self.store.collect_alone()?;
        let undone = self.store.condemned().and_then(|condemned| {
            self.store.put_condemned(&Condemned::new())?;
            Ok(condemned.len() as u64)
        });
        collector.release()?;
        undone
    }
}

impl<'a> Run<'a> {
    /// Lists what there is, then what is in use.
    fn look(images: &'a Images, options: &'a CollectOptions) -> Result<Self> {
        let begin_unix_ns = images.now();
        let condemned = images.store.condemned()?;
        // Before the roots: what appears later is no candidate.
        let stock = images.store.stock()?;
        images.refresh()?;
        let mut run = Self {
            images,
            options,
            begin_unix_ns,
            stock,
            roots: Roots::new(nanoseconds(options.history)),
            marks: Marks::new(images)?,
            tars: HashSet::new(),
            condemned,
            done: Collected::default(),
        };
        let found = run.roots.read(images)?;
        run.check_clocks()?;
        run.marks.mark(&found)?;
        run.keep_what_stays()?;
        run.look_at_tars();
        Ok(run)
    }

    /// A time from the future means that this clock, or another, is wrong by more than is put up with: then
    /// neither the grace nor the ends of leases can be believed.
    fn check_clocks(&self) -> Result<()> {
        let latest = self.condemned.values().copied().max().unwrap_or(0);
        let ahead = latest.max(self.roots.latest_unix_ns()).saturating_sub(self.images.now());
        if ahead <= nanoseconds(MAX_CLOCK_SKEW) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            format!(
                "the clock of this host is {} s behind what others wrote on the store; set it right, nothing is collected until then",
                ahead / 1_000_000_000
            ),
        ))
    }

    /// What stays, though nothing uses it, keeps what it needs. What that is may have grown since the last call,
    /// by publishes that began.
    fn keep_what_stays(&mut self) -> Result<()> {
        let stays = |what: Collectable| !self.marks.uses(&what) && !self.is_over(&what);
        let environments: Vec<_> = self
            .stock
            .environments
            .iter()
            .filter(|id| stays(Collectable::Environment(**id)))
            .copied()
            .collect();
        let layers: Vec<_> = self
            .stock
            .layers
            .iter()
            .filter(|id| stays(Collectable::Layer(**id)))
            .copied()
            .collect();
        self.marks.keep_environments(&environments)?;
        self.marks.keep_layers(&layers)
    }

    /// Whether the grace of something without a use is over, and no publish that may rely on it goes on.
    fn is_over(&self, what: &Collectable) -> bool {
        let Some(since) = self.condemned.get(what) else { return false };
        // Never what this run has condemned itself, however short the grace.
        *since < self.begin_unix_ns
            && since.saturating_add(nanoseconds(self.options.grace)) <= self.begin_unix_ns
            && !self.roots.may_have_seen(*since)
    }

    /// Whether something is neither in use nor kept by something that stays.
    fn is_free(&self, what: &Collectable) -> bool {
        let is_used = match what {
            Collectable::Tar(tar) => self.tars.contains(tar),
            other => self.marks.uses(other) || self.marks.keeps(other),
        };
        !is_used && self.marks.may_judge(what)
    }

    /// Looks which tars have a framing of a layer that stays.
    fn look_at_tars(&mut self) {
        let stays = |layer: &LayerId| !self.is_free(&Collectable::Layer(*layer));
        let framings = self.stock.framings.iter().filter(|(layer, _)| stays(layer));
        self.tars = framings.flat_map(|(_, of)| of.iter().map(|(tar, _)| *tar)).collect();
    }

    /// What this run deletes, in the order in which nothing loses what it needs before it goes itself.
    fn due(&self) -> Vec<Collectable> {
        self.condemned
            .keys()
            .filter(|what| self.is_over(what) && self.is_free(what))
            .copied()
            .collect()
    }

    /// Updates the list and publishes it where it changed.
    fn condemn(
        &mut self,
        collector: &mut Collector,
        compacted: &BTreeSet<Collectable>,
    ) -> Result<()> {
        let before = self.condemned.clone();
        self.decide(compacted);
        if self.condemned == before {
            return Ok(());
        }
        collector.check()?;
        self.images.store.put_condemned(&self.condemned)
    }

    fn decide(&mut self, compacted: &BTreeSet<Collectable>) {
        let now = self.images.now();
        let all: BTreeSet<Collectable> = self.stock.all().collect();
        let mut list = Condemned::new();
        for what in &all {
            let is_used = match what {
                Collectable::Tar(_) => !self.is_free(what),
                pack if compacted.contains(pack) => false,
                other => self.marks.uses(other),
            };
            match (self.condemned.get(what), is_used) {
                (Some(_), true) => {
                    self.done.reprieved += 1;
                    self.done.note("reprieved", what);
                }
                (Some(since), false) if !compacted.contains(what) => {
                    list.insert(*what, *since);
                }
                (_, false) if self.marks.may_judge(what) => {
                    list.insert(*what, now);
                    self.done.condemned += 1;
                    self.done.note("condemned", what);
                }
                (None, _) | (_, false) => {}
            }
        }
        self.condemned = list;
    }

    /// What a dry run says.
    fn report(mut self) -> Result<Collected> {
        self.decide(&BTreeSet::new());
        let due = self.due();
        for what in &due {
            self.done.note("deleted", what);
            if let Collectable::Pack(id) = what {
                self.done.freed_bytes += self.marks.stored_bytes(id);
            }
        }
        self.done.deleted = due.len() as u64;
        self.count();
        Ok(self.done)
    }

    fn count(&mut self) {
        let done = &mut self.done;
        self.marks.count(done);
        done.waiting = (self.condemned.len() as u64).saturating_sub(done.condemned + done.deleted);
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
