//! A publish: which chunks are missing, then (after the uploads) the layer and the environment.
//!
//! ```text
//!  open ──▶ missing? ──▶ upload … ──▶ commit layer … ──▶ commit environment ──▶ close
//!   └────────── every step but the last renews the lease when half of it is over
//! ```
//! A publish is a lease on the store and a little memory here; nothing of it is visible to others. Its id is the
//! name of its first lease, so it goes on after a restart of the daemon while that lease lasts.
//!
//! // CRASH: before the layer is named nothing is visible; packs and the location hint are garbage until a repeated
//! publish uses them.

use crate::images::{Images, locked};
use crate::index::{Located, layer_record};
use crate::leases::DEFAULT_TTL_MS;
use layer::chunk::ChunkTable;
use layer::environment::Environment;
use layer::erofs::reader::Reader;
use layer::layer_file::LayerFile;
use layer::{ChunkDigest, Context, Digest, EnvId, Error, ErrorKind, LayerId, PackId, Result};
use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, Mutex};
use store::{Claim, Collectable, Lease};

/// Who holds the leases of publishes.
const HOLDER: &str = "publish";
/// Tries to keep what a layer needs while it is being collected.
const MAX_ATTEMPTS: u32 = 4;
/// Publishes at the same time.
const MAX_PUBLISHES: usize = 4096;

#[derive(Debug)]
pub(crate) struct Publish {
    id: String,
    ttl_ms: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    lease: String,
    /// The lease before, which a listing that runs while this one is put may still rely on.
    before: Option<String>,
    since_unix_ns: u64,
    expires_unix_ns: u64,
    /// Packs that this publish has found on the store.
    sound: HashSet<PackId>,
    /// Packs that were condemned when the publish began: they are used only when a lease of its own keeps them.
    condemned: HashSet<PackId>,
    /// What it has committed or is about to.
    ids: BTreeSet<Digest>,
    /// Packs that it keeps, whatever others know of them.
    packs: BTreeSet<PackId>,
}

impl Publish {
    fn new(lease: &Lease, ttl_ms: u64, condemned: HashSet<PackId>) -> Self {
        let state = State {
            lease: lease.id.clone(),
            before: None,
            since_unix_ns: lease.since_unix_ns,
            expires_unix_ns: lease.expires_unix_ns,
            sound: HashSet::new(),
            condemned,
            ids: lease.ids.iter().copied().collect(),
            packs: lease.packs.iter().copied().collect(),
        };
        Self { id: lease.id.clone(), ttl_ms, state: Mutex::new(state) }
    }

    pub(crate) fn sound(&self) -> HashSet<PackId> {
        locked(&self.state).sound.clone()
    }

    /// Packs whose chunks count as missing.
    pub(crate) fn avoided(&self) -> HashSet<PackId> {
        let state = locked(&self.state);
        state.condemned.iter().filter(|pack| !state.packs.contains(pack)).copied().collect()
    }

    /// The layer that they are of keeps them now, and is kept itself.
    fn forget_packs(&self, packs: &[PackId]) {
        let mut state = locked(&self.state);
        for pack in packs {
            if !state.condemned.contains(pack) {
                state.packs.remove(pack);
            }
        }
    }

    fn has_expired(&self, now: u64) -> bool {
        locked(&self.state).expires_unix_ns <= now
    }
}

/// The id of a publish is the id of its first lease.
fn names_publish(id: &str) -> bool {
    id.split('/').next() == Some(HOLDER)
}

