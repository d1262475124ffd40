//! What an image of an environment says, without making a byte of its layers.
//!
//! Whoever has the layers in another way needs the documents only. A layer that never was a blob of an image
//! goes by the digest of a document that stands for it.

use super::blobs::Blob;
use super::{Compression, ExportedLayer, came, documents};
use crate::progress::Progress;
use crate::source::blob::Hasher;
use layer::environment::Environment;
use layer::{Error, LayerId, Result};
use oci_spec::image::Descriptor;
use store::Store;

/// What a document that stands for a layer is.
const STAND_IN_TYPE: &str = "application/vnd.lamella.layer.v1+json";

/// A layer, as the documents name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DescribedLayer {
    /// The layer.
    pub layer: LayerId,
    /// What the configuration calls it.
    pub diff_id: String,
    /// The document that the manifest names, where it does not name the blob that the layer came in.
    pub stand_in: Option<Vec<u8>>,
}

/// An image without its layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// The manifest of an OCI image.
    pub manifest: Vec<u8>,
    /// Its media type.
    pub media_type: String,
    /// The configuration.
    pub config: Vec<u8>,
    /// The bottom one first.
    pub layers: Vec<DescribedLayer>,
}

/// Describes an environment: as the image that it came from, as far as its layers are those of one.
///
/// `diff_ids` says which tar each layer was made of, if of any; `stand_in` makes the document for a layer.
pub fn describe(
    store: &Store,
    environment: &Environment,
    diff_ids: &[Option<String>],
    stand_in: impl Fn(&LayerId) -> Vec<u8>,
    progress: &dyn Progress,
) -> Result<Description> {
    if diff_ids.len() != environment.layers.len() {
        return Err(Error::invalid("every layer has a diffID or none"));
    }
    let came = came(store, environment, progress)?;
    let (mut layers, mut named) = (Vec::new(), Vec::new());
    for (at, &layer) in environment.layers.iter().enumerate() {
        let blob = came.as_ref().and_then(|came| came.blob_at(at, diff_ids));
        let (one, stand_in) = match (blob, &diff_ids[at]) {
            (Some(blob), Some(diff_id)) => (original(layer, blob, diff_id), None),
            _ => {
                let document = stand_in(&layer);
                (standing(layer, &document), Some(document))
            }
        };
        layers.push(DescribedLayer { layer, diff_id: one.diff_id.clone(), stand_in });
        named.push(one);
    }
    let config = documents::config(environment, came.as_ref(), &named)?;
    let blob = Blob { digest: sha256(&config), bytes: config.len() as u64 };
    let manifest = documents::manifest(came.as_ref(), &blob, &named)?;
    let media_type = documents::MANIFEST_TYPE.to_owned();
    Ok(Description { manifest, media_type, config, layers })
}

fn original(layer: LayerId, blob: &Descriptor, diff_id: &str) -> ExportedLayer {
    // The types of docker as those of the manifest that is written.
    let media_type = match blob.media_type().to_string() {
        it if it.ends_with(".diff.tar.gzip") => Compression::Gzip.media_type().to_owned(),
        it if it.ends_with(".diff.tar") => Compression::None.media_type().to_owned(),
        it => it,
    };
    let digest = blob.digest().to_string();
    let diff_id = diff_id.to_owned();
    ExportedLayer { layer, digest, bytes: blob.size(), diff_id, media_type, original: true }
}

fn standing(layer: LayerId, document: &[u8]) -> ExportedLayer {
    let digest = sha256(document);
    ExportedLayer {
        layer,
        digest: digest.clone(),
        bytes: document.len() as u64,
        diff_id: digest,
        media_type: STAND_IN_TYPE.to_owned(),
        original: false,
    }
}

fn sha256(bytes: &[u8]) -> String {
    let mut hasher = Hasher::sha256();
    hasher.update(bytes);
    hasher.digest()
}
