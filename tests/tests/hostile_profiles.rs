//! Named profiles and protected paths, as hostile code finds them.

#![allow(clippy::unwrap_used)]

mod hostile_world;
mod runtime_world;

use anyhow::{Result, ensure};
use hostile_world::{attack, is_healthy, protecting, with_profile, world};
use proto::v1::*;
use runtime_world::{Client, World};
use std::path::Path;

/// What the image has under /opt.
fn with_grader(world: &World) -> Result<()> {
    let grader = world.image().join("opt/grader");
    std::fs::create_dir_all(grader.join("cases"))?;
    std::fs::write(grader.join("cases/one"), "expected")?;
    std::fs::write(world.image().join("opt/tool"), "#!/bin/sh\necho checked\n")?;
    std::fs::write(world.image().join("opt/answers"), "42")?;
    std::fs::write(world.image().join("opt/other"), "free")?;
    std::os::unix::fs::symlink("opt", world.image().join("alias"))?;
    Ok(())
}

/// Whether the line of the shell fails.
async fn is_refused(client: &Client, id: &str, line: &str) -> Result<bool> {
    Ok(client.run(id, &["sh", "-c", line]).await?.ended.exit_code != 0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn protected_paths_are_the_same_for_ever_also_for_root() -> Result<()> {
    let world = world()?;
    with_grader(&world)?;
    let (_service, client) = world.client().await?;
    let request =
        protecting(&[("/opt/grader", false), ("/opt/tool", false), ("/opt/answers", true)]);
    let id = client.create(request).await?.id;
    for line in [
        "echo x > /opt/tool",
        "echo x >> /opt/grader/cases/one",
        "rm -f /opt/tool",
        "rm -rf /opt/grader",
        "touch /opt/grader/new",
        "chmod 777 /opt/tool",
        "chown 1000 /opt/tool",
        "mv /opt/tool /tmp/tool",
        "echo fake > /tmp/fake; mv -f /tmp/fake /opt/tool",
        "ln -f /tmp/fake /opt/tool",
        "mv /opt /opt2",
        "mv -T /tmp /opt",
        "umount /opt/tool",
        "umount -l /opt",
        "mount -t tmpfs none /opt",
        "mount -o remount,rw /opt/tool",
        "chroot / sh -c 'echo x > /opt/tool'",
        "echo x > /proc/1/root/opt/tool",
        "echo x > /proc/self/root/opt/tool",
        "cat /opt/answers",
        "cat /proc/self/root/opt/answers",
        "cp /opt/answers /tmp",
        "ln /opt/answers /tmp/link && cat /tmp/link",
        "chmod 644 /opt/answers",
        "mv /opt/answers /tmp/answers",
    ] {
        assert!(is_refused(&client, &id, line).await?, "{line}");
    }
    assert_eq!(
        client.shell(&id, "sh /opt/tool; cat /opt/grader/cases/one").await?,
        "checked\nexpected"
    );
    // What lies beside them is free.
    client.shell(&id, "echo mine > /opt/other; mv /opt/other /opt/more; mkdir /opt/new").await?;
    // The node sees what the sandbox sees.
    let answers = ReadFileRequest {
        id: id.clone(),
        path: "/opt/answers".into(),
        ..ReadFileRequest::default()
    };
    let mut bytes = Vec::new();
    if let Ok(answer) = client.inner.clone().read_file(answers).await {
        let mut answer = answer.into_inner();
        while let Ok(Some(part)) = answer.message().await {
            if let Some(file_chunk::Part::Data(data)) = part.part {
                bytes.extend(data);
            }
        }
    }
    assert_eq!(bytes, b"");
    let image = std::fs::read_to_string(world.image().join("opt/tool"))?;
    assert!(image.contains("checked"));
    is_healthy(&client).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_path_that_cannot_be_protected_stops_the_start() -> Result<()> {
    let world = world()?;
    with_grader(&world)?;
    std::fs::hard_link(world.image().join("opt/answers"), world.image().join("opt/same"))?;
    let (_service, client) = world.client().await?;
    for (path, hidden, why) in [
        ("/opt/absent", false, "/opt/absent"),
        ("/alias/tool", false, "/alias/tool"),
        ("relative", false, "relative"),
        ("/opt/../etc", false, "/opt/../etc"),
        ("/", true, "root"),
        ("/opt/answers", true, "other names"),
    ] {
        let refused = client.create(protecting(&[(path, hidden)])).await.unwrap_err();
        let text = format!("{refused:#}");
        assert!(text.contains(why), "{path}: {text}");
    }
    let hidden = client.create(protecting(&[("/opt/grader", true)])).await?.id;
    assert!(is_refused(&client, &hidden, "ls /opt/grader").await?);
    assert!(is_refused(&client, &hidden, "cat /opt/grader/cases/one").await?);
    is_healthy(&client).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strict_leaves_no_right_and_keeps_commands_apart() -> Result<()> {
    let world = world()?;
    let (_service, client) = world.client().await?;
    let id = client.create(with_profile("strict")).await?.id;
    let status = client.shell(&id, "cat /proc/self/status").await?;
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert!(status.contains(&format!("{set}:\t0000000000000000")), "{status}");
    }
    let sleeping = client.clone();
    let sandbox = id.clone();
    let other = tokio::spawn(async move {
        let line = "echo $$ > /tmp/pid.new; mv /tmp/pid.new /tmp/pid; exec sleep 20";
        sleeping.run(&sandbox, &["sh", "-c", line]).await
    });
    let pid =
        client.shell(&id, "while [ ! -e /tmp/pid ]; do sleep 0.01; done; cat /tmp/pid").await?;
    let mut expected = "";
    if sys::landlock::version().unwrap_or(0) < 6 {
        expected = "signal\n";
    }
    assert_eq!(attack(&client, &id, &["neighbours", pid.trim()]).await?, expected);
    // Within one command everything is as usual, and the node reaches all.
    client.shell(&id, "sleep 9 & kill $!; test -w /tmp").await?;
    client.stop(&id).await?;
    ensure!(other.await??.ended.exit_code != 0);
    is_healthy(&client).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_profile_and_the_protection_outlive_the_runtime() -> Result<()> {
    let world = world()?;
    with_grader(&world)?;
    let (service, client) = world.client().await?;
    let request = CreateRequest { profile: "strict".into(), ..protecting(&[("/opt/tool", false)]) };
    let id = client.create(request).await?.id;
    service.close().await;
    drop((service, client));
    let (_service, client) = world.client().await?;
    let status = client.shell(&id, "cat /proc/self/status").await?;
    assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
    assert!(is_refused(&client, &id, "echo x > /opt/tool").await?);
    assert!(Path::new(&world.data()).exists());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn build_allows_what_builds_need() -> Result<()> {
    let world = world()?;
    let (_service, client) = world.client().await?;
    let id = client.create(with_profile("build")).await?.id;
    client.shell(&id, "touch /tmp/f; chown 1000:1000 /tmp/f; chroot / true; linux32 true").await?;
    let plain = client.idle().await?.id;
    client.shell(&plain, "touch /tmp/f; chown 1000:1000 /tmp/f; chroot / true").await?;
    Ok(())
}
