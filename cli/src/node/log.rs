//! Logs of processes that have no terminal: one file and its predecessor, each bounded.
//!
//! Locking: one mutex around the file. What survives a crash: every whole line written before it.

use layer::{Context, Result};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use tracing_subscriber::EnvFilter;

/// A file is set aside when it has grown to this.
const FILE_BYTES: u64 = 4 << 20;

/// A line that cannot be written is lost. Telling so on standard error, which may lie on the same full disk,
/// would be a panic.
const TELL_FAILURES: bool = false;

/// A log file that never grows beyond its bound.
struct Log {
    path: PathBuf,
    file: File,
    written: u64,
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

impl Log {
    fn new(path: &Path) -> Result<Self> {
        let file = open(path).context(|| format!("open {}", path.display()))?;
        let written = file.metadata().map_or(0, |meta| meta.len());
        Ok(Self { path: path.to_owned(), file, written })
    }

    fn set_aside(&mut self) -> io::Result<()> {
        let mut old = self.path.clone().into_os_string();
        old.push(".1");
        std::fs::rename(&self.path, old)?;
        self.file = open(&self.path)?;
        self.written = 0;
        Ok(())
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.written >= FILE_BYTES {
            self.set_aside()?;
        }
        let count = self.file.write(bytes)?;
        self.written += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// A handle that the subscriber clones for every line.
struct Line<'a>(std::sync::MutexGuard<'a, Log>);

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

struct Shared(Mutex<Log>);

impl<'a> tracing_subscriber::fmt::MakeWriter<'a> for Shared {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Self::Writer {
        Line(self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn filter(level: &str) -> EnvFilter {
    EnvFilter::try_from_env("LAMELLA_LOG").unwrap_or_else(|_| EnvFilter::new(level))
}

/// Sends what this process logs to a bounded file. A second call has no effect.
pub fn to_file(path: &Path) -> Result<()> {
    let log = Shared(Mutex::new(Log::new(path)?));
    _ = tracing_subscriber::fmt()
        .with_env_filter(filter("info"))
        .log_internal_errors(TELL_FAILURES)
        .with_ansi(false)
        .with_writer(log)
        .try_init();
    Ok(())
}

/// Sends what this process logs to standard error. A second call has no effect.
pub fn to_stderr(level: &str) {
    _ = tracing_subscriber::fmt()
        .with_env_filter(filter(level))
        .log_internal_errors(TELL_FAILURES)
        .with_target(false)
        .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
        .with_writer(io::stderr)
        .try_init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_set_aside_before_it_grows_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("node.log");
        let mut log = Log::new(&path).unwrap();
        let line = vec![b'x'; 1 << 20];
        for _ in 0..10 {
            log.write_all(&line).unwrap();
        }
        assert!(std::fs::metadata(&path).unwrap().len() <= FILE_BYTES);
        assert_eq!(std::fs::metadata(dir.path().join("node.log.1")).unwrap().len(), FILE_BYTES);
    }
}
