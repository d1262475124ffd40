//! The life of sandboxes: create, list, logs, stop, remove, pause, resume.

use super::exec::{exit_code, lost_sandbox, print};
use super::mount::wire_plane;
use super::{Scene, lost_name, named};
use crate::args::{Backend, Create, Ids, Logs, Protected, Ps, Rm, SandboxProfile, Spec, Stop};
use crate::errors::{Failure, Outcome, Remedy};
use crate::node::start::{self, Lifetime, Node};
use crate::output::{Output, Row};
use crate::quantity::{show_bytes, show_time};
use layer::{EnvId, LayerId, Result};
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::{
    self, CreateRequest, End, Limits, ListRequest, LogChunk, LogsRequest, PauseRequest,
    RemoveRequest, ResumeRequest, State, StopRequest, end,
};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use tonic::transport::Channel;

/// The request that a command line asks for, without a command.
pub fn request(spec: &Spec) -> Outcome<CreateRequest> {
    let backend = match spec.backend {
        Backend::Container => v1::Backend::Container,
        Backend::Fncall => v1::Backend::Fncall,
        Backend::Microvm => v1::Backend::Microvm,
        Backend::Vm => v1::Backend::Vm,
    };
    let profile = match spec.profile {
        SandboxProfile::Strict => "strict",
        SandboxProfile::Default => "default",
        SandboxProfile::Build => "build",
    };
    let protected = |protected: &Protected| {
        let Protected { path, hidden } = protected.clone();
        v1::ProtectedPath { path, hidden }
    };
    let mut request = CreateRequest {
        environment: named(&spec.reference)?,
        backend: backend.into(),
        limits: Some(Limits {
            memory_bytes: spec.memory.unwrap_or(0),
            cpu_millis: spec.cpus.unwrap_or(0),
            pids: spec.pids.unwrap_or(0),
            writable_bytes: spec.disk.unwrap_or(0),
            inodes: spec.inodes.unwrap_or(0),
            open_files: spec.open_files.unwrap_or(0),
            read_bytes_per_s: spec.disk_read.unwrap_or(0),
            write_bytes_per_s: spec.disk_write.unwrap_or(0),
            cpu_weight: spec.cpu_weight.unwrap_or(0),
            cpuset: spec.cpuset.clone().unwrap_or_default(),
        }),
        env: spec.process.env.clone(),
        cwd: spec.process.cwd.clone(),
        user: spec.process.user.clone(),
        argv: spec.argv.clone(),
        labels: spec.labels.iter().cloned().collect(),
        idempotency_key: String::new(),
        hostname: spec.hostname.clone(),
        plane: wire_plane(spec.plane).into(),
        network: Some(super::network::policy(&spec.network)?),
        profile: profile.to_owned(),
        protected_paths: spec.protect.iter().map(protected).collect(),
        ..CreateRequest::default()
    };
    super::lifetime::ask(&mut request, &spec.lifetime);
    Ok(request)
}

/// One sandbox.
#[derive(Debug, Serialize)]
pub struct Sandbox {
    /// Its name.
    pub id: String,
    state: String,
    reason: String,
    backend: String,
    environment: String,
    env_id: Option<EnvId>,
    layers: Vec<LayerId>,
    created: String,
    created_unix_ns: u64,
    init_pid: u32,
    end: Option<String>,
    exit_code: Option<u8>,
    labels: BTreeMap<String, String>,
    memory_bytes: u64,
    argv: Vec<String>,
    expires: Option<String>,
    owner: Option<String>,
    idle_timeout_ms: u64,
}

