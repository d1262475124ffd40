//! An environment out as an OCI image layout.
//!
//! A layer that came from a container image goes out as the very blob that it came in: its tar is written
//! again out of its kept framing and the layer's files, its compression out of the kept stream, and both
//! are compared with their digests. Other layers become fresh tars. Where nothing of an image changed, its
//! documents go out as they came too, and the image has its old digest.
//!
//! CRASH: the layout appears whole or not at all; see [`blobs`].

mod blobs;
mod data;
mod describe;
mod documents;
mod tar;

pub use describe::{DescribedLayer, Description, describe};

use crate::oci::framing::{self, Rebuilt};
use crate::oci::{DIFF_ID, Documents, stream};
use crate::parallel;
use crate::progress::{Cancel, Phase, Progress};
use crate::source::blob::{Hasher, Hashing};
use crate::source::spool::Compression as Packed;
use blobs::{Blob, BlobWriter, Blobs};
use data::LayerData;
use documents::Came;
use layer::environment::Environment;
use layer::layer_file::LayerFile;
use layer::{Context, Error, ErrorKind, LayerId, Result};
use serde::Serialize;
use std::fmt;
use std::io::{BufReader, Read, Write};
use std::path::Path;
use std::str::FromStr;
use std::sync::OnceLock;
use store::{Kept, Store};

const BUFFER_BYTES: usize = 256 << 10;

/// How layers are compressed of which no original is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compression {
    /// gzip, which everybody reads.
    #[default]
    Gzip,
    /// zstd, smaller and quicker.
    Zstd,
    /// Not at all.
    None,
}

impl Compression {
    fn media_type(self) -> &'static str {
        match self {
            Self::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
            Self::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
            Self::None => "application/vnd.oci.image.layer.v1.tar",
        }
    }

    fn of(packed: Packed) -> Self {
        match packed {
            Packed::Gzip => Self::Gzip,
            Packed::Zstd => Self::Zstd,
            Packed::None | Packed::Xz => Self::None,
        }
    }
}

impl FromStr for Compression {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "gzip" => Ok(Self::Gzip),
            "zstd" => Ok(Self::Zstd),
            "none" => Ok(Self::None),
            _ => Err(Error::invalid(format!("{text:?} is not gzip, zstd or none"))),
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::None => "none",
        })
    }
}

/// What a caller may choose about an export.
#[derive(Debug, Clone)]
pub struct ExportOptions {
    /// For layers of which no original is kept.
    pub compression: Compression,
    /// What the image is called in the layout.
    pub tag: String,
    /// Write one tar file, not a directory.
    pub as_archive: bool,
    /// Worker threads; 0 takes one for each processor.
    pub threads: usize,
    /// Ends the export early.
    pub cancel: Cancel,
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self {
            compression: Compression::default(),
            tag: "latest".to_owned(),
            as_archive: false,
            threads: 0,
            cancel: Cancel::new(),
        }
    }
}

/// One layer that went out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExportedLayer {
    /// The layer.
    pub layer: LayerId,
    /// The digest of its blob.
    pub digest: String,
    /// The length of its blob.
    pub bytes: u64,
    /// The digest of its tar.
    pub diff_id: String,
    /// What the blob is.
    pub media_type: String,
    /// Whether the blob is the one that the layer came in.
    pub original: bool,
}

/// What an export wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Exported {
    /// The digest of the manifest: that of the image.
    pub manifest: String,
    /// The digest of the configuration.
    pub config: String,
    /// Bottom first.
    pub layers: Vec<ExportedLayer>,
}

