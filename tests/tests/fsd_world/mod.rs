//! A store with one layer of known content, and fsd as a process that tests may kill.
//!
//! The layer is put together here from the formats alone, so that a failing builder cannot hide what
//! fsd does, and the expected bytes of every file are at hand.
#![allow(dead_code, clippy::unwrap_used)]

use anyhow::{Context, Result, ensure};
use layer::chunk::{BLOCK_BYTES, Chunk, ChunkTable};
use layer::layer_file::LayerFile;
use layer::location::{Locations, Placement};
use layer::manifest::{LayerKind, Manifest};
use layer::tree::{Body, Extent, FileData, Inode, Kind, Timestamp, Tree};
use layer::{ChunkDigest, LayerId, PackId};
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::{
    AttachRequest, AttachResponse, CheckRequest, CheckResponse, CompleteRequest, CompleteResponse,
    DetachRequest, DrainRequest, EvictRequest, PinRequest, Plane, StatsRequest, StatsResponse,
};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use store::Store;
use tonic::transport::Channel;

/// A small generator: the same seed gives the same bytes on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Half noise, half repetition, so that both codecs occur. Never all zero in a block.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            let word = self.next() | 1;
            let repeat = if self.below(2) == 0 { 1 } else { 64 };
            for _ in 0..repeat {
                bytes.extend_from_slice(&word.to_le_bytes());
            }
        }
        bytes.truncate(length);
        bytes
    }
}

pub struct LayerShape {
    pub files: usize,
    pub max_file_bytes: u64,
    pub chunk_blocks: u32,
    pub seed: u64,
}

impl Default for LayerShape {
    fn default() -> Self {
        Self { files: 48, max_file_bytes: 600 << 10, chunk_blocks: 16, seed: 7 }
    }
}

/// What was published.
pub struct Published {
    pub id: LayerId,
    pub files: BTreeMap<String, Vec<u8>>,
    pub packs: Vec<PackId>,
    pub data_bytes: u64,
}

fn inode(mode: u16, kind: Kind) -> Inode {
    let mtime = Timestamp { secs: 1_700_000_000, nanos: 5 };
    Inode { mode, uid: 0, gid: 0, mtime, xattrs: Vec::new(), kind }
}

