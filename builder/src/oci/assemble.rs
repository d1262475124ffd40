//! The layers of an image become indexes: one for each, or one for all.
//!
//! Layers follow the OCI image specification ("Applying Changesets"): whiteouts and opaque marks concern the
//! layers below, wherever they stand in their own.
//!
//! A layer that the store has a conversion of is not fetched. Its tree comes from the store then, and where
//! a layer above it needs more of it than the tree (a hard link across layers takes the file's bytes along),
//! the image is read again without such shortcuts, so that the result never depends on what was there before.

use super::ahead::{Ahead, Fetch};
use super::originals::{self, Documents, Original, Reused};
use super::run_config;
use crate::content::Place;
use crate::index::{Index, NodeIx, NodeKind};
use crate::merge::{merge, rebase};
use crate::options::{BuildOptions, ImageLayers};
use crate::progress::Progress;
use crate::source::archive::{Digests, Names, load_layer};
use crate::source::blob::Region;
use crate::source::{Loaded, LoadedLayer};
use layer::{Context, Result};
use oci_spec::image::{Descriptor, ImageConfiguration};
use sha2::Digest as _;
use std::collections::BTreeMap;

/// The annotation of a layer that says which tar it was made of.
pub(crate) const DIFF_ID: &str = "oci.diff_id";

/// One layer of an image, not yet fetched.
#[derive(Debug)]
pub(super) struct LayerPlan {
    /// The digest of its tar.
    pub diff_id: String,
    /// The digest of the blob that the tar came in, where that is known.
    pub blob: Option<String>,
}

impl LayerPlan {
    /// The layers of a configuration; `descriptors` are parallel, or empty where nobody describes blobs.
    pub(super) fn all(config: &ImageConfiguration, descriptors: &[Descriptor]) -> Vec<Self> {
        let blob = |at| descriptors.get(at).map(|it: &Descriptor| it.digest().to_string());
        let diff_ids = config.rootfs().diff_ids().iter().enumerate();
        diff_ids.map(|(at, diff_id)| Self { diff_id: diff_id.clone(), blob: blob(at) }).collect()
    }
}

/// An image whose documents were read.
pub(super) struct ImageParts<'a> {
    /// Bottom first.
    pub layers: Vec<LayerPlan>,
    /// What says how to run in it.
    pub config: ImageConfiguration,
    /// The documents themselves.
    pub documents: Documents,
    /// Brings a layer; what it brings is not verified yet.
    pub fetch: &'a Fetch<'a>,
    /// How many are brought side by side.
    pub at_once: usize,
}

/// Lists all layers of an image.
pub(super) fn assemble(
    parts: &ImageParts<'_>,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Loaded> {
    let shortcuts = options.image_layers == ImageLayers::Stacked && options.originals.is_some();
    let layers = match attempt(parts, shortcuts, options, progress)? {
        Some(layers) => layers,
        None => attempt(parts, false, options, progress)?.unwrap_or_default(),
    };
    Ok(Loaded {
        layers,
        config: Some(run_config(&parts.config)),
        documents: Some(parts.documents.clone()),
    })
}

