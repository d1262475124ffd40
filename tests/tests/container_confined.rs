//! What hostile code finds inside a container: nothing of ours, nothing of the host's.

#![allow(clippy::unwrap_used)]

mod runtime_world;

use anyhow::Result;
use proto::v1::*;
use runtime_world::{Client, World, how};
use std::time::{Duration, Instant};

async fn sandbox(world: &World) -> Result<(runtime::Service, Client, String)> {
    let (service, client) = world.client().await?;
    let id = client.idle().await?.id;
    Ok((service, client, id))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_process_inside_has_a_descriptor_of_ours() -> Result<()> {
    let world = World::new()?;
    let (_service, client, id) = sandbox(&world).await?;
    // Several commands at once, so that their processes are seen between birth and execve too.
    let watch = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do \
                 for p in /proc/[0-9]*; do for f in $p/fd/*; do \
                 t=$(readlink $f 2>/dev/null) && echo $t $f $(cat $p/comm); done; done; done | sort -u";
    let argv = ["sh", "-c", watch];
    let watched = client.run(&id, &argv);
    let busy = async {
        for _ in 0..30 {
            client.run(&id, &["true"]).await?;
        }
        anyhow::Ok(())
    };
    let (watched, busy) = tokio::join!(watched, busy);
    busy?;
    let text = watched?.text();
    assert!(text.contains("pipe:"), "the watcher sees its own at least: {text}");
    for line in text.lines() {
        let mut words = line.split(' ');
        let (target, process) = (words.next().unwrap_or_default(), words.next_back());
        // A process that is still ours shows nothing, and one of the image has nothing of ours.
        let is_ours = process.is_some_and(|name| name.starts_with("lamella") || name == "init");
        let harmless = ["pipe:", "/dev/null", "/proc"].iter().any(|kind| target.starts_with(kind));
        assert!(!is_ours && harmless, "a descriptor is seen: {line}");
    }
    // The init has none at all, and cannot be looked at.
    assert_eq!(client.shell(&id, "ls /proc/1/fd 2>/dev/null | wc -l").await?.trim(), "0");
    let exe = client.run(&id, &["readlink", "/proc/1/exe"]).await?;
    assert_ne!(exe.ended.exit_code, 0);
    let pid = client.get(&id).await?.init_pid;
    assert_eq!(std::fs::read_dir(format!("/proc/{pid}/fd"))?.count(), 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kernel_files_are_masked_and_read_only() -> Result<()> {
    let world = World::new()?;
    let (_service, client, id) = sandbox(&world).await?;
    for path in ["kcore", "kpagecgroup", "kpagecount", "kpageflags", "timer_list", "keys"] {
        let line =
            format!("test ! -e /proc/{path} || test \"$(head -c 1 /proc/{path} | wc -c)\" = 0");
        client.shell(&id, &line).await?;
    }
    for path in ["/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/sys/x", "/dev/x"] {
        let ran = client.run(&id, &["sh", "-c", &format!("echo 1 > {path}")]).await?;
        assert_ne!(ran.ended.exit_code, 0, "{path}");
    }
    let mounts = client.shell(&id, "cat /proc/mounts").await?;
    assert!(!mounts.contains(" cgroup") && !mounts.contains(".sock"), "{mounts}");
    assert_eq!(
        client.shell(&id, "ls /sys/kernel /sys/fs/cgroup | grep -c debug || true").await?,
        "0\n"
    );
    let network = client.shell(&id, "ls /proc/self/net/ >/dev/null; ip -o link | wc -l").await?;
    assert_eq!(network.trim(), "1", "loopback only");
    client.shell(&id, "ping -c 1 127.0.0.1 >/dev/null 2>&1 || ifconfig lo | grep -q UP").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rights_of_the_host_are_gone() -> Result<()> {
    let world = World::new()?;
    let (_service, client, id) = sandbox(&world).await?;
    let status = client.shell(&id, "cat /proc/self/status").await?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.trim_start_matches(':').trim().to_owned()
    };
    assert_eq!((field("Seccomp"), field("NoNewPrivs")), ("2".into(), "1".into()));
    let kept = u64::from_str_radix(&field("CapEff"), 16)?;
    assert_eq!(kept, sys::capability::CapabilitySet::SANDBOX.bits());
    assert_eq!((field("CapBnd"), field("CapPrm")), (field("CapEff"), field("CapEff")));
    let other = ExecStart {
        sandbox_id: id.clone(),
        argv: ["cat", "/proc/self/status"].map(str::to_owned).to_vec(),
        user: Some("ann".into()),
        ..ExecStart::default()
    };
    let other = client.exec(other).await?.text();
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert!(other.contains(&format!("{set}:\t0000000000000000")), "{other}");
    }
    let init =
        std::fs::read_to_string(format!("/proc/{}/status", client.get(&id).await?.init_pid))?;
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert!(init.contains(&format!("{set}:\t0000000000000000")), "{init}");
    }
    for line in [
        "mount -t tmpfs none /tmp",
        "umount /proc",
        "unshare -m true",
        "chroot / mount -t proc proc /proc",
        "hostname other",
        "date -s 2000-01-01; test $(date +%Y) -lt 2001",
        "dmesg",
        "swapoff -a",
        "mknod /tmp/disk b 8 0 && cat /tmp/disk",
        "mknod /tmp/kmsg c 1 11 && cat /tmp/kmsg",
        "kill -9 1 && sleep 1 && test ! -d /proc/1",
    ] {
        let ran = client.run(&id, &["sh", "-c", line]).await?;
        assert_ne!(ran.ended.exit_code, 0, "{line}");
    }
    assert_eq!(client.shell(&id, "echo alive").await?, "alive\n");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_destroyed_shell_does_not_matter() -> Result<()> {
    let world = World::new()?;
    let (_service, client, id) = sandbox(&world).await?;
    client
        .shell(&id, "cp /bin/busybox /tmp/busybox; rm /bin/sh; echo broken > /bin/sh; chmod +x /bin/sh; echo x > /etc/passwd")
        .await?;
    let ran = client.run(&id, &["/tmp/busybox", "echo", "works"]).await?;
    assert_eq!(ran.text(), "works\n");
    assert_eq!(client.run(&id, &["sh", "-c", "true"]).await?.ended.exit_code, 126);
    // Our own program, reached through its name in /proc, is of no use and cannot be changed.
    let ran = client.run(&id, &["/proc/self/exe"]).await?;
    assert_ne!(ran.ended.exit_code, 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_beyond_the_limit_ends_as_oom() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let limits = Limits { memory_bytes: 32 << 20, ..Limits::default() };
    let request = CreateRequest { limits: Some(limits), ..CreateRequest::default() };
    let id = client.create(request.clone()).await?.id;
    let ran = client.run(&id, &["tail", "/dev/zero"]).await?;
    assert_eq!(how(&ran.ended.end), Some(end::How::Oom(true)), "{:?}", ran.ended);
    assert_eq!(ran.ended.exit_code, 137);
    let ran = client.run(&id, &["sh", "-c", "tail /dev/zero; exit $?"]).await?;
    assert_eq!(how(&ran.ended.end), Some(end::How::Oom(true)), "{:?}", ran.ended);
    assert_eq!(client.shell(&id, "echo alive").await?, "alive\n");
    // The sandbox's own command.
    let argv = vec!["tail".into(), "/dev/zero".into()];
    let own = client.create(CreateRequest { argv, ..request }).await?;
    let own = client.wait(&own.id).await?;
    assert_eq!(how(&own.end), Some(end::How::Oom(true)));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fork_bomb_is_bounded_and_stops() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let limits = Limits { pids: 40, ..Limits::default() };
    let id =
        client.create(CreateRequest { limits: Some(limits), ..CreateRequest::default() }).await?.id;
    let line = "i=0; while [ $i -lt 200 ]; do sleep 100 & i=$((i+1)); done; wait";
    let timed = ExecStart {
        sandbox_id: id.clone(),
        argv: vec!["sh".into(), "-c".into(), line.into()],
        timeout_ms: 3000,
        ..ExecStart::default()
    };
    let before = Instant::now();
    let bombed = client.exec(timed).await?;
    assert!(before.elapsed() < Duration::from_secs(60));
    assert_ne!(bombed.ended.exit_code, 0);
    assert!(world.processes().len() <= 41);
    assert_eq!(client.shell(&id, "echo alive").await?, "alive\n");
    client.stop(&id).await?;
    assert!(world.processes().is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_used_again_holds_nothing_of_its_last_user() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    for _ in 0..4 {
        let id = client.idle().await?.id;
        let sockets =
            "cat /proc/net/tcp /proc/net/udp /proc/net/unix | grep -vc -e local_address -e Num";
        let seen = client.run(&id, &["sh", "-c", sockets]).await?;
        assert_eq!(seen.text().trim(), "0");
        // Leaves a listener, a finished connection that waits for its time, and data.
        let line = "(nc -l -p 5000 -e true &) ; (nc -l -p 5001 >/dev/null &); sleep 0.1; \
                    echo x | nc -w 1 127.0.0.1 5000; exit 0";
        client.shell(&id, line).await?;
        client.stop(&id).await?;
    }
    Ok(())
}
