//! What the command line says about the network of sandboxes.

use clap::{Args, Subcommand};

/// What a new sandbox reaches on the network, and what reaches it.
#[derive(Debug, Args)]
pub struct NetworkSpec {
    /// `none`, or a file with one rule or preset a line
    #[arg(long, value_name = "none|FILE")]
    pub net: Option<String>,
    /// Allow this: [tcp:|udp:]WHERE[:PORTS], or PRESET[,before=DATE][,deny=PACKAGE]...
    ///
    /// WHERE is a name, *.NAME, an address or a range. Presets are pypi, npm, go, apt, github and crates; the
    /// first four go through this node, which can leave out what was published since a date, and packages.
    #[arg(long, value_name = "RULE")]
    pub allow: Vec<String>,
    /// Pass connections to a port of this host on to the sandbox: [ADDRESS:]PORT[:PORT of the sandbox]
    #[arg(short, long, value_name = "PORTS")]
    pub publish: Vec<String>,
}

/// `net`
#[derive(Debug, Args)]
pub struct Net {
    /// The sandbox, or the beginning of its id
    pub id: String,
    #[command(subcommand)]
    pub action: Option<NetAction>,
}

/// What to do with a sandbox's network.
#[derive(Debug, Subcommand)]
pub enum NetAction {
    /// Show what is allowed, published and open
    Show,
    /// Allow this and nothing else, from now on and for open connections; without a rule nothing
    Set {
        /// As with `create --allow`
        #[arg(value_name = "RULE")]
        rules: Vec<String>,
    },
    /// Allow this as well
    Add {
        /// As with `create --allow`
        #[arg(value_name = "RULE", required = true)]
        rules: Vec<String>,
    },
    /// Pass connections to a port of this host on to the sandbox
    Publish {
        /// [ADDRESS:]PORT[:PORT of the sandbox]
        ports: String,
    },
    /// Close a published port, and its connections
    Unpublish {
        /// As `show` names it
        ports: String,
    },
    /// Print what was refused
    Denials {
        /// Go on until the sandbox ends
        #[arg(short, long)]
        follow: bool,
    },
}
