//! Commands in a sandbox: streams, codes, users, terminals, time-outs. Case by case from public bug
//! reports of comparable systems.

#![allow(clippy::unwrap_used)]

mod runtime_world;

use anyhow::Result;
use proto::v1::exec_input::Input;
use proto::v1::*;
use runtime_world::{World, how};
use std::time::{Duration, Instant};

fn start(id: &str, argv: &[&str]) -> ExecStart {
    ExecStart {
        sandbox_id: id.into(),
        argv: argv.iter().map(|&word| word.into()).collect(),
        ..ExecStart::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn codes_and_streams_are_what_the_command_made_of_them() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let ran = client.run(&id, &["true"]).await?;
    assert_eq!((ran.ended.exit_code, how(&ran.ended.end)), (0, Some(end::How::Exited(0))));
    let ran = client.run(&id, &["sh", "-c", "echo out; echo err >&2; exit 7"]).await?;
    assert_eq!((ran.stdout.as_slice(), ran.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
    assert_eq!(ran.ended.exit_code, 7);
    let ran = client.run(&id, &["no-such-command"]).await?;
    assert_eq!(ran.ended.exit_code, 127);
    assert!(ran.ended.message.contains("no-such-command"), "{}", ran.ended.message);
    let ran = client.run(&id, &["/etc/passwd"]).await?;
    assert_eq!(ran.ended.exit_code, 126, "{}", ran.ended.message);
    let ran = client.run(&id, &["sh", "-c", "kill -TERM $$"]).await?;
    assert_eq!((ran.ended.exit_code, how(&ran.ended.end)), (143, Some(end::How::Signal(15))));
    // Very quick and very quiet ones, many times: no byte and no end may be lost.
    for round in 0..50 {
        let word = format!("{round}");
        let ran = client.run(&id, &["echo", "-n", &word]).await?;
        assert_eq!(ran.text(), word);
    }
    service.stop_all().await;
    service.close().await;
    assert!(world.groups().is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn input_reaches_the_command_and_its_end_too() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let with_input = ExecStart { stdin: true, ..start(&id, &["md5sum"]) };
    let block = vec![0x80u8; 1 << 20];
    let mut inputs: Vec<Input> = (0..8).map(|_| Input::Stdin(block.clone())).collect();
    inputs.push(Input::CloseStdin(true));
    let ran = client.exec_with(with_input, inputs).await?;
    let expected = std::process::Command::new("sh")
        .args(["-c", "head -c 8388608 /dev/zero | tr '\\0' '\\200' | md5sum"])
        .output()?;
    assert_eq!(ran.stdout, expected.stdout);
    // Without input the command reads the end at once.
    assert_eq!(client.run(&id, &["cat"]).await?.ended.exit_code, 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_background_child_that_holds_the_pipe_hangs_nobody() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let before = Instant::now();
    let ran = client.run(&id, &["sh", "-c", "echo first; sleep 300 & exit 3"]).await?;
    assert!(before.elapsed() < Duration::from_secs(60));
    assert_eq!((ran.text().as_str(), ran.ended.exit_code), ("first\n", 3));
    let count = client.shell(&id, "ps | grep -c '[s]leep 300'").await?;
    assert_eq!(count.trim(), "1", "the background child goes on");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timeout_takes_the_whole_tree_and_keeps_the_output() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let line = "echo before; setsid sleep 301 & (sleep 302 &) ; sleep 303";
    let timed = ExecStart { timeout_ms: 500, ..start(&id, &["sh", "-c", line]) };
    let ran = client.exec(timed).await?;
    assert_eq!(how(&ran.ended.end), Some(end::How::Timeout(true)));
    assert_eq!(ran.text(), "before\n");
    let left = client.shell(&id, "ps | grep '[s]leep 30' | wc -l").await?;
    assert_eq!(left.trim(), "0");
    // The sandbox itself is as usable as before.
    assert_eq!(client.shell(&id, "echo on").await?, "on\n");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_beyond_the_limit_is_counted() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let line = "head -c 3000000 /dev/zero";
    let limited = ExecStart { output_limit_bytes: 1000, ..start(&id, &["sh", "-c", line]) };
    let ran = client.exec(limited).await?;
    assert_eq!((ran.stdout.len(), ran.ended.truncated_bytes), (1000, 2_999_000));
    assert_eq!(ran.ended.exit_code, 0);
    // A line of 20 MB is bytes like others.
    let ran = client.run(&id, &["head", "-c", "20000000", "/dev/zero"]).await?;
    assert_eq!((ran.stdout.len(), ran.ended.truncated_bytes), (20_000_000, 0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn users_folders_and_variables_are_those_asked_for() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let asked = ExecStart {
        user: Some("ann".into()),
        cwd: Some("/tmp".into()),
        env: vec!["B=2".into()],
        ..start(&id, &["sh", "-c", "id -u; id -g; id -G; pwd; echo $IMAGE $B $HOME"])
    };
    let ran = client.exec(asked).await?;
    assert_eq!(ran.text(), "1000\n1000\n1000 77\n/tmp\nbusybox 2 /home/ann\n");
    let nobody = ExecStart { user: Some("nobody-here".into()), ..start(&id, &["true"]) };
    let ran = client.exec(nobody).await?;
    assert_eq!(ran.ended.exit_code, 126);
    assert!(ran.ended.message.contains("nobody-here"));
    let numbers = ExecStart { user: Some("5:6".into()), ..start(&id, &["id"]) };
    assert!(client.exec(numbers).await?.text().contains("uid=5 gid=6"));
    let nowhere = ExecStart { cwd: Some("/none".into()), ..start(&id, &["true"]) };
    assert_eq!(client.exec(nowhere).await?.ended.exit_code, 126);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_terminal_is_one_and_has_its_size() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let line = "tty; stty size; read word; echo got:$word; test -t 1 && echo is-a-tty";
    let asked = ExecStart { tty: true, rows: 33, cols: 101, ..start(&id, &["sh", "-c", line]) };
    let inputs = vec![Input::Stdin(b"hello\n".to_vec()), Input::CloseStdin(true)];
    let ran = client.exec_with(asked, inputs).await?;
    let text = ran.text();
    assert!(text.contains("/dev/pts/0"), "{text}");
    assert!(text.contains("33 101"), "{text}");
    assert!(text.contains("got:hello"), "{text}");
    assert!(text.contains("is-a-tty"), "{text}");
    assert_eq!(ran.ended.exit_code, 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_reaches_the_group() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let line = "trap 'echo caught; exit 9' USR1; echo ready; while :; do sleep 0.1; done";
    let (sender, receiver) = tokio::sync::mpsc::channel(4);
    let begin = Input::Start(start(&id, &["sh", "-c", line]));
    sender.send(ExecInput { input: Some(begin) }).await?;
    let inputs = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let mut outputs = client.inner.clone().exec(inputs).await?.into_inner();
    loop {
        let output = outputs.message().await?.and_then(|output| output.output);
        if let Some(exec_output::Output::Stdout(data)) = output {
            assert_eq!(data, b"ready\n");
            break;
        }
    }
    sender.send(ExecInput { input: Some(Input::Signal(10)) }).await?;
    let ran = runtime_world::collect(outputs).await?;
    assert_eq!((ran.text().as_str(), ran.ended.exit_code), ("caught\n", 9));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_arguments_arrive_whole() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let id = client.idle().await?.id;
    let long = "x".repeat(100_000);
    let ran = client.run(&id, &["echo", "-n", &long, &long, &long]).await?;
    assert_eq!(ran.stdout.len(), 300_002);
    Ok(())
}
