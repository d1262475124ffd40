//! What the command line says about function calls.

use super::Process;
use crate::quantity;
use clap::{Args, value_parser};
use std::path::PathBuf;
use std::time::Duration;

/// `call`
#[derive(Debug, Args)]
pub struct Call {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
    /// The command, after `--`
    #[arg(last = true, value_name = "CMD", required = true)]
    pub argv: Vec<String>,
    /// Put a file of this host there before the command starts
    #[arg(long = "file", value_name = "HOST:PATH", value_parser = file)]
    pub files: Vec<(PathBuf, String)>,
    /// Bring a file back when everything has ended; * and ? in PATH stand for parts of a name, then HOST is a folder
    #[arg(long = "out", value_name = "PATH:HOST", value_parser = output)]
    pub outputs: Vec<(String, PathBuf)>,
    #[command(flatten)]
    pub process: Process,
    /// Kill it after this time [default: 60s]
    #[arg(long, value_name = "TIME", value_parser = quantity::duration)]
    pub timeout: Option<Duration>,
    /// Bound the memory, for example 512M
    #[arg(short, long, value_name = "SIZE", value_parser = quantity::bytes)]
    pub memory: Option<u64>,
    /// Bound the CPU time, in cores, for example 1.5
    #[arg(long, value_name = "N", value_parser = quantity::cpu_millis)]
    pub cpus: Option<u32>,
    /// Bound the number of processes and threads
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    pub pids: Option<u32>,
    /// Bound what may be written, for example 64M [default: about 256M]
    #[arg(long, value_name = "SIZE", value_parser = quantity::bytes)]
    pub disk: Option<u64>,
    /// Cut each stream of output beyond this [default: 1M; 16M at most]
    #[arg(long, value_name = "SIZE", value_parser = quantity::bytes)]
    pub output_limit: Option<u64>,
    /// The most bytes of all files that come back [default: 1M; 16M at most]
    #[arg(long, value_name = "SIZE", value_parser = quantity::bytes)]
    pub files_limit: Option<u64>,
}

fn file(text: &str) -> Result<(PathBuf, String), String> {
    match text.rsplit_once(':') {
        Some((host, inside)) if !host.is_empty() && !inside.is_empty() => {
            Ok((host.into(), inside.to_owned()))
        }
        _ => Err("expected HOST:PATH".to_owned()),
    }
}

fn output(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once(':') {
        Some((inside, host)) if !host.is_empty() && !inside.is_empty() => {
            Ok((inside.to_owned(), host.into()))
        }
        _ => Err("expected PATH:HOST".to_owned()),
    }
}
