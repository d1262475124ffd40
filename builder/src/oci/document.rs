//! The documents of images: which of several images is meant, and what its manifest and configuration say.

use super::{check_digest, parse};
use layer::environment::RunConfig;
use layer::{Error, ErrorKind, Result};
use oci_spec::image::{Arch, Descriptor, ImageConfiguration, ImageIndex, ImageManifest, Os};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How deep indexes may lie in indexes.
const MAX_INDEX_DEPTH: usize = 4;
/// The most layers of one image.
const MAX_LAYERS: usize = 1000;
/// What configurations of container images are called.
const CONFIG_TYPES: [&str; 2] =
    ["application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"];

/// What a program is made for: `linux/arm64/v8`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform {
    /// `linux`.
    pub os: String,
    /// As Go calls it: `amd64`, `arm64`.
    pub architecture: String,
    /// `v8`; `None` takes any.
    pub variant: Option<String>,
}

impl Platform {
    /// The one of this machine.
    pub fn host() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            "x86" => "386",
            "powerpc64" => "ppc64le",
            other => other,
        };
        Self { os: "linux".to_owned(), architecture: architecture.to_owned(), variant: None }
    }

    pub(super) fn fits(&self, descriptor: &Descriptor) -> bool {
        descriptor.platform().as_ref().is_some_and(|platform| {
            platform.os() == &Os::from(self.os.as_str())
                && platform.architecture() == &Arch::from(self.architecture.as_str())
                && (self.variant.is_none() || &self.variant == platform.variant())
        })
    }
}

impl FromStr for Platform {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let parts: Vec<&str> = text.split('/').collect();
        let (os, architecture, variant) = match parts[..] {
            [architecture] => ("linux", architecture, None),
            [os, architecture] => (os, architecture, None),
            [os, architecture, variant] => (os, architecture, Some(variant.to_owned())),
            _ => ("", "", None),
        };
        if os.is_empty() || architecture.is_empty() {
            let text = format!("{text:?} is no platform; write OS/ARCHITECTURE[/VARIANT]");
            return Err(Error::invalid(text));
        }
        Ok(Self { os: os.to_owned(), architecture: architecture.to_owned(), variant })
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        self.variant.as_ref().map_or(Ok(()), |variant| write!(f, "/{variant}"))
    }
}

/// Something in a registry that refers to an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Referrer {
    /// The digest of its manifest.
    pub digest: String,
    /// The length of its manifest.
    pub bytes: u64,
    /// What it is, where that is said.
    pub artifact_type: Option<String>,
}

impl From<&Descriptor> for Referrer {
    fn from(descriptor: &Descriptor) -> Self {
        Self {
            digest: descriptor.digest().to_string(),
            bytes: descriptor.size(),
            artifact_type: descriptor.artifact_type().as_ref().map(ToString::to_string),
        }
    }
}

/// A manifest with the bytes that it was read from.
#[derive(Debug)]
pub(super) struct Manifest {
    pub manifest: ImageManifest,
    pub bytes: Vec<u8>,
    /// Whether an index led to it, by the platform that was wanted.
    pub by_index: bool,
}

/// Enough of a document to tell what it is.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Shape {
    schema_version: Option<u64>,
    manifests: Option<serde::de::IgnoredAny>,
    layers: Option<serde::de::IgnoredAny>,
    config: Option<serde::de::IgnoredAny>,
}

