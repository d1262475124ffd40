//! References and what they name: list, describe, history, move, reindex.

use super::{Scene, author, is_id, lost_name, named, reference};
use crate::args::{Ls, Named, Tag};
use crate::embed;
use crate::errors::{Outcome, Remedy};
use crate::output::Row;
use crate::quantity::{show_bytes, show_time};
use layer::environment::{Environment, RunConfig};
use layer::reference::{RefKind, Reference};
use layer::{EnvId, Error, LayerId, Result};
use proto::v1::images_client::ImagesClient;
use proto::v1::resolve_response::Target as Resolved;
use proto::v1::{
    HistoryRequest, LayerDescription, ListReferencesRequest, ReferenceEntry, ReindexRequest,
    ResolveRequest, ResolveResponse, TagRequest, UntagRequest, reference_entry, tag_request,
};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use tonic::transport::Channel;

/// One reference, as it stands or stood.
#[derive(Debug, Serialize)]
pub struct Entry {
    reference: String,
    number: u64,
    layer: Option<LayerId>,
    environment: Option<EnvId>,
    time: String,
    time_unix_ns: u64,
    author: String,
}

impl Entry {
    /// Takes what came over the wire.
    pub fn new(entry: ReferenceEntry) -> Result<Self> {
        let (layer, environment) = match &entry.target {
            Some(reference_entry::Target::LayerId(id)) => (Some(LayerId::from_slice(id)?), None),
            Some(reference_entry::Target::EnvId(id)) => (None, Some(EnvId::from_slice(id)?)),
            None => (None, None),
        };
        Ok(Self {
            reference: entry.reference,
            number: entry.number,
            layer,
            environment,
            time: show_time(entry.time_unix_ns),
            time_unix_ns: entry.time_unix_ns,
            author: entry.author,
        })
    }

    fn target(&self) -> String {
        match (&self.layer, &self.environment) {
            (Some(id), _) => format!("layer {}", id.short()),
            (_, Some(id)) => format!("environment {}", id.short()),
            _ => "(untagged)".to_owned(),
        }
    }
}

impl Row for Entry {
    const HEADER: &'static [&'static str] = &["REFERENCE", "TARGET", "MOVE", "TIME", "AUTHOR"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.reference.clone(),
            self.target(),
            self.number.to_string(),
            self.time.clone(),
            self.author.clone(),
        ]
    }
}

/// `ls`
pub async fn ls(scene: &Scene, args: &Ls) -> Outcome {
    let mut images = embed::images(&scene.settings, scene.out).await?;
    let kind = args.kind.map(RefKind::word).unwrap_or_default().to_owned();
    let mut stream =
        images.client.list_references(ListReferencesRequest { kind }).await?.into_inner();
    let mut rows = Vec::new();
    while let Some(entry) = stream.message().await? {
        let row = Entry::new(entry)?;
        if row.layer.is_some() || row.environment.is_some() {
            rows.push(row);
        }
    }
    rows.sort_by(|a, b| a.reference.cmp(&b.reference));
    scene.out.listing(&rows)
}

/// `history`
pub async fn history(scene: &Scene, args: &Named) -> Outcome {
    let reference = reference(&args.reference)?.to_string();
    let mut images = embed::images(&scene.settings, scene.out).await?;
    let mut stream = images
        .client
        .history(HistoryRequest { reference: reference.clone() })
        .await
        .remedy(lost_name)?
        .into_inner();
    let mut rows = Vec::new();
    while let Some(entry) = stream.message().await.remedy(lost_name)? {
        rows.push(Entry::new(entry)?);
    }
    if rows.is_empty() {
        return Err(Error::not_found(format!("{reference} never existed"))).remedy(lost_name);
    }
    scene.out.listing(&rows)
}

/// Asks what a name stands for.
pub async fn resolve(images: &mut embed::Images, name: &str) -> Outcome<ResolveResponse> {
    let answer = images.client.resolve(ResolveRequest { name: name.to_owned() }).await;
    answer.map(tonic::Response::into_inner).remedy(lost_name)
}

/// The layers that a name stands for, bottom first.
pub fn layer_ids(answer: &ResolveResponse) -> Result<Vec<LayerId>> {
    answer.layers.iter().map(|layer| LayerId::from_slice(&layer.layer_id)).collect()
}

/// Points a reference at something, wherever it pointed before.
pub async fn point(
    client: &mut ImagesClient<Channel>,
    reference: &Reference,
    target: tag_request::Target,
) -> Result<Entry> {
    let request = TagRequest {
        reference: reference.to_string(),
        target: Some(target),
        author: author(),
        expected_number: None,
    };
    let moved = client
        .tag(request)
        .await
        .map_err(|status| proto::status::from_status(status).context(format!("name {reference}")));
    Entry::new(moved?.into_inner())
}

