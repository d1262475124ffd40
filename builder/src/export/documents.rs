//! The documents of an exported image: those that it came with where nothing changed, else its old
//! configuration with what is new, else a fresh one.

use super::ExportedLayer;
use crate::oci::{Documents, Platform, run_config};
use layer::environment::{Environment, RunConfig};
use layer::{Error, ErrorKind, Result};
use oci_spec::image::{Descriptor, ImageConfiguration, ImageManifest};
use serde_json::{Map, Value, json};

pub(super) const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";
const CONFIG_TYPE: &str = "application/vnd.oci.image.config.v1+json";

/// The documents that an image came with, understood.
pub(super) struct Came {
    documents: Documents,
    config: ImageConfiguration,
    manifest: Option<ImageManifest>,
}

impl Came {
    pub(super) fn read(documents: Documents) -> Result<Self> {
        let broken = |error| {
            Error::corrupt("the kept documents of the image are malformed").with_source(error)
        };
        let config = serde_json::from_str(&documents.config).map_err(broken)?;
        let manifest = documents.manifest.as_deref().map(serde_json::from_str).transpose();
        let manifest = manifest.map_err(broken)?;
        Ok(Self { documents, config, manifest })
    }

    /// The blob that the tar with this diffID came in.
    pub(super) fn blob_of(&self, diff_id: &str) -> Option<String> {
        let at = self.config.rootfs().diff_ids().iter().position(|it| it == diff_id)?;
        Some(self.manifest.as_ref()?.layers().get(at)?.digest().to_string())
    }

    /// The blob of layer `at`, where the tars up to there are these.
    pub(super) fn blob_at(&self, at: usize, diff_ids: &[Option<String>]) -> Option<&Descriptor> {
        let came = self.config.rootfs().diff_ids().iter().map(Some);
        if came.len() <= at || !came.take(at + 1).eq(diff_ids[..=at].iter().map(Option::as_ref)) {
            return None;
        }
        self.manifest.as_ref()?.layers().get(at)
    }

    fn has_layers(&self, layers: &[ExportedLayer]) -> bool {
        self.config.rootfs().diff_ids().iter().eq(layers.iter().map(|layer| &layer.diff_id))
    }

    fn has_blobs(&self, layers: &[ExportedLayer]) -> bool {
        let Some(manifest) = &self.manifest else { return false };
        let blobs = manifest.layers().iter().map(|layer| layer.digest().to_string());
        blobs.eq(layers.iter().map(|layer| layer.digest.clone()))
    }
}

/// The configuration of the exported image.
pub(super) fn config(
    environment: &Environment,
    came: Option<&Came>,
    layers: &[ExportedLayer],
) -> Result<Vec<u8>> {
    let diff_ids: Vec<&str> = layers.iter().map(|layer| layer.diff_id.as_str()).collect();
    let mut value = match came {
        Some(came) if came.has_layers(layers) && run_config(&came.config) == environment.config => {
            return Ok(came.documents.config.clone().into_bytes());
        }
        Some(came) => {
            let mut value: Value =
                serde_json::from_str(&came.documents.config).map_err(internal)?;
            value["history"] = history(&value["history"], came, layers);
            value
        }
        None => {
            let platform = Platform::host();
            json!({"architecture": platform.architecture, "os": platform.os})
        }
    };
    let config = value["config"].as_object().cloned().unwrap_or_default();
    value["config"] = Value::Object(run(config, &environment.config));
    value["rootfs"] = json!({"type": "layers", "diff_ids": diff_ids});
    if let Some(object) = value.as_object_mut() {
        object.retain(|_, value| !value.is_null());
    }
    serde_json::to_vec(&value).map_err(internal)
}

