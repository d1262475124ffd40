//! `profile ...` and `prefetch`: what a workload touches is recorded, shown, and fetched ahead.

mod plot;

use super::run::run;
use super::{Scene, blocking, cache, lost_name, named};
use crate::args::{self, Named, ProfileRecord, ProfileShow, ProfileStop, Run};
use crate::embed::{self, Images};
use crate::errors::{Failure, Outcome, Remedy};
use crate::node::start::{self, Lifetime};
use crate::output::Row;
use crate::quantity::{show_bytes, show_duration, show_share};
use builder::Layout;
use layer::chunk::BLOCK_BYTES;
use layer::profile::{Profile, Step};
use layer::{Context, EnvId, Error, ErrorKind, LayerId, Result};
use proto::v1::images_client::ImagesClient;
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::resolve_response::Target as Resolved;
use proto::v1::{
    PrefetchRequest, RecordRequest, ResolveRequest, ResolveResponse, StopRecordRequest,
    StopRecordResponse,
};
use serde::Serialize;
use std::time::Duration;
use store::Profiled;
use tonic::transport::Channel;

/// `profile ...`
pub async fn profile(scene: &Scene, action: args::Profile) -> Outcome {
    match action {
        args::Profile::Record(args) => record(scene, *args).await,
        args::Profile::Stop(args) => stop(scene, &args).await,
        args::Profile::Show(args) => show(scene, args).await,
        args::Profile::Apply(args) => apply(scene, &args).await,
        args::Profile::Rm(args) => remove(scene, &args).await,
    }
}

/// What a reference names, as far as profiles care.
#[derive(Debug, Clone)]
struct Subject {
    name: String,
    environment: Option<EnvId>,
    layers: Vec<(LayerId, u64)>,
}

impl Subject {
    async fn resolve(channel: &Channel, reference: &str) -> Outcome<Self> {
        let name = named(reference)?;
        let request = ResolveRequest { name: name.clone() };
        let answer = ImagesClient::new(channel.clone()).resolve(request).await;
        Ok(Self::new(name, &answer.remedy(lost_name)?.into_inner())?)
    }

    fn new(name: String, answer: &ResolveResponse) -> Result<Self> {
        let environment = match &answer.target {
            Some(Resolved::EnvId(id)) => Some(EnvId::from_slice(id)?),
            _ => None,
        };
        let layers = answer
            .layers
            .iter()
            .map(|layer| LayerId::from_slice(&layer.layer_id).map(|id| (id, layer.plain_bytes)));
        Ok(Self { name, environment, layers: layers.collect::<Result<_>>()? })
    }

    /// The name of its recording: one at a time.
    fn recording(&self) -> String {
        match (&self.environment, self.layers.first()) {
            (Some(id), _) => id.to_string(),
            (None, Some((id, _))) => id.to_string(),
            (None, None) => self.name.clone(),
        }
    }

    fn layer_ids(&self) -> Vec<Vec<u8>> {
        self.layers.iter().map(|(id, _)| id.as_bytes().to_vec()).collect()
    }

    fn env_id(&self) -> Vec<u8> {
        self.environment.map(|id| id.as_bytes().to_vec()).unwrap_or_default()
    }

    /// The profile of the environment, else what the layers' own say together.
    fn read(&self, store: &store::Store) -> Result<Profile> {
        if let Some(id) = self.environment
            && let Some(found) = store.read_profile(&Profiled::Environment(id))?
        {
            return Ok(found);
        }
        let mut all = Profile::default();
        for (id, _) in &self.layers {
            if let Some(found) = store.read_profile(&Profiled::Layer(*id))? {
                all = all.merged(&found);
            }
        }
        Ok(all)
    }
}

async fn layerfs(scene: &Scene) -> Outcome<LayerFsClient<Channel>> {
    Ok(LayerFsClient::new(proto::connect::unix(&scene.settings.fsd_socket()).await?))
}

/// `profile record`
async fn record(scene: &Scene, args: ProfileRecord) -> Outcome {
    let has_command = !args.spec.argv.is_empty();
    let lifetime = if has_command { Lifetime::WhileUsed } else { Lifetime::UntilDown };
    let node = start::connect(&scene.settings, lifetime, scene.out).await?;
    let subject = Subject::resolve(&node.channel, &args.spec.reference).await?;
    let mut client = layerfs(scene).await?;
    let name = subject.recording();
    let request = RecordRequest {
        name: name.clone(),
        layer_ids: subject.layer_ids(),
        env_id: subject.env_id(),
    };
    let begun = client.record(request).await.remedy(|error| {
        (error.kind() == ErrorKind::Exists)
            .then(|| format!("`lamella profile stop {}` ends it", subject.name))
    })?;
    let warm = begun.into_inner().warm_layer_ids.len();
    if warm > 0 {
        scene.out.notice(&format!(
            "{warm} of {} layers are in use already: what is in memory is not seen",
            subject.layers.len()
        ));
    }
    if !has_command {
        return scene.out.result(&Begun { recording: name }, || {
            format!("recording {}; `lamella profile stop {0}` ends it", subject.name)
        });
    }
    let attachment = args.attachment;
    let outcome = run(scene, Run { spec: args.spec, attachment, rm: true }).await;
    // The command ran, whatever its code: only where it did not is there nothing to keep.
    let discard = !matches!(&outcome, Ok(()) | Err(Failure::Code(_)));
    let stopped = client.stop_record(StopRecordRequest { name, discard }).await;
    if discard {
        return outcome;
    }
    let summary = Summary::new(&stopped?.into_inner())?;
    scene.out.notice(&summary.line(&subject.name));
    outcome
}

