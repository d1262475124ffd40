//! The hostile suite: a program for each thing that hostile code was seen to do, inside a sandbox. Each ends in
//! a refusal, and the node is well afterwards. docs/security.md has the list, also of those that are tested
//! elsewhere.

#![allow(clippy::unwrap_used)]

mod hostile_world;
mod runtime_world;

use anyhow::{Context, Result, ensure};
use hostile_world::{attack, is_healthy, with_profile, world};
use proto::v1::*;
use runtime_world::{Client, World};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use sys::loop_device::LoopDevice;
use sys::mount::{self, Recursive, Unmount};
use sys::process::{self, Namespaces};

/// A sandbox of this profile.
async fn sandbox(world: &World, profile: &str) -> Result<(runtime::Service, Client, String)> {
    let (service, client) = world.client().await?;
    let id = client.create(with_profile(profile)).await?.id;
    Ok((service, client, id))
}

/// A small XFS on a loop device, taken away at the end.
struct Xfs {
    mount: PathBuf,
    _device: LoopDevice,
    _folder: tempfile::TempDir,
}

impl Xfs {
    fn new() -> Result<Self> {
        let folder = tempfile::tempdir_in("/var/tmp")?;
        let (file, mount) = (folder.path().join("disk"), folder.path().join("mount"));
        std::fs::File::create(&file)?.set_len(320 << 20)?;
        // Without reverse mapping: the old way of swapping extents asks for nothing else.
        let made = Command::new("mkfs.xfs")
            .args(["-q", "-s", "size=4096", "-m", "rmapbt=0,reflink=0"])
            .arg(&file)
            .status()
            .context("xfsprogs is installed")?;
        ensure!(made.success(), "mkfs.xfs: {made}");
        let opened = std::fs::File::options().read(true).write(true).open(&file)?;
        let device = LoopDevice::over(opened.as_fd(), "lamella-hostile")?;
        std::fs::create_dir(&mount)?;
        let mounted = Command::new("mount")
            .args(["-t", "xfs"])
            .args([device.path(), mount.as_path()])
            .status()?;
        ensure!(mounted.success(), "mount: {mounted}");
        Ok(Self { mount, _device: device, _folder: folder })
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        let _ = mount::unmount(&self.mount, Unmount::Lazy);
    }
}

/// Shows a folder of the host inside, as a volume would be.
fn bind_into(init: u32, from: &Path, to: &'static str) -> Result<()> {
    let volume = mount::clone_tree(from, Recursive::No)?;
    let pidfd = process::pidfd_open(init as i32)?;
    // A thread of its own, since it does not come back.
    let bound = std::thread::spawn(move || {
        process::unshare(Namespaces::MOUNT)?;
        process::enter_namespaces_of(pidfd.as_fd(), Namespaces::MOUNT)?;
        volume.attach(Path::new(to))
    });
    bound.join().unwrap().context("bind a volume into a sandbox")
}

