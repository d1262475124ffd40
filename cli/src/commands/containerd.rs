//! `snapshotter`: layers for containerd; `containerd add`: images of it that load lazily.

use super::images::{layer_ids, resolve};
use super::{Scene, blocking, named, oci};
use crate::args::{ContainerdAdd, Snapshotter};
use crate::embed;
use crate::errors::{Failure, Outcome, Remedy};
use crate::node::log;
use crate::node::start::{self, Lifetime};
use crate::progress::Bars;
use crate::settings::Settings;
use builder::export::Description;
use layer::{Context, EnvId, Error, ErrorKind, Result};
use proto::v1::resolve_response::Target;
use proto::v1::{AcquireLeaseRequest, ReleaseLeaseRequest};
use serde::Serialize;
use snapshotter::register::{Image, ImageLayer, Place, register};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use store::Store;
use tokio::signal::unix::{SignalKind, signal};

/// The annotation of a layer that says which tar it was made of.
const DIFF_ID: &str = "oci.diff_id";
/// How long making an image known may take before its layers are not protected any more.
const LEASE_TTL_MS: u64 = 15 * 60 * 1000;

fn socket_of(settings: &Settings, chosen: Option<PathBuf>) -> PathBuf {
    chosen.unwrap_or_else(|| settings.run("snapshotter.sock"))
}

/// `snapshotter`
pub async fn snapshotter(scene: &Scene, args: Snapshotter) -> Outcome {
    log::to_stderr("warn");
    let settings = &scene.settings;
    let listen = |kind| signal(kind).map_err(|error| Error::io("listen for signals", error));
    let mut terminate = listen(SignalKind::terminate())?;
    let mut interrupt = listen(SignalKind::interrupt())?;
    let socket = socket_of(settings, args.socket);
    let root = args.root.unwrap_or_else(|| settings.data().join("snapshotter"));
    let root = std::path::absolute(&root).context(|| format!("root {}", root.display()))?;
    // Held, so that a node that ends by itself stays.
    let _node = start::connect(settings, Lifetime::UntilDown, scene.out).await?;
    let config = snapshotter::Config {
        root: root.clone(),
        layerfs: proto::connect::unix_lazy(&settings.fsd_socket()),
        images: proto::connect::unix_lazy(&settings.node_socket()),
    };
    let service = snapshotter::Service::open(config).await.remedy(|error| match error.kind() {
        ErrorKind::Busy => Some("use it, or name another --root".to_owned()),
        ErrorKind::Corrupt => Some(format!("remove {} with containerd's images", root.display())),
        _ => None,
    })?;
    check_place(&socket).remedy(|_| Some("name another --socket".to_owned()))?;
    scene.out.notice(&format!("serving snapshots at {}", socket.display()));
    proto::connect::serve_unix(&socket, service.routes(), async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
    .await
    .map_err(Failure::from)
}

/// The socket takes the place of a dead one: of nothing else, and of none that answers.
fn check_place(socket: &Path) -> Result<()> {
    let place = socket.display();
    match std::fs::symlink_metadata(socket) {
        Ok(found) if !found.file_type().is_socket() => {
            Err(Error::new(ErrorKind::Exists, format!("{place} is there and no socket")))
        }
        Ok(_) if UnixStream::connect(socket).is_ok() => {
            Err(Error::new(ErrorKind::Busy, format!("another process listens on {place}")))
        }
        _ => Ok(()),
    }
}

#[derive(Debug, Serialize)]
struct Added {
    image: String,
    digest: String,
    namespace: String,
    layers: usize,
}

/// `containerd add`
pub async fn add(scene: &Scene, args: ContainerdAdd) -> Outcome {
    let settings = &scene.settings;
    let name = named(&args.reference)?;
    let mut images = embed::images(settings, scene.out).await?;
    let answer = resolve(&mut images, &name).await?;
    let lease = AcquireLeaseRequest {
        holder: format!("containerd-add-{}", std::process::id()),
        ids: layer_ids(&answer)?.iter().map(|id| id.0.to_vec()).collect(),
        ttl_ms: LEASE_TTL_MS,
    };
    let lease_id = images.client.acquire_lease(lease).await?.into_inner().lease_id;
    let environment = oci::environment(&answer, &layer_ids(&answer)?)?;
    let diff_ids: Vec<Option<String>> =
        answer.layers.iter().map(|layer| layer.annotations.get(DIFF_ID).cloned()).collect();
    let url = images.store_url(settings)?;
    let bars = Bars::new(scene.out);
    let described = blocking(move || {
        let store = Store::open(store::open(&url)?)?;
        let stand_in = snapshotter::pointer;
        builder::export::describe(&store, &environment, &diff_ids, stand_in, &bars)
    })
    .await??;
    let environment = match &answer.target {
        Some(Target::EnvId(id)) => Some(EnvId::from_slice(id)?),
        _ => None,
    };
    let image = image(args.image.unwrap_or(args.reference), described, environment);
    let place = Place {
        containerd: args.address,
        socket: socket_of(settings, args.socket),
        snapshotter: args.snapshotter,
        namespace: args.namespace,
    };
    let digest = register(&image, &place).await.remedy(|error| advice(error, &place));
    // From here on the node keeps what it has attached.
    let released = images.client.release_lease(ReleaseLeaseRequest { lease_id }).await;
    let (digest, layers) = (digest?, image.layers.len());
    released?;
    let added = Added { image: image.name, digest, namespace: place.namespace, layers };
    scene.out.result(&added, || format!("{}: {}, {layers} layers", added.image, added.digest))
}

fn image(name: String, described: Description, environment: Option<EnvId>) -> Image {
    let layers = described.layers.into_iter().map(|it| ImageLayer {
        diff_id: it.diff_id,
        layer: it.layer,
        pointer: it.stand_in,
    });
    Image {
        name,
        manifest: (described.manifest, described.media_type),
        config: described.config,
        layers: layers.collect(),
        environment,
    }
}

fn advice(error: &Error, place: &Place) -> Option<String> {
    let text = error.chain();
    let is_about = |path: &PathBuf| text.contains(&path.display().to_string());
    match error.kind() {
        ErrorKind::Unavailable if is_about(&place.socket) => {
            Some("start `lamella snapshotter`, or name its --socket".to_owned())
        }
        ErrorKind::Unavailable if is_about(&place.containerd) => {
            Some("start containerd, or name its socket with --address".to_owned())
        }
        ErrorKind::Invalid | ErrorKind::NotFound if text.contains("snapshotter") => Some(format!(
            "containerd's configuration has to name {:?} as a proxy plugin with this socket",
            place.snapshotter
        )),
        _ => None,
    }
}
