//! What Lamella costs beside what it replaces: one command per question, real input, peers in the
//! same run.
//!
//! `run` is the only way in; the command line calls it with a bench's name and its arguments. Nothing
//! here is used by a daemon, and every bench drives the installed program as a person would.

#![forbid(unsafe_code)]

use anyhow::bail;

/// Names that [`run`] knows, with what each one shows.
pub const NAMES: &[(&str, &str)] = &[
    ("corpus", "build (once) the real input that the others read"),
    ("demo", "from a Debian root file system to a lazily loaded container and back"),
    ("cold", "first command on an empty node: on-demand against fetch-and-unpack"),
    ("warm", "reads of a complete layer against mkfs.erofs's image of the same tree"),
    ("create", "containers per second against crun and runc"),
    ("build", "base image build against `zstd -3` on its tar"),
];

/// Runs one bench. `args` are its own options; `--help` among them prints them.
///
/// # Errors
/// An unknown name, a missing tool, a failed command, or (with `--check`) a missed bar.
pub fn run(name: &str, args: &[String]) -> anyhow::Result<()> {
    let _ = args;
    bail!("no bench is called {name}")
}
