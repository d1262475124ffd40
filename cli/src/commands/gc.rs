//! `gc`: deletes from the store what nothing uses.

use super::Scene;
use crate::args::Gc;
use crate::embed;
use crate::errors::{Outcome, Remedy};
use crate::quantity::show_bytes;
use layer::ErrorKind;
use proto::status::from_status;
use proto::v1::{CollectRequest, CollectResponse, UndoCollectionRequest};
use serde::Serialize;
use std::fmt::Write;
use std::time::Duration;

/// What went.
#[derive(Debug, Serialize)]
struct Collected {
    dry_run: bool,
    live_environments: u64,
    live_layers: u64,
    live_packs: u64,
    live_chunks: u64,
    live_bytes: u64,
    condemned: u64,
    reprieved: u64,
    waiting: u64,
    deleted: u64,
    freed_bytes: u64,
    compacted_packs: u64,
    copied_bytes: u64,
    missing_chunks: u64,
    what: Vec<String>,
}

impl Collected {
    fn new(dry_run: bool, answer: CollectResponse) -> Self {
        Self {
            dry_run,
            live_environments: answer.live_environments,
            live_layers: answer.live_layers,
            live_packs: answer.live_packs,
            live_chunks: answer.live_chunks,
            live_bytes: answer.live_bytes,
            condemned: answer.condemned,
            reprieved: answer.reprieved,
            waiting: answer.waiting,
            deleted: answer.deleted,
            freed_bytes: answer.freed_bytes,
            compacted_packs: answer.compacted_packs,
            copied_bytes: answer.copied_bytes,
            missing_chunks: answer.missing_chunks,
            what: answer.lines,
        }
    }

    fn lines(&self) -> String {
        let mut text = String::new();
        for line in &self.what {
            _ = writeln!(text, "{line}");
        }
        _ = writeln!(
            text,
            "in use: {} environments, {} layers, {} chunks in {} packs, {}",
            self.live_environments,
            self.live_layers,
            self.live_chunks,
            self.live_packs,
            show_bytes(self.live_bytes)
        );
        if self.compacted_packs > 0 {
            let copied = show_bytes(self.copied_bytes);
            _ = writeln!(text, "compacted: {} packs, {copied} copied", self.compacted_packs);
        }
        if self.missing_chunks > 0 {
            _ = writeln!(
                text,
                "DAMAGE: {} chunks that are needed lie in no pack; `lamella fsck` says whose",
                self.missing_chunks
            );
        }
        let would = if self.dry_run { "would be " } else { "" };
        _ = write!(
            text,
            "{would}condemned: {}, {would}reprieved: {}, waiting: {}, {would}deleted: {} ({})",
            self.condemned,
            self.reprieved,
            self.waiting,
            self.deleted,
            show_bytes(self.freed_bytes)
        );
        text
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// `gc`
pub async fn gc(scene: &Scene, args: &Gc) -> Outcome {
    let mut images = embed::images(&scene.settings, scene.out).await?;
    if args.undo {
        #[derive(Serialize)]
        struct Undone {
            reprieved: u64,
        }
        let answer = images.client.undo_collection(UndoCollectionRequest {}).await?.into_inner();
        let undone = Undone { reprieved: answer.reprieved };
        return scene.out.result(&undone, || format!("reprieved: {}", undone.reprieved));
    }
    let request = CollectRequest {
        dry_run: args.dry_run,
        grace_ms: args.grace.map(milliseconds),
        history_ms: args.history.map(milliseconds),
        compact_below_percent: args.compact,
    };
    let answer = images.client.collect(request).await.map_err(from_status).remedy(|error| {
        (error.kind() == ErrorKind::Corrupt)
            .then(|| "nothing was deleted; `lamella fsck` names the damage".to_owned())
    })?;
    let collected = Collected::new(args.dry_run, answer.into_inner());
    scene.out.result(&collected, || collected.lines())
}
