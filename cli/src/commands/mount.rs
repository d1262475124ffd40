//! `mount` and `umount`: a layer or an environment at a directory of the host.
//!
//! One layer is a bind mount of what fsd attached; several, or `--rw`, are an overlay over them. Each
//! mount has a record, `run/mounts/<digest of the directory>.json`, written before anything is attached
//! and removed after everything is detached. Of several commands for one directory one works and the others
//! wait, by a lock beside the record.
//!
//! CRASH: a record without a mount is what a killed command leaves; the next `mount` at that directory,
//! `umount` or `down` takes back what it names.

use super::images::{layer_ids, resolve};
use super::{Scene, named};
use crate::args::{Mount, Umount};
use crate::embed::Images;
use crate::errors::{Failure, Outcome, Remedy};
use crate::node::lock::{self, Exclusive};
use crate::node::start::{self, Lifetime};
use crate::output::Output;
use crate::settings::{Settings, private_folder};
use fsd::PlaneKind;
use layer::{Context, Digest, Error, ErrorKind, LayerId, Result};
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::resolve_response::Target as Resolved;
use proto::v1::{self, AcquireLeaseRequest, AttachRequest, DetachRequest, ReleaseLeaseRequest};
use serde::{Deserialize, Serialize};
use std::fs::DirBuilder;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use sys::mount::{Attributes, Overlay, OverlayLower, OverlayUpper, Recursive, Unmount};
use tonic::transport::Channel;

/// One mount of ours.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Record {
    reference: String,
    dir: PathBuf,
    layers: Vec<LayerId>,
    writable: bool,
    /// What keeps the layers on the store until the node has noticed the mount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lease: Option<String>,
}

/// A layer may come from a sandbox: what it left must give nobody on the host a device or root's rights.
const HARMLESS: Attributes =
    Attributes { read_only: false, nosuid: true, nodev: true, noexec: false, nosymfollow: false };

/// How long it takes at most until the node keeps what was attached.
const NOTICED_MS: u64 = 15 * 60 * 1000;

/// Where the pieces of a mount are kept.
struct Place {
    record: PathBuf,
    lock: PathBuf,
    scratch: PathBuf,
    holder: String,
}

impl Place {
    fn of(settings: &Settings, dir: &Path) -> Self {
        let key = Digest::of(dir.as_os_str().as_bytes()).short();
        Self {
            record: settings.run("mounts").join(format!("{key}.json")),
            lock: settings.run("mounts").join(format!("{key}.lock")),
            scratch: settings.data().join("mounts").join(&key),
            holder: format!("mount-{key}"),
        }
    }

    /// Waits for whoever else changes what is mounted there.
    async fn hold(&self) -> Outcome<Exclusive> {
        let path = self.lock.clone();
        let held = super::blocking(move || {
            path.parent().map_or(Ok(()), private_folder)?;
            lock::exclusive(&path)
        });
        Ok(held.await??)
    }
}

/// The word for a plane.
pub fn plane_word(plane: v1::Plane) -> &'static str {
    PlaneKind::from_proto(plane).map_or("auto", PlaneKind::name)
}

/// The wire's name for a plane, or for the node's choice.
pub fn wire_plane(plane: Option<PlaneKind>) -> v1::Plane {
    plane.map_or(v1::Plane::Auto, PlaneKind::to_proto)
}

fn read_record(path: &Path) -> Result<Option<Record>> {
    let name = || format!("read {}", path.display());
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| Error::corrupt(name()).with_source(error)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(name(), error)),
    }
}

fn write_record(path: &Path, record: &Record) -> Result<()> {
    let name = || format!("write {}", path.display());
    path.parent().map_or(Ok(()), private_folder)?;
    let text = serde_json::to_vec(record)
        .map_err(|error| Error::new(ErrorKind::Internal, name()).with_source(error))?;
    let temporary = path.with_extension("new");
    std::fs::write(&temporary, text).context(name)?;
    std::fs::rename(&temporary, path).context(name)
}

/// Whether something of ours is mounted at the directory.
fn is_mounted(dir: &Path) -> Result<bool> {
    let mounts = sys::mount::read_mounts().context(|| "read the mount table".to_owned())?;
    Ok(mounts.iter().any(|mount| mount.mount_point == dir))
}

