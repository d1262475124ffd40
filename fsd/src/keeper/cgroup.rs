//! Groups of its own for a keeper, so that stopping a service does not end what outlives it.
//!
//! A service manager ends a service by its group in the version 2 hierarchy or in the named systemd
//! one, so the keeper moves to a group of its own there. Best effort: where the host does not allow
//! it, `setsid` alone has to do.

use std::path::{Path, PathBuf};

const HIERARCHIES: [&str; 3] =
    ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"];

/// Moves the calling process.
pub fn enter(data: &Path, index: usize) {
    for group in groups(data, index) {
        let moved = std::fs::create_dir(&group)
            .or_else(|error| match error.kind() {
                std::io::ErrorKind::AlreadyExists => Ok(()),
                _ => Err(error),
            })
            .and_then(|()| move_to(&group));
        if let Err(error) = moved {
            tracing::debug!(%error, group = %group.display(), "own group");
        }
    }
}

/// Moves the calling process back and removes its groups.
pub fn leave(data: &Path, index: usize) {
    for group in groups(data, index) {
        if let Some(root) = group.parent() {
            let left = move_to(root).and_then(|()| std::fs::remove_dir(&group));
            if let Err(error) = left {
                tracing::debug!(%error, group = %group.display(), "leave own group");
            }
        }
    }
}

/// Removes the groups of a keeper that has died.
pub fn remove(data: &Path, index: usize) {
    for group in groups(data, index) {
        if let Err(error) = std::fs::remove_dir(&group)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::debug!(%error, group = %group.display(), "remove a group");
        }
    }
}

fn move_to(group: &Path) -> std::io::Result<()> {
    std::fs::write(group.join("cgroup.procs"), std::process::id().to_string())
}

/// One group a keeper in each hierarchy that a service manager uses.
fn groups(data: &Path, index: usize) -> Vec<PathBuf> {
    let data = layer::Digest::of(data.as_os_str().as_encoded_bytes()).short();
    HIERARCHIES
        .iter()
        .map(Path::new)
        .filter(|root| root.join("cgroup.procs").exists())
        .map(|root| root.join(format!("lamella-keeper-{data}-{index}")))
        .collect()
}
