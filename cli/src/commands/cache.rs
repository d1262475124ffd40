//! The node cache by hand: `pin` and `unpin`, and `fsck --node`.
//!
//! A running node is asked over its socket; without one `fsck --node` reads the cache itself, which its
//! lock allows to one process only.

use super::images::{layer_ids, resolve};
use super::{Scene, blocking, named};
use crate::args::Fsck;
use crate::embed;
use crate::errors::{Outcome, Remedy};
use crate::node::start;
use crate::output::Row;
use crate::quantity::show_bytes;
use layer::{Error, ErrorKind, LayerId, Result};
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::{CheckRequest, CompleteRequest, CompleteResponse, PinRequest, StatsRequest};
use serde::Serialize;
use std::time::{Duration, Instant};
use tonic::transport::Channel;

/// How long a daemon that went away may take to come back, and how often it is looked for.
const PATIENCE: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_millis(100);
/// A daemon that answers still after this is not about to end.
const STILL_THERE: Duration = Duration::from_millis(500);

async fn fsd(scene: &Scene) -> Outcome<LayerFsClient<Channel>> {
    Ok(LayerFsClient::new(proto::connect::unix(&scene.settings.fsd_socket()).await?))
}

/// Loads a whole layer and waits for it, also when the daemon is started again meanwhile: it goes on by
/// itself then. `rate` in bytes a second; 0 is the node's default.
pub async fn load(scene: &Scene, id: &LayerId, rate: u64) -> Outcome<CompleteResponse> {
    let request = CompleteRequest { layer_id: id.as_bytes().to_vec(), rate_bytes_per_s: rate };
    loop {
        let mut client = fsd(scene).await?;
        let pid = client.stats(StatsRequest {}).await?.into_inner().pid;
        match client.complete(request.clone()).await {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) if has_successor(scene, pid).await => drop(status),
            Err(status) => return Err(status.into()),
        }
    }
}

/// Whether another daemon has come, or comes, after this one.
async fn has_successor(scene: &Scene, former: u32) -> bool {
    let lost_at = Instant::now();
    while lost_at.elapsed() < PATIENCE {
        let answer = match fsd(scene).await {
            Ok(mut client) => client.stats(StatsRequest {}).await.ok(),
            Err(_) => None,
        };
        match answer.map(|answer| answer.into_inner().pid) {
            Some(pid) if pid != former => return true,
            Some(_) if lost_at.elapsed() > STILL_THERE => return false,
            _ => tokio::time::sleep(RETRY).await,
        }
    }
    false
}

#[derive(Debug, Serialize)]
struct Pinned {
    id: LayerId,
    pinned: bool,
    changed: bool,
    loaded_bytes: u64,
}

/// `pin` and `unpin`
pub async fn pin(scene: &Scene, reference: &str, pinned: bool, load_all: bool) -> Outcome {
    let name = named(reference)?;
    let node = start::connect(&scene.settings, start::Lifetime::UntilDown, scene.out).await?;
    let mut images = embed::Images::of_node(node);
    let ids = layer_ids(&resolve(&mut images, &name).await?)?;
    let mut client = fsd(scene).await?;
    let mut done = Vec::new();
    for id in ids {
        let request = PinRequest { layer_id: id.as_bytes().to_vec(), pinned };
        let changed = client.pin(request).await?.into_inner().changed;
        let loaded_bytes = match load_all {
            true => load(scene, &id, 0).await?.fetched_bytes,
            false => 0,
        };
        done.push(Pinned { id, pinned, changed, loaded_bytes });
    }
    scene.out.result(&done, || {
        let line = |done: &Pinned| {
            let what = match (done.pinned, done.changed) {
                (true, true) => "is pinned",
                (true, false) => "was pinned already",
                (false, true) => "is no longer pinned",
                (false, false) => "was not pinned",
            };
            let loaded = match done.loaded_bytes {
                0 => String::new(),
                bytes => format!(", {} loaded", show_bytes(bytes)),
            };
            format!("layer {} {what}{loaded}", done.id.short())
        };
        done.iter().map(line).collect::<Vec<_>>().join("\n")
    })
}

/// What was found in one layer of the cache.
#[derive(Debug, Serialize)]
struct Checked {
    id: LayerId,
    in_use: bool,
    chunks: u64,
    bytes: u64,
    damages: u64,
    repaired: u64,
    damaged: Vec<String>,
}

impl Row for Checked {
    const HEADER: &'static [&'static str] =
        &["LAYER", "USE", "CHUNKS", "READ", "DAMAGES", "REPAIRED"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.id.short(),
            if self.in_use { "in use" } else { "resting" }.to_owned(),
            self.chunks.to_string(),
            show_bytes(self.bytes),
            self.damages.to_string(),
            self.repaired.to_string(),
        ]
    }
}

/// `fsck --node`
pub async fn fsck_node(scene: &Scene, args: &Fsck) -> Outcome {
    let checked = match start::running(&scene.settings).await? {
        Some(_node) => ask_node(scene, args.repair).await?,
        None => {
            let (data, repair) = (scene.settings.data().to_owned(), args.repair);
            blocking(move || read_cache(&data, repair)).await??
        }
    };
    scene.out.listing(&checked)?;
    let listed = checked.iter().flat_map(|layer| {
        layer.damaged.iter().map(|what| format!("layer {}: {what}", layer.id.short()))
    });
    if !scene.out.is_json() {
        for line in listed {
            scene.out.notice(&line);
        }
    }
    let left: u64 = checked.iter().map(|layer| layer.damages - layer.repaired).sum();
    if left == 0 {
        return Ok(());
    }
    let error = Error::corrupt(format!("the node cache is damaged in {left} places"));
    Err(error).remedy(|_| {
        Some("`lamella fsck --node --repair` drops what is wrong; it is fetched anew".to_owned())
    })
}

async fn ask_node(scene: &Scene, repair: bool) -> Outcome<Vec<Checked>> {
    let mut client = fsd(scene).await?;
    let stats = client.stats(StatsRequest {}).await?.into_inner();
    let layers: Vec<_> = stats.layers.iter().chain(&stats.resting).collect();
    let mut checked = Vec::new();
    for layer in layers {
        let id = LayerId::from_slice(&layer.layer_id)?;
        let request = CheckRequest { layer_id: layer.layer_id.clone(), repair };
        match client.check(request).await {
            Ok(answer) => {
                let answer = answer.into_inner();
                checked.push(Checked {
                    id,
                    in_use: answer.served,
                    chunks: answer.chunks,
                    bytes: answer.bytes,
                    damages: answer.damages,
                    repaired: answer.repaired,
                    damaged: answer.listed,
                });
            }
            Err(status) => {
                let error = proto::status::from_status(status);
                // Evicted meanwhile.
                if error.kind() != ErrorKind::NotFound {
                    return Err(error.into());
                }
            }
        }
    }
    Ok(checked)
}

fn read_cache(data: &std::path::Path, repair: bool) -> Result<Vec<Checked>> {
    let mut checked = Vec::new();
    fsd::check_cache(data, repair, |layer| {
        checked.push(Checked {
            id: layer.id,
            in_use: layer.served,
            chunks: layer.chunks,
            bytes: layer.bytes,
            damages: layer.damages,
            repaired: layer.repaired,
            damaged: layer.listed,
        });
    })?;
    Ok(checked)
}
