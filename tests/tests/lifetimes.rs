//! When sandboxes end or sleep by themselves, and what is left of those whose owner has gone. Times are short, and
//! nothing is expected before a time, only after it.

#![allow(clippy::unwrap_used)]

mod node_process;
mod runtime_world;

use anyhow::{Context, Result};
use node_process::start;
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::*;
use runtime_world::{Client, World, how, open_with};
use std::collections::HashMap;
use std::time::{Duration, Instant};

fn owned(name: &str, lease_ms: u64) -> CreateRequest {
    let owner = Some(Owner { name: name.into(), lease_ms });
    CreateRequest { owner, ..CreateRequest::default() }
}

async fn wait_state(client: &Client, id: &str, wanted: State) -> Result<Sandbox> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let sandbox = client.get(id).await?;
        if sandbox.state() == wanted {
            return Ok(sandbox);
        }
        anyhow::ensure!(Instant::now() < deadline, "{id} stays {:?}", sandbox.state());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A lease that will not run out during a test.
const LONG_MS: u64 = 3_600_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_ends_when_its_time_is_over_and_says_so() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let short = CreateRequest { ttl_ms: 300, ..CreateRequest::default() };
    let sandbox = client.create(short).await?;
    assert!(sandbox.expires_unix_ns > sandbox.created_unix_ns);
    let ended = client.wait(&sandbox.id).await?;
    assert_eq!(how(&ended.end), Some(end::How::Timeout(true)));
    assert!(ended.reason.contains("time to live"), "{}", ended.reason);
    // Also one that sleeps.
    let short = CreateRequest { ttl_ms: 1000, ..CreateRequest::default() };
    let id = client.create(short).await?.id;
    client.inner.clone().pause(PauseRequest { id: id.clone() }).await?;
    let ended = client.wait(&id).await?;
    assert_eq!(how(&ended.end), Some(end::How::Timeout(true)));
    service.close().await;
    assert!(world.processes().is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_that_nobody_uses_sleeps_and_wakes_for_the_next_request() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let idle = CreateRequest { idle_timeout_ms: 200, ..CreateRequest::default() };
    let id = client.create(idle).await?.id;
    wait_state(&client, &id, State::Paused).await?;
    assert_eq!(client.shell(&id, "echo awake").await?, "awake\n");
    wait_state(&client, &id, State::Paused).await?;
    // A command is use, however long it says nothing.
    assert_eq!(client.shell(&id, "sleep 1; echo through").await?, "through\n");
    wait_state(&client, &id, State::Paused).await?;
    // Files are read and written while it sleeps.
    let stat = StatFileRequest { id: id.clone(), path: "/bin/busybox".into(), follow: false };
    assert!(client.inner.clone().stat_file(stat).await?.into_inner().size_bytes > 0);
    assert_eq!(client.stop(&id).await?.state(), State::Gone);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_that_nobody_uses_ends_when_that_was_asked_for() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let idle_action = IdleAction::Kill.into();
    // What it does of its own is no use.
    let argv = ["sleep", "1000"].map(str::to_owned).to_vec();
    let idle = CreateRequest { idle_timeout_ms: 200, idle_action, argv, ..Default::default() };
    let id = client.create(idle).await?.id;
    let ended = client.wait(&id).await?;
    assert_eq!(how(&ended.end), Some(end::How::Timeout(true)));
    assert!(ended.reason.contains("nobody used it"), "{}", ended.reason);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_of_an_owner_who_is_gone_is_reclaimed() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let refused = client.create(owned("job", 0)).await.unwrap_err().to_string();
    assert!(refused.contains("lease"), "{refused}");
    let first = client.create(owned("job", LONG_MS)).await?;
    assert_eq!(first.owner, "job");
    // Later ones need not say it again, and one that sleeps belongs to it as well.
    let second = client.create(owned("job", 0)).await?;
    client.inner.clone().pause(PauseRequest { id: second.id.clone() }).await?;
    let other = client.create(owned("other", LONG_MS)).await?;
    let renew = RenewOwnerRequest { name: "job".into(), lease_ms: 2 * LONG_MS };
    let renewed = client.inner.clone().renew_owner(renew).await?.into_inner();
    assert_eq!(renewed.sandboxes, 2);
    let end = RenewOwnerRequest { name: "job".into(), lease_ms: 0 };
    client.inner.clone().renew_owner(end).await?;
    for id in [&first.id, &second.id] {
        let ended = client.wait(id).await?;
        assert_eq!(how(&ended.end), Some(end::How::Killed(true)));
        assert!(ended.reason.contains("job"), "{}", ended.reason);
    }
    assert_eq!(client.get(&other.id).await?.state(), State::Running);
    // An owner that crashed: nobody renews.
    let last = client.create(owned("brief", 300)).await?;
    assert_eq!(client.wait(&last.id).await?.state(), State::Gone);
    client.stop(&other.id).await?;
    service.close().await;
    assert!(world.processes().is_empty());
    assert!(world.groups().is_empty());
    assert_eq!(std::fs::read_dir(world.data().join("sandboxes/slots"))?.count(), 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadlines_leases_and_keys_survive_the_runtime() -> Result<()> {
    let world = World::new()?;
    let (node, client) = start(&world).await?;
    let bounded = CreateRequest { ttl_ms: 3000, ..CreateRequest::default() };
    let bounded = client.create(bounded).await?;
    let brief = client.create(owned("brief", 3000)).await?;
    let kept = CreateRequest { idempotency_key: "once".into(), ..owned("job", LONG_MS) };
    let kept_id = client.create(kept.clone()).await?.id;
    drop(node);
    let (_node, client) = start(&world).await?;
    let same = client.get(&bounded.id).await?.expires_unix_ns;
    // The clock of the machine may have been adjusted a little in between.
    assert!(same.abs_diff(bounded.expires_unix_ns) < 1_000_000_000, "the deadline is the same one");
    for (id, end) in [(&bounded.id, end::How::Timeout(true)), (&brief.id, end::How::Killed(true))] {
        let ended = client.wait(id).await?;
        assert_eq!(how(&ended.end), Some(end));
    }
    assert_eq!(client.get(&kept_id).await?.state(), State::Running);
    assert_eq!(client.create(kept).await?.id, kept_id, "the key is known");
    client.create(owned("job", 0)).await.context("the lease is known")?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_has_only_what_has_all_the_labels() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let labels = |pairs: &[(&str, &str)]| -> HashMap<String, String> {
        pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
    };
    for own in [labels(&[("job", "a"), ("step", "1")]), labels(&[("job", "a")]), labels(&[])] {
        client.create(CreateRequest { labels: own, ..CreateRequest::default() }).await?;
    }
    for (wanted, count) in [
        (labels(&[]), 3),
        (labels(&[("job", "a")]), 2),
        (labels(&[("job", "a"), ("step", "1")]), 1),
        (labels(&[("job", "b")]), 0),
    ] {
        let list = client.inner.clone().list(ListRequest { all: true, labels: wanted }).await?;
        assert_eq!(list.into_inner().sandboxes.len(), count);
    }
    Ok(())
}

/// Takes the swap of a runtime away when a test fails before it did that itself.
struct SwapOff<'a>(&'a World);

impl Drop for SwapOff<'_> {
    fn drop(&mut self) {
        let note =
            std::fs::read_to_string(self.0.data().join("sandboxes/zram")).unwrap_or_default();
        if let Some(Ok(number)) = note.split(' ').next().map(str::parse) {
            let _ = sys::swap::Zram::with_number(number).stop();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_sandbox_gives_its_memory_back_and_gets_it_again() -> Result<()> {
    const BYTES: u64 = 48_000_000;
    let world = World::new()?;
    let _off = SwapOff(&world);
    let with_swap = |config: &mut runtime::RuntimeConfig| config.zram_bytes = Some(256 << 20);
    let service = match open_with(&world.data(), &world.layers, with_swap).await {
        Ok(service) => service,
        Err(error) if !std::path::Path::new("/sys/class/zram-control").exists() => {
            eprintln!("not tested, no zram: {error}");
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    assert!(sys::swap::is_any());
    let channel = proto::connect::in_process(service.routes()).await?;
    let client = Client { inner: SandboxesClient::new(channel) };
    let id = client.idle().await?.id;
    let (holder, sandbox) = (client.clone(), id.clone());
    let line = format!(
        "x=$(head -c {BYTES} /dev/zero | tr '\\0' a); touch /up; \
         while test ! -e /go; do sleep 0.1; done; echo ${{#x}}"
    );
    let holding = tokio::spawn(async move { holder.run(&sandbox, &["sh", "-c", &line]).await });
    client.shell(&id, "while test ! -e /up; do sleep 0.1; done").await?;
    let before = client.get(&id).await?.memory_bytes;
    assert!(before > BYTES, "{before}");
    let pause = PauseRequest { id: id.clone() };
    let after = client.inner.clone().pause(pause.clone()).await?.into_inner().memory_bytes;
    eprintln!("memory of the sandbox: {before} bytes running, {after} paused");
    assert!(after < before / 4, "{before} bytes before, {after} after");
    // A runtime that starts now goes on with the same swap; here the pages just come back.
    client.shell(&id, "touch /go").await?;
    let ran = holding.await??;
    assert_eq!(ran.text(), format!("{BYTES}\n"));
    assert_eq!(ran.ended.exit_code, 0);
    service.stop_all().await;
    service.close().await;
    assert!(!world.data().join("sandboxes/zram").exists(), "the swap goes with the last sandbox");
    Ok(())
}
