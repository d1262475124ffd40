//! Every limit of a sandbox, and what happens at it: inside an error that programs know, outside a typed end,
//! and nobody else notices.

#![allow(clippy::unwrap_used)]

mod runtime_world;

use anyhow::{Context, Result, ensure};
use proto::v1::*;
use runtime_world::{Client, Ran, World, how};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn shell(id: &str, line: &str, timeout_ms: u64) -> ExecStart {
    ExecStart {
        sandbox_id: id.into(),
        argv: ["sh", "-c", line].map(str::to_owned).to_vec(),
        timeout_ms,
        ..ExecStart::default()
    }
}

async fn limited(client: &Client, limits: Limits) -> Result<String> {
    let request = CreateRequest { limits: Some(limits), ..CreateRequest::default() };
    Ok(client.create(request).await?.id)
}

/// What is mounted below a folder of this world.
fn mounts(world: &World) -> Vec<PathBuf> {
    let below = world.data().canonicalize().unwrap();
    let mounts = sys::mount::read_mounts().unwrap().into_iter();
    mounts.map(|mount| mount.mount_point).filter(|point| point.starts_with(&below)).collect()
}

/// Loop devices over files below a folder of this world.
fn loop_devices(world: &World) -> usize {
    let below = world.data().canonicalize().unwrap();
    let devices = std::fs::read_dir("/sys/block").unwrap().flatten();
    let files = devices
        .filter_map(|device| std::fs::read_to_string(device.path().join("loop/backing_file")).ok());
    files.filter(|file| Path::new(file).starts_with(&below)).count()
}

