//! Many readers over layers that they mount and unmount, with a cache for a third of them, while fsd is
//! killed every few seconds and the disk is full now and then: no wrong byte, and nothing left behind.
//!
//! Twenty seconds; `LAMELLA_SOAK_SECONDS` sets another length (a minute and more takes twenty layers). The
//! program is copied first: a long soak outlives a build.
#![allow(clippy::unwrap_used)]

mod fsd_disk;
mod fsd_world;

use fsd_disk::{Disk, DiskKind};
use fsd_world::{LayerShape, Published, Random, World, first_difference, publish};
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::{AttachRequest, DetachRequest, Plane};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use store::Store;

const READERS: usize = 8;
/// Files that a reader takes from a layer before it lets go of it.
const FILES_A_VISIT: u64 = 6;

/// What must not grow: things of this world, and descriptors of this process.
#[derive(Debug, PartialEq, Eq)]
struct Census {
    mounts: usize,
    processes: usize,
    descriptors: usize,
    groups: usize,
}

impl Census {
    fn take(world: &World) -> Self {
        let listed = |folder: &str| std::fs::read_dir(folder).into_iter().flatten().flatten();
        let needle = world.data.to_string_lossy().into_owned();
        let mentions = |entry: &std::fs::DirEntry| {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(&needle)
        };
        Self {
            mounts: world.mounts().len(),
            processes: listed("/proc").filter(mentions).count(),
            descriptors: listed("/proc/self/fd").count(),
            groups: fsd::keeper::groups_of(&world.data).len(),
        }
    }
}

/// What the readers share.
struct Shared {
    socket: PathBuf,
    layers: Vec<Published>,
    stop: AtomicBool,
    complaints: Mutex<Vec<String>>,
    right: AtomicUsize,
    right_bytes: AtomicU64,
    errors: AtomicUsize,
    visits: AtomicUsize,
}

/// A thread that attaches a layer, reads some of it, and lets go of it, over and over.
struct Reader {
    shared: Arc<Shared>,
    name: String,
    runtime: tokio::runtime::Runtime,
    random: Random,
}

