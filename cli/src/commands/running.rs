//! Commands that run in a sandbox already: list, attach, tail, signal, wait.

use super::Scene;
use super::exec::{Follow, end_with, exit_code, follow, lost_command};
use super::sandboxes::show_end;
use crate::args::{Attach, Commands, OneCommand, Signal, Tail};
use crate::errors::{Outcome, Remedy};
use crate::node::start::{self, Lifetime, Node};
use crate::output::Row;
use crate::quantity::{show_bytes, show_time};
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::{
    self, AttachStart, ListCommandsRequest, Reach, SignalCommandRequest, WaitCommandRequest,
};
use serde::Serialize;
use tonic::transport::Channel;

#[derive(Debug, Serialize)]
struct Command {
    id: String,
    state: &'static str,
    background: bool,
    tty: bool,
    pid: u32,
    started: String,
    started_unix_ns: u64,
    end: Option<String>,
    exit_code: Option<i32>,
    message: String,
    output_bytes: u64,
    first_kept_byte: u64,
    truncated_bytes: u64,
    argv: Vec<String>,
}

impl Command {
    fn new(command: v1::Command) -> Self {
        let ended = command.ended;
        Self {
            state: if ended.is_some() { "ended" } else { "running" },
            end: ended.as_ref().and_then(|ended| ended.end.as_ref()).map(show_end),
            exit_code: ended.as_ref().map(|ended| ended.exit_code),
            truncated_bytes: ended.as_ref().map_or(0, |ended| ended.truncated_bytes),
            message: ended.map(|ended| ended.message).unwrap_or_default(),
            started: show_time(command.started_unix_ns),
            id: command.id,
            background: command.background,
            tty: command.tty,
            pid: command.pid,
            started_unix_ns: command.started_unix_ns,
            output_bytes: command.output_bytes,
            first_kept_byte: command.first_kept_byte,
            argv: command.argv,
        }
    }
}

impl Row for Command {
    const HEADER: &'static [&'static str] =
        &["ID", "STATE", "PID", "COMMAND", "STARTED", "OUTPUT", "END"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.id.clone(),
            self.state.to_owned(),
            self.pid.to_string(),
            self.argv.join(" ").chars().take(40).collect(),
            self.started.clone(),
            show_bytes(self.output_bytes),
            self.end.clone().unwrap_or_default(),
        ]
    }
}

async fn connect(scene: &Scene) -> Outcome<(Node, SandboxesClient<Channel>)> {
    let node = start::connect(&scene.settings, Lifetime::WhileUsed, scene.out).await?;
    let client = SandboxesClient::new(node.channel.clone());
    Ok((node, client))
}

/// `commands`
pub async fn commands(scene: &Scene, args: Commands) -> Outcome {
    let (_node, mut client) = connect(scene).await?;
    let request = ListCommandsRequest { sandbox_id: args.sandbox };
    let list = client.list_commands(request).await.remedy(lost_command)?.into_inner();
    let rows: Vec<_> = list.commands.into_iter().map(Command::new).collect();
    scene.out.listing(&rows)
}

fn attach_start(which: OneCommand) -> AttachStart {
    let OneCommand { sandbox, command } = which;
    AttachStart { sandbox_id: sandbox, command_id: command, ..AttachStart::default() }
}

/// `attach`
pub async fn attach(scene: &Scene, args: Attach) -> Outcome {
    let (_node, client) = connect(scene).await?;
    let start = AttachStart { offset: args.from, follow: true, ..attach_start(args.which) };
    let how = Follow { attachment: args.attachment, forwards_signals: false };
    end_with(follow(client, start, how, scene.out).await?)
}

/// `tail`
pub async fn tail(scene: &Scene, args: Tail) -> Outcome {
    let (_node, client) = connect(scene).await?;
    let start = AttachStart {
        tail_bytes: Some(args.bytes),
        follow: args.follow,
        ..attach_start(args.which)
    };
    let how = Follow::default();
    follow(client, start, how, scene.out).await.map(drop)
}

/// `signal`
pub async fn signal(scene: &Scene, args: Signal) -> Outcome {
    let (_node, mut client) = connect(scene).await?;
    let reach = match (args.group, args.leader) {
        (true, _) => Reach::Group,
        (_, true) => Reach::Leader,
        _ => Reach::Tree,
    };
    let request = SignalCommandRequest {
        sandbox_id: args.which.sandbox,
        command_id: args.which.command,
        signal: args.signal,
        reach: reach.into(),
    };
    let command =
        Command::new(client.signal_command(request).await.remedy(lost_command)?.into_inner());
    scene.out.result(&command, || command.id.clone())
}

/// `wait`
pub async fn wait(scene: &Scene, args: OneCommand) -> Outcome {
    let (_node, mut client) = connect(scene).await?;
    let request = WaitCommandRequest { sandbox_id: args.sandbox, command_id: args.command };
    let command = client.wait_command(request).await.remedy(lost_command)?.into_inner();
    let code = command.ended.as_ref().map_or(1, |ended| {
        u8::try_from(ended.exit_code).unwrap_or_else(|_| exit_code(ended.end.as_ref()))
    });
    let command = Command::new(command);
    scene.out.result(&command, || command.end.clone().unwrap_or_default())?;
    end_with(code)
}
