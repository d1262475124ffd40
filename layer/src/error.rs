//! The one error type of Lamella: a small closed set of kinds, a context and a source.
//!
//! Callers match on the kind. Adding a format or a backend adds no kind. `Display` prints the context
//! and never repeats the source; walk `std::error::Error::source` for the chain.

use crate::words::words;
use std::fmt;

/// Too many open files on the host, and in this process; a loop of symbolic links. Linux's numbers, as
/// this crate links no system library.
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
const ELOOP: i32 = 40;

/// What went wrong, as far as a caller can act on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The thing that was named does not exist.
    NotFound,
    /// The thing that was to be created exists already.
    Exists,
    /// The request or the input is malformed or not allowed.
    Invalid,
    /// Stored bytes are not what their digest or format says.
    Corrupt,
    /// Right, but this host, kernel, backend or format version cannot do it.
    Unsupported,
    /// A right is missing.
    Denied,
    /// In use; trying later may succeed.
    Busy,
    /// No room on a disk, or a limit is reached.
    NoSpace,
    /// A service or a store cannot be reached; trying later may succeed.
    Unavailable,
    /// A deadline passed.
    Timeout,
    /// A defect of ours.
    Internal,
}

impl ErrorKind {
    /// The errno that a reader of a file system sees for this kind.
    pub fn errno(self) -> i32 {
        match self {
            Self::NotFound => 2,     // ENOENT
            Self::Exists => 17,      // EEXIST
            Self::Invalid => 22,     // EINVAL
            Self::Corrupt => 5,      // EIO
            Self::Unsupported => 95, // EOPNOTSUPP
            Self::Denied => 13,      // EACCES
            Self::Busy => 16,        // EBUSY
            Self::NoSpace => 28,     // ENOSPC
            Self::Unavailable => 5,  // EIO
            Self::Timeout => 5,      // EIO: readers of files know no ETIMEDOUT
            Self::Internal => 5,     // EIO
        }
    }

    /// The kind that an operating system error stands for.
    pub fn of_io(error: &std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        // One of ours that went through somebody's `Read` or `Write`.
        if let Some(ours) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            return ours.kind();
        }
        match error.kind() {
            Io::NotFound => Self::NotFound,
            Io::AlreadyExists | Io::DirectoryNotEmpty => Self::Exists,
            Io::PermissionDenied | Io::ReadOnlyFilesystem => Self::Denied,
            Io::InvalidInput
            | Io::InvalidFilename
            | Io::NotADirectory
            | Io::IsADirectory
            | Io::NotSeekable
            | Io::CrossesDevices
            | Io::ArgumentListTooLong => Self::Invalid,
            Io::InvalidData | Io::UnexpectedEof => Self::Corrupt,
            Io::StorageFull
            | Io::QuotaExceeded
            | Io::FileTooLarge
            | Io::TooManyLinks
            | Io::OutOfMemory => Self::NoSpace,
            Io::ResourceBusy | Io::ExecutableFileBusy | Io::AddrInUse | Io::WouldBlock => {
                Self::Busy
            }
            Io::TimedOut => Self::Timeout,
            Io::Unsupported => Self::Unsupported,
            Io::ConnectionRefused
            | Io::ConnectionReset
            | Io::ConnectionAborted
            | Io::NotConnected
            | Io::BrokenPipe
            | Io::HostUnreachable
            | Io::NetworkUnreachable
            | Io::NetworkDown
            | Io::StaleNetworkFileHandle => Self::Unavailable,
            // What the standard library has no stable kind for.
            _ => match error.raw_os_error() {
                Some(ENFILE | EMFILE) => Self::NoSpace,
                Some(ELOOP) => Self::Invalid,
                _ => Self::Internal,
            },
        }
    }
}

