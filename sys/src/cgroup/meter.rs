//! What the processes of a group used between two moments.
//!
//! Locking: none. Nothing survives a crash: a meter is two descriptors and a number.

use super::{Group, number};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Counts from the moment that it was made.
#[derive(Debug)]
pub struct Meter {
    cpu: Option<CpuFile>,
    cpu_before: Duration,
    memory: Option<File>,
}

/// What was used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Metered {
    /// Of processors, by all processes together; zero where the kernel does not count it.
    pub cpu: Duration,
    /// The most memory at one moment, page cache included; zero where the kernel does not say it.
    pub max_memory_bytes: u64,
}

#[derive(Debug)]
struct CpuFile {
    file: File,
    is_unified: bool,
}

impl CpuFile {
    fn read(&self) -> io::Result<Duration> {
        let text = read(&self.file)?;
        if !self.is_unified {
            return number(text.trim()).map(Duration::from_nanos);
        }
        let usage = text.lines().find_map(|line| line.strip_prefix("usage_usec "));
        usage.map_or(Ok(Duration::ZERO), |text| number(text).map(Duration::from_micros))
    }
}

impl Group<'_> {
    /// Counts from now on. One at a time: with version 1 a second one begins the first one's memory anew.
    pub fn meter(&self) -> Meter {
        // Version 2 counts it without a controller; version 1 often mounts both together.
        let is_unified = self.hierarchies.version_2_root().is_some();
        let cpu = match self.hierarchies.version_2_root() {
            Some(root) => Ok(root.join(&self.name).join("cpu.stat")),
            None => self.file(&self.hierarchies.cpu, "cpuacct.usage", ""),
        };
        let cpu = cpu.and_then(File::open).map(|file| CpuFile { file, is_unified }).ok();
        // Anything written begins anew; a kernel that cannot do it would tell of former users.
        let memory = self
            .file(&self.hierarchies.memory, "memory.max_usage_in_bytes", "memory.peak")
            .and_then(|path| File::options().read(true).write(true).open(path))
            .and_then(|file| file.write_all_at(b"0", 0).map(|()| file));
        let cpu_before = cpu.as_ref().and_then(|cpu| cpu.read().ok()).unwrap_or_default();
        Meter { cpu, cpu_before, memory: memory.ok() }
    }
}

impl Meter {
    /// What was used since it was made.
    pub fn read(&self) -> Metered {
        let cpu = self.cpu.as_ref().and_then(|cpu| cpu.read().ok()).unwrap_or_default();
        let memory = self.memory.as_ref().and_then(|file| read(file).ok());
        let memory = memory.and_then(|text| number(text.trim()).ok());
        Metered {
            cpu: cpu.saturating_sub(self.cpu_before),
            max_memory_bytes: memory.unwrap_or_default(),
        }
    }
}

fn read(file: &File) -> io::Result<String> {
    let mut bytes = [0; 1024];
    let count = file.read_at(&mut bytes, 0)?;
    Ok(String::from_utf8_lossy(&bytes[..count]).into_owned())
}
