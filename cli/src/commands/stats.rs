//! `stats`: what the node has loaded, layer by layer, what it cost, and what went wrong lately.

use super::Scene;
use crate::errors::{Outcome, Remedy};
use crate::node::start;
use crate::output::{Row, escape, write_out};
use crate::quantity::{show_bytes, show_share, show_time};
use layer::{Error, ErrorKind, LayerId, Result};
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::{LayerStats, StatsRequest, StatsResponse};
use serde::Serialize;
use std::fmt::Write;

/// Incidents that the table shows; JSON has all that are kept.
const SHOWN_INCIDENTS: usize = 5;

/// One layer on the node.
#[derive(Debug, Serialize)]
struct Layer {
    id: LayerId,
    /// `resting`: on the node and in nobody's use.
    state: &'static str,
    plane: String,
    mount_path: String,
    holders: Vec<String>,
    exported_to: Vec<String>,
    pinned: bool,
    disk_bytes: u64,
    data_bytes: u64,
    present_bytes: u64,
    asked_bytes: u64,
    fetched_bytes: u64,
    copied_bytes: u64,
    evicted_bytes: u64,
    hits: u64,
    waits: u64,
    fills: u64,
    denials: u64,
    integrity_errors: u64,
    complete: bool,
    marked: bool,
}

impl Layer {
    fn new(layer: LayerStats, state: &'static str) -> Result<Self> {
        let plane = match state {
            "resting" => "-",
            _ => super::mount::plane_word(layer.plane()),
        };
        Ok(Self {
            id: LayerId::from_slice(&layer.layer_id)?,
            state,
            plane: plane.to_owned(),
            mount_path: layer.mount_path,
            holders: layer.holders,
            exported_to: layer.exported_to,
            pinned: layer.pinned,
            disk_bytes: layer.disk_bytes,
            data_bytes: layer.data_bytes,
            present_bytes: layer.present_bytes,
            asked_bytes: layer.asked_bytes,
            fetched_bytes: layer.fetched_bytes,
            copied_bytes: layer.copied_bytes,
            evicted_bytes: layer.evicted_bytes,
            hits: layer.hits,
            waits: layer.waits,
            fills: layer.fills,
            denials: layer.denials,
            integrity_errors: layer.verify_failures,
            complete: layer.complete,
            marked: layer.marked,
        })
    }
}

impl Row for Layer {
    const HEADER: &'static [&'static str] = &[
        "LAYER", "PLANE", "USERS", "DISK", "PRESENT", "OF", "SHARE", "ASKED", "HITS", "WAITS",
        "FETCHED", "COPIED", "EVICTED", "PINNED", "DENIED", "DAMAGED",
    ];

    fn cells(&self) -> Vec<String> {
        let used = self.state != "resting";
        let number = |number: u64| if used { number.to_string() } else { "-".to_owned() };
        let size = |bytes: u64| if used { show_bytes(bytes) } else { "-".to_owned() };
        let share = show_share(self.present_bytes, self.data_bytes);
        vec![
            self.id.short(),
            self.plane.clone(),
            (self.holders.len() + self.exported_to.len()).to_string(),
            show_bytes(self.disk_bytes),
            size(self.present_bytes),
            size(self.data_bytes),
            if used { share } else { "-".to_owned() },
            size(self.asked_bytes),
            number(self.hits),
            number(self.waits),
            size(self.fetched_bytes),
            size(self.copied_bytes),
            size(self.evicted_bytes),
            if self.pinned { "yes" } else { "" }.to_owned(),
            number(self.denials),
            number(self.integrity_errors),
        ]
    }
}

/// Something that went wrong.
#[derive(Debug, Serialize)]
struct Incident {
    time_unix_ms: u64,
    kind: String,
    layer: LayerId,
    text: String,
}

/// The node's totals.
#[derive(Debug, Serialize)]
struct Totals {
    fsd_pid: u32,
    keeper_pids: Vec<u32>,
    cache_bytes: u64,
    cache_limit_bytes: Option<u64>,
    disk_free_bytes: u64,
    disk_reserve_bytes: u64,
    disk_full: bool,
    full_disk_deadline_ms: u64,
    fetched_bytes: u64,
    store_bytes: u64,
    description_bytes: u64,
    store_reads: u64,
    copied_chunks: u64,
    shared_chunks: u64,
    evicted_bytes: u64,
    uncached_bytes: u64,
    events: u64,
    errors_answered: u64,
    denied_full: u64,
    integrity_errors: u64,
    incidents: Vec<Incident>,
    layers: Vec<Layer>,
}

