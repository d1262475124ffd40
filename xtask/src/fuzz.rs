//! `fuzz`: coverage-guided runs of the fuzz targets, which leave their corpora in the repository.
//!
//! libFuzzer comes as a crate and the instrumentation is an LLVM pass, so the stable toolchain does. What a
//! run finds lies in `target/fuzz/findings/NAME`; the next `cargo xtask test` replays what it added.

use crate::Outcome;
use std::path::Path;
use std::process::Command;

/// Where the instrumented build and the running corpora live.
const FOLDER: &str = "target/fuzz";
/// What the repository keeps of each corpus.
const CORPORA: &str = "tests/fuzz/corpus";
const LOG: &str = "tests/fuzz/runs.md";
const TRIPLE: &str = "x86_64-unknown-linux-gnu";
const INSTRUMENTATION: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Cdebug-assertions \
    -Coverflow-checks";
/// An input that takes longer is a finding (machines are shared, so this is much), as is one that needs more memory.
const LIMITS: [&str; 3] = ["-timeout=60", "-rss_limit_mb=1024", "-max_len=65536"];

/// `[--seconds N] [TARGET...]`: ten minutes for every target unless told otherwise.
pub fn run(arguments: &[String]) -> Outcome {
    let (seconds, named) = match arguments {
        [flag, seconds, rest @ ..] if flag == "--seconds" => (
            seconds.parse::<u32>().map_err(|_| format!("{seconds} is no number of seconds"))?,
            rest,
        ),
        rest => (600, rest),
    };
    let targets = seeds()?;
    if let Some(unknown) = named.iter().find(|name| !targets.contains(name)) {
        return Err(format!("{unknown} is no target; there are {}", targets.join(", ")));
    }
    build()?;
    for name in targets.iter().filter(|name| named.is_empty() || named.contains(name)) {
        one(name, seconds)?;
    }
    Ok(())
}

/// Writes the seeds of all targets, and says which targets there are.
fn seeds() -> Result<Vec<String>, String> {
    let folder = Path::new(FOLDER).join("seeds");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["run", "--quiet", "-p", "fuzz", "--bin", "seeds", "--"]).arg(&folder);
    succeed(&mut cargo, "writing the seeds")?;
    let entries = std::fs::read_dir(&folder).map_err(|error| error.to_string())?;
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.collect();
    names.sort();
    Ok(names)
}

fn build() -> Outcome {
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--release", "-p", "fuzz", "--bin", "fuzz", "--features", "libfuzzer"])
        .args(["--target", TRIPLE, "--target-dir", FOLDER])
        .env("RUSTFLAGS", INSTRUMENTATION);
    succeed(&mut cargo, "the instrumented build").map(drop)
}

/// Fuzzes one target from its kept corpus, then keeps the smallest set of inputs with the same coverage.
fn one(name: &str, seconds: u32) -> Outcome {
    let folder = Path::new(FOLDER).join("corpus").join(name);
    let (grown, kept) = (folder.join("grown"), folder.join("kept"));
    let findings = Path::new(FOLDER).join("findings").join(name);
    // The folder for the smallest set must be empty.
    let _ = std::fs::remove_dir_all(&kept);
    for folder in [&grown, &kept, &findings] {
        std::fs::create_dir_all(folder)
            .map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    let archive = Path::new(CORPORA).join(format!("{name}.tar.zst"));
    if archive.exists() {
        let mut tar = Command::new("tar");
        tar.arg("--zstd").arg("-xf").arg(&archive).arg("-C").arg(&grown);
        succeed(&mut tar, "unpacking the corpus")?;
    }
    let program = Path::new(FOLDER).join(TRIPLE).join("release/fuzz");
    let mut fuzzer = Command::new(&program);
    fuzzer
        .args(LIMITS)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/", findings.display()))
        .args(["-print_final_stats=1", "-verbosity=1"])
        .arg(&grown)
        .arg(Path::new(FOLDER).join("seeds").join(name))
        .env("LAMELLA_FUZZ_TARGET", name);
    println!("fuzz: {name} for {seconds} s");
    let said = succeed(&mut fuzzer, &format!("{name}, see {}", findings.display()))?;
    let mut merge = Command::new(&program);
    merge.args(LIMITS).arg("-merge=1").arg(&kept).arg(&grown).env("LAMELLA_FUZZ_TARGET", name);
    succeed(&mut merge, "merging the corpus")?;
    let mut tar = Command::new("tar");
    tar.args(["--zstd", "--sort=name", "--owner=0", "--group=0", "--mtime=@0", "--mode=0644"])
        .arg("-cf")
        .arg(&archive)
        .arg("-C")
        .arg(&kept)
        .arg(".");
    succeed(&mut tar, "packing the corpus")?;
    record(name, seconds, &said, &kept)
}

/// Appends a line about the run to the log.
fn record(name: &str, seconds: u32, said: &str, kept: &Path) -> Outcome {
    let stat = |key: &str| {
        let line = said.lines().rev().find(|line| line.contains(key)).unwrap_or_default();
        line.split_whitespace().last().unwrap_or("?").to_owned()
    };
    let coverage = said
        .lines()
        .rev()
        .find_map(|line| line.split("cov: ").nth(1)?.split_whitespace().next())
        .unwrap_or("?");
    let inputs = std::fs::read_dir(kept).map_or(0, Iterator::count);
    let date = Command::new("date").args(["-u", "+%Y-%m-%d"]).output();
    let date = date.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    let line = format!(
        "| {} | {name} | {seconds} | {} | {coverage} | {inputs} | none |\n",
        date.unwrap_or_default(),
        stat("stat::number_of_executed_units"),
    );
    print!("{line}");
    let mut log = std::fs::read_to_string(LOG).unwrap_or_else(|_| {
        "# Fuzz runs\n\nWritten by `cargo xtask fuzz`. Edges are those of the instrumented code that the corpus \
         reaches; a run with a finding ends with an error and leaves no line.\n\n\
         | date | target | seconds | executions | edges | inputs kept | findings |\n\
         |---|---|---:|---:|---:|---:|---|\n"
            .to_owned()
    });
    log.push_str(&line);
    std::fs::write(LOG, log).map_err(|error| format!("{LOG}: {error}"))
}

/// Runs a command and returns what it wrote to its error stream; its last lines become the error.
fn succeed(command: &mut Command, what: &str) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{what}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() {
        return Ok(said);
    }
    let lines: Vec<&str> = said.lines().collect();
    let tail = lines[lines.len().saturating_sub(30)..].join("\n");
    Err(format!("{what} failed ({}):\n{tail}", output.status))
}
