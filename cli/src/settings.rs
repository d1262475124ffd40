//! Where this invocation works: the store's URL and the paths below the data directory.
//!
//! Nothing is created here except by [`Settings::prepare`].

use crate::args::{Cli, DEFAULT_DATA};
use layer::{Context, Error, Result};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The longest path of a Unix socket that the kernel takes, without its terminating zero.
const SOCKET_PATH_BYTES: usize = 107;
/// A socket is bound under a temporary name first: its own, a dot and a process id.
const TEMPORARY_NAME_BYTES: usize = 12;

/// The resolved places.
#[derive(Debug, Clone)]
pub struct Settings {
    data: PathBuf,
    store: String,
    store_is_chosen: bool,
    config: Option<PathBuf>,
}

/// A path as a URL: what would begin an escape or a query is escaped.
fn file_url(path: &Path) -> Result<String> {
    let text = path.to_str().ok_or_else(|| {
        Error::invalid(format!("the data directory {} is not UTF-8", path.display()))
    })?;
    Ok(format!("file://{}", text.replace('%', "%25").replace('?', "%3f")))
}

impl Settings {
    /// Makes the data directory absolute and picks the default store below it.
    pub fn resolve(cli: &Cli) -> Result<Self> {
        let data = cli.data.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_DATA));
        let data =
            std::path::absolute(&data).context(|| format!("data directory {}", data.display()))?;
        let longest = data.join("run/keeper-0.sock");
        if longest.as_os_str().len() > SOCKET_PATH_BYTES - TEMPORARY_NAME_BYTES {
            return Err(Error::invalid(format!(
                "the data directory {} has a path too long for Unix sockets; choose a shorter one",
                data.display()
            )));
        }
        let store = match &cli.store {
            Some(url) if url.contains("://") || url.starts_with("memory:") => url.clone(),
            Some(path) => {
                let path = std::path::absolute(path).context(|| format!("store {path}"))?;
                path.display().to_string()
            }
            None => file_url(&data.join("store"))?,
        };
        let config = crate::configuration::absolute(cli.config.as_deref())?;
        Ok(Self { data, store, store_is_chosen: cli.store.is_some(), config })
    }

    /// The data directory.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// The store's URL.
    pub fn store_url(&self) -> &str {
        &self.store
    }

    /// Whether the user named the store, so that another one must not be taken silently.
    pub fn store_is_chosen(&self) -> bool {
        self.store_is_chosen
    }

    /// The configuration file, where one was named.
    pub fn config(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    /// The catalog's directory.
    pub fn catalog(&self) -> PathBuf {
        self.data.join("catalog")
    }

    /// A file of the running node.
    pub fn run(&self, name: &str) -> PathBuf {
        self.data.join("run").join(name)
    }

    /// The socket of Images and Sandboxes.
    pub fn node_socket(&self) -> PathBuf {
        self.run("node.sock")
    }

    /// The socket of LayerFs.
    pub fn fsd_socket(&self) -> PathBuf {
        self.run("fsd.sock")
    }

    /// Creates the directories that every use of a node or a catalog needs, for root alone.
    pub fn prepare(&self) -> Result<()> {
        private_folder(&self.data)?;
        private_folder(&self.data.join("run"))
    }
}

/// Creates a folder, and those above it, that only their owner can enter.
pub fn private_folder(path: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .context(|| format!("create {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::parse;

    fn resolved(line: &str) -> Settings {
        Settings::resolve(&parse(line.split(' ')).unwrap()).unwrap()
    }

    #[test]
    fn the_store_lies_in_the_data_directory_unless_it_is_named() {
        let settings = resolved("lamella --data /d%?x ls");
        assert_eq!(settings.store_url(), "file:///d%25%3fx/store");
        assert!(!settings.store_is_chosen());
        let settings = resolved("lamella --data /d --store /s?latency_ms=2 ls");
        assert_eq!(settings.store_url(), "/s?latency_ms=2");
        assert!(settings.store_is_chosen());
        assert_eq!(resolved("lamella --store memory:x ls").store_url(), "memory:x");
    }

    #[test]
    fn a_data_directory_too_deep_for_sockets_is_refused() {
        let line = format!("lamella --data /{} ls", "x".repeat(90));
        assert!(Settings::resolve(&parse(line.split(' ')).unwrap()).is_err());
    }
}
