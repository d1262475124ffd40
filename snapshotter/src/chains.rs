//! Which layer stands for a ChainID: what the node knows of the container images that were pulled.
//!
//! containerd asks by ChainID alone, a digest over the tars of a stack. The environments that a pull makes name
//! their image, and each of their layers says which tar it was made of, so the ChainIDs of an environment can be
//! computed. Environments that were put together by hand are not believed: one tar over two stacks can become two
//! layers.
//!
//! What was learned stays in memory; only environments that are new since are asked for. Locking: one asynchronous
//! lock, so that one search at a time asks the node.

use crate::labels::chain_id;
use crate::record::Shown;
use layer::environment::Environment;
use layer::{EnvId, ErrorKind, LayerId, Result};
use proto::status::from_status;
use proto::v1::images_client::ImagesClient;
use proto::v1::reference_entry::Target;
use proto::v1::{ListReferencesRequest, ResolveRequest, ResolveResponse};
use std::collections::{HashMap, HashSet};
use tokio::sync::Mutex;
use tonic::transport::Channel;

/// The annotation of a layer that says which tar it was made of.
const DIFF_ID: &str = "oci.diff_id";
/// The most ChainIDs that are remembered; then all are forgotten.
const MAX_CHAINS: usize = 1 << 18;
/// The most environments that are remembered.
const MAX_ENVIRONMENTS: usize = 1 << 20;
/// The most environments that one question looks at, the newest first; the next one goes on.
const MAX_AT_ONCE: usize = 4096;

#[derive(Debug, Default)]
struct Known {
    environments: HashSet<EnvId>,
    chains: HashMap<String, Shown>,
}

/// What is known of ChainIDs.
#[derive(Debug)]
pub struct Chains {
    client: ImagesClient<Channel>,
    known: Mutex<Known>,
}

impl Chains {
    /// Asks the node behind this channel.
    pub fn new(channel: Channel) -> Self {
        Self { client: ImagesClient::new(channel), known: Mutex::default() }
    }

    /// The layer of a ChainID.
    pub async fn find(&self, chain: &str) -> Result<Option<Shown>> {
        let mut known = self.known.lock().await;
        if let Some(shown) = known.chains.get(chain) {
            return Ok(Some(shown.clone()));
        }
        self.learn(&mut known).await?;
        Ok(known.chains.get(chain).cloned())
    }

    /// Forgets what turned out to be gone.
    pub async fn forget(&self, chain: &str) {
        let mut known = self.known.lock().await;
        if let Some(environment) = known.chains.remove(chain).and_then(|shown| shown.environment) {
            known.environments.remove(&environment);
        }
    }

    async fn learn(&self, known: &mut Known) -> Result<()> {
        if known.chains.len() > MAX_CHAINS || known.environments.len() > MAX_ENVIRONMENTS {
            *known = Known::default();
        }
        let mut client = self.client.clone();
        let request = ListReferencesRequest { kind: "env".to_owned() };
        let listed = client.list_references(request).await.map_err(from_status)?;
        let mut listed = listed.into_inner();
        let mut new = Vec::new();
        while let Some(entry) = listed.message().await.map_err(from_status)? {
            if let Some(Target::EnvId(id)) = &entry.target {
                let id = EnvId::from_slice(id)?;
                if !known.environments.contains(&id) {
                    new.push((entry.time_unix_ns, id));
                }
            }
        }
        new.sort_unstable_by(|one, other| other.cmp(one));
        new.truncate(MAX_AT_ONCE);
        for (_, id) in new {
            let request = ResolveRequest { name: id.to_string() };
            match client.resolve(request).await.map_err(from_status) {
                Ok(answer) => known.chains.extend(chains_of(&id, answer.get_ref())?),
                // It was untagged and collected meanwhile, or is damaged; the others are of use.
                Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error),
                Err(error) => tracing::warn!(error = error.chain(), "environment {id}"),
            }
            known.environments.insert(id);
        }
        Ok(())
    }
}

/// The ChainIDs of an environment that came from an image, as far up as its layers are those of the image.
fn chains_of(id: &EnvId, answer: &ResolveResponse) -> Result<Vec<(String, Shown)>> {
    let mut chains = Vec::new();
    if Environment::decode(&answer.environment_document)?.image.is_none() {
        return Ok(chains);
    }
    let mut chain = String::new();
    for layer in &answer.layers {
        let Some(diff_id) = layer.annotations.get(DIFF_ID) else { break };
        chain = chain_id(&chain, diff_id);
        let layer = LayerId::from_slice(&layer.layer_id)?;
        chains.push((chain.clone(), Shown { layer, environment: Some(*id) }));
    }
    Ok(chains)
}
