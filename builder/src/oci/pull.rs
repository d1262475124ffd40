//! An image in a registry as a source.

use super::assemble::{ImageParts, LayerPlan, assemble};
use super::document::{Referrer, configuration, resolve};
use super::name::ImageName;
use super::originals::Documents;
use super::registry::{Registry, RegistryOptions};
use crate::options::BuildOptions;
use crate::progress::{Cancel, Progress};
use crate::source::Loaded;
use crate::source::blob::{Hasher, Region, wrong_digest};
use crate::source::spool;
use layer::{Context, Error, ErrorKind, Result};
use oci_spec::image::Descriptor;
use std::io::Write;

/// Layers that are fetched side by side; as many wait for their turn to be unpacked.
const LAYERS_AT_ONCE: usize = 3;

/// Lists an image. Its layers go to files without names, a few side by side.
pub(crate) fn pull(
    name: &ImageName,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<Loaded> {
    let registry = Registry::open(name, options.registry, &options.cancel)?;
    let loaded = (|| {
        let first = registry.manifest(name.wanted())?;
        tracing::debug!(digest = first.digest, media_type = first.media_type, "found {name}");
        let fetch = |it: &Descriptor| registry.document(it, true);
        let found = resolve(first.bytes, first.digest, options.platform.as_ref(), &fetch)?;
        let descriptors = found.manifest.layers();
        let config_bytes = registry.document(found.manifest.config(), false)?;
        let wanted = options.platform.as_ref().filter(|_| !found.by_index);
        let config = configuration(&config_bytes, descriptors.len(), wanted)?;
        let parts = ImageParts {
            layers: LayerPlan::all(&config, descriptors),
            documents: Documents::new(Some(found.bytes), config_bytes)?,
            fetch: &|at, going| fetch_layer(&registry, &descriptors[at], options, progress, going),
            at_once: LAYERS_AT_ONCE,
            config,
        };
        assemble(&parts, options, progress)
    })();
    loaded.context(|| name.to_string())
}

/// What refers to an image in its registry, such as signatures; `kind` chooses one type of artifact.
pub fn referrers(
    name: &ImageName,
    options: RegistryOptions,
    kind: Option<&str>,
) -> Result<Vec<Referrer>> {
    let registry = Registry::open(name, options, &Cancel::new())?;
    let found = (|| {
        let digest = match name.digest() {
            Some(digest) => digest.to_owned(),
            None => registry.manifest(name.wanted())?.digest,
        };
        registry.referrers(&digest, kind)
    })();
    Ok(found.context(|| name.to_string())?.iter().map(Referrer::from).collect())
}

fn fetch_layer(
    registry: &Registry,
    descriptor: &Descriptor,
    options: &BuildOptions,
    progress: &dyn Progress,
    going: &dyn Fn() -> Result<()>,
) -> Result<Region> {
    let digest = descriptor.digest().to_string();
    if descriptor.size() > options.max_unpacked_bytes {
        let text = format!("layer {digest} of {} bytes is over the limit", descriptor.size());
        return Err(Error::new(ErrorKind::NoSpace, text));
    }
    let mut file = spool::create(options)?;
    let mut hasher = Hasher::of(&digest)?;
    registry.blob(descriptor, &mut |bytes| {
        going()?;
        progress.advance(0, bytes.len() as u64);
        hasher.update(bytes);
        file.write_all(bytes).context(|| format!("spool file in {}", options.spool_dir.display()))
    })?;
    // Before a decoder sees any of it.
    let actual = hasher.digest();
    if actual != digest {
        return Err(wrong_digest("what the registry sent", &digest, &actual));
    }
    Region::whole(file, digest)
}
