//! The node cache of a living fsd: its limit, pins, copies between layers, checks, and kills meanwhile.
#![allow(clippy::unwrap_used)]

mod fsd_disk;
mod fsd_world;

use fsd_disk::{Disk, DiskKind};
use fsd_world::{LayerShape, Published, Random, World, publish};
use layer::chunk::ChunkTable;
use layer::presence::Presence;
use proto::v1::{LayerStats, Plane, StatsResponse};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use store::Store;

const MIB: u64 = 1 << 20;

/// Publishes one more layer into a world's store. One with fewer files than the world's and the same
/// seed shares its chunks.
fn publish_more(world: &World, shape: &LayerShape) -> Published {
    let url = format!("file://{}", world.store_folder.display());
    publish(&Store::open(store::open(&url).unwrap()).unwrap(), shape).unwrap()
}

/// Does something with another layer as the world's own.
fn with<T>(world: &mut World, layer: &mut Published, act: impl FnOnce(&World) -> T) -> T {
    std::mem::swap(&mut world.layer, layer);
    let done = act(world);
    std::mem::swap(&mut world.layer, layer);
    done
}

fn wait_until(world: &World, what: &str, holds: impl Fn(&StatsResponse) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds(&world.stats().unwrap()) {
        assert!(Instant::now() < deadline, "{what}: {:?}\n{}", world.stats(), world.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn limited(bytes: u64) -> Vec<String> {
    vec!["--cache-size".into(), bytes.to_string(), "--sync-ms".into(), "50".into()]
}

fn has(layers: &[LayerStats], layer: &Published) -> bool {
    layers.iter().any(|stats| stats.layer_id == layer.id.as_bytes())
}

#[test]
fn a_cache_smaller_than_its_layer_stays_below_its_limit_and_readers_see_right_bytes() {
    for plane in [Plane::ErofsFuse, Plane::Fuse] {
        let mut world = World::new(&LayerShape::default()).unwrap();
        let limit = world.layer.data_bytes / 3;
        world.options = limited(limit);
        world.start().unwrap();
        let at = PathBuf::from(world.attach_as("test", plane).unwrap().mount_path);
        for _ in 0..2 {
            world.compare(&at).unwrap();
            // What the kernel has kept would hide what was evicted.
            std::fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
        }
        wait_until(&world, "below the limit", |stats| stats.cache_bytes <= limit);
        let stats = world.stats().unwrap();
        assert!(stats.evicted_bytes > 0 && stats.layers[0].evicted_bytes > 0);
        assert_eq!(stats.cache_limit_bytes, limit);
        world.end();
    }
}

#[test]
fn layers_out_of_use_leave_whole_and_those_that_the_kernel_reads_or_that_are_pinned_stay() {
    let mut world = World::new(&LayerShape::default()).unwrap();
    let mut resting = publish_more(&world, &LayerShape { seed: 21, ..LayerShape::default() });
    let mut pinned = publish_more(&world, &LayerShape { seed: 22, ..LayerShape::default() });
    world.options = limited(world.layer.data_bytes + MIB);
    world.start().unwrap();
    with(&mut world, &mut pinned, |world| {
        assert!(world.pin(true).unwrap() && !world.pin(true).unwrap());
        world.complete().unwrap();
        let refused = world.evict().unwrap_err().to_string();
        assert!(refused.contains("pinned"), "{refused}");
    });
    with(&mut world, &mut resting, |world| world.complete().unwrap());
    let at = world.attach_as("test", Plane::ErofsFanotify).unwrap().mount_path;
    world.complete().unwrap();
    wait_until(&world, "the layer out of use goes", |stats| !has(&stats.resting, &resting));
    let stats = world.stats().unwrap();
    assert!(has(&stats.layers, &world.layer) && has(&stats.resting, &pinned));
    assert!(stats.resting.iter().all(|layer| layer.pinned));
    assert_eq!(stats.layers[0].present_bytes + zeros(&world), world.layer.data_bytes);
    world.compare(Path::new(&at)).unwrap();
    world.kill_fsd().unwrap();
    world.start().unwrap();
    with(&mut world, &mut pinned, |world| {
        assert!(world.stats().unwrap().resting[0].pinned, "a pin survives");
        assert!(world.pin(false).unwrap());
    });
    wait_until(&world, "it goes once it is not pinned", |stats| stats.resting.is_empty());
    world.compare(Path::new(&at)).unwrap();
}

/// Bytes of chunks that are nothing but zeros: present without being anywhere.
fn zeros(world: &World) -> u64 {
    let path = world.data.join("cache").join(world.layer.id.to_string()).join("chunks");
    let table = layer::chunk::ChunkTable::decode(&std::fs::read(path).unwrap()).unwrap();
    let zeros = table.chunks().iter().filter(|chunk| chunk.is_zero());
    zeros.map(|chunk| u64::from(chunk.plain_bytes())).sum()
}

#[test]
fn a_chunk_of_another_layer_is_taken_from_it_and_never_fetched_again() {
    for kind in [DiskKind::Ext4, DiskKind::Xfs, DiskKind::Btrfs] {
        for living in [true, false] {
            copies_between_layers(kind, living);
        }
    }
}

fn copies_between_layers(kind: DiskKind, living: bool) {
    let mut world = World::new(&LayerShape { files: 20, ..LayerShape::default() }).unwrap();
    let image = world.folder.path().join("disk");
    world.disk = Some(Box::new(Disk::mount(kind, &world.data, &image, 400)));
    let shape = LayerShape { files: 14, ..LayerShape::default() };
    let mut other = publish_more(&world, &shape);
    world.options = vec!["--sync-ms".into(), "50".into()];
    world.start().unwrap();
    with(&mut world, &mut other, |world| {
        if living {
            world.attach("other").unwrap();
        }
        world.complete().unwrap();
    });
    if !living {
        // Nobody has it open: a new process learns of it from the disk.
        world.kill_fsd().unwrap();
        world.start().unwrap();
    }
    let before = world.stats().unwrap();
    let at = world.attach("test").unwrap();
    let shared = other.files.len() - 1;
    for (name, expected) in world.layer.files.iter().take(shared) {
        assert!(std::fs::read(at.join(name)).unwrap() == *expected, "{kind:?}: {name}");
    }
    let after = world.stats().unwrap();
    let (copied, fetched) =
        (after.copied_chunks - before.copied_chunks, after.store_bytes - before.store_bytes);
    assert!(copied > 0, "{kind:?}, living {living}: nothing was copied\n{}", world.log());
    let shared = after.shared_chunks - before.shared_chunks;
    assert_eq!(shared > 0, kind.shares(), "{kind:?}, living {living}: {shared} of {copied}");
    let own =
        after.layers.iter().find(|layer| layer.layer_id == world.layer.id.as_bytes()).unwrap();
    assert!(own.copied_bytes > 0 && own.copied_bytes <= own.fetched_bytes);
    // Read-ahead reaches into what only this layer has, and little else comes from the store.
    assert!(fetched < own.copied_bytes / 2, "{kind:?}: {fetched} bytes were fetched again");
    world.compare(&at).unwrap();
}

#[test]
fn killed_while_it_evicts_it_never_shows_a_wrong_byte() {
    let mut world = World::new(&LayerShape::default()).unwrap();
    world.options = limited(world.layer.data_bytes / 4);
    let (right, mut evicted) = (AtomicUsize::new(0), 0);
    let mut random = Random(99);
    for _ in 0..8 {
        world.start().unwrap();
        let at = PathBuf::from(world.attach_as("test", Plane::ErofsFuse).unwrap().mount_path);
        let over = AtomicBool::new(false);
        let files: Vec<_> = world.layer.files.clone().into_iter().collect();
        let pause = Duration::from_millis(150 + random.below(400));
        let seed = random.next();
        std::thread::scope(|scope| {
            for reader in 0..3 {
                let (at, over, right, files) = (&at, &over, &right, &files);
                let mut random = Random(seed ^ (reader << 40) | 1);
                scope.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        let (name, expected) = &files[random.below(files.len() as u64) as usize];
                        // A plane that ends with fsd gives errors after the kill, and no bytes.
                        if let Ok(got) = std::fs::read(at.join(name)) {
                            assert!(got == *expected, "{name}");
                            right.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
            std::thread::sleep(pause);
            evicted += world.stats().map_or(0, |stats| stats.evicted_bytes);
            world.kill_fsd().unwrap();
            over.store(true, Ordering::Relaxed);
        });
    }
    assert!(right.load(Ordering::Relaxed) > 0 && evicted > 0, "{right:?} right, {evicted} evicted");
    world.start().unwrap();
    let found = world.check(false).unwrap();
    assert_eq!(found.damages, 0, "{:?}", found.listed);
    let at = PathBuf::from(world.attach_as("test", Plane::ErofsFuse).unwrap().mount_path);
    world.compare(&at).unwrap();
}

/// Changes one byte in the middle of the first present chunk of the data file.
fn damage(world: &World) {
    let path = world.data.join("cache").join(world.layer.id.to_string()).join("data");
    let data = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    data.read_exact_at(&mut byte, 1000).unwrap();
    data.write_all_at(&[byte[0] ^ 1], 1000).unwrap();
}

#[test]
fn a_check_finds_a_flipped_bit_in_the_cache_and_repairs_it_in_use_or_not() {
    let mut world = World::new(&LayerShape::default()).unwrap();
    world.start().unwrap();
    world.complete().unwrap();
    let whole = world.check(false).unwrap();
    assert_eq!((whole.damages, whole.served), (0, false));
    assert!(whole.chunks > 0 && whole.bytes + zeros(&world) == world.layer.data_bytes);
    damage(&world);
    assert_eq!(world.check(false).unwrap().damages, 1);
    let repaired = world.check(true).unwrap();
    assert_eq!((repaired.damages, repaired.repaired), (1, 1));
    let again = world.check(false).unwrap();
    assert_eq!((again.damages, again.chunks), (0, whole.chunks - 1));
    world.complete().unwrap();
    let at = world.attach("test").unwrap();
    damage(&world);
    let repaired = world.check(true).unwrap();
    assert_eq!((repaired.damages, repaired.repaired, repaired.served), (1, 1, true));
    assert_eq!(world.check(false).unwrap().damages, 0);
    world.compare(&at).unwrap();
    world.kill_fsd().unwrap();
    // The cache of a data directory without a daemon, and what was mounted is left alone.
    let mut checked = Vec::new();
    fsd::check_cache(&world.data, true, |layer| checked.push(layer)).unwrap();
    assert!(checked.len() == 1 && checked[0].damages == 0 && checked[0].served);
    assert_eq!(checked[0].chunks, whole.chunks, "also what is mounted is read");
    damage(&world);
    checked.clear();
    fsd::check_cache(&world.data, true, |layer| checked.push(layer)).unwrap();
    assert_eq!((checked[0].damages, checked[0].repaired), (1, 0), "repaired by the next fsd");
    world.start().unwrap();
    assert_eq!(world.check(true).unwrap().repaired, 1);
}

/// Whether the presence file names a chunk that is not all zero.
fn something_is_durable(world: &World) -> bool {
    let folder = world.data.join("cache").join(world.layer.id.to_string());
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap_or_default();
    let Ok(table) = ChunkTable::decode(&read("chunks")) else { return false };
    let presence = Presence::decode(world.layer.id, table.len() as u32, &read("present"));
    let mut chunks = table.chunks().iter().enumerate();
    chunks.any(|(index, chunk)| !chunk.is_zero() && presence.get(index as u32))
}

#[test]
fn without_a_daemon_a_check_reads_what_is_marked_and_waits_for_nobody() {
    let mut world = World::new(&LayerShape::default()).unwrap();
    world.start().unwrap();
    let at = world.attach("test").unwrap();
    let first = std::fs::read(at.join("file-0000")).unwrap();
    assert!(first == world.layer.files["file-0000"]);
    assert!(world.stats().unwrap().layers[0].marked);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !something_is_durable(&world) {
        assert!(Instant::now() < deadline, "nothing became durable");
        std::thread::sleep(Duration::from_millis(20));
    }
    world.kill_fsd().unwrap();
    let mut checked = Vec::new();
    fsd::check_cache(&world.data, false, |layer| checked.push(layer)).unwrap();
    assert!(checked[0].served && checked[0].damages == 0, "{checked:?}");
    assert!(checked[0].chunks > 0 && checked[0].bytes < world.layer.data_bytes, "{checked:?}");
    world.start().unwrap();
    world.compare(&at).unwrap();
}

#[test]
fn metrics_are_served_where_they_were_asked_for() {
    let mut world = World::new(&LayerShape::default()).unwrap();
    // A port that was free a moment ago.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    world.options = vec!["--metrics".into(), address.to_string()];
    world.start().unwrap();
    let at = world.attach("test").unwrap();
    world.compare(&at).unwrap();
    let ask = |path: &str| {
        let connect = || std::net::TcpStream::connect(address);
        let mut stream = (0..600)
            .find_map(|_| {
                connect().ok().or_else(|| {
                    std::thread::sleep(Duration::from_millis(20));
                    None
                })
            })
            .expect("metrics are not served");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let answer = ask("/metrics");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    let filled = world.stats().unwrap().fetched_bytes;
    assert!(answer.contains(&format!("\nlamella_filled_bytes_total {filled}\n")), "{answer}");
    assert!(answer.contains(&format!("layer=\"{}\"", world.layer.id)), "{answer}");
    assert!(ask("/").starts_with("HTTP/1.1 404"));
}
