//! `fsck`: whether a layer on the store is whole. Digests and pointers always, every byte with
//! `--read-data`.
//!
//! Reads only. All damage is reported, not the first alone.

use super::images::{layer_ids, resolve};
use super::{Scene, named};
use crate::args::Fsck;
use crate::embed::{self, Images};
use crate::errors::{Failure, Outcome, Remedy, one_line};
use crate::quantity::show_bytes;
use layer::erofs::reader::Reader;
use layer::layer_file::LayerFile;
use layer::location::{Locations, Placement};
use layer::reference::Target;
use layer::{ChunkDigest, EnvId, Error, ErrorKind, LayerId, PackId, Result};
use proto::v1::LocateRequest;
use proto::v1::resolve_response::Target as Resolved;
use serde::Serialize;
use std::collections::HashMap;
use std::sync::Arc;
use store::{Store, TrustedKeys};

/// Damage beyond this is only counted.
const MAX_LISTED: usize = 1000;

/// What was found.
#[derive(Debug, Default, Serialize)]
struct Findings {
    name: String,
    layers: u64,
    files: u64,
    chunks: u64,
    packs: u64,
    read_data: bool,
    bytes_read: u64,
    signatures: u64,
    /// Signatures that are sound, of keys that are not trusted.
    strange: Vec<String>,
    damages: u64,
    damaged: Vec<String>,
}

impl Findings {
    fn note(&mut self, what: String) {
        self.damages += 1;
        if self.damaged.len() < MAX_LISTED {
            self.damaged.push(what);
        }
    }

    fn lines(&self) -> String {
        let mut text = format!(
            "{}: {} layers, {} files, {} signatures, {} chunks in {} packs, {}: ",
            self.name,
            self.layers,
            self.files,
            self.signatures,
            self.chunks,
            self.packs,
            data_read(self.read_data, self.bytes_read)
        );
        match self.damages {
            0 => text.push_str(verdict_without_damage(self.read_data)),
            damages => text.push_str(&format!("{damages} damages")),
        }
        for what in self.damaged.iter().chain(&self.strange) {
            text.push('\n');
            text.push_str(what);
        }
        text
    }
}

/// How much of the data was looked at.
pub fn data_read(read_data: bool, bytes: u64) -> String {
    match read_data {
        true => format!("{} of data read", show_bytes(bytes)),
        false => "data not read (--read-data reads it)".to_owned(),
    }
}

/// What may be said where no damage was found.
pub fn verdict_without_damage(read_data: bool) -> &'static str {
    if read_data { "whole" } else { "whole but for the data" }
}

/// `fsck`
pub async fn fsck(scene: &Scene, args: &Fsck) -> Outcome {
    let Some(reference) = &args.reference else {
        return match args.node {
            true => super::cache::fsck_node(scene, args).await,
            false => super::mend::fsck_store(scene, args).await,
        };
    };
    let name = named(reference)?;
    let mut images = embed::images(&scene.settings, scene.out).await?;
    let answer = resolve(&mut images, &name).await?;
    let ids = layer_ids(&answer)?;
    let url = images.store_url(&scene.settings)?;
    let store = blocking(move || Ok(Arc::new(Store::open(store::open(&url)?)?))).await?;
    let mut findings =
        Findings { name: name.clone(), read_data: args.read_data, ..Findings::default() };
    let subjects = ids.iter().copied().map(Target::Layer);
    let environment = match &answer.target {
        Some(Resolved::EnvId(id)) => Some(Target::Environment(EnvId::from_slice(id)?)),
        _ => None,
    };
    let subjects: Vec<Target> = subjects.chain(environment).collect();
    let trusted = super::mend::trusted(&scene.settings, args.keys.as_deref())?;
    let (reader, begun) = (Arc::clone(&store), findings);
    findings =
        blocking(move || check_signatures(&reader, &subjects, trusted.as_ref(), begun)).await?;
    for id in ids {
        refresh_hint(&mut images, &store, &id, &mut findings).await?;
        let (store, read_data) = (Arc::clone(&store), args.read_data);
        findings = blocking(move || {
            check_layer(&store, &id, read_data, &mut findings);
            Ok(findings)
        })
        .await?;
    }
    scene.out.result(&findings, || findings.lines())?;
    if findings.damages == 0 {
        return Ok(());
    }
    let error = Error::corrupt(format!("{name} is damaged in {} places", findings.damages));
    Err(error).remedy(|_| Some("build it again, or restore the store".to_owned()))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Outcome<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Error::new(ErrorKind::Internal, "a check died").with_source(error))?
        .map_err(Failure::from)
}

