//! Many sandboxes at once: create, fork; and the leases of whom they belong to.

use super::Scene;
use super::exec::lost_sandbox;
use super::sandboxes::{Sandbox, connect};
use crate::args::{Fork, IdleAction, LifetimeSpec, RenewOwner};
use crate::errors::{Failure, Outcome, Remedy};
use crate::node::start::Lifetime;
use crate::quantity::show_time;
use layer::{Error, ErrorKind};
use proto::v1::made::Outcome as MadeOutcome;
use proto::v1::{self, CreateManyRequest, CreateRequest, ForkRequest, Made, RenewOwnerRequest};
use serde::Serialize;
use std::time::Duration;
use tonic::Streaming;

fn ms(time: Option<Duration>) -> u64 {
    time.map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

/// Puts into a request how long the sandbox lives.
pub fn ask(request: &mut CreateRequest, spec: &LifetimeSpec) {
    request.ttl_ms = ms(spec.ttl);
    request.idle_timeout_ms = ms(spec.idle_timeout);
    request.idle_action = match spec.idle_action {
        IdleAction::Pause => v1::IdleAction::Pause,
        IdleAction::Kill => v1::IdleAction::Kill,
    }
    .into();
    let lease_ms = ms(spec.lease);
    request.owner = spec.owner.clone().map(|name| v1::Owner { name, lease_ms });
}

/// `create --count`
pub async fn create_many(scene: &Scene, create: CreateRequest, count: u32) -> Outcome {
    let (_node, mut client) = connect(scene, Lifetime::UntilDown).await?;
    let request = CreateManyRequest { create: Some(create), count };
    let made = client.create_many(request).await.remedy(super::lost_name)?.into_inner();
    print_made(scene, made, count).await
}

/// `fork`
pub async fn fork(scene: &Scene, args: Fork) -> Outcome {
    let (_node, mut client) = connect(scene, Lifetime::UntilDown).await?;
    let request = ForkRequest { id: args.id, count: args.count };
    let made = client.fork(request).await.remedy(lost_sandbox)?.into_inner();
    print_made(scene, made, args.count).await
}

/// Prints each id as soon as it comes, or all sandboxes at the end as JSON.
async fn print_made(scene: &Scene, mut made: Streaming<Made>, count: u32) -> Outcome {
    let (mut all, mut failed, mut first) = (Vec::new(), 0, None);
    while let Some(Made { outcome, .. }) = made.message().await? {
        match outcome {
            Some(MadeOutcome::Sandbox(sandbox)) => {
                let sandbox = Sandbox::new(sandbox)?;
                if !scene.out.is_json() {
                    scene.out.result(&sandbox, || sandbox.id.clone())?;
                }
                all.push(sandbox);
            }
            Some(MadeOutcome::Failure(failure)) => {
                failed += 1;
                first.get_or_insert(failure.message);
            }
            None => {}
        }
    }
    if scene.out.is_json() {
        scene.out.listing(&all)?;
    }
    match first {
        Some(first) => {
            let text = format!("{failed} of {count} sandboxes were not made; the first: {first}");
            Err(Failure::from(Error::new(ErrorKind::Unavailable, text)))
        }
        None => Ok(()),
    }
}

#[derive(Debug, Serialize)]
struct Renewed {
    owner: String,
    sandboxes: u32,
    expires: String,
    expires_unix_ns: u64,
}

/// `renew-owner`
pub async fn renew_owner(scene: &Scene, args: RenewOwner) -> Outcome {
    let (_node, mut client) = connect(scene, Lifetime::UntilDown).await?;
    let request = RenewOwnerRequest { name: args.name.clone(), lease_ms: ms(Some(args.lease)) };
    let answer = client.renew_owner(request).await?.into_inner();
    let renewed = Renewed {
        owner: args.name,
        sandboxes: answer.sandboxes,
        expires: show_time(answer.expires_unix_ns),
        expires_unix_ns: answer.expires_unix_ns,
    };
    scene.out.result(&renewed, || {
        format!("{}: {} sandboxes, until {}", renewed.owner, renewed.sandboxes, renewed.expires)
    })
}