/// `profile stop`
async fn stop(scene: &Scene, args: &ProfileStop) -> Outcome {
    let node = living(scene).await?;
    let subject = Subject::resolve(&node.channel, &args.which.reference).await?;
    let request = StopRecordRequest { name: subject.recording(), discard: args.discard };
    let stopped = layerfs(scene).await?.stop_record(request).await.remedy(|error| {
        (error.kind() == ErrorKind::NotFound)
            .then(|| format!("`lamella profile record {}` begins one", subject.name))
    })?;
    let summary = Summary::new(&stopped.into_inner())?;
    scene.out.result(&summary, || summary.line(&subject.name))
}

/// `profile apply`
async fn apply(scene: &Scene, args: &Named) -> Outcome {
    let node = living(scene).await?;
    let subject = Subject::resolve(&node.channel, &args.reference).await?;
    let request = PrefetchRequest { env_id: subject.env_id(), layer_ids: subject.layer_ids() };
    layerfs(scene).await?.prefetch(request).await?;
    scene.out.result(&Begun { recording: subject.recording() }, || {
        format!("fetching what the profile of {} names, of its attached layers", subject.name)
    })
}

/// `prefetch`
pub async fn prefetch(scene: &Scene, args: &args::Prefetch) -> Outcome {
    let node = start::connect(&scene.settings, Lifetime::UntilDown, scene.out).await?;
    let subject = Subject::resolve(&node.channel, &args.which.reference).await?;
    let mut loaded =
        Loaded { layers: subject.layers.len(), fetched_bytes: 0, broken_off: Vec::new() };
    for (id, _) in &subject.layers {
        let done = cache::load(scene, id, args.rate.unwrap_or(0)).await?;
        loaded.fetched_bytes += done.fetched_bytes;
        loaded.broken_off.extend(done.broken_off.then_some(*id));
    }
    scene.out.result(&loaded, || {
        let fetched = show_bytes(loaded.fetched_bytes);
        match loaded.broken_off.len() {
            0 => format!("{} is complete on this node: {fetched} fetched", subject.name),
            layers => format!(
                "{}: {fetched} fetched; {layers} layers are not complete, as their last user went away",
                subject.name
            ),
        }
    })
}

/// `profile rm`
async fn remove(scene: &Scene, args: &Named) -> Outcome {
    let (store, subject) = open(scene, &args.reference).await?;
    let removed = blocking(move || -> Result<usize> {
        let own = subject.environment.map(Profiled::Environment);
        let layers = subject.layers.iter().map(|(id, _)| Profiled::Layer(*id));
        let mut removed = 0;
        for of in own.into_iter().chain(layers) {
            removed += usize::from(store.delete_profile(&of)?);
        }
        Ok(removed)
    })
    .await??;
    let removed = Removed { profiles: removed };
    scene.out.result(&removed, || format!("{} profiles removed", removed.profiles))
}

async fn living(scene: &Scene) -> Outcome<start::Node> {
    let Some(node) = start::running(&scene.settings).await? else {
        let data = scene.settings.data().display();
        return Err(Error::new(ErrorKind::Unavailable, format!("no node is running on {data}")))
            .remedy(|_| Some("`lamella up` starts one".to_owned()));
    };
    Ok(node)
}

async fn open(scene: &Scene, reference: &str) -> Outcome<(store::Store, Subject)> {
    let images = embed::images(&scene.settings, scene.out).await?;
    let subject = Subject::resolve(&images.channel, reference).await?;
    let url = images.store_url(&scene.settings)?;
    let store = blocking(move || store::Store::open(store::open(&url)?)).await??;
    Ok((store, subject))
}

/// What comes first in a build: by the profile of a reference, or by a file that `profile show --out` wrote.
pub async fn layout(scene: &Scene, images: &Images, text: &str) -> Outcome<Layout> {
    let url = images.store_url(&scene.settings)?;
    let store = blocking(move || store::Store::open(store::open(&url)?)).await??;
    let profile = if std::path::Path::new(text).is_file() {
        let bytes = std::fs::read(text).context(|| format!("read {text}"))?;
        Profile::decode(&bytes).context(|| text.to_owned())?
    } else {
        let subject = Subject::resolve(&images.channel, text).await?;
        let profile = subject.read(&store)?;
        if profile.is_empty() {
            return Err(no_profile(&subject.name));
        }
        profile
    };
    let read = move |id: &LayerId| match store.read_layer(id) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    };
    let layout = blocking(move || Layout::new(&profile, read)).await??;
    if layout.is_empty() {
        scene.out.notice("the layers of the profile are not on this store: it decides nothing");
    }
    Ok(layout)
}

