//! The life of sandboxes: states, ends, repeated requests, files, and what is left afterwards.

#![allow(clippy::unwrap_used)]

mod runtime_world;

use anyhow::{Context, Result};
use proto::v1::*;
use runtime_world::{Client, World, how};
use tokio_stream::StreamExt;

fn own(argv: &[&str]) -> CreateRequest {
    CreateRequest {
        argv: argv.iter().map(|&word| word.into()).collect(),
        ..CreateRequest::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sandbox_ends_with_its_own_command() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let sandbox = client.create(own(&["sh", "-c", "echo out; echo err >&2; exit 5"])).await?;
    let (stdout, stderr) = client.logs(&sandbox.id).await?;
    assert_eq!((stdout.as_str(), stderr.as_str()), ("out\n", "err\n"));
    let ended = client.wait(&sandbox.id).await?;
    assert_eq!(ended.state(), State::Gone);
    assert_eq!(how(&ended.end), Some(end::How::Exited(5)));
    // A missing command is an end as well, with its reason in the log.
    let missing = client.create(own(&["no-such-thing"])).await?;
    let ended = client.wait(&missing.id).await?;
    assert_eq!(how(&ended.end), Some(end::How::Exited(127)));
    assert!(client.logs(&missing.id).await?.1.contains("no-such-thing"));
    service.close().await;
    assert!(world.groups().is_empty());
    assert!(world.layers.holders().is_empty(), "no layer stays attached");
    let slots = std::fs::read_dir(world.data().join("sandboxes/slots"))?;
    assert_eq!(slots.count(), 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pausing_stops_time_and_everything_works_around_it() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    client
        .shell(
            &id,
            "(while :; do echo x >> /tmp/beat; sleep 0.01; done) >/dev/null 2>&1 & \
             while test ! -s /tmp/beat; do sleep 0.01; done",
        )
        .await?;
    let inner = &client.inner;
    for _ in 0..2 {
        let paused = inner.clone().pause(PauseRequest { id: id.clone() }).await?.into_inner();
        assert_eq!(paused.state(), State::Paused);
    }
    let upper = upper_of(&world)?;
    let size = || std::fs::metadata(upper.join("tmp/beat")).map(|meta| meta.len());
    let before = size()?;
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert_eq!(size()?, before, "nothing runs while it is paused");
    // A request resumes it.
    assert_eq!(client.shell(&id, "echo again").await?, "again\n");
    assert_eq!(client.get(&id).await?.state(), State::Running);
    for _ in 0..2 {
        inner.clone().resume(ResumeRequest { id: id.clone() }).await?;
    }
    // A paused sandbox can be stopped, and stopped again.
    inner.clone().pause(PauseRequest { id: id.clone() }).await?;
    assert_eq!(client.stop(&id).await?.state(), State::Gone);
    assert_eq!(client.stop(&id).await?.state(), State::Gone);
    assert!(client.run(&id, &["true"]).await.is_err());
    inner.clone().remove(RemoveRequest { id: id.clone(), force: false }).await?;
    assert!(client.get(&id).await.is_err());
    Ok(())
}

/// The writable folder of the only sandbox.
fn upper_of(world: &World) -> Result<std::path::PathBuf> {
    let slot = std::fs::read_dir(world.data().join("sandboxes/slots"))?.next();
    Ok(slot.context("a slot")??.path().join("upper"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grace_lets_the_command_end_by_itself() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let line = "trap 'echo bye; exit 4' TERM; echo up; while :; do sleep 0.05; done";
    let sandbox = client.create(own(&["sh", "-c", line])).await?;
    let logs = LogsRequest { id: sandbox.id.clone(), follow: true };
    let mut logs = client.inner.clone().logs(logs).await?.into_inner();
    assert_eq!(logs.next().await.context("a log")??.data, b"up\n");
    let stop = StopRequest { id: sandbox.id.clone(), grace_ms: 30_000 };
    let ended = client.inner.clone().stop(stop).await?.into_inner();
    assert_eq!(how(&ended.end), Some(end::How::Exited(4)));
    let mut rest = Vec::new();
    while let Some(chunk) = logs.next().await {
        rest.extend(chunk?.data);
    }
    // The signal also ended the child that the shell waited for, which the shell may mention.
    assert!(String::from_utf8_lossy(&rest).contains("bye\n"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_key_makes_one_sandbox() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let keyed = CreateRequest { idempotency_key: "once".into(), ..CreateRequest::default() };
    let (first, second) = tokio::join!(client.create(keyed.clone()), client.create(keyed.clone()));
    let (first, second) = (first?, second?);
    assert_eq!(first.id, second.id);
    assert_eq!(client.create(keyed).await?.id, first.id);
    let all = client
        .inner
        .clone()
        .list(ListRequest { all: true, ..Default::default() })
        .await?
        .into_inner();
    assert_eq!(all.sandboxes.len(), 1);
    assert_eq!(client.get(&first.id[..4]).await?.id, first.id, "a prefix is enough");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_requests_are_told_and_leave_nothing() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let unknown = CreateRequest { environment: "env/unknown:x".into(), ..CreateRequest::default() };
    let error = client.create(unknown).await.unwrap_err();
    assert!(error.to_string().contains("no such environment"), "{error}");
    let machine = CreateRequest { backend: Backend::Microvm.into(), ..CreateRequest::default() };
    assert!(client.create(machine).await.is_err());
    assert!(client.get("none").await.is_err());
    let id = client.idle().await?.id;
    assert!(client.run(&id, &[]).await.is_err());
    client.stop(&id).await?;
    service.close().await;
    assert!(world.groups().is_empty());
    Ok(())
}

async fn read(client: &Client, id: &str, path: &str) -> Result<(FileHeader, Vec<u8>)> {
    let request =
        ReadFileRequest { id: id.into(), path: path.into(), ..ReadFileRequest::default() };
    let mut chunks = client.inner.clone().read_file(request).await?.into_inner();
    let (mut header, mut bytes) = (None, Vec::new());
    while let Some(chunk) = chunks.next().await {
        match chunk?.part {
            Some(file_chunk::Part::Header(found)) => header = Some(found),
            Some(file_chunk::Part::Data(data)) => bytes.extend(data),
            None => {}
        }
    }
    Ok((header.context("a header")?, bytes))
}

async fn write(client: &Client, start: WriteFileStart, bytes: &[u8]) -> Result<u64> {
    let first = write_file_part::Part::Start(start);
    let rest = bytes.chunks(100_000).map(|part| write_file_part::Part::Data(part.to_vec()));
    let parts: Vec<WriteFilePart> =
        std::iter::once(first).chain(rest).map(|part| WriteFilePart { part: Some(part) }).collect();
    Ok(client.inner.clone().write_file(tokio_stream::iter(parts)).await?.into_inner().bytes)
}

fn target(id: &str, path: &str) -> WriteFileStart {
    WriteFileStart {
        id: id.into(),
        path: path.into(),
        mode: 0o640,
        uid: 1000,
        gid: 77,
        untar: false,
        ..WriteFileStart::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_go_in_and_out_and_never_elsewhere() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let bytes: Vec<u8> = (0..3_000_000u32).map(|number| (number % 251) as u8).collect();
    assert_eq!(write(&client, target(&id, "/tmp/in"), &bytes).await?, 3_000_000);
    let stat = client.shell(&id, "stat -c '%a %u %g %s' /tmp/in").await?;
    assert_eq!(stat, "640 1000 77 3000000\n");
    let (header, back) = read(&client, &id, "/tmp/in").await?;
    assert_eq!((header.mode & 0o7777, header.size_bytes), (0o640, 3_000_000));
    assert!(back == bytes);
    // Symlinks resolve inside, whatever they say.
    client
        .shell(&id, "ln -s /etc/passwd /tmp/link; ln -s ../../../../../etc/passwd /tmp/up")
        .await?;
    for path in ["/tmp/link", "/tmp/up", "/../../tmp/link"] {
        assert!(
            read(&client, &id, path).await?.1.starts_with(b"root:x:0:0:root:/root:/bin/sh\nann")
        );
    }
    // Nothing waits, nothing of the kernel is read or written.
    client
        .shell(&id, "mkfifo /tmp/fifo; ln -s /proc/1/mem /tmp/mem; ln -s /proc/self/root /tmp/r")
        .await?;
    for path in ["/tmp/fifo", "/dev/zero", "/tmp/mem", "/proc/self/status", "/tmp/r/etc/passwd"] {
        assert!(read(&client, &id, path).await.is_err(), "{path}");
        assert!(write(&client, target(&id, path), b"x").await.is_err(), "{path}");
    }
    assert!(read(&client, &id, "/none").await.is_err());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_travels_as_a_tar() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let make = "mkdir -p /tmp/a/b; echo one > /tmp/a/one; ln -s one /tmp/a/l; chmod 600 /tmp/a/one; \
                chown 1000:77 /tmp/a/one; touch -d '2001-02-03 04:05:06' /tmp/a/one; mkfifo /tmp/a/p";
    client.shell(&id, make).await?;
    let (header, tar) = read(&client, &id, "/tmp/a").await?;
    assert!(header.is_directory);
    let into = WriteFileStart { untar: true, ..target(&id, "/tmp/new/place") };
    write(&client, into.clone(), &tar).await?;
    let seen = client
        .shell(&id, "cd /tmp/new/place && find . | sort && stat -c '%a %u %g %Y' one && readlink l")
        .await?;
    assert_eq!(seen, ".\n./b\n./l\n./one\n600 1000 77 981173106\none\n");
    // An archive that wants out is refused.
    let mut evil = tar_with_name(b"../../evil");
    evil.extend([0; 1024]);
    assert!(write(&client, into, &evil).await.is_err());
    Ok(())
}

/// One empty file in a tar, under any name.
fn tar_with_name(name: &[u8]) -> Vec<u8> {
    let mut block = vec![0u8; 512];
    block[..name.len()].copy_from_slice(name);
    block[100..108].copy_from_slice(b"0000644\0");
    block[108..124].copy_from_slice(b"0000000\x000000000\0");
    block[124..136].copy_from_slice(b"00000000000\0");
    block[136..148].copy_from_slice(b"00000000000\0");
    block[148..156].fill(b' ');
    block[156] = b'0';
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

/// A writable layer is used again. Each line changes it in another way and answers what a sandbox sees of
/// `/` first: all must see the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_that_a_sandbox_did_to_its_files_reaches_the_next() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    const LOOK: &str = "stat -c '%a %u %g' / /tmp; ls -A / /tmp /etc";
    const CHANGES: [&str; 8] = [
        "true",
        "touch /left",
        "touch /gone; rm /gone",
        "chmod 700 /",
        "chown 7:7 /",
        "rm /etc/passwd; mkdir /tmp/a",
        "touch -d @7 /",
        "mkdir /d; rmdir /d",
    ];
    let mut first = None;
    for change in CHANGES.into_iter().chain(CHANGES) {
        let line = format!("{LOOK}; {change}");
        let id = client.create(own(&["sh", "-c", &line])).await?.id;
        let ended = client.wait(&id).await?;
        assert_eq!(how(&ended.end), Some(end::How::Exited(0)), "{change}");
        let (seen, complaint) = client.logs(&id).await?;
        assert_eq!(complaint, "", "{change}");
        assert_eq!(&seen, first.get_or_insert_with(|| seen.clone()), "before {change}");
    }
    service.close().await;
    assert!(world.layers.holders().is_empty(), "no layer stays attached");
    let slots = std::fs::read_dir(world.data().join("sandboxes/slots"))?;
    assert_eq!(slots.count(), 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once_are_apart_and_all_leave() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..40 {
        let client = client.clone();
        tasks.spawn(async move {
            let id = client.idle().await?.id;
            let line = format!("echo {number} > /tmp/mine; cat /tmp/mine; hostname");
            assert_eq!(client.shell(&id, &line).await?, format!("{number}\n{id}\n"));
            client.stop(&id).await?;
            anyhow::Ok(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    service.close().await;
    assert!(world.groups().is_empty());
    assert!(world.processes().is_empty());
    Ok(())
}
