//! Calls on the files of a sandbox: ranges, appending, replacing, listing, names, watching; against hostile
//! names and with bounded memory.

#![allow(clippy::unwrap_used)]

mod node_process;
mod runtime_world;

use anyhow::{Context, Result, ensure};
use layer::ErrorKind;
use node_process::start as start_node;
use proto::status::from_status;
use proto::v1::*;
use runtime_world::{Client, World};
use std::time::{Duration, Instant};
use tonic::Streaming;

async fn read(client: &Client, request: ReadFileRequest) -> layer::Result<Vec<u8>> {
    let chunks = client.inner.clone().read_file(request).await;
    let mut chunks = chunks.map_err(from_status)?.into_inner();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.message().await.map_err(from_status)? {
        if let Some(file_chunk::Part::Data(data)) = chunk.part {
            bytes.extend(data);
        }
    }
    Ok(bytes)
}

fn file(id: &str, path: &str) -> ReadFileRequest {
    ReadFileRequest { id: id.into(), path: path.into(), ..ReadFileRequest::default() }
}

fn target(id: &str, path: &str) -> WriteFileStart {
    WriteFileStart { id: id.into(), path: path.into(), mode: 0o640, ..WriteFileStart::default() }
}

async fn write(client: &Client, start: WriteFileStart, bytes: &[u8]) -> layer::Result<u64> {
    let first = write_file_part::Part::Start(start);
    let rest = bytes.chunks(100_000).map(|part| write_file_part::Part::Data(part.to_vec()));
    let parts: Vec<WriteFilePart> =
        std::iter::once(first).chain(rest).map(|part| WriteFilePart { part: Some(part) }).collect();
    let written = client.inner.clone().write_file(tokio_stream::iter(parts)).await;
    Ok(written.map_err(from_status)?.into_inner().bytes)
}

async fn list(client: &Client, request: ListFilesRequest) -> layer::Result<(Vec<FileEntry>, bool)> {
    let answers = client.inner.clone().list_files(request).await;
    let mut answers = answers.map_err(from_status)?.into_inner();
    let (mut entries, mut truncated) = (Vec::new(), false);
    while let Some(answer) = answers.message().await.map_err(from_status)? {
        entries.extend(answer.entries);
        truncated |= answer.truncated;
    }
    entries.sort_by(|one, other| one.path.cmp(&other.path));
    Ok((entries, truncated))
}

async fn stat(client: &Client, id: &str, path: &str, follow: bool) -> layer::Result<FileEntry> {
    let request = StatFileRequest { id: id.into(), path: path.into(), follow };
    Ok(client.inner.clone().stat_file(request).await.map_err(from_status)?.into_inner())
}

async fn rename(
    client: &Client,
    id: &str,
    from: &str,
    to: &str,
    no_replace: bool,
) -> layer::Result<()> {
    let (from, to) = (from.into(), to.into());
    let request = RenameFileRequest { id: id.into(), from, to, no_replace };
    client.inner.clone().rename_file(request).await.map(drop).map_err(from_status)
}

async fn remove(client: &Client, id: &str, path: &str, recursive: bool) -> layer::Result<bool> {
    let request =
        RemoveFileRequest { id: id.into(), path: path.into(), recursive, missing_ok: false };
    let answer = client.inner.clone().remove_file(request).await;
    Ok(answer.map_err(from_status)?.into_inner().removed)
}

