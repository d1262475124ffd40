//! What fsd did and holds, as numbers.

use crate::attach::Live;
use crate::node::Node;
use layer::Result;
use proto::v1::{Incident, LayerStats, StatsResponse};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

/// The most that one fill needs.
const LARGEST_CHUNK: u64 = layer::chunk::MAX_CHUNK_BYTES as u64;

/// All counters, and one line for each layer on the node.
pub fn collect(node: &Node) -> Result<StatsResponse> {
    let parts = node.attachments.parts();
    let (fetch, space) = (parts.engine.counters(), parts.cache.space());
    let free_bytes = space.free_bytes()?;
    let mut layers = Vec::new();
    node.attachments.each(|live| layers.push(of_layer(live, node)));
    let (cache_bytes, resting) = on_disk(node, &mut layers)?;
    Ok(StatsResponse {
        pid: std::process::id(),
        layers,
        resting,
        cache_bytes,
        fetched_bytes: fetch.filled_bytes.load(Relaxed),
        store_bytes: parts.store_counters.bytes.load(Relaxed),
        store_reads: parts.store_counters.reads.load(Relaxed),
        description_bytes: parts.cache.brought_bytes(),
        verify_failures: fetch.verify_failures.load(Relaxed),
        events: node.event_counters.events.load(Relaxed),
        errors_answered: node.event_counters.errors.load(Relaxed),
        copied_chunks: fetch.copies.load(Relaxed),
        shared_chunks: fetch.shared.load(Relaxed),
        evicted_bytes: node.attachments.evicted_bytes(),
        cache_limit_bytes: space.limit().map_or(0, |limit| limit.high_bytes),
        free_bytes,
        reserve_bytes: space.reserve_bytes(),
        // The engine hears of new room with its next fill only.
        disk_full: parts.engine.disk_is_full()
            && free_bytes <= space.reserve_bytes() + LARGEST_CHUNK,
        full_disk_deadline_ms: parts.engine.full_disk_deadline().as_millis() as u64,
        denied_full: node.event_counters.full.load(Relaxed),
        uncached_bytes: fetch.uncached_bytes.load(Relaxed),
        incidents: incidents(node),
        keeper_pids: node.keepers.as_ref().map(|keepers| keepers.pids()).unwrap_or_default(),
    })
}

fn incidents(node: &Node) -> Vec<Incident> {
    let list = node.attachments.parts().engine.incidents().list().into_iter();
    let incidents = list.map(|incident| Incident {
        time_ms: incident.time_ms,
        kind: incident.kind.word().to_owned(),
        layer_id: incident.layer.as_bytes().to_vec(),
        text: incident.text,
    });
    incidents.collect()
}

/// Notes everyone's bytes on disk. Answers the sum of those, and the layers that nobody uses.
fn on_disk(node: &Node, served: &mut [LayerStats]) -> Result<(u64, Vec<LayerStats>)> {
    let cache = &node.attachments.parts().cache;
    let mut by_id: BTreeMap<Vec<u8>, &mut LayerStats> =
        served.iter_mut().map(|layer| (layer.layer_id.clone(), layer)).collect();
    let (mut sum, mut resting) = (0, Vec::new());
    for layer in cache.resting()? {
        sum += layer.bytes;
        let layer_id = layer.id.as_bytes().to_vec();
        match by_id.get_mut(&layer_id) {
            Some(served) => served.disk_bytes = layer.bytes,
            None => resting.push(LayerStats {
                layer_id,
                pinned: cache.pins().contains(&layer.id),
                disk_bytes: layer.bytes,
                ..LayerStats::default()
            }),
        }
    }
    Ok((sum, resting))
}

fn of_layer(live: &Live, node: &Node) -> LayerStats {
    let served = &live.served;
    let (id, cached) = (served.id(), served.fetch().cached());
    let parts = node.attachments.parts();
    let mount = parts.paths.mount(&id);
    let counters = cached.counters();
    LayerStats {
        layer_id: id.as_bytes().to_vec(),
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
        exported_to: node.exports.holders_of(&id),
        fetched_bytes: counters.filled_bytes.load(Relaxed),
        copied_bytes: counters.copied_bytes.load(Relaxed),
        evicted_bytes: counters.evicted_bytes.load(Relaxed),
        denials: served.denials.load(Relaxed),
        verify_failures: served.fetch().verify_failures(),
        pinned: parts.cache.pins().contains(&id),
        disk_bytes: 0,
    }
}
