//! What the command line says about commands that run in a sandbox already, and about its files.

use crate::quantity;
use clap::{ArgGroup, Args, Subcommand, value_parser};

/// One command of a sandbox.
#[derive(Debug, Args)]
pub struct OneCommand {
    /// The sandbox, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub sandbox: String,
    /// The command, or the beginning of its id; `main` is the sandbox's own
    #[arg(value_name = "COMMAND")]
    pub command: String,
}

/// `commands`
#[derive(Debug, Args)]
pub struct Commands {
    /// The sandbox, or the beginning of its id
    #[arg(value_name = "SANDBOX")]
    pub sandbox: String,
}

/// `attach`
#[derive(Debug, Args)]
pub struct Attach {
    #[command(flatten)]
    pub which: OneCommand,
    #[command(flatten)]
    pub attachment: super::Attachment,
    /// Begin after so many bytes of output
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    pub from: u64,
}

/// `tail`
#[derive(Debug, Args)]
pub struct Tail {
    #[command(flatten)]
    pub which: OneCommand,
    /// How much of the output
    #[arg(short = 'c', long, value_name = "SIZE", default_value = "8K", value_parser = quantity::bytes)]
    pub bytes: u64,
    /// Go on until the command ends
    #[arg(short, long)]
    pub follow: bool,
}

/// `signal`
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("reach").args(["group", "leader"])))]
pub struct Signal {
    #[command(flatten)]
    pub which: OneCommand,
    /// A number, or a name such as TERM
    #[arg(short, long, default_value = "TERM", value_parser = signal_number)]
    pub signal: i32,
    /// Only the process group of the first process, not all that come from it
    #[arg(long)]
    pub group: bool,
    /// Only the first process
    #[arg(long)]
    pub leader: bool,
}

/// `TERM`, `SIGTERM` or `15`.
fn signal_number(text: &str) -> Result<i32, String> {
    const NAMES: [(&str, i32); 14] = [
        ("HUP", 1),
        ("INT", 2),
        ("QUIT", 3),
        ("ABRT", 6),
        ("KILL", 9),
        ("USR1", 10),
        ("SEGV", 11),
        ("USR2", 12),
        ("PIPE", 13),
        ("ALRM", 14),
        ("TERM", 15),
        ("CONT", 18),
        ("STOP", 19),
        ("WINCH", 28),
    ];
    let name = text.strip_prefix("SIG").unwrap_or(text);
    let by_name = NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number);
    by_name
        .or_else(|| text.parse().ok().filter(|number| (1..=64).contains(number)))
        .ok_or_else(|| "no signal of this name or number".to_owned())
}

/// `files`
#[derive(Debug, Subcommand)]
pub enum Files {
    /// List a directory
    Ls(FilesLs),
    /// Describe a file; a link is not followed
    Stat(FilePath),
    /// Print a file, or a part of it
    Cat(FilesCat),
    /// Write standard input to a file, which takes the place of an older one when it is whole
    Write(FilesWrite),
    /// Make a directory
    Mkdir(FilesMkdir),
    /// Give a file another name
    Mv(FilesMv),
    /// Remove a file or a directory
    Rm(FilesRm),
    /// Set mode and owner
    Chmod(FilesChmod),
    /// Print what changes below a directory, until it is gone
    Watch(FilesWatch),
}

/// A file in a sandbox.
#[derive(Debug, Args)]
pub struct FilePath {
    /// ID:PATH
    #[arg(value_name = "ID:PATH", value_parser = file_path)]
    pub place: (String, String),
}

/// `ID:PATH`
fn file_path(text: &str) -> Result<(String, String), String> {
    match text.split_once(':') {
        Some((id, path)) if !id.is_empty() && !path.is_empty() => Ok((id.into(), path.into())),
        _ => Err("not ID:PATH".to_owned()),
    }
}

/// `files ls`
#[derive(Debug, Args)]
pub struct FilesLs {
    #[command(flatten)]
    pub of: FilePath,
    /// Also so many levels below
    #[arg(short, long, default_value_t = 1, value_parser = value_parser!(u32).range(1..))]
    pub depth: u32,
    /// At most so many entries
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    pub max: u64,
}

