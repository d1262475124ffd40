//! What an error of `object_store` means to a caller of ours.

use layer::{Error, ErrorKind};
use object_store::client::{HttpError, HttpErrorKind};
use std::error::Error as StdError;

/// The error with what was being done.
pub(super) fn failed(context: String, error: &object_store::Error) -> Error {
    Error::new(kind_of(error), context).with_source(said(&error.to_string()))
}

/// Where the role of a machine or container is asked for, which is what is left when nothing else is set.
const ROLE_SERVERS: [&str; 2] = ["//169.254.169.254/", "//169.254.170.2/"];

/// One line of what `object_store` tells in many, its causes included: the server's own words where it has any.
fn said(text: &str) -> String {
    if ROLE_SERVERS.iter().any(|server| text.contains(server)) {
        return "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a file by `credentials=/path` \
                (this machine has no role to take them from)"
            .to_owned();
    }
    let between = |tag: &str| {
        let (_, rest) = text.split_once(&format!("<{tag}>"))?;
        rest.split_once(&format!("</{tag}>")).map(|(inner, _)| inner)
    };
    match between("Code").zip(between("Message")) {
        Some((code, message)) => format!("the server said {code}: {message}"),
        None => text.split_whitespace().collect::<Vec<_>>().join(" "),
    }
}

/// The kind that callers act on. Whatever a server said that has no kind of its own is `Unavailable`: its
/// retries are spent, and trying later may succeed.
pub(super) fn kind_of(error: &object_store::Error) -> ErrorKind {
    use object_store::Error as S3;
    match error {
        S3::NotFound { .. } => ErrorKind::NotFound,
        S3::AlreadyExists { .. } | S3::Precondition { .. } | S3::NotModified { .. } => {
            ErrorKind::Exists
        }
        S3::PermissionDenied { .. } | S3::Unauthenticated { .. } => ErrorKind::Denied,
        S3::NotSupported { .. } | S3::NotImplemented { .. } => ErrorKind::Unsupported,
        S3::InvalidPath { .. } | S3::UnknownConfigurationKey { .. } => ErrorKind::Invalid,
        _ if timed_out(error) => ErrorKind::Timeout,
        _ => ErrorKind::Unavailable,
    }
}

fn timed_out(error: &object_store::Error) -> bool {
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(error) = cause {
        let http = error.downcast_ref::<HttpError>();
        if http.is_some_and(|error| error.kind() == HttpErrorKind::Timeout) {
            return true;
        }
        cause = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(source: impl StdError + Send + Sync + 'static) -> object_store::Error {
        object_store::Error::Generic { store: "S3", source: Box::new(source) }
    }

    #[test]
    fn what_a_server_said_is_one_line() {
        let xml = "Error performing PUT x - 404: <?xml?>\n<Error><Code>NoSuchBucket</Code><Message>Not there</Message></Error>: again";
        assert_eq!(said(xml), "the server said NoSuchBucket: Not there");
        assert_eq!(said("no\nanswer"), "no answer");
        let role =
            "Error performing PUT http://169.254.169.254/latest/api/token in 3ms - 403 Forbidden";
        assert!(said(role).starts_with("no credentials: set AWS_ACCESS_KEY_ID"));
    }

    #[test]
    fn errors_keep_what_a_caller_can_act_on() {
        let source = || Box::new(std::io::Error::other("said so"));
        let path = || "a".to_owned();
        let absent = object_store::Error::NotFound { path: path(), source: source() };
        let denied = object_store::Error::PermissionDenied { path: path(), source: source() };
        let taken = object_store::Error::Precondition { path: path(), source: source() };
        assert_eq!(kind_of(&absent), ErrorKind::NotFound);
        assert_eq!(kind_of(&denied), ErrorKind::Denied);
        assert_eq!(kind_of(&taken), ErrorKind::Exists);
        assert_eq!(kind_of(&generic(std::io::Error::other("500"))), ErrorKind::Unavailable);
        let late = HttpError::new(HttpErrorKind::Timeout, std::io::Error::other("late"));
        assert_eq!(kind_of(&generic(late)), ErrorKind::Timeout);
    }
}