words!(ErrorKind, "kind of error", {
    NotFound = "not_found",
    Exists = "exists",
    Invalid = "invalid",
    Corrupt = "corrupt",
    Unsupported = "unsupported",
    Denied = "denied",
    Busy = "busy",
    NoSpace = "no_space",
    Unavailable = "unavailable",
    Timeout = "timeout",
    Internal = "internal",
});

/// An error of any Lamella crate.
pub struct Error {
    kind: ErrorKind,
    context: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// The result of any Lamella crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error without a cause below it. `context` names the operation and the thing.
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Self {
        Self { kind, context: context.into(), source: None }
    }

    /// The same error with what caused it.
    #[must_use]
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.source = Some(source.into());
        self
    }

    /// An operating system error with the operation and the thing it concerned.
    pub fn io(context: impl Into<String>, error: std::io::Error) -> Self {
        Self::new(ErrorKind::of_io(&error), context).with_source(error)
    }

    /// Shorthand for [`ErrorKind::Invalid`].
    pub fn invalid(context: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, context)
    }

    /// Shorthand for [`ErrorKind::Corrupt`].
    pub fn corrupt(context: impl Into<String>) -> Self {
        Self::new(ErrorKind::Corrupt, context)
    }

    /// Shorthand for [`ErrorKind::NotFound`].
    pub fn not_found(context: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, context)
    }

    /// What a caller can act on.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Wraps this error: same kind, a wider context, this error as the source.
    #[must_use]
    pub fn context(self, context: impl Into<String>) -> Self {
        let kind = self.kind;
        Self::new(kind, context).with_source(self)
    }

    /// The whole chain in one line, outermost first: `a: b: c`.
    pub fn chain(&self) -> String {
        let mut line = self.context.clone();
        let mut next = std::error::Error::source(self);
        while let Some(cause) = next {
            line.push_str(": ");
            line.push_str(&cause.to_string());
            next = cause.source();
        }
        line
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.context)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.chain())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn std::error::Error + 'static))
    }
}

/// Adds a Lamella context to foreign and own results.
pub trait Context<T> {
    /// Names the operation and the thing; the text is only made when there is an error.
    fn context(self, context: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for std::result::Result<T, std::io::Error> {
    fn context(self, context: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| Error::io(context(), error))
    }
}

impl<T> Context<T> for Result<T> {
    fn context(self, context: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| error.context(context()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_refuses_as_input_is_no_defect_of_ours() {
        for (errno, kind) in [
            (2, ErrorKind::NotFound),      // ENOENT
            (7, ErrorKind::Invalid),       // E2BIG
            (17, ErrorKind::Exists),       // EEXIST
            (18, ErrorKind::Invalid),      // EXDEV
            (20, ErrorKind::Invalid),      // ENOTDIR
            (21, ErrorKind::Invalid),      // EISDIR
            (22, ErrorKind::Invalid),      // EINVAL
            (24, ErrorKind::NoSpace),      // EMFILE
            (26, ErrorKind::Busy),         // ETXTBSY
            (28, ErrorKind::NoSpace),      // ENOSPC
            (30, ErrorKind::Denied),       // EROFS
            (36, ErrorKind::Invalid),      // ENAMETOOLONG
            (39, ErrorKind::Exists),       // ENOTEMPTY
            (40, ErrorKind::Invalid),      // ELOOP
            (113, ErrorKind::Unavailable), // EHOSTUNREACH
            (116, ErrorKind::Unavailable), // ESTALE
            (5, ErrorKind::Internal),      // EIO
        ] {
            let error = std::io::Error::from_raw_os_error(errno);
            assert_eq!(ErrorKind::of_io(&error), kind, "{error}");
        }
    }

    #[test]
    fn display_never_repeats_its_source() {
        let inner = Error::corrupt("chunk 7 of layer abc");
        let outer = inner.context("fill 4096+8192");
        assert_eq!(outer.to_string(), "fill 4096+8192");
        assert_eq!(outer.chain(), "fill 4096+8192: chunk 7 of layer abc");
        assert_eq!(outer.kind(), ErrorKind::Corrupt);
    }
}
