//! Leases: who is using which layers and environments, until when. They protect from collection and end by
//! themselves, so a holder that dies leaves nothing for ever.
//!
//! `leases/<holder>/<random>`. A lease is never changed: to renew is to put a new one and to delete the one
//! before the last, so that a listing that runs meanwhile sees one of them at least.

use crate::checked::{seal, unseal};
use crate::key::Key;
use crate::objects::{Store, random_hex};
use layer::{Context, Digest, Error, ErrorKind, PackId, Result};
use serde::{Deserialize, Serialize};

const VERSION: u32 = 1;
const MAX_LEASE_BYTES: u64 = 2 << 20;
const MAX_HOLDER_BYTES: usize = 128;
/// The most ids in one lease.
pub const MAX_LEASE_IDS: usize = 8192;

/// A claim on layers and environments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lease {
    version: u32,
    /// `<holder>/<random>`: its name.
    pub id: String,
    /// When the claim began, in nanoseconds since 1970: kept when a lease is renewed.
    #[serde(default)]
    pub since_unix_ns: u64,
    /// When it ends by itself, in nanoseconds since 1970.
    pub expires_unix_ns: u64,
    /// Ids of layers and environments that must not be collected. They need not exist yet.
    pub ids: Vec<Digest>,
    /// Packs that must not be collected, whatever is known of them.
    #[serde(default)]
    pub packs: Vec<PackId>,
    /// What it is for, for people.
    pub purpose: String,
}

/// What a lease is to say.
#[derive(Debug, Clone, Default)]
pub struct Claim {
    /// Ids of layers and environments.
    pub ids: Vec<Digest>,
    /// Packs.
    pub packs: Vec<PackId>,
    /// What it is for, for people.
    pub purpose: String,
    /// When the claim began; none is now.
    pub since_unix_ns: Option<u64>,
    /// How long it lasts.
    pub ttl_ms: u64,
}

impl Lease {
    /// Who holds it.
    pub fn holder(&self) -> &str {
        self.id.split('/').next().unwrap_or_default()
    }

    /// Whether it has ended at this time.
    pub fn has_expired(&self, now_unix_ns: u64) -> bool {
        self.expires_unix_ns <= now_unix_ns
    }
}

impl Store {
    /// Writes a lease on `ids` of `ttl_ms` milliseconds. `holder` is a word of `[A-Za-z0-9._+-]`.
    pub fn put_lease(
        &self,
        holder: &str,
        ids: Vec<Digest>,
        purpose: &str,
        ttl_ms: u64,
    ) -> Result<Lease> {
        let claim = Claim { ids, purpose: purpose.to_owned(), ttl_ms, ..Claim::default() };
        self.put_claim(holder, claim)
    }

    /// Writes a lease. `holder` is a word of `[A-Za-z0-9._+-]`.
    pub fn put_claim(&self, holder: &str, claim: Claim) -> Result<Lease> {
        if holder.len() > MAX_HOLDER_BYTES || holder.contains('/') {
            return Err(Error::invalid(format!(
                "holder {holder:?} is no word of at most {MAX_HOLDER_BYTES} bytes"
            )));
        }
        let count = claim.ids.len().max(claim.packs.len());
        if count > MAX_LEASE_IDS {
            return Err(Error::invalid(format!(
                "a lease on {count} ids; the limit is {MAX_LEASE_IDS}"
            )));
        }
        let now = self.now_unix_ns();
        let lease = Lease {
            version: VERSION,
            id: format!("{holder}/{}", random_hex()?),
            since_unix_ns: claim.since_unix_ns.unwrap_or(now),
            expires_unix_ns: now.saturating_add(claim.ttl_ms.saturating_mul(1_000_000)),
            ids: claim.ids,
            packs: claim.packs,
            purpose: claim.purpose.chars().take(256).collect(),
        };
        let bytes = serde_json::to_vec(&lease).map_err(|error| {
            Error::new(ErrorKind::Internal, "encode a lease").with_source(error)
        })?;
        self.put_new(&lease_key(&lease.id)?, &seal(bytes))?;
        Ok(lease)
    }

    /// A lease by its id; it may have expired.
    pub fn read_lease(&self, id: &str) -> Result<Lease> {
        let what = || format!("lease {id}");
        let bytes = self.read_object(&lease_key(id)?, MAX_LEASE_BYTES, what)?;
        let lease: Lease = serde_json::from_slice(unseal(&bytes).context(what)?)
            .map_err(|error| Error::corrupt(what()).with_source(error))?;
        if lease.version != VERSION {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("{}: version {}", what(), lease.version),
            ));
        }
        if lease.id != id {
            return Err(Error::corrupt(format!("{}: the object holds lease {}", what(), lease.id)));
        }
        Ok(lease)
    }

    /// The ids of all leases.
    pub fn list_lease_ids(&self) -> Result<Vec<String>> {
        let names = self.list_names("leases/")?;
        Ok(names
            .iter()
            .filter_map(|name| name.strip_prefix("leases/"))
            .map(str::to_owned)
            .collect())
    }

    /// All leases, the expired ones included.
    pub fn list_leases(&self) -> Result<Vec<Lease>> {
        let mut leases = Vec::new();
        for id in self.list_lease_ids()? {
            match self.read_lease(&id) {
                Ok(lease) => leases.push(lease),
                Err(error) if error.kind() == ErrorKind::NotFound => {} // released meanwhile
                Err(error) => return Err(error),
            }
        }
        Ok(leases)
    }

    /// Ends a lease; that it is gone already is success.
    pub fn delete_lease(&self, id: &str) -> Result<()> {
        self.backend().delete(&lease_key(id)?)
    }
}

fn lease_key(id: &str) -> Result<Key> {
    if id.split('/').count() != 2 {
        return Err(Error::invalid(format!("{id:?} is no lease")));
    }
    Key::new(format!("leases/{id}"))
}
