//! Containers per second: create, run `/bin/true`, gone; against crun and runc with the same kind of
//! namespaces and limits, without network (a network namespace that has loopback only).
//!
//! Ours goes through the node's interface; `lamella run --rm`, which starts a process for each call as
//! the peers do, stands beside it. The peers' overlay (a writable layer on tmpfs over the unpacked base)
//! is mounted by system calls of this process: they pay for no mount program.

use crate::cases;
use crate::container::{self, Bundle, CPU_MILLIS, Container, MEMORY_BYTES, PIDS};
use crate::corpus::{self, Kind};
use crate::eager;
use crate::measure::Spread;
use crate::node::{self, Lamella};
use crate::options::Options;
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use anyhow::{Context, bail};
use proto::v1::{self, sandboxes_client::SandboxesClient};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use sys::mount::{Attributes, Tmpfs, Unmount};
use tokio::runtime::Runtime;
use tonic::transport::Channel;

/// How long one side runs in one round.
const ROUND: Duration = Duration::from_millis(1500);
/// Our rate, in rates of crun.
const BAR: f64 = 2.0;

/// Who makes containers.
trait Maker: Sync {
    fn name(&self) -> &str;
    /// A worker for one thread: each call makes one container and sees it gone.
    fn worker(&self) -> anyhow::Result<Box<dyn FnMut() -> anyhow::Result<()> + '_>>;
}

/// `bench create`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let pieces = corpus::ready(options, &[Kind::Base])?;
    let piece = pieces.first().context("the base is a piece")?;
    let scratch = Scratch::create(&options.scratch)?;
    let lamella = Lamella::at(&scratch.data())?;
    let reference = cases::reference(piece);
    let tar = piece.tar();
    say("building the layer and unpacking the base");
    lamella.run(&["build", shell::text(&tar)?, "-t", &reference])?;
    let trees = eager::pull(&pieces, "", &scratch.path().join("eager"))?.trees;
    let memory = scratch.path().join("memory");
    std::fs::create_dir(&memory)?;
    let tmpfs = Tmpfs { name: "bench", mode: 0o755, size_bytes: None, inodes: None };
    tmpfs.mount_detached(Attributes::default())?.attach(&memory)?;
    let node = lamella.up()?;
    let ours = Node { socket: node.socket("node.sock"), reference: reference.clone() };
    let line = CommandLine { lamella: &lamella, reference };
    let peer = |runtime| Peer { runtime, trees: &trees, memory: &memory, next: AtomicU64::new(0) };
    let (crun, runc) = (peer("crun"), peer("runc"));
    warm_up(&node, &ours)?;
    let report = measure_all(options, &pieces, &[&ours, &crun, &line, &runc])?;
    drop(node);
    sys::mount::unmount(&memory, Unmount::Lazy)?;
    report.finish(options)
}

/// The layer is complete and everything has run once before anything is timed.
fn warm_up(node: &node::Node, ours: &Node) -> anyhow::Result<()> {
    let mut worker = ours.worker()?;
    worker()?;
    node.complete(&ours.reference)?;
    (0..20).try_for_each(|_| worker())
}

fn measure_all(
    options: &Options,
    pieces: &[corpus::Piece],
    makers: &[&dyn Maker],
) -> anyhow::Result<Report> {
    let mut report = Report::new("create", options, pieces)?;
    for at_once in [1, 2] {
        let case = format!("{at_once} at once");
        let mut rates: Vec<Spread> = makers.iter().map(|_| Spread::default()).collect();
        let mut latencies: Vec<Spread> = makers.iter().map(|_| Spread::default()).collect();
        for round in 1..=options.rounds {
            say(format!("{case}, round {round} of {}", options.rounds));
            for ((maker, rate), latency) in makers.iter().zip(&mut rates).zip(&mut latencies) {
                let (per_second, each) = for_a_while(*maker, at_once)
                    .with_context(|| format!("{} failed", maker.name()))?;
                rate.push(per_second);
                each.into_iter().for_each(|time| latency.push(time));
            }
        }
        for ((maker, rate), latency) in makers.iter().zip(&rates).zip(&latencies) {
            report.figure(&case, maker.name(), "rate", Unit::PerSecond, rate);
            report.figure(&case, maker.name(), "latency", Unit::Seconds, latency);
        }
        let ratio = rates[0].median() / rates[1].median();
        let promise = format!("containers per second, {case}, of crun's rate,");
        report.at_least(&promise, ratio, BAR, Unit::Times);
    }
    report.note(
        "memory, pids and CPU limits and pid, mount, ipc, uts and network namespaces on all sides",
    );
    report.note("ours also installs a seccomp filter; the peers' bundles have none");
    Ok(report)
}

