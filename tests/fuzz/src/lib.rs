//! Fuzz targets: for every parser of foreign bytes a function that may do anything with its input but
//! panic, hang, or answer something that contradicts itself.
//!
//! A target mends the checksums of its input first: a fuzzer cannot guess BLAKE3, and an attacker who
//! writes to a store need not. Each has seeds made by our own writers, and a corpus under `corpus/` that
//! coverage-guided runs left behind; the replay test goes through both.
#![forbid(unsafe_code)]

pub mod corpus;
pub mod mutate;
mod seal;
mod targets;

/// One parser.
#[derive(Debug)]
pub struct Target {
    /// Its name, and that of its corpus.
    pub name: &'static str,
    /// Parses; panics where the parser or its answer is wrong.
    pub run: fn(&[u8]),
    /// Inputs that the parser takes.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// Every target.
pub const TARGETS: &[Target] = &[
    targets::tree::ARCHIVE,
    targets::tree::IMAGE,
    targets::erofs::EROFS,
    targets::layers::LAYER_FILE,
    targets::layers::MANIFEST,
    targets::layers::CHUNK_TABLE,
    targets::layers::PRESENCE,
    targets::stored::PACK,
    targets::stored::CHUNK,
    targets::stored::LOCATIONS,
    targets::documents::ENVIRONMENT,
    targets::documents::REFERENCE,
    targets::documents::PROFILE,
    targets::documents::SIGNATURE,
    targets::network::NETWORK,
];
