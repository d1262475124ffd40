//! The node process: imaged and the runtime in it, fsd beside it.
//!
//! Order up: the node's lock, the catalog's lock, imaged, fsd, the runtime, the socket. Order down: the
//! socket, the runtime (its sandboxes were stopped by whoever wanted them stopped), fsd with its keepers
//! unless layers are in use, the locks.
//!
//! | told to end by | sandboxes | fsd |
//! |---|---|---|
//! | `lamella down` | stopped by the command | ends |
//! | `lamella down --keep`, SIGTERM | go on | stays, adopted by the next node |
//! | Ctrl-C in the foreground | stopped here | ends |
//! | its last user gone (`run --rm`) | none are left | ends |
//! | SIGUSR2 (`lamella upgrade`) | go on | stays, replaced by the next program's |
//!
//! CRASH: `kill -9` here leaves fsd, its keepers and the sandboxes as they are; the locks are free, and
//! the next node adopts everything.

use crate::embed::{self, Opened};
use crate::errors::{Failure, Outcome, Remedy, one_line};
use crate::node::daemon::Daemon;
use crate::node::leases::NodeLeases;
use crate::node::lock::{self, Exclusive};
use crate::node::options::FsdOptions;
use crate::node::reserve::Reserve;
use crate::node::sandbox_options::SandboxOptions;
use crate::node::start::Announcement;
use crate::node::upgrade;
use crate::node::{log, metrics, owners};
use crate::output::{Output, write_out};
use crate::settings::Settings;
use layer::layer_file::LayerFile;
use layer::reference::Target;
use layer::{Context, EnvId, Error, ErrorKind, LayerId, Result};
use proto::v1::resolve_response::Target as Resolved;
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::{ListRequest, ResolveResponse};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use store::{Store, Trust};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tonic::service::Routes;
use tonic::transport::Channel;

/// How often dead owners are looked for.
const OWNERS_TICK: Duration = Duration::from_secs(1);
/// Every so many ticks sandboxes without an owner are looked for, whatever the owners say.
const THOROUGH_EVERY: u32 = 30;
/// How often an ephemeral node looks whether it is used.
const IDLE_TICK: Duration = Duration::from_millis(50);

/// How a node runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// For a person who watches: logs to standard error, ends with Ctrl-C.
    Foreground,
    /// Started by another command, until it is told to end.
    Background,
    /// Started by another command, until nobody uses it.
    Ephemeral,
}

/// Runs a node until it is told to end.
pub async fn run(
    settings: &Settings,
    out: Output,
    mode: Mode,
    options: &FsdOptions,
    sandboxes: &SandboxOptions,
) -> Outcome {
    if let Err(failure) = options.check() {
        if mode != Mode::Foreground {
            _ = announce(&failed(&failure));
        }
        return Err(failure);
    }
    let reserve = Reserve::of(settings);
    let lock_path = settings.run("node.lock");
    if !lock_path.exists() || lock::holder(&lock_path)?.is_none() {
        reserve.release();
    }
    settings.prepare()?;
    if mode == Mode::Foreground {
        log::to_stderr("warn");
    } else {
        log::to_file(&settings.run("node.log"))?;
        if let Err(error) = sys::process::new_session() {
            tracing::debug!(%error, "the node stays in its session");
        }
    }
    let owner = embed::this_process(settings);
    let node_lock = match lock::try_exclusive(&lock_path, &owner)? {
        Ok(lock) => lock,
        Err(_) if mode != Mode::Foreground => return announce(&Announcement::Held),
        Err(first) => {
            return Err(lock::second_node(settings.data(), first.as_ref()))
                .remedy(|_| Some("use it as it is, or end it with `lamella down`".to_owned()));
        }
    };
    let up = match reserve.check() {
        Ok(()) => Node::start(settings, out, options, sandboxes).await,
        Err(error) => Err(error.into()),
    };
    let node = match up {
        Ok(node) => node,
        Err(failure) => {
            // Whoever hears of the failure may try again at once.
            drop(node_lock);
            if mode != Mode::Foreground {
                _ = announce(&failed(&failure));
            }
            return Err(failure);
        }
    };
    reserve.take();
    match node.serve(settings, out, mode, options.metrics).await? {
        None => drop(node_lock),
        Some(program) => {
            node_lock.keep_to_the_end();
            return Err(upgrade::become_program(&program).into());
        }
    }
    Ok(())
}

fn announce(announcement: &Announcement) -> Outcome {
    let mut line = serde_json::to_string(announcement)
        .map_err(|error| Error::new(ErrorKind::Internal, "announce").with_source(error))?;
    line.push('\n');
    write_out(line.as_bytes())
}

