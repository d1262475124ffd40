//! A node of the program under test: its command line as a person types it, and its counters.
//!
//! A [`Node`] is `lamella up` as a child on its own data directory; dropping it ends it with
//! `lamella down`, and kills it when that does not help within a while.

use crate::shell;
use anyhow::{Context, bail};
use proto::v1;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tonic::transport::Channel;

/// How long a node may take to become ready, and to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// The program under test, with a place of its own.
#[derive(Debug, Clone)]
pub struct Lamella {
    program: PathBuf,
    /// The data directory.
    pub data: PathBuf,
    /// The store, when it is not the data directory's own.
    pub store: Option<String>,
}

impl Lamella {
    /// This very program, on a data directory.
    pub fn at(data: &Path) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find this program")?;
        Ok(Self { program, data: data.to_path_buf(), store: None })
    }

    /// The same on another store.
    pub fn with_store(&self, store: &str) -> Self {
        Self { store: Some(store.to_owned()), ..self.clone() }
    }

    /// A command of it.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--data").arg(&self.data);
        if let Some(store) = &self.store {
            command.args(["--store", store]);
        }
        command.args(words).env_remove("LAMELLA_DATA").env_remove("LAMELLA_STORE");
        command.env("LAMELLA_CONFIG", "/dev/null");
        command
    }

    /// Runs a command to its end and answers its output.
    pub fn run(&self, words: &[&str]) -> anyhow::Result<String> {
        shell::output(&mut self.command(words))
    }

    /// Starts the node and waits until it answers.
    pub fn up(&self) -> anyhow::Result<Node> {
        fs::create_dir_all(&self.data)?;
        let log = self.data.join("bench-node.log");
        let output = File::create(&log)?;
        let child = self
            .command(&["up"])
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .context("cannot start the node")?;
        let mut node = Node { lamella: self.clone(), child, log };
        node.wait_ready()?;
        Ok(node)
    }

    /// Whether the node cache holds nothing: no file and no folder but those that every cache has.
    pub fn cache_is_empty(&self) -> anyhow::Result<bool> {
        let entries = match fs::read_dir(self.data.join("cache")) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(true),
            entries => entries?,
        };
        for entry in entries {
            let name = entry?.file_name();
            if name != "lock" && name != "pins" {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Empties the node cache. No node may be up.
    pub fn clear_cache(&self) -> anyhow::Result<()> {
        crate::corpus::remove_tree(&self.data.join("cache"))
    }
}

/// A node that is up.
#[derive(Debug)]
pub struct Node {
    lamella: Lamella,
    child: Child,
    log: PathBuf,
}

/// Layers that were attached.
#[derive(Debug)]
pub struct Attached {
    /// Of the calls.
    pub time: Duration,
    /// Mount points, in the order asked for.
    pub places: Vec<PathBuf>,
}

/// Counters of a node's file-system daemon.
#[derive(Debug, Clone, Copy, Default)]
pub struct Loaded {
    /// Bytes read from the store, compressed.
    pub store_bytes: u64,
    /// Bytes of layer files read from the store: metadata images, compressed.
    pub metadata_bytes: u64,
    /// Requests to the store.
    pub store_reads: u64,
    /// Plain bytes filled into the node cache.
    pub plain_bytes: u64,
    /// Plane events answered.
    pub events: u64,
}

/// Sizes of an environment.
#[derive(Debug, Clone, Copy, Default)]
pub struct Size {
    /// Data space of all its layers.
    pub plain_bytes: u64,
    /// Compressed data of all its layers, with their metadata.
    pub stored_bytes: u64,
    /// Metadata images of all its layers.
    pub metadata_bytes: u64,
}

impl Node {
    fn wait_ready(&mut self) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("the node ended at once ({status}): {}", self.last_words());
            }
            if self.socket("node.sock").exists() && self.loaded().is_ok() {
                return Ok(());
            }
            if start.elapsed() > PATIENCE {
                bail!("the node did not become ready: {}", self.last_words());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What the node and its file-system daemon said last.
    fn last_words(&self) -> String {
        let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        let own = read(&self.log);
        let daemon = read(&self.lamella.data.join("run/fsd.log"));
        format!("{} | {}", shell::tail(&own), shell::tail(&daemon))
    }

    /// A socket of the node.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.lamella.data.join("run").join(name)
    }

    /// Calls the node over a connection that is closed again when this returns: a node that goes down
    /// waits for its clients.
    fn call<T, F: Future<Output = anyhow::Result<T>>>(
        &self,
        socket: &str,
        work: impl FnOnce(Channel) -> F,
    ) -> anyhow::Result<T> {
        let path = self.socket(socket);
        runtime()?.block_on(async { work(proto::connect::unix(&path).await?).await })
    }

    fn stats(&self) -> anyhow::Result<v1::StatsResponse> {
        self.call("fsd.sock", async |channel| {
            let mut client = v1::layer_fs_client::LayerFsClient::new(channel);
            Ok(client.stats(v1::StatsRequest {}).await?.into_inner())
        })
    }

    /// What was loaded since the node's start.
    pub fn loaded(&self) -> anyhow::Result<Loaded> {
        let stats = self.stats()?;
        Ok(Loaded {
            store_bytes: stats.store_bytes,
            metadata_bytes: stats.description_bytes,
            store_reads: stats.store_reads,
            plain_bytes: stats.fetched_bytes,
            events: stats.events,
        })
    }

    /// Bytes asked for by events since the layers were attached: the union of their ranges.
    pub fn asked_bytes(&self) -> anyhow::Result<u64> {
        Ok(self.stats()?.layers.iter().map(|layer| layer.asked_bytes).sum())
    }

    /// Loads all of a layer.
    pub fn complete(&self, reference: &str) -> anyhow::Result<()> {
        let layers = self.resolve(reference)?.layers;
        self.call("fsd.sock", async |channel| {
            let mut client = v1::layer_fs_client::LayerFsClient::new(channel);
            for layer in layers {
                client
                    .complete(v1::CompleteRequest { layer_id: layer.layer_id, rate_bytes_per_s: 0 })
                    .await?;
            }
            Ok(())
        })
    }

    fn resolve(&self, reference: &str) -> anyhow::Result<v1::ResolveResponse> {
        self.call("node.sock", async |channel| {
            let mut client = v1::images_client::ImagesClient::new(channel);
            let request = v1::ResolveRequest { name: reference.to_owned() };
            Ok(client.resolve(request).await?.into_inner())
        })
    }

    /// Attaches layers one after another, through a connection that is open already.
    pub fn attach(&self, references: &[String], holder: &str) -> anyhow::Result<Attached> {
        let layers = self.layer_ids(references)?;
        self.call("fsd.sock", async |channel| {
            let mut client = v1::layer_fs_client::LayerFsClient::new(channel);
            let (start, mut places) = (Instant::now(), Vec::new());
            for layer_id in layers {
                let holder = holder.to_owned();
                let request = v1::AttachRequest { layer_id, holder, ..Default::default() };
                places.push(client.attach(request).await?.into_inner().mount_path.into());
            }
            Ok(Attached { time: start.elapsed(), places })
        })
    }

    /// Attaches layers side by side, as a node does for a sandbox; answers how long all took.
    pub fn attach_together(&self, references: &[String], holder: &str) -> anyhow::Result<Duration> {
        let layers = self.layer_ids(references)?;
        self.call("fsd.sock", async |channel| {
            let client = v1::layer_fs_client::LayerFsClient::new(channel);
            let (start, mut calls) = (Instant::now(), tokio::task::JoinSet::new());
            for layer_id in layers {
                let (mut client, holder) = (client.clone(), holder.to_owned());
                let request = v1::AttachRequest { layer_id, holder, ..Default::default() };
                calls.spawn(async move { client.attach(request).await });
            }
            while let Some(answer) = calls.join_next().await {
                answer??;
            }
            Ok(start.elapsed())
        })
    }

    /// Takes back [`Node::attach`].
    pub fn detach(&self, references: &[String], holder: &str) -> anyhow::Result<()> {
        let layers = self.layer_ids(references)?;
        self.call("fsd.sock", async |channel| {
            let mut client = v1::layer_fs_client::LayerFsClient::new(channel);
            for layer_id in layers {
                let holder = holder.to_owned();
                client.detach(v1::DetachRequest { layer_id, holder }).await?;
            }
            Ok(())
        })
    }

    fn layer_ids(&self, references: &[String]) -> anyhow::Result<Vec<Vec<u8>>> {
        let mut ids = Vec::new();
        for reference in references {
            ids.extend(self.resolve(reference)?.layers.into_iter().map(|layer| layer.layer_id));
        }
        Ok(ids)
    }

    /// The process of the file-system daemon.
    pub fn daemon_pid(&self) -> anyhow::Result<i32> {
        self.pid_behind("fsd.sock")
    }

    fn pid_behind(&self, socket: &str) -> anyhow::Result<i32> {
        let stream = std::os::unix::net::UnixStream::connect(self.socket(socket))?;
        let peer = rustix::net::sockopt::socket_peercred(&stream)?;
        Ok(peer.pid.as_raw_nonzero().get())
    }

    /// What the process behind a socket has in memory, pages of its program included.
    pub fn resident_bytes(&self, socket: &str) -> anyhow::Result<f64> {
        let pid = self.pid_behind(socket)?;
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|rest| rest.split_whitespace().next()).context("VmRSS")?;
        Ok(kib.parse::<f64>()? * 1024.0)
    }

    /// How large what a reference names is.
    pub fn size(&self, reference: &str) -> anyhow::Result<Size> {
        let mut size = Size::default();
        for layer in self.resolve(reference)?.layers {
            size.plain_bytes += layer.plain_bytes;
            size.stored_bytes += layer.stored_bytes + layer.metadata_bytes;
            size.metadata_bytes += layer.metadata_bytes;
        }
        Ok(size)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Whatever goes wrong here, the child must be gone: nobody else waits for it.
        let _ = self.lamella.run(&["down"]);
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            match self.child.try_wait() {
                Ok(Some(_)) | Err(_) => return,
                Ok(None) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A small runtime for one thread that calls.
pub fn runtime() -> anyhow::Result<Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}
