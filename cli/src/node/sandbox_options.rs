//! What holds for every sandbox of a node: settings of `up` for the runtime.
//!
//! Each can come from the environment too, so that a node that another command starts in the background
//! has them.

use crate::quantity;
use clap::{Args, ValueEnum, value_parser};
use runtime::RuntimeConfig;
use std::net::{IpAddr, SocketAddr};

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
    /// Ask this resolver for the names that sandboxes may ask for, instead of those of the host
    #[arg(
        long = "resolver", value_name = "ADDRESS[:PORT]", env = "LAMELLA_RESOLVER",
        value_delimiter = ',', value_parser = resolver
    )]
    pub resolvers: Vec<SocketAddr>,
    /// Reach a server of a registry elsewhere, for example https://pypi.org=https://mirror.example
    #[arg(
        long = "registry-mirror", value_name = "URL=URL", env = "LAMELLA_REGISTRY_MIRROR",
        value_delimiter = ',', value_parser = mirror
    )]
    pub registry_mirrors: Vec<(String, String)>,
    /// Where the host has no swap, make some of so much compressed memory, for what paused sandboxes hold
    #[arg(long, value_name = "SIZE", env = "LAMELLA_ZRAM", value_parser = quantity::bytes)]
    pub zram: Option<u64>,
    /// Begin another file of events when one has this size [default: 16M]
    #[arg(long, value_name = "SIZE", env = "LAMELLA_EVENT_FILE_SIZE", value_parser = quantity::bytes)]
    pub event_file_size: Option<u64>,
    /// Keep so many files of events [default: 16]
    #[arg(long, value_name = "N", env = "LAMELLA_EVENT_FILES", value_parser = value_parser!(u16).range(2..))]
    pub event_files: Option<u16>,
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

/// An address, with port 53 where none is said.
fn resolver(text: &str) -> Result<SocketAddr, String> {
    let whole = text.parse::<SocketAddr>();
    let address = || text.parse::<IpAddr>().map(|address| SocketAddr::new(address, 53));
    whole.or_else(|_| address()).map_err(|_| "expected ADDRESS or ADDRESS:PORT".to_owned())
}

/// Two URLs.
fn mirror(text: &str) -> Result<(String, String), String> {
    let is_url = |text: &str| text.starts_with("https://") || text.starts_with("http://");
    let two = text.split_once('=').filter(|(server, mirror)| is_url(server) && is_url(mirror));
    let (server, mirror) = two.ok_or("expected URL=URL")?;
    Ok((server.trim_end_matches('/').to_owned(), mirror.to_owned()))
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
        config.network.resolvers.clone_from(&self.resolvers);
        config.network.mirrors = self.registry_mirrors.iter().cloned().collect();
        config.zram_bytes = self.zram;
        let usual = config.events;
        config.events = runtime::EventRotation {
            file_bytes: self.event_file_size.unwrap_or(usual.file_bytes),
            files: self.event_files.map_or(usual.files, usize::from),
        };
    }
}
