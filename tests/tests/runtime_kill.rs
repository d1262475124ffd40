//! `kill -9` of the runtime: living sandboxes are adopted, dead ones reported, nothing leaks.

#![allow(clippy::unwrap_used)]

mod node_process;
mod runtime_world;

use anyhow::Result;
use node_process::start;
use proto::v1::*;
use runtime_world::{World, how};
use std::process::Command;
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_living_sandbox_is_adopted_with_its_command_and_its_log() -> Result<()> {
    let world = World::new()?;
    let (node, client) = start(&world).await?;
    let idle = client.idle().await?.id;
    client.shell(&idle, "echo kept > /root/file").await?;
    let line = "echo before; while test ! -e /go; do sleep 0.05; done; echo after; exit 6";
    let argv = ["sh", "-c", line].map(str::to_owned).to_vec();
    let own = client.create(CreateRequest { argv, ..CreateRequest::default() }).await?;
    let paused = client.idle().await?.id;
    client.inner.clone().pause(PauseRequest { id: paused.clone() }).await?;
    drop(node);
    let (node, client) = start(&world).await?;
    assert_eq!(client.shell(&idle, "cat /root/file").await?, "kept\n");
    assert_eq!(client.get(&paused).await?.state(), State::Paused);
    assert_eq!(client.shell(&paused, "echo thawed").await?, "thawed\n");
    assert_eq!(client.get(&own.id).await?.state(), State::Running);
    client.shell(&own.id, "touch /go").await?;
    let ended = client.wait(&own.id).await?;
    assert_eq!(how(&ended.end), Some(end::How::Exited(6)));
    assert!(client.logs(&own.id).await?.0.ends_with("after\n"));
    client.stop(&idle).await?;
    client.stop(&paused).await?;
    drop(node);
    assert!(world.processes().is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_that_died_meanwhile_is_lost_and_its_things_are_cleared() -> Result<()> {
    let world = World::new()?;
    let (node, client) = start(&world).await?;
    let sandbox = client.idle().await?;
    drop(node);
    Command::new("kill").args(["-9", &sandbox.init_pid.to_string()]).status()?;
    let stat = format!("/proc/{}/stat", sandbox.init_pid);
    while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let (_node, client) = start(&world).await?;
    let found = client.get(&sandbox.id).await?;
    assert_eq!(found.state(), State::Lost);
    assert!(!found.reason.is_empty());
    assert_eq!(std::fs::read_dir(world.data().join("sandboxes/slots"))?.count(), 0);
    assert!(world.processes().is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_that_was_frozen_for_a_pack_goes_on() -> Result<()> {
    let world = World::new()?;
    let (node, client) = start(&world).await?;
    let id = client.idle().await?.id;
    drop(node);
    let frozen = world.groups().into_iter().map(|group| group.join("s0/cgroup.freeze"));
    let mut found = false;
    for file in frozen.filter(|file| file.exists()) {
        std::fs::write(file, "1")?;
        found = true;
    }
    anyhow::ensure!(found, "no group can be frozen");
    let (_node, client) = start(&world).await?;
    assert_eq!(client.shell(&id, "echo on").await?, "on\n");
    client.stop(&id).await?;
    Ok(())
}

/// Kills at many moments of creating and executing; after the next start everything is either a running
/// sandbox or gone, and when those are stopped nothing is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_at_any_moment_leak_nothing() -> Result<()> {
    let world = World::new()?;
    for round in 0..12u64 {
        let (node, client) = start(&world).await?;
        let busy = tokio::spawn(async move {
            loop {
                let Ok(sandbox) = client.idle().await else { return };
                let first = client.run(&sandbox.id, &["true"]).await;
                let second = client.run(&sandbox.id, &["sh", "-c", "sleep 100 & echo x"]).await;
                if first.is_err() || second.is_err() {
                    return;
                }
            }
        });
        tokio::time::sleep(Duration::from_millis(7 * round + 1)).await;
        drop(node);
        busy.await?;
        let (node, client) = start(&world).await?;
        let all = client
            .inner
            .clone()
            .list(ListRequest { all: true, ..Default::default() })
            .await?
            .into_inner();
        for sandbox in all.sandboxes {
            match sandbox.state() {
                State::Running => {
                    assert_eq!(client.shell(&sandbox.id, "echo lives").await?, "lives\n");
                    client.stop(&sandbox.id).await?;
                }
                State::Lost | State::Gone | State::Failed => {}
                other => panic!("{} is {other:?}", sandbox.id),
            }
            let remove = RemoveRequest { id: sandbox.id, force: false };
            client.inner.clone().remove(remove).await?;
        }
        assert!(world.processes().is_empty(), "round {round}: {:?}", world.processes());
        drop(node);
    }
    let (node, _client) = start(&world).await?;
    assert_eq!(std::fs::read_dir(world.data().join("sandboxes/slots"))?.count(), 0);
    let journals = std::fs::read_dir(world.data().join("sandboxes"))?.flatten();
    let journals = journals.filter(|entry| entry.path().extension().is_some());
    assert_eq!(journals.count(), 0);
    drop(node);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_zygote_is_replaced_and_its_commands_are_not_lost() -> Result<()> {
    let world = World::new()?;
    let (node, client) = start(&world).await?;
    let id = client.idle().await?.id;
    let waiting = client.clone();
    let sandbox = id.clone();
    let running = tokio::spawn(async move {
        let line = "touch /up; while test ! -e /go; do sleep 0.05; done; echo done; exit 8";
        waiting.run(&sandbox, &["sh", "-c", line]).await
    });
    client.shell(&id, "while test ! -e /up; do sleep 0.05; done").await?;
    for _ in 0..3 {
        Command::new("kill").args(["-9", &node.zygote()?.to_string()]).status()?;
        // The first request may still meet the dead one.
        let deadline = Instant::now() + Duration::from_secs(30);
        while let Err(error) = client.shell(&id, "echo again").await {
            anyhow::ensure!(Instant::now() < deadline, "{error}");
        }
        let other = client.idle().await?.id;
        client.stop(&other).await?;
    }
    client.shell(&id, "touch /go").await?;
    let ran = running.await??;
    assert_eq!((ran.text().as_str(), ran.ended.exit_code), ("done\n", 8));
    client.stop(&id).await?;
    assert!(world.processes().is_empty());
    Ok(())
}
