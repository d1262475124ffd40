//! Running other programs, and saying what is going on.
//!
//! Every child is waited for; a child's error output is kept and told when it fails.

use anyhow::{Context, bail};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Writes one line for the person who waits. A closed output is no reason to stop measuring.
pub fn say(line: impl AsRef<str>) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{}", line.as_ref()).and_then(|()| out.flush());
}

/// A command of these words.
pub fn command(words: &[&str]) -> Command {
    let mut command = Command::new(words.first().copied().unwrap_or("false"));
    command.args(words.iter().skip(1));
    command
}

/// Runs a command to its end and answers its output; a failure names the command and its last words.
pub fn output(command: &mut Command) -> anyhow::Result<String> {
    let shown = shown(command);
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!("`{shown}` failed ({}): {}", output.status, tail(&error));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// [`output`] for words alone.
pub fn run(words: &[&str]) -> anyhow::Result<String> {
    output(&mut command(words))
}

/// The command as a person would type it.
pub fn shown(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|word| word.to_string_lossy().into_owned()));
    words.join(" ")
}

/// The last lines of what a program said.
pub fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(4)..].join(" | ")
}

/// A path as text; the benches make all their own paths, and those are UTF-8.
pub fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().with_context(|| format!("the path {} is not UTF-8", path.display()))
}