/// Through an overlay the kernel does not know the call; on a volume only the filter stands before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn extents_of_a_volume_are_not_swapped() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let world = world()?;
    let xfs = Xfs::new()?;
    let files = ["answer", "own"].map(|name| xfs.mount.join(name));
    for (file, byte) in files.iter().zip([b'a', b'o']) {
        std::fs::write(file, vec![byte; 1 << 20])?;
        std::fs::File::open(file)?.sync_all()?;
        std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o666))?;
    }
    let first = || -> Result<u8> { Ok(std::fs::read(&files[0])?[0]) };
    let (_service, client) = world.client().await?;
    for profile in ["strict", "default", "build"] {
        let sandbox = client.create(with_profile(profile)).await?;
        bind_into(sandbox.init_pid, &xfs.mount, "/tmp")?;
        client.shell(&sandbox.id, "test \"$(head -c 1 /tmp/answer)\" = a").await?;
        let words = ["swap-extents", "/tmp/answer", "/tmp/own"];
        assert_eq!(attack(&client, &sandbox.id, &words).await?, "errno 1\n", "{profile}");
        assert_eq!(first()?, b'a');
        client.stop(&sandbox.id).await?;
    }
    // Without our wall it works, or this test would show nothing.
    let program = world.image().join("bin/attacks");
    let swapped = Command::new(program).arg("swap-extents").args(&files).output()?;
    assert_eq!(String::from_utf8_lossy(&swapped.stdout), "extents were swapped\n");
    assert_eq!(first()?, b'o');
    is_healthy(&client).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_call_reaches_beyond_the_sandbox_under_any_profile() -> Result<()> {
    let world = world()?;
    let (_service, client) = world.client().await?;
    for profile in ["strict", "default", "build"] {
        let id = client.create(with_profile(profile)).await?.id;
        let mut found = attack(&client, &id, &["calls"]).await?;
        if profile == "build" {
            // It may compare its own processes, and its init is none of them.
            found = found.replace("kcmp\n", "");
        }
        assert_eq!(found, "", "{profile}");
        assert_eq!(attack(&client, &id, &["devices"]).await?, "", "{profile}");
        client.stop(&id).await?;
    }
    let unknown = client.create(with_profile("loose")).await.unwrap_err();
    assert!(unknown.to_string().contains("loose"), "{unknown}");
    is_healthy(&client).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_socket_answers_from_inside_whatever_it_is_called() -> Result<()> {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};
    let world = world()?;
    let (_service, client, id) = sandbox(&world, "default").await?;
    let name = format!("lamella-hostile-{}", std::process::id());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
    listener.set_nonblocking(true)?;
    let port = std::net::TcpListener::bind("127.0.0.1:0")?;
    port.set_nonblocking(true)?;
    assert_eq!(attack(&client, &id, &["abstract-socket", &name]).await?, "");
    assert_eq!(attack(&client, &id, &["every-socket"]).await?, "");
    assert_eq!(attack(&client, &id, &["scan"]).await?, "");
    // Nobody has come.
    assert!(listener.accept().is_err() && port.accept().is_err());
    is_healthy(&client).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_programs_that_start_commands_cannot_be_attacked() -> Result<()> {
    let world = world()?;
    let (_service, client, id) = sandbox(&world, "default").await?;
    let argv = ["attacks", "hunt"];
    let hunting = client.run(&id, &argv);
    let busy = async {
        for _ in 0..40 {
            client.run(&id, &["true"]).await?;
        }
        client.shell(&id, "touch /tmp/enough").await
    };
    let (hunted, busy) = tokio::join!(hunting, busy);
    busy?;
    let hunted = hunted?;
    let looked = String::from_utf8_lossy(&hunted.stderr).into_owned();
    assert_eq!((hunted.ended.exit_code, hunted.text().as_str()), (0, ""), "{looked}");
    let count = looked.trim().strip_prefix("looked at ").and_then(|count| count.parse().ok());
    assert!(count.is_some_and(|count: u64| count > 0), "{looked}");
    is_healthy(&client).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_starts_no_program_of_the_host() -> Result<()> {
    let world = world()?;
    let (_service, client) = world.client().await?;
    for profile in ["strict", "default", "build"] {
        let id = client.create(with_profile(profile)).await?.id;
        assert_eq!(attack(&client, &id, &["core-dump"]).await?, "", "{profile}");
        client.shell(&id, "ulimit -c 0; ulimit -n 100; test $(ulimit -n) = 100").await?;
        client.stop(&id).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_types_into_a_terminal() -> Result<()> {
    let world = world()?;
    let (_service, client, id) = sandbox(&world, "default").await?;
    let start = ExecStart {
        sandbox_id: id.clone(),
        argv: ["attacks", "type-ahead"].map(str::to_owned).to_vec(),
        tty: true,
        ..ExecStart::default()
    };
    let ran = client.exec(start).await?;
    assert_eq!((ran.ended.exit_code, ran.text().as_str()), (0, ""));
    Ok(())
}

/// Answers lie in the node's folders, its environment, and the files and memory of others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_not_found_by_fishing() -> Result<()> {
    let world = world()?;
    let (_service, client) = world.client().await?;
    let secret = format!("answer-{:x}", std::process::id());
    let other = client.idle().await?.id;
    let keep = format!(
        "echo {secret} > /tmp/answer; echo {secret} > /dev/shm/answer; \
                        ANSWER={secret} sleep 60 >/dev/null 2>&1 &"
    );
    client.shell(&other, &keep).await?;
    std::fs::write(world.data().join("answer"), &secret)?;
    let id = client.idle().await?.id;
    // A pattern, so that the search does not find itself.
    let pattern = format!("[a]{}", &secret[1..]);
    let fish = format!(
        "for d in /tmp /dev/shm /dev/mqueue /etc /root /home /var /run /sys /mnt; do \
         test -e $d && grep -rls '{pattern}' $d; done; \
         for f in environ cmdline mountinfo maps status; do \
         for p in /proc/[0-9]*; do grep -ls '{pattern}' $p/$f; done; done; \
         for f in kpagecgroup kpagecount kpageflags kcore keys key-users timer_list slabinfo \
         vmallocinfo pagetypeinfo modules partitions diskstats iomem ioports cmdline; do \
         test \"$(head -c 64 /proc/$f 2>/dev/null | wc -c)\" = 0 || echo /proc/$f; done; true"
    );
    assert_eq!(client.shell(&id, &fish).await?, "");
    // Where it is, the same search finds it.
    let own = client.shell(&other, &fish).await?;
    for place in ["/tmp/answer", "/dev/shm/answer", "/environ"] {
        assert!(own.contains(place), "{own}");
    }
    is_healthy(&client).await
}

/// A mount that takes files opens no device, and /dev takes none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn devices_open_in_dev_only() -> Result<()> {
    let world = world()?;
    let (_service, client, id) = sandbox(&world, "default").await?;
    let mounts = client.shell(&id, "cat /proc/self/mounts").await?;
    for line in mounts.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let (place, options) = (words[1], words[3]);
        let has = |option| options.split(',').any(|known| known == option);
        // The files over what is masked in /proc are the null device of /dev.
        let opens_none = has("nodev") || place == "/dev/pts";
        assert!(opens_none || has("ro"), "{line}");
    }
    let list = client.shell(&id, "find /dev -type c -o -type b | grep -v /dev/pts | sort").await?;
    let known = "/dev/full\n/dev/null\n/dev/random\n/dev/tty\n/dev/urandom\n/dev/zero\n";
    assert_eq!(list, known);
    Ok(())
}
