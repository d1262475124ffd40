//! The pipes of a command: made so that a later runtime can go on reading them, and found again by it.

use crate::stream::End;
use crate::zygote::former::{Former, StreamId};
use layer::{Context, Result};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use sys::process::Pid;

/// Our ends of a command's streams.
#[derive(Debug, Default)]
pub struct Streams {
    /// Where its input goes.
    pub input: Option<End>,
    /// What it prints into; true for the error stream.
    pub outputs: Vec<(bool, End)>,
    /// What finds them again.
    pub ids: Vec<(bool, StreamId)>,
    /// One terminal for all.
    pub is_terminal: bool,
}

impl Streams {
    /// Those of a command with a terminal.
    pub fn of_terminal(master: OwnedFd) -> Result<Self> {
        let id = StreamId::of(master.as_fd()).context(|| "look at a terminal".into())?;
        let input = End::new(master)?;
        let output = input.try_clone()?;
        let (outputs, ids) = (vec![(false, output)], vec![(false, id)]);
        Ok(Self { input: Some(input), outputs, ids, is_terminal: true })
    }
}

/// Pipes for a command: its ends (input, output, error) and ours.
pub fn pipes(with_input: bool) -> Result<([OwnedFd; 3], Streams)> {
    let (their_input, input) = if with_input {
        let (reader, writer) = std::io::pipe().context(|| "make a pipe".into())?;
        (OwnedFd::from(reader), Some(End::new(writer.into())?))
    } else {
        let null = std::fs::File::open("/dev/null").context(|| "open /dev/null".into())?;
        (OwnedFd::from(null), None)
    };
    let (output, their_output, first) = lasting_pipe()?;
    let (error, their_error, second) = lasting_pipe()?;
    let streams = Streams {
        input,
        outputs: vec![(false, output), (true, error)],
        ids: vec![(false, first), (true, second)],
        is_terminal: false,
    };
    Ok(([their_input, their_output, their_error], streams))
}

/// A pipe whose writing end also keeps it readable, so that the command does not break when the runtime
/// dies, and the next runtime can go on reading.
fn lasting_pipe() -> Result<(End, OwnedFd, StreamId)> {
    let (reader, writer) = std::io::pipe().context(|| "make a pipe".into())?;
    let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
    let both = std::fs::OpenOptions::new().read(true).write(true).open(path);
    let both = both.context(|| "open a pipe for both directions".into())?;
    let id = StreamId::of(both.as_fd()).context(|| "look at a pipe".into())?;
    Ok((End::new(reader.into())?, both.into(), id))
}

/// The streams of a command that an earlier runtime started: from its zygote, or from the command itself.
pub fn reopen(ids: &[(bool, StreamId)], former: &Former, living: Option<Pid>) -> Streams {
    let mut found = Streams { ids: ids.to_vec(), ..Streams::default() };
    for (is_error, id) in ids {
        let held = former.take(id);
        if id.is_terminal() {
            match held.map(Streams::of_terminal) {
                Some(Ok(streams)) => return streams,
                _ => found.is_terminal = true,
            }
            continue;
        }
        let pipe = match held {
            Some(held) => read_end(held.as_fd()),
            None => living.and_then(|pid| of_command(pid, if *is_error { 2 } else { 1 }, id)),
        };
        if let Some(Ok(end)) = pipe.map(End::new) {
            found.outputs.push((*is_error, end));
        }
    }
    found
}

/// A reading end of its own: what is set for it does not concern the command, which has the other.
fn read_end(pipe: BorrowedFd<'_>) -> Option<OwnedFd> {
    open_pipe(&format!("/proc/self/fd/{}", pipe.as_raw_fd()))
}

fn open_pipe(path: &str) -> Option<OwnedFd> {
    const O_NONBLOCK: i32 = 0o4000;
    let mut how = std::fs::OpenOptions::new();
    how.read(true).custom_flags(O_NONBLOCK).open(path).ok().map(OwnedFd::from)
}

/// The command may have put anything in its place, so it must be our pipe before it is opened.
fn of_command(pid: Pid, number: i32, id: &StreamId) -> Option<OwnedFd> {
    let path = format!("/proc/{pid}/fd/{number}");
    let target = std::fs::read_link(&path).ok()?;
    if !target.as_os_str().as_encoded_bytes().starts_with(b"pipe:") {
        return None;
    }
    open_pipe(&path).filter(|opened| StreamId::of(opened.as_fd()).ok() == Some(*id))
}
