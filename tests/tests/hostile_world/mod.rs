//! The programs of the hostile suite, in the image of a world of sandboxes.

#![allow(dead_code)]

use crate::runtime_world::{Client, World};
use anyhow::{Result, ensure};
use proto::v1::*;
use std::path::Path;
use std::process::Command;

/// A world whose image has the program of the attacks.
pub fn world() -> Result<World> {
    let world = World::new()?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hostile_world/attacks.c");
    let program = world.image().join("bin/attacks");
    let mut compiler = Command::new("gcc");
    compiler.args(["-static", "-O1", "-Wall", "-Werror", "-Wno-unused-result", "-o"]);
    let status = compiler.arg(&program).arg(&source).status()?;
    ensure!(status.success(), "gcc: {status}");
    Ok(world)
}

/// Runs one of the attacks; what it could do.
pub async fn attack(client: &Client, id: &str, words: &[&str]) -> Result<String> {
    let argv: Vec<&str> = std::iter::once("attacks").chain(words.iter().copied()).collect();
    let ran = client.run(id, &argv).await?;
    let stderr = String::from_utf8_lossy(&ran.stderr);
    ensure!(ran.ended.exit_code == 0, "{words:?}: {:?} {stderr}", ran.ended);
    Ok(ran.text())
}

/// The node makes, uses and removes a sandbox as if nothing had been.
pub async fn is_healthy(client: &Client) -> Result<()> {
    let id = client.idle().await?.id;
    ensure!(client.shell(&id, "echo well").await? == "well\n");
    client.stop(&id).await?;
    Ok(())
}

/// A request for this profile.
pub fn with_profile(profile: &str) -> CreateRequest {
    CreateRequest { profile: profile.into(), ..CreateRequest::default() }
}

/// A request that protects these paths: `(path, hidden)`.
pub fn protecting(paths: &[(&str, bool)]) -> CreateRequest {
    let path =
        |(path, hidden): &(&str, bool)| ProtectedPath { path: (*path).into(), hidden: *hidden };
    CreateRequest { protected_paths: paths.iter().map(path).collect(), ..CreateRequest::default() }
}
