//! What a sandbox wrote becomes an environment: many new files, and a few changed ones on a stack of many.

use crate::cases;
use crate::corpus::{self, Kind, Piece};
use crate::measure::{self, Spread};
use crate::node::{self, Lamella, Node};
use crate::options::Options;
use crate::report::{Report, Unit};
use crate::scratch::Scratch;
use crate::shell::{self, say};
use anyhow::{Context, bail};
use proto::v1::{self, sandboxes_client::SandboxesClient};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Duration;
use tokio::runtime::Runtime;
use tonic::transport::Channel;

const FILES: u64 = 10_000;
/// Together the files have 1 GiB.
const FILE_BYTES: u64 = (1 << 30) / FILES;
/// Packs of changed files in each round.
const SMALL_PACKS: usize = 10;
/// With these the stack has more than 100,000 files.
const MORE_FILES: usize = 4_000;
/// What the changes are made on.
const STACK: &str = "env/pack:1";
/// Changes ten files of the base; the word makes each change another one.
const CHANGE: &str =
    "for file in $(ls /usr/include/*.h | head -n 10); do echo \"/* $0 */\" >> $file; done";

/// `bench pack-diff`.
pub fn command(options: &Options) -> anyhow::Result<()> {
    let pieces = corpus::ready(options, &[Kind::Base, Kind::Toolkit, Kind::Workspace])?;
    let scratch = Scratch::create(&options.scratch)?;
    let lamella = Lamella::at(&scratch.data())?;
    say("building the layers");
    cases::publish(&lamella, &pieces, |_, _| {})?;
    let files = publish_stack(&lamella, &pieces, &scratch)?;
    let node = lamella.up()?;
    let mut large = Series::default();
    let mut small = Series::default();
    let mut rates = Spread::default();
    for round in 1..=options.rounds {
        say(format!("round {round} of {}", options.rounds));
        let tree = scratch.path().join("written");
        write_files(&pieces, &tree, u64::from(round))?;
        rates.push(pack_written(&lamella, &node, &tree, round, &mut large)?);
        corpus::remove_tree(&tree)?;
        pack_changes(&lamella, &node, round, &mut small)?;
    }
    drop(node);
    let mut report = Report::new("pack-diff", options, &pieces)?;
    let case = "1 GiB in 10,000 files";
    report.figure(case, "pack_diff", "rate", Unit::BytesPerSecond, &rates);
    large.show(&mut report, case);
    let case = format!("10 changes on {files} files");
    small.show(&mut report, &case);
    report.at_least("pack_diff of 1 GiB of new files", rates.median(), 300e6, Unit::BytesPerSecond);
    let promise = "pack_diff of 10 changed files, p50 from the call to a reference that starts,";
    report.at_most(promise, small.time.median(), 0.1, Unit::Seconds);
    let promise = "the sandbox is frozen meanwhile, p50,";
    report.at_most(promise, small.frozen.median(), 0.01, Unit::Seconds);
    report.note("time: from the call to the answer, the store durable; `and started`: until `true` has run in it");
    report.note("the new files are pieces of the corpus's tars, other ones in each round");
    report.finish(options)
}

/// Composes the stack; answers how many files it has.
fn publish_stack(lamella: &Lamella, pieces: &[Piece], scratch: &Scratch) -> anyhow::Result<u64> {
    let tree = scratch.path().join("more");
    fs::create_dir_all(tree.join("srv/more"))?;
    for index in 0..MORE_FILES {
        fs::write(tree.join(format!("srv/more/{index}")), format!("{index}\n"))?;
    }
    lamella.run(&["build", shell::text(&tree)?, "-t", "workspace/more:1"])?;
    let name = STACK.trim_start_matches("env/");
    let layers = ["--layer", cases::ENVIRONMENT, "--layer", "workspace/more:1"];
    lamella.run(&[&["env", "create", name], &layers[..]].concat())?;
    Ok(pieces.iter().map(|piece| piece.record.files).sum::<u64>() + MORE_FILES as u64)
}

/// Real bytes, cut elsewhere in each round, so that no chunk of another round is met again.
fn write_files(pieces: &[Piece], tree: &Path, shift: u64) -> anyhow::Result<()> {
    let [base, toolkit, _] = pieces else { bail!("three pieces are the corpus") };
    let mut first = File::open(base.tar())?;
    first.seek(SeekFrom::Start(shift))?;
    let mut bytes = first.chain(File::open(toolkit.tar())?);
    for index in 0..FILES {
        let folder = tree.join(format!("{}", index / 100));
        fs::create_dir_all(&folder)?;
        let mut file = File::create(folder.join(format!("{index}")))?;
        let copied = std::io::copy(&mut (&mut bytes).take(FILE_BYTES), &mut file)?;
        anyhow::ensure!(copied == FILE_BYTES, "the corpus's tars are too small");
    }
    Ok(())
}

