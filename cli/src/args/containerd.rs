//! The arguments of `snapshotter` and `containerd`.

use clap::{Args, Subcommand};
use std::path::PathBuf;

/// `snapshotter`
#[derive(Debug, Args)]
pub struct Snapshotter {
    /// Where containerd connects to [default: DATA/run/snapshotter.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Where snapshots lie, what containers write among them [default: DATA/snapshotter]
    #[arg(long, value_name = "DIR")]
    pub root: Option<PathBuf>,
}

/// `containerd ...`
#[derive(Debug, Subcommand)]
pub enum Containerd {
    /// Make an environment or a layer an image of containerd, without fetching any of its data
    ///
    /// Afterwards `ctr run --snapshotter lamella IMAGE ID` starts from metadata alone. `lamella snapshotter` has
    /// to run, and containerd's configuration has to name it.
    Add(ContainerdAdd),
}

/// `containerd add`
#[derive(Debug, Args)]
pub struct ContainerdAdd {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
    /// What containerd is to call the image [default: REF]
    #[arg(value_name = "IMAGE")]
    pub image: Option<String>,
    /// The socket of containerd
    #[arg(
        long,
        value_name = "PATH",
        env = "CONTAINERD_ADDRESS",
        default_value = "/run/containerd/containerd.sock"
    )]
    pub address: PathBuf,
    /// The namespace of containerd
    #[arg(long, value_name = "NAME", env = "CONTAINERD_NAMESPACE", default_value = "default")]
    pub namespace: String,
    /// What containerd's configuration calls `lamella snapshotter`
    #[arg(long, value_name = "NAME", default_value = "lamella")]
    pub snapshotter: String,
    /// The socket of `lamella snapshotter` [default: DATA/run/snapshotter.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}
