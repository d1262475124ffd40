//! The arguments of what keeps a store in order.

use crate::quantity;
use clap::{Args, value_parser};
use std::path::PathBuf;
use std::time::Duration;

/// `repair`
#[derive(Debug, Args)]
pub struct Repair {
    /// Take what is damaged or lost from this store
    #[arg(long, value_name = "URL")]
    pub from: Option<String>,
    /// Do not read the data: only what is lost or cannot be read at all is found
    #[arg(long)]
    pub skip_data: bool,
}

/// `diff`
#[derive(Debug, Args)]
pub struct Diff {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "OLD")]
    pub old: String,
    /// The same
    #[arg(value_name = "NEW")]
    pub new: String,
}

/// `copy-store`
#[derive(Debug, Args)]
pub struct CopyStore {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub references: Vec<String>,
    /// Everything that a reference names
    #[arg(long)]
    pub all: bool,
    /// The store to copy to
    #[arg(long, value_name = "URL")]
    pub to: String,
}

/// `export`
#[derive(Debug, Args)]
pub struct Export {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
    /// The file to write; it must not exist
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

/// `import`
#[derive(Debug, Args)]
pub struct Import {
    /// What `export` wrote
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

/// `gc`
#[derive(Debug, Args)]
pub struct Gc {
    /// Say what would go, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Delete what was condemned at least this long ago [default: 1h]
    #[arg(long, value_name = "TIME", value_parser = quantity::duration)]
    pub grace: Option<Duration>,
    /// Keep what references pointed to within this time [default: 7d]
    #[arg(long, value_name = "TIME", value_parser = quantity::duration)]
    pub history: Option<Duration>,
    /// Copy what is in use out of packs of which less than this is in use; 0 copies nothing [default: 50]
    #[arg(long, value_name = "PERCENT", value_parser = value_parser!(u32).range(0..=100))]
    pub compact: Option<u32>,
    /// Condemn nothing any more: what has no use begins its grace anew
    #[arg(long, conflicts_with_all = ["dry_run", "grace", "history", "compact"])]
    pub undo: bool,
}
