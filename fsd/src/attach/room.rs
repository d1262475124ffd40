//! Making room in the node cache: what was used longest ago goes first, a chunk group or a whole layer.
//!
//! | layer | what goes |
//! |---|---|
//! | pinned | nothing |
//! | served, and fsd answers its readers | groups of chunks |
//! | served, and the kernel reads its file | nothing: it reads after it was let go, without a barrier |
//! | served, and once exported as plain files | nothing: a machine may have them mapped |
//! | not served | the whole folder, by the time of its last use |
//!
//! Locking: one eviction at a time; a layer whose lock is taken (it is being attached) is passed over.

use super::{Attachments, Live, lock};
use crate::cache::CachedLayer;
use crate::fetch::MakeRoom;
use layer::{ChunkDigest, Error, ErrorKind, LayerId, Result};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// What is freed at least when the disk is full: more than one chunk, so that not every fill evicts.
const MIN_FREED: u64 = 8 << 20;
/// After a search that freed nothing the next one waits this long.
const BARREN: Duration = Duration::from_millis(200);

/// Something that can be evicted.
enum Victim {
    Layer(LayerId),
    Group(LayerId, Vec<usize>),
}

impl Live {
    /// Whether every read of the data file comes through fsd, so that parts of it may be dropped.
    pub(super) fn may_lose_chunks(&self) -> bool {
        self.plane.as_ref().is_none_or(|plane| plane.answers_reads(&self.served))
            && !self.served.fetch().cached().is_exposed()
    }
}

impl Attachments {
    /// Evicts until so many bytes are free or nothing is left to evict. Answers the bytes freed.
    fn free(&self, bytes: u64) -> Result<u64> {
        let _one = lock(&self.evicting);
        let mut victims = self.victims()?;
        victims.sort_by_key(|(used, _, _)| *used);
        let mut groups: BTreeMap<LayerId, Vec<usize>> = BTreeMap::new();
        let (mut freed, mut planned) = (0, 0);
        for (_, size, victim) in victims {
            if freed + planned >= bytes {
                break;
            }
            match victim {
                Victim::Layer(id) => freed += self.free_layer(&id),
                Victim::Group(id, chunks) => {
                    planned += size;
                    groups.entry(id).or_default().extend(chunks);
                }
            }
        }
        for (id, mut chunks) in groups {
            chunks.sort_unstable();
            freed += self.free_chunks(&id, &chunks);
        }
        self.evicted_bytes.fetch_add(freed, Relaxed);
        self.parts.cache.space().forget();
        tracing::info!(wanted = bytes, freed, "evicted");
        Ok(freed)
    }

    /// Everything that can go: when it was used last, and its bytes.
    fn victims(&self) -> Result<Vec<(u64, u64, Victim)>> {
        let mut victims = Vec::new();
        for resting in self.parts.cache.resting()? {
            if self.parts.cache.pins().contains(&resting.id) {
                continue;
            }
            let entry = self.entry(&resting.id);
            let Ok(state) = entry.try_lock() else { continue };
            match state.as_ref() {
                None => {
                    victims.push((resting.used_ms, resting.bytes, Victim::Layer(resting.id)));
                }
                Some(live) if live.may_lose_chunks() => {
                    let groups = live.served.fetch().cached().groups().into_iter();
                    victims.extend(groups.map(|(used, chunks, bytes)| {
                        (used, bytes, Victim::Group(resting.id, chunks))
                    }));
                }
                Some(_) => {}
            }
        }
        Ok(victims)
    }

    fn free_layer(&self, id: &LayerId) -> u64 {
        let entry = self.entry(id);
        let Ok(state) = entry.try_lock() else { return 0 };
        if state.is_some() {
            return 0;
        }
        match self.parts.cache.remove(id) {
            Ok(freed) => {
                tracing::info!(layer = %id, freed, "evicted a layer");
                freed
            }
            Err(error) => {
                tracing::error!(layer = %id, error = %error.chain(), "evict a layer");
                0
            }
        }
    }

