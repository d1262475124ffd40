//! What is run in an environment of the corpus, and running it on an empty node.

use crate::corpus::Piece;
use crate::measure::{self, DiskWrites};
use crate::node::{Lamella, Loaded, Size};
use crate::shell;
use anyhow::bail;
use std::time::Duration;

/// The throttled store of the bars: 100 MB/s and 2 ms a request.
pub const THROTTLE: &str = "?bandwidth=100M&latency_ms=2";
/// The environment that [`publish`] composes.
pub const ENVIRONMENT: &str = "env/bench:1";

/// A command of the corpus.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Its short name.
    pub name: &'static str,
    /// What is run.
    pub argv: &'static [&'static str],
}

/// The smallest program.
pub const TRUE: Case = Case { name: "true", argv: &["true"] };
/// Python with its scientific modules.
pub const PYTHON: Case =
    Case { name: "import numpy, pandas", argv: &["python3", "-c", "import numpy, pandas"] };

/// A compiler and what it made.
pub const GCC: Case = Case {
    name: "gcc",
    argv: &[
        "sh",
        "-c",
        "cd /tmp && echo 'int main(void){return 0;}' > hello.c && gcc hello.c && ./a.out",
    ],
};
/// Git in the workspace, whose index was made for the layer.
pub const GIT_STATUS: Case = Case {
    name: "git status",
    argv: &[
        "git",
        "-c",
        "safe.directory=*",
        "-C",
        crate::corpus::WORKSPACE_DIR,
        "status",
        "--short",
    ],
};

/// What the environment sets.
pub fn environment() -> Vec<String> {
    vec![format!("PYTHONPATH={}", crate::corpus::PYTHON_DIR)]
}

/// The reference that a piece is published as.
pub fn reference(piece: &Piece) -> String {
    match piece.record.piece.as_str() {
        "base" => "base/debian:bench".to_owned(),
        "workspace" => "workspace/cpython:bench".to_owned(),
        name => format!("toolkit/{name}:bench"),
    }
}

/// Builds every piece into a layer and composes the environment; `tell` hears each command and its time.
pub fn publish(
    lamella: &Lamella,
    pieces: &[Piece],
    mut tell: impl FnMut(&str, Duration),
) -> anyhow::Result<()> {
    let mut step = |words: &[&str]| -> anyhow::Result<()> {
        let (time, _) = measure::timed(|| lamella.run(words))?;
        tell(&shell::quoted(words), time);
        Ok(())
    };
    for piece in pieces {
        let tar = piece.tar();
        step(&["build", shell::text(&tar)?, "-t", &reference(piece)])?;
    }
    let references: Vec<String> = pieces.iter().map(reference).collect();
    let variables = environment();
    let mut words = vec!["env", "create", ENVIRONMENT.trim_start_matches("env/")];
    for reference in &references {
        words.extend(["--layer", reference]);
    }
    for variable in &variables {
        words.extend(["--env", variable]);
    }
    step(&words)
}

/// What one run on an empty node took.
#[derive(Debug, Clone, Copy)]
pub struct Cold {
    /// From the call of `lamella run` to its end.
    pub time: Duration,
    /// What was loaded for it.
    pub loaded: Loaded,
    /// How large the environment is; its metadata images are fetched whole, beside `loaded`.
    pub size: Size,
    /// Bytes asked for.
    pub asked_bytes: u64,
    /// Bytes that reached the disk, the write-back after the end included.
    pub written_bytes: u64,
}

/// Runs a command in a fresh container on a fresh node: daemons up, node cache empty, page cache dropped.
///
/// # Errors
/// A node cache that is not empty at the start; whatever fails.
pub fn run_cold(lamella: &Lamella, case: Case) -> anyhow::Result<Cold> {
    lamella.clear_cache()?;
    let node = lamella.up()?;
    let before = node.loaded()?;
    if before.plain_bytes != 0 || !lamella.cache_is_empty()? {
        bail!("the node cache is not empty at the start: {before:?}");
    }
    measure::drop_caches()?;
    let writes = DiskWrites::start(&lamella.data)?;
    let words = [&["run", "--rm", ENVIRONMENT, "--"], case.argv].concat();
    let (time, _) = measure::timed(|| lamella.run(&words))?;
    let loaded = node.loaded()?;
    let asked_bytes = node.asked_bytes()?;
    let size = node.size(ENVIRONMENT)?;
    let written_bytes = writes.finish()?;
    drop(node);
    Ok(Cold { time, loaded, size, asked_bytes, written_bytes })
}