fn paths(entries: &[FileEntry]) -> Vec<String> {
    entries.iter().map(|entry| String::from_utf8_lossy(&entry.path).into_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_are_read_in_parts_appended_and_replaced_as_a_whole() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    write(&client, target(&id, "/root/a"), b"0123456789").await?;
    let part = ReadFileRequest { offset: 3, length: 4, ..file(&id, "/root/a") };
    assert_eq!(read(&client, part.clone()).await?, b"3456");
    assert_eq!(read(&client, ReadFileRequest { length: 0, ..part.clone() }).await?, b"3456789");
    assert_eq!(read(&client, ReadFileRequest { offset: 100, ..part }).await?, b"");
    let folder = ReadFileRequest { offset: 1, ..file(&id, "/root") };
    assert_eq!(read(&client, folder).await.unwrap_err().kind(), ErrorKind::Invalid);
    let more = WriteFileStart { append: true, mode: 0o777, ..target(&id, "/root/a") };
    write(&client, more, b"abc").await?;
    assert_eq!(
        client.shell(&id, "cat /root/a; stat -c ' %a' /root/a").await?,
        "0123456789abc 640\n"
    );
    // Appending makes what is missing, above it too if asked for.
    let deep = WriteFileStart { append: true, make_parents: true, ..target(&id, "/root/b/c/d") };
    write(&client, deep.clone(), b"x").await?;
    write(&client, WriteFileStart { make_parents: false, ..deep }, b"y").await?;
    assert_eq!(client.shell(&id, "cat /root/b/c/d").await?, "xy");
    let dated =
        WriteFileStart { mtime_unix_s: Some(981_173_106), uid: 1000, ..target(&id, "/root/a") };
    // Through a link its target is replaced, and whoever has the old one open keeps it.
    client.shell(&id, "ln -s /root/a /tmp/link; ln -s loop /tmp/loop").await?;
    write(&client, WriteFileStart { path: "/tmp/link".into(), ..dated }, b"new").await?;
    let seen =
        client.shell(&id, "cat /root/a; stat -c ' %a %u %Y' /root/a; ls -A /root /tmp").await?;
    assert_eq!(seen, "new 640 1000 981173106\n/root:\na\nb\n\n/tmp:\nlink\nloop\n");
    assert!(write(&client, target(&id, "/tmp/loop"), b"x").await.is_err());
    // A file that is mounted in its place is written where it is.
    write(&client, target(&id, "/etc/hosts"), b"127.0.0.1 me\n").await?;
    assert_eq!(client.shell(&id, "cat /etc/hosts").await?, "127.0.0.1 me\n");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_that_breaks_off_changes_nothing_and_a_reader_sees_one_or_the_other() -> Result<()>
{
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let (ones, twos) = (vec![b'1'; 1 << 20], vec![b'2'; 1 << 20]);
    write(&client, target(&id, "/root/f"), &ones).await?;
    let (sender, receiver) = tokio::sync::mpsc::channel(2);
    let start = write_file_part::Part::Start(target(&id, "/root/f"));
    sender.send(WriteFilePart { part: Some(start) }).await?;
    let mut caller = client.inner.clone();
    let upload = tokio::spawn(async move {
        caller.write_file(tokio_stream::wrappers::ReceiverStream::new(receiver)).await
    });
    for _ in 0..4 {
        let data = write_file_part::Part::Data(twos[..100_000].to_vec());
        sender.send(WriteFilePart { part: Some(data) }).await?;
    }
    upload.abort();
    assert!(upload.await.is_err());
    drop(sender);
    assert_eq!(
        client.shell(&id, "ls -A /root; head -c 1 /root/f; wc -c < /root/f").await?,
        "f\n11048576\n"
    );
    let script =
        "while test ! -e /done; do cat /root/f | tr -d '\\n' | md5sum; done | sort | uniq -c";
    let watching = client.shell(&id, script);
    let writing = async {
        for round in 0..20 {
            let bytes = if round % 2 == 0 { &twos } else { &ones };
            write(&client, target(&id, "/root/f"), bytes).await?;
        }
        client.shell(&id, "touch /done").await
    };
    let (seen, wrote) = tokio::join!(watching, writing);
    wrote?;
    let seen = seen?;
    assert!(seen.lines().count() <= 2, "{seen}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_listed_made_moved_and_removed_inside_whatever_links_say() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let line = "mkdir -p /root/t/d/e; echo 12 > /root/t/d/f; ln -s ../../../../etc /root/t/l; \
                mkfifo /root/t/p; chown 1000:77 /root/t/d/f; chmod 4750 /root/t/d/f; \
                touch \"/root/t/$(printf 'n\\n\\033[31m')\"";
    client.shell(&id, line).await?;
    let request = ListFilesRequest { id: id.clone(), path: "/root/t".into(), ..Default::default() };
    let (flat, _) = list(&client, request.clone()).await?;
    assert_eq!(paths(&flat), ["d", "l", "n\n\u{1b}[31m", "p"]);
    assert_eq!(
        (flat[1].kind(), flat[1].target.as_slice()),
        (FileKind::Symlink, &b"../../../../etc"[..])
    );
    assert_eq!(flat[3].kind(), FileKind::Fifo);
    let (deep, truncated) = list(&client, ListFilesRequest { depth: 9, ..request.clone() }).await?;
    assert_eq!(paths(&deep), ["d", "d/e", "d/f", "l", "n\n\u{1b}[31m", "p"]);
    assert!(!truncated);
    let file = &deep[2];
    assert_eq!((file.mode, file.uid, file.gid, file.size_bytes), (0o4750, 1000, 77, 3));
    let (few, truncated) =
        list(&client, ListFilesRequest { max_entries: 2, ..request.clone() }).await?;
    assert!(few.len() == 2 && truncated);
    // Files of the kernel are not shown, and not gone into.
    let kernel = ListFilesRequest { path: "/proc".into(), ..request.clone() };
    assert_eq!(list(&client, kernel).await.unwrap_err().kind(), ErrorKind::Denied);
    let all = ListFilesRequest { path: "/".into(), depth: 30, ..request };
    let (all, _) = list(&client, all).await?;
    assert!(paths(&all).iter().all(|path| !path.starts_with("proc/")));
    assert!(paths(&all).contains(&"root/t/d/f".to_owned()));

    assert_eq!(stat(&client, &id, "/root/t/l", false).await?.kind(), FileKind::Symlink);
    assert_eq!(stat(&client, &id, "/root/t/l", true).await?.kind(), FileKind::Directory);
    assert_eq!(stat(&client, &id, "/", false).await?.kind(), FileKind::Directory);
    assert_eq!(stat(&client, &id, "/none", false).await.unwrap_err().kind(), ErrorKind::NotFound);

    let make = MakeDirectoryRequest {
        id: id.clone(),
        path: "/root/t/l/made/deep".into(),
        mode: 0o2770,
        uid: 1000,
        gid: 77,
        parents: true,
    };
    let made = client.inner.clone().make_directory(make.clone()).await?.into_inner();
    assert_eq!((made.mode, made.uid, made.gid), (0o2770, 1000, 77));
    client.inner.clone().make_directory(make.clone()).await?;
    assert_eq!(client.shell(&id, "stat -c '%a %u %g' /etc/made/deep").await?, "2770 1000 77\n");
    let again = MakeDirectoryRequest { parents: false, ..make };
    let again = client.inner.clone().make_directory(again).await;
    assert_eq!(from_status(again.unwrap_err()).kind(), ErrorKind::Exists);

    rename(&client, &id, "/root/t/d/f", "/root/t/l/moved", false).await?;
    client.shell(&id, "test -f /etc/moved && echo x > /root/t/other").await?;
    let taken = rename(&client, &id, "/root/t/other", "/etc/moved", true).await;
    assert_eq!(taken.unwrap_err().kind(), ErrorKind::Exists);
    rename(&client, &id, "/root/t/other", "/etc/moved", false).await?;
    assert_eq!(client.shell(&id, "cat /etc/moved").await?, "x\n");

    let change = SetFileAttributesRequest {
        id: id.clone(),
        path: "/etc/moved".into(),
        mode: Some(0o4711),
        uid: Some(5),
        mtime_unix_s: Some(77),
        ..SetFileAttributesRequest::default()
    };
    client.inner.clone().set_file_attributes(change).await?;
    assert_eq!(client.shell(&id, "stat -c '%a %u %g %Y' /etc/moved").await?, "4711 5 0 77\n");

    // A link goes, not what it points to; a directory only with all in it if that was said.
    assert!(remove(&client, &id, "/root/t/l", true).await?);
    client.shell(&id, "test -d /etc/made && ln -s /etc /root/t/d/e/out").await?;
    assert_eq!(remove(&client, &id, "/root/t", false).await.unwrap_err().kind(), ErrorKind::Exists);
    assert!(remove(&client, &id, "/root/t", true).await?);
    assert_eq!(
        remove(&client, &id, "/root/t", true).await.unwrap_err().kind(),
        ErrorKind::NotFound
    );
    client.shell(&id, "test -d /etc/made && test ! -e /root/t").await?;
    for path in ["/", "/proc/1", "/sys/kernel", ".."] {
        assert!(remove(&client, &id, path, true).await.is_err(), "{path}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_names_are_listed_without_memory_and_large_files_pass_through() -> Result<()> {
    const BYTES: u64 = 300 << 20;
    let world = World::new()?;
    let (node, client) = start_node(&world).await?;
    let id = client.idle().await?.id;
    client.shell(&id, "mkdir /root/many && cd /root/many && seq 1 40000 | xargs touch").await?;
    let resident = node.resident_bytes()?;
    let request =
        ListFilesRequest { id: id.clone(), path: "/root/many".into(), ..Default::default() };
    assert_eq!(list(&client, request).await?.0.len(), 40_000);
    let start = write_file_part::Part::Start(target(&id, "/root/large"));
    let parts = (0..=BYTES >> 20).map(move |number| WriteFilePart {
        part: Some(match number {
            0 => start.clone(),
            _ => write_file_part::Part::Data(vec![0; 1 << 20]),
        }),
    });
    let written = client.inner.clone().write_file(tokio_stream::iter(parts)).await?.into_inner();
    assert_eq!(written.bytes, BYTES);
    let mut chunks = client.inner.clone().read_file(file(&id, "/root/large")).await?.into_inner();
    let mut count = 0;
    while let Some(chunk) = chunks.message().await? {
        if let Some(file_chunk::Part::Data(data)) = chunk.part {
            count += data.len() as u64;
        }
    }
    assert_eq!(count, BYTES);
    let grown = node.resident_bytes()?.saturating_sub(resident);
    assert!(grown < 64 << 20, "{grown} bytes");
    client.stop(&id).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_wait_or_vanish_hold_nobody_and_races_lead_nowhere() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    client.shell(&id, "mkfifo /tmp/p; ln -s /proc/1/mem /tmp/m; ln -s /dev/zero /tmp/z").await?;
    let calls = async {
        for path in ["/tmp/p", "/tmp/m", "/dev/tty", "/tmp/z", "/proc/1/environ"] {
            assert!(read(&client, file(&id, path)).await.is_err(), "{path}");
            assert!(write(&client, target(&id, path), b"x").await.is_err(), "{path}");
            let more = WriteFileStart { append: true, ..target(&id, path) };
            assert!(write(&client, more, b"x").await.is_err(), "{path}");
        }
    };
    tokio::time::timeout(Duration::from_secs(30), calls).await?;
    // A directory that becomes a link and back, while files go in below it.
    let secret = format!("lamella-race-{}", std::process::id());
    let swap = "while test ! -e /enough; do mkdir -p /tmp/s/in; rm -rf /tmp/s; \
                ln -s /proc/1/root/var/tmp /tmp/s; rm /tmp/s; ln -s ../../../../var/tmp /tmp/s; \
                rm /tmp/s; done";
    let swapping = client.shell(&id, swap);
    let writing = async {
        for _ in 0..300 {
            let path = format!("/tmp/s/{secret}");
            let _any_end = write(&client, target(&id, &path), b"x").await;
            let deep = WriteFileStart {
                make_parents: true,
                ..target(&id, &format!("/tmp/s/in/{secret}"))
            };
            let _any_end = write(&client, deep, b"x").await;
            let _any_end = remove(&client, &id, "/tmp/s", true).await;
        }
        client.shell(&id, "touch /enough").await
    };
    let (swapped, wrote) = tokio::join!(swapping, writing);
    swapped?;
    wrote?;
    for place in ["/var/tmp", "/tmp", "/"] {
        assert!(!std::path::Path::new(place).join(&secret).exists(), "{place}");
    }
    // A sandbox that destroyed all its programs still gives and takes files.
    client.shell(&id, "echo kept > /root/kept; rm -rf /bin/* /lib /lib64 /usr; :").await.ok();
    assert_eq!(read(&client, file(&id, "/root/kept")).await?, b"kept\n");
    write(&client, target(&id, "/root/more"), b"x").await?;
    let request = ListFilesRequest { id: id.clone(), path: "/root".into(), ..Default::default() };
    assert_eq!(paths(&list(&client, request).await?.0), ["kept", "more"]);
    let gone = client.run(&id, &["sh", "-c", "true"]).await?;
    assert_eq!(gone.ended.exit_code, 127);
    Ok(())
}

async fn watch(
    client: &Client,
    id: &str,
    path: &str,
    recursive: bool,
) -> Result<Streaming<FileEvent>> {
    let request = WatchFilesRequest { id: id.into(), path: path.into(), recursive };
    let events = client.inner.clone().watch_files(request).await;
    let mut events = events.map_err(from_status)?.into_inner();
    let first = events.message().await?.context("ready")?;
    ensure!(first.kind() == FileEventKind::FileEventReady, "{first:?}");
    Ok(events)
}

/// Reads until this event comes.
async fn expect(
    events: &mut Streaming<FileEvent>,
    kind: FileEventKind,
    path: &str,
) -> Result<FileEvent> {
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut seen = Vec::new();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok(event) = tokio::time::timeout(left, events.message()).await else {
            seen.truncate(20);
            anyhow::bail!("no {kind:?} of {path}, but {seen:?}")
        };
        let event = event?.with_context(|| format!("no {kind:?} of {path}"))?;
        if event.kind() == kind && event.path == path.as_bytes() {
            return Ok(event);
        }
        seen.push((event.kind(), String::from_utf8_lossy(&event.path).into_owned()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_changes_below_a_directory_is_told() -> Result<()> {
    use FileEventKind as Kind;
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    client.shell(&id, "mkdir -p /root/w/old/deep; echo x > /root/w/old/deep/f").await?;
    let mut flat = watch(&client, &id, "/root/w", false).await?;
    let mut all = watch(&client, &id, "/root/w", true).await?;
    client
        .shell(&id, "cd /root/w; echo a > a; mv a b; chmod 600 b; rm b; echo y >> old/deep/f")
        .await?;
    for events in [&mut flat, &mut all] {
        expect(events, Kind::FileEventCreated, "a").await?;
        expect(events, Kind::FileEventWritten, "a").await?;
        let from = expect(events, Kind::FileEventMovedFrom, "a").await?;
        let to = expect(events, Kind::FileEventMovedTo, "b").await?;
        assert!(from.cookie == to.cookie && to.cookie != 0);
        expect(events, Kind::FileEventAttributes, "b").await?;
        expect(events, Kind::FileEventRemoved, "b").await?;
    }
    expect(&mut all, Kind::FileEventWritten, "old/deep/f").await?;
    // New directories are watched as they come, also what was in them before they were.
    client.shell(&id, "mkdir -p /root/w/n/m; echo x > /root/w/n/m/g").await?;
    expect(&mut all, Kind::FileEventCreated, "n/m/g").await?;
    client.shell(&id, "echo z >> /root/w/n/m/g").await?;
    expect(&mut all, Kind::FileEventWritten, "n/m/g").await?;
    // What comes from outside is a change as well.
    write(&client, target(&id, "/root/w/n/up"), b"x").await?;
    expect(&mut all, Kind::FileEventMovedTo, "n/up").await?;
    // Nobody waits for a client that does not read.
    client.shell(&id, "cd /root/w; seq 1 6000 | xargs touch; seq 1 6000 | xargs rm").await?;
    client.shell(&id, "echo x > /root/w/last").await?;
    expect(&mut flat, Kind::FileEventCreated, "last").await?;
    let mut fresh = watch(&client, &id, "/root/w/n", false).await?;
    client.shell(&id, "rm -r /root/w/n").await?;
    expect(&mut fresh, Kind::FileEventGone, "").await?;
    // They end with the sandbox, and hold nothing of it.
    client.stop(&id).await?;
    expect(&mut all, Kind::FileEventGone, "").await?;
    let other = client.idle().await?.id;
    assert!(watch(&client, &other, "/proc/self", false).await.is_err());
    assert!(watch(&client, &other, "/none", false).await.is_err());
    client.stop(&other).await?;
    assert!(world.processes().is_empty());
    Ok(())
}
