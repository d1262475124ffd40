//! What the image daemon counts about itself since it was started; docs/metrics.md says what each number is.

use crate::gc::Collected;
use crate::images::{Images, locked};
use proto::meter::calls::Calls;
use proto::meter::{Counter, Histogram, Page};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Meters {
    pub(crate) calls: Arc<Calls>,
    pub(crate) publishes: Counter,
    pub(crate) layers: Counter,
    pub(crate) known_layers: Counter,
    pub(crate) environments: Counter,
    pub(crate) uploaded_chunks: Counter,
    pub(crate) uploaded_bytes: Counter,
    pub(crate) reused_chunks: Counter,
    pub(crate) reused_bytes: Counter,
    pub(crate) reference_moves: Counter,
    pub(crate) leases: Counter,
    pub(crate) leases_ended: Counter,
    collections: Histogram,
    marked_chunks: Counter,
    marked_bytes: Counter,
    condemned: Counter,
    reprieved: Counter,
    deleted: Counter,
    freed_bytes: Counter,
    compacted_packs: Counter,
    copied_bytes: Counter,
}

impl Meters {
    pub(crate) fn new() -> Self {
        Self {
            calls: Calls::of_images(),
            publishes: Counter::default(),
            layers: Counter::default(),
            known_layers: Counter::default(),
            environments: Counter::default(),
            uploaded_chunks: Counter::default(),
            uploaded_bytes: Counter::default(),
            reused_chunks: Counter::default(),
            reused_bytes: Counter::default(),
            reference_moves: Counter::default(),
            leases: Counter::default(),
            leases_ended: Counter::default(),
            collections: Histogram::default(),
            marked_chunks: Counter::default(),
            marked_bytes: Counter::default(),
            condemned: Counter::default(),
            reprieved: Counter::default(),
            deleted: Counter::default(),
            freed_bytes: Counter::default(),
            compacted_packs: Counter::default(),
            copied_bytes: Counter::default(),
        }
    }

    /// A collection that came to its end.
    pub(crate) fn collected(&self, collected: &Collected, begin: std::time::Instant) {
        self.collections.observe_since(begin);
        self.marked_chunks.set(collected.live_chunks);
        self.marked_bytes.set(collected.live_bytes);
        self.condemned.add(collected.condemned);
        self.reprieved.add(collected.reprieved);
        self.deleted.add(collected.deleted);
        self.freed_bytes.add(collected.freed_bytes);
        self.compacted_packs.add(collected.compacted_packs);
        self.copied_bytes.add(collected.copied_bytes);
    }
}

impl Images {
    /// Writes down what was counted, but for the calls.
    pub(crate) fn write_meters(&self, page: &mut Page) {
        let open = locked(&self.publishes).len() as u64;
        page.gauge("publishes_open", "Publishes that are open.", open);
        let meters = &self.meters;
        let counters: [(&str, &str, &Counter); 17] = [
            ("publishes_total", "Publishes that were opened.", &meters.publishes),
            ("layers_published_total", "Layers that were committed.", &meters.layers),
            ("layers_known_total", "Of them, those that were there.", &meters.known_layers),
            ("environments_published_total", "Environments committed.", &meters.environments),
            ("uploaded_chunks_total", "Chunks stored by publishes.", &meters.uploaded_chunks),
            ("uploaded_bytes_total", "Their stored bytes.", &meters.uploaded_bytes),
            ("reused_chunks_total", "Chunks publishes found there.", &meters.reused_chunks),
            ("reused_bytes_total", "Their stored bytes.", &meters.reused_bytes),
            ("reference_moves_total", "Moves of references.", &meters.reference_moves),
            ("leases_total", "Leases that were put on the store.", &meters.leases),
            ("leases_ended_total", "Leases that were given back.", &meters.leases_ended),
            ("gc_condemned_total", "Things found without a use.", &meters.condemned),
            ("gc_reprieved_total", "Condemned and used again.", &meters.reprieved),
            ("gc_deleted_total", "Things that were deleted.", &meters.deleted),
            ("gc_freed_bytes_total", "Bytes of packs deleted.", &meters.freed_bytes),
            ("gc_compacted_packs_total", "Packs copied to others.", &meters.compacted_packs),
            ("gc_copied_bytes_total", "Bytes copied for that.", &meters.copied_bytes),
        ];
        for (name, what, counter) in counters {
            page.counter(name, what, counter.get());
        }
        let marked = "Chunks in use, as the last collection marked them.";
        page.gauge("gc_marked_chunks", marked, meters.marked_chunks.get());
        page.gauge("gc_marked_bytes", "Their stored bytes.", meters.marked_bytes.get());
        page.histogram("gc_seconds", "How long collections took.", &meters.collections);
    }
}
