//! Messages of cachefiles in on-demand mode, as they are read from the device. Bytes in, values out.
//!
//! | at | bytes | field (native byte order) |
//! |---|---|---|
//! | 0 | 4 | number of the message |
//! | 4 | 4 | 0 open, 1 close, 2 read |
//! | 8 | 4 | length of the whole message |
//! | 12 | 4 | number of the object |
//! | 16 | 4 4 4 4 | open: sizes of volume and cookie key, descriptor, flags; then both keys |
//! | 16 | 8 8 | read: offset and length |

const HEADER_BYTES: usize = 16;
const OPEN_BYTES: usize = 16;
const READ_BYTES: usize = 16;
const OPEN: u32 = 0;
const CLOSE: u32 = 1;
const READ: u32 = 2;

/// A message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// What an answer names.
    pub number: u32,
    /// The cache file that it is about.
    pub object: u32,
    /// What is wanted.
    pub body: Body<'a>,
}

/// What the kernel wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body<'a> {
    /// The size of an object.
    Open {
        /// Whose it is, without the zero byte behind it.
        volume: &'a [u8],
        /// Its name in there.
        cookie: &'a [u8],
    },
    /// Nothing: the object is not used any more.
    Close,
    /// Bytes of an object.
    Read {
        /// Where they begin.
        offset: u64,
        /// How many; at least one, and the end is below 2^63.
        bytes: u64,
    },
}

/// A message that cannot be understood, and how it can be answered all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed {
    /// What is wrong with it.
    pub why: &'static str,
    /// The answer that lets the one who waits go with an error.
    pub reply: Reply,
}

/// How to answer what was not understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// Nobody waits, or for what is not known.
    Nothing,
    /// The opening of an object failed.
    RefuseOpen(u32),
    /// The read of an object ends without bytes.
    EndRead {
        /// The message.
        number: u32,
        /// The object.
        object: u32,
    },
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

impl<'a> Message<'a> {
    /// Reads one whole message.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let unanswerable = |why| Malformed { why, reply: Reply::Nothing };
        let header = (word(bytes, 0), word(bytes, 4), word(bytes, 8), word(bytes, 12));
        let (Some(number), Some(opcode), Some(length), Some(object)) = header else {
            return Err(unanswerable("it ends in its header"));
        };
        let reply = match opcode {
            OPEN => Reply::RefuseOpen(number),
            READ => Reply::EndRead { number, object },
            CLOSE => Reply::Nothing,
            _ => return Err(unanswerable("its kind is unknown")),
        };
        let refuse = |why| Malformed { why, reply };
        if length as usize != bytes.len() {
            return Err(refuse("its length is not what it says"));
        }
        let payload = &bytes[HEADER_BYTES..];
        let body = match opcode {
            OPEN => open(payload).ok_or_else(|| refuse("its keys do not fill it")),
            READ => read(payload).ok_or_else(|| refuse("its range is none")),
            _ if payload.is_empty() => Ok(Body::Close),
            _ => Err(refuse("a close says more than that")),
        }?;
        Ok(Self { number, object, body })
    }
}

fn open(payload: &[u8]) -> Option<Body<'_>> {
    let volume_bytes = word(payload, 0)? as usize;
    let cookie_bytes = word(payload, 4)? as usize;
    let keys = payload.get(OPEN_BYTES..)?;
    if volume_bytes.checked_add(cookie_bytes)? != keys.len() {
        return None;
    }
    let (volume, cookie) = keys.split_at(volume_bytes);
    Some(Body::Open { volume: volume.strip_suffix(&[0])?, cookie })
}

fn read(payload: &[u8]) -> Option<Body<'_>> {
    let (offset, bytes) = (long(payload, 0)?, long(payload, 8)?);
    let end = offset.checked_add(bytes)?;
    let right = payload.len() == READ_BYTES && bytes > 0 && i64::try_from(end).is_ok();
    right.then_some(Body::Read { offset, bytes })
}
