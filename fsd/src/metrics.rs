//! Metrics over HTTP in the text format of Prometheus; off unless an address is given. A node serves them for all
//! of its daemons, an fsd by itself its own.
//!
//! Every number of fsd is one of `stats`; this only writes them down. Bounded: so many connections at once, a
//! short request, a deadline for both directions. Whoever can reach the address can read the numbers:
//! names of layers and holders are not secret, but bind it where only the collector is.

use crate::node::Node;
use crate::stats;
use layer::{Error, ErrorKind, Result};
use proto::meter::{Kind, Page};
use proto::v1::{LayerStats, StatsResponse};
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

/// Connections that are answered at once.
const CONNECTIONS: usize = 4;
/// The longest head of a request.
const REQUEST_BYTES: usize = 8 << 10;
/// How long a client may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause after a connection could not be taken.
const ERROR_PAUSE: Duration = Duration::from_millis(100);
/// Pause after the address could not be bound.
const BIND_PAUSE: Duration = Duration::from_secs(5);

/// Makes the page of the moment.
pub type Source = Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Result<Page>> + Send>> + Send + Sync>;

/// The numbers of a node of fsd.
pub(crate) fn of_node(node: Arc<Node>) -> Source {
    Arc::new(move || {
        let node = Arc::clone(&node);
        Box::pin(async move {
            let collected = tokio::task::spawn_blocking(move || stats::collect(&node)).await;
            let stats = collected.map_err(|error| {
                Error::new(ErrorKind::Internal, "collect the numbers").with_source(error)
            })??;
            let mut page = Page::default();
            write(&mut page, &stats);
            Ok(page)
        })
    })
}

/// Answers on an address until the runtime ends. One that cannot be bound is tried again: no reader of a
/// layer may suffer from it.
pub fn serve(address: SocketAddr, source: Source) {
    tokio::spawn(async move {
        loop {
            match TcpListener::bind(address).await {
                Ok(listener) => return accept(listener, source).await,
                Err(error) => tracing::error!(%error, %address, "metrics are not served"),
            }
            tokio::time::sleep(BIND_PAUSE).await;
        }
    });
}

