//! What the command line looks like: clap types only.
//!
//! Nothing here opens, reads or decides anything; a value that parses is only well formed.

mod oci;
mod store;

pub use oci::{FromRegistry, Oci, OciExport, OciReferrers, Pull};
pub use store::{CopyStore, Diff, Export, Gc, Import, Repair};

use crate::node::options::FsdOptions;
use crate::quantity;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum, value_parser};
use fsd::PlaneKind;
use layer::Error;
use layer::reference::RefKind;
use std::path::PathBuf;
use std::time::Duration;

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
    /// Run one more command in a sandbox and exit with its code
    Exec(Exec),
    /// Copy files into or out of a sandbox: one side is ID:PATH
    Cp(Cp),
    /// List sandboxes
    Ps(Ps),
    /// Print the output of a sandbox's own command
    Logs(Logs),
    /// Stop sandboxes
    Stop(Stop),
    /// Remove sandboxes
    Rm(Rm),
    /// Freeze sandboxes
    Pause(Ids),
    /// Let paused sandboxes go on
    Resume(Ids),
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
    Unpin(Pin),
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

/// `up`
#[derive(Debug, Args)]
pub struct Up {
    /// Started by another command: report readiness on standard output, log to a file.
    #[arg(long, hide = true)]
    pub background: bool,
    /// End when nobody uses the node any more.
    #[arg(long, hide = true)]
    pub ephemeral: bool,
    #[command(flatten)]
    pub fsd: FsdOptions,
}

/// `pin` and `unpin`
#[derive(Debug, Args)]
pub struct Pin {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
    /// Load all of its data too, and wait for it
    #[arg(long)]
    pub load: bool,
}

/// `down`
#[derive(Debug, Args)]
pub struct Down {
    /// Leave sandboxes and mounts as they are; the next node adopts them
    #[arg(long)]
    pub keep: bool,
}

/// `build`
#[derive(Debug, Args)]
pub struct Build {
    /// DIR | FILE.tar[.gz|.zst|.xz] | oci:DIR[:TAG] | oci-archive:FILE | docker-archive:FILE |
    /// docker://HOST/NAME[:TAG][@DIGEST]
    pub source: String,
    /// The reference to publish as; its kind is the layer's kind
    #[arg(short, long = "tag", value_name = "KIND/NAME:TAG")]
    pub tag: String,
    /// Keep this with the layer
    #[arg(long = "annotation", value_name = "K=V", value_parser = pair)]
    pub annotations: Vec<(String, String)>,
    /// Lay out first what the profile of this environment or layer, or in this file, names
    #[arg(long, value_name = "NAME|FILE")]
    pub profile: Option<String>,
    /// Keep the layers of a container image apart; needs a tag of the kind env
    #[arg(long)]
    pub stacked: bool,
    #[command(flatten)]
    pub registry: FromRegistry,
    /// Refresh git indexes to what the mounted layer shows, so that the first `git status` reads no
    /// file of the work tree [default: for workspaces]
    #[arg(long, overrides_with = "no_refresh_git_index")]
    pub refresh_git_index: bool,
    /// Keep git indexes as they are
    #[arg(long)]
    pub no_refresh_git_index: bool,
}

impl Build {
    /// Whether git indexes are refreshed, where the command line says so.
    pub fn git_index(&self) -> Option<bool> {
        (self.refresh_git_index || self.no_refresh_git_index).then_some(self.refresh_git_index)
    }
}

/// `env ...`
#[derive(Debug, Subcommand)]
pub enum Env {
    /// Stack layers into an environment and name it
    Create(EnvCreate),
}

/// `env create`
#[derive(Debug, Args)]
pub struct EnvCreate {
    /// The environment's name, NAME:TAG
    pub name: String,
    /// A layer, or an environment whose layers and settings to take over; bottom first
    #[arg(long = "layer", value_name = "REF", required = true)]
    pub layers: Vec<String>,
    /// Set an environment variable
    #[arg(long = "env", value_name = "K=V", value_parser = variable)]
    pub env: Vec<String>,
    /// The working directory
    #[arg(long, value_name = "DIR")]
    pub cwd: Option<String>,
    /// Name or UID[:GID]
    #[arg(long)]
    pub user: Option<String>,
    /// One word of the entry point; repeat for more
    #[arg(long = "entrypoint", value_name = "WORD", allow_hyphen_values = true)]
    pub entrypoint: Vec<String>,
    /// The default command and its arguments; takes all that follows
    #[arg(long, value_name = "WORD", num_args = 1.., allow_hyphen_values = true)]
    pub cmd: Vec<String>,
    /// Label the environment
    #[arg(long = "label", value_name = "K=V", value_parser = pair)]
    pub labels: Vec<(String, String)>,
}

