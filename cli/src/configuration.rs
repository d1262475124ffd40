//! The configuration file: what is said once for all commands of a host.
//!
//! Its keys are the long flags of `up`, and `store` and `data`; its values are checked by whoever checks those of the
//! flags. What is said on the command line or in the environment counts more.

use crate::args::Cli;
use clap::{Arg, ArgAction, Command, CommandFactory};
use layer::{Context, Error, ErrorKind, Result};
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// Where it lies when nobody says otherwise. It need not be there.
pub const DEFAULT: &str = "/etc/lamella.toml";
/// The longest file.
const MAX_BYTES: u64 = 64 << 10;
/// Flags of every command that it may set.
const OF_ALL: [&str; 2] = ["data", "store"];
/// The command whose flags it may set.
const COMMAND: &str = "up";

/// What a file says.
#[derive(Debug, Default)]
pub struct Configuration {
    settings: Vec<Setting>,
}

#[derive(Debug)]
struct Setting {
    key: String,
    id: clap::Id,
    value: String,
}

impl Configuration {
    /// Reads the file that was named, or the usual one where it exists.
    pub fn load(named: Option<&Path>) -> Result<Self> {
        let usual = Path::new(DEFAULT);
        let path = match named {
            Some(path) => path,
            None if usual.exists() => usual,
            None => return Ok(Self::default()),
        };
        let name = || format!("configuration {}", path.display());
        let file = std::fs::File::open(path).context(name)?;
        let mut text = String::new();
        let mut bounded = std::io::Read::take(file, MAX_BYTES + 1);
        std::io::Read::read_to_string(&mut bounded, &mut text).context(name)?;
        if text.len() as u64 > MAX_BYTES {
            return Err(Error::invalid(format!("{} is longer than {MAX_BYTES} bytes", name())));
        }
        Self::parse(path, &text)
    }

    /// What a file with this text says.
    #[cfg(test)]
    pub fn of(text: &str) -> Result<Self> {
        Self::parse(Path::new(DEFAULT), text)
    }

    fn parse(path: &Path, text: &str) -> Result<Self> {
        let at = |span: Option<Range<usize>>, key: &str, what: &str| {
            let before = span.map_or("", |span| text.get(..span.start).unwrap_or(text));
            let line = before.matches('\n').count() + 1;
            let key = if key.is_empty() { String::new() } else { format!("{key}: ") };
            Error::new(ErrorKind::Invalid, format!("{}:{line}: {key}{what}", path.display()))
        };
        let table = DeTable::parse(text).map_err(|error| at(error.span(), "", error.message()))?;
        let known = known();
        let mut settings = Vec::new();
        for (key, value) in table.get_ref() {
            let name = key.get_ref().to_string();
            let Some(flag) = known.iter().find(|flag| flag.get_long() == Some(&name)) else {
                let names: Vec<&str> = known.iter().filter_map(Arg::get_long).collect();
                let what = format!("there is no such setting; there are {}", names.join(", "));
                return Err(at(Some(key.span()), &name, &what));
            };
            let wrong = |what: &str| at(Some(value.span()), &name, what);
            let value = match (value.get_ref(), is_switch(flag)) {
                (DeValue::Boolean(value), true) => value.to_string(),
                (_, true) => return Err(wrong("true or false is expected")),
                (DeValue::String(value), false) => value.to_string(),
                (DeValue::Integer(value), false) if value.radix() == 10 => {
                    value.as_str().to_owned()
                }
                (other, false) => {
                    return Err(wrong(&format!("a string is expected, not {}", other.type_str())));
                }
            };
            check(flag, &value).map_err(|why| wrong(&why))?;
            settings.push(Setting { key: name, id: flag.get_id().clone(), value });
        }
        Ok(Self { settings })
    }

    /// Whether it says nothing.
    pub fn is_empty(&self) -> bool {
        self.settings.is_empty()
    }

