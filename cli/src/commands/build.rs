//! `build` and `pull`: a source becomes a layer, or the layers of an environment, and gets a name.
//!
//! Ctrl-C ends the build at its next step. CRASH: nothing is visible before the reference moves, which
//! is the last step; a repeated build finds the chunks that were stored.

use super::Scene;
use super::images::point;
use crate::args::{Build, FromRegistry, Pull};
use crate::embed;
use crate::errors::{Failure, Outcome, Remedy};
use crate::progress::Bars;
use crate::quantity::{show_bytes, show_duration};
use builder::oci::{ImageName, RegistryOptions};
use builder::publish::ImagesPublisher;
use builder::{BuildOptions, Built, Cancel, ImageLayers, Source};
use layer::manifest::LayerKind;
use layer::reference::{RefKind, Reference};
use layer::{Context, EnvId, Error, ErrorKind, LayerId, Result};
use proto::v1::images_client::ImagesClient;
use proto::v1::tag_request;
use serde::Serialize;
use std::sync::Arc;
use std::time::Instant;
use tokio::runtime::Handle;
use tonic::transport::Channel;

/// What `build` prints.
#[derive(Debug, Serialize)]
struct Report {
    reference: Reference,
    environment_reference: Option<Reference>,
    environment: Option<EnvId>,
    layers: Vec<BuiltLayer>,
    elapsed_ms: u64,
}

#[derive(Debug, Serialize)]
struct BuiltLayer {
    id: LayerId,
    kind: LayerKind,
    files: u64,
    directories: u64,
    plain_bytes: u64,
    metadata_bytes: u64,
    new_chunks: u64,
    new_plain_bytes: u64,
    new_stored_bytes: u64,
    reused_plain_bytes: u64,
    /// Files that git indexes know, and those of them that git will find unchanged without reading them.
    git_entries: u64,
    git_refreshed: u64,
}

fn layer_kind(kind: RefKind) -> LayerKind {
    match kind {
        RefKind::Base | RefKind::Env => LayerKind::Base,
        RefKind::Workspace => LayerKind::Workspace,
        RefKind::Toolkit => LayerKind::Toolkit,
        RefKind::Diff => LayerKind::Diff,
    }
}

/// `build`
pub async fn build(scene: &Scene, args: Build) -> Outcome {
    let begin = Instant::now();
    let reference = super::reference_with_kind(&args.tag)?;
    if args.stacked && reference.kind() != RefKind::Env {
        return Err(Failure::Usage(
            "--stacked makes an environment: use -t env/NAME:TAG".to_owned(),
        ));
    }
    let source = Source::parse(&args.source)?;
    let images = embed::images(&scene.settings, scene.out).await?;
    let mut options = BuildOptions::new(layer_kind(reference.kind()));
    options.refresh_git_index = args.git_index().unwrap_or(options.refresh_git_index);
    options.annotations.extend(args.annotations);
    if let Some(profile) = &args.profile {
        options.layout = Some(super::profile::layout(scene, &images, profile).await?);
    }
    options.image_layers = if args.stacked { ImageLayers::Stacked } else { ImageLayers::Merged };
    take_from(&args.registry, &mut options);
    carry_out(scene, &images, Order { source, options, reference, begin }).await
}

/// `pull`
pub async fn pull(scene: &Scene, args: Pull) -> Outcome {
    let begin = Instant::now();
    let source = image_source(&args.image)?;
    let reference = match (&args.tag, &source) {
        (Some(tag), _) => super::compose::environment_name(tag)?,
        (None, Source::Registry(name)) => own_name(name)?,
        _ => {
            return Err(Failure::Usage(
                "an image in files has no name here: use -t NAME:TAG".into(),
            ));
        }
    };
    let images = embed::images(&scene.settings, scene.out).await?;
    let mut options = BuildOptions::new(LayerKind::Base);
    options.image_layers = if args.merge { ImageLayers::Merged } else { ImageLayers::Stacked };
    take_from(&args.registry, &mut options);
    carry_out(scene, &images, Order { source, options, reference, begin }).await
}

/// An image; a name without a scheme is one in a registry.
fn image_source(text: &str) -> Outcome<Source> {
    let in_files = ["oci:", "oci-archive:", "docker-archive:", "docker://"];
    if in_files.iter().any(|scheme| text.starts_with(scheme)) {
        return Ok(Source::parse(text)?);
    }
    Ok(Source::Registry(text.parse()?))
}

/// The name of an image as that of an environment.
fn own_name(image: &ImageName) -> Outcome<Reference> {
    let digest = image.digest().map(|digest| digest.replace(':', "-"));
    let tag = match (image.tag(), &digest) {
        (Some(tag), _) => tag,
        (None, Some(digest)) => digest.get(..19).unwrap_or(digest),
        (None, None) => "latest",
    };
    let own = image.repository().strip_prefix("library/").unwrap_or(image.repository());
    super::compose::environment_name(&format!("{own}:{tag}"))
}

fn take_from(args: &FromRegistry, options: &mut BuildOptions) {
    options.platform.clone_from(&args.platform);
    options.registry = RegistryOptions { insecure: args.insecure };
}

/// What to build, and as what.
struct Order {
    source: Source,
    options: BuildOptions,
    reference: Reference,
    begin: Instant,
}

