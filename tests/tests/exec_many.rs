//! Many commands at once, commands that print without end, readers that do not read, limits that are reached,
//! terminals: what one command does never concerns another.

#![allow(clippy::unwrap_used)]

mod node_process;
mod runtime_world;

use anyhow::{Result, ensure};
use node_process::start as start_node;
use proto::v1::exec_input::Input;
use proto::v1::exec_output::Output;
use proto::v1::*;
use runtime_world::{Client, World, collect, how};
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

/// Starts a command; whoever drops the sender says no more.
async fn begin(
    client: &Client,
    start: ExecStart,
) -> Result<(tokio::sync::mpsc::Sender<ExecInput>, Streaming<ExecOutput>)> {
    let (sender, receiver) = tokio::sync::mpsc::channel(4);
    sender.send(ExecInput { input: Some(Input::Start(start)) }).await?;
    let outputs = client.inner.clone().exec(ReceiverStream::new(receiver)).await;
    Ok((sender, outputs.map_err(proto::status::from_status)?.into_inner()))
}

async fn say(sender: &tokio::sync::mpsc::Sender<ExecInput>, input: Input) -> Result<()> {
    Ok(sender.send(ExecInput { input: Some(input) }).await?)
}

/// Reads until what was printed contains the text.
async fn until(outputs: &mut Streaming<ExecOutput>, text: &str) -> Result<String> {
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains(text) {
        match outputs.message().await?.and_then(|output| output.output) {
            Some(Output::Stdout(data) | Output::Stderr(data)) => seen.extend(data),
            Some(Output::Ended(ended)) => {
                anyhow::bail!("{ended:?} after {}", String::from_utf8_lossy(&seen))
            }
            Some(_) => {}
            None => anyhow::bail!("no more output"),
        }
    }
    Ok(String::from_utf8_lossy(&seen).into_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_commands_run_at_once_beside_readers_that_do_not_read() -> Result<()> {
    let world = World::new()?;
    let (node, client) = start_node(&world).await?;
    let id = client.idle().await?.id;
    client.shell(&id, "true").await?;
    let (resident, descriptors) = (node.resident_bytes()?, node.descriptors()?);
    // Each on the same connection as all others.
    let mut asleep = Vec::new();
    for _ in 0..4 {
        asleep.push(begin(&client, command(&id, "yes")).await?);
    }
    let mut running = tokio::task::JoinSet::new();
    for number in 0..200 {
        let (client, id) = (client.clone(), id.clone());
        running.spawn(async move {
            let line = format!("read a; echo {number} $a; head -c 100000 /dev/zero; exit 3");
            let start = ExecStart { stdin: true, ..command(&id, &line) };
            let (sender, outputs) = begin(&client, start).await?;
            // All of them run before the first of them ends.
            tokio::time::sleep(Duration::from_millis(300)).await;
            say(&sender, Input::Stdin(b"go\n".to_vec())).await?;
            let ran = collect(outputs).await?;
            let expected = format!("{number} go\n").into_bytes();
            ensure!(ran.stdout.starts_with(&expected), "{number}");
            ensure!(ran.stdout.len() == expected.len() + 100_000, "{}", ran.stdout.len());
            ensure!(ran.ended.exit_code == 3);
            anyhow::Ok(())
        });
    }
    let mut most = 0;
    while let Some(ended) = running.join_next().await {
        ended??;
        most = most.max(node.descriptors()?);
    }
    assert!(most < descriptors + 200 * 8, "{most} descriptors");
    let grown = node.resident_bytes()?.saturating_sub(resident);
    assert!(grown < 256 << 20, "{grown} bytes");
    drop(asleep);
    // What they took is given back.
    let deadline = Instant::now() + Duration::from_secs(20);
    while node.descriptors()? > descriptors + 8 {
        ensure!(Instant::now() < deadline, "{} descriptors stay", node.descriptors()?);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    client.stop(&id).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_that_prints_without_end_fills_nothing_and_slows_nobody() -> Result<()> {
    let world = World::new()?;
    let (node, client) = start_node(&world).await?;
    let id = client.idle().await?.id;
    let quiet = client.idle().await?.id;
    let mut noisy = Vec::new();
    for _ in 0..8 {
        let start = ExecStart { background: true, ..command(&id, "yes") };
        noisy.push(begin(&client, start).await?);
    }
    let output = world.data().join("sandboxes/output");
    let resident = node.resident_bytes()?;
    for _ in 0..30 {
        assert_eq!(client.shell(&quiet, "echo here").await?, "here\n");
        // Files may go while they are counted.
        let sizes = std::fs::read_dir(&output)?.flatten().flat_map(|entry| entry.metadata());
        let bytes: u64 = sizes.map(|metadata| metadata.len()).sum();
        assert!(bytes < 160 << 20, "{bytes} bytes of output");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(node.resident_bytes()?.saturating_sub(resident) < 128 << 20);
    client.stop(&id).await?;
    client.stop(&quiet).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_line_of_100_mb_and_split_characters_pass_unchanged() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let (_sender, mut outputs) =
        begin(&client, command(&id, "head -c 100000000 /dev/zero | tr '\\0' x")).await?;
    let mut bytes = 0;
    let ended = loop {
        match outputs.message().await?.and_then(|output| output.output) {
            Some(Output::Stdout(data)) => {
                assert!(data.iter().all(|byte| *byte == b'x'));
                bytes += data.len();
            }
            Some(Output::Ended(ended)) => break ended,
            Some(_) => {}
            None => anyhow::bail!("no end"),
        }
    };
    assert_eq!((bytes, ended.exit_code, ended.truncated_bytes), (100_000_000, 0, 0));
    // One byte before characters of two, so that borders of pieces split them.
    let text = format!("x{}", "é".repeat(200_000));
    let start = ExecStart { stdin: true, ..command(&id, "cat") };
    let inputs = vec![Input::Stdin(text.clone().into_bytes()), Input::CloseStdin(true)];
    assert_eq!(client.exec_with(start, inputs).await?.stdout, text.into_bytes());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_terminal_ends_its_input_keeps_its_output_and_changes_its_size() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let terminal = |line: &str| ExecStart { tty: true, rows: 24, cols: 80, ..command(&id, line) };
    // The end of input, after a whole line and after half of one; what comes later is not cut.
    for (typed, lines) in [("whole\n", 1), ("half", 0)] {
        let inputs = vec![Input::Stdin(typed.into()), Input::CloseStdin(true)];
        let start = terminal("stty -echo; cat | wc -l; seq 1 5000; exit 4");
        let ran = client.exec_with(start, inputs).await?;
        let text = ran.text();
        assert!(text.contains(&format!("{lines}\r\n1\r\n")), "{text}");
        assert!(text.ends_with("5000\r\n"), "{}", &text[text.len() - 40..]);
        assert_eq!(ran.ended.exit_code, 4);
    }
    // Quick ones, many times: not a byte is missing.
    for _ in 0..20 {
        let ran = client.exec(terminal("seq 1 3000")).await?;
        assert!(ran.text().ends_with("2999\r\n3000\r\n"), "{}", ran.stdout.len());
    }
    let line = "trap 'stty size' WINCH; echo ready; while :; do read a && exit 9; done";
    let (sender, mut outputs) = begin(&client, terminal(line)).await?;
    until(&mut outputs, "ready").await?;
    say(&sender, Input::Resize(Resize { rows: 50, cols: 132 })).await?;
    until(&mut outputs, "50 132").await?;
    // Ctrl-C is the terminal's own doing.
    say(&sender, Input::Stdin(vec![3])).await?;
    let ran = collect(outputs).await?;
    assert_eq!(how(&ran.ended.end), Some(end::How::Signal(2)), "{}", ran.text());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_at_its_limit_of_processes_still_runs_a_command_or_says_why_not() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let limits = Limits { pids: 12, ..Limits::default() };
    let sandbox =
        client.create(CreateRequest { limits: Some(limits), ..CreateRequest::default() }).await?;
    let id = sandbox.id;
    let bomb = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 100 & done; wait";
    let _ends_on_its_own = client.exec(ExecStart { background: true, ..command(&id, bomb) }).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let start = ExecStart { argv: vec!["true".into()], ..command(&id, "") };
    match client.exec(start).await {
        Ok(ran) => assert_eq!(ran.ended.exit_code, 0, "{:?}", ran.ended),
        Err(error) => assert!(format!("{error:#}").contains("limit of processes"), "{error:#}"),
    }
    // What it cannot do is said by the command, which ends.
    let ran = client.run(&id, &["sh", "-c", "ls | cat; exit 5"]).await;
    if let Ok(ran) = ran {
        assert!(ran.ended.exit_code != 0);
    }
    client.stop(&id).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_that_fails_on_a_full_disk_ends_as_disk_full_and_an_upload_leaves_nothing()
-> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let limits = Limits { writable_bytes: 32 << 20, ..Limits::default() };
    let sandbox = CreateRequest { limits: Some(limits), ..CreateRequest::default() };
    let id = client.create(sandbox).await?.id;
    let ran = client.run(&id, &["sh", "-c", "echo kept > /root/kept; exit 3"]).await?;
    assert_eq!(how(&ran.ended.end), Some(end::How::Exited(3)));
    let line = "head -c 100000000 /dev/zero > /root/full; exit 6";
    let ran = client.run(&id, &["sh", "-c", line]).await?;
    assert_eq!(how(&ran.ended.end), Some(end::How::DiskFull(true)), "{:?}", ran.ended);
    assert_eq!(ran.ended.exit_code, 6);
    // Commands still run and say what they have to say.
    let ran = client.run(&id, &["sh", "-c", "echo still here"]).await?;
    assert_eq!((ran.text().as_str(), ran.ended.exit_code), ("still here\n", 0));
    client.shell(&id, "rm -f /root/full").await?;
    let start = WriteFileStart {
        id: id.clone(),
        path: "/root/kept".into(),
        mode: 0o644,
        ..WriteFileStart::default()
    };
    let first = WriteFilePart { part: Some(write_file_part::Part::Start(start)) };
    let block = WriteFilePart { part: Some(write_file_part::Part::Data(vec![7; 1 << 20])) };
    let parts: Vec<_> = std::iter::once(first).chain(vec![block; 100]).collect();
    let refused = client.inner.clone().write_file(tokio_stream::iter(parts)).await;
    let refused = proto::status::from_status(refused.unwrap_err());
    assert_eq!(refused.kind(), layer::ErrorKind::NoSpace, "{}", refused.chain());
    assert_eq!(client.shell(&id, "cat /root/kept; ls -A /root").await?, "kept\nkept\n");
    client.stop(&id).await?;
    service.close().await;
    Ok(())
}
