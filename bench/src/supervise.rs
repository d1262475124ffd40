//! A bench is run by a process of its own, so that one can be ended from outside and nothing of it stays.
//!
//! ```text
//!  lamella bench NAME ── waits; SIGINT, SIGTERM, SIGHUP: ends the worker and what it started, sweeps its scratch folder
//!    └─ the same words again: the worker, which measures
//! ```
//! Whatever the worker leaves behind becomes a child of the waiting process. Nodes are ended by `lamella down`, the
//! rest is killed. Only a `kill -9` of both leaves something, which the next bench on the same disk sweeps.

use crate::options;
use crate::scratch::Scratch;
use crate::shell::say;
use anyhow::Context;
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid,
};
use std::ffi::OsString;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

/// Set for the process that measures.
const WORKER: &str = "LAMELLA_BENCH_WORKER";
/// How long what was killed may take to be gone.
const PATIENCE: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_millis(10);

/// Whether this process is the one that measures.
pub fn is_worker() -> bool {
    std::env::var_os(WORKER).is_some()
}

/// How a worker ended.
enum Ended {
    /// By itself, with this code.
    Itself(u8),
    /// Because this signal came.
    Told(i32),
}

/// Runs the bench of this command line in a process of its own; its exit code, or 128 and the signal that ended it.
pub fn supervise(name: &str, args: &[String]) -> anyhow::Result<u8> {
    let Some(options) = options::parse(name, args)? else { return Ok(0) };
    set_child_subreaper(Some(getpid())).context("take in what benches leave behind")?;
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    match crate::node::runtime()?.block_on(attend(words))? {
        Ended::Itself(code) => Ok(code),
        Ended::Told(number) => {
            say("ended from outside; cleaning up");
            end_children(|child| !is_node(child));
            Scratch::sweep_dead(&options.scratch)?;
            end_children(|_| true);
            Ok(128 + number as u8)
        }
    }
}

async fn attend(words: Vec<OsString>) -> anyhow::Result<Ended> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut command = tokio::process::Command::new(std::env::current_exe()?);
    command.arg0("lamella").args(words).env(WORKER, "1");
    let mut worker = command.spawn().context("start the bench")?;
    let told = tokio::select! {
        status = worker.wait() => {
            let status = status?;
            let signal = status.signal().unwrap_or_default() + 128;
            let code = status.code().unwrap_or(signal);
            return Ok(Ended::Itself(u8::try_from(code).unwrap_or(1)));
        }
        _ = interrupt.recv() => SignalKind::interrupt(),
        _ = terminate.recv() => SignalKind::terminate(),
        _ = hangup.recv() => SignalKind::hangup(),
    };
    // A terminal may have told it as well.
    worker.kill().await.context("end the bench")?;
    Ok(Ended::Told(told.as_raw_value()))
}

/// Kills the children for which this holds, and waits for them.
fn end_children(wanted: impl Fn(Pid) -> bool) {
    let begin = Instant::now();
    loop {
        while let Ok(Some(_)) = waitpid(None, WaitOptions::NOHANG) {}
        let left: Vec<Pid> = children().into_iter().filter(|child| wanted(*child)).collect();
        if left.is_empty() || begin.elapsed() > PATIENCE {
            return;
        }
        for child in left {
            // It may have ended meanwhile; its number stays its own until it is waited for.
            _ = kill_process(child, Signal::KILL);
        }
        std::thread::sleep(RETRY);
    }
}

/// The children of this process, those that it took in among them.
fn children() -> Vec<Pid> {
    let own = getpid().as_raw_nonzero().get().to_string();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_ours = |pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The name in parentheses may hold anything; the state and the parent follow it.
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
        parent == Some(own.as_str())
    };
    pids.filter(is_ours).filter_map(Pid::from_raw).collect()
}

/// Whether it is a node, which ends in an orderly way.
fn is_node(pid: Pid) -> bool {
    let line = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0);
    words.any(|word| [&b"up"[..], b"fsd", b"keeper"].contains(&word))
}