impl Images {
    /// Opens a publish and looks what others have published. Returns its id and when its lease ends.
    pub(crate) fn open_publish(&self, purpose: &str, ttl_ms: u64) -> Result<(String, u64)> {
        let now = self.now();
        {
            let mut publishes = locked(&self.publishes);
            if publishes.len() >= MAX_PUBLISHES {
                publishes.retain(|_, publish| !publish.has_expired(now));
            }
            if publishes.len() >= MAX_PUBLISHES {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!("{MAX_PUBLISHES} publishes are open; try again when some have ended"),
                ));
            }
        }
        let ttl_ms = if ttl_ms == 0 { DEFAULT_TTL_MS } else { ttl_ms };
        let lease = self.put_lease(HOLDER, Vec::new(), purpose, ttl_ms)?;
        // What is condemned later than this is kept, because this publish may have seen it.
        let condemned = self.condemned_packs()?;
        self.refresh()?;
        let publish = Arc::new(Publish::new(&lease, ttl_ms, condemned));
        locked(&self.publishes).insert(lease.id.clone(), publish);
        self.meters.publishes.add(1);
        Ok((lease.id, lease.expires_unix_ns))
    }

    /// The open publish of this id, its lease renewed where that is due.
    pub(crate) fn publish(&self, id: &str) -> Result<Arc<Publish>> {
        let ended = || {
            Error::not_found(format!(
                "publish {id:?} is not open or has ended; open another, what was uploaded is kept"
            ))
        };
        let open = locked(&self.publishes).get(id).cloned();
        let publish = match open {
            Some(publish) => publish,
            None => self.adopt(id)?.ok_or_else(ended)?,
        };
        let now = self.now();
        if publish.has_expired(now) {
            locked(&self.publishes).remove(id);
            return Err(ended());
        }
        self.renew(&publish, now)?;
        Ok(publish)
    }

    /// A publish that was opened before this daemon was started.
    fn adopt(&self, id: &str) -> Result<Option<Arc<Publish>>> {
        if !names_publish(id) {
            return Ok(None);
        }
        let lease = match self.store.read_lease(id) {
            Ok(lease) => lease,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Invalid) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let publish = Arc::new(Publish::new(&lease, DEFAULT_TTL_MS, self.condemned_packs()?));
        Ok(Some(locked(&self.publishes).entry(id.to_owned()).or_insert(publish).clone()))
    }

    pub(crate) fn now(&self) -> u64 {
        self.store.clock().now_unix_ns()
    }

    fn condemned_packs(&self) -> Result<HashSet<PackId>> {
        let pack = |what: Collectable| match what {
            Collectable::Pack(id) => Some(id),
            _ => None,
        };
        Ok(self.store.condemned()?.into_keys().filter_map(pack).collect())
    }

    /// Renews the lease of a publish when half of its time is over.
    pub(crate) fn renew_if_due(&self, publish: &Publish) -> Result<()> {
        self.renew(publish, self.now())
    }

    fn renew(&self, publish: &Publish, now: u64) -> Result<()> {
        let half = publish.ttl_ms.saturating_mul(1_000_000) / 2;
        if locked(&publish.state).expires_unix_ns > now.saturating_add(half) {
            return Ok(());
        }
        self.keep(publish, &[], &[])
    }

    /// Keeps these from being collected until the publish ends. They need not exist yet; whether they are being
    /// deleted at this moment is to be asked afterwards.
    fn keep(&self, publish: &Publish, ids: &[Digest], packs: &[PackId]) -> Result<()> {
        let claim = {
            let mut state = locked(&publish.state);
            state.ids.extend(ids);
            state.packs.extend(packs);
            Claim {
                ids: state.ids.iter().copied().collect(),
                packs: state.packs.iter().copied().collect(),
                purpose: "renewed".to_owned(),
                since_unix_ns: Some(state.since_unix_ns),
                ttl_ms: publish.ttl_ms,
            }
        };
        let lease = self.store.put_claim(HOLDER, claim)?;
        self.meters.leases.add(1);
        let ended = {
            let mut state = locked(&publish.state);
            state.expires_unix_ns = lease.expires_unix_ns;
            let last = std::mem::replace(&mut state.lease, lease.id);
            state.before.replace(last)
        };
        // The first lease names the publish, and ends by itself.
        match ended {
            Some(ended) if ended != publish.id => self.release_lease(&ended),
            _ => Ok(()),
        }
    }

    /// Ends a publish; what it committed stays, what it only uploaded may be collected.
    pub(crate) fn close_publish(&self, id: &str) -> Result<()> {
        let closed = locked(&self.publishes).remove(id);
        if let Some(publish) = closed {
            let (lease, before) = {
                let state = locked(&publish.state);
                (state.lease.clone(), state.before.clone())
            };
            for lease in before.iter().chain([&lease]) {
                self.release_lease(lease)?;
            }
        }
        if names_publish(id) { self.release_lease(id) } else { Ok(()) }
    }

    /// One answer for each digest, in order: is it to be uploaded?
    pub(crate) fn missing_chunks(
        &self,
        publish: &Publish,
        digests: &[ChunkDigest],
    ) -> Result<Vec<bool>> {
        let mut sound = publish.sound();
        let places = self.sound_places(digests, &mut sound)?;
        let avoided = publish.avoided();
        let wanted: BTreeSet<PackId> =
            places.values().map(|place| place.pack).filter(|pack| avoided.contains(pack)).collect();
        let lost = self.reprieve(publish, &wanted)?;
        locked(&publish.state).sound.extend(sound);
        let missing = |digest: &ChunkDigest| match places.get(digest) {
            Some(place) => lost.contains(&place.pack),
            None => *digest != ChunkDigest::ZERO,
        };
        let missing: Vec<bool> = digests.iter().map(missing).collect();
        for (digest, _) in digests.iter().zip(&missing).filter(|(_, missing)| !**missing) {
            if let Some(place) = places.get(digest) {
                self.meters.reused_chunks.add(1);
                self.meters.reused_bytes.add(u64::from(place.stored_bytes));
            }
        }
        Ok(missing)
    }

    /// Keeps condemned packs for this publish. Returns those that it came too late for.
    fn reprieve(&self, publish: &Publish, packs: &BTreeSet<PackId>) -> Result<BTreeSet<PackId>> {
        if packs.is_empty() {
            return Ok(BTreeSet::new());
        }
        self.keep(publish, &[], &packs.iter().copied().collect::<Vec<_>>())?;
        let waited = self.await_deletions(
            |doomed| matches!(doomed, Collectable::Pack(id) if packs.contains(id)),
        )?;
        let mut lost = BTreeSet::new();
        for pack in packs.iter().filter(|_| waited) {
            if !self.store.has_pack(pack)? {
                lost.insert(*pack);
            }
        }
        Ok(lost)
    }

    /// Names a layer all of whose chunks are on the store. Returns its id, and whether it was there already.
    ///
    /// INVARIANT: a layer that has a name has all its chunks: they are kept before it gets the name, and a collector
    /// deletes no pack that a layer needs which it does not delete before.
    pub(crate) fn commit_layer(&self, publish: &Publish, bytes: &[u8]) -> Result<(LayerId, bool)> {
        let file = LayerFile::decode(bytes)
            .context(|| "the layer file is damaged; publish it again".to_owned())?;
        let id = file.id();
        // A node mounts this image: what the kernel would stumble over is never named.
        Reader::parse(&file.metadata)
            .and_then(|image| image.check(file.manifest.data_blocks))
            .context(|| {
                format!("layer {}: its metadata image is damaged; build it again", id.short())
            })?;
        let located = self.kept_chunks(publish, &id, &file.chunk_table)?;
        if self.store.read_locations(&id)?.as_ref() != Some(&located.locations) {
            self.store.put_locations(&id, &located.locations)?;
        }
        // CRASH: up to here nothing is visible.
        let (id, existed) = self.store.put_layer(bytes)?;
        publish.forget_packs(&located.locations.packs);
        self.catalog.put_layer(&layer_record(id, &file.manifest, located.stored_bytes))?;
        self.meters.layers.add(1);
        self.meters.known_layers.add(u64::from(existed));
        Ok((id, existed))
    }

    /// Where the chunks of a layer lie, in packs that this publish keeps.
    fn kept_chunks(&self, publish: &Publish, id: &LayerId, table: &ChunkTable) -> Result<Located> {
        for _ in 0..MAX_ATTEMPTS {
            let located = self.locate(table)?;
            if let Some(first) = located.missing.first() {
                let count = located.missing.len();
                return Err(Error::not_found(format!(
                    "layer {} needs {count} chunks that are not on the store (first {}); upload them and commit again",
                    id.short(),
                    first.short()
                )));
            }
            let packs: BTreeSet<PackId> = located.locations.packs.iter().copied().collect();
            self.keep(publish, &[Digest(id.0)], &located.locations.packs)?;
            let waited = self.await_deletions(|doomed| match doomed {
                Collectable::Pack(pack) => packs.contains(pack),
                Collectable::Layer(layer) => layer == id,
                _ => false,
            })?;
            // They were there before they were kept, and may have been deleted between.
            if !waited && self.all_there(&packs)? {
                return Ok(located);
            }
        }
        Err(Error::new(ErrorKind::Busy, "what the layer needs is being collected; try again"))
    }

    fn all_there(&self, packs: &BTreeSet<PackId>) -> Result<bool> {
        for pack in packs {
            if !self.store.has_pack(pack)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Names an environment all of whose layers exist. Returns its id, and whether it was there already.
    pub(crate) fn commit_environment(
        &self,
        publish: &Publish,
        document: &[u8],
    ) -> Result<(EnvId, bool)> {
        let environment = Environment::decode(document).map_err(|error| {
            Error::invalid("the environment document is not one; publish it again")
                .with_source(error)
        })?;
        let id = environment.id();
        let mut ids: Vec<Digest> = environment.layers.iter().map(|layer| Digest(layer.0)).collect();
        ids.push(Digest(id.0));
        ids.extend(environment.image);
        self.keep(publish, &ids, &[])?;
        self.await_deletions(|doomed| match doomed {
            Collectable::Environment(env) => *env == id,
            Collectable::Layer(layer) => environment.layers.contains(layer),
            Collectable::Image(image) => environment.image == Some(*image),
            Collectable::Pack(_) | Collectable::Tar(_) => false,
        })?;
        let mut seen = HashSet::new();
        for layer in environment.layers.iter().filter(|layer| seen.insert(**layer)) {
            if !self.store.has_layer(layer)? {
                return Err(Error::not_found(format!(
                    "the environment needs layer {layer}, which is not on the store; publish the layer first"
                )));
            }
        }
        let put = self.store.put_environment(document)?;
        self.catalog.put_environment(&environment)?;
        self.meters.environments.add(1);
        Ok(put)
    }

    /// Writes a fresh location hint. Returns its number, or 0 and what is missing.
    pub(crate) fn write_locations(&self, id: &LayerId) -> Result<(u64, Vec<ChunkDigest>)> {
        let (_, table) = self.store.read_layer_tables(id)?;
        let located = self.locate(&table)?;
        if !located.missing.is_empty() {
            return Ok((0, located.missing));
        }
        Ok((self.store.put_locations(id, &located.locations)?, Vec::new()))
    }
}
