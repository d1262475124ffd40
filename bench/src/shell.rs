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
    let program = command.get_program().to_string_lossy();
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
    let words = std::iter::once(&*program).chain(words.iter().map(|word| &**word));
    quoted(&words.collect::<Vec<_>>())
}

/// Words as a person would type them.
pub fn quoted(words: &[&str]) -> String {
    let special = |byte: u8| !(byte.is_ascii_alphanumeric() || b"/.,:=_-+@%".contains(&byte));
    let quote = |word: &&str| {
        if word.is_empty() || word.bytes().any(special) {
            format!("'{}'", word.replace('\'', "'\\''"))
        } else {
            (*word).to_owned()
        }
    };
    words.iter().map(quote).collect::<Vec<_>>().join(" ")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_needs_it() {
        assert_eq!(quoted(&["a", "b c", "it's", ""]), "a 'b c' 'it'\\''s' ''");
        assert_eq!(tail("1\n2\n\n3\n4\n5\n"), "2 | 3 | 4 | 5");
    }
}