fn no_profile(name: &str) -> Failure {
    let advice = format!("`lamella profile record {name} -- CMD` makes one");
    Failure::Failed {
        error: Error::not_found(format!("{name} has no profile")),
        remedy: Some(advice),
    }
}

/// `profile show`
async fn show(scene: &Scene, args: ProfileShow) -> Outcome {
    let (store, subject) = open(scene, &args.which.reference).await?;
    let own = subject.clone();
    let profile = blocking(move || own.read(&store)).await??;
    if profile.is_empty() {
        return Err(no_profile(&subject.name));
    }
    let steps = profile.order();
    if let Some(path) = &args.svg {
        let drawing = plot::draw(&subject.name, &subject.layers, &profile, &steps);
        std::fs::write(path, drawing).context(|| format!("write {}", path.display()))?;
    }
    if let Some(path) = &args.out {
        let bytes = profile.encode();
        std::fs::write(path, bytes).context(|| format!("write {}", path.display()))?;
    }
    if args.reads {
        let reads: Vec<Read> = steps.iter().map(Read::new).collect();
        return scene.out.listing(&reads);
    }
    let layers = subject.layers.iter();
    let rows: Vec<Touched> =
        layers.map(|(id, bytes)| Touched::new(*id, *bytes, profile.runs().len(), &steps)).collect();
    scene.out.listing(&rows)
}

#[derive(Debug, Serialize)]
struct Begun {
    recording: String,
}

#[derive(Debug, Serialize)]
struct Loaded {
    layers: usize,
    fetched_bytes: u64,
    /// Layers whose last user went away before they were complete.
    broken_off: Vec<LayerId>,
}

#[derive(Debug, Serialize)]
struct Removed {
    profiles: usize,
}

/// What a recording brought.
#[derive(Debug, Serialize)]
struct Summary {
    reads: usize,
    bytes: u64,
    elapsed_ms: u32,
    truncated: bool,
}

impl Summary {
    fn new(stopped: &StopRecordResponse) -> Result<Self> {
        let profile = Profile::decode(&stopped.profile)?;
        let touches = || profile.runs().iter().flat_map(layer::profile::Run::touches);
        Ok(Self {
            reads: touches().count(),
            bytes: touches().map(|touch| bytes_of(touch.blocks)).sum(),
            elapsed_ms: touches().map(|touch| touch.at_ms).max().unwrap_or(0),
            truncated: stopped.truncated,
        })
    }

    fn line(&self, name: &str) -> String {
        let time = show_duration(Duration::from_millis(u64::from(self.elapsed_ms)));
        let rest = if self.truncated { "; the rest did not fit" } else { "" };
        format!("{name} touched {} in {} reads in {time}{rest}", show_bytes(self.bytes), self.reads)
    }
}

fn bytes_of(blocks: u32) -> u64 {
    u64::from(blocks) * u64::from(BLOCK_BYTES)
}

/// One step of the order.
#[derive(Debug, Serialize)]
struct Read {
    layer: LayerId,
    at_ms: u32,
    rank: u32,
    runs: u32,
    offset: u64,
    bytes: u64,
}

impl Read {
    fn new(step: &Step) -> Self {
        Self {
            layer: step.layer,
            at_ms: step.at_ms,
            rank: step.rank,
            runs: step.runs,
            offset: bytes_of(step.start_block),
            bytes: bytes_of(step.blocks),
        }
    }
}

impl Row for Read {
    const HEADER: &'static [&'static str] = &["LAYER", "TIME", "RANK", "RUNS", "OFFSET", "BYTES"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.layer.short(),
            format!("{} ms", self.at_ms),
            self.rank.to_string(),
            self.runs.to_string(),
            self.offset.to_string(),
            self.bytes.to_string(),
        ]
    }
}

/// What was touched of one layer.
#[derive(Debug, Serialize)]
struct Touched {
    layer: LayerId,
    runs: usize,
    reads: usize,
    touched_bytes: u64,
    plain_bytes: u64,
    first_ms: u32,
    last_ms: u32,
}

impl Touched {
    fn new(layer: LayerId, plain_bytes: u64, runs: usize, steps: &[Step]) -> Self {
        let own = || steps.iter().filter(|step| step.layer == layer);
        Self {
            layer,
            runs,
            reads: own().count(),
            touched_bytes: own().map(|step| bytes_of(step.blocks)).sum(),
            plain_bytes,
            first_ms: own().map(|step| step.at_ms).min().unwrap_or(0),
            last_ms: own().map(|step| step.at_ms).max().unwrap_or(0),
        }
    }
}

impl Row for Touched {
    const HEADER: &'static [&'static str] =
        &["LAYER", "RUNS", "READS", "TOUCHED", "SHARE", "FIRST", "LAST"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.layer.short(),
            self.runs.to_string(),
            self.reads.to_string(),
            show_bytes(self.touched_bytes),
            show_share(self.touched_bytes, self.plain_bytes),
            format!("{} ms", self.first_ms),
            format!("{} ms", self.last_ms),
        ]
    }
}
