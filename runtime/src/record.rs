//! What is known of a sandbox, as the journal keeps it.

use crate::backends::Handle;
use crate::lifetimes::Lifetime;
use crate::network::NetworkRecord;
use crate::plan::CommandDefaults;
use crate::protect::ProtectedPath;
use layer::{EnvId, LayerId, Result};
use proto::v1;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Where a sandbox is in its life.
///
/// ```text
/// creating ──> running <──> paused
///    │            └──> stopping <──┘
///    v                   v
///  failed              gone          lost (found dead after a restart)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Being made.
    Creating,
    /// Commands can run.
    Running,
    /// Frozen.
    Paused,
    /// Being ended.
    Stopping,
    /// Ended, with an [`End`].
    Gone,
    /// Could not be made; the reason says why.
    Failed,
    /// Ended while no runtime watched.
    Lost,
}

impl State {
    /// Whether nothing of it runs any more.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Gone | Self::Failed | Self::Lost)
    }

    /// As a message.
    pub fn wire(self) -> v1::State {
        match self {
            Self::Creating => v1::State::Creating,
            Self::Running => v1::State::Running,
            Self::Paused => v1::State::Paused,
            Self::Stopping => v1::State::Stopping,
            Self::Gone => v1::State::Gone,
            Self::Failed => v1::State::Failed,
            Self::Lost => v1::State::Lost,
        }
    }
}

/// How a sandbox or a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum End {
    /// With this code.
    Exited(i32),
    /// By this signal.
    Signal(i32),
    /// The kernel ended it for lack of memory.
    Oom,
    /// Its time was over.
    Timeout,
    /// We were asked to end it.
    Killed,
    /// It failed with this code while what it wrote had no room.
    DiskFull(i32),
    /// It ended while no runtime watched, and nobody knows how.
    Lost,
}

impl End {
    /// What a shell would show.
    pub fn exit_code(self) -> i32 {
        match self {
            Self::Exited(code) => code,
            Self::Signal(signal) => 128 + signal,
            Self::Oom | Self::Killed => 137,
            Self::Timeout => 124,
            Self::DiskFull(code) => code,
            Self::Lost => 1,
        }
    }

    /// As a message.
    pub fn wire(self) -> v1::End {
        use v1::end::How;
        let how = match self {
            Self::Exited(code) => How::Exited(code),
            Self::Signal(signal) => How::Signal(signal),
            Self::Oom => How::Oom(true),
            Self::Timeout => How::Timeout(true),
            Self::Killed => How::Killed(true),
            Self::DiskFull(_) => How::DiskFull(true),
            Self::Lost => How::Lost(LOST.to_owned()),
        };
        v1::End { how: Some(how) }
    }
}

const LOST: &str = "it ended while no node watched";

/// Limits as they were asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct AskedLimits {
    pub memory_bytes: u64,
    pub cpu_millis: u32,
    pub pids: u32,
    /// Bytes of the writable layer.
    #[serde(default)]
    pub writable_bytes: u64,
    /// Inodes in it.
    #[serde(default)]
    pub inodes: u64,
    /// Descriptors of one process.
    #[serde(default)]
    pub open_files: u32,
    /// Bytes a second from the disk.
    #[serde(default)]
    pub read_bytes_per_s: u64,
    /// Bytes a second to the disk.
    #[serde(default)]
    pub write_bytes_per_s: u64,
    /// Share of processors.
    #[serde(default)]
    pub cpu_weight: u32,
    /// The only processors.
    #[serde(default)]
    pub cpuset: String,
}