    fn free_chunks(&self, id: &LayerId, chunks: &[usize]) -> u64 {
        let entry = self.entry(id);
        let Ok(state) = entry.try_lock() else { return 0 };
        // INVARIANT: the lock is held until the blocks are gone, so that no plane whose kernel reads the
        // file by itself begins to serve it meanwhile.
        let Some(live) = state.as_ref().filter(|live| live.may_lose_chunks()) else { return 0 };
        live.served.fetch().cached().evict(chunks).unwrap_or_else(|error| {
            tracing::error!(layer = %id, error = %error.chain(), "evict chunks");
            0
        })
    }

    /// Brings the cache below its limit, as far as that is possible.
    pub fn enforce_limit(&self) -> Result<()> {
        let space = self.parts.cache.space();
        let Some(limit) = space.limit() else { return Ok(()) };
        let used = self.parts.cache.allocated_bytes()?;
        if used > limit.high_bytes {
            self.free(used - limit.low_bytes)?;
        }
        let left = self.parts.cache.allocated_bytes()?;
        space.set_used(left);
        if left > limit.high_bytes {
            tracing::warn!(bytes = left, limit = limit.high_bytes, "all of the cache is in use");
        }
        Ok(())
    }

    /// Bytes evicted since the start.
    pub fn evicted_bytes(&self) -> u64 {
        self.evicted_bytes.load(Relaxed)
    }

    /// Exempts a layer from eviction, on the node or not yet, or ends that.
    pub fn set_pinned(&self, id: &LayerId, pinned: bool) -> Result<bool> {
        self.parts.cache.pins().set(id, pinned)
    }

    /// Opens a layer of the cache; on a full disk, something else goes first.
    pub(super) fn open_cached(&self, id: &LayerId, quiet: Option<OwnedFd>) -> Result<CachedLayer> {
        let mut opened = self.parts.cache.open_layer(id, &self.parts.store, quiet);
        while opened.as_ref().is_err_and(|error| error.kind() == ErrorKind::NoSpace)
            && self.make_room()
        {
            opened = self.parts.cache.open_layer(id, &self.parts.store, None);
        }
        opened
    }

    /// Drops a layer that nobody uses from the cache. Answers the bytes freed.
    pub fn evict(&self, id: &LayerId) -> Result<u64> {
        let entry = self.entry(id);
        let mut state = lock(&entry);
        self.release_if_unused(&mut state)?;
        if state.is_some() {
            return Err(Error::new(ErrorKind::Busy, format!("layer {id} is in use")));
        }
        if self.parts.cache.pins().contains(id) {
            return Err(Error::new(ErrorKind::Busy, format!("layer {id} is pinned")));
        }
        let freed = self.parts.cache.remove(id)?;
        self.evicted_bytes.fetch_add(freed, Relaxed);
        Ok(freed)
    }
}

impl MakeRoom for Attachments {
    fn make_room(&self) -> bool {
        let mut barren = lock(&self.barren_until);
        if barren.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        let freed = self.free(MIN_FREED).unwrap_or_else(|error| {
            tracing::error!(error = %error.chain(), "look for something to evict");
            0
        });
        *barren = (freed == 0).then(|| Instant::now() + BARREN);
        freed > 0
    }

    fn dormant(&self, digest: &ChunkDigest) -> Option<(Arc<CachedLayer>, usize)> {
        let cache = &self.parts.cache;
        cache.shelf().find(digest).into_iter().find_map(|(id, chunk)| {
            let entry = self.entry(&id);
            // Nobody may begin to serve it while it is opened, and an attach is not waited for.
            let state = match entry.try_lock() {
                Ok(state) => state,
                Err(std::sync::TryLockError::Poisoned(error)) => PoisonError::into_inner(error),
                Err(std::sync::TryLockError::WouldBlock) => return None,
            };
            let found = match state.as_ref() {
                Some(live) => Arc::clone(live.served.fetch().cached()),
                None => cache.open_dormant(&id).ok()?,
            };
            found.has(chunk).then_some((found, chunk))
        })
    }
}
