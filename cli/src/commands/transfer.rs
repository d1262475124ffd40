//! `copy-store`, `export` and `import`: layers, environments and their names from one store to another, by
//! digest; the other may be a single file.
//!
//! What the other store has is not sent again, so a copy that was cut off goes on where it was: packs are
//! sealed as they fill. The other store's own daemon is not asked: an image daemon in this process, with a
//! catalog that is thrown away, publishes there by the same rules as everybody.

use super::images::{point, resolve};
use super::{Scene, named};
use crate::args::{CopyStore, Export, Import};
use crate::embed;
use crate::errors::{Failure, Outcome, Remedy};
use crate::quantity::show_bytes;
use builder::publish::{EncodedChunk, ImagesPublisher, Publisher};
use layer::pack::PackEntry;
use layer::reference::{Reference, Target};
use layer::{ChunkDigest, Context, EnvId, Error, ErrorKind, LayerId, PackId, Result};
use proto::v1::images_client::ImagesClient;
use proto::v1::resolve_response::Target as Resolved;
use proto::v1::tag_request;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use store::backend::archive::Archive;
use store::{Framings, Key, Store, signatures_of};
use tonic::transport::Channel;

/// Targets under one publish.
const PUBLISH: usize = 64;
/// Chunks asked for at once.
const ASK: usize = 4096;
/// How much of an object beside the layers is read at once.
const PART_BYTES: u64 = 1 << 20;

/// What was copied.
#[derive(Debug, Default, Serialize)]
struct Copied {
    references: u64,
    environments: u64,
    layers: u64,
    chunks: u64,
    /// Chunks that had to be sent, and their stored bytes.
    sent_chunks: u64,
    sent_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    file_bytes: Option<u64>,
}

impl Copied {
    fn lines(&self, to: &str) -> String {
        let file =
            self.file_bytes.map_or_else(String::new, |bytes| format!(", {}", show_bytes(bytes)));
        format!(
            "{to}: {} references, {} environments, {} layers; {} of {} chunks sent, {}{file}",
            self.references,
            self.environments,
            self.layers,
            self.sent_chunks,
            self.chunks,
            show_bytes(self.sent_bytes)
        )
    }
}

/// What to copy: a target, and the name it gets there.
type Wanted = Vec<(Option<Reference>, Target)>;

/// A directory that goes with its owner.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // It is inside `run`, which is cleared with the node at the latest.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A store to write to, and the daemon that publishes there.
struct Destination {
    store: Arc<Store>,
    channel: Channel,
}

/// An image daemon on `store` in this process.
async fn destination(scene: &Scene, store: Arc<Store>) -> Outcome<(Destination, Scratch)> {
    scene.settings.prepare()?;
    let scratch = Scratch(scene.settings.run(&format!("copy-{}", std::process::id())));
    let config = imaged::ImagedConfig { store: Arc::clone(&store), catalog_dir: scratch.0.clone() };
    let service = super::blocking(move || imaged::Service::open(config)).await??;
    let channel = proto::connect::in_process_own(service.routes()).await?;
    Ok((Destination { store, channel }, scratch))
}

/// `copy-store`
pub async fn copy_store(scene: &Scene, args: CopyStore) -> Outcome {
    if args.references.is_empty() != args.all {
        return Err(Failure::Usage("name what to copy, or give --all".to_owned()));
    }
    let (source, wanted) = wanted(scene, &args.references).await?;
    let to = args.to.clone();
    let store = super::blocking(move || Store::open(store::open(&to)?)).await??;
    if store.id() == source.id() {
        return Err(Error::invalid(format!("{} is the store itself", args.to)).into());
    }
    let (there, _scratch) = destination(scene, Arc::new(store)).await?;
    let copied = transfer(&source, there, wanted).await?;
    scene.out.result(&copied, || copied.lines(&args.to))
}

/// `export`
pub async fn export(scene: &Scene, args: Export) -> Outcome {
    let (source, wanted) = wanted(scene, std::slice::from_ref(&args.reference)).await?;
    let path = args.file.clone();
    let archive = super::blocking(move || Archive::create(&path)).await??;
    let backend = Arc::new(archive.clone());
    let store = super::blocking(move || Store::open(backend)).await??;
    let (there, _scratch) = destination(scene, Arc::new(store)).await?;
    let mut copied = transfer(&source, there, wanted).await?;
    copied.file_bytes = Some(super::blocking(move || archive.finish()).await??);
    scene.out.result(&copied, || copied.lines(&args.file.display().to_string()))
}

fn copied_badly(error: &Error) -> Option<String> {
    (error.kind() == ErrorKind::Corrupt)
        .then(|| "bring the file anew from where it was written".into())
}

