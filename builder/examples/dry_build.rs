//! Builds a source without a store and prints what that took: `dry_build SOURCE [LEVEL] [KEY=VALUE]...`
//! with keys chunk, file, min, max, one_in, inline. For choosing options by measurement.
#![allow(clippy::print_stdout)]

use builder::{BuildOptions, EncodedChunk, Publisher, Silent, Source};
use layer::manifest::LayerKind;
use layer::{ChunkDigest, EnvId, Error, LayerId, Result};
use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Forgets everything but digests.
#[derive(Default)]
struct Nowhere {
    chunks: Mutex<HashSet<ChunkDigest>>,
}

impl Publisher for Nowhere {
    fn missing(&self, digests: &[ChunkDigest]) -> Result<Vec<bool>> {
        let chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(digests.iter().map(|digest| !chunks.contains(digest)).collect())
    }

    fn upload(&self, chunk: EncodedChunk) -> Result<()> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner).insert(chunk.digest);
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn commit_layer(&self, file: &[u8]) -> Result<LayerId> {
        Ok(layer::layer_file::LayerFile::decode(file)?.id())
    }

    fn commit_environment(&self, document: &[u8]) -> Result<EnvId> {
        Ok(layer::environment::Environment::decode(document)?.id())
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let usage = || Error::invalid("usage: dry_build SOURCE [LEVEL] [KEY=VALUE]...");
    let source = Source::parse(arguments.first().ok_or_else(usage)?)?;
    let mut options = BuildOptions::new(LayerKind::Base);
    for argument in &arguments[1..] {
        let (key, value) = argument.split_once('=').unwrap_or(("level", argument));
        let number: u32 = value.parse().map_err(|_| usage())?;
        match key {
            "level" => options.compression_level = number.cast_signed(),
            "chunk" => options.chunking.chunk_bytes = number,
            "file" => options.chunking.bundle_file_bytes = number,
            "min" => options.chunking.bundle_min_bytes = number,
            "max" => options.chunking.bundle_max_bytes = number,
            "one_in" => options.chunking.border_one_in = number,
            "inline" => options.chunking.inline_bytes = number,
            "threads" => options.threads = number as usize,
            _ => return Err(usage()),
        }
    }
    let start = Instant::now();
    let built = builder::build(&source, &Nowhere::default(), &options, &Silent)?;
    let seconds = start.elapsed().as_secs_f64();
    for layer in &built.layers {
        let manifest = &layer.manifest;
        println!(
            "{} {} files, {} chunks, {:.1} MB plain, {:.1} MB space, {:.1} MB stored, {:.2} MB metadata",
            layer.layer_id.short(),
            manifest.files,
            manifest.chunks,
            manifest.plain_bytes as f64 / 1e6,
            f64::from(manifest.data_blocks) * 4096.0 / 1e6,
            layer.new_stored_bytes as f64 / 1e6,
            manifest.metadata_bytes as f64 / 1e6,
        );
    }
    println!("{seconds:.2} s");
    Ok(())
}
