//! How things are measured: sides that alternate, caches dropped on demand, medians with their spread,
//! and what reached the disk.

use crate::walk;
use anyhow::Context;
use serde::Serialize;
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// The unit of the kernel's counters, whatever the disk's own sectors are.
const SECTOR_BYTES: u64 = 512;

/// What `/proc/PID/stat` counts times in: Linux shows a hundred ticks a second on every machine.
const TICK_MILLIS: u64 = 10;

/// Samples of one quantity.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Spread {
    samples: Vec<f64>,
}

impl Spread {
    /// One more sample.
    pub fn push(&mut self, sample: f64) {
        self.samples.push(sample);
    }

    /// The middle sample, or the mean of the two in the middle; zero without samples.
    pub fn median(&self) -> f64 {
        let mut sorted = self.samples.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        match sorted.len() {
            0 => 0.0,
            count if count % 2 == 1 => sorted[middle],
            _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
        }
    }

    /// The smallest sample.
    pub fn min(&self) -> f64 {
        self.samples.iter().copied().reduce(f64::min).unwrap_or(0.0)
    }

    /// The largest sample.
    pub fn max(&self) -> f64 {
        self.samples.iter().copied().reduce(f64::max).unwrap_or(0.0)
    }

    /// All samples, in the order in which they were taken.
    pub fn samples(&self) -> &[f64] {
        &self.samples
    }
}

impl FromIterator<f64> for Spread {
    fn from_iter<I: IntoIterator<Item = f64>>(samples: I) -> Self {
        Self { samples: samples.into_iter().collect() }
    }
}

/// Runs something and answers how long it took.
pub fn timed<T>(work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(Duration, T)> {
    let start = Instant::now();
    let value = work()?;
    Ok((start.elapsed(), value))
}

/// Processor time that a process has used, of all its threads, in user and kernel mode.
pub fn processor_time(pid: i32) -> anyhow::Result<Duration> {
    let line = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let ticks = parse_ticks(&line).context("no times in /proc/PID/stat")?;
    Ok(Duration::from_millis(ticks * TICK_MILLIS))
}

/// `utime` and `stime`, the 14th and 15th field; the second is a name that may hold anything.
fn parse_ticks(line: &str) -> Option<u64> {
    let (_, rest) = line.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// Writes everything back and empties the kernel's page, inode and name caches.
pub fn drop_caches() -> anyhow::Result<()> {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3").context("cannot drop caches; this needs root")
}

/// Major and minor number of the device that a path lies on.
pub fn device_below(path: &Path) -> anyhow::Result<(u32, u32)> {
    let device = fs::metadata(path).with_context(|| path.display().to_string())?.dev();
    Ok((rustix::fs::major(device), rustix::fs::minor(device)))
}

/// Counts what reaches the disk below a path: the device's own counter, everybody's writes included.
#[derive(Debug)]
pub struct DiskWrites {
    device: (u32, u32),
    before: u64,
}

impl DiskWrites {
    /// Starts counting, with nothing of the past left to write.
    pub fn start(path: &Path) -> anyhow::Result<Self> {
        let device = device_below(path)?;
        rustix::fs::sync();
        Ok(Self { device, before: sectors_written(device)? })
    }

    /// Writes back what is dirty, and answers the bytes written since the start.
    pub fn finish(self) -> anyhow::Result<u64> {
        rustix::fs::sync();
        Ok((sectors_written(self.device)? - self.before) * SECTOR_BYTES)
    }
}

fn sectors_written(device: (u32, u32)) -> anyhow::Result<u64> {
    let table = fs::read_to_string("/proc/diskstats")?;
    parse_sectors_written(&table, device).with_context(|| {
        format!(
            "device {}:{} is not in /proc/diskstats; use a folder on a disk",
            device.0, device.1
        )
    })
}

fn parse_sectors_written(table: &str, device: (u32, u32)) -> Option<u64> {
    table.lines().find_map(|line| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let number = |at: usize| words.get(at)?.parse::<u64>().ok();
        let found = (number(0)?, number(1)?) == (u64::from(device.0), u64::from(device.1));
        found.then(|| number(9)).flatten()
    })
}

/// Allocated bytes of a tree, hard links counted once, no file system border crossed; 0 when absent.
pub fn allocated_bytes(root: &Path) -> anyhow::Result<u64> {
    if !root.exists() {
        return Ok(0);
    }
    let mut seen = HashSet::new();
    let mut total = 0;
    walk::entries(root, &mut |_, metadata| {
        if seen.insert(metadata.ino()) {
            total += metadata.blocks() * SECTOR_BYTES;
        }
        Ok(())
    })?;
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        let odd: Spread = [3.0, 1.0, 2.0].into_iter().collect();
        assert_eq!((odd.median(), odd.min(), odd.max()), (2.0, 1.0, 3.0));
        let even: Spread = [4.0, 1.0, 2.0, 3.0].into_iter().collect();
        assert_eq!(even.median(), 2.5);
        assert_eq!(Spread::default().median(), 0.0);
    }

    #[test]
    fn ticks_are_found_behind_any_name() {
        let line = "7 (a) b (c) S 1 7 7 0 -1 4194560 10 0 0 0 25 17 0 0 20 0 8 0 100 1 2";
        assert_eq!(parse_ticks(line), Some(42));
        assert_eq!(parse_ticks("7 (a) S 1"), None);
    }

    #[test]
    fn disk_statistics_are_read_by_number() {
        let table = " 7 0 loop0 1 2 3 4 5 6 7 8 9 10 11\n 254 0 vda 75924 25904 6628666 33868 92938 \
                     110544 12691048 68132 0 15976 103853\n";
        assert_eq!(parse_sectors_written(table, (254, 0)), Some(12_691_048));
        assert_eq!(parse_sectors_written(table, (254, 1)), None);
    }
}
