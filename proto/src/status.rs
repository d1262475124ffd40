//! One exhaustive mapping between `layer::Error` and gRPC status.
//!
//! The kind travels as a word in the metadata, because several kinds share a status code; the chain of
//! causes travels as the message, so that a client prints the same line as an embedded caller.

use layer::{Error, ErrorKind};
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

const KIND_KEY: &str = "lamella-error-kind";

/// The status code that stands for a kind.
pub fn code(kind: ErrorKind) -> Code {
    match kind {
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::Exists => Code::AlreadyExists,
        ErrorKind::Invalid => Code::InvalidArgument,
        ErrorKind::Corrupt => Code::DataLoss,
        ErrorKind::Unsupported => Code::Unimplemented,
        ErrorKind::Denied => Code::PermissionDenied,
        ErrorKind::Busy => Code::FailedPrecondition,
        ErrorKind::NoSpace => Code::ResourceExhausted,
        ErrorKind::Unavailable => Code::Unavailable,
        ErrorKind::Timeout => Code::DeadlineExceeded,
        ErrorKind::Internal => Code::Internal,
    }
}

/// The kind that a status of a foreign peer stands for.
fn kind(code: Code) -> ErrorKind {
    match code {
        Code::NotFound => ErrorKind::NotFound,
        Code::AlreadyExists => ErrorKind::Exists,
        Code::InvalidArgument | Code::OutOfRange => ErrorKind::Invalid,
        Code::DataLoss => ErrorKind::Corrupt,
        Code::Unimplemented => ErrorKind::Unsupported,
        Code::PermissionDenied | Code::Unauthenticated => ErrorKind::Denied,
        Code::FailedPrecondition | Code::Aborted => ErrorKind::Busy,
        Code::ResourceExhausted => ErrorKind::NoSpace,
        Code::Unavailable | Code::Cancelled => ErrorKind::Unavailable,
        Code::DeadlineExceeded => ErrorKind::Timeout,
        Code::Ok | Code::Unknown | Code::Internal => ErrorKind::Internal,
    }
}

/// What a server answers for an error. Takes it by value, so that it fits `map_err`.
#[allow(clippy::needless_pass_by_value)]
pub fn to_status(error: Error) -> Status {
    let mut status = Status::new(code(error.kind()), error.chain());
    if let Ok(word) = MetadataValue::try_from(error.kind().word()) {
        status.metadata_mut().insert(KIND_KEY, word);
    }
    status
}

/// What a client makes of an answer. A status that no server gave, because the connection broke or nobody
/// listens, is `Unavailable` with its innermost cause, which names the socket. Takes it by value, so that it
/// fits `map_err`.
#[allow(clippy::needless_pass_by_value)]
pub fn from_status(status: Status) -> Error {
    let stated = status.metadata().get(KIND_KEY).and_then(|word| word.to_str().ok());
    if stated.is_none()
        && let Some(cause) = innermost(&status)
    {
        return Error::new(ErrorKind::Unavailable, cause);
    }
    let kind = stated.and_then(|word| word.parse().ok()).unwrap_or_else(|| kind(status.code()));
    Error::new(kind, status.message())
}

/// What lies below a status of this client's own making.
fn innermost(status: &Status) -> Option<String> {
    let mut cause = std::error::Error::source(status)?;
    while let Some(below) = cause.source() {
        cause = below;
    }
    Some(cause.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_the_wire() {
        for kind in ErrorKind::ALL {
            let error = Error::new(kind, "outer").with_source(Error::corrupt("inner"));
            let back = from_status(to_status(error));
            assert_eq!(back.kind(), kind);
            assert_eq!(back.to_string(), "outer: inner");
        }
    }

    #[test]
    fn a_status_without_our_metadata_keeps_its_meaning() {
        for kind in ErrorKind::ALL {
            assert_eq!(from_status(Status::new(code(kind), "x")).kind(), kind);
        }
    }
}