/// One reference or id.
#[derive(Debug, Args)]
pub struct Named {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
}

/// `ls`
#[derive(Debug, Args)]
pub struct Ls {
    /// Only this kind
    #[arg(value_parser = kind())]
    pub kind: Option<RefKind>,
}

/// `tree`
#[derive(Debug, Args)]
pub struct Tree {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
    /// Only what lies under this path
    #[arg(default_value = "/")]
    pub path: String,
}

/// `tag`
#[derive(Debug, Args)]
pub struct Tag {
    /// What to point at
    #[arg(value_name = "REF")]
    pub reference: String,
    /// The reference to move
    #[arg(value_name = "NEW")]
    pub new: String,
}

/// `mount`
#[derive(Debug, Args)]
pub struct Mount {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
    /// An existing directory
    pub dir: PathBuf,
    /// How to give the layers to the kernel [default: the node's choice]
    #[arg(long, value_parser = plane())]
    pub plane: Option<PlaneKind>,
    /// Writable; what is written is thrown away by `umount`
    #[arg(long)]
    pub rw: bool,
}

/// `umount`
#[derive(Debug, Args)]
pub struct Umount {
    /// The directory given to `mount`
    pub dir: PathBuf,
}

/// What isolates a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// Namespaces, cgroups, seccomp.
    Container,
    /// Prepared slots for short calls.
    Fncall,
    /// A small virtual machine.
    Microvm,
    /// A whole virtual machine.
    Vm,
}

/// What a command in a sandbox gets beside its words; what is left out is the environment's.
#[derive(Debug, Args)]
pub struct Process {
    /// Set an environment variable
    #[arg(short, long = "env", value_name = "K=V", value_parser = variable)]
    pub env: Vec<String>,
    /// The working directory
    #[arg(short = 'w', long, value_name = "DIR")]
    pub cwd: Option<String>,
    /// Name or UID[:GID]
    #[arg(short, long)]
    pub user: Option<String>,
}

/// What `run` and `create` share.
#[derive(Debug, Args)]
pub struct Spec {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    #[arg(value_name = "REF")]
    pub reference: String,
    /// The command, after `--`; without one the environment's own
    #[arg(last = true, value_name = "CMD")]
    pub argv: Vec<String>,
    /// What isolates the sandbox
    #[arg(long, value_enum, default_value_t = Backend::Container)]
    pub backend: Backend,
    /// How to give the layers to the kernel [default: the node's choice]
    #[arg(long, value_parser = plane())]
    pub plane: Option<PlaneKind>,
    #[command(flatten)]
    pub process: Process,
    /// The host name inside
    #[arg(long)]
    pub hostname: Option<String>,
    /// Bound the memory, for example 512M
    #[arg(short, long, value_name = "SIZE", value_parser = quantity::bytes)]
    pub memory: Option<u64>,
    /// Bound the CPU time, in cores, for example 1.5
    #[arg(long, value_name = "N", value_parser = quantity::cpu_millis)]
    pub cpus: Option<u32>,
    /// Bound the number of processes and threads
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    pub pids: Option<u32>,
    /// Bound what may be written, for example 2G
    #[arg(long, value_name = "SIZE", value_parser = quantity::bytes)]
    pub disk: Option<u64>,
    /// Label the sandbox
    #[arg(short, long = "label", value_name = "K=V", value_parser = pair)]
    pub labels: Vec<(String, String)>,
}

/// Standard input and terminal of a command.
#[derive(Debug, Clone, Copy, Args)]
pub struct Attachment {
    /// Forward standard input
    #[arg(short, long)]
    pub interactive: bool,
    /// Give the command a terminal
    #[arg(short, long)]
    pub tty: bool,
}

/// `run`
#[derive(Debug, Args)]
pub struct Run {
    #[command(flatten)]
    pub spec: Spec,
    #[command(flatten)]
    pub attachment: Attachment,
    /// Remove the sandbox at the end; without a node nothing at all stays behind
    #[arg(long)]
    pub rm: bool,
}

/// `create`
#[derive(Debug, Args)]
pub struct Create {
    #[command(flatten)]
    pub spec: Spec,
    /// The same key gives the same sandbox, however often it is asked for
    #[arg(long, value_name = "KEY")]
    pub idempotency_key: Option<String>,
}

/// `exec`
#[derive(Debug, Args)]
pub struct Exec {
    #[command(flatten)]
    pub attachment: Attachment,
    #[command(flatten)]
    pub process: Process,
    /// Kill the command and all it started after this time, for example 30s
    #[arg(long, value_name = "TIME", value_parser = quantity::duration)]
    pub timeout: Option<Duration>,
    /// The sandbox, or the beginning of its id
    pub id: String,
    /// The command, after `--`
    #[arg(last = true, value_name = "CMD", required = true)]
    pub argv: Vec<String>,
}

