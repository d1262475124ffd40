//! Sandboxes that belong to a command: when the command dies, they go.
//!
//! `run --rm` creates `run/owners/<key>`, keeps it locked and labels its sandbox with the key. A node
//! looks now and then for keys whose lock is free: their command is dead, whatever killed it, and its
//! sandboxes are removed by force.
//!
//! What survives a crash: the key's file, unlocked, which is what tells the next node.

use crate::errors::Outcome;
use crate::settings::private_folder;
use layer::{Context, Error, Result};
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::{ListRequest, RemoveRequest};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use tonic::transport::Channel;

/// The label that carries an owner's key.
pub const LABEL: &str = "lamella.owner";

/// A living owner. Dropping it ends the ownership; the node then collects what is left.
#[derive(Debug)]
pub struct Owner {
    key: String,
    path: PathBuf,
    _file: File,
}

impl Owner {
    /// Registers this process as an owner in `dir`.
    pub fn register(dir: &Path) -> Result<Self> {
        let name = || format!("register in {}", dir.display());
        private_folder(dir)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let key = format!("{}-{:x}", std::process::id(), now.as_nanos());
        // The file gets its name only when it is locked: an unlocked one means a dead owner.
        let (temporary, path) = (dir.join(format!(".{key}")), dir.join(&key));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)
            .context(name)?;
        file.lock().context(name)?;
        std::fs::rename(&temporary, &path).context(name)?;
        Ok(Self { key, path, _file: file })
    }

    /// The value of [`LABEL`] on this owner's sandboxes.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Ends the ownership when nothing is owned any more.
    pub fn release(self) {
        _ = std::fs::remove_file(&self.path);
    }
}

/// The keys of owners that died.
fn dead(dir: &Path) -> Result<Vec<String>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io(format!("list {}", dir.display()), error)),
    };
    let mut keys = Vec::new();
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let Ok(file) = File::open(entry.path()) else { continue };
        if file.try_lock().is_ok() && !name.starts_with('.') {
            keys.push(name);
        }
    }
    Ok(keys)
}

/// Removes the sandboxes of dead owners, then forgets the owners. A sandbox may appear after its dead
/// owner was forgotten (its create was still under way), so `thorough` looks without a reason.
pub async fn collect(dir: &Path, channel: &Channel, thorough: bool) -> Outcome {
    let keys = dead(dir)?;
    if keys.is_empty() && !thorough {
        return Ok(());
    }
    let mut client = SandboxesClient::new(channel.clone());
    let sandboxes =
        client.list(ListRequest { all: true, ..Default::default() }).await?.into_inner().sandboxes;
    for sandbox in sandboxes {
        let Some(key) = sandbox.labels.get(LABEL) else { continue };
        if keys.contains(key) || !dir.join(key).exists() {
            tracing::info!(id = sandbox.id, "remove the sandbox of a dead command");
            client.remove(RemoveRequest { id: sandbox.id, force: true }).await?;
        }
    }
    for key in keys {
        _ = std::fs::remove_file(dir.join(key));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_dead_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let owners = dir.path().join("owners");
        assert!(dead(&owners).unwrap().is_empty());
        let (one, two) = (Owner::register(&owners).unwrap(), Owner::register(&owners).unwrap());
        let key = one.key().to_owned();
        assert!(dead(&owners).unwrap().is_empty());
        drop(one);
        assert_eq!(dead(&owners).unwrap(), [key]);
        two.release();
        assert_eq!(dead(&owners).unwrap().len(), 1);
    }
}
