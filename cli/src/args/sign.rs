//! The arguments of what has to do with signatures.

use super::pair;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// `key ...`
#[derive(Debug, Subcommand)]
pub enum KeyAction {
    /// Make a key: a private one in FILE and the public one in FILE.pub
    Generate(KeyFile),
    /// Print the public key of a private one
    Show(KeyFile),
}

/// A private key.
#[derive(Debug, Args)]
pub struct KeyFile {
    /// The private key; only its owner can read it
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

/// `sign`
#[derive(Debug, Args)]
pub struct Sign {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
    /// The private key, as `key generate` or `openssl genpkey -algorithm ed25519` make it
    #[arg(long, value_name = "FILE")]
    pub key: PathBuf,
    /// Say this under the signature
    #[arg(long = "claim", value_name = "K=V", value_parser = pair)]
    pub claims: Vec<(String, String)>,
}

/// `verify`
#[derive(Debug, Args)]
pub struct Verify {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
    /// Who is trusted: a file with public keys, or a directory of files that end in .pub
    #[arg(long, value_name = "KEYS")]
    pub keys: String,
}
