//! An image daemon in this process over a store in a directory, for tests of builds.
#![allow(dead_code, clippy::unwrap_used)]

use builder::publish::ImagesPublisher;
use std::path::Path;
use std::sync::Arc;
use store::Store;

/// The daemon; it goes with its directory when dropped.
pub struct ImageDaemon {
    pub runtime: tokio::runtime::Runtime,
    pub store: Arc<Store>,
    pub channel: tonic::transport::Channel,
    pub dir: tempfile::TempDir,
}

impl ImageDaemon {
    /// Over an empty store. `query` answers what follows `?` in the store's URL, for the directory that all
    /// lies in.
    pub fn new(query: impl FnOnce(&Path) -> String) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("store");
        std::fs::create_dir(&folder).unwrap();
        let url = format!("file://{}?{}", folder.display(), query(dir.path()));
        let store = Arc::new(Store::open(store::open(url.trim_end_matches('?')).unwrap()).unwrap());
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let catalog_dir = dir.path().join("catalog");
        let config = imaged::ImagedConfig { store: Arc::clone(&store), catalog_dir };
        let routes = imaged::Service::open(config).unwrap().routes();
        let channel = runtime.block_on(proto::connect::in_process(routes)).unwrap();
        Self { runtime, store, channel, dir }
    }

    /// Ends a publish behind its publisher's back.
    pub fn close(&self, publish_id: &str) {
        let request = proto::v1::ClosePublishRequest { publish_id: publish_id.to_owned() };
        let mut client = proto::v1::images_client::ImagesClient::new(self.channel.clone());
        self.runtime.block_on(client.close_publish(request)).unwrap();
    }

    pub fn publisher(&self) -> ImagesPublisher {
        let handle = self.runtime.handle().clone();
        ImagesPublisher::open(handle, self.channel.clone(), "test").unwrap()
    }
}