async fn accept(listener: TcpListener, source: Source) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    // The semaphore is never closed.
    while let Ok(permit) = Arc::clone(&connections).acquire_owned().await {
        match listener.accept().await {
            Ok((stream, _)) => {
                let source = Arc::clone(&source);
                tokio::spawn(async move {
                    let answered = tokio::time::timeout(PATIENCE, answer(stream, source)).await;
                    if let Ok(Err(error)) = answered {
                        tracing::debug!(%error, "a client of the metrics went away");
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "take a connection for metrics");
                tokio::time::sleep(ERROR_PAUSE).await;
            }
        }
    }
}

async fn answer(mut stream: TcpStream, source: Source) -> std::io::Result<()> {
    let mut request = Vec::new();
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        if request.len() > REQUEST_BYTES || stream.read_buf(&mut request).await? == 0 {
            return Ok(());
        }
    }
    let (status, body) = match request.split(|byte| *byte == b' ').take(2).collect::<Vec<_>>()[..] {
        [b"GET", b"/metrics"] => match source().await {
            Ok(page) => ("200 OK", page.into_text()),
            Err(error) => {
                tracing::warn!(error = error.chain(), "no metrics");
                ("500 Internal Server Error", String::new())
            }
        },
        [b"GET", _] => ("404 Not Found", "only /metrics is here\n".to_owned()),
        _ => ("405 Method Not Allowed", String::new()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await
}

/// A number of the node: name, what it is, whether it only grows, and where it comes from.
type NodeMetric = (&'static str, &'static str, bool, fn(&StatsResponse) -> u64);
/// The same for each layer in use.
type LayerMetric = (&'static str, &'static str, bool, fn(&LayerStats) -> u64);

const NODE: &[NodeMetric] = &[
    ("cache_bytes", "Bytes of the node cache on disk.", false, |s| s.cache_bytes),
    ("cache_limit_bytes", "Above this the cache evicts; 0 is no limit.", false, |s| {
        s.cache_limit_bytes
    }),
    ("cache_disk_free_bytes", "Free bytes of the cache disk.", false, |s| s.free_bytes),
    ("cache_disk_reserve_bytes", "Free bytes that are never filled.", false, |s| s.reserve_bytes),
    ("cache_disk_full", "1 while nothing can be filled and nothing evicted.", false, |s| {
        u64::from(s.disk_full)
    }),
    ("layers_in_use", "Layers that are served.", false, |s| s.layers.len() as u64),
    ("layers_resting", "Layers on the node that nobody uses.", false, |s| s.resting.len() as u64),
    ("filled_bytes_total", "Plain bytes filled into the cache.", true, |s| s.fetched_bytes),
    ("store_read_bytes_total", "Stored bytes read from the store.", true, |s| s.store_bytes),
    ("description_bytes_total", "Bytes of layer files read from the store.", true, |s| {
        s.description_bytes
    }),
    ("store_reads_total", "Reads of the store.", true, |s| s.store_reads),
    ("copied_chunks_total", "Chunks taken from another layer of the node.", true, |s| {
        s.copied_chunks
    }),
    ("shared_chunks_total", "Of them, those that share their blocks.", true, |s| s.shared_chunks),
    ("evicted_bytes_total", "Bytes evicted from the cache.", true, |s| s.evicted_bytes),
    ("uncached_bytes_total", "Bytes answered from memory without keeping them.", true, |s| {
        s.uncached_bytes
    }),
    ("events_total", "Events of the kernel that were answered.", true, |s| s.events),
    ("event_errors_total", "Of them, with an error.", true, |s| s.errors_answered),
    ("event_full_total", "Of those, because the cache disk is full.", true, |s| s.denied_full),
    (
        "integrity_errors_total",
        "Chunks of the store with other bytes than their digest says.",
        true,
        |s| s.verify_failures,
    ),
];

const LAYER: &[LayerMetric] = &[
    ("layer_data_bytes", "Bytes of the layer's data.", false, |l| l.data_bytes),
    ("layer_present_bytes", "Of them in the cache.", false, |l| l.present_bytes),
    ("layer_holders", "Who holds the layer.", false, |l| l.holders.len() as u64),
    ("layer_pinned", "1 for a layer that is not evicted.", false, |l| u64::from(l.pinned)),
    ("layer_hits_total", "Reads that found everything present.", true, |l| l.hits),
    ("layer_waits_total", "Reads that waited for what others had asked for.", true, |l| l.waits),
    ("layer_filled_bytes_total", "Plain bytes filled.", true, |l| l.fetched_bytes),
    ("layer_copied_bytes_total", "Of them from another layer of the node.", true, |l| {
        l.copied_bytes
    }),
    ("layer_evicted_bytes_total", "Plain bytes evicted.", true, |l| l.evicted_bytes),
    ("layer_denials_total", "Reads answered with an error.", true, |l| l.denials),
    (
        "layer_integrity_errors_total",
        "Chunks with other bytes than their digest says.",
        true,
        |l| l.verify_failures,
    ),
];

/// Writes down all numbers of fsd.
pub fn write(page: &mut Page, stats: &StatsResponse) {
    let kind = |grows: bool| if grows { Kind::Counter } else { Kind::Gauge };
    for (name, what, grows, value) in NODE {
        page.family(name, what, kind(*grows));
        page.value(name, &[], value(stats));
    }
    for (name, what, grows, value) in LAYER {
        page.family(name, what, kind(*grows));
        for layer in &stats.layers {
            let id: String = layer.layer_id.iter().map(|byte| format!("{byte:02x}")).collect();
            let plane = layer.plane().as_str_name().trim_start_matches("PLANE_").to_lowercase();
            page.value(name, &[("layer", &id), ("plane", &plane)], value(layer));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_a_name_that_the_documentation_knows() {
        let layer = LayerStats { layer_id: vec![0xab; 32], hits: 7, ..LayerStats::default() };
        let stats =
            StatsResponse { cache_bytes: 5, layers: vec![layer], ..StatsResponse::default() };
        let mut page = Page::default();
        write(&mut page, &stats);
        let text = page.into_text();
        assert!(text.contains("\nlamella_cache_bytes 5\n"), "{text}");
        let id = "ab".repeat(32);
        let line = format!("lamella_layer_hits_total{{layer=\"{id}\",plane=\"auto\"}} 7\n");
        assert!(text.contains(&line), "{text}");
        let documented = include_str!("../../docs/metrics.md");
        let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        for name in names.filter_map(|line| line.split(' ').next()) {
            assert!(documented.contains(&format!("`{name}`")), "{name} is not documented");
        }
    }
}