impl Reader {
    fn new(shared: &Arc<Shared>, index: usize) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let name = format!("reader-{index}");
        Self { shared: Arc::clone(shared), name, runtime, random: Random(index as u64 * 77 + 5) }
    }

    fn run(mut self) {
        while !self.shared.stop.load(Ordering::Relaxed) {
            let layer = self.random.below(self.shared.layers.len() as u64) as usize;
            // fsd may be dead or the disk full: then later, and perhaps another layer.
            match self.attach(layer) {
                Some(at) => {
                    self.shared.visits.fetch_add(1, Ordering::Relaxed);
                    self.read_some(layer, &at);
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
            self.detach(layer);
        }
    }

    fn attach(&self, layer: usize) -> Option<PathBuf> {
        let layer_id = self.shared.layers[layer].id.as_bytes().to_vec();
        let (holder, plane) = (self.name.clone(), Plane::Auto.into());
        let request = AttachRequest { layer_id, holder, plane, ..AttachRequest::default() };
        self.runtime.block_on(async {
            let channel = proto::connect::unix(&self.shared.socket).await.ok()?;
            let attached = LayerFsClient::new(channel).attach(request).await.ok()?;
            Some(attached.into_inner().mount_path.into())
        })
    }

    /// Until fsd says that it is done, or that there was nothing to do.
    fn detach(&self, layer: usize) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let layer_id = self.shared.layers[layer].id.as_bytes().to_vec();
            let request = DetachRequest { layer_id, holder: self.name.clone() };
            let done = self.runtime.block_on(async {
                let channel = proto::connect::unix(&self.shared.socket).await.ok()?;
                match LayerFsClient::new(channel).detach(request).await {
                    Ok(_) => Some(()),
                    Err(status) => {
                        let error = proto::status::from_status(status);
                        (error.kind() == layer::ErrorKind::NotFound).then_some(())
                    }
                }
            });
            if done.is_some() {
                return;
            }
            assert!(Instant::now() < deadline, "{} cannot let go", self.name);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn read_some(&mut self, layer: usize, at: &Path) {
        let files = &self.shared.layers[layer].files;
        for _ in 0..FILES_A_VISIT {
            let (name, expected) =
                files.iter().nth(self.random.below(files.len() as u64) as usize).unwrap();
            match std::fs::read(at.join(name)) {
                Ok(got) if got == *expected => {
                    self.shared.right.fetch_add(1, Ordering::Relaxed);
                    self.shared.right_bytes.fetch_add(got.len() as u64, Ordering::Relaxed);
                }
                Ok(got) => {
                    let id = self.shared.layers[layer].id;
                    let what = format!("{id}/{name}: {}", first_difference(&got, expected));
                    self.shared.complaints.lock().unwrap().push(what);
                }
                Err(_) => {
                    self.shared.errors.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }
}

fn seconds() -> u64 {
    std::env::var("LAMELLA_SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(20)
}

/// A world of several layers whose cache lies on a disk of its own.
fn world_of(layers: u64) -> (World, Vec<Published>) {
    let shape =
        |seed| LayerShape { files: 12, max_file_bytes: 300 << 10, seed, ..LayerShape::default() };
    let mut world = World::new(&shape(1)).unwrap();
    let url = format!("file://{}", world.store_folder.display());
    let store = Store::open(store::open(&url).unwrap()).unwrap();
    let published: Vec<_> =
        (2..2 + layers).map(|seed| publish(&store, &shape(seed)).unwrap()).collect();
    let bytes: u64 = published.iter().map(|layer| layer.data_bytes).sum();
    let disk = Disk::mount(
        DiskKind::Ext4,
        &world.data,
        &world.folder.path().join("disk"),
        (bytes >> 20) + 24,
    );
    world.store_query = "?latency_ms=3".into();
    let words = ["--sync-ms", "200", "--deadline-ms", "2000", "--reserve", "2097152"];
    world.options = words.map(str::to_owned).to_vec();
    world.options.extend(["--cache-size".into(), (bytes / 3).to_string()]);
    world.disk = Some(Box::new(disk));
    let program = world.folder.path().join("fsd-process");
    std::fs::copy(&world.program, &program).unwrap();
    world.program = program;
    (world, published)
}

/// Takes most of what room is left, for a while.
fn fill_disk(world: &World, pause: Duration) {
    let ballast = world.data.join("ballast");
    let found = rustix::fs::statvfs(&world.data).unwrap();
    let room = (found.f_bavail * found.f_frsize).saturating_sub(1 << 20);
    // What does not fit is what was wanted.
    _ = std::fs::write(&ballast, vec![1; room as usize]);
    std::thread::sleep(pause);
    std::fs::remove_file(&ballast).unwrap();
}

#[test]
fn a_soak_of_readers_kills_and_full_disks_shows_no_wrong_byte_and_leaves_nothing() {
    let length = Duration::from_secs(seconds());
    let (mut world, layers) = world_of(if seconds() < 60 { 10 } else { 20 });
    let before = Census::take(&world);
    world.start().unwrap();
    let shared = Arc::new(Shared {
        socket: world.run_folder().join("fsd.sock"),
        layers,
        stop: AtomicBool::new(false),
        complaints: Mutex::default(),
        right: AtomicUsize::new(0),
        right_bytes: AtomicU64::new(0),
        errors: AtomicUsize::new(0),
        visits: AtomicUsize::new(0),
    });
    let readers: Vec<_> = (0..READERS)
        .map(|index| {
            let reader = Reader::new(&shared, index);
            std::thread::spawn(move || reader.run())
        })
        .collect();
    let mut random = Random(0x50a4_50a4);
    let (start, mut kills, mut full) = (Instant::now(), 0, 0);
    while start.elapsed() < length && shared.complaints.lock().unwrap().is_empty() {
        std::thread::sleep(Duration::from_millis(500 + random.below(2500)));
        if random.below(3) == 0 {
            full += 1;
            fill_disk(&world, Duration::from_millis(300 + random.below(700)));
            continue;
        }
        kills += 1;
        if random.below(3) == 0 {
            // A keeper too, but never both: what neither holds is lost, and that is another test.
            _ = world.kill_keeper(random.below(fsd::KEEPERS as u64) as usize);
        }
        world.kill_fsd().unwrap();
        std::thread::sleep(Duration::from_millis(random.below(200)));
        world.start().unwrap();
    }
    shared.stop.store(true, Ordering::Relaxed);
    for reader in readers {
        reader.join().unwrap();
    }
    let counts = [&shared.visits, &shared.right, &shared.errors].map(|c| c.load(Ordering::Relaxed));
    let complaints = std::mem::take(&mut *shared.complaints.lock().unwrap());
    let bytes = shared.right_bytes.load(Ordering::Relaxed);
    println!(
        "{} s: {kills} kills of fsd, {full} full disks, {counts:?} visits, right reads and errors, \
         {bytes} right bytes, {} wrong",
        start.elapsed().as_secs(),
        complaints.len()
    );
    assert!(complaints.is_empty(), "{complaints:?}\n{}", world.log());
    assert!(kills > 0 && counts[1] > 100, "{counts:?}");
    let evicted = world.stats().unwrap().evicted_bytes;
    world.drain(false).unwrap();
    assert!(world.wait_end().unwrap().success());
    println!("{evicted} bytes were evicted since the last kill");
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let after = Census::take(&world);
        if after == before {
            println!("nothing is left behind");
            break;
        }
        assert!(
            Instant::now() < deadline,
            "left behind: {after:?}, not {before:?}\n{}",
            world.log()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}
