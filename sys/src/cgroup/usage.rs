//! What a group uses and what was refused to it.

use super::{Group, number};
use std::io;

impl Group<'_> {
    /// Processor time in microseconds since the group was made. Version 2 counts it without a controller.
    pub fn cpu_us(&self) -> io::Result<u64> {
        if let Some(root) = self.hierarchies.version_2_root() {
            let text = std::fs::read_to_string(root.join(&self.name).join("cpu.stat"))?;
            return text
                .lines()
                .find_map(|line| line.strip_prefix("usage_usec "))
                .map_or(Ok(0), number);
        }
        // Where version 1 mounts both together.
        let file = self.file(&self.hierarchies.cpu, "cpuacct.usage", "")?;
        Ok(number(std::fs::read_to_string(file)?.trim())? / 1000)
    }

    /// Processes and threads now.
    pub fn tasks(&self) -> io::Result<u64> {
        let file = self.file(&self.hierarchies.pids, "pids.current", "pids.current")?;
        number(std::fs::read_to_string(file)?.trim())
    }

    /// Forks that were refused for the bound on tasks since the group was made.
    pub fn refused_forks(&self) -> io::Result<u64> {
        let file = self.file(&self.hierarchies.pids, "pids.events", "pids.events")?;
        let text = std::fs::read_to_string(file)?;
        text.lines().find_map(|line| line.strip_prefix("max ")).map_or(Ok(0), number)
    }
}
