//! What the node and its sandboxes use now, for `lamella top`: one pass over the control groups, for whoever asks.
//!
//! Three small files of the kernel for each sandbox, on a thread that may block. What a sandbox wrote takes longer to
//! find out, so that is done only for those that are named, and not longer than a while.
//!
//! Locking: one pass at a time; others wait.

use crate::node::Node;
use layer::{Context, Error, ErrorKind, Result};
use proto::v1::{SandboxUsage, UsageRequest, UsageResponse};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Sandboxes whose written bytes are counted.
const MAX_DISKS: usize = 64;
/// How long that may take.
const DISK_TIME: Duration = Duration::from_millis(200);
/// The kernel counts time in hundredths of a second, on every machine that it runs on.
const US_PER_TICK: u64 = 10_000;

static PASS: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Looks.
pub async fn usage(node: &Arc<Node>, request: UsageRequest) -> Result<UsageResponse> {
    let _pass = PASS.lock().await;
    let node = Arc::clone(node);
    let looking = tokio::task::spawn_blocking(move || look(&node, &request.disk_of));
    let panicked = |error| Error::new(ErrorKind::Internal, "looking panicked").with_source(error);
    looking.await.map_err(panicked)?
}

fn look(node: &Node, disk_of: &[String]) -> Result<UsageResponse> {
    let since = Instant::now();
    let all = node.list(true);
    let (over, living): (Vec<_>, Vec<_>) =
        all.iter().partition(|sandbox| sandbox.state().is_over());
    let mut sandboxes = Vec::with_capacity(living.len());
    for sandbox in living {
        let Some(instance) = sandbox.instance() else { continue };
        let record = sandbox.record();
        sandboxes.push(SandboxUsage {
            state: record.state.wire().into(),
            environment: record.environment,
            created_unix_ns: record.created_unix_ns,
            id: record.id,
            cpu_us: instance.cpu_us(),
            memory_bytes: instance.memory_in_use(),
            tasks: instance.tasks(),
            commands: sandbox.running_commands() as u64,
            written_bytes: None,
        });
    }
    let counting = Instant::now();
    for id in disk_of.iter().take(MAX_DISKS) {
        let known = sandboxes.iter_mut().find(|known| known.id == *id);
        let instance = node.sandbox(id).and_then(|sandbox| sandbox.instance());
        if let (Some(known), Some(instance)) = (known, instance) {
            known.written_bytes = Some(instance.written().bytes);
        }
        if counting.elapsed() > DISK_TIME {
            break;
        }
    }
    let disk = std::fs::File::open(&node.config.data_dir)
        .and_then(|folder| sys::file::space::file_system(folder.as_fd()))
        .context(|| "look at the disk of the data directory".into())?;
    let (host_cpu_us, host_busy_us) = cpu_time(&read("/proc/stat"));
    let memory = read("/proc/meminfo");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(UsageResponse {
        unix_ns: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
        sandboxes,
        ended: over.len() as u64,
        creates_total: node.meters.creates.count(),
        host_cpu_us,
        host_busy_us,
        host_memory_bytes: memory_line(&memory, "MemTotal:"),
        host_available_bytes: memory_line(&memory, "MemAvailable:"),
        disk_bytes: disk.total_bytes,
        disk_free_bytes: disk.available_bytes,
        took_us: u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX),
    })
}

/// A file of the kernel; what is not there counts nothing.
fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Microseconds of all processors, and those of them that were not idle.
fn cpu_time(stat: &str) -> (u64, u64) {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu ")).unwrap_or_default();
    // User, nice, system, idle, waiting for disks, interrupts twice, stolen; guests are in the first two.
    let ticks: Vec<u64> =
        line.split_whitespace().take(8).filter_map(|word| word.parse().ok()).collect();
    let total: u64 = ticks.iter().sum();
    let idle: u64 = ticks.iter().skip(3).take(2).sum();
    (total * US_PER_TICK, (total - idle) * US_PER_TICK)
}

fn memory_line(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    let kib: Option<u64> = line.split_whitespace().next().and_then(|word| word.parse().ok());
    kib.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_read_as_the_kernel_writes_it() {
        let stat = "cpu  100 1 50 700 49 0 10 90 5 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n";
        assert_eq!(cpu_time(stat), (10_000_000, 2_510_000));
        assert_eq!(cpu_time(""), (0, 0));
        let memory = "MemTotal:       8000 kB\nMemFree: 1 kB\nMemAvailable:   2000 kB\n";
        assert_eq!(memory_line(memory, "MemAvailable:"), 2000 * 1024);
        assert_eq!(memory_line(memory, "Nothing:"), 0);
        assert!(cpu_time(&read("/proc/stat")).0 > 0);
    }
}
