//! The program that makes sandboxes and starts commands in them: static, small, single-threaded.
//!
//! The runtime executes it from a sealed memory file as its zygote, with one socket as standard input.
//! Nothing of it stays in a sandbox but the init, which is a copy of the zygote without any descriptor
//! ([`init`]); a command's process is a copy that enters the sandbox and becomes the command ([`exec`]).
//!
//! ```text
//! runtime ── socket ── zygote ──clone3──> init of a sandbox (new namespaces; sleeps for ever)
//!                        │
//!                        └──setns(pid), clone3──> setns(rest) ──execve──> command
//! ```
//!
//! The zygote is the parent of every init and every command, so it reaps them and tells the runtime. When
//! the runtime goes away, sandboxes and their commands go on, and the zygote stays until the last of them has
//! ended, notes how, and holds what they print into; the next runtime finds them by its journal and starts a
//! zygote of its own ([`children`]).

mod children;
mod exec;
mod init;
mod protect;
mod stage;
mod user;
mod users;
mod wire;
mod zygote;

use std::process::ExitCode;

fn main() -> ExitCode {
    match zygote::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if failure.is_lost_runtime() => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("lamella zygote: {failure}");
            ExitCode::FAILURE
        }
    }
}
