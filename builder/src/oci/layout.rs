//! Container images in files: OCI layouts, OCI archives and what `docker save` writes.

use super::assemble::{ImageParts, LayerPlan, assemble};
use super::document::{choose_named, configuration, resolve};
use super::originals::Documents;
use super::{MAX_DOCUMENT_BYTES, check_digest, check_size, parse};
use crate::content::{Content, Origin, Place};
use crate::index::{Index, NodeKind, split};
use crate::options::BuildOptions;
use crate::path;
use crate::progress::Progress;
use crate::source::blob::Region;
use crate::source::{ImageFormat, Loaded, archive};
use layer::{Context, Error, ErrorKind, Result};
use oci_spec::image::{Descriptor, ImageIndex};
use serde::Deserialize;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// Symbolic links between a name and its file.
const MAX_SYMLINKS: usize = 8;
/// Where a layout keeps the name of an image.
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// Where containerd keeps the full name of an image.
const CONTAINERD_NAME: &str = "io.containerd.image.name";

/// Lists an image; `tag` may be left out when there is one.
pub(crate) fn load(
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
                let file = File::open(&full).map_err(|error| match error.kind() {
                    io::ErrorKind::NotFound => {
                        Error::not_found(format!("there is no {path} in the layout"))
                    }
                    _ => Error::io(format!("open {path}"), error),
                })?;
                Region::whole(file, path.to_owned())
            }
            Self::Archive(index) => region(index, path),
        }
    }

    fn document(&self, path: &str) -> Result<Vec<u8>> {
        self.open(path)?.bytes(MAX_DOCUMENT_BYTES)
    }

    fn blob(&self, descriptor: &Descriptor) -> Result<Region> {
        let digest = descriptor.digest().to_string();
        let region = self.open(&blob_path(&digest)?).context(|| format!("blob {digest}"))?;
        check_size(&region.name, descriptor.size(), region.length)?;
        Ok(region)
    }

    fn described(&self, descriptor: &Descriptor) -> Result<Vec<u8>> {
        let region = self.blob(descriptor)?;
        region.verify(descriptor.digest().as_ref())?;
        region.bytes(MAX_DOCUMENT_BYTES)
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
    check_digest(digest)?;
    Ok(format!("blobs/{}", digest.replacen(':', "/", 1)))
}

fn from_layout(
    files: &Files,
    tag: Option<&str>,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Loaded> {
    let index: ImageIndex = parse(&files.document("index.json")?, "index.json")?;
    let platform = options.platform.as_ref();
    let chosen = choose_named(&index, tag, [REF_NAME, CONTAINERD_NAME], platform)?;
    let name = chosen.digest().to_string();
    let found = resolve(files.described(chosen)?, name, platform, &|it| files.described(it))?;
    let descriptors = found.manifest.layers();
    let config_bytes = files.described(found.manifest.config())?;
    let wanted = platform.filter(|platform| !found.by_index && !platform.fits(chosen));
    let config = configuration(&config_bytes, descriptors.len(), wanted)?;
    let parts = ImageParts {
        layers: LayerPlan::all(&config, descriptors),
        documents: Documents::new(Some(found.bytes), config_bytes)?,
        fetch: &|at, _| files.blob(&descriptors[at]),
        at_once: 1,
        config,
    };
    assemble(&parts, options, progress)
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
    let images: Vec<DockerImage> = parse(&files.document("manifest.json")?, "manifest.json")?;
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
    let config_bytes = files.document(&image.config)?;
    let names = image.layers.clone().unwrap_or_default();
    let config = configuration(&config_bytes, names.len(), options.platform.as_ref())?;
    let parts = ImageParts {
        layers: LayerPlan::all(&config, &[]),
        documents: Documents::new(None, config_bytes)?,
        fetch: &|at, _| files.open(&names[at]),
        at_once: 1,
        config,
    };
    assemble(&parts, options, progress)
}
