//! Asking imaged for a fresh location hint, over the node's socket.
//!
//! Locking: none. Called from fill threads, which may block.

use crate::fetch::Locator;
use layer::{Error, ErrorKind, LayerId, Result};
use proto::v1::LocateRequest;
use proto::v1::images_client::ImagesClient;
use std::path::Path;
use std::time::Duration;
use tokio::runtime::Handle;
use tonic::transport::Channel;

/// How long imaged may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// The node's imaged.
#[derive(Debug)]
pub struct NodeLocator {
    runtime: Handle,
    channel: Channel,
}

impl NodeLocator {
    /// Connects when it is first needed. Must be made inside the runtime.
    pub fn new(socket: &Path) -> Self {
        Self { runtime: Handle::current(), channel: proto::connect::unix_lazy(socket) }
    }
}

impl Locator for NodeLocator {
    fn locate(&self, layer: &LayerId) -> Result<()> {
        let mut images = ImagesClient::new(self.channel.clone());
        let request = LocateRequest { layer_id: layer.as_bytes().to_vec() };
        // Inside the runtime: a timer made outside of it panics.
        let asked = async { tokio::time::timeout(PATIENCE, images.locate(request)).await };
        match self.runtime.block_on(asked) {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(status)) => Err(proto::status::from_status(status)
                .context(format!("ask imaged where layer {layer} lies"))),
            Err(_) => Err(Error::new(ErrorKind::Timeout, "imaged does not answer")),
        }
    }
}
