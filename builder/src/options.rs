//! What a caller may choose about a build.
//!
//! Everything in [`ChunkingOptions`] decides about the layer id; nothing else here does, except the
//! layout, the refreshing of git indexes, and the kind and the annotations, which stand in the manifest.

use crate::layout::Layout;
use crate::oci::{Platform, RegistryOptions};
use crate::progress::Cancel;
use layer::manifest::LayerKind;
use layer::{Error, Result};
use std::collections::BTreeMap;
use std::path::PathBuf;
use store::Store;

/// How contents are cut into chunks. Equal trees give equal layer ids only under equal options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkingOptions {
    /// Large files are cut at multiples of this from their own start. A power of two, at least one
    /// block. 32 KiB: a cold page brings little that nobody asked for, and zstd loses 2 % against
    /// 64 KiB.
    pub chunk_bytes: u32,
    /// Files below this size are bundled with others; a chunk of their own would compress badly
    /// and cost one fetch each.
    pub bundle_file_bytes: u32,
    /// A bundle is not closed by content before it has this size.
    pub bundle_min_bytes: u32,
    /// A bundle is closed before it exceeds this size.
    pub bundle_max_bytes: u32,
    /// Between the two sizes, one file in this many closes its bundle, as its digest says. So a
    /// changed, added or removed file changes only the bundle around it.
    pub border_one_in: u32,
    /// Files up to this size lie in the metadata image. They cost no block and no fetch there, but
    /// every attach reads the metadata.
    pub inline_bytes: u32,
    /// A file with holes has at most this many index entries of 8 bytes; above, its holes are
    /// rounded to larger powers of two. Bounds the metadata of a sparse terabyte to 1 MiB.
    pub hole_entries: u32,
}

impl Default for ChunkingOptions {
    fn default() -> Self {
        Self {
            chunk_bytes: 32 << 10,
            bundle_file_bytes: 32 << 10,
            bundle_min_bytes: 32 << 10,
            bundle_max_bytes: 128 << 10,
            border_one_in: 8,
            inline_bytes: 64,
            hole_entries: 1 << 17,
        }
    }
}

impl ChunkingOptions {
    /// The granularity of holes in a file of this size.
    pub fn hole_bytes(&self, size: u64) -> u64 {
        let mut unit = u64::from(self.chunk_bytes);
        while size.div_ceil(unit) > u64::from(self.hole_entries) {
            unit *= 2;
        }
        unit
    }

    /// Refuses sizes that the format cannot hold.
    pub fn check(&self) -> Result<()> {
        let max = layer::chunk::MAX_CHUNK_BLOCKS * layer::chunk::BLOCK_BYTES;
        let fits = |bytes: u32| (layer::chunk::BLOCK_BYTES..=max).contains(&bytes);
        if !self.chunk_bytes.is_power_of_two() || !fits(self.chunk_bytes) {
            return Err(Error::invalid(format!(
                "chunk size {} is not a power of two from {} to {max}",
                self.chunk_bytes,
                layer::chunk::BLOCK_BYTES
            )));
        }
        if !fits(self.bundle_max_bytes) || self.bundle_file_bytes > self.bundle_max_bytes {
            return Err(Error::invalid("bundle sizes do not fit into one chunk"));
        }
        if self.border_one_in == 0 || self.hole_entries == 0 {
            return Err(Error::invalid("chunking options must not be zero"));
        }
        if self.inline_bytes > 2048 {
            return Err(Error::invalid("at most 2048 bytes of a file can be inlined"));
        }
        Ok(())
    }
}

/// What becomes of the layers of a container image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ImageLayers {
    /// One layer that holds the final tree.
    #[default]
    Merged,
    /// One layer each, with overlay marks in the place of whiteouts.
    Stacked,
}

/// What a caller may choose about a build.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// The kind that stands in the manifest.
    pub kind: LayerKind,
    /// Stand in the manifest and so decide about the id.
    pub annotations: BTreeMap<String, String>,
    /// How contents are cut.
    pub chunking: ChunkingOptions,
    /// What comes first in the data space and in packs. Decides about the id.
    pub layout: Option<Layout>,
    /// Refreshes the indexes of git repositories to what the mounted layer will show, so that the first
    /// `git status` reads no file. Decides about the id.
    pub refresh_git_index: bool,
    /// zstd level of the chunks; no part of the identity.
    pub compression_level: i32,
    /// Worker threads; 0 takes one for each processor.
    pub threads: usize,
    /// Where compressed archives are unpacked to (as files without a name).
    pub spool_dir: PathBuf,
    /// A compressed archive that unpacks to more is refused.
    pub max_unpacked_bytes: u64,
    /// Only for container images.
    pub image_layers: ImageLayers,
    /// Which of the images of an index; `None` takes this machine's.
    pub platform: Option<Platform>,
    /// How to reach registries.
    pub registry: RegistryOptions,
    /// Where to keep what gives images back as they came, and to look for layers that need not be
    /// fetched; `None` does neither.
    pub originals: Option<Store>,
    /// Ends the build early.
    pub cancel: Cancel,
}

impl BuildOptions {
    /// Defaults for a layer of this kind: level 4, all processors, spool in the system's temporary
    /// directory, archives of up to 1 TiB. Git indexes are refreshed in workspaces.
    pub fn new(kind: LayerKind) -> Self {
        Self {
            kind,
            annotations: BTreeMap::new(),
            chunking: ChunkingOptions::default(),
            layout: None,
            refresh_git_index: kind == LayerKind::Workspace,
            compression_level: store::codec::DEFAULT_LEVEL,
            threads: 0,
            spool_dir: std::env::temp_dir(),
            max_unpacked_bytes: 1 << 40,
            image_layers: ImageLayers::Merged,
            platform: None,
            registry: RegistryOptions::default(),
            originals: None,
            cancel: Cancel::new(),
        }
    }

    /// The number of worker threads that `threads` stands for.
    pub fn worker_threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        }
    }
}
