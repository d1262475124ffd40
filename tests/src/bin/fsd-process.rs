//! fsd and its keepers as processes of their own, for tests that kill them.
//!
//! `fsd-process fsd --data DIR --store URL [--plane PLANE] [--deadline-ms N] [--reserve BYTES]
//! [--sync-ms N]` and `fsd-process keeper --data DIR --index N`.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::time::Duration;

fn main() -> Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let mut arguments = std::env::args().skip(1);
    let role = arguments.next().context("role")?;
    let mut options = BTreeMap::new();
    while let Some(name) = arguments.next() {
        options.insert(name, arguments.next().context("value")?);
    }
    let data = options.get("--data").context("--data")?;
    match role.as_str() {
        "keeper" => {
            let index = options.get("--index").context("--index")?.parse()?;
            fsd::keeper::run(&fsd::keeper::KeeperConfig { data_dir: data.into(), index })?;
            Ok(())
        }
        "fsd" => run_fsd(data, &options),
        other => bail!("role {other}"),
    }
}

fn run_fsd(data: &str, options: &BTreeMap<String, String>) -> Result<()> {
    let mut config = fsd::FsdConfig::new(data, options.get("--store").context("--store")?);
    if let Some(plane) = options.get("--plane") {
        config.plane = Some(plane.parse()?);
    }
    let number = |name: &str| options.get(name).map(|text| text.parse::<u64>()).transpose();
    if let Some(milliseconds) = number("--deadline-ms")? {
        config.deadline = Duration::from_millis(milliseconds);
    }
    if let Some(milliseconds) = number("--sync-ms")? {
        config.sync_interval = Duration::from_millis(milliseconds);
    }
    config.cache_reserve_bytes = number("--reserve")?.unwrap_or(4 << 20);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let mut terminate =
            tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        fsd::run(config, async move {
            terminate.recv().await;
        })
        .await?;
        anyhow::Ok(())
    })?;
    std::process::exit(0);
}
