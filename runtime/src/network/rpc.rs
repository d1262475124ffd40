//! The gRPC face of the network: unpacks requests, calls, packs answers. No decision is made here.

use crate::node::Node;
use crate::sandbox::Sandbox;
use netpolicy::Denial;
use proto::status::to_status;
use proto::v1;
use proto::v1::networks_server::Networks;
use std::pin::Pin;
use std::sync::Arc;
use std::time::UNIX_EPOCH;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// The network of a node. Clones are the same node.
#[derive(Debug, Clone)]
pub struct NetworkService {
    pub(crate) node: Arc<Node>,
}

/// Messages that wait in a stream.
const QUEUE: usize = 8;

type Answer = Result<Response<v1::Network>, Status>;

impl NetworkService {
    fn find(&self, id: &str) -> Result<Arc<Sandbox>, Status> {
        self.node.find(id).map_err(to_status)
    }

    async fn answer(&self, sandbox: &Sandbox) -> Answer {
        Ok(Response::new(self.node.networks.describe(sandbox).await))
    }
}

#[tonic::async_trait]
impl Networks for NetworkService {
    async fn get_network(&self, request: Request<v1::GetNetworkRequest>) -> Answer {
        self.answer(&*self.find(&request.get_ref().id)?).await
    }

    async fn set_network(&self, request: Request<v1::SetNetworkRequest>) -> Answer {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        let set = self.node.networks.set(&sandbox, request.allow, request.add);
        set.await.map_err(to_status)?;
        self.answer(&sandbox).await
    }

    async fn publish(&self, request: Request<v1::PublishRequest>) -> Answer {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        let published = self.node.networks.publish(&sandbox, &request.publish);
        published.await.map_err(to_status)?;
        self.answer(&sandbox).await
    }

    async fn unpublish(&self, request: Request<v1::PublishRequest>) -> Answer {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        let closed = self.node.networks.unpublish(&sandbox, &request.publish);
        closed.await.map_err(to_status)?;
        self.answer(&sandbox).await
    }

    type DenialsStream = Pin<Box<dyn Stream<Item = Result<v1::Denial, Status>> + Send>>;

    async fn denials(
        &self,
        request: Request<v1::DenialsRequest>,
    ) -> Result<Response<Self::DenialsStream>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        let log = self.node.networks.denials(sandbox.id()).map_err(to_status)?;
        let (sender, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(async move {
            let (mut last, mut news) = (request.after, log.subscribe());
            loop {
                news.mark_unchanged();
                for denial in log.after(last) {
                    last = denial.number;
                    if sender.send(Ok(wire(denial))).await.is_err() {
                        return;
                    }
                }
                if !request.follow {
                    return;
                }
                tokio::select! {
                    changed = news.changed() => if changed.is_err() { return },
                    () = sandbox.wait_over() => return,
                    () = sender.closed() => return,
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

fn wire(denial: Denial) -> v1::Denial {
    let at = denial.at.duration_since(UNIX_EPOCH).unwrap_or_default();
    v1::Denial {
        number: denial.number,
        at_unix_ns: u64::try_from(at.as_nanos()).unwrap_or(u64::MAX),
        reason: denial.reason.word().to_owned(),
        protocol: denial.protocol,
        address: denial.address.map(|address| address.to_string()).unwrap_or_default(),
        port: denial.port.into(),
        name: denial.name,
        suppressed: denial.suppressed,
    }
}
