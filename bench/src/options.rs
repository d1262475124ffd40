//! The options that all benches share.

use clap::Parser;
use std::path::PathBuf;

/// Where the corpus lies when nobody says otherwise.
const CORPUS: &str = "/var/cache/lamella/corpus";

/// What a bench was asked for.
#[derive(Debug, Clone, Parser)]
#[command(about = "Measure Lamella", long_about = None, disable_version_flag = true)]
pub struct Options {
    /// Write the results as JSON to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw the results into this SVG file
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Rounds of every side; the sides alternate
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Fail when a bar is missed
    #[arg(long)]
    pub check: bool,
    /// Where the input lies, outside of any repository
    #[arg(long, value_name = "DIR", env = "LAMELLA_CORPUS", default_value = CORPUS)]
    pub corpus: PathBuf,
    /// Where everything temporary goes; needs a disk with room for four times the corpus
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub scratch: PathBuf,
    /// Throw away what was built before and build the corpus anew
    #[arg(long)]
    pub rebuild: bool,
    /// Only these parts of the bench
    #[arg(value_name = "PART")]
    pub parts: Vec<String>,
}

impl Options {
    /// Whether a part was asked for; without any, all are.
    pub fn wants(&self, part: &str) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|asked| asked == part)
    }
}

/// Reads a bench's options; `None` when they asked only for help, which is then printed.
pub fn parse(name: &str, args: &[String]) -> anyhow::Result<Option<Options>> {
    let words = std::iter::once(format!("lamella bench {name}")).chain(args.iter().cloned());
    match Options::try_parse_from(words) {
        Ok(options) => Ok(Some(options)),
        Err(error) if !error.use_stderr() => {
            error.print()?;
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}
