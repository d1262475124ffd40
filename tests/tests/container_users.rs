//! Users of a sandbox: root inside is nobody of the host, and nothing that can be seen from inside, from
//! the file calls or on disk tells of it.

#![allow(clippy::unwrap_used)]

mod runtime_world;

use anyhow::{Context, Result};
use proto::v1::*;
use runtime_world::{Client, World};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use tokio_stream::StreamExt;

fn command(id: &str, argv: &[&str]) -> ExecStart {
    ExecStart {
        sandbox_id: id.into(),
        argv: argv.iter().map(|&word| word.into()).collect(),
        ..ExecStart::default()
    }
}

fn as_ann(id: &str, line: &str) -> ExecStart {
    ExecStart { user: Some("ann".into()), ..command(id, &["sh", "-c", line]) }
}

/// Where the writable layer of the only sandbox lies on the host.
fn upper(world: &World) -> Result<PathBuf> {
    let slots = world.data().join("sandboxes/slots");
    let slot = std::fs::read_dir(slots)?.next().context("a slot")??;
    Ok(slot.path().join("upper"))
}

/// The user ids of a process of the host: real, effective, saved, of files.
fn users_of(pid: u32) -> Result<Vec<u32>> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).context("Uid")?;
    Ok(line.split_whitespace().map(|word| word.parse().unwrap()).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn root_inside_is_nobody_of_the_host() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let mut roots = Vec::new();
    for _ in 0..2 {
        let argv = ["sleep", "1000"].map(str::to_owned).to_vec();
        let request = CreateRequest { argv, ..CreateRequest::default() };
        let id = client.create(request).await?.id;
        assert_eq!(client.shell(&id, "id -u; id -g").await?, "0\n0\n");
        assert_eq!(
            client.shell(&id, "cat /proc/self/uid_map").await?.split_whitespace().last(),
            Some("65536")
        );
        let init = users_of(client.get(&id).await?.init_pid)?;
        assert!(init[0] >= 1 << 28 && init.iter().all(|user| *user == init[0]), "{init:?}");
        roots.push(init[0]);
    }
    assert!(roots[0].abs_diff(roots[1]) >= 1 << 16, "{roots:?}");
    for pid in world.processes() {
        for user in users_of(pid)? {
            assert!(roots.contains(&user), "{pid} is {user} on the host");
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_written_keeps_the_owners_that_the_sandbox_knows() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    client
        .shell(
            &id,
            "mkdir /made; echo root > /made/root; chown -R 7:8 /etc/passwd; mkfifo /made/pipe",
        )
        .await?;
    client.shell(&id, "chown 1000:1000 /made; ln -s x /made/link; chown -h 5:5 /made/link").await?;
    let ran = client.exec(as_ann(&id, "echo ann > /made/ann; rm /made/pipe")).await?;
    assert_eq!(ran.ended.exit_code, 0, "{ran:?}");
    let seen =
        "stat -c '%n %u %g' /made /made/root /made/ann /made/link /etc/passwd /bin/busybox /";
    let expected = "/made 1000 1000\n/made/root 0 0\n/made/ann 1000 1000\n/made/link 5 5\n\
                    /etc/passwd 7 8\n/bin/busybox 0 0\n/ 0 0\n";
    assert_eq!(client.shell(&id, seen).await?, expected);
    let upper = upper(&world)?;
    for (path, user, group) in [
        ("made", 1000, 1000),
        ("made/root", 0, 0),
        ("made/ann", 1000, 1000),
        ("made/link", 5, 5),
        ("etc/passwd", 7, 8),
    ] {
        let on_disk = upper.join(path).symlink_metadata()?;
        assert_eq!((on_disk.uid(), on_disk.gid()), (user, group), "{path}");
    }
    // Beyond its numbers there is nobody.
    for line in ["chown 70000 /made/root", "chown 0:70000 /made/root"] {
        assert_ne!(client.run(&id, &["sh", "-c", line]).await?.ended.exit_code, 0, "{line}");
    }
    let stranger = ExecStart { user: Some("70000".into()), ..command(&id, &["true"]) };
    let refused = client.exec(stranger).await?;
    assert_eq!(refused.ended.exit_code, 126, "{refused:?}");
    assert!(refused.ended.message.contains("below 65536"), "{refused:?}");
    Ok(())
}

async fn write(client: &Client, start: WriteFileStart, data: Vec<u8>) -> Result<()> {
    use write_file_part::Part;
    let parts = [Part::Start(start), Part::Data(data)];
    let parts = parts.map(|part| WriteFilePart { part: Some(part) });
    let answer = client.inner.clone().write_file(tokio_stream::iter(parts)).await;
    answer.map_err(proto::status::from_status)?;
    Ok(())
}

/// Name and owner of everything in the tar of a folder.
async fn owners(client: &Client, id: &str, path: &str) -> Result<Vec<(String, u64, u64)>> {
    let request =
        ReadFileRequest { id: id.into(), path: path.into(), ..ReadFileRequest::default() };
    let mut chunks = client.inner.clone().read_file(request).await?.into_inner();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.next().await {
        if let Some(file_chunk::Part::Data(data)) = chunk?.part {
            bytes.extend(data);
        }
    }
    let mut found = Vec::new();
    let mut archive = tar::Archive::new(bytes.as_slice());
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.display().to_string();
        found.push((name, entry.header().uid()?, entry.header().gid()?));
        std::io::copy(&mut entry, &mut std::io::sink())?;
    }
    found.sort();
    Ok(found)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn file_calls_speak_of_the_users_inside() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let start = |path: &str, uid, untar| WriteFileStart {
        id: id.clone(),
        path: path.into(),
        mode: 0o600,
        uid,
        gid: uid,
        untar,
        ..WriteFileStart::default()
    };
    write(&client, start("/tmp/file", 1000, false), b"x".to_vec()).await?;
    let refused = write(&client, start("/tmp/none", 70_000, false), b"x".to_vec()).await;
    assert!(refused.unwrap_err().to_string().contains("below 65536"));
    let mut archive = tar::Builder::new(Vec::new());
    for (name, owner) in [("deep/file", 1000u64), ("other", 0)] {
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        header.set_mode(0o644);
        header.set_uid(owner);
        header.set_gid(owner);
        archive.append_data(&mut header, name, &b"y"[..])?;
    }
    write(&client, start("/tmp/tree", 0, true), archive.into_inner()?).await?;
    let seen =
        "stat -c '%u %g' /tmp/file /tmp/tree /tmp/tree/deep /tmp/tree/deep/file /tmp/tree/other";
    assert_eq!(client.shell(&id, seen).await?, "1000 1000\n0 0\n0 0\n1000 1000\n0 0\n");
    let expected = [
        ("deep".to_owned(), 0, 0),
        ("deep/file".to_owned(), 1000, 1000),
        ("other".to_owned(), 0, 0),
    ];
    assert_eq!(owners(&client, &id, "/tmp/tree").await?, expected);
    // The next runtime finds the numbers by the sandbox's init.
    service.close().await;
    drop((service, client));
    let (_service, client) = world.client().await?;
    write(&client, start("/tmp/later", 1000, false), b"x".to_vec()).await?;
    assert_eq!(client.shell(&id, "stat -c %u /tmp/later; id -u").await?, "1000\n0\n");
    assert_eq!(owners(&client, &id, "/tmp/tree").await?, expected);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_find_root_at_home() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let owned = "stat -c %u:%g / /dev /dev/null /dev/shm /etc/hosts /etc/hostname | sort -u";
    assert_eq!(client.shell(&id, owned).await?, "0:0\n");
    for user in ["root", "ann"] {
        let line = "echo x > /dev/stdout && echo y >> /dev/fd/1 && echo z >&2 2> /dev/stderr";
        let start = ExecStart { user: Some(user.into()), ..command(&id, &["sh", "-c", line]) };
        let ran = client.exec(start).await?;
        assert_eq!((ran.ended.exit_code, ran.text().starts_with("x\ny\n")), (0, true), "{ran:?}");
        let line = "stat -c %u:%g $(tty); echo x > $(tty)";
        let start =
            ExecStart { tty: true, user: Some(user.into()), ..command(&id, &["sh", "-c", line]) };
        let ran = client.exec(start).await?;
        let owner = if user == "root" { "0:5" } else { "1000:5" };
        assert!(ran.ended.exit_code == 0 && ran.text().starts_with(owner), "{ran:?}");
    }
    // Low ports, also in a network that had another user before.
    for _ in 0..2 {
        let line = "(echo hi | nc -l -p 80 &); for i in 1 2 3 4 5 6 7 8 9; do \
                    nc -w 1 127.0.0.1 80 </dev/null 2>/dev/null && break; sleep 0.1; done";
        assert_eq!(client.shell(&id, line).await?, "hi\n");
        client
            .shell(&id, "touch /dev/shm/mine; su ann -c 'touch /dev/shm/theirs' 2>/dev/null; true")
            .await?;
    }
    Ok(())
}

/// Puts the host's tail(1), which watches by inotify, and what it needs into the image.
fn add_tail(world: &World) -> Result<()> {
    let needs = std::process::Command::new("ldd").arg("/usr/bin/tail").output()?;
    let needs = String::from_utf8(needs.stdout)?;
    let libraries = needs.split_whitespace().filter(|word| word.starts_with('/'));
    for path in libraries {
        let target = world.image().join(path.trim_start_matches('/'));
        std::fs::create_dir_all(target.parent().context("parent")?)?;
        std::fs::copy(path, target)?;
    }
    std::fs::copy("/usr/bin/tail", world.image().join("bin/watch-file"))?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_sandbox_cannot_take_what_the_kernel_counts_by_user() -> Result<()> {
    let world = World::new()?;
    add_tail(&world)?;
    let (_service, client) = world.client().await?;
    let (greedy, quiet) = (client.idle().await?.id, client.idle().await?.id);
    let allowed = std::fs::read_to_string("/proc/sys/fs/inotify/max_user_instances")?;
    let allowed: usize = allowed.trim().parse()?;
    if allowed > 500 {
        // Somebody has raised it beyond what a test can take.
        return Ok(());
    }
    // Without a place for one, tail looks now and then instead.
    let watch = |count: usize| {
        format!(
            "touch /dev/shm/file; i=0; while [ $i -lt {count} ]; do \
             watch-file -f /dev/shm/file >/dev/null 2>&1 & i=$((i+1)); done; \
             sleep 2; ls -l /proc/[0-9]*/fd | grep -c inotify; true"
        )
    };
    let taken: usize = client.shell(&greedy, &watch(allowed + 20)).await?.trim().parse()?;
    assert_eq!(taken, allowed, "of {allowed}");
    assert_eq!(client.shell(&quiet, &watch(1)).await?.trim(), "1");
    let mut on_host = std::process::Command::new("/usr/bin/tail")
        .args(["-f", "/etc/hostname"])
        .stdout(std::process::Stdio::null())
        .spawn()?;
    let folder = format!("/proc/{}/fd", on_host.id());
    let watches = || {
        let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        let targets = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        targets.into_iter().any(|target| target.to_string_lossy().contains("inotify"))
    };
    let mut found = false;
    for _ in 0..100 {
        found |= watches();
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        if found {
            break;
        }
    }
    on_host.kill()?;
    on_host.wait()?;
    assert!(found, "root of the host has no inotify instance left");
    Ok(())
}

/// An image on a file system that cannot shift owners.
struct Unshiftable(PathBuf);

impl Unshiftable {
    fn over(image: PathBuf) -> Result<Self> {
        // An overlay cannot, whatever lies below it.
        let other = image.with_file_name("other");
        std::fs::create_dir(&other)?;
        let overlay = sys::mount::Overlay {
            name: "image",
            lowers: &[
                sys::mount::OverlayLower::Path(&image),
                sys::mount::OverlayLower::Path(&other),
            ],
            upper: None,
            volatile: false,
        };
        overlay.mount_detached(sys::mount::Attributes::LAYER)?.attach(&image)?;
        Ok(Self(image))
    }
}

impl Drop for Unshiftable {
    fn drop(&mut self) {
        let _ = sys::mount::unmount(&self.0, sys::mount::Unmount::Lazy);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_layer_that_cannot_shift_owners_is_refused_where_users_are_required() -> Result<()> {
    let world = World::new()?;
    let _image = Unshiftable::over(world.image())?;
    for (users, works) in
        [(runtime::UserNamespaces::Auto, true), (runtime::UserNamespaces::Required, false)]
    {
        let set = |config: &mut runtime::RuntimeConfig| config.user_namespaces = users;
        let service = runtime_world::open_with(&world.data(), &world.layers, set).await?;
        let channel = proto::connect::in_process(service.routes()).await?;
        let client = Client { inner: sandboxes_client::SandboxesClient::new(channel) };
        match client.idle().await {
            Ok(sandbox) => {
                assert!(works, "{users:?}");
                assert_eq!(client.shell(&sandbox.id, "id -u").await?, "0\n");
                let init = client.get(&sandbox.id).await?.init_pid;
                assert_eq!(users_of(init)?[0], 0);
                client.stop(&sandbox.id).await?;
            }
            Err(error) => {
                assert!(!works, "{users:?}: {error:#}");
                assert!(format!("{error:#}").contains("cannot shift owners"), "{error:#}");
            }
        }
        service.close().await;
    }
    Ok(())
}
