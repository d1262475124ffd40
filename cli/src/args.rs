//! What the command line looks like: clap types only.
//!
//! Nothing here opens, reads or decides anything; a value that parses is only well formed.

mod call;
mod commands;
mod containerd;
mod events;
mod oci;
mod store;

mod images;
mod lifetime;
mod network;
mod node;
mod sandboxes;
mod sign;

pub use call::Call;
pub use commands::*;
pub use containerd::{Containerd, ContainerdAdd, Snapshotter};
pub use events::*;
pub use images::*;
pub use lifetime::*;
pub use network::*;
pub use node::*;
pub use oci::{FromRegistry, Oci, OciExport, OciReferrers, Pull};
pub use sandboxes::*;
pub use sign::*;
pub use store::{CopyStore, Diff, Export, Gc, Import, Repair};

use crate::configuration::Configuration;
use crate::node::options::FsdOptions;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use fsd::PlaneKind;
use layer::Error;
use layer::reference::RefKind;
use std::path::PathBuf;

/// Where everything lies when nobody says otherwise.
pub const DEFAULT_DATA: &str = "/var/lib/lamella";

/// Layered, lazily loaded images and the sandboxes that stand on them.
#[derive(Debug, Parser)]
#[command(name = "lamella", version, arg_required_else_help = true, max_term_width = 100)]
pub struct Cli {
    /// The store: file:///DIR, a path, s3://BUCKET/PREFIX, 3fs:///DIR, or memory:NAME [default: DATA/store]
    #[arg(long, global = true, value_name = "URL", env = "LAMELLA_STORE")]
    pub store: Option<String>,
    /// The data directory of this node [default: /var/lib/lamella]
    #[arg(long, global = true, value_name = "DIR", env = "LAMELLA_DATA")]
    pub data: Option<PathBuf>,
    /// The configuration file; /dev/null is none [default: /etc/lamella.toml, where it exists]
    #[arg(long, global = true, value_name = "FILE", env = "LAMELLA_CONFIG")]
    pub config: Option<PathBuf>,
    /// Print results as JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// Print the whole chain of causes of an error
    #[arg(short, long, global = true)]
    pub verbose: bool,
    /// What to do.
    #[command(subcommand)]
    pub action: Action,
}

/// Every command.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// Say what this host can do, and why not more
    Doctor,
    /// Run the node in the foreground
    Up(Up),
    /// End the node of the data directory
    Down(Down),
    /// Make the running node the program that is installed now; sandboxes and mounts go on
    Upgrade,
    /// Build a layer from a directory, an archive or an image, and publish it
    Build(Build),
    /// Make an environment of a container image, one layer for each of its layers
    Pull(Pull),
    /// Container images: write one, ask a registry
    #[command(subcommand)]
    Oci(Oci),
    /// Images of containerd that load lazily
    #[command(subcommand)]
    Containerd(Containerd),
    /// Serve layers to containerd, as snapshots
    Snapshotter(Snapshotter),
    /// Compose environments
    #[command(subcommand)]
    Env(Env),
    /// List references
    Ls(Ls),
    /// Describe a layer or an environment
    Inspect(Named),
    /// List the files of a layer or an environment
    Tree(Tree),
    /// Show every move of a reference
    History(Named),
    /// Point a reference at what another one, or an id, names
    Tag(Tag),
    /// Take a reference away; its history stays
    Untag(Named),
    /// Mount a layer or an environment at a directory
    Mount(Mount),
    /// Take back a mount
    Umount(Umount),
    /// Run a command in a new sandbox and exit with its code
    Run(Run),
    /// Create a sandbox and print its id
    Create(Create),
    /// Run a command in a container made ahead and gone afterwards, with files in and out, and exit with its code
    Call(Call),
    /// Run one more command in a sandbox and exit with its code
    Exec(Exec),
    /// List the commands of a sandbox that run, and the last ones that ended
    Commands(Commands),
    /// Follow a command: what it printed, what it prints, its end. Leaving does not end it
    Attach(Attach),
    /// Print the end of what a command printed
    Tail(Tail),
    /// Signal a command and every process that comes from it
    Signal(Signal),
    /// Wait for the end of a command and exit with its code
    Wait(OneCommand),
    /// Files of a sandbox: list, print, write, change, watch
    #[command(subcommand)]
    Files(Files),
    /// Copy files into or out of a sandbox: one side is ID:PATH
    Cp(Cp),
    /// List sandboxes
    Ps(Ps),
    /// Print the output of a sandbox's own command
    Logs(Logs),
    /// Say what happened: lives of sandboxes, commands, transfers, refusals, limits
    Events(Events),
    /// Show what the node and its sandboxes use, again and again
    Top(Top),
    /// Stop sandboxes
    Stop(Stop),
    /// Remove sandboxes
    Rm(Rm),
    /// Freeze sandboxes and give their memory back
    Pause(Ids),
    /// Let paused sandboxes go on
    Resume(Ids),
    /// Make sandboxes that begin with the files of another one; processes are not copied
    Fork(Fork),
    /// Say for how long an owner answers for its sandboxes; then they are ended
    RenewOwner(RenewOwner),
    /// What a sandbox reaches on the network: show it, change it, see what was refused
    Net(Net),
    /// Publish what a sandbox wrote as a layer and an environment
    PackDiff(PackDiff),
    /// Load all data of an environment's or a layer's layers into the node cache, behind all demand
    ///
    /// A load goes on when the node's daemon is started again. One of a layer that is in use ends when its
    /// last user goes away; `pin --load` keeps it.
    Prefetch(Prefetch),
    /// Record what a workload touches, look at it, fetch it ahead
    #[command(subcommand)]
    Profile(Profile),
    /// Show what the node has loaded and what it cost
    Stats,
    /// Keep a layer, or every layer of an environment, in the node cache
    Pin(Pin),
    /// Let a pinned layer be evicted again
    Unpin(Named),
    /// Check the store, or one layer or environment on it, or the node's cache
    Fsck(Fsck),
    /// Lay the plain data of a layer on the store, so that hosts mount it without a daemon
    Materialise(Materialise),
    /// Mend the store from what is left of it and from another one that has the same
    Repair(Repair),
    /// Show the paths that differ between two layers or environments
    Diff(Diff),
    /// Copy layers and environments with their names to another store; what it has is not sent again
    CopyStore(CopyStore),
    /// Write a layer or an environment with its name into one file, to carry it somewhere
    Export(Export),
    /// Take in what `export` wrote
    Import(Import),
    /// Keys to sign with
    #[command(subcommand)]
    Key(KeyAction),
    /// Sign a layer, or an environment with all of its layers
    Sign(Sign),
    /// Check that somebody who is trusted has signed a layer or an environment, and show it
    Verify(Verify),
    /// Rebuild the catalog from the store alone
    Reindex,
    /// Delete from the store what no reference, no history and nobody needs any more
    ///
    /// What has no use is condemned first, and deleted by a later run that finds no use for it either. Until
    /// then everything is there as before; using it again is enough to keep it.
    Gc(Gc),
    /// Measure something, or list what can be measured
    Bench(Bench),
    /// The on-demand file-system daemon of a node.
    #[command(hide = true)]
    Fsd(FsdOptions),
    /// A keeper of the on-demand file-system daemon.
    #[command(hide = true)]
    Keeper(Keeper),
    /// The server of one guest's virtiofs device.
    #[command(hide = true)]
    Virtiofs(Virtiofs),
}