impl Sandbox {
    /// From a message.
    pub fn new(sandbox: v1::Sandbox) -> Result<Self> {
        let layers = sandbox.layer_ids.iter().map(|id| LayerId::from_slice(id));
        Ok(Self {
            state: lower(sandbox.state().as_str_name(), "STATE_"),
            backend: lower(sandbox.backend().as_str_name(), "BACKEND_"),
            env_id: EnvId::from_slice(&sandbox.env_id).ok(),
            layers: layers.collect::<Result<_>>()?,
            created: show_time(sandbox.created_unix_ns),
            end: sandbox.end.as_ref().map(show_end),
            exit_code: sandbox.end.as_ref().map(|end| exit_code(Some(end))),
            id: sandbox.id,
            reason: sandbox.reason,
            environment: sandbox.environment,
            created_unix_ns: sandbox.created_unix_ns,
            init_pid: sandbox.init_pid,
            labels: sandbox.labels.into_iter().collect(),
            memory_bytes: sandbox.memory_bytes,
            argv: sandbox.argv,
            expires: (sandbox.expires_unix_ns > 0).then(|| show_time(sandbox.expires_unix_ns)),
            owner: (!sandbox.owner.is_empty()).then_some(sandbox.owner),
            idle_timeout_ms: sandbox.idle_timeout_ms,
        })
    }
}

impl Row for Sandbox {
    const HEADER: &'static [&'static str] =
        &["ID", "STATE", "ENVIRONMENT", "COMMAND", "CREATED", "MEMORY", "END"];

    fn cells(&self) -> Vec<String> {
        let command: String = self.argv.join(" ").chars().take(40).collect();
        let end = match (&self.end, self.reason.is_empty()) {
            (_, false) => self.reason.clone(),
            (Some(end), true) => end.clone(),
            (None, true) => String::new(),
        };
        vec![
            self.id.clone(),
            self.state.clone(),
            self.environment.clone(),
            command,
            self.created.clone(),
            if self.memory_bytes > 0 { show_bytes(self.memory_bytes) } else { String::new() },
            end,
        ]
    }
}

fn lower(name: &str, prefix: &str) -> String {
    name.strip_prefix(prefix).unwrap_or(name).to_ascii_lowercase()
}

/// One word, or two.
pub fn show_end(end: &End) -> String {
    match &end.how {
        Some(end::How::Exited(code)) => format!("exited({code})"),
        Some(end::How::Signal(number)) => format!("signal({number})"),
        Some(end::How::Oom(_)) => "oom".to_owned(),
        Some(end::How::Timeout(_)) => "timeout".to_owned(),
        Some(end::How::Killed(_)) => "killed".to_owned(),
        Some(end::How::Lost(reason)) => format!("lost: {reason}"),
        Some(end::How::DiskFull(_)) => "disk_full".to_owned(),
        None => "unknown".to_owned(),
    }
}

/// The node of this data directory, started if it does not run.
pub async fn connect(
    scene: &Scene,
    lifetime: Lifetime,
) -> Outcome<(Node, SandboxesClient<Channel>)> {
    let node = start::connect(&scene.settings, lifetime, scene.out).await?;
    let client = SandboxesClient::new(node.channel.clone());
    Ok((node, client))
}

/// `create`
pub async fn create(scene: &Scene, args: Create) -> Outcome {
    let mut request = request(&args.spec)?;
    request.idempotency_key = args.idempotency_key.unwrap_or_default();
    if let Some(count) = args.count {
        return super::lifetime::create_many(scene, request, count).await;
    }
    let (_node, mut client) = connect(scene, Lifetime::UntilDown).await?;
    let sandbox = client.create(request).await.remedy(lost_name)?.into_inner();
    let sandbox = Sandbox::new(sandbox)?;
    scene.out.result(&sandbox, || sandbox.id.clone())
}

/// `ps`
pub async fn ps(scene: &Scene, args: &Ps) -> Outcome {
    let folder = scene.settings.data().join("sandboxes");
    let any = std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some());
    if !any && start::running(&scene.settings).await?.is_none() {
        return scene.out.listing::<Sandbox>(&[]);
    }
    let (_node, mut client) = connect(scene, Lifetime::WhileUsed).await?;
    let labels = args.labels.iter().cloned().collect();
    let list = client.list(ListRequest { all: args.all, labels }).await?.into_inner();
    let rows = list.sandboxes.into_iter().map(Sandbox::new).collect::<Result<Vec<_>>>()?;
    scene.out.listing(&rows)
}

/// Prints a log, and says at its end how much of it was cut.
pub struct LogPrinter {
    out: Output,
    truncated_bytes: u64,
}