/// Goes from a manifest or index to the manifest of one image. `fetch` answers verified documents.
pub(super) fn resolve(
    mut bytes: Vec<u8>,
    mut name: String,
    platform: Option<&Platform>,
    fetch: &dyn Fn(&Descriptor) -> Result<Vec<u8>>,
) -> Result<Manifest> {
    // Digests allow no circle, but whoever answers by tags could go on for ever.
    for depth in 0..MAX_INDEX_DEPTH {
        let shape: Shape = parse(&bytes, &name)?;
        match (shape.manifests.is_some(), shape.layers.is_some() || shape.config.is_some()) {
            (true, true) => {
                let text = format!("{name} claims to be both an index and a manifest");
                return Err(Error::invalid(text));
            }
            (true, false) => {
                let index: ImageIndex = parse(&bytes, &name)?;
                let chosen = choose(index.manifests(), platform, &name)?;
                bytes = fetch(chosen)?;
                name = chosen.digest().to_string();
            }
            (false, true) => {
                let manifest: ImageManifest = parse(&bytes, &name)?;
                check_manifest(&manifest, &name)?;
                return Ok(Manifest { manifest, bytes, by_index: depth > 0 });
            }
            (false, false) => {
                let version = shape.schema_version.unwrap_or(0);
                let text = format!("{name} is no image manifest (schema version {version})");
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
        }
    }
    Err(Error::invalid("image indexes lie too deep in each other"))
}

fn check_manifest(manifest: &ImageManifest, name: &str) -> Result<()> {
    let kind = manifest.config().media_type().to_string();
    if !CONFIG_TYPES.contains(&kind.as_str()) {
        let text = format!("{name} holds {kind:?}, which is no container image");
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    if manifest.layers().len() > MAX_LAYERS {
        let text = format!("{name} has {} layers (at most {MAX_LAYERS})", manifest.layers().len());
        return Err(Error::invalid(text));
    }
    for layer in manifest.layers() {
        check_digest(layer.digest().as_ref())?;
        let kind = layer.media_type().to_string();
        if !kind.contains("tar") || kind.contains("encrypted") {
            let text = format!("layer {} is {kind:?}, which cannot be read", layer.digest());
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
    }
    check_digest(manifest.config().digest().as_ref())
}

/// The configuration that belongs to these layers. `wanted` is the platform that was asked for where no index has
/// decided about it.
pub(super) fn configuration(
    bytes: &[u8],
    layers: usize,
    wanted: Option<&Platform>,
) -> Result<ImageConfiguration> {
    let config: ImageConfiguration = parse(bytes, "the configuration")?;
    if let Some(wanted) = wanted {
        let (os, architecture) = (config.os().to_string(), config.architecture().to_string());
        if (&os, &architecture) != (&wanted.os, &wanted.architecture) {
            let text = format!("no image for {wanted}, only for {os}/{architecture}");
            return Err(Error::not_found(text));
        }
    }
    if config.os() != &Os::Linux {
        let text = format!("an image for {}, not for linux", config.os());
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let diff_ids = config.rootfs().diff_ids();
    if diff_ids.len() != layers {
        let text = format!("{layers} layers, but digests of {}", diff_ids.len());
        return Err(Error::corrupt(text));
    }
    diff_ids.iter().try_for_each(|diff_id| check_digest(diff_id))?;
    Ok(config)
}

/// One of the images of an index: the only one, or the one for the platform.
fn choose<'a>(
    manifests: &'a [Descriptor],
    platform: Option<&Platform>,
    name: &str,
) -> Result<&'a Descriptor> {
    let wanted = platform.cloned().unwrap_or_else(Platform::host);
    let stated = |descriptor: &&Descriptor| descriptor.platform().is_some();
    match manifests {
        [] => Err(Error::not_found(format!("{name} holds no image"))),
        // What states nothing is taken at its word; what nobody asked for by name, too.
        [only] if platform.is_none() || !stated(&only) => Ok(only),
        many => many.iter().find(|descriptor| wanted.fits(descriptor)).ok_or_else(|| {
            let mut there: Vec<String> = many.iter().filter_map(show_platform).collect();
            there.dedup();
            there.truncate(20);
            Error::not_found(format!(
                "no image for {wanted} in {name}, only for: {}",
                there.join(", ")
            ))
        }),
    }
}

fn show_platform(descriptor: &Descriptor) -> Option<String> {
    let platform = descriptor.platform().as_ref()?;
    let text = format!("{}/{}", platform.os(), platform.architecture());
    (!text.contains("unknown")).then_some(text)
}

/// The image that a layout's own index means: by tag when one is given, then by platform. Unlike in an
/// index inside, two that fit are two images.
pub(super) fn choose_named<'a>(
    index: &'a ImageIndex,
    tag: Option<&str>,
    names: [&str; 2],
    platform: Option<&Platform>,
) -> Result<&'a Descriptor> {
    let named = |descriptor: &&Descriptor, tag: &str| {
        let annotations = descriptor.annotations().as_ref();
        names
            .iter()
            .any(|key| annotations.and_then(|all| all.get(*key)).is_some_and(|it| it == tag))
    };
    let mut all: Vec<&Descriptor> = index.manifests().iter().collect();
    if let Some(tag) = tag {
        all.retain(|descriptor| named(descriptor, tag));
        if all.is_empty() {
            return Err(Error::not_found(format!("no image {tag:?} in the layout")));
        }
    }
    let wanted = platform.cloned().unwrap_or_else(Platform::host);
    match &all[..] {
        [] => return Err(Error::not_found("the layout holds no image")),
        [only] => return Ok(only),
        _ => {}
    }
    let count = all.len();
    all.retain(|descriptor| wanted.fits(descriptor));
    match &all[..] {
        [only] => Ok(only),
        [] => {
            let text = format!("none of {count} images is for {wanted}; name one with :TAG");
            Err(Error::not_found(text))
        }
        _ => Err(Error::invalid("the layout holds several images; name one with :TAG")),
    }
}

