//! Function calls against containers: `/bin/true` called, and `/bin/true` in a sandbox that is created for it, executed
//! in and stopped. Both through the node's socket, with the same limits, side by side in each round.
//!
//! `paced` leaves a moment between two calls, as a judge whose programs run a while does: what is made ahead is
//! there. `steady` calls as fast as it can, so that making the next containers is part of the rate.

use crate::cases;
use crate::container::{self, CPU_MILLIS, MEMORY_BYTES, PIDS};
use crate::corpus::{self, Kind};
use crate::measure::Spread;
use crate::node::{self, Lamella};
use crate::options::Options;
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use anyhow::{Context, bail};
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::{self, ExecInput, ExecStart, exec_input, exec_output};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tonic::transport::Channel;

/// How long one side runs in one round.
const ROUND: Duration = Duration::from_millis(1500);
/// Between two paced calls.
const PACE: Duration = Duration::from_millis(4);
/// Rate of calls in rates of create, exec and stop.
const BAR: f64 = 3.0;

/// What is done again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Call,
    Container,
}

impl Side {
    const ALL: [Self; 2] = [Self::Call, Self::Container];

    fn name(self) -> &'static str {
        match self {
            Self::Call => "call",
            Self::Container => "create, exec, stop",
        }
    }
}

/// The node under test.
struct World {
    socket: PathBuf,
    reference: String,
}

/// `bench fncall`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let pieces = corpus::ready(options, &[Kind::Base])?;
    let piece = pieces.first().context("the base is a piece")?;
    let scratch = Scratch::create(&options.scratch)?;
    let lamella = Lamella::at(&scratch.data())?;
    let reference = cases::reference(piece);
    say("building the layer");
    lamella.run(&["build", shell::text(&piece.tar())?, "-t", &reference])?;
    let node = lamella.up()?;
    let world = World { socket: node.socket("node.sock"), reference };
    world.run(Side::Container, 1, Duration::ZERO, Duration::from_millis(300))?;
    node.complete(&world.reference)?;
    for side in Side::ALL {
        world.run(side, 2, Duration::ZERO, Duration::from_millis(500))?;
    }
    let mut report = Report::new("fncall", options, &pieces)?;
    for (case, at_once, pace) in [
        ("paced, 1 at once", 1, PACE),
        ("steady, 1 at once", 1, Duration::ZERO),
        ("steady, 2 at once", 2, Duration::ZERO),
    ] {
        measure(&world, &mut report, case, at_once, pace, options.rounds)?;
    }
    report.note(
        "memory, pids and CPU limits on both sides; the pool's refill is part of every figure",
    );
    drop(node);
    report.finish(options)
}

fn measure(
    world: &World,
    report: &mut Report,
    case: &str,
    at_once: usize,
    pace: Duration,
    rounds: u32,
) -> anyhow::Result<()> {
    let mut rates = Side::ALL.map(|_| Spread::default());
    let mut latencies = Side::ALL.map(|_| Spread::default());
    for round in 1..=rounds {
        say(format!("{case}, round {round} of {rounds}"));
        for (index, side) in Side::ALL.into_iter().enumerate() {
            let (rate, each) = world.run(side, at_once, pace, ROUND)?;
            rates[index].push(rate);
            each.into_iter().for_each(|time| latencies[index].push(time));
        }
    }
    for (index, side) in Side::ALL.into_iter().enumerate() {
        if pace.is_zero() {
            report.figure(case, side.name(), "rate", Unit::PerSecond, &rates[index]);
        }
        report.figure(case, side.name(), "latency", Unit::Seconds, &latencies[index]);
    }
    let ratio = if pace.is_zero() {
        rates[0].median() / rates[1].median()
    } else {
        latencies[1].median() / latencies[0].median()
    };
    report.at_least(&format!("calls, {case}, of create, exec and stop,"), ratio, BAR, Unit::Times);
    Ok(())
}

impl World {
    /// Some workers for a while; how many a second, and the time of each.
    fn run(
        &self,
        side: Side,
        at_once: usize,
        pace: Duration,
        time: Duration,
    ) -> anyhow::Result<(f64, Vec<f64>)> {
        let start = Instant::now();
        let each = std::thread::scope(|scope| -> anyhow::Result<Vec<f64>> {
            let work = || container::apart(|| self.work(side, pace, start + time));
            let threads: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
            let mut each = Vec::new();
            for thread in threads {
                each.extend(thread.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??);
            }
            Ok(each)
        })?;
        Ok((each.len() as f64 / start.elapsed().as_secs_f64(), each))
    }

    fn work(&self, side: Side, pace: Duration, end: Instant) -> anyhow::Result<Vec<f64>> {
        let runtime = node::runtime()?;
        let channel = runtime.block_on(proto::connect::unix(&self.socket))?;
        let mut client = SandboxesClient::new(channel);
        let mut times = Vec::new();
        while Instant::now() < end {
            let begin = Instant::now();
            match side {
                Side::Call => self.call(&runtime, &mut client)?,
                Side::Container => self.container(&runtime, &mut client)?,
            }
            times.push(begin.elapsed().as_secs_f64());
            std::thread::sleep(pace);
        }
        Ok(times)
    }

    fn call(&self, runtime: &Runtime, client: &mut SandboxesClient<Channel>) -> anyhow::Result<()> {
        let request = v1::CallRequest {
            environment: self.reference.clone(),
            argv: vec!["/bin/true".to_owned()],
            limits: Some(limits()),
            ..v1::CallRequest::default()
        };
        let answer = runtime.block_on(client.call(request))?.into_inner();
        expect_zero(answer.end)
    }

    fn container(
        &self,
        runtime: &Runtime,
        client: &mut SandboxesClient<Channel>,
    ) -> anyhow::Result<()> {
        runtime.block_on(async {
            let request = v1::CreateRequest {
                environment: self.reference.clone(),
                limits: Some(limits()),
                ..v1::CreateRequest::default()
            };
            let id = client.create(request).await?.into_inner().id;
            let start = ExecStart {
                sandbox_id: id.clone(),
                argv: vec!["/bin/true".to_owned()],
                ..ExecStart::default()
            };
            let input = ExecInput { input: Some(exec_input::Input::Start(start)) };
            let mut outputs = client.exec(tokio_stream::iter([input])).await?.into_inner();
            let mut end = None;
            while let Some(output) = outputs.message().await? {
                if let Some(exec_output::Output::Ended(ended)) = output.output {
                    end = ended.end;
                }
            }
            client.stop(v1::StopRequest { id, grace_ms: 0 }).await?;
            expect_zero(end)
        })
    }
}

fn limits() -> v1::Limits {
    v1::Limits {
        memory_bytes: MEMORY_BYTES,
        cpu_millis: CPU_MILLIS,
        pids: PIDS,
        ..v1::Limits::default()
    }
}

fn expect_zero(end: Option<v1::End>) -> anyhow::Result<()> {
    match end.and_then(|end| end.how) {
        Some(v1::end::How::Exited(0)) => Ok(()),
        how => bail!("/bin/true ended with {how:?}"),
    }
}
