//! From a validated request and its environment to what the backend does. Pure: no I/O, no clock.

use crate::backends::Command;
use crate::spec::SandboxSpec;
use layer::environment::RunConfig;

/// Limits with every default filled in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedLimits {
    /// Most bytes of memory.
    pub memory_bytes: u64,
    /// Most tasks.
    pub pids: u32,
    /// Thousandths of a core; none is no quota.
    pub cpu_millis: Option<u32>,
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
    /// Content of /etc/resolv.conf: nobody is asked, since there is no network.
    pub resolv_conf: Vec<u8>,
    /// Most bytes in /dev/shm.
    pub shm_bytes: u64,
}

const DEFAULT_SHM_BYTES: u64 = 64 << 20;

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
    };
    LaunchPlan {
        limits,
        hostname,
        hosts: hosts.into_bytes(),
        resolv_conf: b"# no network\n".to_vec(),
        shm_bytes: DEFAULT_SHM_BYTES.min(limits.memory_bytes),
    }
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
