//! What fsd did and holds, as numbers.

use crate::attach::Live;
use crate::node::Node;
use layer::Result;
use proto::v1::{LayerStats, StatsResponse};
use std::sync::atomic::Ordering::Relaxed;

/// All counters, and one line for each served layer.
pub fn collect(node: &Node) -> Result<StatsResponse> {
    let parts = node.attachments.parts();
    let fetch = parts.engine.counters();
    let mut layers = Vec::new();
    node.attachments.each(|live| layers.push(of_layer(live, node)));
    Ok(StatsResponse {
        pid: std::process::id(),
        layers,
        cache_bytes: parts.cache.allocated_bytes()?,
        fetched_bytes: fetch.filled_bytes.load(Relaxed),
        store_bytes: parts.store_counters.bytes.load(Relaxed),
        store_reads: parts.store_counters.reads.load(Relaxed),
        verify_failures: fetch.verify_failures.load(Relaxed),
        events: node.event_counters.events.load(Relaxed),
        errors_answered: node.event_counters.errors.load(Relaxed),
        copied_chunks: fetch.copies.load(Relaxed),
        keeper_pids: node.keepers.as_ref().map(|keepers| keepers.pids()).unwrap_or_default(),
    })
}

fn of_layer(live: &Live, node: &Node) -> LayerStats {
    let served = &live.served;
    let cached = served.fetch().cached();
    let mount = node.attachments.parts().paths.mount(&served.id());
    LayerStats {
        layer_id: served.id().as_bytes().to_vec(),
        plane: live.plane.as_ref().map_or(0, |plane| plane.kind().to_proto().into()),
        mount_path: if live.mounted { mount.to_string_lossy().into_owned() } else { String::new() },
        holders: live.holders.iter().cloned().collect(),
        data_bytes: cached.table().data_bytes(),
        present_bytes: cached.present_bytes(),
        asked_bytes: served.asked_bytes(),
        hits: served.hits.load(Relaxed),
        waits: served.waits.load(Relaxed),
        fills: served.fetch().fills(),
        complete: cached.is_complete(),
        marked: served.is_marked(),
        exported_to: node.exports.holders_of(&served.id()),
    }
}