/// The old history with an entry for each layer on top; nothing when the layers below are others.
fn history(old: &Value, came: &Came, layers: &[ExportedLayer]) -> Value {
    let below = came.config.rootfs().diff_ids();
    let Some(old) = old.as_array() else { return Value::Null };
    let is_prefix = below.len() <= layers.len()
        && below.iter().zip(layers).all(|(diff_id, layer)| *diff_id == layer.diff_id);
    let of_layers = old.iter().filter(|entry| entry["empty_layer"] != true).count();
    if !is_prefix || of_layers != below.len() {
        return Value::Null;
    }
    let new = layers[below.len()..]
        .iter()
        .map(|layer| json!({"created_by": "lamella", "comment": format!("layer {}", layer.layer)}));
    Value::Array(old.iter().cloned().chain(new).collect())
}

/// What an environment says, over what else a configuration holds.
fn run(mut config: Map<String, Value>, run: &RunConfig) -> Map<String, Value> {
    let set = |words: &[String]| -> Value {
        words.iter().map(|word| (word.clone(), json!({}))).collect::<Map<_, _>>().into()
    };
    let text = |text: &str| if text.is_empty() { Value::Null } else { json!(text) };
    let list = |words: &[String]| if words.is_empty() { Value::Null } else { json!(words) };
    let keys = |words: &[String]| if words.is_empty() { Value::Null } else { set(words) };
    for (key, value) in [
        ("Cmd", list(&run.cmd)),
        ("Entrypoint", list(&run.entrypoint)),
        ("Env", list(&run.env)),
        ("ExposedPorts", keys(&run.exposed_ports)),
        ("Labels", if run.labels.is_empty() { Value::Null } else { json!(run.labels) }),
        ("StopSignal", json!(run.stop_signal)),
        ("User", text(&run.user)),
        ("Volumes", keys(&run.volumes)),
        ("WorkingDir", text(&run.cwd)),
    ] {
        if value.is_null() {
            config.remove(key);
        } else {
            config.insert(key.to_owned(), value);
        }
    }
    config
}

/// The manifest: as it came when it is OCI's and says just this.
pub(super) fn manifest(
    came: Option<&Came>,
    config: &super::Blob,
    layers: &[ExportedLayer],
) -> Result<Vec<u8>> {
    let mut annotations = None;
    if let Some(Came { documents, manifest: Some(manifest), .. }) = came
        && came.is_some_and(|came| came.has_blobs(layers))
        && manifest.config().digest().to_string() == config.digest
    {
        let is_ocis =
            manifest.media_type().as_ref().is_none_or(|it| it.to_string() == MANIFEST_TYPE)
                && manifest.config().media_type().to_string() == CONFIG_TYPE;
        if let (true, Some(text)) = (is_ocis, &documents.manifest) {
            return Ok(text.clone().into_bytes());
        }
        annotations.clone_from(manifest.annotations());
    }
    let layers: Vec<Value> = layers
        .iter()
        .map(|layer| {
            json!({"mediaType": layer.media_type, "digest": layer.digest, "size": layer.bytes})
        })
        .collect();
    let mut value = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": config.digest, "size": config.bytes},
        "layers": layers,
    });
    if let Some(annotations) = annotations {
        value["annotations"] = json!(annotations);
    }
    serde_json::to_vec(&value).map_err(internal)
}

/// The index of the layout; the image is called `tag` in it.
pub(super) fn index(manifest: &super::Blob, config: &[u8], tag: &str) -> Result<Vec<u8>> {
    let config: Value = serde_json::from_slice(config).map_err(internal)?;
    let mut platform = Map::new();
    for key in ["architecture", "os", "variant", "os.version"] {
        if let Some(value) = config.get(key).filter(|value| value.is_string()) {
            platform.insert(key.to_owned(), value.clone());
        }
    }
    let value = json!({
        "schemaVersion": 2,
        "mediaType": INDEX_TYPE,
        "manifests": [{
            "mediaType": MANIFEST_TYPE,
            "digest": manifest.digest,
            "size": manifest.bytes,
            "platform": platform,
            "annotations": {"org.opencontainers.image.ref.name": tag},
        }],
    });
    serde_json::to_vec(&value).map_err(internal)
}

fn internal(error: serde_json::Error) -> Error {
    Error::new(ErrorKind::Internal, "documents of an image").with_source(error)
}
