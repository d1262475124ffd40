//! What layers are made from: directories and archives; container images are in [`crate::oci`].

pub mod archive;
pub(crate) mod blob;
pub mod directory;
pub(crate) mod spool;

use crate::index::Index;
use crate::oci::{self, Documents, ImageName, Original};
use crate::options::BuildOptions;
use crate::progress::Progress;
use layer::environment::RunConfig;
use layer::layer_file::LayerFile;
use layer::{Context, Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Something that layers can be made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A directory with everything below it.
    Directory(PathBuf),
    /// A tar file: plain, gz, zstd or xz, recognised by its content.
    Archive(PathBuf),
    /// A container image, and which of several; the tag may be left out when there is one.
    Image(ImageFormat, PathBuf, Option<String>),
    /// A container image in a registry.
    Registry(ImageName),
}

/// How a container image is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageFormat {
    /// An OCI image layout in a directory.
    OciLayout,
    /// An OCI image layout in a tar file.
    OciArchive,
    /// What `docker save` writes.
    DockerArchive,
}

impl ImageFormat {
    const ALL: [Self; 3] = [Self::OciLayout, Self::OciArchive, Self::DockerArchive];

    /// What stands before the path in a source's text.
    fn prefix(self) -> &'static str {
        match self {
            Self::OciLayout => "oci:",
            Self::OciArchive => "oci-archive:",
            Self::DockerArchive => "docker-archive:",
        }
    }
}

/// What a source holds, before contents are read.
#[derive(Debug)]
pub struct Loaded {
    /// Bottom first.
    pub layers: Vec<LoadedLayer>,
    /// How to run in it, where the source says so.
    pub config: Option<RunConfig>,
    /// The documents that said so, where it is a container image.
    pub documents: Option<Documents>,
}

/// One layer to be.
#[derive(Debug)]
pub struct LoadedLayer {
    /// Its tree.
    pub index: Index,
    /// What its manifest should say about where it came from.
    pub annotations: BTreeMap<String, String>,
    /// The finished layer, where the store has it already.
    pub(crate) reused: Option<Box<LayerFile>>,
    /// What to keep beside it.
    pub(crate) original: Option<Original>,
}

impl LoadedLayer {
    pub(crate) fn new(index: Index, annotations: BTreeMap<String, String>) -> Self {
        Self { index, annotations, reused: None, original: None }
    }
}

impl Source {
    /// Understands `dir`, `file.tar[.gz|.zst|.xz]`, `oci:DIR[:tag]`, `oci-archive:FILE[:tag]`,
    /// `docker-archive:FILE[:name:tag]` and `docker://HOST/NAME[:tag][@digest]`. A path without a prefix is looked at: a directory or a file.
    pub fn parse(text: &str) -> Result<Self> {
        for format in ImageFormat::ALL {
            if let Some(rest) = text.strip_prefix(format.prefix()) {
                let (path, tag) = split_tag(rest);
                return Ok(Self::Image(format, path, tag));
            }
        }
        if text.starts_with(oci::PREFIX) {
            return text.parse().map(Self::Registry);
        }
        if text.starts_with("sandbox:") {
            let text = format!("{text}: a sandbox is not built from; use `lamella pack-diff`");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let path = PathBuf::from(text);
        let metadata = std::fs::metadata(&path).context(|| format!("source {text}"))?;
        Ok(if metadata.is_dir() { Self::Directory(path) } else { Self::Archive(path) })
    }

    /// Lists what the source holds.
    pub fn load(&self, options: &BuildOptions, progress: &dyn Progress) -> Result<Loaded> {
        let plain = |mut index: Index| {
            index.clear_marks();
            let layers = vec![LoadedLayer::new(index, BTreeMap::new())];
            Loaded { layers, config: None, documents: None }
        };
        match self {
            Self::Directory(path) => directory::load(path, options, progress).map(plain),
            Self::Archive(path) => archive::load(path, options, progress).map(plain),
            Self::Image(format, path, tag) => {
                oci::load(*format, path, tag.as_deref(), options, progress)
            }
            Self::Registry(name) => oci::pull(name, options, progress),
        }
    }
}

impl FromStr for Source {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text)
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (prefix, path, tag) = match self {
            Self::Directory(path) | Self::Archive(path) => ("", path, &None),
            Self::Image(format, path, tag) => (format.prefix(), path, tag),
            Self::Registry(name) => return name.fmt(f),
        };
        write!(f, "{prefix}{}", path.display())?;
        tag.as_ref().map_or(Ok(()), |tag| write!(f, ":{tag}"))
    }
}

/// A path that exists as it stands has no tag; else the first colon after the last slash of the
/// path ends it.
fn split_tag(text: &str) -> (PathBuf, Option<String>) {
    if std::path::Path::new(text).exists() {
        return (PathBuf::from(text), None);
    }
    for (at, _) in text.match_indices(':') {
        if std::path::Path::new(&text[..at]).exists() {
            return (PathBuf::from(&text[..at]), Some(text[at + 1..].to_owned()));
        }
    }
    (PathBuf::from(text), None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().to_str().unwrap();
        assert_eq!(Source::parse(text).unwrap(), Source::Directory(dir.path().into()));
        assert_eq!(
            Source::parse(&format!("oci:{text}:name:v1")).unwrap(),
            Source::Image(ImageFormat::OciLayout, dir.path().into(), Some("name:v1".into()))
        );
        let missing = Source::parse("/nonexistent.tar").unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        let registry = Source::parse("docker://host.x/repo:tag").unwrap();
        assert_eq!(registry.to_string(), "docker://host.x/repo:tag");
        assert_eq!(Source::parse("sandbox:x").unwrap_err().kind(), ErrorKind::Unsupported);
    }
}
