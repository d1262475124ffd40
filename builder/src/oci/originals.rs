//! What is kept of an image beside its layers, so that it can go out again as it came: the framing of each
//! tar, the compression of each blob, and the documents.
//!
//! CRASH: a layer is committed first, then its framing, then its stream, then the documents; whatever is
//! missing afterwards only costs an export its old digests, and the next pull of the image adds it.

use super::assemble::LayerPlan;
use super::{check_digest, framing, parse, stream};
use crate::content::Place;
use crate::diff::from_layer;
use crate::index::{Index, NodeIx, NodeKind};
use crate::options::BuildOptions;
use crate::source::archive::Unpacked;
use crate::source::spool::Compression;
use layer::erofs::reader::Reader;
use layer::layer_file::LayerFile;
use layer::{Context, Digest, Error, ErrorKind, LayerId, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{BufWriter, Read, Write};
use store::{Kept, Store, Upload};

/// Bytes that are handed to the store at once.
const PART_BYTES: usize = 1 << 20;

/// The documents of an image, as they came.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Documents {
    /// The configuration.
    pub config: String,
    /// The manifest; an archive of docker has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
}

impl Documents {
    pub(super) fn new(manifest: Option<Vec<u8>>, config: Vec<u8>) -> Result<Self> {
        let text = |bytes, name: &str| {
            String::from_utf8(bytes).map_err(|_| Error::corrupt(format!("{name} is no text")))
        };
        let manifest = manifest.map(|bytes| text(bytes, "the manifest")).transpose()?;
        Ok(Self { config: text(config, "the configuration")?, manifest })
    }

    /// Puts them on the store; the digest names them.
    pub(crate) fn keep(&self, store: &Store) -> Result<Digest> {
        let bytes = serde_json::to_vec(self)
            .map_err(|error| Error::new(ErrorKind::Internal, "documents").with_source(error))?;
        store.put_image_documents(&bytes).context(|| "keep the documents of the image".to_owned())
    }

    /// Reads what [`Documents::keep`] wrote.
    pub(crate) fn read(store: &Store, digest: &Digest) -> Result<Self> {
        parse(&store.read_image_documents(digest)?, "the kept documents of the image")
    }
}

/// A layer as it came.
#[derive(Debug)]
pub(crate) struct Original {
    pub diff_id: String,
    pub blob: Option<String>,
    pub below: String,
    pub independent: bool,
    pub unpacked: Unpacked,
}

impl Original {
    /// Keeps what makes the tar and the blob again out of the layer that was made of `index`.
    pub(crate) fn keep(
        &self,
        index: &Index,
        layer: LayerId,
        store: &Store,
        options: &BuildOptions,
    ) -> Result<()> {
        let what = || format!("keep the original of layer {}", self.diff_id);
        self.keep_framing(index, layer, store).context(what)?;
        self.keep_stream(store, options).context(what)
    }

    fn keep_framing(&self, index: &Index, layer: LayerId, store: &Store) -> Result<()> {
        let kept = Kept::Framing(self.diff_id.clone(), layer);
        if store.has_kept(&kept)? {
            return Ok(());
        }
        let tar = &self.unpacked.tar;
        let header = framing::Header {
            independent: self.independent,
            tar_bytes: tar.length,
            below: self.below.clone(),
        };
        let mut out = Uploading::begin(store, &kept)?;
        framing::write(&header, tar, placed(index)?, &mut out)?;
        out.publish()
    }

    fn keep_stream(&self, store: &Store, options: &BuildOptions) -> Result<()> {
        let (Some(blob), Some((compression, packed))) = (&self.blob, &self.unpacked.packed) else {
            return Ok(());
        };
        let kept = Kept::Stream(self.diff_id.clone(), blob.clone());
        // No image of the specification has anything else.
        let known = matches!(compression, Compression::Gzip | Compression::Zstd);
        if !known || store.has_kept(&kept)? {
            return Ok(());
        }
        let mut out = Uploading::begin(store, &kept)?;
        let tar_bytes = self.unpacked.tar.length;
        let records = stream::write(packed, blob, *compression, tar_bytes, options, &mut out)?;
        tracing::debug!(blob, records, "kept the compression");
        out.publish()
    }
}