impl LogPrinter {
    /// Nothing was printed yet.
    pub fn new(out: Output) -> Self {
        Self { out, truncated_bytes: 0 }
    }

    /// Passes a chunk on, to the stream that it came from.
    pub fn print(&mut self, chunk: &LogChunk) -> Outcome {
        self.truncated_bytes = self.truncated_bytes.max(chunk.truncated_bytes);
        if chunk.stderr {
            print(&mut io::stderr().lock(), &chunk.data)
        } else {
            print(&mut io::stdout().lock(), &chunk.data)
        }
    }

    /// Says what is missing, if something is.
    pub fn finish(self) {
        if self.truncated_bytes > 0 {
            self.out.notice(&format!("{} bytes of output were cut", self.truncated_bytes));
        }
    }
}

/// `logs`
pub async fn logs(scene: &Scene, args: &Logs) -> Outcome {
    let (_node, mut client) = connect(scene, Lifetime::WhileUsed).await?;
    let request = LogsRequest { id: args.id.clone(), follow: args.follow };
    let mut logs = client.logs(request).await.remedy(lost_sandbox)?.into_inner();
    let mut printer = LogPrinter::new(scene.out);
    while let Some(chunk) = logs.message().await? {
        printer.print(&chunk)?;
    }
    printer.finish();
    Ok(())
}

/// What happened to one of several sandboxes.
#[derive(Debug, Serialize)]
struct Done {
    id: String,
    state: String,
}

/// Does something to each sandbox, also when one of them fails; the first failure is the outcome.
async fn each<F>(scene: &Scene, ids: &[String], mut act: F) -> Outcome
where
    F: AsyncFnMut(String) -> Outcome<v1::Sandbox>,
{
    let (mut done, mut failure) = (Vec::new(), None::<Failure>);
    for id in ids {
        match act(id.clone()).await.remedy(lost_sandbox) {
            Ok(sandbox) => done.push(Done {
                state: lower(sandbox.state().as_str_name(), "STATE_"),
                id: sandbox.id,
            }),
            Err(error) if failure.is_none() => failure = Some(error),
            Err(error) => error.report(false, scene.out.is_json()),
        }
    }
    if !done.is_empty() {
        let ids: Vec<&str> = done.iter().map(|done| done.id.as_str()).collect();
        scene.out.result(&done, || ids.join("\n"))?;
    }
    failure.map_or(Ok(()), Err)
}

/// `stop`
pub async fn stop(scene: &Scene, args: &Stop) -> Outcome {
    let (_node, client) = connect(scene, Lifetime::WhileUsed).await?;
    let grace_ms = args.grace.as_millis() as u64;
    each(scene, &args.which.ids, async |id| {
        Ok(client.clone().stop(StopRequest { id, grace_ms }).await?.into_inner())
    })
    .await
}

/// `rm`
pub async fn rm(scene: &Scene, args: &Rm) -> Outcome {
    let (_node, client) = connect(scene, Lifetime::WhileUsed).await?;
    let force = args.force;
    each(scene, &args.which.ids, async |id| {
        let asked = client.clone().remove(RemoveRequest { id: id.clone(), force }).await;
        asked.remedy(|error| {
            (error.kind() == layer::ErrorKind::Busy).then(|| "-f stops it first".to_owned())
        })?;
        Ok(v1::Sandbox { id, state: State::Gone.into(), ..v1::Sandbox::default() })
    })
    .await
}

/// `pause`
pub async fn pause(scene: &Scene, args: &Ids) -> Outcome {
    let (_node, client) = connect(scene, Lifetime::UntilDown).await?;
    each(scene, &args.ids, async |id| {
        Ok(client.clone().pause(PauseRequest { id }).await?.into_inner())
    })
    .await
}

/// `resume`
pub async fn resume(scene: &Scene, args: &Ids) -> Outcome {
    let (_node, client) = connect(scene, Lifetime::UntilDown).await?;
    each(scene, &args.ids, async |id| {
        Ok(client.clone().resume(ResumeRequest { id }).await?.into_inner())
    })
    .await
}
