//! `run`: create, stream, end with the command's code.
//!
//! Without `-i` and `-t` the command is the sandbox's own, so that `logs` and `ps -a` know it later. With
//! them the sandbox idles and the command runs beside, because a sandbox's own command has no input.
//! `--rm` owns its sandbox: when this process dies in whatever way, the node removes it.

use super::exec::{end_with, exit_code, explain, stream};
use super::sandboxes::{self, LogPrinter};
use super::{Scene, lost_name, named};
use crate::args::{Run, Spec};
use crate::errors::{Failure, Outcome, Remedy};
use crate::node::owners::{self, Owner};
use crate::node::start::{self, Lifetime, Node};
use layer::environment::Environment;
use layer::{Error, ErrorKind};
use proto::v1::images_client::ImagesClient;
use proto::v1::resolve_response::Target as Resolved;
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::{
    CreateRequest, ExecStart, LogsRequest, RemoveRequest, ResolveRequest, Sandbox, State,
    StopRequest, WaitRequest,
};
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tonic::transport::Channel;

/// The time between the polite signal and the kill after Ctrl-C.
const GRACE: Duration = Duration::from_secs(10);

/// `run`
pub async fn run(scene: &Scene, args: Run) -> Outcome {
    let lifetime = if args.rm { Lifetime::WhileUsed } else { Lifetime::UntilDown };
    let node = start::connect(&scene.settings, lifetime, scene.out).await?;
    let argv = command(&node, &args.spec).await?;
    let attached = args.attachment.interactive || args.attachment.tty;
    let mut request = sandboxes::request(&args.spec)?;
    request.argv = if attached { Vec::new() } else { argv.clone() };
    let owner = if args.rm { Some(Owner::register(&scene.settings.run("owners"))?) } else { None };
    if let Some(owner) = &owner {
        request.labels.insert(owners::LABEL.to_owned(), owner.key().to_owned());
    }
    let mut client = SandboxesClient::new(node.channel.clone());
    let mut interrupts = Interrupts::new()?;
    let sandbox = born(&client, request, &mut interrupts).await?;
    let code = if attached {
        drop(interrupts);
        let start = ExecStart { sandbox_id: sandbox.id.clone(), argv, ..ExecStart::default() };
        let code = stream(client.clone(), start, args.attachment, scene.out).await;
        if !args.rm {
            stop(&mut client, &sandbox.id, GRACE).await?;
        }
        code
    } else {
        follow(scene, &mut client, &sandbox, &mut interrupts).await
    };
    if let Some(owner) = owner {
        client.remove(RemoveRequest { id: sandbox.id, force: true }).await?;
        owner.release();
    }
    end_with(code?)
}

/// The command to run: what was asked for, or what the environment says. The entry point stands before
/// both, as the OCI image specification has it.
async fn command(node: &Node, spec: &Spec) -> Outcome<Vec<String>> {
    let name = named(&spec.reference)?;
    let request = ResolveRequest { name: name.clone() };
    let answer = ImagesClient::new(node.channel.clone()).resolve(request).await;
    let answer = answer.remedy(lost_name)?.into_inner();
    let config = match answer.target {
        Some(Resolved::EnvId(_)) => Environment::decode(&answer.environment_document)?.config,
        _ => layer::environment::RunConfig::default(),
    };
    let own = if spec.argv.is_empty() { config.cmd } else { spec.argv.clone() };
    let argv: Vec<String> = config.entrypoint.into_iter().chain(own).collect();
    if argv.is_empty() {
        return Err(Failure::Usage(format!("{name} has no command of its own; add -- CMD")));
    }
    Ok(argv)
}

/// Ctrl-C and the polite kill.
struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupts {
    fn new() -> Outcome<Self> {
        let listen = |kind| signal(kind).map_err(|error| Error::io("listen for signals", error));
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// Creates the sandbox. One that is born after Ctrl-C is removed at once.
async fn born(
    client: &SandboxesClient<Channel>,
    request: CreateRequest,
    interrupts: &mut Interrupts,
) -> Outcome<Sandbox> {
    let mut creator = client.clone();
    let mut create = std::pin::pin!(creator.create(request));
    tokio::select! {
        created = &mut create => return Ok(created.remedy(lost_name)?.into_inner()),
        () = interrupts.next() => {}
    }
    if let Ok(Ok(late)) = tokio::time::timeout(GRACE, create).await {
        let id = late.into_inner().id;
        client.clone().remove(RemoveRequest { id, force: true }).await?;
    }
    Err(Failure::INTERRUPTED)
}

async fn stop(client: &mut SandboxesClient<Channel>, id: &str, grace: Duration) -> Outcome {
    let request = StopRequest { id: id.to_owned(), grace_ms: grace.as_millis() as u64 };
    client.stop(request).await?;
    Ok(())
}

/// Prints the output of the sandbox's own command until it ends. Ctrl-C stops the sandbox, a second one
/// at once.
async fn follow(
    scene: &Scene,
    client: &mut SandboxesClient<Channel>,
    sandbox: &Sandbox,
    interrupts: &mut Interrupts,
) -> Outcome<u8> {
    let request = LogsRequest { id: sandbox.id.clone(), follow: true };
    let mut logs = client.logs(request).await?.into_inner();
    let mut printer = LogPrinter::new(scene.out);
    let mut interrupted = 0_u32;
    loop {
        tokio::select! {
            chunk = logs.message() => {
                let Some(chunk) = chunk? else { break };
                printer.print(&chunk)?;
            }
            () = interrupts.next() => {
                interrupted += 1;
                let grace = if interrupted == 1 { GRACE } else { Duration::ZERO };
                let (mut client, id) = (client.clone(), sandbox.id.clone());
                tokio::spawn(async move {
                    if let Err(Failure::Failed { error, .. }) = stop(&mut client, &id, grace).await {
                        tracing::warn!(error = error.chain(), "stop the sandbox");
                    }
                });
            }
        }
    }
    printer.finish();
    let ended = client.wait(WaitRequest { id: sandbox.id.clone() }).await?.into_inner();
    if interrupted > 0 {
        return Err(Failure::INTERRUPTED);
    }
    if ended.state() == State::Failed || ended.state() == State::Lost {
        let text = format!("sandbox {}: {}", ended.id, ended.reason);
        return Err(Error::new(ErrorKind::Unavailable, text).into());
    }
    if let Some(how) = ended.end.as_ref().and_then(|end| end.how.as_ref()) {
        explain(how, scene.out);
    }
    Ok(exit_code(ended.end.as_ref()))
}