/// `tag`
pub async fn tag(scene: &Scene, args: &Tag) -> Outcome {
    let (from, new) = (named(&args.reference)?, reference(&args.new)?);
    let mut images = embed::images(&scene.settings, scene.out).await?;
    let target = match resolve(&mut images, &from).await?.target {
        Some(Resolved::LayerId(id)) => tag_request::Target::LayerId(id),
        Some(Resolved::EnvId(id)) => tag_request::Target::EnvId(id),
        None => return Err(Error::not_found(format!("{from} has no target")).into()),
    };
    print_move(scene, &point(&mut images.client, &new, target).await?)
}

/// `untag`
pub async fn untag(scene: &Scene, args: &Named) -> Outcome {
    if is_id(&args.reference) {
        return Err(crate::errors::Failure::Usage("untag takes a reference, not an id".to_owned()));
    }
    let reference = reference(&args.reference)?.to_string();
    let mut images = embed::images(&scene.settings, scene.out).await?;
    let request = UntagRequest { reference, author: author() };
    let entry = images.client.untag(request).await.remedy(lost_name)?.into_inner();
    print_move(scene, &Entry::new(entry)?)
}

fn print_move(scene: &Scene, entry: &Entry) -> Outcome {
    scene.out.result(entry, || format!("{} -> {}", entry.reference, entry.target()))
}

/// What is known about a layer.
#[derive(Debug, Serialize)]
pub struct Layer {
    id: LayerId,
    kind: String,
    files: u64,
    plain_bytes: u64,
    stored_bytes: u64,
    metadata_bytes: u64,
    chunks: u64,
    annotations: BTreeMap<String, String>,
}

impl Layer {
    /// Takes what came over the wire.
    pub fn new(layer: LayerDescription) -> Result<Self> {
        Ok(Self {
            id: LayerId::from_slice(&layer.layer_id)?,
            kind: layer.kind,
            files: layer.files,
            plain_bytes: layer.plain_bytes,
            stored_bytes: layer.stored_bytes,
            metadata_bytes: layer.metadata_bytes,
            chunks: layer.chunks,
            annotations: layer.annotations.into_iter().collect(),
        })
    }
}

/// What `inspect` prints.
#[derive(Debug, Serialize)]
struct Description {
    name: String,
    environment: Option<EnvId>,
    config: Option<RunConfig>,
    layers: Vec<Layer>,
}

/// `inspect`
pub async fn inspect(scene: &Scene, args: &Named) -> Outcome {
    let name = named(&args.reference)?;
    let mut images = embed::images(&scene.settings, scene.out).await?;
    let answer = resolve(&mut images, &name).await?;
    let environment = match &answer.target {
        Some(Resolved::EnvId(id)) => Some(EnvId::from_slice(id)?),
        _ => None,
    };
    let config = match environment {
        Some(_) => Some(Environment::decode(&answer.environment_document)?.config),
        None => None,
    };
    let layers = answer.layers.into_iter().map(Layer::new).collect::<Result<Vec<_>>>()?;
    let description = Description { name, environment, config, layers };
    scene.out.result(&description, || describe(&description))
}

fn describe(description: &Description) -> String {
    let mut text = format!("name         {}\n", description.name);
    if let Some(id) = &description.environment {
        _ = writeln!(text, "environment  {id}");
    }
    if let Some(config) = &description.config {
        let mut line = |key: &str, value: &str| {
            if !value.is_empty() {
                _ = writeln!(text, "{key:<13}{value}");
            }
        };
        line("entrypoint", &config.entrypoint.join(" "));
        line("cmd", &config.cmd.join(" "));
        line("cwd", &config.cwd);
        line("user", &config.user);
        for variable in &config.env {
            line("env", variable);
        }
        for (key, value) in &config.labels {
            line("label", &format!("{key}={value}"));
        }
    }
    for layer in description.layers.iter().rev() {
        _ = writeln!(
            text,
            "layer        {}\n             {}, {} files, {} data in {} chunks, {} stored, {} metadata",
            layer.id,
            layer.kind,
            layer.files,
            show_bytes(layer.plain_bytes),
            layer.chunks,
            show_bytes(layer.stored_bytes),
            show_bytes(layer.metadata_bytes),
        );
        for (key, value) in &layer.annotations {
            _ = writeln!(text, "             {key}={value}");
        }
    }
    text
}

/// `reindex`
pub async fn reindex(scene: &Scene) -> Outcome {
    #[derive(Serialize)]
    struct Counts {
        packs: u64,
        chunks: u64,
        layers: u64,
        environments: u64,
        references: u64,
    }
    let mut images = embed::images(&scene.settings, scene.out).await?;
    let answer = images.client.reindex(ReindexRequest {}).await?.into_inner();
    let counts = Counts {
        packs: answer.packs,
        chunks: answer.chunks,
        layers: answer.layers,
        environments: answer.environments,
        references: answer.references,
    };
    scene.out.result(&counts, || {
        format!(
            "{} packs, {} chunks, {} layers, {} environments, {} references",
            counts.packs, counts.chunks, counts.layers, counts.environments, counts.references
        )
    })
}
