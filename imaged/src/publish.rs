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
use crate::index::layer_record;
use crate::leases::DEFAULT_TTL_MS;
use layer::environment::Environment;
use layer::erofs::reader::Reader;
use layer::layer_file::LayerFile;
use layer::{ChunkDigest, Context, EnvId, Error, ErrorKind, LayerId, PackId, Result};
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use store::now_unix_ns;

/// Who holds the leases of publishes.
const HOLDER: &str = "publish";
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
    expires_unix_ns: u64,
    /// Packs that this publish has found on the store.
    sound: HashSet<PackId>,
}

impl Publish {
    fn new(id: &str, ttl_ms: u64, expires_unix_ns: u64) -> Self {
        let state = State { lease: id.to_owned(), expires_unix_ns, sound: HashSet::new() };
        Self { id: id.to_owned(), ttl_ms, state: Mutex::new(state) }
    }

    pub(crate) fn sound(&self) -> HashSet<PackId> {
        locked(&self.state).sound.clone()
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
        let now = now_unix_ns();
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
        self.refresh()?;
        let publish = Arc::new(Publish::new(&lease.id, ttl_ms, lease.expires_unix_ns));
        locked(&self.publishes).insert(lease.id.clone(), publish);
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
        let now = now_unix_ns();
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
        let expires_unix_ns = match self.store.read_lease(id) {
            Ok(lease) => lease.expires_unix_ns,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Invalid) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let publish = Arc::new(Publish::new(id, DEFAULT_TTL_MS, expires_unix_ns));
        Ok(Some(locked(&self.publishes).entry(id.to_owned()).or_insert(publish).clone()))
    }

    fn renew(&self, publish: &Publish, now: u64) -> Result<()> {
        let half = publish.ttl_ms.saturating_mul(1_000_000) / 2;
        if locked(&publish.state).expires_unix_ns > now.saturating_add(half) {
            return Ok(());
        }
        let lease = self.put_lease(HOLDER, Vec::new(), "renewed", publish.ttl_ms)?;
        let before = {
            let mut state = locked(&publish.state);
            state.expires_unix_ns = lease.expires_unix_ns;
            std::mem::replace(&mut state.lease, lease.id)
        };
        // The first lease names the publish, and ends by itself.
        if before == publish.id { Ok(()) } else { self.release_lease(&before) }
    }

    /// Ends a publish; what it committed stays, what it only uploaded may be collected.
    pub(crate) fn close_publish(&self, id: &str) -> Result<()> {
        let closed = locked(&self.publishes).remove(id);
        if let Some(publish) = closed {
            let lease = locked(&publish.state).lease.clone();
            self.release_lease(&lease)?;
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
        locked(&publish.state).sound.extend(sound);
        let missing =
            |digest: &ChunkDigest| *digest != ChunkDigest::ZERO && !places.contains_key(digest);
        Ok(digests.iter().map(missing).collect())
    }

    /// Names a layer all of whose chunks are on the store. Returns its id, and whether it was there already.
    pub(crate) fn commit_layer(&self, bytes: &[u8]) -> Result<(LayerId, bool)> {
        let file = LayerFile::decode(bytes)
            .context(|| "the layer file is damaged; publish it again".to_owned())?;
        let id = file.id();
        // A node mounts this image: what the kernel would stumble over is never named.
        Reader::parse(&file.metadata)
            .and_then(|image| image.check(file.manifest.data_blocks))
            .context(|| {
                format!("layer {}: its metadata image is damaged; build it again", id.short())
            })?;
        let located = self.locate(&file.chunk_table)?;
        if let Some(first) = located.missing.first() {
            let count = located.missing.len();
            return Err(Error::not_found(format!(
                "layer {} needs {count} chunks that are not on the store (first {}); upload them and commit again",
                id.short(),
                first.short()
            )));
        }
        if self.store.read_locations(&id)?.as_ref() != Some(&located.locations) {
            self.store.put_locations(&id, &located.locations)?;
        }
        // CRASH: up to here nothing is visible.
        let (id, existed) = self.store.put_layer(bytes)?;
        self.catalog.put_layer(&layer_record(id, &file.manifest, located.stored_bytes))?;
        Ok((id, existed))
    }

    /// Names an environment all of whose layers exist. Returns its id, and whether it was there already.
    pub(crate) fn commit_environment(&self, document: &[u8]) -> Result<(EnvId, bool)> {
        let environment = Environment::decode(document).map_err(|error| {
            Error::invalid("the environment document is not one; publish it again")
                .with_source(error)
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
