//! Clients of a command that runs already: its output from an offset on, input and signals to it.

use super::command::Command;
use super::output::Piece;
use crate::backends::Instance;
use crate::sandbox::Sandbox;
use layer::{Error, ErrorKind, Result};
use proto::v1::exec_input::Input;
use proto::v1::exec_output::Output as Out;
use proto::v1::{AttachStart, ExecInput, ExecOutput, LogChunk};
use std::sync::Arc;
use tokio::sync::mpsc;

/// Messages that wait for a client.
const QUEUE: usize = 8;

/// Output of a command from an offset on, and its end if it has ended or `follow` is set. Never ends the command.
pub fn attach(
    sandbox: &Arc<Sandbox>,
    start: &AttachStart,
    inputs: mpsc::Receiver<ExecInput>,
) -> Result<mpsc::Receiver<ExecOutput>> {
    let command = sandbox.commands.find(&start.command_id)?;
    let (first, end) = command.output.range();
    let offset = match start.tail_bytes {
        Some(bytes) => end.saturating_sub(bytes).max(first),
        None => start.offset,
    };
    let (outputs, receiver) = mpsc::channel(QUEUE);
    let attached = (command.attach(), sandbox.activity.begin());
    let feeder = sandbox
        .instance()
        .map(|instance| tokio::spawn(feed(inputs, Arc::clone(&command), instance)));
    let follow = start.follow;
    tokio::spawn(async move {
        let id = Out::CommandId(command.id().to_owned());
        let pid = Out::StartedPid(command.record().inner_pid as u32);
        let send = async |output| outputs.send(ExecOutput { output: Some(output) }).await.is_ok();
        if send(id).await && send(pid).await {
            let mut pieces = pieces(&command, offset, follow);
            while let Some(piece) = pieces.recv().await {
                let output = match piece {
                    Piece::Data(false, data) => Out::Stdout(data.to_vec()),
                    Piece::Data(true, data) => Out::Stderr(data.to_vec()),
                    Piece::Dropped(bytes) => Out::DroppedBytes(bytes),
                };
                if !send(output).await {
                    break;
                }
            }
            if let Some(ended) = command.ended().filter(|_| command.is_over()) {
                send(Out::Ended(ended.wire())).await;
            }
        }
        if let Some(feeder) = feeder {
            feeder.abort();
        }
        drop(attached);
    });
    Ok(receiver)
}

/// Pieces of a command's output. With `follow` they end when the command has ended and all is read.
fn pieces(command: &Arc<Command>, offset: u64, follow: bool) -> mpsc::Receiver<Piece> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let command = Arc::clone(command);
    tokio::spawn(async move {
        let mut reader = command.output.reader(offset);
        let (mut progress, mut over) = (command.output.progress(), command.over());
        loop {
            let is_over = *over.borrow_and_update();
            progress.borrow_and_update();
            // On a thread that may wait for a disk: as much as there is, as fast as the client takes it.
            let queue = sender.clone();
            let read = tokio::task::spawn_blocking(move || {
                while let Some(piece) = reader.now() {
                    if queue.blocking_send(piece).is_err() {
                        return None;
                    }
                    // The thread is not kept for a client that does not read.
                    if queue.capacity() == 0 {
                        return Some((reader, true));
                    }
                }
                Some((reader, false))
            });
            let Ok(Some((same, has_more))) = read.await else { return };
            reader = same;
            if has_more {
                if sender.reserve().await.is_err() {
                    return;
                }
                continue;
            }
            if is_over || !follow {
                return;
            }
            tokio::select! {
                _ = progress.changed() => {}
                _ = over.changed() => {}
                () = sender.closed() => return,
            }
        }
    });
    receiver
}

/// Output of the sandbox's own command from the beginning; with `follow` until the sandbox ends.
pub async fn logs(
    sandbox: Arc<Sandbox>,
    follow: bool,
    chunks: mpsc::Sender<Result<LogChunk, tonic::Status>>,
) {
    let _use = sandbox.activity.begin();
    let Some(command) = sandbox.commands.main() else {
        if follow {
            tokio::select! {
                () = sandbox.wait_over() => {}
                () = chunks.closed() => {}
            }
        }
        return;
    };
    let mut pieces = pieces(&command, 0, follow);
    while let Some(piece) = pieces.recv().await {
        let chunk = match piece {
            Piece::Data(stderr, data) => {
                LogChunk { stderr, data: data.to_vec(), truncated_bytes: 0 }
            }
            Piece::Dropped(truncated_bytes) => LogChunk { truncated_bytes, ..LogChunk::default() },
        };
        if chunks.send(Ok(chunk)).await.is_err() {
            return;
        }
    }
}

/// Carries out what a client says while the command runs. Input that the command does not take holds up
/// further input, and nothing else.
pub async fn feed(
    mut inputs: mpsc::Receiver<ExecInput>,
    command: Arc<Command>,
    instance: Arc<dyn Instance>,
) {
    let (bytes, mut queue) = mpsc::channel::<Option<Vec<u8>>>(QUEUE);
    let writer = Arc::clone(&command);
    let write = async move {
        while let Some(bytes) = queue.recv().await {
            match bytes {
                Some(bytes) => writer.write(&bytes).await,
                None => writer.close_input().await,
            }
        }
    };
    let listen = async move {
        while let Some(ExecInput { input: Some(what) }) = inputs.recv().await {
            let sent = match what {
                Input::Stdin(chunk) => bytes.send(Some(chunk)).await.is_ok(),
                Input::CloseStdin(_) => bytes.send(None).await.is_ok(),
                Input::Resize(size) => {
                    command.resize(size);
                    true
                }
                Input::Signal(signal) => {
                    let reach = proto::v1::Reach::Tree;
                    match command.signal(&instance, signal, reach).await {
                        // A command that has ended needs none.
                        Err(error) if error.kind() == ErrorKind::NotFound => {}
                        Err(error) => tracing::debug!(error = %Error::chain(&error), "signal"),
                        Ok(()) => {}
                    }
                    true
                }
                Input::Start(_) | Input::Attach(_) => true,
            };
            if !sent {
                return;
            }
        }
    };
    tokio::join!(write, listen);
}