fn failed(failure: &Failure) -> Announcement {
    let (kind, message) = match failure {
        Failure::Failed { error, .. } => (error.kind(), one_line(error)),
        Failure::Usage(message) => (ErrorKind::Invalid, message.clone()),
        Failure::Code(code) => (ErrorKind::Internal, format!("exit code {code}")),
    };
    Announcement::Failed { kind: kind.word().to_owned(), message }
}

/// Everything of a node but its socket. Fields drop in order.
struct Node {
    routes: Routes,
    sandboxes: Channel,
    daemon: Daemon,
    runtime: runtime::Service,
    leases: NodeLeases,
    images: imaged::Service,
}

/// One set of routes of two. Both answer what they do not know in the same way.
fn merge(one: Routes, two: Routes) -> Routes {
    Routes::from(one.into_axum_router().merge(two.into_axum_router().reset_fallback()))
}

impl Node {
    async fn start(
        settings: &Settings,
        out: Output,
        options: &FsdOptions,
        of_sandboxes: &SandboxOptions,
    ) -> Outcome<Self> {
        let catalog = embed::lock_catalog(settings, out, || false).await?;
        let catalog =
            catalog.ok_or_else(|| Error::new(ErrorKind::Internal, "the catalog's lock"))?;
        catalog.keep_to_the_end();
        let trusted = options.trusted(settings)?;
        // fsd gets the keys themselves, so that both trust the same ones whatever becomes of the files.
        let require_signature = trusted.as_ref().map(ToString::to_string);
        let options = &FsdOptions { require_signature, ..options.clone() };
        let Opened { store, images } = embed::open_images(settings).await?;
        let daemon = Daemon::start(settings, options).await?;
        let leases = NodeLeases::new(images.clone(), settings.data());
        let trust = trusted.map(Trust::new);
        let runtime =
            match open_runtime(settings, of_sandboxes, &images, &leases, store, trust).await {
                Ok(runtime) => runtime,
                Err(error) => {
                    daemon.finish().await?;
                    return Err(error.into());
                }
            };
        let sandboxes = proto::connect::in_process(runtime.routes()).await?;
        let routes = merge(images.routes(), runtime.routes());
        Ok(Self { routes, sandboxes, daemon, runtime, leases, images })
    }

    /// Answers the program that the node has to become, if it has to.
    async fn serve(
        self,
        settings: &Settings,
        out: Output,
        mode: Mode,
        metrics_at: Option<SocketAddr>,
    ) -> Outcome<Option<PathBuf>> {
        let listen = |kind| signal(kind).map_err(|error| Error::io("listen for signals", error));
        let mut terminate = listen(SignalKind::terminate())?;
        let mut interrupt = listen(SignalKind::interrupt())?;
        let mut upgrade = listen(SignalKind::user_defined2())?;
        let upkeep = tokio::spawn(collect_owners(settings.clone(), self.sandboxes.clone()));
        let layerfs = proto::connect::unix_lazy(&settings.fsd_socket());
        if let Some(address) = metrics_at {
            let (images, runtime) = (self.images.clone(), self.runtime.clone());
            metrics::serve(address, images, runtime, layerfs.clone());
        }
        let leases = tokio::spawn(self.leases.clone().keep(layerfs));
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (socket, routes) = (settings.node_socket(), self.routes.clone());
        let server = tokio::spawn(async move {
            proto::connect::serve_unix(&socket, routes, async move {
                _ = stopped.await;
            })
            .await
        });
        wait_for_socket(settings).await?;
        match mode {
            Mode::Foreground => out.notice(&format!(
                "the node of {} is up, process {}",
                settings.data().display(),
                std::process::id()
            )),
            // Whoever started it may be gone; others may use it all the same, and if nobody does, an
            // ephemeral node ends as it always does.
            Mode::Background | Mode::Ephemeral => _ = announce(&Announcement::Ready),
        }
        let mut last_user = None;
        let mut next_program = None;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {
                if let Err(Failure::Failed { error, .. }) =
                    crate::commands::stop_everything(settings, out, &self.sandboxes).await
                {
                    tracing::warn!(error = error.chain(), "stop sandboxes and mounts");
                }
            }
            lock = unused(settings, &self.sandboxes), if mode == Mode::Ephemeral => {
                last_user = lock;
            }
            program = wanted_program(&mut upgrade) => next_program = Some(program),
        }
        tracing::info!("the node ends");
        upkeep.abort();
        leases.abort();
        _ = stop.send(());
        match server.await {
            Ok(served) => served?,
            Err(error) => tracing::error!(%error, "the server died"),
        }
        self.runtime.close().await;
        if next_program.is_some() {
            self.daemon.leave().await;
        } else {
            let ended = self.daemon.finish().await?;
            if ended {
                // Nothing is attached any more, so nothing reads what the leases keep.
                let leases = self.leases.clone();
                _ = tokio::task::spawn_blocking(move || leases.release()).await;
            }
        }
        drop(last_user);
        Ok(next_program)
    }
}

