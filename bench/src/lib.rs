//! What Lamella costs beside what it replaces: one command per question, real input, peers in the
//! same run.
//!
//! `run` is the only way in; the command line calls it with a bench's name and its arguments. No
//! daemon uses anything here. The benches drive the program that they are part of, as a person would.

#![forbid(unsafe_code)]

mod build;
mod burst;
mod cases;
mod catalog;
mod cold;
mod collect;
mod container;
pub mod corpus;
mod create;
mod daemon;
mod decoding;
mod dedup;
mod demo;
mod eager;
mod fncall;
mod limits;
mod measure;
mod metadata;
mod node;
mod options;
mod pack_diff;
mod page;
mod pages;
mod peers;
mod plot;
mod probe;
mod report;
mod scratch;
mod shell;
mod start;
mod supervise;
mod touched;
mod walk;
mod warm;

pub use supervise::{is_worker, supervise};

use anyhow::bail;

/// Names that [`run`] knows, with what each one shows.
pub const NAMES: &[(&str, &str)] = &[
    ("corpus", "build (once) the real input that the others read"),
    ("demo", "from a Debian root file system to a lazily loaded container and back"),
    ("cold", "first command on an empty node: on-demand against fetch-and-unpack"),
    ("start", "commands on an empty node against the same over the unpacked trees"),
    ("burst", "64 sandboxes of 16 environments at once on an empty node against eager"),
    ("page", "cold random and sequential reads with the store in memory"),
    ("daemon", "memory of the file-system daemon, time of an attach and of a stack"),
    ("metadata", "size of the metadata images against mkfs.erofs's"),
    ("warm", "reads of a complete layer against ext4, EROFS, squashfs and fuse-overlayfs"),
    ("create", "containers per second against crun and runc"),
    ("fncall", "function calls against create, exec and stop of a container"),
    ("limits", "an exec beside bombs of every kind against the same exec alone"),
    ("pack-diff", "what a sandbox wrote becomes an environment: many new files, a few changes"),
    ("gc", "collection, fsck and reindex of a store of a million chunks"),
    ("dedup", "bytes stored over ten versions against fixed chunks, restic, borg and mkfs.erofs"),
    ("build", "base image build against `zstd -3` on its tar"),
];

/// Runs one bench in this process; [`supervise`] gives it one of its own. `args` are its own options; `--help` among
/// them prints them.
///
/// # Errors
/// An unknown name, wrong options, a missing tool, a failed command, or (with `--check`) a missed bar.
pub fn run(name: &str, args: &[String]) -> anyhow::Result<()> {
    let Some(options) = options::parse(name, args)? else { return Ok(()) };
    match name {
        "corpus" => corpus::command(&options),
        "demo" => demo::command(&options),
        "cold" => cold::command(&options),
        "start" => start::command(&options),
        "burst" => burst::command(&options),
        "page" => page::command(&options),
        "daemon" => daemon::command(&options),
        "metadata" => metadata::command(&options),
        "warm" => warm::command(&options),
        "create" => create::command(&options),
        "fncall" => fncall::command(&options),
        "limits" => limits::command(&options),
        "pack-diff" => pack_diff::command(&options),
        "dedup" => dedup::command(&options),
        "build" => build::command(&options),
        "gc" => collect::command(&options),
        _ => {
            let names: Vec<&str> = NAMES.iter().map(|(name, _)| *name).collect();
            bail!("no bench is called {name}; there are {}", names.join(", "))
        }
    }
}
