//! What the command line says about how long sandboxes live, and about making many of them.

use crate::quantity;
use clap::{Args, ValueEnum, value_parser};
use std::time::Duration;

/// What happens to a sandbox that nobody uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum IdleAction {
    /// It sleeps without memory until the next request
    #[default]
    Pause,
    /// It is ended
    Kill,
}

/// How long a sandbox lives when nobody ends it.
#[derive(Debug, Args)]
pub struct LifetimeSpec {
    /// End the sandbox so long after its creation, for example 2h
    #[arg(long, value_name = "TIME", value_parser = quantity::duration)]
    pub ttl: Option<Duration>,
    /// Let it sleep when it had no command, no transfer and nobody who follows it for so long
    #[arg(long, value_name = "TIME", value_parser = quantity::duration)]
    pub idle_timeout: Option<Duration>,
    /// What happens after --idle-timeout
    #[arg(long, value_enum, default_value_t)]
    pub idle_action: IdleAction,
    /// Who answers for it: it is ended when the lease of its owner runs out
    #[arg(long, value_name = "NAME")]
    pub owner: Option<String>,
    /// The owner answers so long from now on, or until `renew-owner` says otherwise
    #[arg(long, value_name = "TIME", value_parser = quantity::duration, requires = "owner")]
    pub lease: Option<Duration>,
}

/// `fork`
#[derive(Debug, Args)]
pub struct Fork {
    /// The sandbox, or the beginning of its id
    pub id: String,
    /// How many
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..))]
    pub count: u32,
}

/// `renew-owner`
#[derive(Debug, Args)]
pub struct RenewOwner {
    /// As it was named to `create`
    pub name: String,
    /// So long from now on; 0s ends everything of it now
    #[arg(long, value_name = "TIME", value_parser = quantity::duration)]
    pub lease: Duration,
}