/// All that is known of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version of this structure.
    pub version: u32,
    /// Its name.
    pub id: String,
    /// Where it is in its life.
    pub state: State,
    /// Of failed and lost, and of an end that nobody asked for.
    pub reason: String,
    /// As the caller named it.
    pub environment: String,
    /// Hexadecimal; empty for an environment made of a bare layer.
    pub env_id: String,
    /// Hexadecimal, bottom first.
    pub layers: Vec<String>,
    /// Nanoseconds since 1970.
    pub created_unix_ns: u64,
    /// Labels of the caller.
    pub labels: BTreeMap<String, String>,
    /// Key that makes a repeated create find this one.
    pub idempotency_key: Option<String>,
    /// As asked for.
    pub limits: AskedLimits,
    /// Its own command.
    pub argv: Vec<String>,
    /// What commands start from.
    pub defaults: CommandDefaults,
    /// The image's configuration, for an environment made from it.
    pub config: layer::environment::RunConfig,
    /// What the environment keeps of the container image that it came from.
    #[serde(default)]
    pub image: Option<layer::Digest>,
    /// What it reaches on the network, and what reaches it.
    #[serde(default)]
    pub network: NetworkRecord,
    /// How long it lives.
    #[serde(default)]
    pub lifetime: Lifetime,
    /// The name of its profile.
    #[serde(default)]
    pub profile: String,
    /// What it cannot change.
    #[serde(default)]
    pub protected: Vec<ProtectedPath>,
    /// How it ended.
    pub end: Option<End>,
    /// Finds the running instance.
    pub handle: Option<Handle>,
}

impl crate::journal::Entry for Record {
    const NAME: &'static str = "journal";

    fn key(&self) -> &str {
        &self.id
    }

    fn since(&self) -> u64 {
        self.created_unix_ns
    }
}

/// Version of [`Record`] that this build writes.
pub const RECORD_VERSION: u32 = 1;

impl Record {
    /// The layers, bottom first.
    pub fn layer_ids(&self) -> Result<Vec<LayerId>> {
        self.layers.iter().map(|text| text.parse()).collect()
    }

    /// As a message.
    pub fn wire(&self, memory_bytes: u64) -> v1::Sandbox {
        let layers = self.layer_ids().unwrap_or_default();
        let env_id = self.env_id.parse::<EnvId>().map(|id| id.as_bytes().to_vec());
        v1::Sandbox {
            id: self.id.clone(),
            state: self.state.wire().into(),
            reason: self.reason.clone(),
            backend: v1::Backend::Container.into(),
            environment: self.environment.clone(),
            env_id: env_id.unwrap_or_default(),
            layer_ids: layers.iter().map(|id| id.as_bytes().to_vec()).collect(),
            created_unix_ns: self.created_unix_ns,
            init_pid: self.handle.as_ref().map_or(0, |handle| handle.pid as u32),
            end: self.end.map(End::wire),
            labels: self.labels.clone().into_iter().collect(),
            limits: Some(v1::Limits {
                memory_bytes: self.limits.memory_bytes,
                cpu_millis: self.limits.cpu_millis,
                pids: self.limits.pids,
                writable_bytes: self.limits.writable_bytes,
                inodes: self.limits.inodes,
                open_files: self.limits.open_files,
                read_bytes_per_s: self.limits.read_bytes_per_s,
                write_bytes_per_s: self.limits.write_bytes_per_s,
                cpu_weight: self.limits.cpu_weight,
                cpuset: self.limits.cpuset.clone(),
            }),
            memory_bytes,
            argv: self.argv.clone(),
            expires_unix_ns: self.lifetime.expires_unix_ns(),
            owner: self.lifetime.owner.clone().unwrap_or_default(),
            idle_timeout_ms: self.lifetime.idle_ms,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A record in this state.
    pub fn record(state: State) -> Record {
        Record {
            version: RECORD_VERSION,
            id: "abc".into(),
            state,
            reason: String::new(),
            environment: "env/a:b".into(),
            env_id: String::new(),
            layers: Vec::new(),
            created_unix_ns: 7,
            labels: BTreeMap::new(),
            idempotency_key: None,
            limits: AskedLimits::default(),
            argv: vec!["true".into()],
            defaults: CommandDefaults::default(),
            config: layer::environment::RunConfig::default(),
            network: NetworkRecord::default(),
            profile: String::new(),
            protected: Vec::new(),
            lifetime: Lifetime::default(),
            image: None,
            end: Some(End::Exited(3)),
            handle: None,
        }
    }

    #[test]
    fn ends_have_the_codes_that_shells_show() {
        assert_eq!(End::Exited(3).exit_code(), 3);
        assert_eq!(End::Signal(15).exit_code(), 143);
        assert_eq!(End::Oom.exit_code(), 137);
    }
}