/// `import`
pub async fn import(scene: &Scene, args: Import) -> Outcome {
    let path = args.file.clone();
    let (source, wanted) = super::blocking(move || -> Result<(Store, Wanted)> {
        let source = Store::open(Arc::new(Archive::open(&path)?))?;
        let mut wanted = Wanted::new();
        for (reference, number) in source.list_references(None)? {
            if let Some(target) = source.read_entry(&reference, number)?.target {
                wanted.push((Some(reference), target));
            }
        }
        let named: HashSet<Target> = wanted.iter().map(|(_, target)| *target).collect();
        // An id was exported: it comes without a name.
        let environments = source.list_environments()?.into_iter().map(Target::Environment);
        wanted.extend(environments.filter(|id| !named.contains(id)).map(|id| (None, id)));
        if wanted.is_empty() {
            wanted.extend(source.list_layers()?.into_iter().map(|id| (None, Target::Layer(id))));
        }
        Ok((source, wanted))
    })
    .await?
    .remedy(copied_badly)?;
    let images = embed::images(&scene.settings, scene.out).await?;
    let url = images.store_url(&scene.settings)?;
    let store = super::blocking(move || Store::open(store::open(&url)?)).await??;
    let there = Destination { store: Arc::new(store), channel: images.channel.clone() };
    let copied = transfer(&source, there, wanted).await.remedy(copied_badly)?;
    scene.out.result(&copied, || copied.lines(&args.file.display().to_string()))
}

/// The store of this node, and what these names stand for on it; without any all references.
async fn wanted(scene: &Scene, names: &[String]) -> Outcome<(Store, Wanted)> {
    let mut images = embed::images(&scene.settings, scene.out).await?;
    let url = images.store_url(&scene.settings)?;
    let source = super::blocking(move || Store::open(store::open(&url)?)).await??;
    let mut wanted = Wanted::new();
    for name in names {
        let full = named(name)?;
        let target = match resolve(&mut images, &full).await?.target {
            Some(Resolved::LayerId(id)) => Target::Layer(LayerId::from_slice(&id)?),
            Some(Resolved::EnvId(id)) => Target::Environment(EnvId::from_slice(&id)?),
            None => return Err(Error::not_found(format!("{full} has no target")).into()),
        };
        wanted.push((full.parse().ok(), target));
    }
    if names.is_empty() {
        for (reference, number) in source.list_references(None)? {
            let target = source.read_entry(&reference, number)?.target;
            wanted.extend(target.map(|target| (Some(reference), target)));
        }
    }
    Ok((source, wanted))
}

async fn transfer(source: &Store, there: Destination, wanted: Wanted) -> Outcome<Copied> {
    let (handle, source) = (tokio::runtime::Handle::current(), source.clone());
    let copied = super::blocking(move || -> Result<Copied> {
        let framings = source.framings()?;
        let mut state = State {
            places: Places::default(),
            framings,
            seen: HashSet::new(),
            done: Copied::default(),
        };
        let mut client = ImagesClient::new(there.channel.clone());
        // Each publish keeps what it has copied until that has its names; what it can keep is bounded.
        for part in wanted.chunks(PUBLISH) {
            let publisher = ImagesPublisher::open(handle.clone(), there.channel.clone(), "copy")?;
            let (source, there) = (&source, &there.store);
            let mut transfer = Transfer { source, there, publisher: &publisher, state: &mut state };
            part.iter().try_for_each(|(_, target)| transfer.target(target))?;
            for (reference, target) in part {
                let Some(reference) = reference else { continue };
                let target = match target {
                    Target::Layer(id) => tag_request::Target::LayerId(id.0.to_vec()),
                    Target::Environment(id) => tag_request::Target::EnvId(id.0.to_vec()),
                };
                handle.block_on(point(&mut client, reference, target))?;
                state.done.references += 1;
            }
        }
        Ok(state.done)
    })
    .await??;
    Ok(copied)
}

/// What goes on from publish to publish.
struct State {
    places: Places,
    framings: Framings,
    seen: HashSet<Target>,
    done: Copied,
}

struct Transfer<'a> {
    source: &'a Store,
    there: &'a Store,
    publisher: &'a dyn Publisher,
    state: &'a mut State,
}