/// Runs `at_once` workers for a while; answers containers per second and the time of each.
fn for_a_while(maker: &dyn Maker, at_once: usize) -> anyhow::Result<(f64, Vec<f64>)> {
    let start = Instant::now();
    let each = std::thread::scope(|scope| -> anyhow::Result<Vec<f64>> {
        let threads: Vec<_> = (0..at_once)
            .map(|_| scope.spawn(|| container::apart(|| work_until(maker, start + ROUND))))
            .collect();
        let mut each = Vec::new();
        for thread in threads {
            each.extend(thread.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??);
        }
        Ok(each)
    })?;
    Ok((each.len() as f64 / start.elapsed().as_secs_f64(), each))
}

/// One worker at work; answers the time of each container, in seconds.
fn work_until(maker: &dyn Maker, end: Instant) -> anyhow::Result<Vec<f64>> {
    let mut worker = maker.worker()?;
    let mut times = Vec::new();
    while Instant::now() < end {
        let begin = Instant::now();
        worker()?;
        times.push(begin.elapsed().as_secs_f64());
    }
    Ok(times)
}

/// Our node, through its socket.
struct Node {
    socket: PathBuf,
    reference: String,
}

impl Maker for Node {
    fn name(&self) -> &'static str {
        "lamella"
    }

    fn worker(&self) -> anyhow::Result<Box<dyn FnMut() -> anyhow::Result<()> + '_>> {
        let runtime = node::runtime()?;
        let channel = runtime.block_on(proto::connect::unix(&self.socket))?;
        let mut client = SandboxesClient::new(channel);
        Ok(Box::new(move || one(&runtime, &mut client, &self.reference)))
    }
}

fn one(
    runtime: &Runtime,
    client: &mut SandboxesClient<Channel>,
    reference: &str,
) -> anyhow::Result<()> {
    let limits = v1::Limits {
        memory_bytes: MEMORY_BYTES,
        cpu_millis: CPU_MILLIS,
        pids: PIDS,
        ..v1::Limits::default()
    };
    let request = v1::CreateRequest {
        environment: reference.to_owned(),
        limits: Some(limits),
        argv: vec!["/bin/true".to_owned()],
        ..v1::CreateRequest::default()
    };
    runtime.block_on(async {
        let id = client.create(request).await?.into_inner().id;
        let ended = client.wait(v1::WaitRequest { id: id.clone() }).await?.into_inner();
        client.remove(v1::RemoveRequest { id, force: false }).await?;
        match ended.end.and_then(|end| end.how) {
            Some(v1::end::How::Exited(0)) => Ok(()),
            how => bail!("/bin/true ended with {how:?}"),
        }
    })
}

/// `lamella run --rm`, a process for each container.
struct CommandLine<'a> {
    lamella: &'a Lamella,
    reference: String,
}

impl Maker for CommandLine<'_> {
    fn name(&self) -> &'static str {
        "lamella run --rm"
    }

    fn worker(&self) -> anyhow::Result<Box<dyn FnMut() -> anyhow::Result<()> + '_>> {
        let memory = MEMORY_BYTES.to_string();
        let cpus = (f64::from(CPU_MILLIS) / 1000.0).to_string();
        let pids = PIDS.to_string();
        Ok(Box::new(move || {
            let limits = ["--memory", &memory, "--cpus", &cpus, "--pids", &pids];
            let words = [&["run", "--rm"], &limits[..], &[&self.reference, "--", "/bin/true"]];
            self.lamella.run(&words.concat()).map(drop)
        }))
    }
}

/// crun or runc.
struct Peer<'a> {
    runtime: &'static str,
    trees: &'a [PathBuf],
    memory: &'a Path,
    next: AtomicU64,
}

impl Maker for Peer<'_> {
    fn name(&self) -> &str {
        self.runtime
    }

    fn worker(&self) -> anyhow::Result<Box<dyn FnMut() -> anyhow::Result<()> + '_>> {
        Ok(Box::new(move || {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let name = format!("{}-{number}", self.runtime);
            let bundle = Bundle::create(self.memory, &name, &[], &["/bin/true"])?;
            Container::mount(bundle, self.trees)?.run(self.runtime).map(|_| ())
        }))
    }
}