/// Publishes a layer of random files; some chunks are all zero.
pub fn publish(store: &Store, shape: &LayerShape) -> Result<Published> {
    let mut random = Random(shape.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut tree = Tree::new(inode(0o755, Kind::Directory(BTreeMap::new())));
    let mut data: Vec<u8> = Vec::new();
    let mut files = BTreeMap::new();
    for index in 0..shape.files {
        let size = 1 + random.below(shape.max_file_bytes) as usize;
        let mut content = random.bytes(size);
        if index % 9 == 8 {
            // Real zeros in the middle of real content.
            let middle = content.len() / 3..2 * content.len() / 3;
            content[middle].fill(0);
        }
        let blocks = size.div_ceil(BLOCK_BYTES as usize) as u32;
        let data_block = (data.len() / BLOCK_BYTES as usize) as u32;
        data.extend_from_slice(&content);
        data.resize((data_block + blocks) as usize * BLOCK_BYTES as usize, 0);
        let extents = vec![Extent { file_block: 0, blocks, data_block }];
        let body = FileData { size: size as u64, body: Body::Extents(extents) };
        let name = format!("file-{index:04}");
        let file = tree.add(inode(0o644, Kind::Regular(body)))?;
        tree.link(layer::tree::InodeIx::ROOT, name.clone().into_bytes(), file)?;
        files.insert(name, content);
    }
    let data_blocks = (data.len() / BLOCK_BYTES as usize) as u32;
    let (table, locations) = pack(store, &data, shape.chunk_blocks)?;
    let metadata = layer::erofs::writer::write(&tree, data_blocks)?.bytes;
    let manifest = Manifest {
        directories: 1,
        files: files.len() as u64,
        plain_bytes: files.values().map(|content| content.len() as u64).sum(),
        ..Manifest::describing(LayerKind::Workspace, &table, &metadata)
    };
    let file = LayerFile { manifest, chunk_table: table, metadata };
    let (id, _) = store.put_layer(&file.encode()?)?;
    store.put_locations(&id, &locations)?;
    let data_bytes = data.len() as u64;
    Ok(Published { id, files, packs: locations.packs, data_bytes })
}

fn pack(store: &Store, data: &[u8], chunk_blocks: u32) -> Result<(ChunkTable, Locations)> {
    let mut writer = store.pack_writer()?;
    let (mut chunks, mut placements) = (Vec::new(), Vec::new());
    let mut start_block = 0;
    for plain in data.chunks((chunk_blocks * BLOCK_BYTES) as usize) {
        let blocks = plain.len() as u32 / BLOCK_BYTES;
        let zero = plain.iter().all(|byte| *byte == 0);
        let digest = if zero { ChunkDigest::ZERO } else { ChunkDigest::of(plain) };
        chunks.push(Chunk { start_block, blocks, digest });
        start_block += blocks;
        if zero {
            placements.push(None);
            continue;
        }
        let (codec, payload) = store::codec::encode_chunk(plain, 1);
        let offset = layer::pack::HEADER_BYTES as u64 + writer_bytes(&placements);
        writer.append(digest, codec, plain.len() as u32, &payload)?;
        let stored_bytes = payload.len() as u32;
        placements.push(Some(Placement { pack: 0, offset, stored_bytes, codec }));
    }
    let sealed = writer.finish()?;
    Ok((ChunkTable::new(chunks)?, Locations { packs: vec![sealed.id], placements }))
}

fn writer_bytes(placements: &[Option<Placement>]) -> u64 {
    placements.iter().flatten().map(|placement| u64::from(placement.stored_bytes)).sum()
}

/// A data directory with a store beside it, and fsd when it runs. Cleans up when dropped.
pub struct World {
    pub folder: tempfile::TempDir,
    pub data: PathBuf,
    pub store_folder: PathBuf,
    pub layer: Published,
    pub options: Vec<String>,
    /// What runs as fsd.
    pub program: PathBuf,
    pub store_query: String,
    /// What the data directory lies on, if that is its own: it goes last.
    pub disk: Option<Box<dyn std::any::Any + Send + Sync>>,
    runtime: tokio::runtime::Runtime,
    fsd: Option<Child>,
}

impl World {
    pub fn new(shape: &LayerShape) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("lamella-fsd-").tempdir()?;
        let store_folder = folder.path().join("store");
        let store = Store::open(store::open(&format!("file://{}", store_folder.display()))?)?;
        let layer = publish(&store, shape)?;
        let data = folder.path().join("data");
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        Ok(Self {
            folder,
            data,
            store_folder,
            layer,
            options: Vec::new(),
            program: env!("CARGO_BIN_EXE_fsd-process").into(),
            store_query: String::new(),
            disk: None,
            runtime,
            fsd: None,
        })
    }

    pub fn run_folder(&self) -> PathBuf {
        self.data.join("run")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("fsd.log")).unwrap_or_default()
    }

    /// Starts fsd and waits until it serves.
    pub fn start(&mut self) -> Result<()> {
        self.spawn()?;
        self.wait_ready()
    }

    pub fn spawn(&mut self) -> Result<()> {
        let log =
            File::options().create(true).append(true).open(self.folder.path().join("fsd.log"))?;
        let mut command = Command::new(&self.program);
        command
            .arg("fsd")
            .arg("--data")
            .arg(&self.data)
            .arg("--store")
            .arg(format!("file://{}{}", self.store_folder.display(), self.store_query))
            .args(&self.options)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        self.fsd = Some(command.spawn()?);
        Ok(())
    }

    pub fn wait_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if self.stats().is_ok() {
                return Ok(());
            }
            if let Some(fsd) = &mut self.fsd
                && let Some(status) = fsd.try_wait()?
            {
                anyhow::bail!("fsd ended: {status}\n{}", self.log());
            }
            ensure!(Instant::now() < deadline, "fsd does not serve\n{}", self.log());
            std::thread::sleep(Duration::from_millis(3));
        }
    }

    fn client(&self) -> Result<LayerFsClient<Channel>> {
        let socket = self.run_folder().join("fsd.sock");
        Ok(LayerFsClient::new(self.runtime.block_on(proto::connect::unix(&socket))?))
    }

    pub fn stats(&self) -> Result<StatsResponse> {
        let mut client = self.client()?;
        Ok(self.runtime.block_on(client.stats(StatsRequest {}))?.into_inner())
    }

    pub fn attach(&self, holder: &str) -> Result<PathBuf> {
        Ok(self.attach_as(holder, Plane::Auto)?.mount_path.into())
    }

    pub fn attach_as(&self, holder: &str, plane: Plane) -> Result<AttachResponse> {
        self.attach_layer(holder, self.layer.id, plane)
    }

    pub fn attach_layer(
        &self,
        holder: &str,
        layer: LayerId,
        plane: Plane,
    ) -> Result<AttachResponse> {
        let request = AttachRequest {
            layer_id: layer.as_bytes().to_vec(),
            holder: holder.into(),
            plane: plane.into(),
            ..AttachRequest::default()
        };
        let mut client = self.client()?;
        let answer = self.runtime.block_on(client.attach(request));
        Ok(answer.with_context(|| self.log())?.into_inner())
    }

    pub fn detach(&self, holder: &str) -> Result<bool> {
        self.detach_layer(holder, self.layer.id)
    }

    pub fn detach_layer(&self, holder: &str, layer: LayerId) -> Result<bool> {
        let layer_id = layer.as_bytes().to_vec();
        let request = DetachRequest { layer_id, holder: holder.into() };
        let mut client = self.client()?;
        Ok(self.runtime.block_on(client.detach(request))?.into_inner().unmounted)
    }

    pub fn complete(&self) -> Result<u64> {
        Ok(self.begin_complete(0)()?.fetched_bytes)
    }

    /// A load of the whole layer, to be carried out where the caller likes.
    pub fn begin_complete(&self, rate: u64) -> impl FnOnce() -> Result<CompleteResponse> + use<> {
        let layer_id = self.layer.id.as_bytes().to_vec();
        let request = CompleteRequest { layer_id, rate_bytes_per_s: rate };
        let (client, runtime) = (self.client(), self.runtime.handle().clone());
        move || Ok(runtime.block_on(client?.complete(request))?.into_inner())
    }

    pub fn evict(&self) -> Result<u64> {
        let request = EvictRequest { layer_id: self.layer.id.as_bytes().to_vec() };
        let mut client = self.client()?;
        Ok(self.runtime.block_on(client.evict(request))?.into_inner().freed_bytes)
    }

    pub fn pin(&self, pinned: bool) -> Result<bool> {
        let layer_id = self.layer.id.as_bytes().to_vec();
        let mut client = self.client()?;
        let answer = self.runtime.block_on(client.pin(PinRequest { layer_id, pinned }));
        Ok(answer?.into_inner().changed)
    }

    pub fn check(&self, repair: bool) -> Result<CheckResponse> {
        let layer_id = self.layer.id.as_bytes().to_vec();
        let mut client = self.client()?;
        Ok(self.runtime.block_on(client.check(CheckRequest { layer_id, repair }))?.into_inner())
    }

    pub fn drain(&self, force: bool) -> Result<()> {
        let mut client = self.client()?;
        self.runtime.block_on(client.drain(DrainRequest { force }))?;
        Ok(())
    }

    pub fn fsd_pid(&self) -> Option<u32> {
        self.fsd.as_ref().map(Child::id)
    }

    /// `kill -9` and wait until it is dead.
    pub fn kill_fsd(&mut self) -> Result<()> {
        let mut fsd = self.fsd.take().context("fsd does not run")?;
        fsd.kill()?;
        fsd.wait()?;
        Ok(())
    }

    /// Waits until fsd has ended by itself.
    pub fn wait_end(&mut self) -> Result<std::process::ExitStatus> {
        Ok(self.fsd.take().context("fsd does not run")?.wait()?)
    }

    pub fn keeper_pid(&self, index: usize) -> Option<u32> {
        let lock = self.run_folder().join(format!("keeper-{index}.lock"));
        let pid: u32 = std::fs::read_to_string(lock).ok()?.trim().parse().ok()?;
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        String::from_utf8_lossy(&command).contains("keeper").then_some(pid)
    }

    pub fn kill_keeper(&self, index: usize) -> Result<()> {
        kill(self.keeper_pid(index).context("keeper does not run")?)
    }

    /// Every process that is a keeper of this world, also one that has no seat yet.
    pub fn keeper_processes(&self) -> Vec<u32> {
        let needle = format!("keeper\0--data\0{}\0", self.data.display());
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(&needle)
        })
        .collect()
    }

    /// Events that were read and not answered, by the journal that a keeper holds.
    pub fn unanswered(&self) -> Result<usize> {
        for index in 0..fsd::KEEPERS {
            let Some(pid) = self.keeper_pid(index) else { continue };
            let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
            for entry in entries.flatten() {
                let target = std::fs::read_link(entry.path()).unwrap_or_default();
                if target.to_string_lossy().contains("lamella-journal")
                    && let Ok(journal) = File::open(entry.path())
                {
                    return Ok(fsd::count_unanswered(&journal)?);
                }
            }
        }
        anyhow::bail!("no keeper holds a journal")
    }

    /// Reads every file below `at` and compares every byte.
    pub fn compare(&self, at: &Path) -> Result<()> {
        for (name, expected) in &self.layer.files {
            let got = std::fs::read(at.join(name)).with_context(|| format!("read {name}"))?;
            ensure!(got == *expected, "{name} differs: {}", first_difference(&got, expected));
        }
        Ok(())
    }

    /// Mounts below the data directory.
    pub fn mounts(&self) -> Vec<PathBuf> {
        let mounts = sys::mount::read_mounts().unwrap_or_default();
        let below = mounts.into_iter().map(|mount| mount.mount_point);
        below.filter(|point| point.starts_with(&self.data) && *point != self.data).collect()
    }
}

