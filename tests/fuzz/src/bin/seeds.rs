//! Writes the seeds of every target to `DIR/TARGET/seed-N`, for the fuzzer to start from; the folders are also
//! the list of targets.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(folder) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: seeds DIR");
        return ExitCode::from(2);
    };
    for target in fuzz::TARGETS {
        let folder = folder.join(target.name);
        let written = std::fs::create_dir_all(&folder).and_then(|()| {
            (target.seeds)().iter().enumerate().try_for_each(|(index, seed)| {
                std::fs::write(folder.join(format!("seed-{index}")), seed)
            })
        });
        if let Err(error) = written {
            eprintln!("{}: {error}", folder.display());
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
