//! What fsd is told at start, and where its files are.
//!
//! Paths below the data directory are the seam to the other daemons and to a later fsd, so they are
//! named here and nowhere else.

pub use crate::cache::CacheLimit;
use crate::planes::PlaneKind;
use layer::{Error, LayerId, Result};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How many keepers hold the group beside fsd. Any one of them suffices for a takeover.
pub const KEEPERS: usize = 2;

/// Settings of one fsd process.
#[derive(Debug, Clone)]
pub struct FsdConfig {
    /// The node's data directory.
    pub data_dir: PathBuf,
    /// Where layers and packs are read from, as `store::open` takes it.
    pub store_url: String,
    /// Program and arguments that start a keeper; `--data DIR --index N` is appended.
    pub keeper_command: Vec<OsString>,
    /// Program and arguments that start a virtiofs server; `--socket S --metadata M --layer-data D` is
    /// appended.
    pub virtiofs_command: Vec<OsString>,
    /// The plane of an attach that names none; the best that this host can do when absent.
    pub plane: Option<PlaneKind>,
    /// How long a reader waits for its bytes before it gets an error.
    pub deadline: Duration,
    /// Threads that read from the store, verify and decompress.
    pub fill_threads: usize,
    /// Threads that take events from the kernel.
    pub event_threads: usize,
    /// Free bytes of the cache disk below which nothing is filled.
    pub cache_reserve_bytes: u64,
    /// How large the node cache may grow before the least recently used is evicted.
    pub cache_limit: Option<CacheLimit>,
    /// How long a reader waits while the cache disk is full and nothing can be evicted.
    pub full_disk_deadline: Duration,
    /// Plain bytes a second of a load of a whole layer whose caller names no rate; 0 is no limit.
    pub prefetch_rate: u64,
    /// Compare a layer's metadata image with its digest at every attach, not only at the first.
    pub verify_metadata: bool,
    /// Where metrics are served over HTTP, if anywhere.
    pub metrics: Option<std::net::SocketAddr>,
    /// Attach and export only what one of these has signed; everything when absent.
    pub trusted_keys: Option<store::TrustedKeys>,
    /// How often filled data is written back and made durable.
    pub sync_interval: Duration,
}

impl FsdConfig {
    /// Defaults for a data directory and a store; keepers are this program's `keeper` subcommand.
    pub fn new(data_dir: impl Into<PathBuf>, store_url: impl Into<String>) -> Self {
        Self {
            data_dir: data_dir.into(),
            store_url: store_url.into(),
            keeper_command: vec!["/proc/self/exe".into(), "keeper".into()],
            virtiofs_command: vec!["/proc/self/exe".into(), "virtiofs".into()],
            plane: None,
            deadline: Duration::from_secs(30),
            fill_threads: 8,
            event_threads: 4,
            cache_reserve_bytes: 64 << 20,
            cache_limit: None,
            full_disk_deadline: Duration::from_secs(5),
            prefetch_rate: 0,
            verify_metadata: false,
            metrics: None,
            trusted_keys: None,
            sync_interval: Duration::from_millis(1000),
        }
    }

    /// The paths of this data directory. `Invalid` for one that is not absolute.
    pub fn paths(&self) -> Result<Paths> {
        Paths::new(&self.data_dir)
    }
}

/// The files of a data directory that fsd and its keepers share with others.
#[derive(Debug, Clone)]
pub struct Paths {
    /// `<data>/cache`: the node cache.
    pub cache: PathBuf,
    /// `<data>/run`: sockets, locks and mount points.
    pub run: PathBuf,
}

impl Paths {
    /// Paths below `data`, which must be absolute: the kernel and other processes resolve them too.
    pub fn new(data: &Path) -> Result<Self> {
        if !data.is_absolute() {
            return Err(Error::invalid(format!("data directory {} is relative", data.display())));
        }
        Ok(Self { cache: data.join("cache"), run: data.join("run") })
    }

    /// Socket of the `LayerFs` service.
    pub fn socket(&self) -> PathBuf {
        self.run.join("fsd.sock")
    }

    /// Locked by the one fsd of this data directory; holds its pid.
    pub fn lock(&self) -> PathBuf {
        self.run.join("fsd.lock")
    }

    /// Socket of the node process, for imaged.
    pub fn node_socket(&self) -> PathBuf {
        self.run.join("node.sock")
    }

    /// Socket of one keeper.
    pub fn keeper_socket(&self, index: usize) -> PathBuf {
        self.run.join(format!("keeper-{index}.sock"))
    }

    /// Locked by one keeper; holds its pid.
    pub fn keeper_lock(&self, index: usize) -> PathBuf {
        self.run.join(format!("keeper-{index}.lock"))
    }

    /// Locked by whoever is about to take the seat of a keeper, until it listens.
    pub fn keeper_heir(&self, index: usize) -> PathBuf {
        self.run.join(format!("keeper-{index}.heir"))
    }

    /// Where layers are mounted.
    pub fn mounts(&self) -> PathBuf {
        self.run.join("layers")
    }

    /// Mount point of one layer.
    pub fn mount(&self, layer: &LayerId) -> PathBuf {
        self.mounts().join(layer.to_string())
    }

    /// Who holds which layer: one folder a layer, one empty file a holder.
    pub fn holders(&self) -> PathBuf {
        self.run.join("holders")
    }

    /// Which layers are being loaded whole: a file a layer.
    pub fn completions(&self) -> PathBuf {
        self.run.join("completions")
    }

    /// Sockets of virtiofs servers.
    pub fn virtiofs(&self) -> PathBuf {
        self.run.join("virtiofs")
    }

    /// Mount point of the FUSE file system of exported layers.
    pub fn exports(&self) -> PathBuf {
        self.run.join("exports")
    }

    /// To whom which layer is exported, as [`Paths::holders`].
    pub fn exported(&self) -> PathBuf {
        self.run.join("exported")
    }

    /// Where the kernel's cachefiles keep their files.
    pub fn fscache(&self) -> PathBuf {
        self.cache.join("fscache")
    }

    /// Mount point of the FUSE file system that carries data files.
    pub fn fuse(&self) -> PathBuf {
        self.run.join("fuse")
    }
}
