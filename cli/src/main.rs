//! `lamella`: the one program for people, and the one that runs every daemon of a node.
//!
//! [`args`] is what the command line looks like, [`commands`] what it does, [`node`] the node of a data
//! directory, [`embed`] imaged without a node. A command returns; only `main` ends the process, so that
//! terminals, locks and temporary files are given back on every way out.
#![forbid(unsafe_code)]

mod args;
mod commands;
mod configuration;
mod embed;
mod errors;
mod node;
mod output;
mod progress;
mod quantity;
mod settings;
mod terminal;

use args::{Action, Cli};
use commands::Scene;
use configuration::Configuration;
use errors::{Failure, Outcome};
use layer::Error;
use output::Output;
use settings::Settings;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// How long what a command left running in this process may go on: closing a publish, an in-process
/// server that ends with its last client.
const TAIL: Duration = Duration::from_millis(500);
/// Threads on which the file-system daemon takes requests.
const FSD_WORKERS: usize = 2;
/// How long threads that may block get after that.
const LAST_THREADS: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let cli = match args::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => {
            _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let (verbose, json) = (cli.verbose, cli.json);
    let cli = match configured(cli) {
        Ok(Ok(cli)) => cli,
        Ok(Err(error)) => {
            _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
        Err(error) => {
            let remedy = "correct it, or name another file with --config";
            let failure = Failure::Failed { error, remedy: Some(remedy.to_owned()) };
            failure.report(verbose, json);
            return ExitCode::from(failure.exit_code());
        }
    };
    match carry_out(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.report(verbose, json);
            ExitCode::from(failure.exit_code())
        }
    }
}

/// The command line with what the configuration file adds to it.
fn configured(cli: Cli) -> layer::Result<Result<Cli, clap::Error>> {
    let configuration = Configuration::load(cli.config.as_deref())?;
    if configuration.is_empty() {
        return Ok(Ok(cli));
    }
    Ok(args::parse_with(std::env::args_os(), &configuration))
}

fn carry_out(cli: Cli) -> Outcome {
    let settings = Settings::resolve(&cli)?;
    let outcome = act(Scene { settings: settings.clone(), out: Output::new(cli.json) }, cli);
    outcome.map_err(|failure| failure.name_daemon(&settings))
}

fn act(scene: Scene, cli: Cli) -> Outcome {
    match cli.action {
        // These three make no use of a runtime, or make their own.
        Action::Bench(args) => commands::bench(&scene, &args),
        Action::Doctor => commands::doctor(&scene),
        Action::Keeper(args) => commands::keeper(&scene, &args),
        Action::Virtiofs(args) => commands::virtiofs(args),
        action => {
            // A daemon has brought its own work to its end when it returns.
            let is_daemon =
                matches!(action, Action::Up(_) | Action::Fsd(_) | Action::Snapshotter(_));
            if !is_daemon {
                node::log::to_stderr(if cli.verbose { "info" } else { "error" });
            }
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            if matches!(action, Action::Fsd(_)) {
                // Its work has threads of its own.
                sys::footprint::bound_allocator();
                runtime.worker_threads(FSD_WORKERS);
            }
            let runtime = runtime
                .enable_all()
                .build()
                .map_err(|error| Error::io("start the threads", error))?;
            let outcome = runtime.block_on(commands::dispatch(scene, action));
            end(runtime, if is_daemon { Duration::ZERO } else { TAIL });
            outcome
        }
    }
}

/// Lets what was begun in the background come to its end, then ends the threads. The catalog is closed
/// when the last of them is gone; leaving the process before would tear RocksDB's threads down under it.
fn end(runtime: Runtime, tail: Duration) {
    let deadline = Instant::now() + tail;
    while runtime.metrics().num_alive_tasks() > 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    runtime.shutdown_timeout(LAST_THREADS);
}
