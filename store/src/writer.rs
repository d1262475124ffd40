//! Who is writing a temporary file, said by the file's name, so that others can tell a dead writer.
//!
//! `<seconds since 1970>-<host>-<pid>-<start time>-<number>`: `host` stands for one boot of one kernel and
//! one PID namespace, within which a PID with its start time names one process for ever.

use crate::clock::now_unix_s;
use layer::{Context, Result};
use std::fs;

/// A writer that cannot be asked is believed dead after this long, in seconds.
const FOREIGN_AGE_S: u64 = 24 * 3600;

/// The identity of a process as far as temporary files need it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WriterName {
    host: String,
    pid: u32,
    started: u64,
}

impl WriterName {
    pub(crate) fn of_this_process() -> Result<Self> {
        let boot = "/proc/sys/kernel/random/boot_id";
        let boot = fs::read_to_string(boot).context(|| format!("read {boot}"))?;
        let namespace =
            fs::read_link("/proc/self/ns/pid").context(|| "read /proc/self/ns/pid".to_owned())?;
        let identity = format!("{} {}", boot.trim(), namespace.display());
        let host = layer::Digest::of(identity.as_bytes()).to_string()[..16].to_owned();
        let pid = std::process::id();
        let started = start_time(pid).unwrap_or(0);
        Ok(Self { host, pid, started })
    }

    #[cfg(test)]
    pub(crate) fn with_pid(mut self, pid: u32) -> Self {
        self.pid = pid;
        self
    }

    /// A name that no other file of any writer has.
    pub(crate) fn temporary_name(&self, number: u64) -> String {
        format!("{}-{}-{}-{}-{number}", now_unix_s(), self.host, self.pid, self.started)
    }

    /// Whether `name` is a temporary file whose writer is dead. Foreign names are nobody's to remove.
    pub(crate) fn has_abandoned(&self, name: &str) -> bool {
        let mut parts = name.split('-');
        let mut part = || parts.next();
        let (Some(created), Some(host), Some(pid), Some(started), Some(_)) =
            (part(), part(), part(), part(), part())
        else {
            return false;
        };
        let (Ok(created), Ok(pid), Ok(started)) =
            (created.parse::<u64>(), pid.parse::<u32>(), started.parse::<u64>())
        else {
            return false;
        };
        if host != self.host {
            return created.saturating_add(FOREIGN_AGE_S) < now_unix_s();
        }
        start_time(pid) != Some(started)
    }
}

/// Field 22 of `/proc/<pid>/stat`; the name in field 2 may hold anything, so it counts from its end.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_dead_writers_are_abandoned() {
        let me = WriterName::of_this_process().unwrap();
        assert!(!me.has_abandoned(&me.temporary_name(0)));
        let recycled = WriterName { started: me.started + 1, ..me.clone() };
        assert!(me.has_abandoned(&recycled.temporary_name(0)));
        let elsewhere = WriterName { host: "0".repeat(16), ..me.clone() };
        assert!(!me.has_abandoned(&elsewhere.temporary_name(0)));
        let old = format!("{}-{}-1-1-0", now_unix_s() - FOREIGN_AGE_S - 10, elsewhere.host);
        assert!(me.has_abandoned(&old));
        for foreign in ["", "x", "1-2-3", "a-b-c-d-e"] {
            assert!(!me.has_abandoned(foreign), "{foreign}");
        }
    }
}
