//! Calls over a world of sandboxes, and the programs that they run.

#![allow(dead_code)]

use crate::runtime_world::{Client, World};
use anyhow::{Result, ensure};
use proto::v1::*;
use std::path::Path;
use std::process::Command;

/// A world whose image has `leaks`, which leaves everything behind or looks for it.
pub fn world() -> Result<World> {
    let world = World::new()?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fncall_world/leaks.c");
    let mut compiler = Command::new("gcc");
    compiler.args(["-static", "-O1", "-Wall", "-Wno-unused-result", "-o"]);
    let status = compiler.arg(world.image().join("bin/leaks")).arg(&source).status()?;
    ensure!(status.success(), "gcc: {status}");
    Ok(world)
}

/// A call of these words.
pub fn request(argv: &[&str]) -> CallRequest {
    CallRequest {
        environment: "env/busybox:test".into(),
        argv: argv.iter().map(|&word| word.into()).collect(),
        ..CallRequest::default()
    }
}

/// A call of a line of the image's shell.
pub fn shell(line: &str) -> CallRequest {
    request(&["sh", "-c", line])
}

/// Calls.
pub async fn call(client: &Client, request: CallRequest) -> Result<CallResponse> {
    let answer = client.inner.clone().max_decoding_message_size(64 << 20).call(request).await;
    Ok(answer.map_err(proto::status::from_status)?.into_inner())
}

/// What it printed.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
