//! From a validated request and its environment to what the backend does. Pure: no I/O, no clock.

use crate::backends::Command;
use crate::disk::DiskSize;
use crate::protect::ProtectedPath;
use crate::spec::SandboxSpec;
use layer::environment::RunConfig;
use sys::cgroup::Bandwidth;
use sys::profile::Profile;

/// Limits with every default filled in.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PlannedLimits {
    /// Most bytes of memory.
    pub memory_bytes: u64,
    /// Most tasks.
    pub pids: u32,
    /// Thousandths of a core; none is no quota.
    pub cpu_millis: Option<u32>,
    /// The share of processors when all want them; none is 100.
    pub cpu_weight: Option<u32>,
    /// The only processors that it runs on; none is all.
    pub processors: Option<String>,
    /// Bytes a second from and to the disk of the data directory.
    pub bandwidth: Bandwidth,
    /// A writable layer of this size; none shares the disk of the data directory with others.
    pub disk: Option<DiskSize>,
    /// Most descriptors of one process.
    pub open_files: Option<u32>,
}

impl PlannedLimits {
    /// Whether it needs a group where most sandboxes have none.
    pub fn are_rare(&self) -> bool {
        self.processors.is_some() || self.bandwidth != Bandwidth::default()
    }
}

/// What the backend makes.
#[derive(Debug, Clone)]
pub struct LaunchPlan {
    /// Limits of the whole sandbox.
    pub limits: PlannedLimits,
    /// Host name.
    pub hostname: String,
    /// Content of /etc/hosts.
    pub hosts: Vec<u8>,
    /// Content of /etc/resolv.conf: the resolver of the node, which can be reached as soon as there is a network.
    pub resolv_conf: Vec<u8>,
    /// Most bytes in /dev/shm.
    pub shm_bytes: u64,
    /// What its commands may ask of the kernel.
    pub profile: Profile,
    /// What it cannot change.
    pub protected: Vec<ProtectedPath>,
    /// A tree to begin the writable layer with; none: it begins empty.
    pub seed: Option<std::path::PathBuf>,
}

const DEFAULT_SHM_BYTES: u64 = 64 << 20;
/// Of a sandbox that bounds its inodes only.
const DEFAULT_DISK_BYTES: u64 = 10 << 30;

/// Plans the sandbox itself.
pub fn launch(spec: &SandboxSpec, defaults: &PlannedLimits, id: &str) -> LaunchPlan {
    let hostname = spec.hostname.clone().unwrap_or_else(|| id.to_owned());
    let hosts = format!(
        "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{hostname}\n"
    );
    let limits = PlannedLimits {
        memory_bytes: spec.memory_bytes.unwrap_or(defaults.memory_bytes),
        pids: spec.pids.unwrap_or(defaults.pids),
        cpu_millis: spec.cpu_millis.or(defaults.cpu_millis),
        cpu_weight: spec.cpu_weight.or(defaults.cpu_weight),
        processors: spec.processors.clone().or_else(|| defaults.processors.clone()),
        bandwidth: spec.bandwidth,
        disk: disk(spec, defaults),
        open_files: spec.open_files.or(defaults.open_files),
    };
    LaunchPlan {
        hostname,
        hosts: hosts.into_bytes(),
        resolv_conf: crate::network::RESOLV_CONF.to_vec(),
        shm_bytes: DEFAULT_SHM_BYTES.min(limits.memory_bytes),
        profile: profile(spec),
        protected: spec.protected.clone(),
        seed: None,
        limits,
    }
}

fn profile(spec: &SandboxSpec) -> Profile {
    let is_offline = spec.network.allow.is_empty() && spec.network.publish.is_empty();
    if is_offline { spec.profile.without_network() } else { spec.profile }
}

/// Only who asks for a bound, or whose node has one, gets a disk of its own.
fn disk(spec: &SandboxSpec, defaults: &PlannedLimits) -> Option<DiskSize> {
    if spec.disk_bytes.is_none() && spec.inodes.is_none() {
        return defaults.disk;
    }
    let usual = defaults.disk.unwrap_or(DiskSize { bytes: DEFAULT_DISK_BYTES, inodes: 0 });
    let bytes = spec.disk_bytes.unwrap_or(usual.bytes);
    Some(DiskSize { bytes, inodes: spec.inodes.unwrap_or(0) })
}

/// What a command starts from: the image's configuration under the sandbox's own settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CommandDefaults {
    /// Environment, `K=V`, each key once.
    pub env: Vec<String>,
    /// Working directory.
    pub cwd: String,
    /// User.
    pub user: String,
    /// Signal that asks the main command to end.
    pub stop_signal: i32,
}