impl Transfer<'_> {
    fn target(&mut self, target: &Target) -> Result<()> {
        if !self.state.seen.insert(*target) {
            return Ok(());
        }
        match target {
            Target::Layer(id) => self.layer(id)?,
            Target::Environment(id) => {
                let environment = self.source.read_environment(id)?;
                for layer in &environment.layers {
                    self.target(&Target::Layer(*layer))?;
                }
                if let Some(image) = &environment.image {
                    self.there.put_image_documents(&self.source.read_image_documents(image)?)?;
                }
                self.publisher.commit_environment(&environment.canonical())?;
                self.state.done.environments += 1;
            }
        }
        for name in self.source.backend().list(&signatures_of(target), None, ASK)? {
            self.object(&name)?;
        }
        Ok(())
    }

    fn layer(&mut self, id: &LayerId) -> Result<()> {
        let file = self.source.read_layer(id)?;
        let chunks: BTreeMap<ChunkDigest, usize> = file
            .chunk_table
            .chunks()
            .iter()
            .enumerate()
            .filter(|(_, chunk)| !chunk.is_zero())
            .map(|(at, chunk)| (chunk.digest, at))
            .collect();
        // In the order of the layer, so that what is read together lies together.
        let mut order: Vec<(usize, ChunkDigest)> =
            chunks.into_iter().map(|(digest, at)| (at, digest)).collect();
        order.sort_unstable();
        self.state.places.of_layer(self.source, id)?;
        let encoded = file.encode()?;
        // Once more where something was collected there meanwhile.
        for last_try in [false, true] {
            for part in order.chunks(ASK) {
                let digests: Vec<ChunkDigest> = part.iter().map(|(_, digest)| *digest).collect();
                let missing = self.publisher.missing(&digests)?;
                for ((at, digest), _) in part.iter().zip(missing).filter(|(_, missing)| *missing) {
                    let plain_bytes = file.chunk_table.chunks()[*at].plain_bytes();
                    let chunk =
                        self.state.places.read(self.source, id, *at, digest, plain_bytes)?;
                    self.state.done.sent_chunks += 1;
                    self.state.done.sent_bytes += chunk.payload.len() as u64;
                    self.publisher.upload(chunk)?;
                }
            }
            self.publisher.flush()?;
            match self.publisher.commit_layer(&encoded) {
                Err(error) if error.kind() == ErrorKind::NotFound && !last_try => {}
                other => {
                    other?;
                    break;
                }
            }
        }
        self.state.done.layers += 1;
        self.state.done.chunks += order.len() as u64;
        self.beside(id)
    }

    /// What is kept of the archive that the layer came from.
    fn beside(&self, id: &LayerId) -> Result<()> {
        for (_, name) in self.state.framings.get(id).into_iter().flatten() {
            self.object(name)?;
            let tar = name.split('/').nth(1).unwrap_or_default();
            let prefix = format!("streams/{tar}/");
            for name in self.source.backend().list(&prefix, None, ASK)? {
                self.object(&name)?;
            }
        }
        Ok(())
    }

    fn object(&self, name: &str) -> Result<()> {
        let key = Key::new(name)?;
        let size = self.source.backend().size(&key)?;
        let mut upload = self.there.backend().create(&key)?;
        let mut part = Vec::new();
        let mut at = 0;
        while at < size {
            part.resize((size - at).min(PART_BYTES) as usize, 0);
            self.source.backend().read_at(&key, at, &mut part)?;
            upload.write(&part)?;
            at += part.len() as u64;
        }
        match upload.publish() {
            Err(error) if error.kind() == ErrorKind::Exists => Ok(()),
            other => other,
        }
    }
}

/// Where the source has its chunks: by the hint of the layer at hand, else by all footers.
#[derive(Default)]
struct Places {
    hint: layer::location::Locations,
    footers: Option<HashMap<ChunkDigest, (PackId, PackEntry)>>,
}

impl Places {
    fn of_layer(&mut self, source: &Store, id: &LayerId) -> Result<()> {
        self.hint = source.read_locations(id)?.unwrap_or_default();
        Ok(())
    }

    fn read(
        &mut self,
        source: &Store,
        id: &LayerId,
        at: usize,
        digest: &ChunkDigest,
        plain_bytes: u32,
    ) -> Result<EncodedChunk> {
        let name = || format!("chunk {at} ({}) of layer {id}", digest.short());
        if let Some((pack, place)) = self.hint.get(at) {
            let mut payload = vec![0; place.stored_bytes as usize];
            let codec = place.codec;
            let read = source
                .read_pack(&pack, place.offset, &mut payload)
                .and_then(|()| store::codec::verify_chunk(&payload, codec, plain_bytes, digest));
            match read {
                Ok(()) => return Ok(EncodedChunk { digest: *digest, codec, plain_bytes, payload }),
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {}
                Err(error) => return Err(error),
            }
        }
        if self.footers.is_none() {
            let mut footers = HashMap::new();
            for pack in source.list_packs()? {
                let entries = source.read_pack_footer(&pack)?.into_iter();
                footers.extend(entries.map(|entry| (entry.digest, (pack, entry))));
            }
            self.footers = Some(footers);
        }
        let place = self.footers.as_ref().and_then(|footers| footers.get(digest));
        let (pack, entry) =
            place.ok_or_else(|| Error::not_found(format!("{} lies in no pack", name())))?;
        let mut payload = vec![0; entry.stored_bytes as usize];
        source.read_pack(pack, entry.offset, &mut payload).context(name)?;
        store::codec::verify_chunk(&payload, entry.codec, plain_bytes, digest).context(name)?;
        Ok(EncodedChunk { digest: *digest, codec: entry.codec, plain_bytes, payload })
    }
}