/// One reference or id.
#[derive(Debug, Args)]
pub struct Named {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
}

/// `bench`
#[derive(Debug, Args)]
pub struct Bench {
    /// What to measure, and the arguments of that bench; without any the list
    // One list, so that everything behind the name is the bench's: it has a `--json` of its own.
    #[arg(value_name = "NAME [ARGUMENTS]", trailing_var_arg = true, allow_hyphen_values = true)]
    pub words: Vec<String>,
}

fn variable(text: &str) -> Result<String, String> {
    pair(text).map(|_| text.to_owned())
}

/// A kind of reference, with all of them in the help and in refusals.
fn kind() -> impl TypedValueParser<Value = RefKind> {
    let words = PossibleValuesParser::new(RefKind::ALL.map(RefKind::word));
    words.try_map(|word| word.parse::<RefKind>().map_err(|error: Error| error.to_string()))
}

/// A plane, the best first; `doctor` says which this host has.
pub fn plane() -> impl TypedValueParser<Value = PlaneKind> {
    let words = PossibleValuesParser::new(PlaneKind::ALL.map(PlaneKind::name));
    words.try_map(|word| word.parse::<PlaneKind>().map_err(|error: Error| error.to_string()))
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected K=V".to_owned()),
    }
}

/// Reads a command line. The error prints itself and knows its exit code.
pub fn parse<I, T>(words: I) -> Result<Cli, clap::Error>
where
    I: IntoIterator<Item = T>,
    T: Into<std::ffi::OsString> + Clone,
{
    parse_with(words, &Configuration::default())
}

/// The same, with a configuration for what neither the command line nor the environment says.
pub fn parse_with<I, T>(words: I, configuration: &Configuration) -> Result<Cli, clap::Error>
where
    I: IntoIterator<Item = T>,
    T: Into<std::ffi::OsString> + Clone,
{
    let program = configuration.apply(Cli::command());
    let matches = program.try_get_matches_from(words).map_err(without_hidden)?;
    Cli::from_arg_matches(&matches).map_err(without_hidden)
}

