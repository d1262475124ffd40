//! The arguments of `pull` and `oci`, and what `build` has in common with them.

use builder::export::Compression;
use builder::oci::{ImageName, Platform};
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// Which image, and how to reach it.
#[derive(Debug, Args)]
pub struct FromRegistry {
    /// The image for this platform, OS/ARCHITECTURE[/VARIANT] [default: this machine's]
    #[arg(long, value_name = "PLATFORM")]
    pub platform: Option<Platform>,
    /// Speak plain HTTP with the registry; with one on this machine that is so anyway
    #[arg(long)]
    pub insecure: bool,
}

/// `pull`
#[derive(Debug, Args)]
pub struct Pull {
    /// [docker://]HOST[:PORT]/NAME[:TAG][@DIGEST] | oci:DIR[:TAG] | oci-archive:FILE | docker-archive:FILE
    pub image: String,
    /// The environment to make, NAME:TAG [default: the image's own name]
    #[arg(short, long = "tag", value_name = "NAME:TAG")]
    pub tag: Option<String>,
    /// Make one layer of all
    #[arg(long)]
    pub merge: bool,
    #[command(flatten)]
    pub registry: FromRegistry,
}

/// `oci ...`
#[derive(Debug, Subcommand)]
pub enum Oci {
    /// Write an environment or a layer as an OCI image layout
    Export(OciExport),
    /// List what refers to an image in its registry: signatures, attestations
    Referrers(OciReferrers),
}

/// `oci export`
#[derive(Debug, Args)]
pub struct OciExport {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
    /// Where to write: a directory, or one file when it ends in .tar; nothing may be there yet
    #[arg(value_name = "DIR|FILE.tar")]
    pub place: PathBuf,
    /// What the image is called in the layout [default: the tag of REF]
    #[arg(long, value_name = "TAG")]
    pub name: Option<String>,
    /// How to compress layers of which no original is kept: gzip, zstd or none
    #[arg(long, value_name = "HOW", default_value_t)]
    pub compression: Compression,
}

/// `oci referrers`
#[derive(Debug, Args)]
pub struct OciReferrers {
    /// [docker://]HOST[:PORT]/NAME[:TAG][@DIGEST]
    pub image: ImageName,
    /// Only artifacts of this type
    #[arg(long = "type", value_name = "TYPE")]
    pub kind: Option<String>,
    /// Speak plain HTTP with the registry; with one on this machine that is so anyway
    #[arg(long)]
    pub insecure: bool,
}