/// `mount`
pub async fn mount(scene: &Scene, args: &Mount) -> Outcome {
    let name = named(&args.reference)?;
    let dir = std::fs::canonicalize(&args.dir)
        .context(|| format!("mount at {}", args.dir.display()))
        .remedy(|error| {
            (error.kind() == ErrorKind::NotFound).then(|| "create the directory first".into())
        })?;
    let found = std::fs::metadata(&dir)
        .context(|| format!("mount at {}", dir.display()))
        .remedy(|_| Some("`lamella umount` takes back a mount whose daemon died".to_owned()))?;
    if !found.is_dir() {
        return Err(Error::invalid(format!("{} is no directory", dir.display())).into());
    }
    let node = start::connect(&scene.settings, Lifetime::UntilDown, scene.out).await?;
    let mut images = Images::of_node(node);
    let place = Place::of(&scene.settings, &dir);
    let _lock = place.hold().await?;
    let mut layerfs = connect_fsd(&scene.settings).await?;
    if let Some(old) = read_record(&place.record)? {
        if is_mounted(&dir)? {
            return Err(Error::new(ErrorKind::Busy, format!("{} is mounted", dir.display())))
                .remedy(|_| Some("`lamella umount` takes it back".to_owned()));
        }
        take_back(&mut images, &mut layerfs, &place, &old).await?;
    }
    let answer = resolve(&mut images, &name).await?;
    let environment = match &answer.target {
        Some(Resolved::EnvId(id)) => id.clone(),
        _ => Vec::new(),
    };
    let layers = layer_ids(&answer)?;
    let mut record = Record { reference: name, dir, layers, writable: args.rw, lease: None };
    write_record(&place.record, &record)?;
    // At the same time, since nobody hears of the mount before it is kept.
    let (kept, composed) = tokio::join!(
        keep(&mut images, &place, &record.layers),
        compose(&mut layerfs, &place, &record, wire_plane(args.plane), &environment)
    );
    let kept = kept.and_then(|lease| {
        record.lease = lease;
        write_record(&place.record, &record).map_err(Failure::from)
    });
    match kept.and(composed) {
        Ok(plane) => {
            #[derive(Serialize)]
            struct Mounted {
                plane: &'static str,
                #[serde(flatten)]
                record: Record,
            }
            let mounted = Mounted { plane: plane_word(plane), record };
            scene.out.result(&mounted, || {
                format!(
                    "{} at {} ({})",
                    mounted.record.reference,
                    mounted.record.dir.display(),
                    mounted.plane
                )
            })
        }
        Err(failure) => {
            if let Err(Failure::Failed { error, .. }) =
                take_back(&mut images, &mut layerfs, &place, &record).await
            {
                tracing::warn!(error = error.chain(), "undo the mount");
            }
            Err(failure)
        }
    }
}

/// Keeps the layers from being collected until the node, which keeps what is attached, has noticed the mount. A
/// store that cannot be written keeps nobody from mounting what it has.
async fn keep(images: &mut Images, place: &Place, layers: &[LayerId]) -> Outcome<Option<String>> {
    let request = AcquireLeaseRequest {
        holder: place.holder.clone(),
        ids: layers.iter().map(|id| id.0.to_vec()).collect(),
        ttl_ms: NOTICED_MS,
    };
    match images.client.acquire_lease(request).await.map_err(proto::status::from_status) {
        Err(error) if error.kind() == ErrorKind::NotFound => Err(error.into()),
        Err(error) => {
            tracing::debug!(error = error.chain(), "the layers of a mount are not leased yet");
            Ok(None)
        }
        Ok(lease) => Ok(Some(lease.into_inner().lease_id)),
    }
}

/// Ends the lease of a mount that is no more. One that cannot be ended ends by itself.
async fn let_go(images: &mut Images, record: &Record) {
    let Some(lease_id) = record.lease.clone() else { return };
    if let Err(status) = images.client.release_lease(ReleaseLeaseRequest { lease_id }).await {
        tracing::debug!(%status, "the lease of a mount ends by itself");
    }
}

async fn connect_fsd(settings: &Settings) -> Outcome<LayerFsClient<Channel>> {
    Ok(LayerFsClient::new(proto::connect::unix(&settings.fsd_socket()).await?))
}

/// Attaches the layers, of this environment where it is one, and makes the mount of them.
async fn compose(
    layerfs: &mut LayerFsClient<Channel>,
    place: &Place,
    record: &Record,
    plane: v1::Plane,
    environment: &[u8],
) -> Outcome<v1::Plane> {
    let (mut paths, mut used) = (Vec::new(), plane);
    for layer in &record.layers {
        let request = AttachRequest {
            layer_id: layer.0.to_vec(),
            holder: place.holder.clone(),
            plane: plane.into(),
            env_id: environment.to_vec(),
        };
        let attached = layerfs.attach(request).await?.into_inner();
        used = attached.plane();
        paths.push(PathBuf::from(attached.mount_path));
    }
    let name = || format!("mount {} at {}", record.reference, record.dir.display());
    match &paths[..] {
        [] => return Err(Error::invalid(format!("{} has no layers", record.reference)).into()),
        // One layer of an environment may hold whiteouts, but there is nothing below to hide.
        [only] if !record.writable => {
            let attributes = Attributes { read_only: true, ..HARMLESS };
            sys::mount::bind(only, &record.dir, attributes, Recursive::No).context(name)?;
        }
        layers => overlay(place, record, layers).context(name)?,
    }
    Ok(used)
}