impl Totals {
    fn new(answer: StatsResponse) -> Result<Self> {
        let served = answer.layers.into_iter().map(|layer| Layer::new(layer, "in use"));
        let resting = answer.resting.into_iter().map(|layer| Layer::new(layer, "resting"));
        let incidents = answer.incidents.into_iter().map(|incident| {
            Ok(Incident {
                time_unix_ms: incident.time_ms,
                kind: incident.kind,
                layer: LayerId::from_slice(&incident.layer_id)?,
                text: incident.text,
            })
        });
        let limit = answer.cache_limit_bytes;
        Ok(Self {
            fsd_pid: answer.pid,
            keeper_pids: answer.keeper_pids,
            cache_bytes: answer.cache_bytes,
            cache_limit_bytes: (limit > 0).then_some(limit),
            disk_free_bytes: answer.free_bytes,
            disk_reserve_bytes: answer.reserve_bytes,
            disk_full: answer.disk_full,
            full_disk_deadline_ms: answer.full_disk_deadline_ms,
            fetched_bytes: answer.fetched_bytes,
            store_bytes: answer.store_bytes,
            description_bytes: answer.description_bytes,
            store_reads: answer.store_reads,
            copied_chunks: answer.copied_chunks,
            shared_chunks: answer.shared_chunks,
            evicted_bytes: answer.evicted_bytes,
            uncached_bytes: answer.uncached_bytes,
            events: answer.events,
            errors_answered: answer.errors_answered,
            denied_full: answer.denied_full,
            integrity_errors: answer.verify_failures,
            incidents: incidents.collect::<Result<_>>()?,
            layers: served.chain(resting).collect::<Result<_>>()?,
        })
    }

    fn lines(&self) -> String {
        let limit = self.cache_limit_bytes.map_or_else(|| "no limit".to_owned(), show_bytes);
        let full = match self.disk_full {
            true => format!("; FULL: reads fail after {} ms", self.full_disk_deadline_ms),
            false => String::new(),
        };
        let rows = [
            (
                "cache",
                format!(
                    "{} of {limit}, {} evicted",
                    show_bytes(self.cache_bytes),
                    show_bytes(self.evicted_bytes)
                ),
            ),
            (
                "disk",
                format!(
                    "{} free, {} in reserve{full}",
                    show_bytes(self.disk_free_bytes),
                    show_bytes(self.disk_reserve_bytes)
                ),
            ),
            (
                "fetched",
                format!(
                    "{} (from {} of the store in {} reads), {} of metadata",
                    show_bytes(self.fetched_bytes),
                    show_bytes(self.store_bytes),
                    self.store_reads,
                    show_bytes(self.description_bytes)
                ),
            ),
            (
                "copied",
                format!(
                    "{} chunks from other layers of the node, {} of them shared",
                    self.copied_chunks, self.shared_chunks
                ),
            ),
            ("not kept", show_bytes(self.uncached_bytes)),
            (
                "events",
                format!(
                    "{} answered, {} with an error, {} of those for a full disk",
                    self.events, self.errors_answered, self.denied_full
                ),
            ),
            (
                "integrity",
                format!("{} chunks had other bytes than their digest says", self.integrity_errors),
            ),
            ("fsd", format!("process {}, keepers {:?}", self.fsd_pid, self.keeper_pids)),
        ];
        let mut text = String::new();
        for (name, value) in rows {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name:<12} {value}");
        }
        let skipped = self.incidents.len().saturating_sub(SHOWN_INCIDENTS);
        for incident in &self.incidents[skipped..] {
            let time = show_time(incident.time_unix_ms * 1_000_000);
            let (kind, layer) = (&incident.kind, incident.layer.short());
            let _ = writeln!(text, "{time} {kind} layer {layer}: {}", escape(&incident.text));
        }
        text
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
    let totals = Totals::new(answer)?;
    if scene.out.is_json() {
        return scene.out.result(&totals, String::new);
    }
    write_out(totals.lines().as_bytes())?;
    if totals.layers.is_empty() {
        return Ok(());
    }
    scene.out.listing(&totals.layers)
}
