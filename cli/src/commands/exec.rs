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
use proto::v1::{End, ExecEnded, ExecInput, ExecStart, Resize, end};
use std::io::{self, Write};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

/// Inputs that wait for the node.
const INPUTS: usize = 8;

/// What to say when a sandbox is unknown.
pub fn lost_sandbox(error: &Error) -> Option<String> {
    let lost = error.kind() == ErrorKind::NotFound && error.to_string().starts_with("no sandbox");
    lost.then(|| "`lamella ps -a` shows what there is".to_owned())
}

/// `exec`
pub async fn exec(scene: &Scene, args: Exec) -> Outcome {
    let node = start::connect(&scene.settings, Lifetime::WhileUsed, scene.out).await?;
    let start = ExecStart {
        sandbox_id: args.id,
        argv: args.argv,
        env: args.process.env,
        cwd: args.process.cwd,
        user: args.process.user,
        timeout_ms: args.timeout.map_or(0, |time| time.as_millis() as u64),
        ..ExecStart::default()
    };
    let client = SandboxesClient::new(node.channel.clone());
    end_with(stream(client, start, args.attachment, scene.out).await?)
}

/// Ends this process as the command in the sandbox ended.
pub fn end_with(code: u8) -> Outcome {
    if code == 0 { Ok(()) } else { Err(Failure::Code(code)) }
}

/// Runs a command and forwards everything until it ends; its exit code.
pub async fn stream(
    mut client: SandboxesClient<Channel>,
    start: ExecStart,
    attachment: Attachment,
    out: Output,
) -> Outcome<u8> {
    let raw = if attachment.tty { Some(RawMode::enter()?) } else { None };
    let (rows, cols) = terminal::size();
    let start = ExecStart {
        tty: attachment.tty,
        stdin: attachment.interactive || attachment.tty,
        rows,
        cols,
        ..start
    };
    let wants_input = start.stdin;
    let (inputs, receiver) = mpsc::channel(INPUTS);
    send(&inputs, Input::Start(start)).await;
    let answer = client.exec(ReceiverStream::new(receiver)).await;
    let mut outputs = answer.remedy(lost_sandbox)?.into_inner();
    let forward = tokio::spawn(forward_signals(inputs.clone(), attachment.tty));
    let feed = wants_input.then(|| tokio::spawn(feed(inputs.clone())));
    let ended = loop {
        match outputs.message().await {
            Ok(Some(message)) => match message.output {
                Some(Out::Stdout(bytes)) => print(&mut io::stdout().lock(), &bytes)?,
                Some(Out::Stderr(bytes)) => print(&mut io::stderr().lock(), &bytes)?,
                Some(Out::Ended(ended)) => break Ok(ended),
                Some(Out::StartedPid(_)) | None => {}
            },
            Ok(None) => {
                break Err(Error::new(ErrorKind::Unavailable, "the command's end was lost").into());
            }
            Err(status) => break Err(status).remedy(lost_sandbox),
        }
    };
    forward.abort();
    if let Some(feed) = feed {
        feed.abort();
    }
    drop(raw);
    finish(&ended?, out)
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

/// Signals to this process go to the command; with a terminal its size goes too.
async fn forward_signals(inputs: mpsc::Sender<ExecInput>, tty: bool) {
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
        let input = tokio::select! {
            _ = interrupt.recv() => Input::Signal(SignalKind::interrupt().as_raw_value()),
            _ = terminate.recv() => Input::Signal(SignalKind::terminate().as_raw_value()),
            _ = hangup.recv() => Input::Signal(SignalKind::hangup().as_raw_value()),
            _ = quit.recv() => Input::Signal(SignalKind::quit().as_raw_value()),
            _ = window.recv(), if tty => {
                let (rows, cols) = terminal::size();
                Input::Resize(Resize { rows, cols })
            }
        };
        if !send(&inputs, input).await {
            return;
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