/// clap names every command to whom names none, the hidden ones as well.
fn without_hidden(mut error: clap::Error) -> clap::Error {
    let kind = ContextKind::ValidSubcommand;
    if let Some(ContextValue::Strings(mut names)) = error.remove(kind) {
        let program = Cli::command();
        let is_hidden =
            |name: &String| program.find_subcommand(name).is_some_and(clap::Command::is_hide_set);
        names.retain(|name| !is_hidden(name));
        error.insert(kind, ContextValue::Strings(names));
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn parsed(line: &str) -> Cli {
        parse(line.split(' ')).unwrap_or_else(|error| panic!("{line}: {error}"))
    }

    fn refused(line: &str) -> i32 {
        parse(line.split(' ')).err().unwrap_or_else(|| panic!("{line} was accepted")).exit_code()
    }

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn hidden_commands_are_not_named_to_whom_names_none() {
        let error = parse(["lamella", "--json"]).unwrap_err().to_string();
        assert!(error.contains("pack-diff"), "{error}");
        for hidden in ["fsd", "keeper", "virtiofs"] {
            assert!(!error.contains(hidden), "{error}");
        }
    }

    #[test]
    fn data_is_read_before_and_behind_a_command() {
        assert_eq!(parsed("lamella --data /a ls").data, Some("/a".into()));
        assert_eq!(parsed("lamella ls --data /b").data, Some("/b".into()));
        assert_eq!(parsed("lamella --data /a ls --data /b").data, Some("/b".into()));
        assert_eq!(parsed("lamella env create x --layer base/a --data /c").data, Some("/c".into()));
    }

    #[test]
    fn fsck_has_a_word_of_its_own_for_reading_data() {
        let cli = parsed("lamella fsck base/x:1 --read-data --data /a --store /s");
        assert_eq!(cli.data, Some("/a".into()));
        assert_eq!(cli.store.as_deref(), Some("/s"));
        assert!(matches!(cli.action, Action::Fsck(Fsck { read_data: true, .. })));
    }

    #[test]
    fn a_configuration_counts_less_than_what_is_said() {
        let text =
            "data = \"/file\"\nstore = \"/s\"\ncache-size = \"10G\"\nverify-metadata = true\n";
        let told = Configuration::of(text).unwrap();
        let told = |line: &str| parse_with(line.split(' '), &told).unwrap();
        let cli = told("lamella up");
        assert_eq!((cli.data, cli.store), (Some("/file".into()), Some("/s".into())));
        let Action::Up(up) = cli.action else { panic!("not up") };
        assert_eq!((up.fsd.cache_size, up.fsd.verify_metadata), (Some(10 << 30), true));
        let cli = told("lamella up --data /said --cache-size 1G");
        assert_eq!(cli.data, Some("/said".into()));
        let Action::Up(up) = cli.action else { panic!("not up") };
        assert_eq!(up.fsd.cache_size, Some(1 << 30));
        assert_eq!(told("lamella ls").store.as_deref(), Some("/s"));
        // The daemon gets what the node tells it, and no more.
        let Action::Fsd(fsd) = told("lamella fsd").action else { panic!("not fsd") };
        assert_eq!(fsd.cache_size, None);
    }

    #[test]
    fn a_command_stands_behind_two_dashes() {
        let cli = parsed("lamella run --rm -e A=b -m 512M --cpus 1.5 base/x -- sh -c --json");
        assert!(!cli.json);
        let Action::Run(run) = cli.action else { panic!("not run") };
        assert!(run.rm);
        assert_eq!(run.spec.argv, ["sh", "-c", "--json"]);
        assert_eq!(run.spec.memory, Some(512 << 20));
        assert_eq!(run.spec.cpus, Some(1500));
        let Action::Exec(exec) = parsed("lamella exec -it --timeout 3s ab -- ls").action else {
            panic!("not exec")
        };
        assert!(exec.attachment.interactive && exec.attachment.tty);
        assert_eq!(exec.timeout, Some(Duration::from_secs(3)));
    }

    #[test]
    fn what_follows_the_name_of_a_bench_is_its_own() {
        let cli = parsed("lamella bench cold --json file --rounds 3");
        assert!(!cli.json);
        let Action::Bench(bench) = cli.action else { panic!("not bench") };
        assert_eq!(bench.words, ["cold", "--json", "file", "--rounds", "3"]);
        assert!(parsed("lamella --json bench").json);
    }

    #[test]
    fn cmd_takes_all_that_follows() {
        let cli = parsed("lamella env create py:1 --layer base/a --layer toolkit/b --cmd sh -c x");
        let Action::Env(Env::Create(create)) = cli.action else { panic!("not env create") };
        assert_eq!(create.layers, ["base/a", "toolkit/b"]);
        assert_eq!(create.cmd, ["sh", "-c", "x"]);
    }

    #[test]
    fn wrong_usage_has_exit_code_two() {
        for line in [
            "lamella nonsense",
            "lamella build",
            "lamella build /x",
            "lamella ls nonsense",
            "lamella fsck base/x:1 --data",
            "lamella run --memory lots base/x",
            "lamella run --cpus 0 base/x",
            "lamella run --env novalue base/x",
            "lamella exec id",
            "lamella stop",
            "lamella tag one",
            "lamella env create x",
            "lamella mount base/x /mnt --plane magic",
        ] {
            assert_eq!(refused(line), 2, "{line}");
        }
    }
}
