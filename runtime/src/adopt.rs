//! The start of a runtime on what an earlier one left: living sandboxes are taken over, the others are
//! reported lost, and everything that belongs to no living one is cleared.

use crate::backends::{Backend, Instance};
use crate::node::{Main, Node, follow_main};
use crate::record::{MainCommand, Record, State};
use crate::sandbox::Sandbox;
use crate::stream;
use crate::zygote::Process;
use layer::Result;
use proto::v1::Plane;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::Arc;
use std::time::Duration;

/// Adopts and sweeps. `records`: what the journal says, the oldest first.
pub async fn adopt(node: &Arc<Node>, records: Vec<Record>) -> Result<()> {
    let mut keep = Vec::new();
    for record in records {
        let id = record.id.clone();
        if let Some(key) = &record.idempotency_key {
            node.remember_key(key, &id);
        }
        let sandbox = Arc::new(Sandbox::new(record.clone(), node.journal()));
        node.insert(&sandbox);
        if record.state.is_over() {
            node.remember_ended(&id);
            continue;
        }
        match living(node, &record).await? {
            Some(instance) => {
                keep.push(instance.handle());
                take_over(node, &sandbox, &record, instance).await?;
            }
            None => {
                sandbox.log.close();
                sandbox.update(|record| {
                    record.state = State::Lost;
                    record.reason = "it had ended when the runtime started again".to_owned();
                })?;
                node.remember_ended(&id);
            }
        }
    }
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
    node.supervise(sandbox, Arc::clone(&instance), layers);
    if let Some(main) = &record.main {
        let main = reopen_main(main);
        if let Some(pidfd) = main.process.as_ref().map(|process| Arc::clone(&process.pidfd)) {
            sandbox.set_main(pidfd);
        }
        tokio::spawn(follow_main(Arc::clone(sandbox), Arc::clone(&instance), main));
    }
    if record.state == State::Stopping {
        sandbox.stop(Duration::ZERO).await?;
    }
    Ok(())
}

/// The sandbox's own command again; without a process when it has ended meanwhile.
fn reopen_main(main: &MainCommand) -> Main {
    let mut found =
        Main { process: None, refusal: None, recorded: None, outputs: Vec::new(), command: None };
    let Ok(pidfd) = sys::process::pidfd_open(main.pid) else { return found };
    if sys::process::pidfd_number(pidfd.as_fd()).ok() != Some(main.process_number) {
        return found;
    }
    for (number, (inode, is_error)) in [(1, (main.pipes[0], false)), (2, (main.pipes[1], true))] {
        let path = format!("/proc/{}/fd/{number}", main.pid);
        // The command may have put anything in its place, so it must be our pipe before it is opened.
        if !std::fs::metadata(&path).is_ok_and(|now| now.ino() == inode) {
            continue;
        }
        const O_NONBLOCK: i32 = 0o4000;
        let opened = std::fs::OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(&path);
        let is_ours = |file: &std::fs::File| file.metadata().is_ok_and(|now| now.ino() == inode);
        let opened = opened.ok().filter(is_ours);
        if let Some(Ok(end)) = opened.map(|file| stream::End::new(OwnedFd::from(file))) {
            found.outputs.push((is_error, end));
        }
    }
    found.process = Some(Process::adopted(main.pid, pidfd));
    found
}
