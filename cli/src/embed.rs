//! Images for commands that need no sandboxes: the node's when one is running, else an imaged inside
//! this process, which leaves nothing behind.
//!
//! RocksDB has one owner at a time, so an embedded imaged holds `catalog.lock`; a second storage command
//! waits for it and says so. A node holds the same lock for its whole life, but it is asked over its
//! socket instead.

use crate::errors::Outcome;
use crate::node::lock::{self, Exclusive, Owner};
use crate::node::start;
use crate::output::Output;
use crate::settings::Settings;
use layer::{Error, ErrorKind, Result};
use proto::v1::images_client::ImagesClient;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tonic::transport::Channel;

/// How often a lock that another process holds is tried.
const RETRY: Duration = Duration::from_millis(50);
/// How long a wait stays silent.
const PATIENCE: Duration = Duration::from_secs(1);

/// Images, wherever they are served.
pub struct Images {
    /// The client.
    pub client: ImagesClient<Channel>,
    /// What the client talks over.
    pub channel: Channel,
    keep: Keep,
}

impl Images {
    /// Images of a node that was connected to already.
    pub fn of_node(node: start::Node) -> Self {
        let channel = node.channel.clone();
        Self { client: ImagesClient::new(channel.clone()), channel, keep: Keep::Node(node) }
    }

    /// The store behind these images: the node's own where a node serves them.
    pub fn store_url(&self, settings: &Settings) -> Result<String> {
        Ok(match &self.keep {
            Keep::Node(_) => lock::holder(&settings.run("node.lock"))?.map(|owner| owner.store),
            Keep::Embedded(_) => None,
        }
        .unwrap_or_else(|| settings.store_url().to_owned()))
    }
}

/// What must live as long as the client.
#[expect(dead_code, reason = "held for what their drop does")]
enum Keep {
    Node(start::Node),
    Embedded(imaged::Service),
}

/// This process as the owner of a lock.
pub fn this_process(settings: &Settings) -> Owner {
    Owner { pid: std::process::id(), store: settings.store_url().to_owned() }
}

/// Takes `catalog.lock`, waiting for its holder; `give_up` ends the wait early.
pub async fn lock_catalog(
    settings: &Settings,
    out: Output,
    mut give_up: impl FnMut() -> bool,
) -> Result<Option<Exclusive>> {
    settings.prepare()?;
    let path = settings.run("catalog.lock");
    let begin = Instant::now();
    let mut told = false;
    loop {
        let owner = match lock::try_exclusive(&path, &this_process(settings))? {
            Ok(lock) => return Ok(Some(lock)),
            Err(owner) => owner,
        };
        if give_up() {
            return Ok(None);
        }
        if !told && begin.elapsed() > PATIENCE {
            told = true;
            let who = owner.map_or_else(String::new, |owner| format!(" of process {}", owner.pid));
            out.notice(&format!("waiting for the catalog{who}"));
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// A store and the imaged on it.
pub struct Opened {
    /// The truth.
    pub store: Arc<store::Store>,
    /// Who serves it.
    pub images: imaged::Service,
}

/// Opens the store and imaged on it. The caller holds `catalog.lock`.
pub async fn open_images(settings: &Settings) -> Result<Opened> {
    let settings = settings.clone();
    tokio::task::spawn_blocking(move || {
        let store = Arc::new(store::Store::open(store::open(settings.store_url())?)?);
        let config =
            imaged::ImagedConfig { store: Arc::clone(&store), catalog_dir: settings.catalog() };
        Ok(Opened { store, images: imaged::Service::open(config)? })
    })
    .await
    .map_err(|error| Error::new(ErrorKind::Internal, "open the catalog").with_source(error))?
}

/// Images of the running node, or embedded ones.
pub async fn images(settings: &Settings, out: Output) -> Outcome<Images> {
    loop {
        if let Some(node) = start::running(settings).await? {
            return Ok(Images::of_node(node));
        }
        let socket = settings.node_socket();
        // A node that came up meanwhile keeps the catalog: ask it instead.
        let node_is_up = || std::os::unix::net::UnixStream::connect(&socket).is_ok();
        let Some(lock) = lock_catalog(settings, out, node_is_up).await? else { continue };
        // The catalog is closed by whichever thread drops its last clone, possibly after this command.
        lock.keep_to_the_end();
        let service = open_images(settings).await?.images;
        let channel = proto::connect::in_process_own(service.routes()).await?;
        return Ok(Images {
            client: ImagesClient::new(channel.clone()),
            channel,
            keep: Keep::Embedded(service),
        });
    }
}
