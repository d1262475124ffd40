//! The start of a runtime on what an earlier one left: living sandboxes are taken over, the others are
//! reported lost, and everything that belongs to no living one is cleared.

use crate::backends::{Backend, Instance};
use crate::exec::{self, Remembered};
use crate::node::Node;
use crate::record::{Record, State};
use crate::sandbox::Sandbox;
use layer::Result;
use proto::v1::Plane;
use std::sync::Arc;
use std::time::Duration;

/// How long processes of a paused sandbox may take to stop.
const FREEZE_DEADLINE: Duration = Duration::from_secs(10);

/// Adopts and sweeps. `records`: what the journal says, the oldest first; `remembered`: of commands.
pub async fn adopt(
    node: &Arc<Node>,
    records: Vec<Record>,
    mut remembered: Remembered,
) -> Result<()> {
    let mut keep = Vec::new();
    for record in records {
        let id = record.id.clone();
        if let Some(key) = &record.idempotency_key {
            node.remember_key(key, &id);
        }
        let sandbox =
            Arc::new(Sandbox::new(record.clone(), node.journal(), &node.store, &node.events));
        node.insert(&sandbox);
        if record.state.is_over() {
            exec::adopt::ended(&sandbox, &mut remembered);
            node.remember_ended(&id);
            continue;
        }
        match living(node, &record).await? {
            Some(instance) => {
                keep.push(instance.handle());
                take_over(node, &sandbox, &record, instance, &mut remembered).await?;
            }
            None => {
                exec::adopt::ended(&sandbox, &mut remembered);
                sandbox.update(|record| {
                    record.state = State::Lost;
                    record.reason = "it had ended when the runtime started again".to_owned();
                })?;
                node.remember_ended(&id);
            }
        }
    }
    node.container.former().drop_held();
    node.store.sweep(remembered);
    node.container.sweep(&keep).await?;
    if let Err(error) = node.layers.reconcile().await {
        tracing::warn!(error = %error.chain(), "layers of an earlier runtime stay attached");
    }
    Ok(())
}

async fn living(node: &Arc<Node>, record: &Record) -> Result<Option<Arc<dyn Instance>>> {
    // One that was still being created has no handle; the sweep clears what there is of it.
    let Some(handle) = &record.handle else { return Ok(None) };
    Ok(node.container.adopt(handle).await?.map(Arc::from))
}

async fn take_over(
    node: &Arc<Node>,
    sandbox: &Arc<Sandbox>,
    record: &Record,
    instance: Arc<dyn Instance>,
    remembered: &mut Remembered,
) -> Result<()> {
    let mut layers = record.layer_ids()?;
    sandbox.set_instance(Some(Arc::clone(&instance)));
    // What was counted before is no news.
    let _known = sandbox.has_new_oom_kill();
    if let Err(error) = node.layers.attach(&layers, None, Plane::Auto).await {
        // Its mounts live on in its own namespace; only the count is missing.
        tracing::warn!(id = sandbox.id(), error = %error.chain(), "attach the layers again");
        layers.clear();
    }
    if record.state == State::Running {
        // CRASH: a runtime that died while it packed or paused left the sandbox frozen.
        instance.thaw()?;
    }
    if record.state == State::Paused {
        // CRASH: a runtime that died while it resumed may have let it go on and not have said so.
        instance.freeze(FREEZE_DEADLINE).await?;
    }
    if let Err(error) = node.networks.begin(sandbox, &instance).await {
        // It stays without a network, as the dead runtime left it.
        tracing::warn!(id = sandbox.id(), error = %error.chain(), "connect a sandbox again");
    }
    node.supervise(sandbox, Arc::clone(&instance), layers);
    let former = node.container.former();
    node.lifetimes.watch(sandbox);
    exec::adopt::living(sandbox, &instance, former, remembered, &node.meters);
    if record.state == State::Stopping {
        // It may have been paused before.
        instance.thaw()?;
        sandbox.stop(Duration::ZERO).await?;
    }
    Ok(())
}
