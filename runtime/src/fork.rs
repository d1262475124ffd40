//! Sandboxes that begin with the files of another one as they are at one instant.
//!
//! The original is frozen while its writable layer is copied aside, once, and goes on in every case; the new ones
//! are filled from that copy, so all of them see the same instant. Where the file system shares blocks (XFS,
//! btrfs) a copy takes no room; where not it is one. Processes are not copied: a fork begins as a new sandbox does,
//! with its own command started anew. CRASH: copies lie in a folder of ours that the next start clears.

mod copy;

pub use copy::copy_tree;

use crate::events::report;
use crate::many::{self, Made};
use crate::network::NetworkRecord;
use crate::node::{Node, Resolved};
use crate::pack::Thaw;
use crate::pool::remove_folder;
use crate::record::{Record, State};
use crate::sandbox::Sandbox;
use crate::spec::SandboxSpec;
use layer::{Context, EnvId, Error, ErrorKind, Result};
use proto::v1;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use sys::cgroup::Bandwidth;
use tokio::sync::mpsc;

/// How long processes may take to stop.
const FREEZE_DEADLINE: Duration = Duration::from_secs(5);
/// Name of the folder of copies.
const FOLDER: &str = "forks";

/// A copy of what a sandbox wrote, until it is dropped.
#[derive(Debug)]
struct Copied {
    folder: PathBuf,
}

impl Drop for Copied {
    fn drop(&mut self) {
        let folder = std::mem::take(&mut self.folder);
        let remove = move || {
            if let Err(error) = remove_folder(&folder) {
                tracing::warn!(error = %error.chain(), "a copy stays until the next start");
            }
        };
        // It may be large, and whoever drops it may not wait.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(remove)),
            Err(_) => remove(),
        }
    }
}

/// Removes what a killed runtime left.
pub fn sweep(folder: &Path) -> Result<()> {
    remove_folder(&folder.join(FOLDER))
}

/// Makes `count` sandboxes. An error before the first of them is one of the whole call.
pub async fn fork(
    node: &Arc<Node>,
    sandbox: &Arc<Sandbox>,
    count: u32,
) -> Result<mpsc::Receiver<Made>> {
    many::check_count(count)?;
    let _use = sandbox.activity.begin();
    node.room.admit()?;
    let (record, copied, frozen) = {
        let _turn = sandbox.turn.lock().await;
        let state = sandbox.state();
        let instance =
            sandbox.instance().filter(|_| matches!(state, State::Running | State::Paused));
        let instance = instance.ok_or_else(|| {
            Error::new(ErrorKind::Busy, format!("sandbox {} is not running", sandbox.id()))
        })?;
        let thaw = if state == State::Running {
            instance.freeze(FREEZE_DEADLINE).await?;
            Some(Thaw::after(&instance))
        } else {
            None
        };
        let (record, upper, folder) = (sandbox.record(), instance.upper(), node.folder());
        let copying = tokio::task::spawn_blocking(move || {
            let since = Instant::now();
            let copied = copy_aside(&folder, &upper)?;
            let frozen = if thaw.is_some() { since.elapsed() } else { Duration::ZERO };
            drop(thaw);
            Ok((copied, frozen))
        });
        let copied: Result<_> = copying.await.map_err(|error| {
            Error::new(ErrorKind::Internal, "copying panicked").with_source(error)
        })?;
        let (copied, frozen) =
            copied.map_err(|error| error.context(format!("fork {}", sandbox.id())))?;
        (record, Arc::new(copied), frozen)
    };
    let frozen_us = u64::try_from(frozen.as_micros()).unwrap_or(u64::MAX);
    report::forked(sandbox, count, frozen_us, &Ok(()));
    let spec = spec_of(&record);
    let resolved = Arc::new(Resolved {
        env_id: record.env_id.parse::<EnvId>().ok(),
        layers: record.layer_ids()?,
        config: record.config,
        image: record.image,
    });
    let make = {
        let node = Arc::clone(node);
        move |_number| {
            let (node, spec) = (Arc::clone(&node), spec.clone());
            let (resolved, copied) = (Arc::clone(&resolved), Arc::clone(&copied));
            async move {
                let made = node.create_from(spec, &resolved, Some(copied.folder.clone())).await;
                drop(copied);
                made
            }
        }
    };
    Ok(many::make(node, count, frozen_us, true, make))
}

fn copy_aside(folder: &Path, upper: &Path) -> Result<Copied> {
    let name = crate::node::new_id()?;
    let copied = Copied { folder: folder.join(FOLDER).join(name) };
    std::fs::create_dir_all(&copied.folder)
        .context(|| format!("make {}", copied.folder.display()))?;
    copy_tree(upper, &copied.folder)?;
    Ok(copied)
}

/// What to ask for to get the like of it. Ports of the host cannot be published twice, so none is.
fn spec_of(record: &Record) -> SandboxSpec {
    let limits = &record.limits;
    let some = |number: u32| (number != 0).then_some(number);
    let many = |number: u64| (number != 0).then_some(number);
    SandboxSpec {
        environment: record.environment.clone(),
        memory_bytes: many(limits.memory_bytes),
        cpu_millis: some(limits.cpu_millis),
        pids: some(limits.pids),
        disk_bytes: many(limits.writable_bytes),
        inodes: many(limits.inodes),
        open_files: some(limits.open_files),
        bandwidth: Bandwidth {
            read: many(limits.read_bytes_per_s),
            write: many(limits.write_bytes_per_s),
        },
        cpu_weight: some(limits.cpu_weight),
        processors: (!limits.cpuset.is_empty()).then(|| limits.cpuset.clone()),
        env: record.defaults.env.clone(),
        cwd: Some(record.defaults.cwd.clone()),
        user: Some(record.defaults.user.clone()),
        argv: record.argv.clone(),
        labels: record.labels.clone(),
        idempotency_key: None,
        hostname: None,
        plane: v1::Plane::Auto,
        network: NetworkRecord { allow: record.network.allow.clone(), ..NetworkRecord::default() },
        // It was checked when the record was made.
        profile: record.profile.parse().unwrap_or_default(),
        protected: record.protected.clone(),
        lifetime: record.lifetime.clone(),
        lease_ms: 0,
    }
}
