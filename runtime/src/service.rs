//! The gRPC face of the node: unpacks requests, calls, packs answers. No decision is made here.

use crate::logs::Piece;
use crate::node::{Node, RuntimeConfig};
use crate::sandbox::Sandbox;
use crate::{exec, files, pack};
use layer::{Error, Result};
use proto::status::to_status;
use proto::v1::sandboxes_server::{Sandboxes, SandboxesServer};
use proto::v1::{self, ExecInput, exec_input::Input};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

/// The runtime of a node. Clones are the same node.
#[derive(Debug, Clone)]
pub struct Service {
    node: Arc<Node>,
}

/// Messages that wait in a stream.
const QUEUE: usize = 8;

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Service {
    /// Opens the node on its data directory: adopts living sandboxes, clears what dead ones left.
    pub async fn open(config: RuntimeConfig) -> Result<Self> {
        Ok(Self { node: Node::open(config).await? })
    }

    /// What a server adds to serve the interface.
    pub fn routes(&self) -> tonic::service::Routes {
        let routes = tonic::service::Routes::new(SandboxesServer::new(self.clone()));
        self.calls().measure(routes)
    }

    /// What is measured of its calls.
    pub fn calls(&self) -> &Arc<proto::meter::calls::Calls> {
        &self.node.meters.calls
    }

    /// Writes down what it counts, but for the calls.
    pub fn write_meters(&self, page: &mut proto::meter::Page) {
        self.node.write_meters(page);
    }

    /// The interface as a tonic service, to be served together with others.
    pub fn server(&self) -> SandboxesServer<Self> {
        SandboxesServer::new(self.clone())
    }

    /// Waits for clean-ups, detaches unused layers, removes prepared slots. Living sandboxes go on and
    /// are adopted by the next start.
    pub async fn close(&self) {
        self.node.close().await;
    }

    /// Ends every sandbox at once, for a node that is taken down for good.
    pub async fn stop_all(&self) {
        let stops = self
            .node
            .list(false)
            .into_iter()
            .map(|sandbox| tokio::spawn(async move { sandbox.stop(Duration::ZERO).await }));
        for stop in stops.collect::<Vec<_>>() {
            if let Ok(Err(error)) = stop.await {
                tracing::warn!(error = %error.chain(), "stop a sandbox");
            }
        }
    }

    fn find(&self, id: &str) -> Result<Arc<Sandbox>, Status> {
        self.node.find(id).map_err(to_status)
    }
}

fn answer(sandbox: &Sandbox) -> Result<Response<v1::Sandbox>, Status> {
    Ok(Response::new(sandbox.wire()))
}

#[tonic::async_trait]
impl Sandboxes for Service {
    async fn create(
        &self,
        request: Request<v1::CreateRequest>,
    ) -> Result<Response<v1::Sandbox>, Status> {
        answer(&*self.node.create(request.into_inner()).await.map_err(to_status)?)
    }

    async fn get(&self, request: Request<v1::GetRequest>) -> Result<Response<v1::Sandbox>, Status> {
        answer(&*self.find(&request.get_ref().id)?)
    }

    async fn list(
        &self,
        request: Request<v1::ListRequest>,
    ) -> Result<Response<v1::ListResponse>, Status> {
        let sandboxes = self.node.list(request.get_ref().all);
        let sandboxes = sandboxes.iter().map(|sandbox| sandbox.wire()).collect();
        Ok(Response::new(v1::ListResponse { sandboxes }))
    }

    async fn wait(
        &self,
        request: Request<v1::WaitRequest>,
    ) -> Result<Response<v1::Sandbox>, Status> {
        let sandbox = self.find(&request.get_ref().id)?;
        sandbox.wait_over().await;
        answer(&sandbox)
    }

