//! The socket to the runtime: whole messages in and out. Does not interpret them.

use prost::Message;
use proto::launch::{
    ENVELOPE, FromZygote, MAX_DESCRIPTORS, MAX_INLINE_BYTES, MAX_MESSAGE_BYTES, MAX_REPLY_BYTES,
    Reply, Request, ToZygote,
};
use std::fmt;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use sys::socket::Seqpacket;

/// What went wrong and in which step.
#[derive(Debug)]
pub struct Failure {
    /// What was being done.
    pub step: String,
    /// Why it failed.
    pub error: io::Error,
}

impl Failure {
    /// Whether the other end of the socket is gone, which is how a zygote's life ends.
    pub fn is_lost_runtime(&self) -> bool {
        matches!(self.error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.step, self.error)
    }
}

/// Names the step of a result.
pub trait Step<T> {
    /// The text is only made when there is an error.
    fn step(self, text: impl FnOnce() -> String) -> Result<T, Failure>;
}

impl<T> Step<T> for io::Result<T> {
    fn step(self, text: impl FnOnce() -> String) -> Result<T, Failure> {
        self.map_err(|error| Failure { step: text(), error })
    }
}

/// A request and the descriptors that came with it.
#[derive(Debug)]
pub struct Incoming {
    pub request: Request,
    pub descriptors: std::vec::IntoIter<OwnedFd>,
}

impl Incoming {
    /// The next descriptor; it is an error of the runtime when there is none.
    pub fn take(&mut self) -> io::Result<OwnedFd> {
        self.descriptors
            .next()
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a descriptor is missing"))
    }
}

/// The zygote's end of the socket.
#[derive(Debug)]
pub struct Wire {
    socket: Seqpacket,
}

impl Wire {
    /// Takes over standard input.
    pub fn from_standard_input() -> io::Result<Self> {
        let socket = Seqpacket::from_fd(sys::process::take_standard_input()?)?;
        Ok(Self { socket })
    }

    /// For waiting.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The next request; `None` when the runtime is gone.
    pub fn receive(&self) -> io::Result<Option<Incoming>> {
        let room = MAX_INLINE_BYTES + 1;
        let Some(message) = self.socket.receive(room, MAX_DESCRIPTORS)? else { return Ok(None) };
        let mut descriptors = message.descriptors.into_iter();
        let bytes = if message.bytes == ENVELOPE {
            let file = descriptors.next().ok_or(io::ErrorKind::InvalidData)?;
            read_whole(file)?
        } else {
            message.bytes
        };
        let decoded = ToZygote::decode(bytes.as_slice()).map_err(invalid)?;
        let request = decoded.request.ok_or_else(|| invalid("empty request"))?;
        Ok(Some(Incoming { request, descriptors }))
    }

    /// Answers, with descriptors.
    pub fn send(&self, mut reply: Reply, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        match &mut reply {
            Reply::Failed(failed) => cut(&mut failed.step),
            Reply::Refused(refused) => cut(&mut refused.message),
            _ => {}
        }
        let message = FromZygote { reply: Some(reply) };
        self.socket.send(&message.encode_to_vec(), descriptors)
    }
}

/// A command's name can be longer than an answer may be.
fn cut(text: &mut String) {
    if let Some((end, _)) = text.char_indices().nth(MAX_REPLY_BYTES / 8) {
        text.truncate(end);
    }
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Reads a memory file from its start, whatever its position is.
fn read_whole(file: OwnedFd) -> io::Result<Vec<u8>> {
    use std::io::Seek;
    let mut file = std::fs::File::from(file);
    file.rewind()?;
    let mut bytes = Vec::new();
    file.take(MAX_MESSAGE_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > MAX_MESSAGE_BYTES {
        return Err(invalid("message too large"));
    }
    Ok(bytes)
}
