//! One store, four daemons on it, and what must hold after every history.

use super::actors::{self, Outcome, Part};
use super::content::Content;
use super::stage::{Dice, Stage, Stepped};
use crate::gc::CollectOptions;
use crate::images::{Images, locked};
use layer::reference::Target;
use layer::{ChunkDigest, EnvId, LayerId};
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;
use store::backend::memory::Memory;
use store::codec::verify_chunk;
use store::{Clock, Store};

const PROCESSES: usize = 4;

/// What happened over all worlds.
#[derive(Debug, Default)]
pub(super) struct Tally {
    histories: u64,
    kills: u64,
    published: u64,
    named: u64,
    refused: u64,
    mounted: u64,
    collections: u64,
    deleted: u64,
    reprieved: u64,
    compacted: u64,
}

impl Tally {
    pub(super) fn add(&mut self, other: &Self) {
        self.histories += other.histories;
        self.kills += other.kills;
        self.published += other.published;
        self.named += other.named;
        self.refused += other.refused;
        self.mounted += other.mounted;
        self.collections += other.collections;
        self.deleted += other.deleted;
        self.reprieved += other.reprieved;
        self.compacted += other.compacted;
    }

    /// A test of which nothing happened would show nothing.
    pub(super) fn assert_everything_happened(&self) {
        let Self { histories, kills, published, named, refused, mounted, .. } = *self;
        assert!(histories >= 2000 && kills > 500 && published > 1000 && named > 1000, "{self:?}");
        assert!(refused > 100 && mounted > 100 && self.collections > 500, "{self:?}");
        assert!(self.deleted > 1000 && self.reprieved > 100 && self.compacted > 100, "{self:?}");
    }
}