/// Waits until something is so that takes an unknown while.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Drops the page cache of the whole machine.
pub fn drop_caches() {
    std::fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
}

/// `kill -9`.
pub fn kill(pid: u32) -> Result<()> {
    let process = sys::process::pidfd_open(i32::try_from(pid)?)?;
    let process = std::os::fd::AsFd::as_fd(&process);
    Ok(sys::process::pidfd_signal(process, 9, sys::process::Reach::Process)?)
}

pub fn first_difference(got: &[u8], expected: &[u8]) -> String {
    let at = got.iter().zip(expected).position(|(a, b)| a != b);
    let zeros = at.is_some_and(|at| got[at..got.len().min(at + 512)].iter().all(|byte| *byte == 0));
    format!("{} of {} bytes, first at {at:?}, zeros there: {zeros}", got.len(), expected.len())
}

impl Drop for World {
    fn drop(&mut self) {
        self.end();
    }
}

impl World {
    /// Ends every process and mount of this world.
    pub fn end(&mut self) {
        // Blocked readers first get their answers or errors; nothing here may hang.
        for mount in self.mounts().iter().rev() {
            let _ = sys::mount::unmount(mount, sys::mount::Unmount::Lazy);
        }
        if let Some(mut fsd) = self.fsd.take() {
            let _ = fsd.kill();
            let _ = fsd.wait();
        }
        for index in 0..fsd::KEEPERS {
            let Some(pid) = self.keeper_pid(index) else { continue };
            let _ = self.kill_keeper(index);
            for _ in 0..400 {
                if !Path::new(&format!("/proc/{pid}/cmdline")).exists() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        self.remove_keeper_groups();
        self.disk = None;
    }

    /// A group cannot be removed before its last process is reaped, which init does in its own time.
    fn remove_keeper_groups(&self) {
        for _ in 0..400 {
            if fsd::keeper::groups_of(&self.data).is_empty() {
                break;
            }
            fsd::keeper::remove_empty_groups();
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