    async fn stop(
        &self,
        request: Request<v1::StopRequest>,
    ) -> Result<Response<v1::Sandbox>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        sandbox.stop(Duration::from_millis(request.grace_ms)).await.map_err(to_status)?;
        answer(&sandbox)
    }

    async fn remove(
        &self,
        request: Request<v1::RemoveRequest>,
    ) -> Result<Response<v1::RemoveResponse>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        if !sandbox.state().is_over() {
            if !request.force {
                let text = format!("sandbox {} runs; stop it first", sandbox.id());
                return Err(to_status(Error::new(layer::ErrorKind::Busy, text)));
            }
            sandbox.wait_created().await;
            sandbox.stop(Duration::ZERO).await.map_err(to_status)?;
        }
        self.node.forget(&sandbox);
        Ok(Response::new(v1::RemoveResponse {}))
    }

    async fn pause(
        &self,
        request: Request<v1::PauseRequest>,
    ) -> Result<Response<v1::Sandbox>, Status> {
        let sandbox = self.find(&request.get_ref().id)?;
        sandbox.pause().await.map_err(to_status)?;
        answer(&sandbox)
    }

    async fn resume(
        &self,
        request: Request<v1::ResumeRequest>,
    ) -> Result<Response<v1::Sandbox>, Status> {
        let sandbox = self.find(&request.get_ref().id)?;
        sandbox.resume().await.map_err(to_status)?;
        answer(&sandbox)
    }

    type ExecStream = Answers<v1::ExecOutput>;

    async fn exec(
        &self,
        request: Request<Streaming<ExecInput>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        let mut incoming = request.into_inner();
        let Some(ExecInput { input: Some(Input::Start(start)) }) = incoming.message().await? else {
            return Err(to_status(Error::invalid("the first input of an exec is its start")));
        };
        let sandbox = self.find(&start.sandbox_id)?;
        let (sender, inputs) = mpsc::channel(QUEUE);
        let limit = self.node.config.default_output_bytes;
        let meters = Arc::clone(&self.node.meters);
        let outputs =
            exec::start(sandbox, start, inputs, limit, meters).await.map_err(to_status)?;
        tokio::spawn(async move {
            while let Ok(Some(input)) = incoming.message().await {
                if sender.send(input).await.is_err() {
                    break;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(outputs).map(Ok))))
    }

    type LogsStream = Answers<v1::LogChunk>;

    async fn logs(
        &self,
        request: Request<v1::LogsRequest>,
    ) -> Result<Response<Self::LogsStream>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        let (sender, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(async move {
            let mut reader = sandbox.log.reader();
            loop {
                let piece = if request.follow { reader.next().await } else { reader.now() };
                let chunk = match piece {
                    None => break,
                    Some(Piece::Data(stderr, data)) => {
                        v1::LogChunk { stderr, data: data.to_vec(), truncated_bytes: 0 }
                    }
                    Some(Piece::Dropped(truncated_bytes)) => {
                        v1::LogChunk { truncated_bytes, ..v1::LogChunk::default() }
                    }
                };
                if sender.send(Ok(chunk)).await.is_err() {
                    break;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    type ReadFileStream = Answers<v1::FileChunk>;

    async fn read_file(
        &self,
        request: Request<v1::ReadFileRequest>,
    ) -> Result<Response<Self::ReadFileStream>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        let parts = files::read(&sandbox, request.path).await.map_err(to_status)?;
        let parts = ReceiverStream::new(parts).map(|part| part.map_err(to_status));
        Ok(Response::new(Box::pin(parts)))
    }

    async fn write_file(
        &self,
        request: Request<Streaming<v1::WriteFilePart>>,
    ) -> Result<Response<v1::WriteFileResponse>, Status> {
        use v1::write_file_part::Part;
        let mut incoming = request.into_inner();
        let Some(v1::WriteFilePart { part: Some(Part::Start(start)) }) = incoming.message().await?
        else {
            return Err(to_status(Error::invalid("the first part of a file is its start")));
        };
        let sandbox = self.find(&start.id)?;
        let (sender, receiver) = mpsc::channel(QUEUE);
        let feed = async move {
            loop {
                match incoming.message().await {
                    Ok(Some(v1::WriteFilePart { part: Some(Part::Data(data)) })) => {
                        if sender.send(Ok(data)).await.is_err() {
                            return;
                        }
                    }
                    Ok(Some(_)) => {}
                    Ok(None) => return,
                    Err(status) => {
                        // The writer must not take a broken upload for a finished one.
                        let broken = Err(std::io::Error::other(status.to_string()));
                        let _writer_left = sender.send(broken).await;
                        return;
                    }
                }
            }
        };
        let (written, ()) = tokio::join!(files::write(&sandbox, start, receiver), feed);
        let bytes = written.map_err(to_status)?;
        Ok(Response::new(v1::WriteFileResponse { bytes }))
    }

    async fn pack_diff(
        &self,
        request: Request<v1::PackDiffRequest>,
    ) -> Result<Response<v1::PackDiffResponse>, Status> {
        let request = request.into_inner();
        let (node, sandbox) = (Arc::clone(&self.node), self.find(&request.id)?);
        // In a task of its own: a client that leaves does not leave a half-named result.
        let packing = tokio::spawn(async move {
            let begin = Instant::now();
            let packed = pack::pack_diff(&node, &sandbox, request).await?;
            node.meters.packs.observe_since(begin);
            Ok(packed)
        });
        let packed = packing.await.map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(packed.map_err(to_status)?))
    }
}
