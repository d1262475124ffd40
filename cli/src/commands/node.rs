//! `up`, `down`, and the hidden commands that run the daemons of a node.

use super::{Scene, mount};
use crate::args::{Down, Keeper, Up, Virtiofs};
use crate::errors::{Failure, Outcome, Remedy};
use crate::node::daemon::end_of;
use crate::node::lock::{self, Owner};
use crate::node::log;
use crate::node::options::FsdOptions;
use crate::node::server::{self, Mode};
use crate::node::start::{self, Lifetime};
use crate::node::upgrade::{self, Program};
use layer::{Context, Error, ErrorKind, Result};
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::{ListRequest, StatsRequest, StatsResponse, StopRequest};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tonic::transport::Channel;

/// The time between the polite signal and the kill when `down` stops a sandbox.
const GRACE_MS: u64 = 3_000;
/// How long a node may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(60);
/// How often an upgrade is looked at.
const POLL: Duration = Duration::from_millis(20);

/// `up`
pub async fn up(scene: &Scene, args: &Up) -> Outcome {
    let mode = match (args.background, args.ephemeral) {
        (false, _) => Mode::Foreground,
        (true, false) => Mode::Background,
        (true, true) => Mode::Ephemeral,
    };
    server::run(&scene.settings, scene.out, mode, &args.fsd, &args.sandboxes).await
}

#[derive(Debug, Serialize)]
struct Ended {
    pid: Option<u32>,
    stopped: Vec<String>,
}

/// `down`
pub async fn down(scene: &Scene, args: &Down) -> Outcome {
    let lock_path = scene.settings.run("node.lock");
    let mut ended = Ended { pid: None, stopped: Vec::new() };
    let mut owner = lock::holder(&lock_path)?;
    let left_behind = || {
        std::os::unix::net::UnixStream::connect(scene.settings.fsd_socket()).is_ok()
            || mount::any(&scene.settings)
    };
    if owner.is_none() && (args.keep || !left_behind()) {
        let data = scene.settings.data().display().to_string();
        return scene.out.result(&ended, || format!("no node is running on {data}"));
    }
    if !args.keep {
        // Where a node was killed, another one has to clear up what it left.
        let node = start::connect(&scene.settings, Lifetime::WhileUsed, scene.out).await?;
        mount::unmount_all(&scene.settings, scene.out).await?;
        ended.stopped = stop_all(&node.channel).await?;
        owner = lock::holder(&lock_path)?;
    }
    if let Some(owner) = owner {
        end_process(&owner, || Ok(lock::holder(&lock_path)?.as_ref() == Some(&owner))).await?;
        ended.pid = Some(owner.pid);
        if !args.keep {
            refuse_lingering(scene).await?;
        }
    }
    scene.out.result(&ended, || match ended.pid {
        Some(pid) => format!("ended the node, process {pid}"),
        None => "the node has ended".to_owned(),
    })
}

/// Says what keeps the daemon alive behind the node, if anything does: snapshots of containerd, or mounts that no
/// record knows.
async fn refuse_lingering(scene: &Scene) -> Outcome {
    let settings = &scene.settings;
    let Ok(channel) = proto::connect::unix(&settings.fsd_socket()).await else { return Ok(()) };
    let Ok(stats) = LayerFsClient::new(channel).stats(StatsRequest {}).await else {
        return Ok(());
    };
    if lock::holder(&settings.run("node.lock"))?.is_some() {
        // Another node has come up and uses it.
        return Ok(());
    }
    let stats = stats.into_inner();
    let is_shown = |it: &String| it.starts_with(snapshotter::HOLDER_PREFIX);
    let shown = stats.layers.iter().filter(|layer| layer.holders.iter().any(is_shown)).count();
    let lingering = mount::lingering(settings)?;
    let (what, remedy) = match &lingering[..] {
        // Their mounts are containerd's to take away, with its containers.
        _ if shown > 0 => (
            format!("containerd's snapshotter holds {shown} layers for snapshots"),
            "remove the containers and images of containerd that stand on them (`ctr images rm --sync`)",
        ),
        [] => (
            "a mount, an open file or a virtual machine uses a layer".to_owned(),
            "take away what uses it",
        ),
        mounts => {
            (format!("layers are mounted at {}", mounts.join(", ")), "unmount them (`umount`)")
        }
    };
    let text = format!("the node has ended, but the daemon, process {}, stays: {what}", stats.pid);
    Err(Error::new(ErrorKind::Busy, text))
        .remedy(|_| Some(format!("{remedy}, then `lamella down` again")))
}

#[derive(Debug, Serialize)]
struct Upgraded {
    pid: u32,
    fsd_pid: u32,
    keeper_pids: Vec<u32>,
    changed: bool,
}

/// `upgrade`
pub async fn upgrade(scene: &Scene) -> Outcome {
    let settings = &scene.settings;
    let Some(owner) = lock::holder(&settings.run("node.lock"))? else {
        let data = settings.data().display();
        return Err(Error::not_found(format!("no node is running on {data}")).into());
    };
    let (path, installed) = Program::installed_for(owner.pid)?;
    let changed = Program::of_process(owner.pid)? != installed;
    if changed {
        let tried = super::blocking(move || upgrade::try_out(&path)).await?;
        tried?;
        signal_node(&owner, Signal::USR2)?;
    }
    let stats = await_program(scene, owner.pid, installed).await?;
    let (pid, fsd_pid, keeper_pids) = (owner.pid, stats.pid, stats.keeper_pids);
    let upgraded = Upgraded { pid, fsd_pid, keeper_pids, changed };
    scene.out.result(&upgraded, || match changed {
        true => format!("the node, process {}, is the installed program now", owner.pid),
        false => format!("the node, process {}, is the installed program already", owner.pid),
    })
}

