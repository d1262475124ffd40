//! Messages between the runtime and its zygote, over a socket that keeps message borders.
//!
//! Written by hand because the zygote, a static program that must stay small, links no generated code.
//! Descriptors travel beside a message; each message says which it takes. A message that is larger than
//! [`MAX_INLINE_BYTES`] travels in a memory file: the packet is then empty of content
//! ([`ENVELOPE`]) and the file is its first descriptor.
//!
//! Both ends are of one build, so there is no version: a zygote that outlives its runtime takes no
//! request any more. What it leaves to a later one is in [`crate::exits`].

use prost::{Message, Oneof};

/// The most bytes of a message that travels in the packet itself.
pub const MAX_INLINE_BYTES: usize = 60_000;

/// The most bytes of an answer of the zygote; texts in it are cut to fit.
pub const MAX_REPLY_BYTES: usize = 4096;

/// The packet that stands for a message in a memory file.
pub const ENVELOPE: &[u8] = b"\0";

/// The most bytes of a message in a memory file: above what execve(2) takes.
pub const MAX_MESSAGE_BYTES: usize = 8 << 20;

/// The most descriptors beside one message.
pub const MAX_DESCRIPTORS: usize = 16;

/// How many users, and groups, a sandbox with a user namespace has.
pub const IDS: u32 = 1 << 16;

/// What the runtime asks of the zygote.
#[derive(Clone, PartialEq, Message)]
pub struct ToZygote {
    /// Exactly one.
    #[prost(oneof = "Request", tags = "1, 2, 3, 4, 5, 16")]
    pub request: Option<Request>,
}

/// The requests.
#[derive(Clone, PartialEq, Oneof)]
pub enum Request {
    /// First of all messages, once.
    #[prost(message, tag = "1")]
    Configure(Configure),
    /// Make a sandbox.
    #[prost(message, tag = "2")]
    Launch(Launch),
    /// Run a command in one.
    #[prost(message, tag = "3")]
    Exec(Exec),
    /// Make a user namespace.
    #[prost(message, tag = "16")]
    Users(Users),
    /// Hold a descriptor of a command for a later runtime.
    #[prost(message, tag = "4")]
    Hold(Hold),
    /// Let go of all that is held of a command.
    #[prost(message, tag = "5")]
    Release(Release),
}

/// Holds the descriptor of the message until [`Release`]: the terminal of a command. Not answered.
#[derive(Clone, PartialEq, Message)]
pub struct Hold {
    /// The command, as the host sees it.
    #[prost(int32, tag = "1")]
    pub pid: i32,
}

/// See [`Request::Release`]. Not answered.
#[derive(Clone, PartialEq, Message)]
pub struct Release {
    /// The command, as the host sees it.
    #[prost(int32, tag = "1")]
    pub pid: i32,
    /// The kernel's number for the process: its pid may be another's by now.
    #[prost(uint64, tag = "2")]
    pub number: u64,
}

/// What holds for all sandboxes. Descriptors: the file of ends ([`crate::exits`]), the directory of our group
/// in each version 1 hierarchy, then, if there is one, in the version 2 hierarchy.
#[derive(Clone, PartialEq, Message)]
pub struct Configure {
    /// How many of the descriptors are version 1.
    #[prost(uint32, tag = "1")]
    pub version_1: u32,
    /// Whether a version 2 directory follows them.
    #[prost(bool, tag = "2")]
    pub version_2: bool,
    /// Whether commands are put under the AppArmor profile of their sandbox, which is loaded.
    #[prost(bool, tag = "3")]
    pub apparmor: bool,
}

/// Makes a user namespace without ids, held by a process that does nothing else until it is killed.
/// What the kernel counts by user is counted for the owner.
///
/// Answers: `Launched` from the zygote, then `Ready` or `Failed` from the process.
#[derive(Clone, PartialEq, Message)]
pub struct Users {
    /// Chosen by the runtime, never used twice.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Its owner, a user of the host.
    #[prost(uint32, tag = "2")]
    pub owner: u32,
}

