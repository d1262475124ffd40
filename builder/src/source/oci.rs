//! Container images as a source: OCI layouts, OCI archives and what `docker save` writes.
//!
//! Documents and layers are compared with their digests before anything of them is believed. Layers
//! follow the OCI image specification ("Applying Changesets"): whiteouts and opaque marks concern the
//! layers below, wherever they stand in their own.

use super::archive::{self, Digests, Names, load_region};
use super::blob::Region;
use super::{ImageFormat, Loaded, LoadedLayer};
use crate::content::{Content, Origin, Place};
use crate::index::{Index, NodeIx, NodeKind, split};
use crate::merge::{merge, rebase};
use crate::options::{BuildOptions, ImageLayers};
use crate::path;
use crate::progress::Progress;
use layer::environment::RunConfig;
use layer::{Context, Error, ErrorKind, Result};
use oci_spec::image::{Arch, Descriptor, ImageConfiguration, ImageIndex, ImageManifest, Os};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// The most bytes of a document of an image.
const MAX_DOCUMENT_BYTES: u64 = 16 << 20;
/// How deep indexes may lie in indexes.
const MAX_INDEX_DEPTH: usize = 4;
/// Symbolic links between a name and its file.
const MAX_SYMLINKS: usize = 8;
/// Where a layout keeps the name of an image.
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// Where containerd keeps the full name of an image.
const CONTAINERD_NAME: &str = "io.containerd.image.name";

