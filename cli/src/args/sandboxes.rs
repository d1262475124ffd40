//! What the command line says about sandboxes.

use super::{pair, plane, variable};
use crate::quantity;
use clap::{Args, ValueEnum, value_parser};
use fsd::PlaneKind;
use std::time::Duration;

/// What isolates a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// Namespaces, cgroups, seccomp.
    Container,
    /// Prepared slots for short calls.
    Fncall,
    /// A small virtual machine.
    Microvm,
    /// A whole virtual machine.
    Vm,
}

/// What a sandbox may ask of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum SandboxProfile {
    /// For code that only computes: no right of root, no tracing, no change of users, no sockets without a network
    Strict,
    /// For most work
    #[default]
    Default,
    /// For builds of packages: any personality too
    Build,
}

/// A path that nobody inside may change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Protected {
    /// The path.
    pub path: String,
    /// Whether nobody may read it either.
    pub hidden: bool,
}

fn protected(text: &str) -> Result<Protected, String> {
    let (path, hidden) = match text.rsplit_once(':') {
        Some((path, "hidden")) => (path, true),
        Some((path, "ro")) => (path, false),
        Some(_) => return Err("after the path comes `:ro` or `:hidden`".to_owned()),
        None => (text, false),
    };
    if !path.starts_with('/') {
        return Err("the path is not absolute".to_owned());
    }
    Ok(Protected { path: path.to_owned(), hidden })
}

/// What a command in a sandbox gets beside its words; what is left out is the environment's.
#[derive(Debug, Args)]
pub struct Process {
    /// Set an environment variable
    #[arg(short, long = "env", value_name = "K=V", value_parser = variable)]
    pub env: Vec<String>,
    /// The working directory
    #[arg(short = 'w', long, value_name = "DIR")]
    pub cwd: Option<String>,
    /// Name or UID[:GID]
    #[arg(short, long)]
    pub user: Option<String>,
}

/// What `run` and `create` share.
#[derive(Debug, Args)]
pub struct Spec {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
    /// The command, after `--`; without one the environment's own
    #[arg(last = true, value_name = "CMD")]
    pub argv: Vec<String>,
    /// What isolates the sandbox
    #[arg(long, value_enum, default_value_t = Backend::Container)]
    pub backend: Backend,
    /// How to give the layers to the kernel [default: the node's choice]
    #[arg(long, value_parser = plane())]
    pub plane: Option<PlaneKind>,
    #[command(flatten)]
    pub process: Process,
    /// The host name inside
    #[arg(long)]
    pub hostname: Option<String>,
    /// Bound the memory, for example 512M
    #[arg(short, long, value_name = "SIZE", value_parser = quantity::bytes)]
    pub memory: Option<u64>,
    /// Bound the CPU time, in cores, for example 1.5
    #[arg(long, value_name = "N", value_parser = quantity::cpu_millis)]
    pub cpus: Option<u32>,
    /// Bound the number of processes and threads
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    pub pids: Option<u32>,
    /// Bound what may be written, for example 2G
    #[arg(long, value_name = "SIZE", value_parser = quantity::bytes)]
    pub disk: Option<u64>,
    /// Bound the files, folders and links that may be made
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..))]
    pub inodes: Option<u64>,
    /// Bound the descriptors of each process [default: 65536]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(16..))]
    pub open_files: Option<u32>,
    /// Bound what is read from the node's disk, in bytes a second, for example 20M
    #[arg(long, value_name = "SIZE", value_parser = quantity::bytes)]
    pub disk_read: Option<u64>,
    /// Bound what is written to it; with cgroup version 1 only what is synced or bypasses the cache
    #[arg(long, value_name = "SIZE", value_parser = quantity::bytes)]
    pub disk_write: Option<u64>,
    /// Its share of processors when all want them, 1 to 10000 [default: 100]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=10_000))]
    pub cpu_weight: Option<u32>,
    /// The only processors that it runs on, for example 0-3,6
    #[arg(long, value_name = "LIST")]
    pub cpuset: Option<String>,
    #[command(flatten)]
    pub network: super::NetworkSpec,
    #[command(flatten)]
    pub lifetime: super::LifetimeSpec,
    /// What it may ask of the kernel, and which rights its root has
    #[arg(long, value_enum, default_value_t)]
    pub profile: SandboxProfile,
    /// Let nobody inside change what is at this path, nor move or replace it; with `:hidden` nor read it
    #[arg(long, value_name = "PATH[:ro|hidden]", value_parser = protected)]
    pub protect: Vec<Protected>,
    /// Label the sandbox
    #[arg(short, long = "label", value_name = "K=V", value_parser = pair)]
    pub labels: Vec<(String, String)>,
}