/// `files cat`
#[derive(Debug, Args)]
pub struct FilesCat {
    #[command(flatten)]
    pub of: FilePath,
    /// Leave out so many bytes
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    pub offset: u64,
    /// At most so many bytes
    #[arg(long, value_name = "BYTES")]
    pub length: Option<u64>,
}

/// `files write`
#[derive(Debug, Args)]
pub struct FilesWrite {
    #[command(flatten)]
    pub of: FilePath,
    /// Add to what is there
    #[arg(short, long)]
    pub append: bool,
    /// Make the directories above it
    #[arg(short, long)]
    pub parents: bool,
    /// Mode of the file, in octal
    #[arg(short, long, default_value = "644", value_parser = octal)]
    pub mode: u32,
    /// Owner, as numbers inside
    #[arg(long, value_name = "UID:GID", default_value = "0:0", value_parser = owner)]
    pub owner: (u32, u32),
}

/// `files mkdir`
#[derive(Debug, Args)]
pub struct FilesMkdir {
    #[command(flatten)]
    pub of: FilePath,
    /// Also what is missing above it; one that exists is no error
    #[arg(short, long)]
    pub parents: bool,
    /// Mode of the directory, in octal
    #[arg(short, long, default_value = "755", value_parser = octal)]
    pub mode: u32,
    /// Owner, as numbers inside
    #[arg(long, value_name = "UID:GID", default_value = "0:0", value_parser = owner)]
    pub owner: (u32, u32),
}

/// `files mv`
#[derive(Debug, Args)]
pub struct FilesMv {
    #[command(flatten)]
    pub from: FilePath,
    /// The new path, in the same sandbox
    #[arg(value_name = "PATH")]
    pub to: String,
    /// Take the place of nothing
    #[arg(short, long)]
    pub no_clobber: bool,
}

/// `files rm`
#[derive(Debug, Args)]
pub struct FilesRm {
    #[command(flatten)]
    pub of: FilePath,
    /// With all below it; no link is followed
    #[arg(short, long)]
    pub recursive: bool,
    /// One that does not exist is no error
    #[arg(short, long)]
    pub force: bool,
}

/// `files chmod`
#[derive(Debug, Args)]
pub struct FilesChmod {
    #[command(flatten)]
    pub of: FilePath,
    /// Mode, in octal
    #[arg(short, long, value_parser = octal)]
    pub mode: Option<u32>,
    /// Owner, as numbers inside
    #[arg(long, value_name = "UID:GID", value_parser = owner)]
    pub owner: Option<(u32, u32)>,
}

/// `files watch`
#[derive(Debug, Args)]
pub struct FilesWatch {
    #[command(flatten)]
    pub of: FilePath,
    /// Also below its directories
    #[arg(short, long)]
    pub recursive: bool,
}

fn octal(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o7777)
        .ok_or_else(|| "not an octal mode up to 7777".to_owned())
}

fn owner(text: &str) -> Result<(u32, u32), String> {
    text.split_once(':')
        .and_then(|(uid, gid)| Some((uid.parse().ok()?, gid.parse().ok()?)))
        .ok_or_else(|| "not UID:GID".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_what_they_look_like() {
        assert_eq!(signal_number("SIGKILL"), Ok(9));
        assert_eq!(signal_number("INT"), Ok(2));
        assert_eq!(signal_number("64"), Ok(64));
        assert!(signal_number("0").is_err() && signal_number("KILLER").is_err());
        assert_eq!(octal("4755"), Ok(0o4755));
        assert!(octal("888").is_err() && octal("10000").is_err());
        assert_eq!(owner("1000:5"), Ok((1000, 5)));
        assert!(owner("1000").is_err());
        assert_eq!(file_path("ab:/x:y"), Ok(("ab".into(), "/x:y".into())));
        assert!(file_path("/x").is_err() && file_path(":/x").is_err());
    }
}