/// `cp`
#[derive(Debug, Args)]
pub struct Cp {
    /// A path, or ID:PATH in a sandbox
    pub from: String,
    /// A path, or ID:PATH in a sandbox
    pub to: String,
}

/// `ps`
#[derive(Debug, Args)]
pub struct Ps {
    /// Also those that have ended
    #[arg(short, long)]
    pub all: bool,
}

/// `logs`
#[derive(Debug, Args)]
pub struct Logs {
    /// The sandbox, or the beginning of its id
    pub id: String,
    /// Go on until the sandbox ends
    #[arg(short, long)]
    pub follow: bool,
}

/// Some sandboxes.
#[derive(Debug, Args)]
pub struct Ids {
    /// Sandboxes, or the beginnings of their ids
    #[arg(required = true, value_name = "ID")]
    pub ids: Vec<String>,
}

/// `stop`
#[derive(Debug, Args)]
pub struct Stop {
    #[command(flatten)]
    pub which: Ids,
    /// How long to wait between the polite signal and the kill
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = quantity::duration)]
    pub grace: Duration,
}

/// `rm`
#[derive(Debug, Args)]
pub struct Rm {
    #[command(flatten)]
    pub which: Ids,
    /// Stop what still runs
    #[arg(short, long)]
    pub force: bool,
}

/// `pack-diff`
#[derive(Debug, Args)]
pub struct PackDiff {
    /// The sandbox, or the beginning of its id
    pub id: String,
    /// Writes diff/NAME:TAG and env/NAME:TAG
    #[arg(short, long = "tag", value_name = "NAME:TAG")]
    pub tag: String,
    /// Leave out paths that match
    #[arg(long, value_name = "GLOB")]
    pub exclude: Vec<String>,
    /// Keep only paths that match
    #[arg(long, value_name = "GLOB")]
    pub include: Vec<String>,
}

/// `prefetch`
#[derive(Debug, Args)]
pub struct Prefetch {
    #[command(flatten)]
    pub which: Named,
    /// At most so many bytes a second, for example 50M [default: the node's --prefetch-rate]
    #[arg(long, value_name = "SIZE", value_parser = quantity::bytes)]
    pub rate: Option<u64>,
}

/// `profile ...`
#[derive(Debug, Subcommand)]
pub enum Profile {
    /// Run a command in a new sandbox and record what it touches; without one, record until `stop`
    Record(ProfileRecord),
    /// End a recording and keep it
    Stop(ProfileStop),
    /// Show what was touched, layer by layer
    Show(ProfileShow),
    /// Fetch what the profile names, of layers that are attached
    Apply(Named),
    /// Remove the profiles of an environment and its layers
    Rm(Named),
}

/// `profile record`
#[derive(Debug, Args)]
pub struct ProfileRecord {
    #[command(flatten)]
    pub spec: Spec,
    #[command(flatten)]
    pub attachment: Attachment,
}

/// `profile stop`
#[derive(Debug, Args)]
pub struct ProfileStop {
    #[command(flatten)]
    pub which: Named,
    /// Throw away what was recorded
    #[arg(long)]
    pub discard: bool,
}

/// `profile show`
#[derive(Debug, Args)]
pub struct ProfileShow {
    #[command(flatten)]
    pub which: Named,
    /// List every read in its order
    #[arg(long)]
    pub reads: bool,
    /// Draw time against offset into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Write the profile itself into this file, for `build --profile`
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// `fsck`
#[derive(Debug, Args)]
pub struct Fsck {
    /// KIND/NAME:TAG, NAME:TAG of an environment, or an id
    ///
    /// Without one the whole store is checked.
    #[arg(value_name = "REF", conflicts_with = "node")]
    pub reference: Option<String>,
    /// Read and check every byte of data too
    #[arg(long, conflicts_with = "node")]
    pub read_data: bool,
    /// Check the cache of this node instead: every chunk in it, and its bookkeeping
    #[arg(long)]
    pub node: bool,
    /// Drop what is wrong in the node's cache; it is fetched anew
    #[arg(long, requires = "node")]
    pub repair: bool,
}

/// `materialise`
#[derive(Debug, Args)]
pub struct Materialise {
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

/// `keeper`
#[derive(Debug, Args)]
pub struct Keeper {
    /// Which of the keepers this is.
    #[arg(long)]
    pub index: usize,
}

/// `virtiofs`
#[derive(Debug, Args)]
pub struct Virtiofs {
    /// The vhost-user socket to make.
    #[arg(long)]
    pub socket: PathBuf,
    /// The metadata image of the layer.
    #[arg(long)]
    pub metadata: PathBuf,
    /// The exported data of the layer.
    #[arg(long)]
    pub layer_data: PathBuf,
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
    Cli::try_parse_from(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

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