pub(super) struct World {
    dice: Dice,
    stage: Arc<Stage>,
    memory: Memory,
    content: Content,
    daemons: Vec<(Images, tempfile::TempDir)>,
    /// Leases of mounts that go on.
    mounts: Vec<(LayerId, String)>,
    tally: Tally,
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let stage = Stage::new(PROCESSES);
        let memory = Memory::new();
        let content = Content::new(&mut dice);
        let mut world = Self {
            dice,
            stage,
            memory,
            content,
            daemons: Vec::new(),
            mounts: Vec::new(),
            tally: Tally::default(),
        };
        for process in 0..PROCESSES {
            let daemon = world.daemon(process);
            world.daemons.push(daemon);
        }
        world
    }

    /// A daemon with an empty catalog.
    fn daemon(&self, process: usize) -> (Images, tempfile::TempDir) {
        let backend =
            Stepped { inner: self.memory.clone(), process, stage: Arc::clone(&self.stage) };
        let store = Store::open(Arc::new(backend)).unwrap().with_clock(self.stage.clock.clone());
        let directory = tempfile::tempdir().unwrap();
        (Images::open(Arc::new(store), &directory.path().join("catalog")).unwrap(), directory)
    }

    /// The store as it is, without the stage.
    fn truth(&self) -> Store {
        let store = Store::open(Arc::new(self.memory.clone())).unwrap();
        store.with_clock(self.stage.clock.clone())
    }

    /// Everybody acts at once; then everything is looked at.
    pub(super) fn history(&mut self) {
        let parts = self.cast();
        let seeds: Vec<u64> = parts.iter().map(|_| self.dice.next()).collect();
        let acting: Vec<usize> = parts.iter().map(|(process, _)| *process).collect();
        let mut kills = Vec::new();
        for process in &acting {
            if self.dice.one_in(4) {
                kills.push((*process, 1 + self.dice.next() % 80));
            }
        }
        self.stage.open(self.dice.next(), &acting, &kills);
        let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
            let running: Vec<_> = parts
                .iter()
                .zip(seeds)
                .map(|(&(process, part), seed)| {
                    let (images, content, stage) =
                        (&self.daemons[process].0, &self.content, &self.stage);
                    scope.spawn(move || {
                        let leave = Leave(stage, process);
                        let outcome = actors::act(part, images, content, &mut Dice::new(seed));
                        drop(leave);
                        outcome
                    })
                })
                .collect();
            running.into_iter().map(|actor| actor.join().unwrap()).collect()
        });
        let dead = self.stage.close();
        self.tally.histories += 1;
        self.tally.kills += dead.len() as u64;
        for outcome in outcomes {
            self.note(outcome);
        }
        self.restart(&dead);
        self.check();
        self.pass_time();
    }

    /// Who does what: each process one thing, and at most one of them nothing.
    fn cast(&mut self) -> Vec<(usize, Part)> {
        let mut parts =
            vec![(0, Part::Publish), (1, Part::Publish), (2, Part::Mount), (3, Part::Collect)];
        if self.dice.one_in(2) {
            parts[2].1 = Part::Name;
        }
        if self.dice.one_in(4) {
            parts[1].1 = Part::Collect;
        }
        if self.dice.one_in(4) {
            parts[0].1 = Part::Name;
        }
        if self.dice.one_in(3) {
            let leaves = self.dice.below(parts.len());
            parts.remove(leaves);
        }
        parts
    }

    fn note(&mut self, outcome: Outcome) {
        self.tally.published += outcome.published;
        self.tally.named += outcome.named;
        self.tally.refused += outcome.refused;
        self.tally.mounted += outcome.mounted.len() as u64;
        self.mounts.extend(outcome.mounted);
        if let Some(collected) = outcome.collected {
            self.tally.collections += 1;
            self.tally.deleted += collected.deleted;
            self.tally.reprieved += collected.reprieved;
            self.tally.compacted += collected.compacted_packs;
            assert_eq!(collected.missing_chunks, 0, "{collected:?}");
        }
    }

    /// A killed process forgets what was in its memory; now and then the catalog is lost too.
    fn restart(&mut self, dead: &[usize]) {
        for process in dead {
            if self.dice.one_in(12) {
                self.daemons[*process] = self.daemon(*process);
            } else {
                locked(&self.daemons[*process].0.publishes).clear();
            }
        }
    }

    fn pass_time(&mut self) {
        let minutes = [0, 1, 5, 40, 70, 150][self.dice.below(6)];
        self.stage.clock.advance(Duration::from_secs(60 * minutes));
        let store = self.truth();
        for (layer, lease) in std::mem::take(&mut self.mounts) {
            if self.dice.one_in(5) {
                store.delete_lease(&lease).unwrap();
            } else {
                self.mounts.push((layer, lease));
            }
        }
    }

    /// Everything that has a name is complete; what leases keep is there.
    fn check(&mut self) {
        let store = self.truth();
        let chunks = all_chunks(&store);
        for id in store.list_layers().unwrap() {
            let (_, table) = store.read_layer_tables(&id).unwrap();
            for chunk in table.chunks() {
                assert!(chunks.contains(&chunk.digest), "layer {id} lacks a chunk");
            }
        }
        let layers: BTreeSet<LayerId> = store.list_layers().unwrap().into_iter().collect();
        for id in store.list_environments().unwrap() {
            for layer in store.read_environment(&id).unwrap().layers {
                assert!(layers.contains(&layer), "environment {id} lacks layer {layer}");
            }
        }
        for (reference, number) in store.list_references(None).unwrap() {
            match store.read_entry(&reference, number).unwrap().target {
                Some(Target::Layer(id)) => assert!(layers.contains(&id), "{reference} dangles"),
                Some(Target::Environment(id)) => {
                    assert!(store.has_environment(&id).unwrap(), "{reference} dangles");
                }
                None => {}
            }
        }
        let now = self.stage.clock.now_unix_ns();
        self.mounts.retain(|(_, lease)| {
            store.read_lease(lease).is_ok_and(|lease| !lease.has_expired(now))
        });
        for (layer, lease) in &self.mounts {
            assert!(layers.contains(layer), "layer {layer} went while {lease} kept it");
        }
    }

    /// Nothing happens any more: what nothing uses goes away, and nothing else.
    pub(super) fn finish(mut self) -> Tally {
        self.stage.clock.advance(Duration::from_secs(24 * 3600));
        let options = CollectOptions {
            grace: Duration::from_secs(60),
            history: Duration::ZERO,
            ..CollectOptions::default()
        };
        for _ in 0..3 {
            self.daemons[3].0.collect(&options).unwrap();
            self.stage.clock.advance(Duration::from_secs(600));
        }
        self.check();
        let store = self.truth();
        let (mut layers, mut environments) = (BTreeSet::new(), BTreeSet::<EnvId>::new());
        for (reference, number) in store.list_references(None).unwrap() {
            match store.read_entry(&reference, number).unwrap().target {
                Some(Target::Layer(id)) => _ = layers.insert(id),
                Some(Target::Environment(id)) => {
                    environments.insert(id);
                    layers.extend(&self.content.environment(&id).unwrap().layers);
                }
                None => {}
            }
        }
        assert_eq!(store.list_layers().unwrap(), Vec::from_iter(layers.clone()));
        assert_eq!(store.list_environments().unwrap(), Vec::from_iter(environments));
        let needed: HashSet<ChunkDigest> = layers
            .iter()
            .flat_map(|id| store.read_layer_tables(id).unwrap().1.chunks().to_vec())
            .map(|chunk| chunk.digest)
            .collect();
        let stock = store.stock().unwrap();
        assert_eq!(stock.remains, BTreeSet::new());
        for pack in &stock.packs {
            let entries = store.read_pack_footer(pack).unwrap();
            assert!(
                entries.iter().any(|entry| needed.contains(&entry.digest)),
                "pack {pack} stays"
            );
        }
        assert!(store.condemned().unwrap().is_empty() && store.doomed().unwrap().is_empty());
        self.check_bytes(&store);
        std::mem::take(&mut self.tally)
    }

    /// Every byte of what is left, by its hints.
    fn check_bytes(&self, store: &Store) {
        for id in store.list_layers().unwrap() {
            let made = self.content.layers.iter().find(|made| made.id == id).unwrap();
            self.daemons[0].0.write_locations(&id).unwrap();
            let locations = store.read_locations(&id).unwrap().unwrap();
            for (at, (digest, plain)) in made.chunks.iter().enumerate() {
                let (pack, place) = locations.get(at).unwrap();
                let mut payload = vec![0; place.stored_bytes as usize];
                store.read_pack(&pack, place.offset, &mut payload).unwrap();
                verify_chunk(&payload, place.codec, plain.len() as u32, digest).unwrap();
            }
        }
    }
}

/// Gives the baton on, also after a failure.
struct Leave<'a>(&'a Stage, usize);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.leave(self.1);
    }
}

fn all_chunks(store: &Store) -> HashSet<ChunkDigest> {
    let packs = store.list_packs().unwrap();
    let entries = packs.iter().flat_map(|pack| store.read_pack_footer(pack).unwrap());
    entries.map(|entry| entry.digest).collect()
}
