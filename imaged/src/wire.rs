//! Wire types to inner types and back; everything that comes in is checked here.

use crate::catalog::LayerRecord;
use crate::gc::{CollectOptions, Collected};
use crate::index::Reindexed;
use crate::names::Resolved;
use crate::upload::Chunk;
use layer::pack::Codec;
use layer::reference::{Reference, ReferenceEntry, Target};
use layer::{ChunkDigest, Digest, EnvId, Error, LayerId, Result};
use proto::v1;
use std::time::Duration;

pub(crate) fn digests(wire: &[Vec<u8>]) -> Result<Vec<ChunkDigest>> {
    wire.iter().map(|bytes| ChunkDigest::from_slice(bytes)).collect()
}

pub(crate) fn ids(wire: &[Vec<u8>]) -> Result<Vec<Digest>> {
    wire.iter().map(|bytes| Digest::from_slice(bytes)).collect()
}

pub(crate) fn chunk(wire: v1::UploadChunk) -> Result<Chunk> {
    let codec = match wire.codec() {
        v1::Codec::None if wire.codec == v1::Codec::None as i32 => Codec::None,
        v1::Codec::Zstd => Codec::Zstd,
        v1::Codec::None => {
            return Err(Error::invalid(format!("codec {} is not known", wire.codec)));
        }
    };
    Ok(Chunk {
        digest: ChunkDigest::from_slice(&wire.digest)?,
        codec,
        plain_bytes: wire.plain_bytes,
        payload: wire.payload,
    })
}

pub(crate) fn target(wire: Option<v1::tag_request::Target>) -> Result<Target> {
    match wire {
        Some(v1::tag_request::Target::LayerId(id)) => LayerId::from_slice(&id).map(Target::Layer),
        Some(v1::tag_request::Target::EnvId(id)) => EnvId::from_slice(&id).map(Target::Environment),
        None => Err(Error::invalid("a tag needs a layer or an environment to point to")),
    }
}

pub(crate) fn entry(reference: &Reference, entry: ReferenceEntry) -> v1::ReferenceEntry {
    use v1::reference_entry::Target as Wire;
    let target = entry.target.map(|target| match target {
        Target::Layer(id) => Wire::LayerId(id.0.to_vec()),
        Target::Environment(id) => Wire::EnvId(id.0.to_vec()),
    });
    v1::ReferenceEntry {
        reference: reference.to_string(),
        number: entry.number,
        target,
        time_unix_ns: entry.time_unix_ns,
        author: entry.author,
    }
}

pub(crate) fn layer(record: LayerRecord) -> v1::LayerDescription {
    v1::LayerDescription {
        layer_id: record.id.0.to_vec(),
        kind: record.kind,
        files: record.files,
        plain_bytes: record.plain_bytes,
        stored_bytes: record.stored_bytes,
        metadata_bytes: record.metadata_bytes,
        chunks: record.chunks,
        annotations: record.annotations.into_iter().collect(),
    }
}

pub(crate) fn resolved(resolved: Resolved) -> v1::ResolveResponse {
    use v1::resolve_response::Target as Wire;
    match resolved {
        Resolved::Layer(record) => v1::ResolveResponse {
            target: Some(Wire::LayerId(record.id.0.to_vec())),
            environment_document: Vec::new(),
            layers: vec![layer(record)],
        },
        Resolved::Environment { id, environment, layers } => v1::ResolveResponse {
            target: Some(Wire::EnvId(id.0.to_vec())),
            environment_document: environment.canonical(),
            layers: layers.into_iter().map(layer).collect(),
        },
    }
}

pub(crate) fn lease(lease: store::Lease) -> v1::Lease {
    v1::Lease { lease_id: lease.id, expires_unix_ns: lease.expires_unix_ns }
}

pub(crate) fn reindexed(found: Reindexed) -> v1::ReindexResponse {
    v1::ReindexResponse {
        packs: found.packs,
        chunks: found.chunks,
        layers: found.layers,
        environments: found.environments,
        references: found.references,
        damaged: found.damaged,
    }
}

pub(crate) fn collect_options(wire: &v1::CollectRequest) -> CollectOptions {
    let usual = CollectOptions::default();
    CollectOptions {
        dry_run: wire.dry_run,
        grace: wire.grace_ms.map_or(usual.grace, Duration::from_millis),
        history: wire.history_ms.map_or(usual.history, Duration::from_millis),
        compact_below_percent: wire.compact_below_percent.unwrap_or(usual.compact_below_percent),
    }
}

pub(crate) fn collected(done: Collected) -> v1::CollectResponse {
    v1::CollectResponse {
        live_environments: done.live_environments,
        live_layers: done.live_layers,
        live_packs: done.live_packs,
        live_chunks: done.live_chunks,
        live_bytes: done.live_bytes,
        condemned: done.condemned,
        reprieved: done.reprieved,
        waiting: done.waiting,
        deleted: done.deleted,
        freed_bytes: done.freed_bytes,
        compacted_packs: done.compacted_packs,
        copied_bytes: done.copied_bytes,
        missing_chunks: done.missing_chunks,
        lines: done.lines,
    }
}
