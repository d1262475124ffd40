//! Commands that nobody waits for: ids, attaching, tailing, signals by id, ends; and every command across the
//! death of the runtime.

#![allow(clippy::unwrap_used)]

mod node_process;
mod runtime_world;

use anyhow::{Context, Result, ensure};
use node_process::start as start_node;
use proto::v1::exec_input::Input;
use proto::v1::exec_output::Output;
use proto::v1::*;
use runtime_world::{Client, Ran, World, collect, how};
use std::time::{Duration, Instant};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

fn command(id: &str, line: &str) -> ExecStart {
    ExecStart {
        sandbox_id: id.into(),
        argv: ["sh", "-c", line].map(str::to_owned).to_vec(),
        ..ExecStart::default()
    }
}

/// Starts in the background; the id of the command.
async fn background(client: &Client, start: ExecStart) -> Result<String> {
    let start = ExecInput { input: Some(Input::Start(ExecStart { background: true, ..start })) };
    let outputs = client.inner.clone().exec(tokio_stream::iter([start])).await;
    let mut outputs = outputs.map_err(proto::status::from_status)?.into_inner();
    let mut id = None;
    while let Some(output) = outputs.message().await? {
        match output.output {
            Some(Output::CommandId(given)) => id = Some(given),
            Some(Output::StartedPid(_)) => {}
            other => anyhow::bail!("{other:?}"),
        }
    }
    id.context("an id")
}

fn attach_start(id: &str, command: &str) -> AttachStart {
    AttachStart {
        sandbox_id: id.into(),
        command_id: command.into(),
        follow: true,
        ..AttachStart::default()
    }
}

async fn attach_with(
    client: &Client,
    start: AttachStart,
    inputs: Vec<Input>,
) -> Result<Streaming<ExecOutput>> {
    let all = std::iter::once(Input::Attach(start)).chain(inputs);
    let all: Vec<_> = all.map(|input| ExecInput { input: Some(input) }).collect();
    let outputs = client.inner.clone().attach(tokio_stream::iter(all)).await;
    Ok(outputs.map_err(proto::status::from_status)?.into_inner())
}

async fn attach(client: &Client, id: &str, command: &str) -> Result<Ran> {
    collect(attach_with(client, attach_start(id, command), Vec::new()).await?).await
}

async fn list(client: &Client, id: &str) -> Result<Vec<Command>> {
    let request = ListCommandsRequest { sandbox_id: id.into() };
    Ok(client.inner.clone().list_commands(request).await?.into_inner().commands)
}

async fn signal(client: &Client, id: &str, command: &str, signal: i32) -> Result<()> {
    let request = SignalCommandRequest {
        sandbox_id: id.into(),
        command_id: command.into(),
        signal,
        ..SignalCommandRequest::default()
    };
    client.inner.clone().signal_command(request).await.map_err(proto::status::from_status)?;
    Ok(())
}

async fn wait(client: &Client, id: &str, command: &str) -> Result<Command> {
    let request = WaitCommandRequest { sandbox_id: id.into(), command_id: command.into() };
    let answer = client.inner.clone().wait_command(request).await;
    Ok(answer.map_err(proto::status::from_status)?.into_inner())
}

fn end_of(command: &Command) -> Option<end::How> {
    command.ended.as_ref().and_then(|ended| how(&ended.end))
}

