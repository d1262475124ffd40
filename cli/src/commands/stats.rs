//! `stats`: what the node has loaded, layer by layer, and what it cost.

use super::Scene;
use crate::errors::{Outcome, Remedy};
use crate::node::start;
use crate::output::{Row, write_out};
use crate::quantity::{show_bytes, show_share};
use layer::{Error, ErrorKind, LayerId, Result};
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::{LayerStats, StatsRequest};
use serde::Serialize;

/// One layer on the node.
#[derive(Debug, Serialize)]
struct Layer {
    id: LayerId,
    plane: String,
    mount_path: String,
    holders: Vec<String>,
    data_bytes: u64,
    present_bytes: u64,
    asked_bytes: u64,
    hits: u64,
    waits: u64,
    fills: u64,
    complete: bool,
    marked: bool,
}

impl Layer {
    fn new(layer: LayerStats) -> Result<Self> {
        Ok(Self {
            id: LayerId::from_slice(&layer.layer_id)?,
            plane: super::mount::plane_word(layer.plane()).to_owned(),
            mount_path: layer.mount_path,
            holders: layer.holders,
            data_bytes: layer.data_bytes,
            present_bytes: layer.present_bytes,
            asked_bytes: layer.asked_bytes,
            hits: layer.hits,
            waits: layer.waits,
            fills: layer.fills,
            complete: layer.complete,
            marked: layer.marked,
        })
    }
}

impl Row for Layer {
    const HEADER: &'static [&'static str] =
        &["LAYER", "PLANE", "USERS", "DATA", "PRESENT", "SHARE", "ASKED", "HITS", "WAITS", "FILLS"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.id.short(),
            self.plane.clone(),
            self.holders.len().to_string(),
            show_bytes(self.data_bytes),
            show_bytes(self.present_bytes),
            show_share(self.present_bytes, self.data_bytes),
            show_bytes(self.asked_bytes),
            self.hits.to_string(),
            self.waits.to_string(),
            self.fills.to_string(),
        ]
    }
}

/// The node's totals.
#[derive(Debug, Serialize)]
struct Totals {
    fsd_pid: u32,
    keeper_pids: Vec<u32>,
    cache_bytes: u64,
    fetched_bytes: u64,
    store_bytes: u64,
    store_reads: u64,
    events: u64,
    errors_answered: u64,
    verify_failures: u64,
    layers: Vec<Layer>,
}

impl Totals {
    fn lines(&self) -> String {
        format!(
            "cache        {}\nfetched      {} (from {} of the store in {} reads)\nevents       {} \
             answered, {} with an error\nverify       {} failures\nfsd          process {}, keepers \
             {:?}\n",
            show_bytes(self.cache_bytes),
            show_bytes(self.fetched_bytes),
            show_bytes(self.store_bytes),
            self.store_reads,
            self.events,
            self.errors_answered,
            self.verify_failures,
            self.fsd_pid,
            self.keeper_pids,
        )
    }
}

/// `stats`
pub async fn stats(scene: &Scene) -> Outcome {
    let Some(_node) = start::running(&scene.settings).await? else {
        let data = scene.settings.data().display();
        return Err(Error::new(ErrorKind::Unavailable, format!("no node is running on {data}")))
            .remedy(|_| Some("`lamella up` starts one".to_owned()));
    };
    let channel = proto::connect::unix(&scene.settings.fsd_socket()).await?;
    let answer = LayerFsClient::new(channel).stats(StatsRequest {}).await?.into_inner();
    let totals = Totals {
        fsd_pid: answer.pid,
        keeper_pids: answer.keeper_pids,
        cache_bytes: answer.cache_bytes,
        fetched_bytes: answer.fetched_bytes,
        store_bytes: answer.store_bytes,
        store_reads: answer.store_reads,
        events: answer.events,
        errors_answered: answer.errors_answered,
        verify_failures: answer.verify_failures,
        layers: answer.layers.into_iter().map(Layer::new).collect::<Result<_>>()?,
    };
    if scene.out.is_json() {
        return scene.out.result(&totals, String::new);
    }
    write_out(totals.lines().as_bytes())?;
    if totals.layers.is_empty() {
        return Ok(());
    }
    scene.out.listing(&totals.layers)
}
