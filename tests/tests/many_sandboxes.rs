//! Many sandboxes at once: made by one call, forked from one, taken over by the next runtime.

#![allow(clippy::unwrap_used)]

mod node_process;
mod runtime_world;

use anyhow::{Context, Result, bail};
use node_process::start;
use proto::v1::exec_input::Input;
use proto::v1::exec_output::Output;
use proto::v1::made::Outcome;
use proto::v1::*;
use runtime_world::{Client, World, how};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use tonic::Streaming;

/// What came of each, by number.
async fn all_made(mut made: Streaming<Made>) -> Result<(Vec<Sandbox>, Vec<Failure>, u64)> {
    let (mut sandboxes, mut failures, mut numbers) = (Vec::new(), Vec::new(), BTreeSet::new());
    let mut frozen = 0;
    while let Some(one) = made.message().await? {
        assert!(numbers.insert(one.number), "{} came twice", one.number);
        frozen = one.frozen_us;
        match one.outcome.context("an outcome")? {
            Outcome::Sandbox(sandbox) => sandboxes.push(sandbox),
            Outcome::Failure(failure) => failures.push(failure),
        }
    }
    Ok((sandboxes, failures, frozen))
}

async fn create_many(
    client: &Client,
    count: u32,
    create: CreateRequest,
) -> Result<Streaming<Made>> {
    let create = Some(CreateRequest { environment: "env/busybox:test".into(), ..create });
    let request = CreateManyRequest { create, count };
    let made = client.inner.clone().create_many(request).await;
    Ok(made.map_err(proto::status::from_status)?.into_inner())
}

async fn fork(client: &Client, id: &str, count: u32) -> Result<(Vec<Sandbox>, Vec<Failure>, u64)> {
    let made = client.inner.clone().fork(ForkRequest { id: id.into(), count }).await;
    all_made(made.map_err(proto::status::from_status)?.into_inner()).await
}

