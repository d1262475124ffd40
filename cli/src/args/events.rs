//! What the command line says about events and about what uses the node.

use crate::quantity;
use clap::{Args, ValueEnum};
use std::time::Duration;

/// `events`
#[derive(Debug, Args)]
pub struct Events {
    /// Only of this sandbox, or of those whose ids begin with this
    #[arg(value_name = "ID")]
    pub id: Option<String>,
    /// Only of this kind, for example exec_end or denied; docs/events.md has all
    #[arg(short, long = "kind", value_name = "KIND")]
    pub kinds: Vec<String>,
    /// Only after the event of this number
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub after: u64,
    /// Only of the last so much time, for example 1h
    #[arg(long, value_name = "TIME", value_parser = quantity::duration)]
    pub since: Option<Duration>,
    /// Go on with what happens
    #[arg(short, long)]
    pub follow: bool,
}

/// By what `top` sorts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum SortBy {
    /// Processor time now
    #[default]
    Cpu,
    /// Memory in use
    Memory,
    /// Processes and threads
    Tasks,
    /// Commands that run
    Commands,
    /// Bytes written
    Disk,
    /// The youngest first
    Age,
    /// Names
    Id,
}

/// `top`
#[derive(Debug, Args)]
pub struct Top {
    /// By what to sort
    #[arg(short, long, value_enum, default_value_t)]
    pub sort: SortBy,
    /// Print one table and end
    #[arg(long)]
    pub once: bool,
    /// Time between two looks
    #[arg(short, long, value_name = "TIME", default_value = "2s", value_parser = quantity::duration)]
    pub every: Duration,
    /// At most so many sandboxes [default: what the terminal has room for; all where there is none]
    #[arg(short = 'n', long, value_name = "N")]
    pub lines: Option<usize>,
}
