//! Repository chores as code: `cargo xtask setup | tidy | test | fuzz | demo`.
//!
//! Depends on no crate of the workspace and on no system library, so that it runs on a machine that
//! has only git, gcc and a Rust toolchain, and can install what the rest needs.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout)]

mod fuzz;
mod run;
mod setup;
mod tidy;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  setup   install what building and testing need from the package registries
  tidy    check the layering and the habits that a program can check
  test    setup, tidy, format and lint checks, then every test
  fuzz    [--seconds N] [TARGET...]: coverage-guided fuzzing of every parser, ten minutes each
  demo    setup, a release build, then the main job end to end, with one table at its end
";

/// What a chore answers: a line for people when it failed.
type Outcome = Result<(), String>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (command, rest) = match arguments.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => ("", &[][..]),
    };
    let outcome = match command {
        "setup" => setup::run(),
        "tidy" => tidy::run(),
        "test" => run::test(rest),
        "fuzz" => fuzz::run(rest),
        "demo" => run::demo(rest),
        _ => {
            eprint!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(line) => {
            eprintln!("xtask {command}: {line}");
            ExitCode::FAILURE
        }
    }
}
