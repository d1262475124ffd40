//! Groups of its own for a keeper, so that stopping a service does not end what outlives it.
//!
//! A service manager ends a service by its group in the version 2 hierarchy or in the named systemd
//! one, so the keeper moves to a group of its own there. Best effort: where the host does not allow
//! it, `setsid` alone has to do.

use std::path::{Path, PathBuf};

const HIERARCHIES: [&str; 3] =
    ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"];

const PREFIX: &str = "lamella-keeper-";
/// Somebody who removes empty groups may come between making one and moving there; not this often in a row.
const TRIES: usize = 16;

/// Moves the calling process.
pub fn enter(data: &Path, index: usize) {
    for group in groups(data, index) {
        let moved = (0..TRIES).map(|_| make(&group).and_then(|()| move_to(&group))).find(
            |moved| !matches!(moved, Err(error) if error.kind() == std::io::ErrorKind::NotFound),
        );
        if let Some(Err(error)) = moved {
            tracing::debug!(%error, group = %group.display(), "own group");
        }
    }
}

fn make(group: &Path) -> std::io::Result<()> {
    std::fs::create_dir(group).or_else(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => Ok(()),
        _ => Err(error),
    })
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

/// Removes the groups of all keepers that have died, of whatever data directory; says how many. The kernel
/// refuses to remove one that a process is in.
pub fn remove_empty() -> usize {
    existing(PREFIX).filter(|group| std::fs::remove_dir(group).is_ok()).count()
}

/// The groups that the keepers of a data directory have, or had when they were killed.
pub fn groups_of(data: &Path) -> Vec<PathBuf> {
    existing(&prefix_of(data)).collect()
}

fn existing(prefix: &str) -> impl Iterator<Item = PathBuf> {
    let entries = HIERARCHIES.iter().filter_map(|root| std::fs::read_dir(root).ok()).flatten();
    entries
        .flatten()
        .filter(move |entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
}

fn prefix_of(data: &Path) -> String {
    let data = layer::Digest::of(data.as_os_str().as_encoded_bytes()).short();
    format!("{PREFIX}{data}-")
}

fn move_to(group: &Path) -> std::io::Result<()> {
    std::fs::write(group.join("cgroup.procs"), std::process::id().to_string())
}

/// One group a keeper in each hierarchy that a service manager uses.
fn groups(data: &Path, index: usize) -> Vec<PathBuf> {
    let prefix = prefix_of(data);
    HIERARCHIES
        .iter()
        .map(Path::new)
        .filter(|root| root.join("cgroup.procs").exists())
        .map(|root| root.join(format!("{prefix}{index}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes back what a test made, also when it failed.
    struct Made(std::process::Child, PathBuf);

    impl Drop for Made {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
            for group in groups_of(&self.1) {
                let _ = std::fs::remove_dir(group);
            }
        }
    }

    #[test]
    fn groups_of_dead_keepers_go_and_those_of_living_ones_stay() {
        let data = PathBuf::from(format!("/nowhere/{}", std::process::id()));
        let child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let mut made = Made(child, data.clone());
        for index in 0..2 {
            for group in groups(&data, index) {
                make(&group).unwrap();
            }
        }
        let all = groups_of(&data);
        let lived_in = groups(&data, 1);
        assert_eq!(all.len(), lived_in.len() * 2);
        for group in &lived_in {
            std::fs::write(group.join("cgroup.procs"), made.0.id().to_string()).unwrap();
        }
        // A test beside this one may do the same.
        remove_empty();
        let mut left = groups_of(&data);
        left.sort();
        let mut expected = lived_in;
        expected.sort();
        assert_eq!(left, expected);
        made.0.kill().unwrap();
        made.0.wait().unwrap();
        remove_empty();
        assert_eq!(groups_of(&data), Vec::<PathBuf>::new());
    }
}
