//! What the command line says about layers and environments.

use super::{FromRegistry, kind, pair, variable};
use clap::{Args, Subcommand};
use layer::reference::RefKind;

/// `build`
#[derive(Debug, Args)]
pub struct Build {
    /// DIR | FILE.tar[.gz|.zst|.xz] | oci:DIR[:TAG] | oci-archive:FILE | docker-archive:FILE |
    /// docker://HOST/NAME[:TAG][@DIGEST]
    pub source: String,
    /// The reference to publish as; its kind is the layer's kind
    #[arg(short, long = "tag", value_name = "KIND/NAME:TAG")]
    pub tag: String,
    /// Keep this with the layer
    #[arg(long = "annotation", value_name = "K=V", value_parser = pair)]
    pub annotations: Vec<(String, String)>,
    /// Lay out first what the profile of this environment or layer, or in this file, names
    #[arg(long, value_name = "NAME|FILE")]
    pub profile: Option<String>,
    /// Keep the layers of a container image apart; needs a tag of the kind env
    #[arg(long)]
    pub stacked: bool,
    #[command(flatten)]
    pub registry: FromRegistry,
    /// Refresh git indexes to what the mounted layer shows, so that the first `git status` reads no
    /// file of the work tree [default: for workspaces]
    #[arg(long, overrides_with = "no_refresh_git_index")]
    pub refresh_git_index: bool,
    /// Keep git indexes as they are
    #[arg(long)]
    pub no_refresh_git_index: bool,
}

impl Build {
    /// Whether git indexes are refreshed, where the command line says so.
    pub fn git_index(&self) -> Option<bool> {
        (self.refresh_git_index || self.no_refresh_git_index).then_some(self.refresh_git_index)
    }
}

/// `env ...`
#[derive(Debug, Subcommand)]
pub enum Env {
    /// Stack layers into an environment and name it
    Create(EnvCreate),
}

/// `env create`
#[derive(Debug, Args)]
pub struct EnvCreate {
    /// The environment's name, NAME:TAG
    pub name: String,
    /// A layer, or an environment whose layers and settings to take over; bottom first
    #[arg(long = "layer", value_name = "REF", required = true)]
    pub layers: Vec<String>,
    /// Set an environment variable
    #[arg(long = "env", value_name = "K=V", value_parser = variable)]
    pub env: Vec<String>,
    /// The working directory
    #[arg(long, value_name = "DIR")]
    pub cwd: Option<String>,
    /// Name or UID[:GID]
    #[arg(long)]
    pub user: Option<String>,
    /// One word of the entry point; repeat for more
    #[arg(long = "entrypoint", value_name = "WORD", allow_hyphen_values = true)]
    pub entrypoint: Vec<String>,
    /// The default command and its arguments; takes all that follows
    #[arg(long, value_name = "WORD", num_args = 1.., allow_hyphen_values = true)]
    pub cmd: Vec<String>,
    /// Label the environment
    #[arg(long = "label", value_name = "K=V", value_parser = pair)]
    pub labels: Vec<(String, String)>,
}

/// `ls`
#[derive(Debug, Args)]
pub struct Ls {
    /// Only this kind
    #[arg(value_parser = kind())]
    pub kind: Option<RefKind>,
}

/// `tree`
#[derive(Debug, Args)]
pub struct Tree {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
    /// Only what lies under this path
    #[arg(default_value = "/")]
    pub path: String,
}

/// `tag`
#[derive(Debug, Args)]
pub struct Tag {
    /// What to point at
    #[arg(value_name = "REF")]
    pub reference: String,
    /// The reference to move
    #[arg(value_name = "NEW")]
    pub new: String,
}

/// `fsck`
#[derive(Debug, Args)]
pub struct Fsck {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    ///
    /// Without one the whole store is checked.
    #[arg(value_name = "REF", conflicts_with = "node")]
    pub reference: Option<String>,
    /// Read and check every byte of data too
    #[arg(long, conflicts_with = "node")]
    pub read_data: bool,
    /// Check the cache of this node instead: every chunk in it, and its bookkeeping
    #[arg(long)]
    pub node: bool,
    /// Name the signatures of keys that are not among these: a file, or a directory of files that end in .pub
    ///
    /// They are no damage. [default: DATA/trusted-keys, where it exists]
    #[arg(long, value_name = "KEYS", conflicts_with = "node")]
    pub keys: Option<String>,
    /// Drop what is wrong in the node's cache; it is fetched anew
    #[arg(long, requires = "node")]
    pub repair: bool,
}

/// `materialise`
#[derive(Debug, Args)]
pub struct Materialise {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
}
