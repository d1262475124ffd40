//! A runtime in a process of its own, over a folder as the only layer, for tests that kill it.
//!
//! `runtime-process DATA IMAGE`: serves the sandboxes interface on `DATA/runtime.sock` and prints `ready`.

#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use std::io::Write;
use std::path::PathBuf;

#[path = "../../tests/runtime_world/mod.rs"]
mod runtime_world;

fn main() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let data = arguments.next().context("the data directory")?;
    let image = arguments.next().context("the image")?;
    let threads =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    threads.block_on(async {
        let layers = runtime_world::FolderLayers::new(image);
        let service = runtime_world::open(&data, &layers).await?;
        let socket = data.join("runtime.sock");
        writeln!(std::io::stdout(), "ready")?;
        proto::connect::serve_unix(&socket, service.routes(), std::future::pending()).await?;
        anyhow::Ok(())
    })
}
