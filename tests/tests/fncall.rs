//! Function calls: what goes in and out, their bounds, their ends, and who may be left.

#![allow(clippy::unwrap_used)]

mod fncall_world;
mod node_process;
mod runtime_world;

use anyhow::{Result, ensure};
use fncall_world::{call, request, shell, text};
use layer::ErrorKind;
use node_process::start;
use proto::v1::*;
use runtime_world::{World, how};
use std::time::{Duration, Instant};

fn file(path: &str, data: &[u8]) -> CallFile {
    CallFile { path: path.into(), data: data.to_vec(), ..CallFile::default() }
}

fn kind<T>(answer: Result<T>) -> ErrorKind {
    match answer {
        Ok(_) => panic!("it was accepted"),
        Err(error) => error.downcast_ref::<layer::Error>().unwrap().kind(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_takes_words_input_and_files_and_gives_output_and_files() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let script =
        CallFile { mode: 0o755, ..file("tool/run", b"#!/bin/sh\ntr a-z A-Z | tee big.txt\n") };
    let answer = call(
        &client,
        CallRequest {
            env: vec!["NAME=ann".into()],
            cwd: Some("/home/ann".into()),
            stdin: b"hello\n".repeat(40_000),
            files: vec![script, file("/data/in.txt", b"given")],
            outputs: ["*.txt", "/data/i?.txt"].map(str::to_owned).to_vec(),
            output_limit_bytes: 1 << 20,
            ..shell("tool/run; echo $NAME $IMAGE $(pwd) $(cat /data/in.txt) >&2; exit 3")
        },
    )
    .await?;
    assert_eq!(how(&answer.end), Some(end::How::Exited(3)), "{}", text(&answer.stderr));
    assert_eq!(answer.exit_code, 3);
    assert_eq!(answer.stdout, b"HELLO\n".repeat(40_000));
    assert_eq!(text(&answer.stderr), "ann busybox /home/ann given\n");
    let paths: Vec<_> = answer.files.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(paths, ["/home/ann/big.txt", "/data/in.txt"]);
    assert_eq!(answer.files[0].data, answer.stdout);
    assert_eq!(answer.files[1].data, b"given");
    let usage = answer.usage.unwrap();
    assert!(usage.wall_us > 0 && usage.cpu_us > 0 && usage.max_memory_bytes > 0, "{usage:?}");
    // A call is no sandbox.
    let all = ListRequest { all: true, ..ListRequest::default() };
    assert!(client.inner.clone().list(all).await?.into_inner().sandboxes.is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_end_of_a_call_is_told() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let bounded = |limits: Limits, line: &str| CallRequest { limits: Some(limits), ..shell(line) };
    let memory = Limits { memory_bytes: 32 << 20, ..Limits::default() };
    let disk = Limits { writable_bytes: 16 << 20, ..Limits::default() };
    let cases = [
        (shell("exit 7"), end::How::Exited(7), 7),
        (shell("kill -TERM $$"), end::How::Signal(15), 143),
        (request(&["missing"]), end::How::Exited(127), 127),
        (
            CallRequest { timeout_ms: 200, ..shell("echo x; sleep 100") },
            end::How::Timeout(true),
            124,
        ),
        (bounded(memory, "tail /dev/zero"), end::How::Oom(true), 137),
        (bounded(disk.clone(), "yes > /big"), end::How::DiskFull(true), 1),
        (bounded(disk, "cat /dev/zero > /big"), end::How::DiskFull(true), 1),
        // Without a disk of its own it is stopped at the usual bound.
        (shell("cat /dev/zero > /big"), end::How::DiskFull(true), 137),
    ];
    for (request, end, code) in cases {
        let words = request.argv.clone();
        let answer = call(&client, request).await?;
        assert_eq!((how(&answer.end), answer.exit_code), (Some(end), code), "{words:?} {answer:?}");
    }
    let few = Limits { pids: 10, ..Limits::default() };
    let bomb = bounded(few, "i=0; while [ $i -lt 50 ]; do sleep 9 & i=$((i+1)); done; echo all");
    let answer = call(&client, bomb).await?;
    ensure!(answer.exit_code != 0 || !text(&answer.stdout).contains("all"), "{answer:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_of_a_call_is_bounded_and_what_it_left_running_holds_nobody() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    let loud =
        CallRequest { output_limit_bytes: 1000, ..shell("head -c 5000 /dev/zero; echo x >&2") };
    let answer = call(&client, loud).await?;
    assert_eq!((answer.stdout.len(), answer.stdout_truncated_bytes), (1000, 4000));
    assert_eq!((text(&answer.stderr).as_str(), answer.stderr_truncated_bytes), ("x\n", 0));
    let endless = CallRequest { timeout_ms: 300, ..request(&["yes"]) };
    let answer = call(&client, endless).await?;
    assert_eq!(answer.stdout.len(), 1 << 20);
    let begin = Instant::now();
    let answer = call(&client, shell("yes & sleep 100 & echo here >&2")).await?;
    assert_eq!((answer.exit_code, text(&answer.stderr).as_str()), (0, "here\n"));
    assert!(begin.elapsed() < Duration::from_secs(30));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_files_of_a_call_are_refused() -> Result<()> {
    let world = World::new()?;
    std::os::unix::fs::symlink("/etc/passwd", world.image().join("link"))?;
    std::os::unix::fs::symlink("/", world.image().join("up"))?;
    let (_service, client) = world.client().await?;
    let with = |path: &str| CallRequest { files: vec![file(path, b"x")], ..request(&["true"]) };
    for path in
        ["../x", "/a/../../x", "", "/", "a\0b", "/link", "/tmp", "/proc/self/comm", "/dev/null"]
    {
        let refused = kind(call(&client, with(path)).await);
        let known = [ErrorKind::Invalid, ErrorKind::Denied, ErrorKind::Unavailable];
        assert!(known.contains(&refused) || path == "/dev/null", "{path:?}: {refused:?}");
    }
    // A link in the middle is one of the sandbox's own root.
    let answer = call(
        &client,
        CallRequest { argv: vec!["cat".into(), "/home/ann/y".into()], ..with("/up/home/ann/y") },
    )
    .await?;
    assert_eq!(text(&answer.stdout), "x");
    ensure!(!world.image().join("home/ann/y").exists(), "it was written into the layer");

    let line = "mkfifo /pipe; ln -s /etc/shadow /out; ln -s / /root/all; mkdir /dir; \
                truncate -s 15360G /sparse; echo fine > /fine; \
                cd /root; i=0; while [ $i -lt 30 ]; do mkdir -p d$i; echo $i > d$i/n; i=$((i+1)); done";
    let outputs = [
        "/pipe",
        "/out",
        "/dir",
        "/sparse",
        "/none",
        "/no*",
        "/dev/null",
        "/proc/1/environ",
        "/root/all/etc/passwd",
        "/fine",
        "/root/d*/n",
    ];
    let asked = CallRequest { outputs: outputs.map(str::to_owned).to_vec(), ..shell(line) };
    let answer = call(&client, asked).await?;
    assert_eq!(answer.exit_code, 0, "{}", text(&answer.stderr));
    let of = |path: &str| answer.files.iter().find(|file| file.path == path).unwrap();
    for path in &outputs[..8] {
        assert!(!of(path).error.is_empty() && of(path).data.is_empty(), "{path}: {:?}", of(path));
    }
    assert!(of("/sparse").error.contains("bytes"), "{}", of("/sparse").error);
    assert!(of("/out").error.contains("symbolic link"), "{}", of("/out").error);
    assert!(text(&of("/root/all/etc/passwd").data).starts_with("root:x:0:0:root:/root:/bin/sh"));
    assert_eq!((text(&of("/fine").data).as_str(), of("/fine").error.as_str()), ("fine\n", ""));
    assert_eq!(answer.files.len(), 10 + 30);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_calls_are_refused_and_create_names_the_right_one() -> Result<()> {
    let world = World::new()?;
    let (_service, client) = world.client().await?;
    assert_eq!(kind(call(&client, request(&[])).await), ErrorKind::Invalid);
    let huge = CallRequest { stdin: vec![0; (32 << 20) + 1], ..request(&["true"]) };
    assert_eq!(kind(call(&client, huge).await), ErrorKind::Invalid);
    let large = CallRequest { stdin: vec![b'a'; 20 << 20], ..request(&["wc", "-c"]) };
    assert_eq!(text(&call(&client, large).await?.stdout), "20971520\n");
    let create = CreateRequest { backend: Backend::Fncall.into(), ..CreateRequest::default() };
    let refused = client.create(create).await.unwrap_err();
    assert!(refused.to_string().contains("lamella call"), "{refused}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_calls_at_once_all_get_their_own_answer() -> Result<()> {
    let world = World::new()?;
    let (service, client) = world.client().await?;
    let mut calls = tokio::task::JoinSet::new();
    for number in 0..100 {
        let client = client.clone();
        calls.spawn(async move {
            let file = file("/in", format!("{number}").as_bytes());
            let request = CallRequest { files: vec![file], ..shell("cat /in; echo; ls /") };
            (number, call(&client, request).await)
        });
    }
    while let Some(answer) = calls.join_next().await {
        let (number, answer) = answer?;
        let answer = answer?;
        let printed = text(&answer.stdout);
        assert_eq!(printed.lines().next(), Some(number.to_string().as_str()), "{answer:?}");
    }
    service.close().await;
    assert!(world.processes().is_empty() && world.groups().is_empty());
    Ok(())
}

/// Containers that wait and calls that run belong to nobody after a kill: they are removed, never adopted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_runtime_leaves_no_call() -> Result<()> {
    let world = World::new()?;
    let (node, client) = start(&world).await?;
    let idle = client.idle().await?.id;
    call(&client, request(&["true"])).await?;
    let running = client.clone();
    let running = tokio::spawn(async move { call(&running, shell("sleep 1000")).await });
    while world.processes().len() < 3 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    drop(node);
    assert!(running.await?.is_err());
    let (_node, client) = start(&world).await?;
    let all = ListRequest { all: true, ..ListRequest::default() };
    let sandboxes = client.inner.clone().list(all).await?.into_inner().sandboxes;
    assert_eq!(sandboxes.iter().map(|sandbox| &sandbox.id).collect::<Vec<_>>(), [&idle]);
    assert_eq!(world.processes().len(), 1, "only the init of the sandbox");
    client.stop(&idle).await?;
    Ok(())
}
