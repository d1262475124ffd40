//! `pack-diff`: what a sandbox wrote becomes a layer and an environment.

use super::exec::lost_sandbox;
use super::{Scene, compose};
use crate::args::PackDiff;
use crate::errors::{Outcome, Remedy};
use crate::node::start::{self, Lifetime};
use crate::quantity::{show_bytes, show_duration};
use layer::{EnvId, LayerId};
use proto::v1::PackDiffRequest;
use proto::v1::sandboxes_client::SandboxesClient;
use serde::Serialize;
use std::time::Duration;

#[derive(Debug, Serialize)]
struct Packed {
    layer_reference: String,
    environment_reference: String,
    layer: LayerId,
    environment: EnvId,
    frozen_us: u64,
    files: u64,
    plain_bytes: u64,
    new_bytes: u64,
}

/// `pack-diff`
pub async fn pack_diff(scene: &Scene, args: PackDiff) -> Outcome {
    let reference = compose::environment_name(&args.tag)?;
    let name = format!("{}:{}", reference.name(), reference.tag());
    let node = start::connect(&scene.settings, Lifetime::WhileUsed, scene.out).await?;
    let request = PackDiffRequest {
        id: args.id,
        name: name.clone(),
        exclude: args.exclude,
        include: args.include,
    };
    let packed = SandboxesClient::new(node.channel.clone()).pack_diff(request).await;
    let packed = packed.remedy(lost_sandbox)?.into_inner();
    let packed = Packed {
        layer_reference: format!("diff/{name}"),
        environment_reference: reference.to_string(),
        layer: LayerId::from_slice(&packed.layer_id)?,
        environment: EnvId::from_slice(&packed.env_id)?,
        frozen_us: packed.frozen_us,
        files: packed.files,
        plain_bytes: packed.plain_bytes,
        new_bytes: packed.new_bytes,
    };
    scene.out.result(&packed, || {
        format!(
            "layer {}: {} files, {}, stored as {}; frozen for {}\n{}\n{}",
            packed.layer.short(),
            packed.files,
            show_bytes(packed.plain_bytes),
            show_bytes(packed.new_bytes),
            show_duration(Duration::from_micros(packed.frozen_us)),
            packed.layer_reference,
            packed.environment_reference,
        )
    })
}
