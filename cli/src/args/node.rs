//! What the command line says about a node, its cache and its mounts.

use super::{Attachment, Named, Spec, plane};
use crate::node::options::FsdOptions;
use crate::node::sandbox_options::SandboxOptions;
use crate::quantity;
use clap::{Args, Subcommand};
use fsd::PlaneKind;
use std::path::PathBuf;

/// `up`
#[derive(Debug, Args)]
pub struct Up {
    /// Started by another command: report readiness on standard output, log to a file.
    #[arg(long, hide = true)]
    pub background: bool,
    /// End when nobody uses the node any more.
    #[arg(long, hide = true)]
    pub ephemeral: bool,
    #[command(flatten)]
    pub fsd: FsdOptions,
    #[command(flatten)]
    pub sandboxes: SandboxOptions,
}

/// `pin`
#[derive(Debug, Args)]
pub struct Pin {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
    /// Load all of its data too, and wait for it
    #[arg(long)]
    pub load: bool,
}

/// `down`
#[derive(Debug, Args)]
pub struct Down {
    /// Leave sandboxes and mounts as they are; the next node adopts them
    #[arg(long)]
    pub keep: bool,
}

/// `mount`
#[derive(Debug, Args)]
pub struct Mount {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
    /// An existing directory
    pub dir: PathBuf,
    /// How to give the layers to the kernel [default: the node's choice]
    #[arg(long, value_parser = plane())]
    pub plane: Option<PlaneKind>,
    /// Writable; what is written is thrown away by `umount`
    #[arg(long)]
    pub rw: bool,
}

/// `umount`
#[derive(Debug, Args)]
pub struct Umount {
    /// The directory given to `mount`
    pub dir: PathBuf,
}

/// `prefetch`
#[derive(Debug, Args)]
pub struct Prefetch {
    #[command(flatten)]
    pub which: Named,
    /// At most so many bytes a second, for example 50M [default: the node's --prefetch-rate]
    #[arg(long, value_name = "SIZE", value_parser = quantity::bytes)]
    pub rate: Option<u64>,
}

/// `profile ...`
#[derive(Debug, Subcommand)]
pub enum Profile {
    /// Run a command in a new sandbox and record what it touches; without one, record until `stop`
    Record(Box<ProfileRecord>),
    /// End a recording and keep it
    Stop(ProfileStop),
    /// Show what was touched, layer by layer
    Show(ProfileShow),
    /// Fetch what the profile names, of layers that are attached
    Apply(Named),
    /// Remove the profiles of an environment and its layers
    Rm(Named),
}

/// `profile record`
#[derive(Debug, Args)]
pub struct ProfileRecord {
    #[command(flatten)]
    pub spec: Spec,
    #[command(flatten)]
    pub attachment: Attachment,
}

/// `profile stop`
#[derive(Debug, Args)]
pub struct ProfileStop {
    #[command(flatten)]
    pub which: Named,
    /// Throw away what was recorded
    #[arg(long)]
    pub discard: bool,
}

/// `profile show`
#[derive(Debug, Args)]
pub struct ProfileShow {
    #[command(flatten)]
    pub which: Named,
    /// List every read in its order
    #[arg(long)]
    pub reads: bool,
    /// Draw time against offset into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Write the profile itself into this file, for `build --profile`
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// `keeper`
#[derive(Debug, Args)]
pub struct Keeper {
    /// Which of the keepers this is.
    #[arg(long)]
    pub index: usize,
}

/// `virtiofs`
#[derive(Debug, Args)]
pub struct Virtiofs {
    /// The vhost-user socket to make.
    #[arg(long)]
    pub socket: PathBuf,
    /// The metadata image of the layer.
    #[arg(long)]
    pub metadata: PathBuf,
    /// The exported data of the layer.
    #[arg(long)]
    pub layer_data: PathBuf,
}
