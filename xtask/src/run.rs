//! The two commands of the README, `test` and `demo`.

use crate::{Outcome, setup, tidy};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

/// Tests that skip say so on a line that starts with this; see `tests/expected-skips.txt`.
const SKIP_MARK: &str = "SKIP ";
const EXPECTED_SKIPS: &str = "tests/expected-skips.txt";
const TEST_LOG: &str = "target/test.log";

/// Sets up, checks and runs every test. `arguments` go to `cargo test` before its defaults.
pub fn test(arguments: &[String]) -> Outcome {
    setup::run()?;
    tidy::run()?;
    cargo(&["fmt", "--all", "--check"])?;
    cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"])?;
    run_tests(arguments)
}

/// Sets up, builds for speed and runs the main job; `arguments` go to the demo.
pub fn demo(arguments: &[String]) -> Outcome {
    setup::run()?;
    println!("demo: building the lamella command (a few minutes the first time)");
    cargo(&["build", "--release", "--package", "cli"])?;
    let status = Command::new("target/release/lamella")
        .args(["bench", "demo"])
        .args(arguments)
        .status()
        .map_err(|error| format!("target/release/lamella: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("the demo failed ({status})")) }
}

fn cargo(arguments: &[&str]) -> Outcome {
    println!("xtask: cargo {}", arguments.join(" "));
    let status = Command::new("cargo")
        .args(arguments)
        .status()
        .map_err(|error| format!("cargo: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("cargo {} failed", arguments.join(" "))) }
}

/// What the closing lines of the test binaries add up to.
#[derive(Default)]
struct Tally {
    passed: u64,
    failed: u64,
    ignored: u64,
    skips: BTreeSet<String>,
}

impl Tally {
    fn read(&mut self, line: &str) {
        if let Some(skip) = line.trim_start().strip_prefix(SKIP_MARK) {
            self.skips.insert(skip.to_owned());
        }
        let Some(result) = line.strip_prefix("test result: ") else { return };
        let mut words = result.split([' ', ';', '.']).filter(|word| !word.is_empty()).peekable();
        while let Some(word) = words.next() {
            let Ok(count) = word.parse::<u64>() else { continue };
            match words.peek() {
                Some(&"passed") => self.passed += count,
                Some(&"failed") => self.failed += count,
                Some(&"ignored") => self.ignored += count,
                _ => {}
            }
        }
    }
}

fn run_tests(arguments: &[String]) -> Outcome {
    std::fs::create_dir_all("target").map_err(|error| format!("target: {error}"))?;
    let mut log = File::create(TEST_LOG).map_err(|error| format!("{TEST_LOG}: {error}"))?;
    println!("xtask: cargo test --workspace (whole output: {TEST_LOG})");
    let mut child = Command::new("cargo")
        .args(["test", "--workspace", "--no-fail-fast"])
        .args(arguments)
        .args(["--", "--show-output"])
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cargo test: {error}"))?;
    let output = child.stdout.take().ok_or("cargo test has no output")?;
    let mut tally = Tally::default();
    for line in BufReader::new(output).split(b'\n') {
        let line = line.map_err(|error| format!("output of cargo test: {error}"))?;
        let line = String::from_utf8_lossy(&line);
        writeln!(log, "{line}").map_err(|error| format!("{TEST_LOG}: {error}"))?;
        tally.read(&line);
        if worth_showing(&line) {
            println!("{line}");
        }
    }
    let status = child.wait().map_err(|error| format!("cargo test: {error}"))?;
    let skips = compare_skips(&tally.skips);
    println!("{} passed, {} failed, {} skipped", tally.passed, tally.failed, tally.skips.len());
    if !status.success() || tally.failed > 0 {
        return Err(format!("tests failed; see {TEST_LOG}"));
    }
    if tally.passed == 0 {
        return Err("no test ran".to_owned());
    }
    skips
}

/// The runner's own lines, and what failing tests printed.
fn worth_showing(line: &str) -> bool {
    line.starts_with("test ")
        || line.starts_with("running ")
        || line.starts_with("failures:")
        || line.contains("panicked at")
        || line.trim_start().starts_with(SKIP_MARK)
        || line.starts_with("kills ")
}

fn compare_skips(found: &BTreeSet<String>) -> Outcome {
    let text = std::fs::read_to_string(EXPECTED_SKIPS)
        .map_err(|error| format!("{EXPECTED_SKIPS}: {error}"))?;
    let expected: BTreeSet<String> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect();
    let surprising: Vec<&str> = found.difference(&expected).map(String::as_str).collect();
    if surprising.is_empty() {
        return Ok(());
    }
    Err(format!("tests skipped that {EXPECTED_SKIPS} does not list: {}", surprising.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::Tally;

    #[test]
    fn closing_lines_add_up() {
        let mut tally = Tally::default();
        tally.read("test result: ok. 12 passed; 1 failed; 3 ignored; 0 measured; 0 filtered out");
        tally.read("test result: FAILED. 5 passed; 2 failed; 0 ignored; 0 measured");
        tally.read("SKIP mounts_lazily: fanotify pre-content");
        tally.read("test unrelated ... ok");
        assert_eq!((tally.passed, tally.failed, tally.ignored), (17, 3, 3));
        assert!(tally.skips.contains("mounts_lazily: fanotify pre-content"));
    }
}