/// Layer files for the runtime, straight from the store.
#[derive(Debug)]
struct StoredLayers(Arc<Store>);

impl runtime::LayerFiles for StoredLayers {
    fn layer_file(&self, layer: &LayerId) -> Result<LayerFile> {
        self.0.read_layer(layer)
    }
}

/// Names for the runtime, without a call.
#[derive(Debug)]
struct PublishedNames {
    images: imaged::Service,
    leases: NodeLeases,
    store: Arc<Store>,
    /// Where signatures are required.
    trust: Option<Trust>,
}

impl runtime::Names for PublishedNames {
    fn resolve(&self, name: &str) -> Result<ResolveResponse> {
        self.images.resolve(name)
    }

    fn admit(&self, name: &str, resolved: &ResolveResponse) -> Result<()> {
        if let Some(trust) = &self.trust {
            let subject = match &resolved.target {
                Some(Resolved::EnvId(id)) => Target::Environment(EnvId::from_slice(id)?),
                Some(Resolved::LayerId(id)) => Target::Layer(LayerId::from_slice(id)?),
                None => return Err(Error::not_found("the name points to nothing")),
            };
            trust.admit(&self.store, &subject).context(|| format!("{name} is refused"))?;
        }
        Ok(())
    }

    fn hold(&self, resolved: &ResolveResponse) -> Result<()> {
        let layers = resolved.layers.iter().map(|layer| LayerId::from_slice(&layer.layer_id));
        self.leases.hold(&layers.collect::<Result<Vec<_>>>()?)
    }
}

async fn open_runtime(
    settings: &Settings,
    options: &SandboxOptions,
    images: &imaged::Service,
    leases: &NodeLeases,
    store: Arc<Store>,
    trust: Option<Trust>,
) -> Result<runtime::Service> {
    let mut config = runtime::RuntimeConfig::new(
        settings.data().to_owned(),
        proto::connect::in_process_own(images.routes()).await?,
        proto::connect::unix_lazy(&settings.fsd_socket()),
    );
    config.names = Some(Arc::new(PublishedNames {
        images: images.clone(),
        leases: leases.clone(),
        store: Arc::clone(&store),
        trust,
    }));
    config.layer_files = Some(Arc::new(StoredLayers(store)));
    options.apply(&mut config);
    runtime::Service::open(config).await
}

/// Resolves when the node is told to become another program, and there is one that runs.
async fn wanted_program(told: &mut Signal) -> PathBuf {
    loop {
        _ = told.recv().await;
        match tokio::task::spawn_blocking(upgrade::next).await {
            Ok(Ok(program)) => return program,
            Ok(Err(error)) => tracing::error!(error = error.chain(), "no upgrade"),
            Err(error) => tracing::error!(%error, "no upgrade"),
        }
    }
}

async fn wait_for_socket(settings: &Settings) -> Result<()> {
    for _ in 0..500 {
        if proto::connect::unix(&settings.node_socket()).await.is_ok() {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Err(Error::new(ErrorKind::Timeout, "the node's socket does not accept"))
}

async fn collect_owners(settings: Settings, channel: Channel) {
    let dir = settings.run("owners");
    for tick in 0_u32.. {
        let thorough = tick % THOROUGH_EVERY == 0;
        if let Err(Failure::Failed { error, .. }) = owners::collect(&dir, &channel, thorough).await
        {
            tracing::warn!(error = error.chain(), "collect the sandboxes of dead commands");
        }
        tokio::time::sleep(OWNERS_TICK).await;
    }
}

/// Resolves when nobody uses the node: no command is connected, no sandbox is alive, nothing is mounted.
/// Gives back the lock that keeps new users away meanwhile.
async fn unused(settings: &Settings, channel: &Channel) -> Option<Exclusive> {
    let mut client = SandboxesClient::new(channel.clone());
    loop {
        tokio::time::sleep(IDLE_TICK).await;
        let Ok(Some(lock)) = lock::try_sole(&settings.run("users.lock")) else { continue };
        if crate::commands::any_mount(settings) {
            continue;
        }
        if owners::collect(&settings.run("owners"), channel, true).await.is_err() {
            continue;
        }
        match client.list(ListRequest { all: false, ..Default::default() }).await {
            Ok(list) if list.get_ref().sandboxes.is_empty() => return Some(lock),
            _ => {}
        }
    }
}