/// Makes the namespaces of a sandbox and its init. Descriptors: the detached mount of its root; if
/// `first_id` is not 0, the user namespace to enter at last; if `has_network` is set, a network namespace
/// to enter instead of a new one.
///
/// Answers: `Launched` from the zygote, then `Ready` or `Failed` from the init.
#[derive(Clone, PartialEq, Message)]
pub struct Launch {
    /// Chosen by the runtime, never used twice.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// The sandbox's group below the configured directories.
    #[prost(string, tag = "2")]
    pub group: String,
    /// Host name.
    #[prost(string, tag = "3")]
    pub hostname: String,
    /// Content of /etc/hosts.
    #[prost(bytes = "vec", tag = "4")]
    pub hosts: Vec<u8>,
    /// Content of /etc/resolv.conf.
    #[prost(bytes = "vec", tag = "5")]
    pub resolv_conf: Vec<u8>,
    /// Most bytes in /dev/shm.
    #[prost(uint64, tag = "6")]
    pub shm_bytes: u64,
    /// Whether the last descriptor is a network namespace.
    #[prost(bool, tag = "7")]
    pub has_network: bool,
    /// What id 0 of the sandbox is on the host; 0: it has no user namespace.
    #[prost(uint32, tag = "16")]
    pub first_id: u32,
    /// Most descriptors of a process; 0: as the host has it.
    #[prost(uint32, tag = "17")]
    pub open_files: u32,
    /// Paths that the sandbox cannot change.
    #[prost(message, repeated, tag = "18")]
    pub protected: Vec<Protected>,
}

/// A path that the sandbox cannot change, or not even see.
#[derive(Clone, PartialEq, Message)]
pub struct Protected {
    /// From the root of the sandbox.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    /// Whether what is there cannot be read either.
    #[prost(bool, tag = "2")]
    pub hidden: bool,
}

/// Runs a command in a sandbox. Descriptors: the pidfd of its init, then standard input, output and
/// error unless `terminal` is set.
///
/// Answers: `Started` from the zygote; `Running` or `Refused` from the process before it becomes the
/// command; `Ended` from the zygote.
#[derive(Clone, PartialEq, Message)]
pub struct Exec {
    /// Chosen by the runtime, never used twice.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// The sandbox's group below the version 1 directories.
    #[prost(string, tag = "2")]
    pub group: String,
    /// The command's own group below the version 2 directory.
    #[prost(string, tag = "3")]
    pub own_group: String,
    /// The command and its arguments; at least one.
    #[prost(bytes = "vec", repeated, tag = "4")]
    pub argv: Vec<Vec<u8>>,
    /// The whole environment, `K=V` each.
    #[prost(bytes = "vec", repeated, tag = "5")]
    pub env: Vec<Vec<u8>>,
    /// Working directory; empty is `/`.
    #[prost(bytes = "vec", tag = "6")]
    pub cwd: Vec<u8>,
    /// `user`, `uid`, `user:group`, `uid:gid`; empty is root. Names are those of the sandbox.
    #[prost(string, tag = "7")]
    pub user: String,
    /// Whether the command gets a terminal of its own.
    #[prost(bool, tag = "8")]
    pub terminal: bool,
    /// Size of the terminal.
    #[prost(uint32, tag = "9")]
    pub rows: u32,
    /// Size of the terminal.
    #[prost(uint32, tag = "10")]
    pub columns: u32,
    /// What id 0 of the sandbox is on the host; 0: it has no user namespace.
    #[prost(uint32, tag = "16")]
    pub first_id: u32,
    /// How many descriptors of version 1 groups follow the streams: those that only some sandboxes have.
    #[prost(uint32, tag = "17")]
    pub rare_groups: u32,
    /// Number of the sandbox's profile.
    #[prost(uint32, tag = "18")]
    pub profile: u32,
    /// Whether the zygote holds output and error until [`Release`], so that a later runtime can go on
    /// reading them.
    #[prost(bool, tag = "11")]
    pub hold: bool,
}

