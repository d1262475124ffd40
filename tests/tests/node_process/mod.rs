//! A runtime in a process of its own that can be killed.

#![allow(dead_code, clippy::unwrap_used)]

use crate::runtime_world::{Client, World};
use anyhow::{Context, Result};
use proto::v1::sandboxes_client::SandboxesClient;
use std::io::BufRead;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Dropping it is `kill -9`.
pub struct Node(Child);

impl Node {
    /// Its memory.
    pub fn resident_bytes(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
    }

    /// How many descriptors it has.
    pub fn descriptors(&self) -> Result<usize> {
        Ok(std::fs::read_dir(format!("/proc/{}/fd", self.0.id()))?.count())
    }

    /// The process id of its zygote.
    pub fn zygote(&self) -> Result<u32> {
        let parent = format!("PPid:\t{}", self.0.id());
        for entry in std::fs::read_dir("/proc")?.flatten() {
            let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
            let status = std::fs::read_to_string(entry.path().join("status")).unwrap_or_default();
            if status.contains("lamella-zygote") && status.lines().any(|line| line == parent) {
                return Ok(pid);
            }
        }
        anyhow::bail!("no zygote")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a runtime on the world's data directory.
pub async fn start(world: &World) -> Result<(Node, Client)> {
    std::fs::create_dir_all(world.data())?;
    let mut child = Command::new(env!("CARGO_BIN_EXE_runtime-process"))
        .arg(world.data())
        .arg(world.image())
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = child.stdout.take().context("its output")?;
    let node = Node(child);
    let mut line = String::new();
    std::io::BufReader::new(stdout).read_line(&mut line)?;
    anyhow::ensure!(line == "ready\n", "the runtime did not start");
    let socket = world.data().join("runtime.sock");
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match proto::connect::unix(&socket).await {
            Ok(channel) => return Ok((node, Client { inner: SandboxesClient::new(channel) })),
            Err(error) if Instant::now() > deadline => return Err(error.into()),
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Kills a process at once.
pub fn kill(pid: u32) {
    Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
}