async fn list(client: &Client, all: bool) -> Result<Vec<Sandbox>> {
    let list = ListRequest { all, ..ListRequest::default() };
    Ok(client.inner.clone().list(list).await?.into_inner().sandboxes)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_call_makes_many_and_answers_for_each() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let (made, failed, _) =
        all_made(create_many(&client, 20, CreateRequest::default()).await?).await?;
    assert_eq!((made.len(), failed.len()), (20, 0));
    let ids: BTreeSet<_> = made.iter().map(|sandbox| &sandbox.id).collect();
    assert_eq!(ids.len(), 20, "no id comes twice");
    for sandbox in &made {
        assert_eq!(sandbox.state(), State::Running);
    }
    // Asked for again with a key, and some more.
    let keyed = CreateRequest { idempotency_key: "batch".into(), ..CreateRequest::default() };
    let (first, ..) = all_made(create_many(&client, 5, keyed.clone()).await?).await?;
    let (again, ..) = all_made(create_many(&client, 7, keyed).await?).await?;
    let ids = |made: &[Sandbox]| made.iter().map(|made| made.id.clone()).collect::<BTreeSet<_>>();
    assert!(ids(&again).is_superset(&ids(&first)), "asking again finds the same ones");
    assert_eq!(list(&client, true).await?.len(), 27);
    // What is wrong with all is an error of the call.
    let bad = CreateRequest { argv: vec!["a\0".into()], ..CreateRequest::default() };
    assert!(create_many(&client, 2, bad).await.is_err());
    assert!(create_many(&client, 0, CreateRequest::default()).await.is_err());
    // What is found out while one is made is an answer of that one.
    let limits = Some(Limits { cpuset: "4000".into(), ..Limits::default() });
    let made = create_many(&client, 3, CreateRequest { limits, ..Default::default() }).await?;
    let (made, failed, _) = all_made(made).await?;
    assert_eq!((made.len(), failed.len()), (0, 3));
    assert!(failed.iter().all(|failed| failed.message.contains("4000")), "{failed:?}");
    assert_eq!(list(&client, false).await?.len(), 27);
    service.stop_all().await;
    service.close().await;
    assert!(world.processes().is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_leaves_leaves_nothing() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let mut made = create_many(&client, 200, CreateRequest::default()).await?;
    let first = made.message().await?.context("one")?.outcome;
    let Some(Outcome::Sandbox(first)) = first else { bail!("{first:?}") };
    drop(made);
    // What was on its way to the caller counts as the caller's; the others go.
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut before = usize::MAX;
    loop {
        let living = list(&client, false).await?;
        let made_now = list(&client, true).await?.len();
        if living.len() < 100 && made_now == living.len() && made_now == before {
            assert!(living.iter().any(|sandbox| sandbox.id == first.id), "the first was taken");
            break;
        }
        before = made_now;
        anyhow::ensure!(Instant::now() < deadline, "{} live, {made_now} known", living.len());
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    service.stop_all().await;
    service.close().await;
    assert!(world.processes().is_empty());
    assert_eq!(std::fs::read_dir(world.data().join("sandboxes/slots"))?.count(), 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forks_begin_with_the_same_files_and_go_apart() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let labels = [("job".to_owned(), "a".to_owned())].into();
    let env = vec!["OWN=1".to_owned()];
    let request = CreateRequest { labels, env, ..CreateRequest::default() };
    let id = client.create(request).await?.id;
    client
        .shell(
            &id,
            "echo mine > /root/file; rm /bin/vi; rm -r /home/ann; mkdir -m 700 /home/ann; \
             ln /root/file /root/link; ln -s /nowhere /root/symlink; chown 1000:1000 /root/file; \
             mkfifo /root/pipe; truncate -s 1G /root/sparse; chmod 1777 /; \
             sleep 1000 </dev/null >/dev/null 2>&1 &",
        )
        .await?;
    let (forks, failed, frozen) = fork(&client, &id, 3).await?;
    assert_eq!((forks.len(), failed.len()), (3, 0));
    assert!(frozen > 0);
    let look = "cat /root/file; stat -c '%u %h' /root/link; readlink /root/symlink; \
                test ! -e /bin/vi && test -p /root/pipe && stat -c %s /root/sparse; \
                ls /home/ann | wc -l; stat -c %a / /home/ann; echo $OWN";
    let expected = client.shell(&id, look).await?;
    assert!(
        expected.starts_with("mine\n1000 2\n/nowhere\n1073741824\n0\n1777\n700\n1\n"),
        "{expected}"
    );
    for fork in &forks {
        assert_eq!(client.shell(&fork.id, look).await?, expected);
        assert_eq!(fork.labels.get("job").map(String::as_str), Some("a"));
        assert!(
            !client.shell(&fork.id, "ps").await?.contains("sleep 1000"),
            "no process is copied"
        );
        client.shell(&fork.id, &format!("echo {} >> /root/file", fork.id)).await?;
    }
    for fork in &forks {
        assert_eq!(client.shell(&fork.id, "cat /root/link").await?, format!("mine\n{}\n", fork.id));
    }
    assert_eq!(client.shell(&id, "cat /root/file").await?, "mine\n", "the original goes on");
    // A fork of a fork, of one that sleeps, and none of one that has ended.
    client.inner.clone().pause(PauseRequest { id: forks[0].id.clone() }).await?;
    let (again, ..) = fork(&client, &forks[0].id, 1).await?;
    let both = client.shell(&again[0].id, "cat /root/file").await?;
    assert_eq!(both, format!("mine\n{}\n", forks[0].id));
    assert_eq!(client.get(&forks[0].id).await?.state(), State::Paused);
    client.stop(&id).await?;
    assert!(fork(&client, &id, 1).await.is_err());
    let copies = world.data().join("sandboxes/forks");
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::fs::read_dir(&copies)?.count() > 0 {
        anyhow::ensure!(Instant::now() < deadline, "a copy stays");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    service.stop_all().await;
    service.close().await;
    // What a fork was begun with is nobody's afterwards.
    assert!(world.processes().is_empty());
    assert_eq!(std::fs::read_dir(world.data().join("sandboxes/slots"))?.count(), 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_a_fork_had_is_clean_for_the_next() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    client.shell(&id, "echo secret > /root/secret").await?;
    let (forks, ..) = fork(&client, &id, 2).await?;
    for sandbox in forks.iter().map(|fork| &fork.id).chain([&id]) {
        client.stop(sandbox).await?;
    }
    for _ in 0..4 {
        let next = client.idle().await?.id;
        assert_eq!(client.shell(&next, "ls -A /root").await?, "");
    }
    // The same where each has a disk of its own.
    let limits = Some(Limits { writable_bytes: 32 << 20, ..Limits::default() });
    let with_disk = CreateRequest { limits, ..CreateRequest::default() };
    let id = client.create(with_disk.clone()).await?.id;
    client.shell(&id, "echo secret > /root/secret").await?;
    let (forks, failed, _) = fork(&client, &id, 1).await?;
    assert!(failed.is_empty(), "{failed:?}");
    assert_eq!(client.shell(&forks[0].id, "cat /root/secret").await?, "secret\n");
    let full =
        client.run(&forks[0].id, &["sh", "-c", "head -c 40m /dev/zero > /root/zeros"]).await?;
    assert_ne!(full.ended.exit_code, 0, "a fork has a disk of the same size");
    client.stop(&forks[0].id).await?;
    let next = client.create(with_disk).await?.id;
    assert_eq!(client.shell(&next, "ls -A /root").await?, "");
    Ok(())
}

/// Whoever ends sandboxes while they are made is told so or has them ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_that_meets_a_creation_ends_it_or_is_told() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    for round in 0..20u64 {
        let creator = client.clone();
        let creating = tokio::spawn(async move { creator.idle().await });
        tokio::time::sleep(Duration::from_millis(round)).await;
        for sandbox in list(&client, true).await? {
            let stopped = client.stop(&sandbox.id).await;
            let state = client.get(&sandbox.id).await?.state();
            assert!(stopped.is_err() || state == State::Gone, "{state:?}");
            let remove = RemoveRequest { id: sandbox.id.clone(), force: true };
            client.inner.clone().remove(remove).await?;
        }
        let _either = creating.await?;
    }
    for sandbox in list(&client, false).await? {
        client.stop(&sandbox.id).await?;
    }
    service.close().await;
    assert!(world.processes().is_empty());
    assert_eq!(std::fs::read_dir(world.data().join("sandboxes/slots"))?.count(), 0);
    Ok(())
}

/// Sandboxes that the next runtime takes over: 40, or as many as LAMELLA_ADOPTED says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_dies_loses_none_of_many() -> Result<()> {
    let count = std::env::var("LAMELLA_ADOPTED").map_or(Ok(40), |text| text.parse::<u32>())?;
    let world = World::new()?;
    let (node, client) = start(&world).await?;
    let (made, failed, _) =
        all_made(create_many(&client, count, CreateRequest::default()).await?).await?;
    assert!(failed.is_empty(), "{:?}", failed.first());
    // Every fifth has a command in flight that prints before and after.
    let mut commands = Vec::new();
    for sandbox in made.iter().step_by(5) {
        let line = "echo before; while test ! -e /go; do sleep 0.1; done; echo after; exit 9";
        let start = ExecStart {
            sandbox_id: sandbox.id.clone(),
            argv: ["sh", "-c", line].map(str::to_owned).to_vec(),
            background: true,
            ..ExecStart::default()
        };
        let input = ExecInput { input: Some(Input::Start(start)) };
        let mut outputs =
            client.inner.clone().exec(tokio_stream::iter([input])).await?.into_inner();
        while let Some(output) = outputs.message().await? {
            if let Some(Output::CommandId(id)) = output.output {
                commands.push((sandbox.id.clone(), id));
            }
        }
    }
    let paused = &made.last().context("one")?.id;
    client.inner.clone().pause(PauseRequest { id: paused.clone() }).await?;
    drop(node);
    let (node, client) = start(&world).await?;
    let living = list(&client, false).await?;
    assert_eq!(living.len(), made.len());
    let state = |id: &str| living.iter().find(|one| one.id == id).map(Sandbox::state);
    for sandbox in &made {
        let expected = if &sandbox.id == paused { State::Paused } else { State::Running };
        assert_eq!(state(&sandbox.id), Some(expected), "{}", sandbox.id);
    }
    for (sandbox, command) in &commands {
        client.shell(sandbox, "touch /go").await?;
        let wait = WaitCommandRequest { sandbox_id: sandbox.clone(), command_id: command.clone() };
        let ended = client.inner.clone().wait_command(wait).await?.into_inner();
        let ended_how = how(&ended.ended.context("an end")?.end);
        assert_eq!(ended_how, Some(end::How::Exited(9)));
        assert_eq!(ended.output_bytes, "before\nafter\n".len() as u64);
    }
    let fresh = client.idle().await?.id;
    assert!(made.iter().all(|sandbox| sandbox.id != fresh), "no id is used again");
    for sandbox in list(&client, false).await? {
        client.stop(&sandbox.id).await?;
    }
    assert!(world.processes().is_empty());
    drop(node);
    Ok(())
}

/// Kills while sandboxes are paused, woken, forked and packed: whatever lives can be used and stopped, and then
/// nothing is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_while_pausing_forking_and_packing_leak_nothing() -> Result<()> {
    let world = World::new()?;
    for round in 0..8u64 {
        let (node, client) = start(&world).await?;
        let id = client.idle().await?.id;
        client.shell(&id, "head -c 300000 /dev/urandom > /root/file").await?;
        let busy = tokio::spawn(async move {
            loop {
                let pause = PauseRequest { id: id.clone() };
                let paused = client.inner.clone().pause(pause).await;
                let forked = fork(&client, &id, 2).await;
                let pack =
                    PackDiffRequest { id: id.clone(), name: "x:y".into(), ..Default::default() };
                // The image daemon of these tests takes none; it is frozen and read all the same.
                let _packed = client.inner.clone().pack_diff(pack).await;
                let woken = client.inner.clone().resume(ResumeRequest { id: id.clone() }).await;
                if paused.is_err() || forked.is_err() || woken.is_err() {
                    return;
                }
            }
        });
        tokio::time::sleep(Duration::from_millis(23 * round + 3)).await;
        drop(node);
        busy.await?;
        let (node, client) = start(&world).await?;
        for sandbox in list(&client, true).await? {
            if matches!(sandbox.state(), State::Running | State::Paused) {
                assert_eq!(client.shell(&sandbox.id, "echo lives").await?, "lives\n");
            }
            let remove = RemoveRequest { id: sandbox.id, force: true };
            client.inner.clone().remove(remove).await?;
        }
        assert!(world.processes().is_empty(), "round {round}: {:?}", world.processes());
        let forks = std::fs::read_dir(world.data().join("sandboxes/forks"));
        assert_eq!(forks.map_or(0, Iterator::count), 0, "round {round}");
        drop(node);
    }
    let (_node, _client) = start(&world).await?;
    assert_eq!(std::fs::read_dir(world.data().join("sandboxes/slots"))?.count(), 0);
    Ok(())
}