/// Standard input and terminal of a command.
#[derive(Debug, Clone, Copy, Args)]
pub struct Attachment {
    /// Forward standard input
    #[arg(short, long)]
    pub interactive: bool,
    /// Give the command a terminal
    #[arg(short, long)]
    pub tty: bool,
}

/// `run`
#[derive(Debug, Args)]
pub struct Run {
    #[command(flatten)]
    pub spec: Spec,
    #[command(flatten)]
    pub attachment: Attachment,
    /// Remove the sandbox at the end; without a node nothing at all stays behind
    #[arg(long)]
    pub rm: bool,
}

/// `create`
#[derive(Debug, Args)]
pub struct Create {
    #[command(flatten)]
    pub spec: Spec,
    /// The same key gives the same sandbox, however often it is asked for
    #[arg(long, value_name = "KEY")]
    pub idempotency_key: Option<String>,
    /// Create so many, and print each id as soon as its sandbox is ready
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    pub count: Option<u32>,
}

/// `exec`
#[derive(Debug, Args)]
pub struct Exec {
    #[command(flatten)]
    pub attachment: Attachment,
    #[command(flatten)]
    pub process: Process,
    /// Leave it running and print its id; `attach`, `tail`, `signal` and `wait` take the id
    #[arg(short, long)]
    pub background: bool,
    /// How much of its output a command in the background keeps, the newest [default: 16M, the most]
    #[arg(long, value_name = "SIZE", value_parser = quantity::bytes, requires = "background")]
    pub keep: Option<u64>,
    /// Cut output beyond this
    #[arg(long, value_name = "SIZE", value_parser = quantity::bytes)]
    pub output_limit: Option<u64>,
    /// Kill the command and all it started after this time, for example 30s
    #[arg(long, value_name = "TIME", value_parser = quantity::duration)]
    pub timeout: Option<Duration>,
    /// The sandbox, or the beginning of its id
    pub id: String,
    /// The command, after `--`
    #[arg(last = true, value_name = "CMD", required = true)]
    pub argv: Vec<String>,
}

/// `cp`
#[derive(Debug, Args)]
pub struct Cp {
    /// A path, or ID:PATH in a sandbox
    pub from: String,
    /// A path, or ID:PATH in a sandbox
    pub to: String,
}

/// `ps`
#[derive(Debug, Args)]
pub struct Ps {
    /// Also those that have ended
    #[arg(short, long)]
    pub all: bool,
    /// Only those with this label
    #[arg(short, long = "label", value_name = "K=V", value_parser = pair)]
    pub labels: Vec<(String, String)>,
}

/// `logs`
#[derive(Debug, Args)]
pub struct Logs {
    /// The sandbox, or the beginning of its id
    pub id: String,
    /// Go on until the sandbox ends
    #[arg(short, long)]
    pub follow: bool,
}

/// Some sandboxes.
#[derive(Debug, Args)]
pub struct Ids {
    /// Sandboxes, or the beginnings of their ids
    #[arg(required = true, value_name = "ID")]
    pub ids: Vec<String>,
}

/// `stop`
#[derive(Debug, Args)]
pub struct Stop {
    #[command(flatten)]
    pub which: Ids,
    /// How long to wait between the polite signal and the kill
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = quantity::duration)]
    pub grace: Duration,
}

/// `rm`
#[derive(Debug, Args)]
pub struct Rm {
    #[command(flatten)]
    pub which: Ids,
    /// Stop what still runs
    #[arg(short, long)]
    pub force: bool,
}

/// `pack-diff`
#[derive(Debug, Args)]
pub struct PackDiff {
    /// The sandbox, or the beginning of its id
    pub id: String,
    /// Writes diff/NAME:TAG and env/NAME:TAG
    #[arg(short, long = "tag", value_name = "NAME:TAG")]
    pub tag: String,
    /// Leave out paths that match
    #[arg(long, value_name = "GLOB")]
    pub exclude: Vec<String>,
    /// Keep only paths that match
    #[arg(long, value_name = "GLOB")]
    pub include: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_protected_path_says_whether_it_is_hidden() {
        let of = |path: &str, hidden| Ok(Protected { path: path.into(), hidden });
        assert_eq!(protected("/opt/x"), of("/opt/x", false));
        assert_eq!(protected("/opt/x:ro"), of("/opt/x", false));
        assert_eq!(protected("/a:b:hidden"), of("/a:b", true));
        assert!(protected("/opt/x:rw").is_err() && protected("opt").is_err());
    }
}
