//! How a command ends when it does not end well: an exit code and one line that names the thing and
//! the remedy.
//!
//! Exit codes: 1 the operation failed, 2 wrong usage, and for `run` and `exec` the command's own code.

use crate::output::escape;
use crate::settings::Settings;
use layer::{Error, ErrorKind};
use rustix::process::geteuid;
use std::io::{self, Write};
use std::path::PathBuf;

/// Why a command does not exit with 0.
#[derive(Debug)]
pub enum Failure {
    /// The command line parses but makes no sense.
    Usage(String),
    /// The operation failed.
    Failed {
        /// What went wrong.
        error: Error,
        /// What the user can do about it.
        remedy: Option<String>,
    },
    /// Nothing is left to say: the sandboxed command's own code, or a reader that went away.
    Code(u8),
}

/// What every command returns.
pub type Outcome<T = ()> = Result<T, Failure>;

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Failed { error, remedy: None }
    }
}

impl From<tonic::Status> for Failure {
    fn from(status: tonic::Status) -> Self {
        proto::status::from_status(status).into()
    }
}

/// Adds to an error what the user can do about it.
pub trait Remedy<T> {
    /// The text is only made when there is an error; `None` keeps the general advice.
    fn remedy(self, advice: impl FnOnce(&Error) -> Option<String>) -> Outcome<T>;
}

impl<T, E: Into<Failure>> Remedy<T> for Result<T, E> {
    fn remedy(self, advice: impl FnOnce(&Error) -> Option<String>) -> Outcome<T> {
        self.map_err(|error| match error.into() {
            Failure::Failed { error, remedy: None } => {
                let remedy = advice(&error);
                Failure::Failed { error, remedy }
            }
            other => other,
        })
    }
}

/// A daemon of a node, as an error that names its socket shows it.
struct Silent<'a> {
    what: &'a str,
    log: &'a str,
    socket: PathBuf,
}

impl Failure {
    /// Says whose silence an error is about, where a daemon of the node hung up or does not listen, and what to
    /// do about it.
    #[must_use]
    pub fn name_daemon(self, settings: &Settings) -> Self {
        let (error, remedy) = match self {
            Self::Failed { error, remedy } if error.kind() == ErrorKind::Unavailable => {
                (error, remedy)
            }
            other => return other,
        };
        let chain = error.chain();
        let daemons = [
            Silent { what: "the node", log: "node.log", socket: settings.node_socket() },
            Silent {
                what: "the file-system daemon",
                log: "fsd.log",
                socket: settings.fsd_socket(),
            },
        ];
        let named = |daemon: &Silent<'_>| chain.contains(&daemon.socket.display().to_string());
        let Some(daemon) = daemons.into_iter().find(named) else {
            return Self::Failed { error, remedy };
        };
        let data = settings.data().display();
        let Silent { what, log, .. } = daemon;
        let log = settings.run(log);
        let log = log.display();
        let again =
            format!("`lamella up --data {data}` starts it again; {log} may say why it ended");
        Self::Failed {
            error: error.context(format!("{what} of {data} does not answer")),
            // What the command itself advises comes after that.
            remedy: Some(remedy.map_or(again.clone(), |then| format!("{again}; {then}"))),
        }
    }
}

/// Advice that is right for a kind wherever it comes from.
fn general_remedy(error: &Error) -> Option<&'static str> {
    match error.kind() {
        ErrorKind::Denied if !geteuid().is_root() => Some("run as root"),
        ErrorKind::NoSpace => {
            Some("free some space, or choose another place with --store or --data")
        }
        ErrorKind::Unsupported => Some("`lamella doctor` says what this host can do"),
        ErrorKind::Corrupt => Some("`lamella fsck REF --read-data` says what is damaged"),
        // An errno without a kind of its own is the system's word, not a defect.
        ErrorKind::Internal if one_line(error).contains("(os error ") => None,
        ErrorKind::Internal => Some("this is a defect of lamella; -v shows the whole chain"),
        ErrorKind::Denied
        | ErrorKind::NotFound
        | ErrorKind::Exists
        | ErrorKind::Invalid
        | ErrorKind::Busy
        | ErrorKind::Unavailable
        | ErrorKind::Timeout => None,
    }
}