async fn carry_out(scene: &Scene, images: &embed::Images, order: Order) -> Outcome {
    let Order { source, mut options, reference, begin } = order;
    if matches!(source, Source::Image(..) | Source::Registry(_)) {
        let url = images.store_url(&scene.settings)?;
        let store = super::blocking(move || store::Store::open(store::open(&url)?)).await??;
        options.originals = Some(store);
    }
    let cancel = options.cancel.clone();
    let work = Work {
        source,
        options,
        reference,
        channel: images.channel.clone(),
        bars: Arc::new(Bars::new(scene.out)),
    };
    let bars = Arc::clone(&work.bars);
    let handle = Handle::current();
    let mut task = tokio::task::spawn_blocking(move || work.carry_out(&handle));
    let built = tokio::select! {
        built = &mut task => built,
        _ = tokio::signal::ctrl_c() => return interrupted(&cancel, task, &bars).await,
    };
    bars.finish();
    let (built, reference, environment) = built.map_err(died)??;
    let report = Report::new(built, reference, environment, begin.elapsed().as_millis() as u64);
    scene.out.result(&report, || report.lines())
}

fn died(error: tokio::task::JoinError) -> Error {
    Error::new(ErrorKind::Internal, "the build died").with_source(error)
}

/// Lets the build unwind: what it was writing is taken back by its own drop.
async fn interrupted<T>(cancel: &Cancel, task: tokio::task::JoinHandle<T>, bars: &Bars) -> Outcome {
    cancel.cancel();
    _ = task.await;
    bars.finish();
    Err(Failure::INTERRUPTED)
}

/// A build on a thread that may block.
struct Work {
    source: Source,
    options: BuildOptions,
    reference: Reference,
    channel: Channel,
    bars: Arc<Bars>,
}

/// An environment with its name.
type Composed = Option<(Reference, EnvId)>;

impl Work {
    fn carry_out(self, handle: &Handle) -> Outcome<(Built, Reference, Composed)> {
        let purpose = format!("build {}", self.reference);
        let publisher = ImagesPublisher::open(handle.clone(), self.channel.clone(), &purpose)?;
        let built = builder::build(&self.source, &publisher, &self.options, &*self.bars)
            .context(|| format!("build {}", self.source))
            .remedy(advice)?;
        let is_env = self.reference.kind() == RefKind::Env;
        let environment = match (&built.config, is_env) {
            (None, false) => None,
            (config, _) => {
                let config = config.clone().unwrap_or_default();
                Some(builder::publish_built(&built, config, &publisher)?)
            }
        };
        self.options.cancel.check()?;
        if !is_env {
            let target = tag_request::Target::LayerId(built.layer_id().0.to_vec());
            self.tag(handle, &self.reference, target)?;
        }
        let composed = match environment {
            Some(id) => {
                let (name, tag) = (self.reference.name(), self.reference.tag());
                let reference = Reference::new(RefKind::Env, name, tag)?;
                let target = tag_request::Target::EnvId(id.0.to_vec());
                self.tag(handle, &reference, target)?;
                Some((reference, id))
            }
            None => None,
        };
        Ok((built, self.reference, composed))
    }

    fn tag(
        &self,
        handle: &Handle,
        reference: &Reference,
        target: tag_request::Target,
    ) -> Result<()> {
        let mut client = ImagesClient::new(self.channel.clone());
        handle.block_on(point(&mut client, reference, target)).map(drop)
    }
}

fn advice(error: &Error) -> Option<String> {
    match error.kind() {
        ErrorKind::Corrupt => Some("the source is damaged; nothing was published".to_owned()),
        ErrorKind::Busy => Some("a file changed while it was read; try again".to_owned()),
        ErrorKind::Unavailable => Some("nothing was published; try again".to_owned()),
        _ => None,
    }
}

impl Report {
    fn new(built: Built, reference: Reference, environment: Composed, elapsed_ms: u64) -> Self {
        let layers = built.layers.into_iter().map(|layer| BuiltLayer {
            id: layer.layer_id,
            kind: layer.manifest.kind,
            files: layer.manifest.files,
            directories: layer.manifest.directories,
            plain_bytes: layer.manifest.plain_bytes,
            metadata_bytes: layer.manifest.metadata_bytes,
            new_chunks: layer.new_chunks,
            new_plain_bytes: layer.new_plain_bytes,
            new_stored_bytes: layer.new_stored_bytes,
            reused_plain_bytes: layer.reused_plain_bytes,
            git_entries: layer.git.entries,
            git_refreshed: layer.git.refreshed,
        });
        let (environment_reference, environment) = environment.unzip();
        let layers = layers.collect();
        Self { reference, environment_reference, environment, layers, elapsed_ms }
    }

    fn lines(&self) -> String {
        let mut lines = Vec::new();
        for layer in &self.layers {
            lines.push(format!(
                "layer {}: {} files, {}; {} new, stored as {}; {} reused",
                layer.id.short(),
                layer.files,
                show_bytes(layer.plain_bytes),
                show_bytes(layer.new_plain_bytes),
                show_bytes(layer.new_stored_bytes),
                show_bytes(layer.reused_plain_bytes),
            ));
            if layer.git_entries > 0 {
                let (refreshed, entries) = (layer.git_refreshed, layer.git_entries);
                lines
                    .push(format!("git: {refreshed} of {entries} files are known to be unchanged"));
            }
        }
        let time = show_duration(std::time::Duration::from_millis(self.elapsed_ms));
        if self.reference.kind() != RefKind::Env {
            lines.push(format!("{} in {time}", self.reference));
        }
        if let Some(reference) = &self.environment_reference {
            lines.push(format!("{reference} in {time}"));
        }
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_gives_its_environment_a_name() {
        let digest = format!("sha256:{}", "0f".repeat(32));
        for (image, name) in [
            ("debian".to_owned(), "env/debian:latest"),
            ("ghcr.io/team/app:v1.2".to_owned(), "env/team/app:v1.2"),
            (format!("localhost:5000/a@{digest}"), "env/a:sha256-0f0f0f0f0f0f"),
        ] {
            let image: ImageName = image.parse().unwrap();
            assert_eq!(own_name(&image).unwrap().to_string(), name);
        }
    }
}
