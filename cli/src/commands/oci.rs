//! `oci`: environments out as image layouts, and what a registry knows beside its images.
//!
//! A lease pins what is exported. CRASH: the layout appears whole or not at all.

use super::images::{layer_ids, resolve};
use super::{Scene, blocking, named};
use crate::args::{OciExport, OciReferrers};
use crate::embed::{self, Images};
use crate::errors::{Failure, Outcome, Remedy};
use crate::output::Row;
use crate::progress::Bars;
use crate::quantity::show_bytes;
use builder::export::{ExportOptions, Exported};
use builder::oci::{Referrer, RegistryOptions};
use layer::environment::{Environment, RunConfig};
use layer::{Error, ErrorKind, LayerId, Result};
use proto::v1::resolve_response::Target;
use proto::v1::{AcquireLeaseRequest, LocateRequest, ReleaseLeaseRequest, ResolveResponse};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use store::Store;

/// How long an export may take before what it reads is not protected any more.
const LEASE_TTL_MS: u64 = 6 * 3600 * 1000;

/// What `oci export` prints.
#[derive(Debug, Serialize)]
struct Report {
    name: String,
    place: PathBuf,
    #[serde(flatten)]
    exported: Exported,
}

impl Report {
    fn lines(&self) -> String {
        let mut lines: Vec<String> = Vec::new();
        for layer in &self.exported.layers {
            let how = if layer.original { "as it came" } else { "new" };
            let bytes = show_bytes(layer.bytes);
            lines.push(format!("layer {}: {}, {bytes}, {how}", layer.layer.short(), layer.digest));
        }
        lines.push(format!("{} in {}", self.exported.manifest, self.place.display()));
        lines.join("\n")
    }
}

/// `oci export`
pub async fn export(scene: &Scene, args: OciExport) -> Outcome {
    let name = named(&args.reference)?;
    let mut images = embed::images(&scene.settings, scene.out).await?;
    let answer = resolve(&mut images, &name).await?;
    let ids = layer_ids(&answer)?;
    let lease = images
        .client
        .acquire_lease(AcquireLeaseRequest {
            holder: format!("oci-export-{}", std::process::id()),
            ids: ids.iter().map(|id| id.0.to_vec()).collect(),
            ttl_ms: LEASE_TTL_MS,
        })
        .await?
        .into_inner();
    let exported = write(scene, &mut images, &args, &name, (&answer, &ids)).await;
    let release = ReleaseLeaseRequest { lease_id: lease.lease_id };
    let released = images.client.release_lease(release).await;
    let report = Report { name, place: args.place, exported: exported? };
    released?;
    scene.out.result(&report, || report.lines())
}

/// What a name stands for as an environment.
pub fn environment(answer: &ResolveResponse, ids: &[LayerId]) -> Result<Environment> {
    match answer.target {
        Some(Target::EnvId(_)) => Environment::decode(&answer.environment_document),
        _ => Environment::new(ids.to_vec(), RunConfig::default()),
    }
}

async fn write(
    scene: &Scene,
    images: &mut Images,
    args: &OciExport,
    name: &str,
    (answer, ids): (&ResolveResponse, &[LayerId]),
) -> Outcome<Exported> {
    let environment = Arc::new(environment(answer, ids)?);
    let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
    let options = ExportOptions {
        compression: args.compression,
        tag: args.name.clone().unwrap_or_else(|| tag.to_owned()),
        as_archive: args.place.extension().is_some_and(|extension| extension == "tar"),
        ..ExportOptions::default()
    };
    let url = images.store_url(&scene.settings)?;
    let store = Arc::new(blocking(move || Store::open(store::open(&url)?)).await??);
    let mut located = false;
    loop {
        let (store, environment) = (Arc::clone(&store), Arc::clone(&environment));
        let done = attempt(scene, store, environment, args.place.clone(), options.clone()).await?;
        match done {
            // Packs moved since the hints were written: imaged knows where to.
            Err(error) if error.kind() == ErrorKind::NotFound && !located => {
                located = true;
                for id in ids {
                    let request = LocateRequest { layer_id: id.0.to_vec() };
                    images.client.locate(request).await.map_err(proto::status::from_status)?;
                }
            }
            other => return other.remedy(advice),
        }
    }
}

fn advice(error: &Error) -> Option<String> {
    match error.kind() {
        ErrorKind::Exists => Some("name a place where nothing is yet".to_owned()),
        ErrorKind::Corrupt => Some("`lamella fsck` says what is damaged".to_owned()),
        _ => None,
    }
}

/// One export on a thread that may block; Ctrl-C ends it, and nothing stays.
async fn attempt(
    scene: &Scene,
    store: Arc<Store>,
    environment: Arc<Environment>,
    place: PathBuf,
    options: ExportOptions,
) -> Outcome<Result<Exported>> {
    let bars = Arc::new(Bars::new(scene.out));
    let (shown, cancel) = (Arc::clone(&bars), options.cancel.clone());
    let mut task = tokio::task::spawn_blocking(move || {
        builder::export::export(&store, &environment, &place, &options, &*shown)
    });
    let done = tokio::select! {
        done = &mut task => done,
        _ = tokio::signal::ctrl_c() => {
            cancel.cancel();
            _ = task.await;
            bars.finish();
            return Err(Failure::INTERRUPTED);
        }
    };
    bars.finish();
    done.map_err(|error| {
        Error::new(ErrorKind::Internal, "the export died").with_source(error).into()
    })
}

fn unusable(error: &Error) -> Option<String> {
    (error.kind() == ErrorKind::Corrupt).then(|| "the registry's answer is of no use".to_owned())
}

/// One line of `oci referrers`.
#[derive(Debug, Serialize)]
struct Line(Referrer);

impl Row for Line {
    const HEADER: &'static [&'static str] = &["DIGEST", "SIZE", "TYPE"];

    fn cells(&self) -> Vec<String> {
        let kind = self.0.artifact_type.clone().unwrap_or_default();
        vec![self.0.digest.clone(), show_bytes(self.0.bytes), kind]
    }
}

/// `oci referrers`
pub async fn referrers(scene: &Scene, args: OciReferrers) -> Outcome {
    let found = blocking(move || {
        let options = RegistryOptions { insecure: args.insecure };
        builder::oci::referrers(&args.image, options, args.kind.as_deref())
    })
    .await?
    .remedy(unusable)?;
    let lines: Vec<Line> = found.into_iter().map(Line).collect();
    scene.out.listing(&lines)
}
