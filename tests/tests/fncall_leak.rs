//! Nothing of a call reaches the next one, however it ended and whatever it left.

#![allow(clippy::unwrap_used)]

mod fncall_world;
mod runtime_world;

use anyhow::{Result, ensure};
use fncall_world::{call, shell, text, world};
use proto::v1::*;
use runtime_world::{Client, World, how};
use std::collections::HashSet;
use std::time::Duration;

/// Prints where the users of a call begin on the host, to the error stream: each slot has a range of its own for good.
const SLOT: &str = "awk '{print $2}' /proc/self/uid_map >&2";

/// Runs the leaver or the finder, with a line behind it.
async fn run(client: &Client, limits: &Limits, what: &str) -> Result<(CallResponse, String)> {
    let request = CallRequest {
        limits: Some(limits.clone()),
        timeout_ms: 1000,
        ..shell(&format!("{SLOT}; {what}"))
    };
    let answer = call(client, request).await?;
    let slot = text(&answer.stderr).lines().next().unwrap_or_default().to_owned();
    Ok((answer, slot))
}

/// Leaves and looks in turns, until what looks has been in slots of what left often enough.
async fn rounds(
    world: &World,
    limits: Limits,
    leave: &str,
    expected: impl Fn(&Option<end::How>) -> bool,
) -> Result<()> {
    const SAME: usize = 4;
    let (_service, client) = world.client().await?;
    let (first, _) = run(&client, &limits, "leaks look").await?;
    ensure!(first.exit_code == 0, "{first:?}");
    let clean = text(&first.stdout);
    ensure!(!clean.contains("SECRET") && clean.contains("pid"), "{clean}");
    let (mut soiled, mut same) = (HashSet::new(), 0);
    for round in 0..30 {
        let (left, slot) = run(&client, &limits, leave).await?;
        let end = how(&left.end);
        ensure!(expected(&end), "{end:?} {} {}", text(&left.stdout), text(&left.stderr));
        ensure!(text(&left.stdout).contains("left\n"), "{}", text(&left.stdout));
        ensure!(text(&left.stdout).contains("key refused"), "{}", text(&left.stdout));
        ensure!(slot.parse::<u32>()? > 0, "{slot:?}");
        soiled.insert(slot);
        // The slot is cleaned beside the calls.
        tokio::time::sleep(Duration::from_millis(30)).await;
        for _ in 0..2 {
            let (looked, slot) = run(&client, &limits, "leaks look").await?;
            similar_asserts(&clean, &text(&looked.stdout), round)?;
            same += usize::from(soiled.contains(&slot));
        }
        if same >= SAME {
            return Ok(());
        }
    }
    anyhow::bail!("calls were in slots of those before them {same} times only: {soiled:?}")
}

fn similar_asserts(clean: &str, looked: &str, round: usize) -> Result<()> {
    for (before, after) in clean.lines().zip(looked.lines()) {
        ensure!(before == after, "round {round}:\n{before}\n{after}");
    }
    ensure!(clean == looked, "round {round}: {looked}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_call_leaves_is_not_there_for_the_next_one() -> Result<()> {
    let ended = |end: &Option<end::How>| *end == Some(end::How::Exited(0));
    rounds(&world()?, Limits::default(), "leaks leave", ended).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nor_is_what_one_leaves_whose_time_is_over() -> Result<()> {
    let ended = |end: &Option<end::How>| *end == Some(end::How::Timeout(true));
    rounds(&world()?, Limits::default(), "leaks leave; sleep 1000", ended).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nor_what_one_leaves_that_has_no_memory() -> Result<()> {
    let limits = Limits { memory_bytes: 48 << 20, ..Limits::default() };
    let ended = |end: &Option<end::How>| *end == Some(end::How::Oom(true));
    rounds(&world()?, limits, "leaks leave; tail /dev/zero", ended).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nor_what_one_leaves_that_fills_its_disk() -> Result<()> {
    let limits = Limits { writable_bytes: 16 << 20, ..Limits::default() };
    let ended = |end: &Option<end::How>| *end == Some(end::How::DiskFull(true));
    rounds(&world()?, limits, "leaks leave; yes > /tmp/fill", ended).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_ends_with_its_caller_and_leaves_nothing() -> Result<()> {
    let world = world()?;
    let (service, client) = world.client().await?;
    let (first, _) = run(&client, &Limits::default(), "leaks look").await?;
    for round in 0..4 {
        let mut request = shell("leaks leave; sleep 1000");
        request.timeout_ms = 60_000;
        let abandoned = tokio::time::timeout(Duration::from_millis(400), call(&client, request));
        ensure!(abandoned.await.is_err());
        let (looked, _) = run(&client, &Limits::default(), "leaks look").await?;
        similar_asserts(&text(&first.stdout), &text(&looked.stdout), round)?;
    }
    // Nothing of any call is left when the runtime has gone: no process, no group, no slot, no layer.
    service.close().await;
    assert!(world.processes().is_empty());
    assert!(world.groups().is_empty());
    assert!(world.layers.holders().is_empty());
    assert_eq!(std::fs::read_dir(world.data().join("sandboxes/slots"))?.count(), 0);
    Ok(())
}
