//! `materialise`: the plain data space of a layer, made on the store for the plane `direct`.
//!
//! // CRASH: a data space appears whole or not at all; repeating the command finishes the others.

use super::images::resolve;
use super::{Scene, blocking, named};
use crate::args::Materialise;
use crate::embed;
use crate::errors::Outcome;
use crate::quantity::show_bytes;
use layer::{ErrorKind, LayerId};
use proto::v1::LocateRequest;
use serde::Serialize;
use std::sync::Arc;
use store::{SpaceMade, Store};

/// What was made.
#[derive(Debug, Serialize)]
struct Report {
    name: String,
    layers: Vec<Line>,
}

#[derive(Debug, Serialize)]
struct Line {
    id: LayerId,
    bytes: u64,
    existed: bool,
}

impl Report {
    fn lines(&self) -> String {
        let line = |layer: &Line| {
            let how = if layer.existed { "whole already" } else { "made and verified" };
            format!("layer {}: {} of plain data, {how}", layer.id.short(), show_bytes(layer.bytes))
        };
        self.layers.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

/// `materialise`
pub async fn materialise(scene: &Scene, args: &Materialise) -> Outcome {
    let name = named(&args.reference)?;
    let mut images = embed::images(&scene.settings, scene.out).await?;
    let answer = resolve(&mut images, &name).await?;
    let url = images.store_url(&scene.settings)?;
    let store = blocking(move || Store::open(store::open(&url)?)).await??;
    let store = Arc::new(store);
    let mut layers = Vec::new();
    for layer in &answer.layers {
        let id = LayerId::from_slice(&layer.layer_id)?;
        let SpaceMade { bytes, existed } = match put(&store, id).await? {
            Some(made) => made,
            None => {
                // Packs moved since the hint was written: imaged knows where to.
                let request = LocateRequest { layer_id: id.0.to_vec() };
                images.client.locate(request).await.map_err(proto::status::from_status)?;
                let store = Arc::clone(&store);
                blocking(move || store.put_space(&id)).await??
            }
        };
        layers.push(Line { id, bytes, existed });
    }
    let report = Report { name, layers };
    scene.out.result(&report, || report.lines())
}

/// Nothing when a chunk is not where the hint says.
async fn put(store: &Arc<Store>, id: LayerId) -> Outcome<Option<SpaceMade>> {
    let store = Arc::clone(store);
    match blocking(move || store.put_space(&id)).await? {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => Ok(other.map(Some)?),
    }
}
