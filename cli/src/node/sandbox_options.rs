//! What holds for every sandbox of a node: settings of `up` for the runtime.
//!
//! Each can come from the environment too, so that a node that another command starts in the background
//! has them.

use crate::quantity;
use clap::{Args, ValueEnum};
use runtime::RuntimeConfig;

/// Settings of the runtime.
#[derive(Debug, Clone, Default, Args)]
pub struct SandboxOptions {
    /// Whether root of a sandbox is nobody of the host
    #[arg(long, value_enum, default_value_t, env = "LAMELLA_USER_NAMESPACES")]
    pub user_namespaces: UserNamespaces,
    /// Give a sandbox that names no --disk one of this size; without it sandboxes share the disk of the data
    /// directory, and whoever fills it is stopped
    #[arg(long, value_name = "SIZE", env = "LAMELLA_SANDBOX_DISK", value_parser = quantity::bytes)]
    pub sandbox_disk: Option<u64>,
    /// Stop the sandboxes that wrote most when the disk of the data directory has less than this free
    /// [default: a hundredth of it]
    #[arg(long, value_name = "SIZE", env = "LAMELLA_DISK_RESERVE", value_parser = quantity::bytes)]
    pub disk_reserve: Option<u64>,
}

/// Whether sandboxes have users of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum UserNamespaces {
    /// Where kernel and file system can do it
    #[default]
    Auto,
    /// Or the node does not start
    Required,
    /// Root inside is root of the host, held by the other walls
    Off,
}

impl SandboxOptions {
    /// Puts the settings where the runtime reads them.
    pub fn apply(&self, config: &mut RuntimeConfig) {
        config.user_namespaces = match self.user_namespaces {
            UserNamespaces::Auto => runtime::UserNamespaces::Auto,
            UserNamespaces::Required => runtime::UserNamespaces::Required,
            UserNamespaces::Off => runtime::UserNamespaces::Off,
        };
        config.default_disk_bytes = self.sandbox_disk;
        config.disk_reserve_bytes = self.disk_reserve;
    }
}
