//! Builds sources one after another without a store, and prints what each would add to it:
//! `dry_build SOURCE... [KEY=VALUE]...` with keys chunk, file, min, max, one_in, inline, level, threads.
//! For choosing options by measurement.
#![allow(clippy::print_stdout)]

use builder::{BuildOptions, EncodedChunk, Publisher, Silent, Source};
use layer::manifest::LayerKind;
use layer::{ChunkDigest, EnvId, Error, LayerId, Result};
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Forgets everything but digests.
#[derive(Default)]
struct Nowhere {
    chunks: Mutex<HashSet<ChunkDigest>>,
    layer_file_bytes: AtomicU64,
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
        self.layer_file_bytes.fetch_add(file.len() as u64, Ordering::Relaxed);
        Ok(layer::layer_file::LayerFile::decode(file)?.id())
    }

    fn commit_environment(&self, document: &[u8]) -> Result<EnvId> {
        Ok(layer::environment::Environment::decode(document)?.id())
    }
}

fn main() -> Result<()> {
    let usage = || Error::invalid("usage: dry_build SOURCE... [KEY=VALUE]...");
    let mut sources = Vec::new();
    let mut options = BuildOptions::new(LayerKind::Base);
    for argument in std::env::args().skip(1) {
        let Some((key, value)) = argument.split_once('=') else {
            sources.push(Source::parse(&argument)?);
            continue;
        };
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
    let nowhere = Nowhere::default();
    let (mut data, mut files) = (0, 0);
    for source in sources {
        let start = Instant::now();
        let built = builder::build(&source, &nowhere, &options, &Silent)?;
        let seconds = start.elapsed().as_secs_f64();
        for layer in &built.layers {
            let manifest = &layer.manifest;
            data += layer.new_stored_bytes;
            files = nowhere.layer_file_bytes.load(Ordering::Relaxed);
            println!(
                "{} {} files, {} chunks, {:.1} MB plain, {:.1} MB space, {:.1} MB new as {:.1} MB, \
                 {:.2} MB metadata, {seconds:.2} s",
                layer.layer_id.short(),
                manifest.files,
                manifest.chunks,
                manifest.plain_bytes as f64 / 1e6,
                f64::from(manifest.data_blocks) * 4096.0 / 1e6,
                layer.new_plain_bytes as f64 / 1e6,
                layer.new_stored_bytes as f64 / 1e6,
                manifest.metadata_bytes as f64 / 1e6,
            );
        }
    }
    let (data, files) = (data as f64 / 1e6, files as f64 / 1e6);
    println!("all: {data:.2} MB data, {files:.2} MB layer files, {:.2} MB", data + files);
    Ok(())
}
