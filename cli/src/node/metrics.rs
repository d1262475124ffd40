//! Metrics of the whole node on one page: its own daemons are in this process, fsd is asked.

use fsd::metrics::Source;
use proto::meter::{Page, calls};
use proto::v1::StatsRequest;
use proto::v1::layer_fs_client::LayerFsClient;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::Channel;

/// How long fsd may take; without it the page has the rest.
const PATIENCE: Duration = Duration::from_secs(5);

/// Answers on an address until the runtime ends.
pub fn serve(
    address: SocketAddr,
    images: imaged::Service,
    runtime: runtime::Service,
    layerfs: Channel,
) {
    let source: Source = Arc::new(move || {
        let (images, runtime) = (images.clone(), runtime.clone());
        let layerfs = LayerFsClient::new(layerfs.clone());
        Box::pin(async move { Ok(page(&images, &runtime, layerfs).await) })
    });
    fsd::metrics::serve(address, source);
}

async fn page(
    images: &imaged::Service,
    runtime: &runtime::Service,
    mut layerfs: LayerFsClient<Channel>,
) -> Page {
    let mut page = Page::default();
    let stats = tokio::time::timeout(PATIENCE, layerfs.stats(StatsRequest {})).await;
    let stats = stats.ok().and_then(Result::ok);
    page.gauge("fsd_up", "1 while the file-system daemon answers.", u64::from(stats.is_some()));
    if let Some(stats) = stats {
        fsd::metrics::write(&mut page, stats.get_ref());
    }
    images.write_meters(&mut page);
    runtime.write_meters(&mut page);
    calls::write(&mut page, &[images.calls(), runtime.calls()]);
    page
}
