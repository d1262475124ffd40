//! How much slower an exec in a quiet sandbox gets while neighbours run into their limits: bombs of bytes,
//! output, processes, inodes, descriptors and memory, as many of each as `LAMELLA_BOMBS` says.

use crate::cases;
use crate::corpus::{self, Kind};
use crate::measure::Spread;
use crate::node::{self, Lamella};
use crate::options::Options;
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use anyhow::{Context, bail};
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::{
    CreateRequest, ExecInput, ExecStart, Limits, StopRequest, end, exec_input, exec_output,
};
use std::time::{Duration, Instant};
use tonic::transport::Channel;

/// Of each kind, unless told.
const EACH: usize = 5;
/// How long the quiet sandbox is measured.
const WINDOW: Duration = Duration::from_secs(10);
/// Its p99 with the bombs, in its p99 without.
const BAR: f64 = 3.0;

/// Each begins again until the window is over.
const BOMBS: [(&str, &str); 6] = [
    ("bytes", "yes > /file"),
    ("output", "yes"),
    ("processes", "f() { f | f & f; }; f"),
    ("inodes", "i=0; while mkdir /tmp/$i; do i=$((i+1)); done; exit 1"),
    ("descriptors", "i=10; while eval \"exec $i</dev/null\"; do i=$((i+1)); done; exit 1"),
    ("memory", "tail /dev/zero"),
];

type Client = SandboxesClient<Channel>;

/// `bench limits`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let pieces = corpus::ready(options, &[Kind::Base])?;
    let piece = pieces.first().context("the base is a piece")?;
    let scratch = Scratch::create(&options.scratch)?;
    let lamella = Lamella::at(&scratch.data())?;
    let reference = cases::reference(piece);
    say("building the layer");
    lamella.run(&["build", shell::text(&piece.tar())?, "-t", &reference])?;
    let node = lamella.up()?;
    let each = std::env::var("LAMELLA_BOMBS").ok().and_then(|text| text.parse().ok());
    let each: usize = each.unwrap_or(EACH);
    let runtime = node::runtime()?;
    let (alone, beside) = runtime.block_on(async {
        let channel = proto::connect::unix(&node.socket("node.sock")).await?;
        measure(SandboxesClient::new(channel), &reference, each).await
    })?;
    let mut report = Report::new("limits", options, &pieces)?;
    report.figure("alone", "lamella", "exec", Unit::Seconds, &alone);
    report.figure(
        &format!("beside {each} of each bomb"),
        "lamella",
        "exec",
        Unit::Seconds,
        &beside,
    );
    let ratio = p99(&beside) / p99(&alone);
    report.at_most("p99 of an exec beside bombs, of its p99 alone,", ratio, BAR, Unit::Times);
    report.note(&format!(
        "p99 alone {:.1} ms, beside bombs {:.1} ms",
        p99(&alone) * 1e3,
        p99(&beside) * 1e3
    ));
    drop(node);
    report.finish(options)
}

fn p99(spread: &Spread) -> f64 {
    let mut samples = spread.samples().to_vec();
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() * 99 / 100).copied().unwrap_or(f64::NAN)
}

async fn measure(client: Client, reference: &str, each: usize) -> anyhow::Result<(Spread, Spread)> {
    let quiet = create(client.clone(), reference, Limits::default()).await?;
    for _ in 0..20 {
        exec(client.clone(), &quiet, "true", 0).await?;
    }
    say("a quiet sandbox alone");
    let alone = watch(&client, &quiet).await?;
    let mut bombs = tokio::task::JoinSet::new();
    let end = Instant::now() + WINDOW + Duration::from_secs(5);
    for number in 0..each * BOMBS.len() {
        let (client, reference) = (client.clone(), reference.to_owned());
        bombs.spawn(async move { bomb(client, &reference, number, end).await });
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    say(format!("beside {each} of each bomb"));
    let beside = watch(&client, &quiet).await?;
    while let Some(ended) = bombs.join_next().await {
        ended??;
    }
    stop(client, quiet).await?;
    Ok((alone, beside))
}

async fn watch(client: &Client, quiet: &str) -> anyhow::Result<Spread> {
    let (mut times, start) = (Spread::default(), Instant::now());
    while start.elapsed() < WINDOW {
        let begin = Instant::now();
        exec(client.clone(), quiet, "true", 0).await?;
        times.push(begin.elapsed().as_secs_f64());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(times)
}

async fn bomb(client: Client, reference: &str, number: usize, end: Instant) -> anyhow::Result<()> {
    let (name, line) = BOMBS[number % BOMBS.len()];
    let limits = Limits {
        memory_bytes: 32 << 20,
        pids: 64,
        writable_bytes: 16 << 20,
        inodes: 200,
        open_files: 64,
        ..Limits::default()
    };
    while Instant::now() < end {
        let id = create(client.clone(), reference, limits.clone()).await?;
        match exec(client.clone(), &id, line, 3000).await? {
            Some(end::How::Exited(0)) | None => bail!("{name} ended as if nothing had been"),
            Some(_) => {}
        }
        stop(client.clone(), id).await?;
    }
    Ok(())
}

async fn create(mut client: Client, reference: &str, limits: Limits) -> anyhow::Result<String> {
    let request = CreateRequest {
        environment: reference.to_owned(),
        limits: Some(limits),
        ..CreateRequest::default()
    };
    Ok(client.create(request).await?.into_inner().id)
}

async fn stop(mut client: Client, id: String) -> anyhow::Result<()> {
    client.stop(StopRequest { id, grace_ms: 0 }).await?;
    Ok(())
}

async fn exec(
    mut client: Client,
    id: &str,
    line: &str,
    timeout_ms: u64,
) -> anyhow::Result<Option<end::How>> {
    let start = ExecStart {
        sandbox_id: id.to_owned(),
        argv: ["/bin/sh", "-c", line].map(str::to_owned).to_vec(),
        timeout_ms,
        output_limit_bytes: 1 << 20,
        ..ExecStart::default()
    };
    let input = ExecInput { input: Some(exec_input::Input::Start(start)) };
    let mut outputs = client.exec(tokio_stream::iter([input])).await?.into_inner();
    while let Some(output) = outputs.message().await? {
        if let Some(exec_output::Output::Ended(ended)) = output.output {
            return Ok(ended.end.and_then(|end| end.how));
        }
    }
    bail!("a command without an end")
}