/// Times of packs.
#[derive(Default)]
struct Series {
    time: Spread,
    started: Spread,
    frozen: Spread,
}

impl Series {
    fn show(&self, report: &mut Report, case: &str) {
        report.figure(case, "pack_diff", "time", Unit::Seconds, &self.time);
        report.figure(case, "and started", "time", Unit::Seconds, &self.started);
        report.figure(case, "frozen", "time", Unit::Seconds, &self.frozen);
    }
}

/// Packs new files; answers their bytes a second.
fn pack_written(
    lamella: &Lamella,
    node: &Node,
    tree: &Path,
    round: u32,
    series: &mut Series,
) -> anyhow::Result<f64> {
    let mut sandbox = Sandbox::create(node, cases::ENVIRONMENT)?;
    let into = format!("{}:/srv/written", sandbox.id);
    lamella.run(&["cp", shell::text(tree)?, &into])?;
    let packed = sandbox.pack(&format!("written-{round}:1"), series)?;
    anyhow::ensure!(packed.files == FILES, "{} files were packed, not {FILES}", packed.files);
    let time = series.time.samples().last().copied().context("a pack was measured")?;
    Ok((FILES * FILE_BYTES) as f64 / time)
}

/// Packs the same ten files, changed anew each time.
fn pack_changes(
    lamella: &Lamella,
    node: &Node,
    round: u32,
    series: &mut Series,
) -> anyhow::Result<()> {
    let mut sandbox = Sandbox::create(node, STACK)?;
    for index in 0..SMALL_PACKS {
        let name = format!("changed-{round}-{index}");
        lamella.run(&["exec", &sandbox.id, "--", "sh", "-c", CHANGE, &name])?;
        let packed = sandbox.pack(&format!("{name}:1"), series)?;
        anyhow::ensure!(packed.files == 10, "{} files were packed, not 10", packed.files);
    }
    Ok(())
}

/// A sandbox that waits, and the connection to its node; dropping it removes it.
struct Sandbox {
    runtime: Runtime,
    client: SandboxesClient<Channel>,
    id: String,
}

impl Sandbox {
    fn create(node: &Node, environment: &str) -> anyhow::Result<Self> {
        let runtime = node::runtime()?;
        let channel = runtime.block_on(proto::connect::unix(&node.socket("node.sock")))?;
        let mut client = SandboxesClient::new(channel);
        let request = request(environment, &["sleep", "infinity"]);
        let id = runtime.block_on(client.create(request))?.into_inner().id;
        Ok(Self { runtime, client, id })
    }

    /// Packs under a name and starts what came of it, with nothing left to write back before.
    fn pack(&mut self, name: &str, series: &mut Series) -> anyhow::Result<v1::PackDiffResponse> {
        rustix::fs::sync();
        let request = v1::PackDiffRequest {
            id: self.id.clone(),
            name: name.to_owned(),
            ..v1::PackDiffRequest::default()
        };
        let (runtime, client) = (&self.runtime, &mut self.client);
        let call = || Ok(runtime.block_on(client.pack_diff(request))?.into_inner());
        let (time, packed) = measure::timed(call)?;
        let (start, ()) = measure::timed(|| run_true(runtime, client, &format!("env/{name}")))?;
        series.time.push(time.as_secs_f64());
        series.started.push((time + start).as_secs_f64());
        series.frozen.push(Duration::from_micros(packed.frozen_us).as_secs_f64());
        Ok(packed)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // The node ends what is left when it goes.
        let request = v1::RemoveRequest { id: self.id.clone(), force: true };
        let _ = self.runtime.block_on(self.client.remove(request));
    }
}

fn request(environment: &str, argv: &[&str]) -> v1::CreateRequest {
    v1::CreateRequest {
        environment: environment.to_owned(),
        argv: argv.iter().map(|word| (*word).to_owned()).collect(),
        ..v1::CreateRequest::default()
    }
}

fn run_true(
    runtime: &Runtime,
    client: &mut SandboxesClient<Channel>,
    environment: &str,
) -> anyhow::Result<()> {
    runtime.block_on(async {
        let id = client.create(request(environment, &["true"])).await?.into_inner().id;
        let ended = client.wait(v1::WaitRequest { id: id.clone() }).await?.into_inner();
        client.remove(v1::RemoveRequest { id, force: false }).await?;
        match ended.end.and_then(|end| end.how) {
            Some(v1::end::How::Exited(0)) => Ok(()),
            how => bail!("`true` in {environment} ended with {how:?}"),
        }
    })
}
