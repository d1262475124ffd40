//! fsd and its keepers as processes of their own, for tests that kill them.
//!
//! `fsd-process fsd --data DIR --store URL [--plane PLANE] [--deadline-ms N] [--reserve BYTES]
//! [--sync-ms N] [--full-ms N] [--cache-size BYTES] [--prefetch-rate BYTES] [--metrics ADDR]` and `fsd-process keeper --data DIR --index N`.
//!
//! `fsd-process trial --data DIR --store URL --layer ID --name FILE` is fsd and its only client in one:
//! it attaches a layer, writes the plane and the digest of a file to standard output, and drains.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, bail, ensure};
use layer::{Digest, LayerId};
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::{AttachRequest, DetachRequest, DrainRequest};
use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

fn main() -> Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let mut arguments = std::env::args().skip(1);
    let role = arguments.next().context("role")?;
    let mut options = BTreeMap::new();
    while let Some(name) = arguments.next() {
        options.insert(name, arguments.next().context("value")?);
    }
    if role == "virtiofs" {
        let path = |name: &str| options.get(name).context("a path").map(Into::into);
        let config = fsd::virtiofs::ServerConfig {
            socket: path("--socket")?,
            metadata: path("--metadata")?,
            data: path("--layer-data")?,
        };
        return Ok(fsd::virtiofs::run(&config)?);
    }
    let data = options.get("--data").context("--data")?;
    match role.as_str() {
        "keeper" => {
            let index = options.get("--index").context("--index")?.parse()?;
            fsd::keeper::run(&fsd::keeper::KeeperConfig { data_dir: data.into(), index })?;
            Ok(())
        }
        "fsd" => run_fsd(data, &options),
        "trial" => run_trial(data, &options),
        other => bail!("role {other}"),
    }
}

fn configure(data: &str, options: &BTreeMap<String, String>) -> Result<fsd::FsdConfig> {
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
    if let Some(milliseconds) = number("--full-ms")? {
        config.full_disk_deadline = Duration::from_millis(milliseconds);
    }
    config.cache_limit = number("--cache-size")?.map(fsd::CacheLimit::of);
    config.prefetch_rate = number("--prefetch-rate")?.unwrap_or(config.prefetch_rate);
    config.metrics = options.get("--metrics").map(|address| address.parse()).transpose()?;
    config.cache_reserve_bytes = number("--reserve")?.unwrap_or(4 << 20);
    Ok(config)
}

fn new_runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

fn run_fsd(data: &str, options: &BTreeMap<String, String>) -> Result<()> {
    let config = configure(data, options)?;
    new_runtime()?.block_on(async {
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

fn run_trial(data: &str, options: &BTreeMap<String, String>) -> Result<()> {
    let config = configure(data, options)?;
    let socket = config.paths()?.socket();
    let layer: LayerId = options.get("--layer").context("--layer")?.parse()?;
    let (layer_id, holder) = (layer.as_bytes().to_vec(), "trial".to_owned());
    let name = options.get("--name").context("--name")?;
    let runtime = new_runtime()?;
    let daemon = runtime.spawn(fsd::run(config, std::future::pending()));
    let told = runtime.block_on(async {
        let channel = loop {
            ensure!(!daemon.is_finished(), "fsd does not serve");
            match proto::connect::unix(&socket).await {
                Ok(channel) => break channel,
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        let mut client = LayerFsClient::new(channel);
        let request = AttachRequest {
            layer_id: layer_id.clone(),
            holder: holder.clone(),
            ..AttachRequest::default()
        };
        let attached = client.attach(request).await?.into_inner();
        let path = std::path::Path::new(&attached.mount_path).join(name);
        let content = tokio::task::spawn_blocking(move || std::fs::read(path)).await??;
        let told = format!("{} {}", attached.plane().as_str_name(), Digest::of(&content));
        client.detach(DetachRequest { layer_id, holder }).await?;
        client.drain(DrainRequest { force: false }).await?;
        anyhow::Ok(told)
    });
    // The process ends here whatever fsd's threads do, and takes the mount namespace with it.
    let told = told.map_err(|error| match runtime.block_on(daemon) {
        Ok(Err(cause)) => anyhow::Error::from(cause),
        _ => error,
    })?;
    writeln!(std::io::stdout(), "{told}")?;
    std::process::exit(0);
}
