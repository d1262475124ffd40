//! Messages between fsd and a keeper: one each way, fixed layout, descriptors beside them.
//!
//! ```text
//! request   0 operation u8 | 1 zero[7] | 8 key[32]
//!   Offer  + group, journal     holds these from now on; files stay
//!   Put    + file               holds the file under the key
//!   Forget                      lets go of the key
//!   Take                        answers Holds, then File for each key
//!   Leave                       answers, then ends
//! response  0 kind u8 | 1 zero[3] | 4 count u32 | 8 key[32]
//!   Done   count = pid of the keeper
//!   Holds  count = files that follow; + group, journal where there are
//!   File   key; + file
//! ```

use layer::{Context, Error, Result};
use std::os::fd::{BorrowedFd, OwnedFd};
use sys::socket::{Message, Seqpacket};

/// Name of a held file: a layer id, but a keeper need not know that.
pub type Key = [u8; 32];

/// Bytes of every message.
const MESSAGE_BYTES: usize = 40;
/// Descriptors that the largest message carries.
const MAX_DESCRIPTORS: usize = 2;

/// What fsd asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Hold this group and this journal.
    Offer,
    /// Hold this file.
    Put(Key),
    /// Let go of a file.
    Forget(Key),
    /// Send everything.
    Take,
    /// End.
    Leave,
}

/// What a keeper answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Response {
    /// It is done.
    Done {
        /// Process id of the keeper.
        pid: u32,
    },
    /// So many files follow.
    Holds {
        /// Number of `File` messages.
        files: u32,
    },
    /// One file.
    File(Key),
}

impl Request {
    fn encode(self) -> [u8; MESSAGE_BYTES] {
        let (operation, key) = match self {
            Self::Offer => (1, [0; 32]),
            Self::Put(key) => (2, key),
            Self::Forget(key) => (3, key),
            Self::Take => (4, [0; 32]),
            Self::Leave => (5, [0; 32]),
        };
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[0] = operation;
        bytes[8..].copy_from_slice(&key);
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Self> {
        let key = key_of(bytes)?;
        match bytes[0] {
            1 => Ok(Self::Offer),
            2 => Ok(Self::Put(key)),
            3 => Ok(Self::Forget(key)),
            4 => Ok(Self::Take),
            5 => Ok(Self::Leave),
            other => Err(Error::invalid(format!("keeper operation {other}"))),
        }
    }
}

impl Response {
    fn encode(self) -> [u8; MESSAGE_BYTES] {
        let (kind, count, key) = match self {
            Self::Done { pid } => (1, pid, [0; 32]),
            Self::Holds { files } => (2, files, [0; 32]),
            Self::File(key) => (3, 0, key),
        };
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&u32::to_le_bytes(count));
        bytes[8..].copy_from_slice(&key);
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Self> {
        let key = key_of(bytes)?;
        let count = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        match bytes[0] {
            1 => Ok(Self::Done { pid: count }),
            2 => Ok(Self::Holds { files: count }),
            3 => Ok(Self::File(key)),
            other => Err(Error::invalid(format!("keeper response {other}"))),
        }
    }
}

fn key_of(bytes: &[u8]) -> Result<Key> {
    if bytes.len() != MESSAGE_BYTES {
        return Err(Error::invalid(format!("keeper message of {} bytes", bytes.len())));
    }
    let mut key = [0; 32];
    key.copy_from_slice(&bytes[8..]);
    Ok(key)
}

fn receive(socket: &Seqpacket) -> Result<Option<Message>> {
    socket.receive(MESSAGE_BYTES, MAX_DESCRIPTORS).context(|| "receive a keeper message".to_owned())
}

/// Sends a request.
pub fn send_request(socket: &Seqpacket, what: Request, with: &[BorrowedFd<'_>]) -> Result<()> {
    socket.send(&what.encode(), with).context(|| "send to a keeper".to_owned())
}

/// The next request; nothing when fsd has gone.
pub fn receive_request(socket: &Seqpacket) -> Result<Option<(Request, Vec<OwnedFd>)>> {
    match receive(socket)? {
        Some(message) => Ok(Some((Request::decode(&message.bytes)?, message.descriptors))),
        None => Ok(None),
    }
}

/// Sends a response.
pub fn send_response(socket: &Seqpacket, what: Response, with: &[BorrowedFd<'_>]) -> Result<()> {
    socket.send(&what.encode(), with).context(|| "answer fsd".to_owned())
}

/// The next response. `Unavailable` when the keeper has gone.
pub fn receive_response(socket: &Seqpacket) -> Result<(Response, Vec<OwnedFd>)> {
    match receive(socket)? {
        Some(message) => Ok((Response::decode(&message.bytes)?, message.descriptors)),
        None => Err(Error::new(layer::ErrorKind::Unavailable, "the keeper has gone")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip() {
        let key = [7; 32];
        for request in
            [Request::Offer, Request::Put(key), Request::Forget(key), Request::Take, Request::Leave]
        {
            assert_eq!(Request::decode(&request.encode()).unwrap(), request);
        }
        for response in
            [Response::Done { pid: 77 }, Response::Holds { files: 3 }, Response::File(key)]
        {
            assert_eq!(Response::decode(&response.encode()).unwrap(), response);
        }
        assert!(Request::decode(&[9; MESSAGE_BYTES]).is_err());
        assert!(Response::decode(&[1; 3]).is_err());
    }
}