/// What the zygote and its children answer.
#[derive(Clone, PartialEq, Message)]
pub struct FromZygote {
    /// Exactly one.
    #[prost(oneof = "Reply", tags = "1, 2, 3, 4, 5, 6, 7, 8")]
    pub reply: Option<Reply>,
}

/// The answers.
#[derive(Clone, PartialEq, Oneof)]
pub enum Reply {
    /// The zygote can take requests.
    #[prost(message, tag = "1")]
    Configured(Configured),
    /// The init of a sandbox exists.
    #[prost(message, tag = "2")]
    Launched(Started),
    /// The sandbox can run commands.
    #[prost(message, tag = "3")]
    Ready(Ready),
    /// The request has failed, and nothing of it is left but a process that is about to end.
    #[prost(message, tag = "4")]
    Failed(Failed),
    /// The process of a command exists.
    #[prost(message, tag = "5")]
    Started(Started),
    /// The process is about to become the command.
    #[prost(message, tag = "6")]
    Running(Running),
    /// The process could not become the command.
    #[prost(message, tag = "7")]
    Refused(Refused),
    /// A process that was announced has ended and is reaped.
    #[prost(message, tag = "8")]
    Ended(Ended),
}

/// See [`Reply::Configured`].
#[derive(Clone, PartialEq, Message)]
pub struct Configured {}

/// A process and its pidfd, which is the descriptor of the message.
#[derive(Clone, PartialEq, Message)]
pub struct Started {
    /// The request it belongs to.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Process id on the host.
    #[prost(int32, tag = "2")]
    pub pid: i32,
}

/// See [`Reply::Ready`].
#[derive(Clone, PartialEq, Message)]
pub struct Ready {
    /// The request it belongs to.
    #[prost(uint64, tag = "1")]
    pub request: u64,
}

/// See [`Reply::Failed`].
#[derive(Clone, PartialEq, Message)]
pub struct Failed {
    /// The request it belongs to.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// The errno of the step that failed; 0 when there is none.
    #[prost(int32, tag = "2")]
    pub errno: i32,
    /// Which step failed.
    #[prost(string, tag = "3")]
    pub step: String,
}

/// See [`Reply::Running`]. With a terminal, its master is the descriptor of the message.
#[derive(Clone, PartialEq, Message)]
pub struct Running {
    /// The request it belongs to.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Process id as the sandbox sees it.
    #[prost(int32, tag = "2")]
    pub inner_pid: i32,
}

/// See [`Reply::Refused`].
#[derive(Clone, PartialEq, Message)]
pub struct Refused {
    /// The request it belongs to.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// What a shell would answer: 127 missing, 126 not executable.
    #[prost(int32, tag = "2")]
    pub code: i32,
    /// One line for people.
    #[prost(string, tag = "3")]
    pub message: String,
}

/// See [`Reply::Ended`].
#[derive(Clone, PartialEq, Message)]
pub struct Ended {
    /// Process id on the host.
    #[prost(int32, tag = "1")]
    pub pid: i32,
    /// Exit code, or the number of the signal.
    #[prost(int32, tag = "2")]
    pub value: i32,
    /// Whether a signal ended it.
    #[prost(bool, tag = "3")]
    pub is_signal: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_round_trip_with_any_bytes() {
        let exec = Exec {
            request: 9,
            argv: vec![b"/bin/\xff".to_vec(), Vec::new()],
            env: vec![b"A=\x80".to_vec()],
            terminal: true,
            ..Exec::default()
        };
        let message = ToZygote { request: Some(Request::Exec(exec)) };
        assert_eq!(ToZygote::decode(message.encode_to_vec().as_slice()).unwrap(), message);
    }

    #[test]
    fn rubbish_is_an_error() {
        assert!(ToZygote::decode([0xff; 9].as_slice()).is_err());
    }
}