/// The causes, outermost first, without those whose text an outer one already contains.
fn causes(error: &Error) -> Vec<String> {
    let mut lines = vec![error.to_string()];
    let mut next = std::error::Error::source(error);
    while let Some(cause) = next {
        let line = cause.to_string();
        if !lines.iter().any(|outer| outer.contains(&line)) {
            lines.push(line);
        }
        next = cause.source();
    }
    lines
}

/// The cause below all others.
pub fn innermost(error: &Error) -> String {
    causes(error).pop().unwrap_or_default()
}

/// What failed and why, in one line: the outermost context and the innermost cause.
pub fn one_line(error: &Error) -> String {
    let causes = causes(error);
    match (causes.first(), causes.last()) {
        (Some(first), Some(last)) if causes.len() > 1 => format!("{first}: {last}"),
        (Some(first), _) if !first.is_empty() => first.clone(),
        _ => error.kind().to_string(),
    }
}

impl Failure {
    /// Ctrl-C ended the command: the code that a shell gives for it.
    pub const INTERRUPTED: Self = Self::Code(130);

    /// The exit code of the process.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Failed { .. } => 1,
            Self::Code(code) => *code,
        }
    }

    /// Writes the error to standard error. A standard error that is gone is nobody's concern.
    pub fn report(&self, verbose: bool, json: bool) {
        let text = match self {
            Self::Code(_) => return,
            Self::Usage(message) if json => json_line("usage", message, None, &[]),
            Self::Usage(message) => {
                format!("lamella: {}\n  (see `lamella help`)\n", escape(message))
            }
            Self::Failed { error, remedy } => {
                let advice = remedy.as_deref().or_else(|| general_remedy(error));
                let chain = causes(error);
                if json {
                    json_line(error.kind().word(), &one_line(error), advice, &chain)
                } else {
                    text_lines(error, advice, verbose.then_some(&chain[..]))
                }
            }
        };
        _ = io::stderr().write_all(text.as_bytes());
    }
}

fn text_lines(error: &Error, advice: Option<&str>, chain: Option<&[String]>) -> String {
    let mut text = format!("lamella: {}", escape(&one_line(error)));
    // A daemon may have given the same advice already.
    if let Some(advice) = advice.filter(|advice| !text.contains(*advice)) {
        text.push_str("; ");
        text.push_str(&escape(advice));
    }
    text.push('\n');
    for cause in chain.into_iter().flatten().skip(1) {
        text.push_str("  because ");
        text.push_str(&escape(cause));
        text.push('\n');
    }
    text
}

fn json_line(kind: &str, message: &str, remedy: Option<&str>, chain: &[String]) -> String {
    let value = serde_json::json!({
        "error": { "kind": kind, "message": message, "remedy": remedy, "chain": chain }
    });
    format!("{}\n", crate::output::safe_json(&value.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_names_the_outermost_and_the_innermost() {
        let error = Error::corrupt("bad magic").context("layer file").context("inspect base/x:1");
        assert_eq!(one_line(&error), "inspect base/x:1: bad magic");
        assert_eq!(one_line(&Error::not_found("base/x:1")), "base/x:1");
        let repeated = Error::corrupt("x").context("open x");
        assert_eq!(one_line(&repeated), "open x");
    }

    #[test]
    fn root_is_not_told_to_be_root() {
        let denied = Error::new(ErrorKind::Denied, "Read-only file system");
        assert_eq!(general_remedy(&denied).is_none(), geteuid().is_root());
    }

    #[test]
    fn exit_codes_are_as_documented() {
        assert_eq!(Failure::Usage(String::new()).exit_code(), 2);
        assert_eq!(Failure::from(Error::not_found("x")).exit_code(), 1);
        assert_eq!(Failure::Code(137).exit_code(), 137);
    }

    #[test]
    fn a_hostile_name_in_an_error_cannot_drive_the_terminal() {
        let error = Error::invalid("file \x1b]0;owned\x07");
        let text = text_lines(&error, None, None);
        assert!(!text.contains('\x1b') && !text.contains('\x07'), "{text:?}");
    }
}
