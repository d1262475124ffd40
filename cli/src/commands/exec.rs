//! `exec`, and the streaming of any command in a sandbox: input, output, signals, size, end.

use super::Scene;
use crate::args::{Attachment, Exec};
use crate::errors::{Failure, Outcome, Remedy};
use crate::node::start::{self, Lifetime};
use crate::output::{Output, output_failure};
use crate::terminal::{self, RawMode};
use layer::{Error, ErrorKind};
use proto::v1::exec_input::Input;
use proto::v1::exec_output::Output as Out;
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::{
    AttachStart, End, ExecEnded, ExecInput, ExecOutput, ExecStart, Reach, Resize,
    SignalCommandRequest, end,
};
use serde::Serialize;
use std::io::{self, Write};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

/// Inputs that wait for the node.
const INPUTS: usize = 8;

/// What to say when a sandbox is unknown.
pub fn lost_sandbox(error: &Error) -> Option<String> {
    let lost = error.kind() == ErrorKind::NotFound && error.to_string().starts_with("no sandbox");
    lost.then(|| "`lamella ps -a` shows what there is".to_owned())
}

/// What to say when a sandbox or a command is unknown.
pub fn lost_command(error: &Error) -> Option<String> {
    let lost = error.kind() == ErrorKind::NotFound && error.to_string().starts_with("no command");
    let commands = || "`lamella commands SANDBOX` shows what there is".to_owned();
    lost.then(commands).or_else(|| lost_sandbox(error))
}

/// How long a command is looked for again after its node went away, as it does for an upgrade.
const COME_BACK: Duration = Duration::from_secs(10);
/// How often.
const COME_BACK_EVERY: Duration = Duration::from_millis(200);

/// `exec`
pub async fn exec(scene: &Scene, args: Exec) -> Outcome {
    let lifetime = if args.background { Lifetime::UntilDown } else { Lifetime::WhileUsed };
    let node = start::connect(&scene.settings, lifetime, scene.out).await?;
    let start = ExecStart {
        sandbox_id: args.id,
        argv: args.argv,
        env: args.process.env,
        cwd: args.process.cwd,
        user: args.process.user,
        timeout_ms: args.timeout.map_or(0, |time| time.as_millis() as u64),
        output_limit_bytes: args.output_limit.unwrap_or(0),
        kept_bytes: args.keep.unwrap_or(0),
        background: args.background,
        ..ExecStart::default()
    };
    let client = SandboxesClient::new(node.channel.clone());
    if args.background {
        return background(scene, client, start, args.attachment).await;
    }
    end_with(stream(client, start, args.attachment, scene.out).await?)
}

/// Ends this process as the command in the sandbox ended.
pub fn end_with(code: u8) -> Outcome {
    if code == 0 { Ok(()) } else { Err(Failure::Code(code)) }
}

/// A command that goes on by itself.
#[derive(Debug, Serialize)]
struct InBackground {
    id: String,
}

async fn background(
    scene: &Scene,
    mut client: SandboxesClient<Channel>,
    start: ExecStart,
    attachment: Attachment,
) -> Outcome {
    let (rows, cols) = terminal::size();
    let stdin = attachment.interactive || attachment.tty;
    let start = ExecStart { tty: attachment.tty, stdin, rows, cols, ..start };
    let input = ExecInput { input: Some(Input::Start(start)) };
    let answer = client.exec(tokio_stream::iter([input])).await;
    let mut outputs = answer.remedy(lost_sandbox)?.into_inner();
    let mut id = String::new();
    while let Some(output) = outputs.message().await.remedy(lost_sandbox)? {
        match output.output {
            Some(Out::CommandId(given)) => id = given,
            Some(Out::Ended(ended)) => return end_with(finish(&ended, scene.out)?),
            _ => {}
        }
    }
    let started = InBackground { id };
    scene.out.result(&started, || started.id.clone())
}

/// Runs a command and forwards everything until it ends; its exit code.
pub async fn stream(
    client: SandboxesClient<Channel>,
    start: ExecStart,
    attachment: Attachment,
    out: Output,
) -> Outcome<u8> {
    let (rows, cols) = terminal::size();
    let start = ExecStart {
        tty: attachment.tty,
        stdin: attachment.interactive || attachment.tty,
        rows,
        cols,
        ..start
    };
    let how = Follow { attachment, forwards_signals: true };
    let sandbox = start.sandbox_id.clone();
    converse(client, Begin::Exec(start), sandbox, how, out).await
}

/// How a command that runs already is followed.
#[derive(Debug, Clone, Copy)]
pub struct Follow {
    /// Input and terminal.
    pub attachment: Attachment,
    /// Whether signals to this process are meant for the command.
    pub forwards_signals: bool,
}

