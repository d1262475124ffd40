//! The one error type of Lamella: a small closed set of kinds, a context and a source.
//!
//! Callers match on the kind. Adding a format or a backend adds no kind. `Display` prints the context
//! and never repeats the source; walk `std::error::Error::source` for the chain.

use std::fmt;

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
        match error.kind() {
            Io::NotFound => Self::NotFound,
            Io::AlreadyExists => Self::Exists,
            Io::PermissionDenied => Self::Denied,
            Io::InvalidInput => Self::Invalid,
            Io::InvalidData | Io::UnexpectedEof => Self::Corrupt,
            Io::StorageFull | Io::QuotaExceeded | Io::FileTooLarge => Self::NoSpace,
            Io::ResourceBusy => Self::Busy,
            Io::TimedOut => Self::Timeout,
            Io::Unsupported => Self::Unsupported,
            Io::ConnectionRefused | Io::ConnectionReset | Io::NotConnected | Io::BrokenPipe => {
                Self::Unavailable
            }
            _ => Self::Internal,
        }
    }

    /// All kinds, for exhaustive mappings and their tests.
    pub const ALL: [Self; 11] = [
        Self::NotFound,
        Self::Exists,
        Self::Invalid,
        Self::Corrupt,
        Self::Unsupported,
        Self::Denied,
        Self::Busy,
        Self::NoSpace,
        Self::Unavailable,
        Self::Timeout,
        Self::Internal,
    ];

    /// The lower-case word that stands for the kind on the wire and in JSON.
    pub fn word(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Exists => "exists",
            Self::Invalid => "invalid",
            Self::Corrupt => "corrupt",
            Self::Unsupported => "unsupported",
            Self::Denied => "denied",
            Self::Busy => "busy",
            Self::NoSpace => "no_space",
            Self::Unavailable => "unavailable",
            Self::Timeout => "timeout",
            Self::Internal => "internal",
        }
    }

    /// The inverse of [`ErrorKind::word`].
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.word() == word)
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

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
    fn words_round_trip_for_every_kind() {
        for kind in ErrorKind::ALL {
            assert_eq!(ErrorKind::from_word(kind.word()), Some(kind));
        }
        assert_eq!(ErrorKind::from_word("other"), None);
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
