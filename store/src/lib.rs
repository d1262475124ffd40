//! The store: immutable objects in a POSIX directory, on 3FS, in a bucket of an S3 server or in memory.
//!
//! [`backend`] moves bytes and knows names; [`Store`] knows what the objects are and checks every byte that
//! it hands out against a digest. All calls block: daemons call them from threads that may.
#![forbid(unsafe_code)]

pub mod backend;
mod checked;
mod clock;
pub mod codec;
mod collectable;
mod collector;
mod condemned;
mod framings;
mod key;
mod keys;
mod leases;
mod locations;
mod number;
mod objects;
mod pack;
mod profiles;
mod references;
mod signatures;
mod spaces;
mod trust;
mod url;
mod writer;

pub use backend::{Backend, Upload};
pub use clock::{Clock, HostClock, now_unix_ns};
pub use collectable::{Framings, Stock};
pub use collector::{Collector, MAX_CLOCK_SKEW};
pub use condemned::{Collectable, Condemned};
pub use framings::{Kept, KeptReader, MAX_IMAGE_BYTES};
pub use key::Key;
pub use keys::{MAX_TRUSTED_KEYS, SecretKey, TrustedKeys, public_keys, public_pem};
pub use leases::{Claim, Lease, MAX_LEASE_IDS};
pub use objects::{MAX_LAYER_FILE_BYTES, Store};
pub use pack::{PackWriter, SealedPack};
pub use profiles::Profiled;
pub use signatures::{named as signature_named, signatures_of};
pub use spaces::{Space, SpaceMade, wrong_length};
pub use trust::Trust;
pub use url::{open, usrbio};