fn overlay(place: &Place, record: &Record, layers: &[PathBuf]) -> std::io::Result<()> {
    let lowers: Vec<_> = layers.iter().rev().map(|path| OverlayLower::Path(path)).collect();
    let folders = if record.writable { Some(scratch(&place.scratch)?) } else { None };
    let overlay = Overlay {
        name: "lamella",
        lowers: &lowers,
        upper: folders
            .as_ref()
            .map(|(upper, work)| OverlayUpper { upper: upper.as_fd(), work: work.as_fd() }),
        volatile: false,
    };
    let attributes = Attributes { read_only: !record.writable, ..HARMLESS };
    overlay.mount_detached(attributes)?.attach(&record.dir)
}

type Folders = (std::os::fd::OwnedFd, std::os::fd::OwnedFd);

fn scratch(path: &Path) -> std::io::Result<Folders> {
    let (upper, work) = (path.join("upper"), path.join("work"));
    for folder in [&upper, &work] {
        DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
    }
    Ok((sys::mount::open_place(&upper)?, sys::mount::open_place(&work)?))
}

/// Detaches what a record names, then forgets it. Nothing may be mounted any more.
async fn take_back(
    images: &mut Images,
    layerfs: &mut LayerFsClient<Channel>,
    place: &Place,
    record: &Record,
) -> Outcome {
    for layer in &record.layers {
        let request = DetachRequest { layer_id: layer.0.to_vec(), holder: place.holder.clone() };
        match layerfs.detach(request).await.map_err(proto::status::from_status) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    let_go(images, record).await;
    forget(place).map_err(Failure::from)
}

fn forget(place: &Place) -> Result<()> {
    let absent = |error: &std::io::Error| error.kind() == std::io::ErrorKind::NotFound;
    match std::fs::remove_dir_all(&place.scratch) {
        Err(error) if !absent(&error) => {
            return Err(Error::io(format!("remove {}", place.scratch.display()), error));
        }
        _ => {}
    }
    match std::fs::remove_file(&place.record) {
        Err(error) if !absent(&error) => {
            Err(Error::io(format!("remove {}", place.record.display()), error))
        }
        _ => Ok(()),
    }
}

/// `umount`
pub async fn umount(scene: &Scene, args: &Umount) -> Outcome {
    let dir =
        std::fs::canonicalize(&args.dir).context(|| format!("unmount {}", args.dir.display()))?;
    let place = Place::of(&scene.settings, &dir);
    // Where nothing was ever mounted nothing is made.
    let _lock = if place.record.exists() { Some(place.hold().await?) } else { None };
    let Some(record) = read_record(&place.record)? else {
        let text = format!("{} is no mount of {}", dir.display(), scene.settings.data().display());
        return Err(Error::not_found(text))
            .remedy(|_| Some("name the directory and --data as for `mount`".to_owned()));
    };
    unmount(&scene.settings, scene.out, &place, &record).await?;
    scene.out.result(&record, || format!("{} is free", record.dir.display()))
}

async fn unmount(settings: &Settings, out: Output, place: &Place, record: &Record) -> Outcome {
    if is_mounted(&record.dir)? {
        sys::mount::unmount(&record.dir, Unmount::Now)
            .context(|| format!("unmount {}", record.dir.display()))
            .remedy(|error| {
                (error.kind() == ErrorKind::Busy)
                    .then(|| "end what uses it (`fuser -vm`)".to_owned())
            })?;
    }
    let node = start::connect(settings, Lifetime::WhileUsed, out).await?;
    let mut layerfs = connect_fsd(settings).await?;
    take_back(&mut Images::of_node(node), &mut layerfs, place, record).await
}

/// Whether any mount is recorded.
pub fn any(settings: &Settings) -> bool {
    !records(settings).is_empty()
}

fn records(settings: &Settings) -> Vec<Record> {
    let entries = std::fs::read_dir(settings.run("mounts")).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .filter_map(|path| read_record(&path).ok().flatten())
        .collect()
}

/// Where layers of the node are mounted on this host, as the mount table knows it: by the files of the node
/// cache that they show, and overlays over them.
pub fn lingering(settings: &Settings) -> Result<Vec<String>> {
    let mounts = sys::mount::read_mounts().context(|| "read the mount table".to_owned())?;
    let ours = [settings.data().as_os_str().as_bytes(), b"/"].concat();
    let is_ours = |text: &[u8]| text.windows(ours.len()).any(|part| part == ours);
    let run = settings.data().join("run");
    let lingers = mounts.iter().filter(|mount| {
        let shows =
            matches!(mount.kind.as_str(), "erofs" | "overlay") || mount.kind.contains("fuse");
        let elsewhere = !mount.mount_point.starts_with(&run);
        shows
            && elsewhere
            && (is_ours(mount.source.as_bytes()) || is_ours(mount.super_options.as_bytes()))
    });
    Ok(lingers.map(|mount| mount.mount_point.display().to_string()).collect())
}

/// Takes back every mount; a busy one is an error that names it.
pub async fn unmount_all(settings: &Settings, out: Output) -> Outcome {
    for record in records(settings) {
        let place = Place::of(settings, &record.dir);
        let _lock = place.hold().await?;
        if let Some(record) = read_record(&place.record)? {
            unmount(settings, out, &place, &record).await?;
        }
    }
    Ok(())
}
