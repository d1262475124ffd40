//! Trees, archives and container images in, layers out.
//!
//! A source is listed into an [`Index`]; its contents are read once to find what is equal and what is
//! zero; a pure plan decides where everything goes; chunks are compressed and uploaded in parallel; the
//! metadata image is written; the layer is named. Equal trees under equal options give equal layer ids.
//!
//! Not here: where layers are stored (the [`Publisher`]'s business) and what they are called.
#![forbid(unsafe_code)]

mod build;
mod content;
mod diff;
mod digest;
mod encode;
pub mod export;
mod git;
mod index;
mod layout;
mod merge;
pub mod oci;
mod options;
mod parallel;
mod path;
mod plan;
mod progress;
pub mod publish;
pub mod source;
mod tar;
mod xattr;

pub use build::{Built, BuiltLayer, build, build_index, publish_built, publish_environment};
pub use content::{ChunkRange, Content, Origin, Piece, Place, Stamp};
pub use diff::{DiffOptions, LowerLayers, NoLowerLayers, diff_index, from_layer, pack_diff};
pub use git::GitRefresh;
pub use index::{Index, Node, NodeIx, NodeKind};
pub use layout::{ANNOTATION as LAYOUT_ANNOTATION, Layout};
pub use merge::{merge, rebase};
pub use options::{BuildOptions, ChunkingOptions, ImageLayers};
pub use progress::{Cancel, Phase, Progress, Silent};
pub use publish::{EncodedChunk, Publisher};
pub use source::{ImageFormat, Source};