    /// The same program with what the file says where neither the command line nor the environment says anything.
    pub fn apply(&self, mut program: Command) -> Command {
        for Setting { key, id, value } in &self.settings {
            // Read once for the life of the process.
            let value: &'static str = value.clone().leak();
            let with = |arg: Arg| arg.default_value(value);
            program = match OF_ALL.contains(&key.as_str()) {
                true => program.mut_arg(key, with),
                false => program.mut_subcommand(COMMAND, |command| command.mut_arg(id, with)),
            };
        }
        program
    }
}

/// The flags that it may set.
fn known() -> Vec<Arg> {
    let program = Cli::command();
    let of_all = program.get_arguments().filter(|arg| OF_ALL.contains(&arg.get_id().as_str()));
    let of_up = program.find_subcommand(COMMAND).into_iter().flat_map(Command::get_arguments);
    let of_up = of_up.filter(|arg| arg.get_long().is_some() && !arg.is_hide_set());
    of_all.chain(of_up).cloned().collect()
}

fn is_switch(flag: &Arg) -> bool {
    matches!(flag.get_action(), ArgAction::SetTrue)
}

/// What the flag itself says of a value.
fn check(flag: &Arg, value: &str) -> Result<(), String> {
    if is_switch(flag) {
        return Ok(());
    }
    let flag = flag.clone().required(false).env(None::<&'static str>);
    let word = format!("--{}={value}", flag.get_long().unwrap_or_default());
    let tried = Command::new("x").arg(flag).try_get_matches_from(["x", &word]);
    tried.map(drop).map_err(|error| match std::error::Error::source(&error) {
        Some(why) => format!("{value:?}: {why}"),
        None => {
            let text = error.to_string();
            let lines = text.lines().take_while(|line| !line.is_empty() || text.starts_with(line));
            let said: Vec<&str> = lines.map(str::trim).collect();
            said.join("; ").trim_start_matches("error: ").to_owned()
        }
    })
}

/// The file as other processes of this command line have to find it.
pub fn absolute(named: Option<&Path>) -> Result<Option<PathBuf>> {
    named
        .map(|path| std::path::absolute(path).context(|| format!("{}", path.display())))
        .transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Configuration> {
        Configuration::parse(Path::new("/x/lamella.toml"), text)
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line_and_its_key() {
        for (text, line, says) in [
            ("data = ", 1, "string values must be quoted"),
            ("\n\ncache-sice = \"1G\"\n", 3, "cache-sice: there is no such setting"),
            ("data = \"/d\"\ncache-size = \"lots\"\n", 2, "cache-size: \"lots\""),
            ("cache-size = [1]", 1, "cache-size: a string is expected, not array"),
            ("verify-metadata = \"yes\"", 1, "verify-metadata: true or false"),
            ("metrics = \"here\"", 1, "metrics: \"here\""),
            ("plane = \"magic\"", 1, "plane: "),
            ("background = true", 1, "there is no such setting"),
            ("[up]\ncache-size = 1", 1, "up: there is no such setting"),
            ("data = \"/a\"\ndata = \"/b\"", 2, "duplicate key"),
        ] {
            let error = parsed(text).err().unwrap_or_else(|| panic!("{text:?} was taken"));
            let said = error.to_string();
            assert!(said.starts_with(&format!("/x/lamella.toml:{line}: ")), "{said}");
            assert!(said.contains(says), "{said}");
            assert!(!said.contains('\n'), "{said}");
        }
    }

    #[test]
    fn every_setting_of_the_node_can_stand_in_it() {
        let text = "store = \"/s\"\ndata = \"/d\"\nplane = \"fuse\"\ncache-size = \"10G\"\n\
                    cache-low = 8589934592\ncache-reserve = \"1M\"\nfull-disk-deadline = \"5s\"\n\
                    prefetch-rate = \"50M\"\nverify-metadata = true\nmetrics = \"127.0.0.1:1\"\n\
                    require-signature = \"/keys\"\n";
        let told = parsed(text).unwrap();
        let keys: Vec<&str> = told.settings.iter().map(|setting| setting.key.as_str()).collect();
        let known = known();
        let all: Vec<&str> = known.iter().filter_map(Arg::get_long).collect();
        assert!(keys.len() == 11 && keys.iter().all(|key| all.contains(key)), "{all:?}");
    }
}