/// Asks imaged for a location hint where the store has none.
async fn refresh_hint(
    images: &mut Images,
    store: &Arc<Store>,
    id: &LayerId,
    findings: &mut Findings,
) -> Outcome {
    let (reader, layer) = (Arc::clone(store), *id);
    if blocking(move || reader.read_locations(&layer)).await?.is_some() {
        return Ok(());
    }
    let request = LocateRequest { layer_id: id.0.to_vec() };
    match images.client.locate(request).await {
        Ok(answer) => {
            for digest in answer.into_inner().missing {
                let digest = ChunkDigest::from_slice(&digest)?;
                findings.note(format!("chunk {digest} of layer {id} lies in no pack"));
            }
        }
        Err(status) => {
            let error = proto::status::from_status(status);
            findings.note(format!("layer {id} cannot be located: {}", one_line(&error)));
        }
    }
    Ok(())
}

/// Every signature of these, whoever made it.
fn check_signatures(
    store: &Store,
    subjects: &[Target],
    trusted: Option<&TrustedKeys>,
    mut findings: Findings,
) -> Result<Findings> {
    for subject in subjects {
        for key in store.signers(subject)? {
            match store.read_signature(subject, &key) {
                Ok(_) if trusted.is_some_and(|trusted| !trusted.contains(&key)) => {
                    findings
                        .strange
                        .push(format!("{subject} is signed by key {key}, which is not trusted"));
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error),
                Err(error) => findings.note(error.chain()),
            }
            findings.signatures += 1;
        }
    }
    Ok(findings)
}

fn check_layer(store: &Store, id: &LayerId, read_data: bool, findings: &mut Findings) {
    findings.layers += 1;
    let file = match store.read_layer(id) {
        Ok(file) => file,
        Err(error) => return findings.note(error.chain()),
    };
    match Reader::parse(&file.metadata).and_then(|reader| reader.to_tree()) {
        Ok(tree) => findings.files += tree.inodes.len() as u64,
        Err(error) => findings.note(format!("metadata of layer {id}: {}", error.chain())),
    }
    match store.read_locations(id) {
        Ok(Some(locations)) => check_chunks(store, id, &file, &locations, read_data, findings),
        Ok(None) if file.chunk_table.is_empty() => {}
        Ok(None) => findings.note(format!("layer {id} has no location hint")),
        Err(error) => findings.note(format!("location hint of layer {id}: {}", error.chain())),
    }
    check_space(store, id, &file, read_data, findings);
}

/// The plain data space of the `direct` plane, where there is one.
fn check_space(
    store: &Store,
    id: &LayerId,
    file: &LayerFile,
    read_data: bool,
    findings: &mut Findings,
) {
    let right = file.chunk_table.data_bytes();
    let found = match store.space(id) {
        Ok(Some(space)) if space.bytes != right => {
            return findings.note(store::wrong_length(id, space.bytes, right));
        }
        Ok(Some(_)) if read_data => {
            findings.bytes_read += right;
            store.check_space(id, &file.chunk_table)
        }
        other => other.map(|_| Vec::new()),
    };
    match found {
        Ok(damages) => damages.into_iter().for_each(|damage| findings.note(damage)),
        Err(error) => findings.note(format!("plain data space of layer {id}: {}", error.chain())),
    }
}

/// What a pack's own footer says.
type Footer = HashMap<ChunkDigest, u64>;

fn check_chunks(
    store: &Store,
    id: &LayerId,
    file: &LayerFile,
    locations: &Locations,
    read_data: bool,
    findings: &mut Findings,
) {
    let mut footers: HashMap<PackId, Option<Footer>> = HashMap::new();
    for (index, chunk) in file.chunk_table.chunks().iter().enumerate() {
        if chunk.is_zero() {
            continue;
        }
        findings.chunks += 1;
        let name = || format!("chunk {index} ({}) of layer {id}", chunk.digest.short());
        let Some((pack, placement)) = locations.get(index) else {
            findings.note(format!("{} is not located", name()));
            continue;
        };
        let footer = footers.entry(pack).or_insert_with(|| {
            findings.packs += 1;
            read_footer(store, &pack, findings)
        });
        let Some(footer) = footer else { continue };
        if footer.get(&chunk.digest) != Some(&placement.offset) {
            findings.note(format!("{} is not where its hint says, in pack {pack}", name()));
            continue;
        }
        if read_data {
            findings.bytes_read += u64::from(chunk.plain_bytes());
            let read = read_chunk(store, &pack, placement, chunk.plain_bytes(), &chunk.digest);
            if let Err(error) = read {
                findings.note(format!("{}: {}", name(), error.chain()));
            }
        }
    }
}

fn read_footer(store: &Store, pack: &PackId, findings: &mut Findings) -> Option<Footer> {
    match store.read_pack_footer(pack) {
        Ok(entries) => {
            Some(entries.into_iter().map(|entry| (entry.digest, entry.offset)).collect())
        }
        Err(error) => {
            findings.note(error.chain());
            None
        }
    }
}

fn read_chunk(
    store: &Store,
    pack: &PackId,
    placement: Placement,
    plain_bytes: u32,
    digest: &ChunkDigest,
) -> Result<()> {
    let mut payload = vec![0; placement.stored_bytes as usize];
    store.read_pack(pack, placement.offset, &mut payload)?;
    store::codec::verify_chunk(&payload, placement.codec, plain_bytes, digest)
}