/// Lists an image; `tag` may be left out when there is one.
pub fn load(
    format: ImageFormat,
    path: &Path,
    tag: Option<&str>,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Loaded> {
    let files = match format {
        ImageFormat::OciLayout => Files::Directory(path.to_owned()),
        ImageFormat::OciArchive | ImageFormat::DockerArchive => {
            Files::Archive(archive::load(path, options, progress)?)
        }
    };
    let loaded = match format {
        ImageFormat::OciLayout | ImageFormat::OciArchive => {
            from_layout(&files, tag, options, progress)
        }
        ImageFormat::DockerArchive => from_docker(&files, tag, options, progress),
    };
    loaded.context(|| format!("image {}", path.display()))
}

/// The files of an image.
enum Files {
    Directory(PathBuf),
    Archive(Index),
}

impl Files {
    fn open(&self, path: &str) -> Result<Region> {
        match self {
            Self::Directory(root) => {
                let full = root.join(path);
                let file = File::open(&full).context(|| format!("open {path}"))?;
                Region::whole(file, path.to_owned())
            }
            Self::Archive(index) => region(index, path),
        }
    }

    fn document<T: for<'de> Deserialize<'de>>(
        &self,
        path: &str,
        digest: Option<&str>,
    ) -> Result<T> {
        let region = self.open(path)?;
        if let Some(digest) = digest {
            region.verify(digest)?;
        }
        serde_json::from_slice(&region.bytes(MAX_DOCUMENT_BYTES)?)
            .map_err(|error| Error::corrupt(format!("{path} is malformed")).with_source(error))
    }

    fn described<T: for<'de> Deserialize<'de>>(&self, descriptor: &Descriptor) -> Result<T> {
        let digest = descriptor.digest().to_string();
        self.document(&blob_path(&digest)?, Some(&digest))
    }
}

/// A file of an archive, through symbolic links.
fn region(index: &Index, path: &str) -> Result<Region> {
    let missing = || Error::not_found(format!("{path} is not in the archive"));
    let mut at = path.as_bytes().to_vec();
    // Old archives link equal layers to each other.
    for _ in 0..MAX_SYMLINKS {
        let ix = index.lookup(&at)?.ok_or_else(missing)?;
        match &index.node(ix).kind {
            NodeKind::Symlink(target) => {
                let (parent, _) = split(&at);
                at = if target.starts_with(b"/") {
                    target.clone()
                } else {
                    path::inside(&path::join(parent, target)).join(&b'/')
                };
            }
            NodeKind::Regular(content) => return content_region(index, content, path),
            _ => break,
        }
    }
    Err(missing())
}

fn content_region(index: &Index, content: &Content, path: &str) -> Result<Region> {
    let Place::Archive { origin, pieces } = &content.place else {
        return Err(Error::new(ErrorKind::Internal, "a file of an archive lies elsewhere"));
    };
    let Some(Origin::Archive { file, .. }) = index.origins.get(*origin as usize).map(|it| &**it)
    else {
        return Err(Error::new(ErrorKind::Internal, "an archive is gone"));
    };
    let start = match &pieces[..] {
        [] if content.size == 0 => 0,
        [piece] if piece.offset == 0 && piece.bytes == content.size => piece.at,
        _ => return Err(Error::invalid(format!("{path} is a sparse file"))),
    };
    let file = file.try_clone().context(|| format!("open {path}"))?;
    Ok(Region { file, start, length: content.size, name: path.to_owned() })
}

/// Where a layout keeps a blob. Only plain digests, as they become a path.
fn blob_path(digest: &str) -> Result<String> {
    match digest.split_once(':') {
        Some((algorithm @ ("sha256" | "sha512"), hex))
            if hex.bytes().all(|byte| byte.is_ascii_hexdigit()) =>
        {
            Ok(format!("blobs/{algorithm}/{hex}"))
        }
        _ => Err(Error::invalid(format!("{digest:?} is no sha256 or sha512 digest"))),
    }
}

fn from_layout(
    files: &Files,
    tag: Option<&str>,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Loaded> {
    let index: ImageIndex = files.document("index.json", None)?;
    let manifest: ImageManifest = files.described(&find_manifest(files, &index, tag)?)?;
    let config: ImageConfiguration = files.described(manifest.config())?;
    let mut layers = Vec::new();
    for (at, descriptor) in manifest.layers().iter().enumerate() {
        let digest = descriptor.digest().to_string();
        let region = files.open(&blob_path(&digest)?).context(|| format!("layer {digest}"))?;
        layers.push(ImageLayer {
            region,
            digests: Digests { stored: Some(digest), plain: None },
            diff_id: config.rootfs().diff_ids().get(at).cloned(),
        });
    }
    assemble(layers, &config, options, progress)
}

/// Chooses the image: by tag when one is given, then by this machine's platform.
fn find_manifest(files: &Files, index: &ImageIndex, tag: Option<&str>) -> Result<Descriptor> {
    let name = |descriptor: &Descriptor, key: &str| {
        descriptor.annotations().as_ref().and_then(|all| all.get(key).cloned())
    };
    let mut named: Vec<Descriptor> = index.manifests().clone();
    if let Some(tag) = tag {
        named.retain(|descriptor| {
            [REF_NAME, CONTAINERD_NAME]
                .iter()
                .any(|key| name(descriptor, key).as_deref() == Some(tag))
        });
        if named.is_empty() {
            return Err(Error::not_found(format!("no image {tag:?} in the layout")));
        }
    }
    let mut chosen = choose(&named)?;
    for _ in 0..MAX_INDEX_DEPTH {
        let media_type = chosen.media_type().to_string();
        if !media_type.contains("index") && !media_type.contains("manifest.list") {
            return Ok(chosen);
        }
        let inner: ImageIndex = files.described(&chosen)?;
        chosen = choose(inner.manifests())?;
    }
    Err(Error::invalid("image indexes lie too deep in each other"))
}

fn choose(manifests: &[Descriptor]) -> Result<Descriptor> {
    let arch = match std::env::consts::ARCH {
        "x86_64" => Arch::Amd64,
        "aarch64" => Arch::ARM64,
        other => Arch::Other(other.to_owned()),
    };
    match manifests {
        [] => Err(Error::not_found("the layout holds no image")),
        [only] => Ok(only.clone()),
        many => {
            let mut fitting = many.iter().filter(|descriptor| {
                descriptor.platform().as_ref().is_some_and(|platform| {
                    platform.os() == &Os::Linux && platform.architecture() == &arch
                })
            });
            match (fitting.next(), fitting.next()) {
                (Some(only), None) => Ok(only.clone()),
                (Some(_), Some(_)) => {
                    Err(Error::invalid("the layout holds several images; name one with :TAG"))
                }
                (None, _) => Err(Error::not_found(format!(
                    "none of {} images is for linux/{arch}; name one with :TAG",
                    many.len()
                ))),
            }
        }
    }
}

/// One image in `manifest.json` of a docker archive.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    layers: Option<Vec<String>>,
}

fn from_docker(
    files: &Files,
    tag: Option<&str>,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Loaded> {
    let images: Vec<DockerImage> = files.document("manifest.json", None)?;
    let has = |image: &DockerImage, tag: &str| {
        image
            .repo_tags
            .iter()
            .flatten()
            .any(|name| name == tag || name.strip_suffix(":latest") == Some(tag))
    };
    let image = match (tag, &images[..]) {
        (Some(tag), images) => images
            .iter()
            .find(|image| has(image, tag))
            .ok_or_else(|| Error::not_found(format!("no image {tag:?} in the archive")))?,
        (None, [only]) => only,
        (None, []) => return Err(Error::not_found("the archive holds no image")),
        (None, _) => {
            return Err(Error::invalid(
                "the archive holds several images; name one with :NAME:TAG",
            ));
        }
    };
    let config: ImageConfiguration = files.document(&image.config, None)?;
    let names = image.layers.clone().unwrap_or_default();
    let diff_ids = config.rootfs().diff_ids();
    if names.len() != diff_ids.len() {
        return Err(Error::corrupt(format!(
            "{} layers, but digests of {}",
            names.len(),
            diff_ids.len()
        )));
    }
    let mut layers = Vec::new();
    for (name, diff_id) in names.iter().zip(diff_ids) {
        layers.push(ImageLayer {
            region: files.open(name)?,
            digests: Digests { stored: None, plain: Some(diff_id.clone()) },
            diff_id: Some(diff_id.clone()),
        });
    }
    assemble(layers, &config, options, progress)
}

struct ImageLayer {
    region: Region,
    digests: Digests,
    diff_id: Option<String>,
}

fn assemble(
    layers: Vec<ImageLayer>,
    config: &ImageConfiguration,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Loaded> {
    let mut below = Index::new();
    let mut loaded = Vec::new();
    for layer in layers {
        options.cancel.check()?;
        let ImageLayer { region, digests, diff_id } = layer;
        let name = region.name.clone();
        let index = load_region(region, &digests, Names::ImageLayer, options, progress)?;
        let index = rebase(&below, index).context(|| name)?;
        if options.image_layers == ImageLayers::Stacked {
            let annotations =
                diff_id.map(|id| ("oci.diff_id".to_owned(), id)).into_iter().collect();
            let mut own = index.clone();
            if loaded.is_empty() {
                own.clear_marks();
            }
            own.node_mut(NodeIx::ROOT).implied = false;
            loaded.push(LoadedLayer { index: own, annotations });
        }
        below = merge(below, index)?;
        below.clear_marks();
    }
    if options.image_layers == ImageLayers::Merged || loaded.is_empty() {
        loaded = vec![LoadedLayer { index: below, annotations: BTreeMap::new() }];
    }
    Ok(Loaded { layers: loaded, config: Some(run_config(config)) })
}

/// The run configuration of an image.
fn run_config(image: &ImageConfiguration) -> RunConfig {
    let Some(config) = image.config() else { return RunConfig::default() };
    let mut run = RunConfig {
        cmd: config.cmd().clone().unwrap_or_default(),
        cwd: config.working_dir().clone().unwrap_or_default(),
        entrypoint: config.entrypoint().clone().unwrap_or_default(),
        env: config.env().clone().unwrap_or_default(),
        exposed_ports: config.exposed_ports().clone().unwrap_or_default(),
        labels: config.labels().clone().unwrap_or_default().into_iter().collect(),
        stop_signal: config.stop_signal().clone(),
        user: config.user().clone().unwrap_or_default(),
        volumes: config.volumes().clone().unwrap_or_default(),
    };
    // Maps of the document; their order must not decide about an id.
    run.exposed_ports.sort();
    run.volumes.sort();
    run
}