/// Waits until a line of the sandbox's shell succeeds.
async fn until(client: &Client, id: &str, line: &str) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    while client.run(id, &["sh", "-c", line]).await?.ended.exit_code != 0 {
        ensure!(Instant::now() < deadline, "{line} does not come true");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_in_the_background_is_found_again_by_its_id() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let line = "echo one; echo oh >&2; while test ! -e /go; do sleep 0.02; done; echo two; exit 4";
    let first = background(&client, command(&id, line)).await?;
    let known = list(&client, &id).await?;
    assert_eq!((known.len(), known[0].id.as_str(), known[0].background), (1, &*first, true));
    assert_eq!((known[0].argv[0].as_str(), known[0].ended.is_none()), ("sh", true));
    // Two who follow from the beginning, one from an offset, one who only looks.
    let following = [attach(&client, &id, &first), attach(&client, &id, &first[..6])];
    let later = AttachStart { offset: 7, ..attach_start(&id, &first) };
    let later = async { collect(attach_with(&client, later, Vec::new()).await?).await };
    let looked = async {
        let look = AttachStart { follow: false, ..attach_start(&id, &first) };
        let mut seen = 0;
        while seen < 7 {
            let mut outputs = attach_with(&client, look.clone(), Vec::new()).await?;
            seen = 0;
            while let Some(output) = outputs.message().await? {
                match output.output {
                    Some(Output::Stdout(data) | Output::Stderr(data)) => seen += data.len(),
                    Some(Output::Ended(ended)) => anyhow::bail!("{ended:?}"),
                    _ => {}
                }
            }
        }
        client.shell(&id, "touch /go").await
    };
    let [one, other] = following;
    let (one, other, later, looked) = tokio::join!(one, other, later, looked);
    looked?;
    for ran in [one?, other?] {
        assert_eq!(ran.text(), "one\ntwo\n");
        assert_eq!((ran.stderr.as_slice(), ran.ended.exit_code), (&b"oh\n"[..], 4));
    }
    assert_eq!(later?.text(), "two\n");
    // After its end it is remembered, with its output.
    assert_eq!(end_of(&wait(&client, &id, &first).await?), Some(end::How::Exited(4)));
    assert_eq!(attach(&client, &id, &first).await?.text(), "one\ntwo\n");
    let tail = AttachStart { tail_bytes: Some(3), ..attach_start(&id, &first) };
    let tail = collect(attach_with(&client, tail, Vec::new()).await?).await?;
    assert_eq!(tail.text(), "wo\n");
    assert!(signal(&client, &id, &first, 9).await.is_err(), "it has ended");
    assert!(wait(&client, &id, "none").await.is_err());
    // One that is not there ends at once, and says why.
    let missing = ExecStart { argv: vec!["nonsense".into()], ..command(&id, "") };
    let missing = background(&client, missing).await?;
    let ended = wait(&client, &id, &missing).await?.ended.unwrap_or_default();
    assert_eq!(ended.exit_code, 127);
    assert!(ended.message.contains("nonsense"), "{}", ended.message);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_by_id_reaches_every_process_and_no_other() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let line = |name: &str| {
        format!("setsid sleep 30{name} & (setsid sh -c 'sleep 31{name}; true' &); sleep 32{name}")
    };
    let first = background(&client, command(&id, &line("1"))).await?;
    let second = background(&client, command(&id, &line("2"))).await?;
    let count = |name: &'static str| format!("ps -o args | grep -c '^sleep 3[012]{name}$'");
    until(&client, &id, &format!("test $({}) = 3", count("1"))).await?;
    until(&client, &id, &format!("test $({}) = 3", count("2"))).await?;
    signal(&client, &id, &first, 15).await?;
    assert_eq!(end_of(&wait(&client, &id, &first).await?), Some(end::How::Signal(15)));
    until(&client, &id, &format!("test $({}) = 0", count("1"))).await?;
    assert_eq!(client.run(&id, &["sh", "-c", &count("2")]).await?.text().trim(), "3");
    signal(&client, &id, &second, 9).await?;
    assert_eq!(end_of(&wait(&client, &id, &second).await?), Some(end::How::Signal(9)));
    until(&client, &id, &format!("test $({}) = 0", count("2"))).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn input_reaches_a_command_in_the_background_through_whoever_is_attached() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let start = ExecStart { stdin: true, ..command(&id, "read a; echo got $a; cat; exit 5") };
    let command = background(&client, start).await?;
    let first = vec![Input::Stdin(b"one\n".to_vec())];
    let mut outputs = attach_with(&client, attach_start(&id, &command), first).await?;
    loop {
        match outputs.message().await?.and_then(|output| output.output) {
            Some(Output::Stdout(data)) => break assert_eq!(data, b"got one\n"),
            Some(_) => {}
            None => anyhow::bail!("no output"),
        }
    }
    // Its leaving ends nothing.
    drop(outputs);
    let second = vec![Input::Stdin(b"two\n".to_vec()), Input::CloseStdin(true)];
    let ran = collect(attach_with(&client, attach_start(&id, &command), second).await?).await?;
    assert_eq!((ran.text().as_str(), ran.ended.exit_code), ("got one\ntwo\n", 5));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_kept_is_bounded_and_ended_commands_are_too() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let start =
        ExecStart { kept_bytes: 1 << 20, ..command(&id, "head -c 20000000 /dev/zero; echo last") };
    let first = background(&client, start).await?;
    let known = wait(&client, &id, &first).await?;
    assert_eq!(known.output_bytes, 20_000_005);
    assert!(known.first_kept_byte > 18_000_000, "{}", known.first_kept_byte);
    let mut outputs = attach_with(&client, attach_start(&id, &first), Vec::new()).await?;
    let (mut dropped, mut kept) = (0, Vec::new());
    while let Some(output) = outputs.message().await? {
        match output.output {
            Some(Output::DroppedBytes(bytes)) => dropped += bytes,
            Some(Output::Stdout(data)) => kept.extend(data),
            _ => {}
        }
    }
    assert_eq!(dropped + kept.len() as u64, 20_000_005);
    assert!(kept.ends_with(b"last\n"));
    for _ in 0..70 {
        let id_of = background(&client, command(&id, "echo x")).await?;
        wait(&client, &id, &id_of).await?;
    }
    let known = list(&client, &id).await?;
    assert!(known.len() <= 64, "{}", known.len());
    assert!(wait(&client, &id, &first).await.is_err(), "the oldest is forgotten");
    // Commands in the foreground are nobody's business afterwards.
    client.shell(&id, "echo y").await?;
    assert!(list(&client, &id).await?.iter().all(|command| command.background));
    client.stop(&id).await?;
    let output = world.data().join("sandboxes/output");
    let deadline = Instant::now() + Duration::from_secs(20);
    while std::fs::read_dir(&output)?.count() > 0 {
        ensure!(Instant::now() < deadline, "output stays behind");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn children_that_outlive_their_command_can_go_on_printing() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    // Much more than a pipe holds.
    let line = "(while test ! -e /go; do sleep 0.02; done; head -c 1000000 /dev/zero; echo last; \
                touch /done) & echo first";
    let ran = client.run(&id, &["sh", "-c", line]).await?;
    assert_eq!((ran.text().as_str(), ran.ended.exit_code), ("first\n", 0));
    let kept = background(&client, command(&id, &line.replace("/done", "/done2"))).await?;
    assert_eq!(end_of(&wait(&client, &id, &kept).await?), Some(end::How::Exited(0)));
    client.shell(&id, "touch /go").await?;
    until(&client, &id, "test -e /done && test -e /done2").await?;
    let deadline = Instant::now() + Duration::from_secs(20);
    while !attach(&client, &id, &kept).await?.stdout.ends_with(b"last\n") {
        ensure!(Instant::now() < deadline, "what the child printed is not kept");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_in_flight_outlive_the_runtime_with_their_output_and_their_end() -> Result<()> {
    let world = World::new()?;
    let (node, client) = start_node(&world).await?;
    let id = client.idle().await?.id;
    let line = "echo before; while test ! -e /go; do sleep 0.02; done; echo after; exit 6";
    let kept = background(&client, command(&id, line)).await?;
    let timed = ExecStart { timeout_ms: 8_000, ..command(&id, "echo in time; sleep 1000") };
    let timed = background(&client, timed).await?;
    let gone = background(&client, command(&id, "echo started; sleep 0.2; echo ended; exit 7"));
    let gone = gone.await?;
    let killed = background(&client, command(&id, "echo x; kill -9 $$")).await?;
    wait(&client, &id, &killed).await?;
    // One in the foreground; its client loses the node and comes back.
    let (sender, receiver) = tokio::sync::mpsc::channel(4);
    sender.send(ExecInput { input: Some(Input::Start(command(&id, line))) }).await?;
    let mut outputs = client.inner.clone().exec(ReceiverStream::new(receiver)).await?.into_inner();
    let (mut fore, mut seen) = (String::new(), Vec::new());
    while seen != b"before\n" {
        match outputs.message().await?.and_then(|output| output.output) {
            Some(Output::CommandId(given)) => fore = given,
            Some(Output::Stdout(data)) => seen.extend(data),
            Some(_) => {}
            None => anyhow::bail!("no output"),
        }
    }
    // One with a terminal.
    let line = "stty -echo; echo ready; read a; echo got $a; exit 8";
    let terminal = ExecStart { tty: true, rows: 30, cols: 90, ..command(&id, line) };
    let terminal = background(&client, terminal).await?;
    until(&client, &id, "ps | grep -q '[r]ead a'").await?;
    drop(node);
    assert!(outputs.message().await.is_err() || outputs.message().await?.is_none());
    // This one ends while there is no runtime.
    tokio::time::sleep(Duration::from_millis(400)).await;

    let (node, client) = start_node(&world).await?;
    let ran = attach(&client, &id, &gone).await?;
    assert_eq!((ran.text().as_str(), ran.ended.exit_code), ("started\nended\n", 7));
    let ran = attach(&client, &id, &killed).await?;
    assert_eq!((ran.text().as_str(), ran.ended.exit_code), ("x\n", 137));
    let input = vec![Input::Stdin(b"typed\n".to_vec())];
    let ran = attach_with(&client, attach_start(&id, &terminal), input).await?;
    let ran = collect(ran).await?;
    assert!(ran.text().contains("got typed"), "{}", ran.text());
    assert_eq!(ran.ended.exit_code, 8);
    let rest = AttachStart { offset: seen.len() as u64, ..attach_start(&id, &fore) };
    let rest = attach_with(&client, rest, Vec::new()).await?;
    client.shell(&id, "touch /go").await?;
    let ran = collect(rest).await?;
    assert_eq!((ran.text().as_str(), ran.ended.exit_code), ("after\n", 6));
    let ran = attach(&client, &id, &kept).await?;
    assert_eq!((ran.text().as_str(), ran.ended.exit_code), ("before\nafter\n", 6));
    let ran = attach(&client, &id, &timed).await?;
    assert_eq!(how(&ran.ended.end), Some(end::How::Timeout(true)));
    assert_eq!(ran.text(), "in time\n");
    // Nothing of it is in the way of what comes.
    assert_eq!(client.shell(&id, "echo on").await?, "on\n");
    client.stop(&id).await?;
    drop(node);
    assert!(world.processes().is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_that_nobody_saw_is_lost_and_says_so() -> Result<()> {
    let world = World::new()?;
    let (node, client) = start_node(&world).await?;
    let id = client.idle().await?.id;
    let command = background(&client, command(&id, "echo started; sleep 1; exit 3")).await?;
    let init = client.get(&id).await?.init_pid;
    let others: Vec<u32> = world.processes().into_iter().filter(|pid| *pid != init).collect();
    // The zygote and the runtime die together.
    node_process::kill(node.zygote()?);
    drop(node);
    let is_there = |pid: &u32| std::path::Path::new(&format!("/proc/{pid}")).exists();
    let deadline = Instant::now() + Duration::from_secs(10);
    while others.iter().any(is_there) && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Where the host's own init reaps nothing, the kernel still tells.
    let is_reaped = !others.iter().any(is_there);
    let (_node, client) = start_node(&world).await?;
    let known = wait(&client, &id, &command).await?;
    match end_of(&known) {
        Some(end::How::Lost(reason)) => assert!(is_reaped && !reason.is_empty(), "{reason}"),
        Some(end::How::Exited(3)) => assert!(!is_reaped),
        other => panic!("{other:?}"),
    }
    client.stop(&id).await?;
    Ok(())
}