fn signal_node(owner: &Owner, signal: Signal) -> Result<()> {
    let name = || format!("signal the node, process {}", owner.pid);
    let pid = i32::try_from(owner.pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| Error::invalid(name()))?;
    let pidfd = pidfd_open(pid, PidfdFlags::NONBLOCK).map_err(std::io::Error::from);
    let sent = pidfd.and_then(|pidfd| Ok(pidfd_send_signal(pidfd, signal)?));
    sent.context(name)
}

/// Waits until node, fsd and its keepers all run `program` and answer.
async fn await_program(scene: &Scene, node: u32, program: Program) -> Outcome<StatsResponse> {
    let deadline = Instant::now() + END_TIMEOUT;
    let runs = |pid| Program::of_process(pid).is_ok_and(|found| found == program);
    loop {
        if runs(node)
            && proto::connect::unix(&scene.settings.node_socket()).await.is_ok()
            && let Ok(channel) = proto::connect::unix(&scene.settings.fsd_socket()).await
            && let Ok(stats) = LayerFsClient::new(channel).stats(StatsRequest {}).await
            && runs(stats.get_ref().pid)
            && stats.get_ref().keeper_pids.iter().all(|pid| runs(*pid))
        {
            return Ok(stats.into_inner());
        }
        if Instant::now() > deadline {
            let text = format!("the node, process {node}, did not become the installed program");
            return Err(Error::new(ErrorKind::Timeout, text))
                .remedy(|_| Some("see node.log in its run directory".to_owned()));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Stops every sandbox that is alive; says which.
pub async fn stop_all(channel: &Channel) -> Outcome<Vec<String>> {
    let mut client = SandboxesClient::new(channel.clone());
    let alive =
        client.list(ListRequest { all: false, ..Default::default() }).await?.into_inner().sandboxes;
    let stops = alive.into_iter().map(|sandbox| {
        let mut client = client.clone();
        tokio::spawn(async move {
            let request = StopRequest { id: sandbox.id.clone(), grace_ms: GRACE_MS };
            client.stop(request).await.map(|_| sandbox.id)
        })
    });
    let mut stopped = Vec::new();
    for stop in stops.collect::<Vec<_>>() {
        match stop.await {
            Ok(Ok(id)) => stopped.push(id),
            Ok(Err(status)) => return Err(status.into()),
            Err(error) => {
                return Err(Error::new(ErrorKind::Internal, "a stop died")
                    .with_source(error)
                    .into());
            }
        }
    }
    Ok(stopped)
}

/// Tells a process to end and waits for it. `still` is asked once the process is held by a descriptor,
/// so that a recycled number is never hit.
async fn end_process(owner: &Owner, still: impl Fn() -> Result<bool>) -> Outcome {
    let name = || format!("end the node, process {}", owner.pid);
    let pid = i32::try_from(owner.pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| Error::invalid(name()))?;
    let Ok(pidfd) = pidfd_open(pid, PidfdFlags::NONBLOCK) else { return Ok(()) };
    if !still()? {
        return Ok(());
    }
    pidfd_send_signal(&pidfd, Signal::TERM).map_err(std::io::Error::from).context(name)?;
    let end = end_of(&Arc::new(pidfd));
    if tokio::time::timeout(END_TIMEOUT, end).await.is_err() {
        return Err(Error::new(ErrorKind::Timeout, format!("the node, process {pid:?}, goes on")))
            .remedy(|_| Some("see node.log in its run directory".to_owned()));
    }
    Ok(())
}

/// `fsd`: the on-demand file-system daemon, in a session of its own, so that no terminal reaches it.
pub async fn fsd(scene: &Scene, options: &FsdOptions) -> Outcome {
    scene.settings.prepare()?;
    log::to_file(&scene.settings.run("fsd.log"))?;
    if let Err(error) = sys::process::new_session() {
        tracing::debug!(%error, "fsd stays in its session");
    }
    let mut terminate =
        signal(SignalKind::terminate()).map_err(|error| Error::io("listen for signals", error))?;
    let mut config = fsd::FsdConfig::new(scene.settings.data(), scene.settings.store_url());
    options.apply(&mut config);
    config.trusted_keys = options.trusted(&scene.settings)?;
    let ended = fsd::run(config, async move {
        terminate.recv().await;
    })
    .await;
    if let Err(error) = &ended {
        tracing::error!(error = error.chain(), "fsd ends");
    }
    ended.map_err(Failure::from)
}

/// `virtiofs`. Blocks; needs no runtime.
pub fn virtiofs(args: Virtiofs) -> Outcome {
    let Virtiofs { socket, metadata, layer_data } = args;
    let config = fsd::virtiofs::ServerConfig { socket, metadata, data: layer_data };
    fsd::virtiofs::run(&config).map_err(Failure::from)
}

/// `keeper`. Blocks; needs no runtime.
pub fn keeper(scene: &Scene, args: &Keeper) -> Outcome {
    let config =
        fsd::keeper::KeeperConfig { data_dir: scene.settings.data().to_owned(), index: args.index };
    fsd::keeper::run(&config).map_err(Failure::from)
}