/// Nothing when a shortcut turned out to be none.
fn attempt(
    parts: &ImageParts<'_>,
    shortcuts: bool,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Option<Vec<LoadedLayer>>> {
    // What stands for a layer depends on the tars below it, not on their content.
    let mut chain = String::new();
    let mut found = Vec::new();
    for plan in &parts.layers {
        options.cancel.check()?;
        found.push(match shortcuts {
            true => originals::find(plan, &chain, &annotations(plan), options)?,
            false => None,
        });
        chain = chain_id(&chain, &plan.diff_id);
    }
    let wanted = found.iter().enumerate().filter(|(_, found)| found.is_none());
    let wanted = wanted.map(|(at, _)| at).collect();
    Ahead::with(parts.fetch, wanted, parts.at_once, |ahead| {
        stack(parts, found, ahead, shortcuts, options, progress)
    })
}

/// Unpacks and merges the layers, those that were found and those that are brought.
fn stack(
    parts: &ImageParts<'_>,
    found: Vec<Option<Reused>>,
    ahead: &Ahead<'_>,
    shortcuts: bool,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Option<Vec<LoadedLayer>>> {
    let stacked = options.image_layers == ImageLayers::Stacked;
    let mut below = Index::new();
    let mut chain = String::new();
    let mut loaded = Vec::new();
    for (plan, found) in parts.layers.iter().zip(found) {
        options.cancel.check()?;
        let annotations = annotations(plan);
        let (index, layer) = match found {
            Some(Reused { index, file }) => {
                let mut layer = LoadedLayer::new(index.clone(), annotations);
                layer.reused = Some(file);
                (index, layer)
            }
            None => {
                let region = ahead.next()?;
                let name = region.name.clone();
                let (index, mut layer) =
                    convert(region, plan, &below, &chain, options, progress).context(|| name)?;
                if shortcuts && refers_to_chunks(&layer.index) {
                    return Ok(None);
                }
                if loaded.is_empty() {
                    layer.index.clear_marks();
                }
                layer.index.node_mut(NodeIx::ROOT).implied = false;
                layer.annotations = annotations;
                (index, layer)
            }
        };
        if stacked {
            loaded.push(layer);
        }
        below = merge(below, index)?;
        below.clear_marks();
        chain = chain_id(&chain, &plan.diff_id);
    }
    if !stacked || loaded.is_empty() {
        loaded = vec![LoadedLayer::new(below, BTreeMap::new())];
    }
    Ok(Some(loaded))
}

fn annotations(plan: &LayerPlan) -> BTreeMap<String, String> {
    BTreeMap::from([(DIFF_ID.to_owned(), plan.diff_id.clone())])
}

/// Unpacks and lists one layer above what is below it.
fn convert(
    region: Region,
    plan: &LayerPlan,
    below: &Index,
    chain: &str,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<(Index, LoadedLayer)> {
    let digests = Digests { stored: plan.blob.clone(), plain: Some(plan.diff_id.clone()) };
    let (index, unpacked) = load_layer(region, &digests, Names::ImageLayer, options, progress)?;
    let independent = stands_alone(&index);
    let index = rebase(below, index)?;
    let mut layer = LoadedLayer::new(index.clone(), BTreeMap::new());
    if options.originals.is_some() {
        layer.original = Some(Original {
            diff_id: plan.diff_id.clone(),
            blob: plan.blob.clone(),
            below: chain.to_owned(),
            independent,
            unpacked,
        });
    }
    Ok((index, layer))
}

/// Whether a layer becomes the same, whatever lies below it.
fn stands_alone(index: &Index) -> bool {
    index.nodes.iter().all(|node| {
        !node.implied
            && !node.opaque
            && !matches!(node.kind, NodeKind::Whiteout | NodeKind::Link(_))
    })
}

fn refers_to_chunks(index: &Index) -> bool {
    index.nodes.iter().any(|node| match &node.kind {
        NodeKind::Regular(content) => matches!(content.place, Place::Chunks(_)),
        _ => false,
    })
}

/// What the OCI image specification calls a ChainID: the digest of a stack of tars.
fn chain_id(below: &str, diff_id: &str) -> String {
    if below.is_empty() {
        return diff_id.to_owned();
    }
    let digest = sha2::Sha256::digest(format!("{below} {diff_id}"));
    crate::source::blob::hex("sha256:", &digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_those_of_the_specification() {
        let ids: Vec<String> =
            ["a", "b"].iter().map(|it| format!("sha256:{}", it.repeat(64))).collect();
        assert_eq!(chain_id("", &ids[0]), ids[0]);
        let text = format!("{} {}", ids[0], ids[1]);
        let hex = crate::source::blob::hex("sha256:", &sha2::Sha256::digest(text));
        assert_eq!(chain_id(&ids[0], &ids[1]), hex);
    }
}