/// Merges the image's configuration and the request.
pub fn command_defaults(spec: &SandboxSpec, config: &RunConfig) -> CommandDefaults {
    let cwd = spec.cwd.as_ref().unwrap_or(&config.cwd);
    CommandDefaults {
        env: merge_env(&config.env, &spec.env),
        cwd: if cwd.is_empty() { "/".to_owned() } else { cwd.clone() },
        user: spec.user.clone().unwrap_or_else(|| config.user.clone()),
        stop_signal: config.stop_signal.as_deref().and_then(signal_number).unwrap_or(SIGTERM),
    }
}

const SIGTERM: i32 = 15;

/// A command over the defaults of its sandbox.
pub fn command(
    defaults: &CommandDefaults,
    argv: Vec<String>,
    env: &[String],
    cwd: Option<String>,
    user: Option<String>,
) -> Command {
    Command {
        argv,
        env: merge_env(&defaults.env, env),
        cwd: cwd.unwrap_or_else(|| defaults.cwd.clone()),
        user: user.unwrap_or_else(|| defaults.user.clone()),
        terminal: None,
        is_main: false,
        is_held: false,
    }
}

/// Later entries win; a key stays where it came first.
fn merge_env(base: &[String], over: &[String]) -> Vec<String> {
    let key = |entry: &str| entry.split('=').next().unwrap_or_default().to_owned();
    let mut merged: Vec<String> = Vec::with_capacity(base.len() + over.len());
    for entry in base.iter().chain(over) {
        let name = key(entry);
        match merged.iter_mut().find(|known| key(known) == name) {
            Some(known) => known.clone_from(entry),
            None => merged.push(entry.clone()),
        }
    }
    merged
}

/// `SIGTERM`, `TERM` or `15`.
fn signal_number(text: &str) -> Option<i32> {
    const NAMES: [(&str, i32); 9] = [
        ("HUP", 1),
        ("INT", 2),
        ("QUIT", 3),
        ("KILL", 9),
        ("USR1", 10),
        ("USR2", 12),
        ("TERM", 15),
        ("WINCH", 28),
        ("PWR", 30),
    ];
    let name = text.strip_prefix("SIG").unwrap_or(text);
    let by_name = NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number);
    by_name.or_else(|| text.parse().ok().filter(|number| (1..=64).contains(number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_made_for_whom_asks_or_whose_node_says_so() {
        let none = PlannedLimits::default();
        let node = PlannedLimits {
            disk: Some(DiskSize { bytes: 1 << 30, inodes: 0 }),
            ..PlannedLimits::default()
        };
        let plan = |spec: &SandboxSpec, node| launch(spec, node, "id").limits.disk;
        let quiet = SandboxSpec::default();
        assert_eq!((plan(&quiet, &none), plan(&quiet, &node)), (None, node.disk));
        let sized = SandboxSpec { disk_bytes: Some(5 << 20), ..SandboxSpec::default() };
        assert_eq!(plan(&sized, &node), Some(DiskSize { bytes: 5 << 20, inodes: 0 }));
        let counted = SandboxSpec { inodes: Some(9), ..SandboxSpec::default() };
        assert_eq!(plan(&counted, &none), Some(DiskSize { bytes: 10 << 30, inodes: 9 }));
        assert_eq!(plan(&counted, &node), Some(DiskSize { bytes: 1 << 30, inodes: 9 }));
    }

    #[test]
    fn the_request_wins_over_the_image() {
        let config = RunConfig {
            env: vec!["A=1".into(), "PATH=/bin".into()],
            cwd: "/src".into(),
            user: "ann".into(),
            stop_signal: Some("SIGINT".into()),
            ..RunConfig::default()
        };
        let spec = SandboxSpec { env: vec!["A=2".into(), "B=".into()], ..SandboxSpec::default() };
        let defaults = command_defaults(&spec, &config);
        assert_eq!(defaults.env, ["A=2", "PATH=/bin", "B="]);
        assert_eq!((defaults.cwd.as_str(), defaults.user.as_str()), ("/src", "ann"));
        assert_eq!(defaults.stop_signal, 2);
        let run = command(&defaults, vec!["x".into()], &["B=3".into()], Some("/".into()), None);
        assert_eq!(run.env, ["A=2", "PATH=/bin", "B=3"]);
        assert_eq!((run.cwd.as_str(), run.user.as_str()), ("/", "ann"));
    }
}