async fn gone(world: &World) -> Result<()> {
    for _ in 0..200 {
        if mounts(world).is_empty() && loop_devices(world) == 0 {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    anyhow::bail!("left: {:?}, {} loop devices", mounts(world), loop_devices(world))
}

fn is_full(ran: &Ran) -> bool {
    how(&ran.ended.end) == Some(end::How::DiskFull(true))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_of_its_own_is_full_at_its_size_and_goes_with_the_sandbox() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let limits = Limits { writable_bytes: 32 << 20, ..Limits::default() };
    let id = limited(&client, limits.clone()).await?;
    assert_eq!(client.get(&id).await?.limits.context("limits")?.writable_bytes, 32 << 20);
    let fill = shell(&id, "yes > /file", 0);
    let filled = client.exec(fill.clone()).await?;
    assert!(is_full(&filled), "{:?}", filled.ended);
    assert!(String::from_utf8_lossy(&filled.stderr).contains("No space left"), "{filled:?}");
    let size: u64 = client.shell(&id, "stat -c %s /file").await?.trim().parse()?;
    assert!((20 << 20..32 << 20).contains(&size), "{size}");
    // A neighbour with a disk and one without have room.
    let neighbour = limited(&client, limits.clone()).await?;
    let shared = client.idle().await?.id;
    for other in [&neighbour, &shared] {
        client.shell(other, "head -c 4000000 /dev/zero > /file").await?;
    }
    client.shell(&id, "rm /file; echo room > /file").await?;
    // The next runtime has the same bound.
    service.close().await;
    drop((service, client));
    let (service, client) = world.client().await?;
    assert_eq!(client.shell(&id, "cat /file").await?, "room\n");
    assert!(is_full(&client.exec(fill).await?));
    // A slot that is used again is empty, and has given back what was in it.
    client.stop(&id).await?;
    client.stop(&neighbour).await?;
    let again = limited(&client, limits).await?;
    assert_eq!(client.run(&again, &["ls", "/file"]).await?.ended.exit_code, 1);
    client.stop(&again).await?;
    client.stop(&shared).await?;
    assert!(!mounts(&world).is_empty());
    service.close().await;
    gone(&world).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inodes_and_descriptors_are_bounded() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let limits =
        Limits { writable_bytes: 32 << 20, inodes: 200, open_files: 64, ..Limits::default() };
    let id = limited(&client, limits).await?;
    let bomb = "i=0; while touch /tmp/$i; do i=$((i+1)); done; echo $i; exit 3";
    let ran = client.exec(shell(&id, bomb, 0)).await?;
    assert!(is_full(&ran), "{:?}", ran.ended);
    let made: u32 = ran.text().trim().parse()?;
    assert!((150..260).contains(&made), "{made}");
    client.shell(&id, "rm -r /tmp/1*; touch /tmp/new").await?;
    let limits = client.shell(&id, "grep 'open files' /proc/self/limits").await?;
    let words: Vec<&str> = limits.split_whitespace().collect();
    assert_eq!((words[3], words[4]), ("64", "64"));
    let bomb = "i=10; while eval \"exec $i</dev/null\"; do i=$((i+1)); done";
    let ran = client.exec(shell(&id, bomb, 20_000)).await?;
    assert!(matches!(how(&ran.ended.end), Some(end::How::Exited(_))), "{:?}", ran.ended);
    let usual = client.idle().await?.id;
    let bound = client.shell(&usual, "grep 'open files' /proc/self/limits").await?;
    let hard: u64 = bound.split_whitespace().nth(4).context("hard")?.parse()?;
    assert!(hard <= 65_536, "{bound}");
    drop(service);
    Ok(())
}

/// The file of a sandbox's group in a hierarchy of version 1.
fn group_file(world: &World, file: &str) -> Result<String> {
    for group in world.groups() {
        for slot in std::fs::read_dir(group)?.flatten() {
            if let Ok(text) = std::fs::read_to_string(slot.path().join(file)) {
                return Ok(text);
            }
        }
    }
    anyhow::bail!("no {file}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processors_weights_and_bandwidth_are_set_where_they_were_asked_for() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let limits = Limits {
        cpuset: "0".into(),
        cpu_weight: 50,
        read_bytes_per_s: 5 << 20,
        write_bytes_per_s: 3 << 20,
        ..Limits::default()
    };
    let id = limited(&client, limits.clone()).await?;
    let allowed = "grep Cpus_allowed_list /proc/self/status";
    assert_eq!(client.shell(&id, allowed).await?.trim(), "Cpus_allowed_list:\t0");
    // By the sandbox itself no more than that.
    let more = client.run(&id, &["taskset", "2", "true"]).await?;
    assert_ne!(more.ended.exit_code, 0);
    let hierarchies = sys::cgroup::Hierarchies::detect()?;
    if !hierarchies.rare_version_1_roots().is_empty() {
        assert_eq!(group_file(&world, "cpu.shares")?.trim(), "512");
        let read = group_file(&world, "blkio.throttle.read_bps_device")?;
        assert_eq!(read.split_whitespace().nth(1), Some("5242880"), "{read}");
        let write = group_file(&world, "blkio.throttle.write_bps_device")?;
        assert_eq!(write.split_whitespace().nth(1), Some("3145728"), "{write}");
    }
    service.close().await;
    drop((service, client));
    let (service, client) = world.client().await?;
    assert_eq!(client.shell(&id, allowed).await?.trim(), "Cpus_allowed_list:\t0");
    client.stop(&id).await?;
    // The slot's next user has none of it.
    let free = client.idle().await?.id;
    assert_ne!(client.shell(&free, allowed).await?.trim(), "Cpus_allowed_list:\t0");
    if !hierarchies.rare_version_1_roots().is_empty() {
        assert_eq!(group_file(&world, "cpu.shares")?.trim(), "1024");
    }
    client.stop(&free).await?;
    service.close().await;
    assert!(world.groups().is_empty(), "{:?}", world.groups());
    let refused = Limits { cpuset: "4000".into(), ..Limits::default() };
    let (_service, client) = world.client().await?;
    assert!(limited(&client, refused).await.is_err());
    assert!(limited(&client, Limits { cpu_weight: 10_001, ..limits }).await.is_err());
    Ok(())
}

/// Puts a small disk under the data directory of a world, which unmounts it when nothing runs any more.
fn put_on_small_disk(world: &World, bytes: u64) -> Result<()> {
    let place = world.data();
    std::fs::create_dir_all(&place)?;
    let image = place.with_file_name("small-disk");
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&image)?;
    file.set_len(bytes)?;
    let made = std::process::Command::new("/usr/sbin/mkfs.ext4")
        .args(["-q", "-F", "-b", "4096", "-m", "0", "-N", "20000"])
        .arg(&image)
        .status()?;
    ensure!(made.success(), "mkfs.ext4");
    let device = sys::loop_device::LoopDevice::over(file.as_fd(), "small")?;
    let ext4 = sys::mount::Ext4 { device: device.path() };
    ext4.mount_detached(sys::mount::Attributes::default())?.attach(&place)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_fills_the_disk_that_all_share_is_stopped_and_the_others_go_on() -> Result<()> {
    let world = World::new()?;
    put_on_small_disk(&world, 512 << 20)?;
    let (service, client) = world.client().await?;
    let quiet = client.idle().await?.id;
    client.shell(&quiet, "head -c 1000000 /dev/zero > /mine").await?;
    for (line, is_main) in [
        ("yes > /file", true),
        ("yes > /file", false),
        (
            "i=0; while :; do mkdir /d$i; for j in 0 1 2 3 4 5 6 7 8 9; do : > /d$i/$j; done; i=$((i+1)); done",
            true,
        ),
    ] {
        let argv = ["sh", "-c", line].map(str::to_owned).to_vec();
        let own = if is_main { argv } else { Vec::new() };
        let greedy =
            client.create(CreateRequest { argv: own, ..CreateRequest::default() }).await?.id;
        if !is_main {
            let ran = client.exec(shell(&greedy, line, 60_000)).await?;
            assert!(is_full(&ran), "{line}: {:?}", ran.ended);
        }
        let ended = client.wait(&greedy).await?;
        assert_eq!(how(&ended.end), Some(end::How::DiskFull(true)), "{line}: {ended:?}");
        // It is stopped, or meets the end of the disk first.
        let reason = &ended.reason;
        assert!(reason.is_empty() || reason.contains("nearly full"), "{ended:?}");
        assert_eq!(client.shell(&quiet, "stat -c %s /mine").await?, "1000000\n");
        client
            .shell(&quiet, "echo more >> /mine; rm /mine; head -c 1000000 /dev/zero > /mine")
            .await?;
        // What it wrote is being removed; then there is room for the next.
        let mut next = client.create(CreateRequest::default()).await;
        for _ in 0..500 {
            if next.is_ok() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            next = client.create(CreateRequest::default()).await;
        }
        client.stop(&next?.id).await?;
    }
    client.stop(&quiet).await?;
    service.close().await;
    Ok(())
}

/// One kind of bomb: limits, what it does, and the ends that are right for it.
struct Bomb {
    name: &'static str,
    line: &'static str,
    timeout_ms: u64,
    is_right: fn(&end::How) -> bool,
}

const BOMBS: [Bomb; 6] = [
    Bomb {
        name: "yes > /file",
        line: "yes > /file",
        timeout_ms: 60_000,
        is_right: |end| matches!(end, end::How::DiskFull(_)),
    },
    Bomb {
        name: "yes on stdout",
        line: "yes",
        timeout_ms: 3000,
        is_right: |end| matches!(end, end::How::Timeout(_)),
    },
    Bomb {
        name: "forks",
        line: "f() { f | f & f; }; f",
        timeout_ms: 3000,
        is_right: |end| matches!(end, end::How::Timeout(_) | end::How::Exited(_)),
    },
    Bomb {
        name: "inodes",
        line: "i=0; while mkdir /tmp/$i; do i=$((i+1)); done; exit 1",
        timeout_ms: 60_000,
        is_right: |end| matches!(end, end::How::DiskFull(_)),
    },
    Bomb {
        name: "descriptors",
        line: "i=10; while eval \"exec $i</dev/null\"; do i=$((i+1)); done; exit 1",
        timeout_ms: 60_000,
        is_right: |end| matches!(end, end::How::Exited(code) if *code != 0),
    },
    Bomb {
        name: "memory",
        line: "tail /dev/zero",
        timeout_ms: 60_000,
        is_right: |end| matches!(end, end::How::Oom(_)),
    },
];

async fn set_off(client: &Client, bomb: &Bomb) -> Result<()> {
    let limits = Limits {
        memory_bytes: 32 << 20,
        pids: 64,
        writable_bytes: 16 << 20,
        inodes: 200,
        open_files: 64,
        ..Limits::default()
    };
    let id = limited(client, limits).await?;
    let start = ExecStart { output_limit_bytes: 1 << 20, ..shell(&id, bomb.line, bomb.timeout_ms) };
    let ran = client.exec(start).await?;
    let end = how(&ran.ended.end).context("no end")?;
    ensure!((bomb.is_right)(&end), "{}: {end:?} {:?}", bomb.name, ran.ended);
    client.stop(&id).await?;
    Ok(())
}

/// `LAMELLA_BOMBS=100` sets off a hundred of each kind; `lamella bench limits` says how much slower a
/// neighbour gets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bombs_of_every_kind_at_once_end_as_what_they_are_and_leave_nothing() -> Result<()> {
    let each = std::env::var("LAMELLA_BOMBS").ok().and_then(|text| text.parse().ok());
    let each: usize = each.unwrap_or(3);
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let quiet = client.idle().await?.id;
    let mut bombs = tokio::task::JoinSet::new();
    for number in 0..each * BOMBS.len() {
        let client = client.clone();
        bombs.spawn(async move { set_off(&client, &BOMBS[number % BOMBS.len()]).await });
    }
    let (mut slowest, mut calls) = (Duration::ZERO, 0);
    while let Some(ended) = {
        let since = Instant::now();
        let ran = client.run(&quiet, &["true"]).await?;
        assert_eq!(ran.ended.exit_code, 0, "{:?}", ran.ended);
        slowest = slowest.max(since.elapsed());
        calls += 1;
        match tokio::time::timeout(Duration::from_millis(50), bombs.join_next()).await {
            Ok(ended) => ended.map(Some),
            Err(_) => Some(None),
        }
    } {
        if let Some(ended) = ended {
            ended??;
        }
    }
    println!("{calls} calls of a quiet neighbour, the slowest took {slowest:?}");
    client.stop(&quiet).await?;
    service.close().await;
    assert!(world.processes().is_empty());
    assert!(world.groups().is_empty(), "{:?}", world.groups());
    gone(&world).await
}