/// The contents of the layer's files that stand in its tar. Files are numbered in path order.
fn placed(index: &Index) -> Result<Vec<framing::Placed>> {
    let mut seen = vec![false; index.nodes.len()];
    let (mut placed, mut file) = (Vec::new(), 0);
    index.walk(|_, ix: NodeIx| {
        let NodeKind::Regular(content) = &index.node(ix).kind else { return Ok(()) };
        if std::mem::replace(&mut seen[ix.0 as usize], true) {
            return Ok(());
        }
        // Files of lower layers that a hard link brought up stand in another tar.
        if let Place::Archive { origin: 0, pieces } = &content.place {
            placed.extend(pieces.iter().map(|&piece| framing::Placed { file, piece }));
        }
        file += 1;
        Ok(())
    })?;
    Ok(placed)
}

/// An object of the store as something to write to.
struct Uploading {
    upload: Box<dyn Upload>,
    failure: Option<Error>,
}

impl Uploading {
    fn begin(store: &Store, kept: &Kept) -> Result<BufWriter<Self>> {
        let upload = store.create_kept(kept)?;
        Ok(BufWriter::with_capacity(PART_BYTES, Self { upload, failure: None }))
    }
}

/// Makes the object visible.
trait Publish {
    fn publish(self) -> Result<()>;
}

impl Publish for BufWriter<Uploading> {
    fn publish(mut self) -> Result<()> {
        let flushed = self.flush();
        let (inner, _) = self.into_parts();
        if let Some(failure) = inner.failure {
            return Err(failure);
        }
        flushed.context(|| "write to the store".to_owned())?;
        match inner.upload.publish() {
            // Somebody else was faster, with what serves as well.
            Err(error) if error.kind() == ErrorKind::Exists => Ok(()),
            other => other,
        }
    }
}

impl Write for Uploading {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self.upload.write(bytes) {
            Ok(()) => Ok(bytes.len()),
            Err(error) => {
                let text = error.chain();
                self.failure.get_or_insert(error);
                Err(std::io::Error::other(text))
            }
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A layer that need not be fetched.
pub(super) struct Reused {
    pub index: Index,
    pub file: Box<LayerFile>,
}

/// The layer that was made of this tar above this chain before, under equal options.
pub(super) fn find(
    plan: &LayerPlan,
    chain: &str,
    annotations: &BTreeMap<String, String>,
    options: &BuildOptions,
) -> Result<Option<Reused>> {
    let Some(store) = &options.originals else { return Ok(None) };
    if options.layout.is_some() || check_digest(&plan.diff_id).is_err() {
        return Ok(None);
    }
    let mut expected = options.annotations.clone();
    expected.extend(annotations.clone());
    for layer in store.layers_of_tar(&plan.diff_id)? {
        match candidate(store, plan, chain, layer) {
            Ok(Some(file))
                if file.manifest.kind == options.kind && file.manifest.annotations == expected =>
            {
                let tree = Reader::parse(&file.metadata)?.to_tree()?;
                let index = from_layer(&tree, &file.chunk_table)?;
                return Ok(Some(Reused { index, file: Box::new(file) }));
            }
            Ok(_) => {}
            Err(error) => tracing::warn!("layer {layer} is made again: {}", error.chain()),
        }
    }
    Ok(None)
}

fn candidate(
    store: &Store,
    plan: &LayerPlan,
    chain: &str,
    layer: LayerId,
) -> Result<Option<LayerFile>> {
    let kept = Kept::Framing(plan.diff_id.clone(), layer);
    let Some(mut framing) = store.open_kept(&kept)? else { return Ok(None) };
    let header = framing::Header::decode(&mut framing.by_ref().take(4096))?;
    // A layer that came in another blob before has no compression of this one.
    let stream = match &plan.blob {
        Some(blob) if *blob != plan.diff_id => {
            store.has_kept(&Kept::Stream(plan.diff_id.clone(), blob.clone()))?
        }
        _ => true,
    };
    if !stream || (header.below != chain && !header.independent) || !store.has_layer(&layer)? {
        return Ok(None);
    }
    store.read_layer(&layer).map(Some)
}