/// The run configuration of an image.
pub(crate) fn run_config(image: &ImageConfiguration) -> RunConfig {
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn descriptor(byte: u8, platform: Value) -> Value {
        let digest = format!("sha256:{}", format!("{byte:02x}").repeat(32));
        let mut value = json!({"mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": digest, "size": 10});
        if !platform.is_null() {
            value["platform"] = platform;
        }
        value
    }

    fn index(manifests: &[Value]) -> Vec<u8> {
        serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": manifests})).unwrap()
    }

    fn chosen(manifests: &[Value], platform: &str) -> Result<String> {
        let index: ImageIndex = parse(&index(manifests), "x")?;
        let platform: Platform = platform.parse()?;
        choose(index.manifests(), Some(&platform), "x")
            .map(|it| it.digest().to_string()[7..9].to_owned())
    }

    #[test]
    fn the_platform_decides() {
        let many = || {
            vec![
                descriptor(1, json!({"os": "linux", "architecture": "amd64"})),
                descriptor(2, json!({"os": "linux", "architecture": "arm", "variant": "v6"})),
                descriptor(3, json!({"os": "linux", "architecture": "arm", "variant": "v7"})),
                descriptor(4, json!({"os": "windows", "architecture": "amd64"})),
                descriptor(5, json!({"os": "unknown", "architecture": "unknown"})),
            ]
        };
        for (platform, found) in [
            ("linux/amd64", "01"),
            ("amd64", "01"),
            ("linux/arm", "02"),
            ("linux/arm/v7", "03"),
            ("windows/amd64", "04"),
        ] {
            assert_eq!(chosen(&many(), platform).unwrap(), found, "{platform}");
        }
        let error = chosen(&many(), "linux/s390x").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.chain().contains("linux/arm") && !error.chain().contains("unknown"));
        assert_eq!(chosen(&[descriptor(7, Value::Null)], "linux/s390x").unwrap(), "07");
        for bad in ["", "/", "a/", "a/b/c/d"] {
            assert!(bad.parse::<Platform>().is_err(), "{bad}");
        }
    }

    #[test]
    fn absurd_documents_are_refused() {
        let never = |_: &Descriptor| -> Result<Vec<u8>> { panic!("nothing is to be fetched") };
        let kind =
            |bytes: &[u8]| resolve(bytes.to_vec(), "x".into(), None, &never).unwrap_err().kind();
        assert_eq!(kind(b"not json"), ErrorKind::Corrupt);
        assert_eq!(kind(b"{}"), ErrorKind::Unsupported);
        assert_eq!(kind(br#"{"schemaVersion": 1, "fsLayers": []}"#), ErrorKind::Unsupported);
        assert_eq!(kind(br#"{"schemaVersion":2,"manifests":[],"layers":[]}"#), ErrorKind::Invalid);
        assert_eq!(kind(&index(&[])), ErrorKind::NotFound);
        let negative = br#"{"schemaVersion":2,"manifests":[{"mediaType":"a","digest":"sha256:00","size":-1}]}"#;
        assert_eq!(kind(negative), ErrorKind::Corrupt);
        let deep = "[".repeat(100_000);
        assert_eq!(kind(deep.as_bytes()), ErrorKind::Corrupt);
        let config = |media_type: &str| {
            let digest = format!("sha256:{}", "0".repeat(64));
            json!({"mediaType": media_type, "digest": digest, "size": 2})
        };
        let chart = json!({"schemaVersion": 2, "layers": [],
            "config": config("application/vnd.cncf.helm.config.v1+json")});
        assert_eq!(kind(&serde_json::to_vec(&chart).unwrap()), ErrorKind::Unsupported);
        let layers = vec![config("application/vnd.oci.image.layer.v1.tar"); MAX_LAYERS + 1];
        let many = json!({"schemaVersion": 2, "layers": layers, "config": config(CONFIG_TYPES[0])});
        assert_eq!(kind(&serde_json::to_vec(&many).unwrap()), ErrorKind::Invalid);
    }

    #[test]
    fn an_index_that_leads_to_itself_ends() {
        let circle = index(&[descriptor(1, Value::Null)]);
        let same = |_: &Descriptor| Ok(circle.clone());
        let error = resolve(circle.clone(), "x".into(), None, &same).unwrap_err();
        assert!(error.chain().contains("too deep"), "{}", error.chain());
    }
}
