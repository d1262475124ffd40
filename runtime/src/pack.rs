//! pack_diff: what a sandbox wrote becomes a layer, and an environment that has it on top.
//!
//! The sandbox is frozen while its writable layer is read and goes on in every case, also when the task
//! that packs is dropped. CRASH: names move last, so a pack that dies leaves nothing that can be seen.

use crate::backends::Instance;
use crate::node::Node;
use crate::record::{Record, State};
use crate::sandbox::Sandbox;
use builder::publish::{ImagesPublisher, Publisher};
use builder::{BuildOptions, BuiltLayer, DiffOptions, LowerLayers, Silent};
use layer::chunk::ChunkTable;
use layer::environment::Environment;
use layer::layer_file::LayerFile;
use layer::manifest::LayerKind;
use layer::reference::{RefKind, Reference};
use layer::tree::Tree;
use layer::{EnvId, Error, ErrorKind, LayerId, Result};
use proto::status::from_status;
use proto::v1;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long processes may take to stop.
const FREEZE_DEADLINE: Duration = Duration::from_secs(5);

/// What never belongs into an environment that others start from.
const STANDARD_EXCLUSIONS: [&str; 12] = [
    "**/.bash_history",
    "**/.sh_history",
    "**/.zsh_history",
    "**/.ash_history",
    "**/.python_history",
    "**/.node_repl_history",
    "**/.lesshst",
    "**/.viminfo",
    "**/.netrc",
    "**/.git-credentials",
    "**/.aws/credentials",
    "**/.docker/config.json",
];

/// Reads layer files of layers that are published. Asked only when a directory was renamed in a sandbox.
pub trait LayerFiles: Send + Sync + std::fmt::Debug {
    /// The verified file of one layer.
    fn layer_file(&self, layer: &LayerId) -> Result<LayerFile>;
}

/// Packs and names.
pub async fn pack_diff(
    node: &Arc<Node>,
    sandbox: &Arc<Sandbox>,
    request: v1::PackDiffRequest,
) -> Result<v1::PackDiffResponse> {
    let name = |kind| reference(kind, &request.name);
    let (layer_name, env_name) = (name(RefKind::Diff)?, name(RefKind::Env)?);
    let _use = sandbox.activity.begin();
    let _turn = sandbox.turn.lock().await;
    let state = sandbox.state();
    let instance = sandbox.instance().filter(|_| matches!(state, State::Running | State::Paused));
    let instance = instance.ok_or_else(|| {
        Error::new(ErrorKind::Busy, format!("sandbox {} is not running", sandbox.id()))
    })?;
    let (node, record) = (Arc::clone(node), sandbox.record());
    let thaw = if state == State::Running {
        instance.freeze(FREEZE_DEADLINE).await?;
        Some(Thaw::after(&instance))
    } else {
        None
    };
    let packing = Packing { node: Arc::clone(&node), upper: instance.upper(), record, request };
    let packed = tokio::task::spawn_blocking(move || packing.run(thaw)).await;
    let packed = packed.map_err(|error| {
        Error::new(ErrorKind::Internal, "packing panicked").with_source(error)
    })??;
    let layer_id = packed.layer.layer_id.as_bytes().to_vec();
    let env_id = packed.env_id.as_bytes().to_vec();
    use v1::tag_request::Target;
    tag(&node, &layer_name, Target::LayerId(layer_id.clone())).await?;
    tag(&node, &env_name, Target::EnvId(env_id.clone())).await?;
    Ok(v1::PackDiffResponse {
        layer_id,
        env_id,
        frozen_us: u64::try_from(packed.frozen.as_micros()).unwrap_or(u64::MAX),
        files: packed.layer.manifest.files,
        plain_bytes: packed.layer.manifest.plain_bytes,
        new_bytes: packed.layer.new_stored_bytes,
    })
}

/// `NAME` or `NAME:TAG`, also with the prefix of a diff or an environment before it.
fn reference(kind: RefKind, name: &str) -> Result<Reference> {
    let bare = name.strip_prefix("env/").or_else(|| name.strip_prefix("diff/")).unwrap_or(name);
    format!("{}/{bare}", kind.word()).parse()
}

async fn tag(node: &Node, reference: &Reference, target: v1::tag_request::Target) -> Result<()> {
    let request = v1::TagRequest {
        reference: reference.to_string(),
        author: "pack_diff".to_owned(),
        expected_number: None,
        target: Some(target),
    };
    node.images
        .clone()
        .tag(request)
        .await
        .map(drop)
        .map_err(|status| from_status(status).context(format!("name the result {reference}")))
}

/// Lets the sandbox go on, whatever happens.
#[derive(Debug)]
pub struct Thaw(Arc<dyn Instance>);

impl Thaw {
    /// When this is dropped; it is frozen already.
    pub fn after(instance: &Arc<dyn Instance>) -> Self {
        Self(Arc::clone(instance))
    }
}

impl Drop for Thaw {
    fn drop(&mut self) {
        if let Err(error) = self.0.thaw() {
            tracing::error!(error = %error.chain(), "a sandbox stays frozen after a pack");
        }
    }
}

struct Packing {
    node: Arc<Node>,
    upper: PathBuf,
    record: Record,
    request: v1::PackDiffRequest,
}

struct Packed {
    layer: BuiltLayer,
    env_id: EnvId,
    frozen: Duration,
}

impl Packing {
    /// On a blocking thread.
    fn run(self, thaw: Option<Thaw>) -> Result<Packed> {
        let since = Instant::now();
        let layers = self.record.layer_ids()?;
        let publisher = ImagesPublisher::open(
            tokio::runtime::Handle::current(),
            self.node.config.images.clone(),
            &format!("pack_diff of sandbox {}", self.record.id),
        )?;
        let mut options = DiffOptions::new(BuildOptions::new(LayerKind::Diff));
        options.include = self.request.include;
        options.exclude = self.request.exclude;
        options.exclude.extend(STANDARD_EXCLUSIONS.map(str::to_owned));
        let lower = Lower { layers: &layers, files: self.node.config.layer_files.as_deref() };
        let layer = builder::pack_diff(&self.upper, &lower, &publisher, &options, &Silent)?;
        let frozen = if thaw.is_some() { since.elapsed() } else { Duration::ZERO };
        drop(thaw);
        let mut stack = layers;
        stack.push(layer.layer_id);
        let environment =
            Environment::new(stack, self.record.config)?.with_image(self.record.image);
        let env_id = publisher.commit_environment(&environment.canonical())?;
        Ok(Packed { layer, env_id, frozen })
    }
}

/// The layers below the writable one, bottom first.
struct Lower<'a> {
    layers: &'a [LayerId],
    files: Option<&'a dyn LayerFiles>,
}

impl LowerLayers for Lower<'_> {
    fn count(&self) -> usize {
        self.layers.len()
    }

    fn layer(&self, number: usize) -> Result<(Tree, ChunkTable)> {
        let (Some(id), Some(files)) = (self.layers.get(number), self.files) else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a directory of a lower layer was renamed, and this node cannot read layer files",
            ));
        };
        let file = files.layer_file(id)?;
        let tree = layer::erofs::reader::Reader::parse(&file.metadata)?.to_tree()?;
        Ok((tree, file.chunk_table))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stands_for_a_diff_and_an_environment() {
        for name in ["a/b:c", "env/a/b:c", "diff/a/b:c"] {
            assert_eq!(reference(RefKind::Diff, name).unwrap().to_string(), "diff/a/b:c");
            assert_eq!(reference(RefKind::Env, name).unwrap().to_string(), "env/a/b:c");
        }
        assert!(reference(RefKind::Env, "").is_err());
    }
}
