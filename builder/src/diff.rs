//! The writable layer of a sandbox as a source: `pack_diff`.

use crate::build::BuiltLayer;
use crate::options::BuildOptions;
use crate::progress::Progress;
use crate::publish::Publisher;
use layer::chunk::ChunkTable;
use layer::tree::Tree;
use layer::{Error, ErrorKind, Result};
use std::path::Path;

/// The layers below an upper directory. Only asked when a renamed directory has to be written out.
pub trait LowerLayers {
    /// How many there are.
    fn count(&self) -> usize;
    /// The tree and chunk table of one; 0 is the bottom.
    fn layer(&self, number: usize) -> Result<(Tree, ChunkTable)>;
}

/// No layers below.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoLowerLayers;

impl LowerLayers for NoLowerLayers {
    fn count(&self) -> usize {
        0
    }

    fn layer(&self, _number: usize) -> Result<(Tree, ChunkTable)> {
        Err(Error::new(ErrorKind::Internal, "there is no lower layer"))
    }
}

/// What a caller may choose about a diff.
#[derive(Debug, Clone)]
pub struct DiffOptions {
    /// The kind should be `diff`.
    pub build: BuildOptions,
    /// Globs of paths (without a leading slash) that are taken; empty = all.
    pub include: Vec<String>,
    /// Globs of paths that are left out.
    pub exclude: Vec<String>,
}

impl DiffOptions {
    /// Takes everything.
    pub fn new(build: BuildOptions) -> Self {
        Self { build, include: Vec::new(), exclude: Vec::new() }
    }
}

/// Builds a layer of what an overlay mount wrote into its upper directory, and commits it.
pub fn pack_diff(
    _upper: &Path,
    _lower: &dyn LowerLayers,
    _publisher: &dyn Publisher,
    _options: &DiffOptions,
    _progress: &dyn Progress,
) -> Result<BuiltLayer> {
    Err(Error::new(ErrorKind::Unsupported, "pack_diff"))
}