/// Writes an environment to `place`, where nothing may be (or an empty directory).
///
/// `NotFound` when chunks are not where the location hints say, `Corrupt` for damage on the store,
/// `Unsupported` for what no image can hold; errors name the path.
pub fn export(
    store: &Store,
    environment: &Environment,
    place: &Path,
    options: &ExportOptions,
    progress: &dyn Progress,
) -> Result<Exported> {
    let blobs = Blobs::begin(place)?;
    let came = came(store, environment, progress)?;
    progress.phase(Phase::Encode, 0, 0);
    let exporter = Exporter { store, blobs: &blobs, came: came.as_ref(), options, progress };
    let layers = exporter.layers(&environment.layers)?;
    options.cancel.check()?;
    progress.phase(Phase::Commit, 0, 0);
    let config = documents::config(environment, came.as_ref(), &layers)?;
    let config_blob = blobs.put_bytes(&config)?;
    let manifest = documents::manifest(came.as_ref(), &config_blob, &layers)?;
    let manifest = blobs.put_bytes(&manifest)?;
    let index = documents::index(&manifest, &config, &options.tag)?;
    blobs.finish(&index, options.as_archive)?;
    Ok(Exported { manifest: manifest.digest, config: config_blob.digest, layers })
}

/// The documents that the environment came with. Lost ones cost the image its old digest, no more.
fn came(store: &Store, environment: &Environment, progress: &dyn Progress) -> Result<Option<Came>> {
    let Some(digest) = &environment.image else { return Ok(None) };
    match Documents::read(store, digest).and_then(Came::read) {
        Ok(came) => Ok(Some(came)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {
            progress.notice(&format!("the image gets new documents: {}", error.chain()));
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

struct Exporter<'a> {
    store: &'a Store,
    blobs: &'a Blobs,
    came: Option<&'a Came>,
    options: &'a ExportOptions,
    progress: &'a dyn Progress,
}

impl Exporter<'_> {
    /// All layers, several at once.
    fn layers(&self, ids: &[LayerId]) -> Result<Vec<ExportedLayer>> {
        let slots: Vec<OnceLock<ExportedLayer>> = ids.iter().map(|_| OnceLock::new()).collect();
        let threads = match self.options.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        parallel::for_each(
            threads,
            ids.len(),
            &self.options.cancel,
            || (),
            |(), at| {
                let done = self.layer(ids[at]).context(|| format!("layer {}", ids[at].short()))?;
                // Each number comes once, so the slot is empty.
                _ = slots[at].set(done);
                Ok(())
            },
        )?;
        let done: Option<Vec<ExportedLayer>> =
            slots.into_iter().map(OnceLock::into_inner).collect();
        done.ok_or_else(|| Error::new(ErrorKind::Internal, "a layer was passed over"))
    }

    fn layer(&self, id: LayerId) -> Result<ExportedLayer> {
        let file = self.store.read_layer(&id)?;
        if let Some(diff_id) = file.manifest.annotations.get(DIFF_ID).cloned() {
            match self.as_it_came(id, &file, &diff_id) {
                Ok(Some(exported)) => return Ok(exported),
                Ok(None) => {}
                // Damage of what is kept beside the layer, as decoders tell it. That of the layer itself
                // comes up again.
                Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Internal) => {
                    let text = format!("layer {} gets a new digest: {}", id.short(), error.chain());
                    self.progress.notice(&text);
                }
                Err(error) => return Err(error),
            }
        }
        let mut data = LayerData::open(self.store, id, file)?;
        let compression = self.options.compression;
        let mut plain = Hasher::sha256();
        let blob = self.compressed(compression, |out| {
            let mut out = Both { out, hasher: &mut plain };
            tar::write(&mut data, &mut out, &self.options.cancel, self.progress)
        })?;
        Ok(exported(id, blob, plain.digest(), compression, false))
    }

    /// The blob that the layer came in, or at least its tar; nothing when that is not kept.
    fn as_it_came(
        &self,
        id: LayerId,
        file: &LayerFile,
        diff_id: &str,
    ) -> Result<Option<ExportedLayer>> {
        let what = || format!("make {diff_id} again");
        let kept = Kept::Framing(diff_id.to_owned(), id);
        let Some(mut source) = self.store.open_kept(&kept)? else { return Ok(None) };
        let header = framing::Header::decode(&mut source).context(what)?;
        let data = LayerData::open(self.store, id, file.clone())?;
        let tar = Rebuilt::new(&header, source, data)?;
        let mut tar =
            BufReader::with_capacity(BUFFER_BYTES, Watched::new(Hashing::new(tar, diff_id)?, self));
        if let Some((blob, compression)) = self.original_blob(diff_id, &mut tar).context(what)? {
            return Ok(Some(exported(id, blob, diff_id.to_owned(), compression, true)));
        }
        let compression = self.options.compression;
        let blob = self.compressed(compression, |out| {
            std::io::copy(&mut tar, out).context(what)?;
            tar.get_mut().inner.finish("the tar")
        });
        Ok(Some(exported(id, blob.context(what)?, diff_id.to_owned(), compression, false)))
    }

    /// The blob that this tar came in, where its compression is kept.
    fn original_blob(
        &self,
        diff_id: &str,
        tar: &mut BufReader<Watched<'_, Hashing<impl Read>>>,
    ) -> Result<Option<(Blob, Compression)>> {
        let wanted = self.came.and_then(|came| came.blob_of(diff_id));
        if wanted.as_deref() == Some(diff_id) {
            let mut out = self.blobs.writer(wanted.as_deref())?;
            std::io::copy(tar, &mut out).context(|| "write a tar".to_owned())?;
            return Ok(Some((self.blobs.put(out)?, Compression::None)));
        }
        let others = self.store.streams_of_tar(diff_id)?;
        for digest in wanted.into_iter().chain(others) {
            let kept = Kept::Stream(diff_id.to_owned(), digest.clone());
            let Some(mut source) = self.store.open_kept(&kept)? else { continue };
            let header = stream::Header::decode(&mut source)?;
            let mut out = self.blobs.writer(Some(&digest))?;
            stream::rebuild(&header, source, tar, &mut out)?;
            if header.records {
                tar.get_mut().inner.finish("the tar")?;
            }
            return Ok(Some((self.blobs.put(out)?, Compression::of(header.compression))));
        }
        Ok(None)
    }

    /// A new blob of what `write` writes.
    fn compressed(
        &self,
        compression: Compression,
        write: impl FnOnce(&mut dyn Write) -> Result<()>,
    ) -> Result<Blob> {
        let failed = || "compress a layer".to_owned();
        let out = self.blobs.writer(None)?;
        let out: BlobWriter = match compression {
            Compression::None => {
                let mut out = out;
                write(&mut out)?;
                out
            }
            Compression::Gzip => {
                let mut encoder =
                    flate2::write::GzEncoder::new(out, flate2::Compression::default());
                write(&mut encoder)?;
                encoder.finish().context(failed)?
            }
            Compression::Zstd => {
                let level = zstd::DEFAULT_COMPRESSION_LEVEL;
                let mut encoder = zstd::stream::write::Encoder::new(out, level).context(failed)?;
                encoder.include_checksum(true).context(failed)?;
                write(&mut encoder)?;
                encoder.finish().context(failed)?
            }
        };
        self.blobs.put(out)
    }
}

fn exported(
    layer: LayerId,
    blob: Blob,
    diff_id: String,
    compression: Compression,
    original: bool,
) -> ExportedLayer {
    let media_type = compression.media_type().to_owned();
    ExportedLayer { layer, digest: blob.digest, bytes: blob.bytes, diff_id, media_type, original }
}

/// Writes on, and computes a digest.
struct Both<'a> {
    out: &'a mut dyn Write,
    hasher: &'a mut Hasher,
}

impl Write for Both<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.out.write_all(bytes)?;
        self.hasher.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

/// Reports what is read, and ends when the caller does not want it any more.
struct Watched<'a, R> {
    inner: R,
    cancel: &'a Cancel,
    progress: &'a dyn Progress,
}

impl<'a, R> Watched<'a, R> {
    fn new(inner: R, exporter: &'a Exporter<'_>) -> Self {
        Self { inner, cancel: &exporter.options.cancel, progress: exporter.progress }
    }
}

impl<R: Read> Read for Watched<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.cancel.check().map_err(std::io::Error::other)?;
        let length = self.inner.read(buffer)?;
        self.progress.advance(0, length as u64);
        Ok(length)
    }
}
