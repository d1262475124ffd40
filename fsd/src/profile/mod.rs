//! Access profiles on a node: recording what a workload touches, and fetching that ahead of the next one.
//!
//! Both are advice. A recording that is lost costs nothing but itself; a profile that is absent, stale or
//! damaged costs time and never a byte.

mod plan;
mod prefetch;
mod recorder;

pub use prefetch::Prefetcher;
pub use recorder::{Recorded, Recorder};

use layer::profile::Profile;
use layer::{EnvId, Result};
use store::{Profiled, Store};

/// Merges a finished recording into the profiles of its environment and of each of its layers.
pub fn keep(store: &Store, recorded: &Recorded) -> Result<()> {
    let profile = Profile::new(vec![recorded.run.clone()]);
    if profile.is_empty() {
        return Ok(());
    }
    if let Some(environment) = recorded.environment {
        store.add_profile(&Profiled::Environment(environment), &profile)?;
    }
    for layer in profile.layers() {
        let part = profile.of_layer(&layer);
        if !part.is_empty() {
            store.add_profile(&Profiled::Layer(layer), &part)?;
        }
    }
    Ok(())
}

/// The id of an environment as the wire has it: absent when there are no bytes.
pub fn environment_of(bytes: &[u8]) -> Result<Option<EnvId>> {
    if bytes.is_empty() { Ok(None) } else { EnvId::from_slice(bytes).map(Some) }
}