impl Default for Follow {
    fn default() -> Self {
        let attachment = Attachment { interactive: false, tty: false };
        Self { attachment, forwards_signals: false }
    }
}

/// Shows the output of a command that runs already or has ended; its exit code, or zero while it runs.
pub async fn follow(
    client: SandboxesClient<Channel>,
    start: AttachStart,
    how: Follow,
    out: Output,
) -> Outcome<u8> {
    let sandbox = start.sandbox_id.clone();
    converse(client, Begin::Attach(start), sandbox, how, out).await
}

/// The first thing said of a command.
enum Begin {
    Exec(ExecStart),
    Attach(AttachStart),
}

/// What is known of the command that this process follows.
#[derive(Debug, Clone, Default)]
struct Known {
    sandbox: String,
    command: Arc<OnceLock<String>>,
}

async fn converse(
    mut client: SandboxesClient<Channel>,
    begin: Begin,
    sandbox: String,
    how: Follow,
    out: Output,
) -> Outcome<u8> {
    let attachment = how.attachment;
    let raw = if attachment.tty { Some(RawMode::enter()?) } else { None };
    let (inputs, receiver) = mpsc::channel(INPUTS);
    let known = Known { sandbox, ..Known::default() };
    let (answer, mut offset, follows) = match begin {
        Begin::Exec(start) => {
            send(&inputs, Input::Start(start)).await;
            (client.exec(ReceiverStream::new(receiver)).await, 0, true)
        }
        Begin::Attach(start) => {
            let (offset, follows) = (start.offset, start.follow);
            send(&inputs, Input::Attach(start)).await;
            (client.attach(ReceiverStream::new(receiver)).await, offset, follows)
        }
    };
    let mut outputs = answer.remedy(lost_command)?.into_inner();
    let forward = how.forwards_signals.then(|| {
        tokio::spawn(forward_signals(inputs.clone(), client.clone(), known.clone(), attachment.tty))
    });
    let wants_input = attachment.interactive || attachment.tty;
    let feed = wants_input.then(|| tokio::spawn(feed(inputs.clone())));
    let mut dropped = 0;
    let ended = loop {
        match outputs.message().await {
            Ok(Some(message)) => match message.output {
                Some(Out::Stdout(bytes)) => {
                    offset += bytes.len() as u64;
                    print(&mut io::stdout().lock(), &bytes)?;
                }
                Some(Out::Stderr(bytes)) => {
                    offset += bytes.len() as u64;
                    print(&mut io::stderr().lock(), &bytes)?;
                }
                Some(Out::DroppedBytes(bytes)) => {
                    offset += bytes;
                    dropped += bytes;
                }
                Some(Out::CommandId(id)) => _ = known.command.set(id),
                Some(Out::Ended(ended)) => break Ok(Some(ended)),
                Some(Out::StartedPid(_)) | None => {}
            },
            Ok(None) if !follows => break Ok(None),
            // The node went away, perhaps to become another program: the command went on.
            lost => match come_back(&mut client, &known, offset).await {
                Some(again) => outputs = again,
                None => break lost_end(lost.map(drop), &known),
            },
        }
    };
    if let Some(forward) = forward {
        forward.abort();
    }
    if let Some(feed) = feed {
        feed.abort();
    }
    drop(raw);
    if dropped > 0 {
        out.notice(&format!("{dropped} bytes of output were no longer kept"));
    }
    ended?.map_or(Ok(0), |ended| finish(&ended, out))
}

fn lost_end(
    lost: std::result::Result<(), tonic::Status>,
    known: &Known,
) -> Outcome<Option<ExecEnded>> {
    let remedy = |_: &Error| {
        let id = known.command.get()?;
        Some(format!("if it goes on: `lamella attach {} {id}`", known.sandbox))
    };
    match lost {
        Ok(()) => {
            let lost = Error::new(ErrorKind::Unavailable, "the command's end was lost");
            Err(lost).remedy(remedy)
        }
        Err(status) => {
            let lost: std::result::Result<_, tonic::Status> = Err(status);
            lost.remedy(|error| lost_sandbox(error).or_else(|| remedy(error)))
        }
    }
}

/// The rest of the output, from the next node.
async fn come_back(
    client: &mut SandboxesClient<Channel>,
    known: &Known,
    offset: u64,
) -> Option<Streaming<ExecOutput>> {
    let command_id = known.command.get()?.clone();
    let start = AttachStart {
        sandbox_id: known.sandbox.clone(),
        command_id,
        offset,
        follow: true,
        ..AttachStart::default()
    };
    let deadline = Instant::now() + COME_BACK;
    while Instant::now() < deadline {
        let input = ExecInput { input: Some(Input::Attach(start.clone())) };
        match client.attach(tokio_stream::iter([input])).await {
            Ok(answer) => return Some(answer.into_inner()),
            Err(status) if status.code() == tonic::Code::NotFound => return None,
            Err(_) => tokio::time::sleep(COME_BACK_EVERY).await,
        }
    }
    None
}

async fn send(inputs: &mpsc::Sender<ExecInput>, input: Input) -> bool {
    inputs.send(ExecInput { input: Some(input) }).await.is_ok()
}

/// Standard input, then its end.
async fn feed(inputs: mpsc::Sender<ExecInput>) {
    let mut chunks = terminal::standard_input();
    while let Some(chunk) = chunks.recv().await {
        if !send(&inputs, Input::Stdin(chunk)).await {
            return;
        }
    }
    send(&inputs, Input::CloseStdin(true)).await;
}

/// Signals to this process go to the command's process group, past input that waits; with a terminal its
/// size goes too.
async fn forward_signals(
    inputs: mpsc::Sender<ExecInput>,
    mut client: SandboxesClient<Channel>,
    known: Known,
    tty: bool,
) {
    let kinds = [
        SignalKind::interrupt(),
        SignalKind::terminate(),
        SignalKind::hangup(),
        SignalKind::quit(),
    ];
    let listeners = (kinds.map(signal), signal(SignalKind::window_change()));
    let ([Ok(mut interrupt), Ok(mut terminate), Ok(mut hangup), Ok(mut quit)], Ok(mut window)) =
        listeners
    else {
        tracing::warn!("signals cannot be forwarded");
        return;
    };
    loop {
        let kind = tokio::select! {
            _ = interrupt.recv() => SignalKind::interrupt(),
            _ = terminate.recv() => SignalKind::terminate(),
            _ = hangup.recv() => SignalKind::hangup(),
            _ = quit.recv() => SignalKind::quit(),
            _ = window.recv(), if tty => {
                let (rows, cols) = terminal::size();
                if !send(&inputs, Input::Resize(Resize { rows, cols })).await {
                    return;
                }
                continue;
            }
        };
        let Some(command_id) = known.command.get().cloned() else { continue };
        let request = SignalCommandRequest {
            sandbox_id: known.sandbox.clone(),
            command_id,
            signal: kind.as_raw_value(),
            reach: Reach::Group.into(),
        };
        if let Err(status) = client.signal_command(request).await {
            tracing::info!(%status, "the signal did not arrive");
        }
    }
}

/// Passes a command's output on, byte for byte.
pub fn print(to: &mut impl Write, bytes: &[u8]) -> Outcome {
    to.write_all(bytes).and_then(|()| to.flush()).map_err(output_failure)
}

fn finish(ended: &ExecEnded, out: Output) -> Outcome<u8> {
    if ended.truncated_bytes > 0 {
        out.notice(&format!("{} bytes of output were cut", ended.truncated_bytes));
    }
    if !ended.message.is_empty() {
        out.notice(&ended.message);
    }
    let code = u8::try_from(ended.exit_code).unwrap_or(1);
    match &ended.end {
        Some(End { how: Some(how) }) if ended.message.is_empty() => {
            explain(how, out);
            Ok(code)
        }
        _ => Ok(code),
    }
}

/// Says how a command ended when its exit code does not.
pub fn explain(how: &end::How, out: Output) {
    match how {
        end::How::Exited(_) | end::How::Signal(_) | end::How::Killed(_) => {}
        end::How::Oom(_) => out.notice("ended: out of memory; --memory gives more"),
        end::How::Timeout(_) => out.notice("ended: its time was over"),
        end::How::DiskFull(_) => out.notice("ended: its disk is full; --disk gives more"),
        end::How::Lost(reason) => out.notice(&format!("lost: {reason}")),
    }
}

/// The exit code that stands for an end, as shells count.
pub fn exit_code(end: Option<&End>) -> u8 {
    match end.and_then(|end| end.how.as_ref()) {
        Some(end::How::Exited(code)) => u8::try_from(*code).unwrap_or(1),
        Some(end::How::Signal(number)) => u8::try_from(128 + number).unwrap_or(1),
        Some(end::How::Oom(_) | end::How::Killed(_)) => 137,
        Some(end::How::Timeout(_)) => 124,
        Some(end::How::Lost(_) | end::How::DiskFull(_)) | None => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_have_the_codes_that_shells_give() {
        let code = |how| exit_code(Some(&End { how: Some(how) }));
        assert_eq!(code(end::How::Exited(7)), 7);
        assert_eq!(code(end::How::Signal(9)), 137);
        assert_eq!(code(end::How::Oom(true)), 137);
        assert_eq!(code(end::How::Timeout(true)), 124);
        assert_eq!(exit_code(None), 1);
    }
}
