//! The gRPC face of the node: unpacks requests, calls, packs answers. No decision is made here.

use crate::events::{self, report};
use crate::node::{Node, RuntimeConfig};
use crate::sandbox::Sandbox;
use crate::{exec, files, fncall, fork, many, pack, usage};
use layer::{Error, Result};
use proto::status::to_status;
use proto::v1::networks_server::NetworksServer;
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
        let routes = tonic::service::Routes::new(self.server()).add_service(self.network_server());
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
        SandboxesServer::new(self.clone()).max_decoding_message_size(fncall::MAX_MESSAGE_BYTES)
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

/// The network part of the interface as a tonic service, to be served together with others.
impl Service {
    /// See [`crate::network::rpc`].
    pub fn network_server(&self) -> NetworksServer<crate::network::rpc::NetworkService> {
        let node = Arc::clone(&self.node);
        NetworksServer::new(crate::network::rpc::NetworkService { node })
    }
}

fn answer(sandbox: &Sandbox) -> Result<Response<v1::Sandbox>, Status> {
    Ok(Response::new(sandbox.wire()))
}

/// What a client says while a command runs.
async fn forward(mut incoming: Streaming<ExecInput>, inputs: mpsc::Sender<ExecInput>) {
    while let Ok(Some(input)) = incoming.message().await {
        if inputs.send(input).await.is_err() {
            break;
        }
    }
}

#[tonic::async_trait]
impl Sandboxes for Service {
    async fn create(
        &self,
        request: Request<v1::CreateRequest>,
    ) -> Result<Response<v1::Sandbox>, Status> {
        answer(&*self.node.create(request.into_inner()).await.map_err(to_status)?)
    }

    type CreateManyStream = Answers<v1::Made>;

    async fn create_many(
        &self,
        request: Request<v1::CreateManyRequest>,
    ) -> Result<Response<Self::CreateManyStream>, Status> {
        let made = many::create(&self.node, request.into_inner()).map_err(to_status)?;
        let made = ReceiverStream::new(made).map(|made| Ok(made.claim()));
        Ok(Response::new(Box::pin(made)))
    }

    type ForkStream = Answers<v1::Made>;

    async fn fork(
        &self,
        request: Request<v1::ForkRequest>,
    ) -> Result<Response<Self::ForkStream>, Status> {
        let v1::ForkRequest { id, count } = request.into_inner();
        let sandbox = self.find(&id)?;
        let made = fork::fork(&self.node, &sandbox, count).await;
        if made.is_err() {
            report::forked(&sandbox, count, 0, &made);
        }
        let made = made.map_err(to_status)?;
        let made = ReceiverStream::new(made).map(|made| Ok(made.claim()));
        Ok(Response::new(Box::pin(made)))
    }

    async fn renew_owner(
        &self,
        request: Request<v1::RenewOwnerRequest>,
    ) -> Result<Response<v1::RenewOwnerResponse>, Status> {
        let v1::RenewOwnerRequest { name, lease_ms } = request.into_inner();
        let expires_unix_ns = self.node.lifetimes.renew(&name, lease_ms).map_err(to_status)?;
        let mut owned = self.node.list(false);
        owned.retain(|sandbox| sandbox.lifetime().owner.as_ref() == Some(&name));
        self.node.lifetimes.reconsider(&owned);
        let sandboxes = owned.len() as u32;
        Ok(Response::new(v1::RenewOwnerResponse { sandboxes, expires_unix_ns }))
    }

    async fn call(
        &self,
        request: Request<v1::CallRequest>,
    ) -> Result<Response<v1::CallResponse>, Status> {
        let request = request.into_inner();
        let mut called = report::Called::begin(&self.node.events, &request);
        let answer = self.node.call(request).await;
        called.end(&answer);
        Ok(Response::new(answer.map_err(to_status)?))
    }

    async fn get(&self, request: Request<v1::GetRequest>) -> Result<Response<v1::Sandbox>, Status> {
        answer(&*self.find(&request.get_ref().id)?)
    }

    async fn list(
        &self,
        request: Request<v1::ListRequest>,
    ) -> Result<Response<v1::ListResponse>, Status> {
        let v1::ListRequest { all, labels } = request.into_inner();
        let sandboxes = self.node.list(all);
        let wanted = sandboxes.iter().filter(|sandbox| sandbox.has_labels(&labels));
        let sandboxes = wanted.map(|sandbox| sandbox.wire()).collect();
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

    type EventsStream = Answers<v1::Event>;

    async fn events(
        &self,
        request: Request<v1::EventsRequest>,
    ) -> Result<Response<Self::EventsStream>, Status> {
        let events = events::rpc::stream(&self.node.events, request.into_inner());
        Ok(Response::new(Box::pin(ReceiverStream::new(events.map_err(to_status)?))))
    }

    async fn usage(
        &self,
        request: Request<v1::UsageRequest>,
    ) -> Result<Response<v1::UsageResponse>, Status> {
        let usage = usage::usage(&self.node, request.into_inner()).await;
        Ok(Response::new(usage.map_err(to_status)?))
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
        tokio::spawn(forward(incoming, sender));
        Ok(Response::new(Box::pin(ReceiverStream::new(outputs).map(Ok))))
    }

    type AttachStream = Answers<v1::ExecOutput>;

    async fn attach(
        &self,
        request: Request<Streaming<ExecInput>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut incoming = request.into_inner();
        let Some(ExecInput { input: Some(Input::Attach(start)) }) = incoming.message().await?
        else {
            return Err(to_status(Error::invalid("the first input says what to attach to")));
        };
        let sandbox = self.find(&start.sandbox_id)?;
        let (sender, inputs) = mpsc::channel(QUEUE);
        let outputs = exec::attach(&sandbox, &start, inputs).map_err(to_status)?;
        tokio::spawn(forward(incoming, sender));
        Ok(Response::new(Box::pin(ReceiverStream::new(outputs).map(Ok))))
    }

    async fn list_commands(
        &self,
        request: Request<v1::ListCommandsRequest>,
    ) -> Result<Response<v1::ListCommandsResponse>, Status> {
        let sandbox = self.find(&request.get_ref().sandbox_id)?;
        let commands = sandbox.commands.list().iter().map(|command| command.wire()).collect();
        Ok(Response::new(v1::ListCommandsResponse { commands }))
    }

    async fn signal_command(
        &self,
        request: Request<v1::SignalCommandRequest>,
    ) -> Result<Response<v1::Command>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.sandbox_id)?;
        let command = sandbox.commands.find(&request.command_id).map_err(to_status)?;
        let instance = sandbox.running_instance().await.map_err(to_status)?;
        let reach = request.reach();
        command.signal(&instance, request.signal, reach).await.map_err(to_status)?;
        Ok(Response::new(command.wire()))
    }

    async fn wait_command(
        &self,
        request: Request<v1::WaitCommandRequest>,
    ) -> Result<Response<v1::Command>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.sandbox_id)?;
        let command = sandbox.commands.find(&request.command_id).map_err(to_status)?;
        let _attached = command.attach();
        command.wait_over().await;
        Ok(Response::new(command.wire()))
    }

    type LogsStream = Answers<v1::LogChunk>;

    async fn logs(
        &self,
        request: Request<v1::LogsRequest>,
    ) -> Result<Response<Self::LogsStream>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        let (sender, receiver) = mpsc::channel(QUEUE);
        tokio::spawn(exec::logs(sandbox, request.follow, sender));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    type ReadFileStream = Answers<v1::FileChunk>;

    async fn read_file(
        &self,
        request: Request<v1::ReadFileRequest>,
    ) -> Result<Response<Self::ReadFileStream>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        let mut transfer = report::Transfer::begin(&sandbox, false, &request.path);
        let parts = files::read(&sandbox, request).await;
        let parts = parts.inspect_err(|error| transfer.failed(error)).map_err(to_status)?;
        let parts = report::Counted::new(ReceiverStream::new(parts), transfer);
        let parts = parts.map(|part| part.map_err(to_status));
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
        let mut transfer = report::Transfer::begin(&sandbox, true, &start.path);
        let (sender, receiver) = mpsc::channel(QUEUE);
        let feed = async move {
            loop {
                match incoming.message().await {
                    Ok(Some(v1::WriteFilePart { part: Some(Part::Data(data)) })) => {
                        if !data.is_empty() && sender.send(Ok(data)).await.is_err() {
                            return;
                        }
                    }
                    Ok(Some(_)) => {}
                    Ok(None) => {
                        // A call that its client gave up looks the same, but is dropped before it
                        // goes on.
                        tokio::task::yield_now().await;
                        let _writer_left = sender.send(Ok(files::END)).await;
                        return;
                    }
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
        transfer.bytes = *written.as_ref().unwrap_or(&0);
        transfer.end(&written);
        let bytes = written.map_err(to_status)?;
        Ok(Response::new(v1::WriteFileResponse { bytes }))
    }

    type ListFilesStream = Answers<v1::ListFilesResponse>;

    async fn list_files(
        &self,
        request: Request<v1::ListFilesRequest>,
    ) -> Result<Response<Self::ListFilesStream>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        let entries = files::list(&sandbox, request).await.map_err(to_status)?;
        let entries = ReceiverStream::new(entries).map(|entries| entries.map_err(to_status));
        Ok(Response::new(Box::pin(entries)))
    }

    async fn stat_file(
        &self,
        request: Request<v1::StatFileRequest>,
    ) -> Result<Response<v1::FileEntry>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        Ok(Response::new(files::stat(&sandbox, request).await.map_err(to_status)?))
    }

    async fn make_directory(
        &self,
        request: Request<v1::MakeDirectoryRequest>,
    ) -> Result<Response<v1::FileEntry>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        let path = request.path.clone();
        let made = files::make_directory(&sandbox, request).await;
        report::changed(&sandbox, "make_directory", &path, "", &made);
        Ok(Response::new(made.map_err(to_status)?))
    }

    async fn rename_file(
        &self,
        request: Request<v1::RenameFileRequest>,
    ) -> Result<Response<v1::FileEntry>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        let (from, to) = (request.from.clone(), request.to.clone());
        let renamed = files::rename(&sandbox, request).await;
        report::changed(&sandbox, "rename", &from, &to, &renamed);
        Ok(Response::new(renamed.map_err(to_status)?))
    }

    async fn remove_file(
        &self,
        request: Request<v1::RemoveFileRequest>,
    ) -> Result<Response<v1::RemoveFileResponse>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        let path = request.path.clone();
        let removed = files::remove(&sandbox, request).await;
        report::changed(&sandbox, "remove", &path, "", &removed);
        let removed = removed.map_err(to_status)?;
        Ok(Response::new(v1::RemoveFileResponse { removed }))
    }

    async fn set_file_attributes(
        &self,
        request: Request<v1::SetFileAttributesRequest>,
    ) -> Result<Response<v1::FileEntry>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        let path = request.path.clone();
        let set = files::set_attributes(&sandbox, request).await;
        report::changed(&sandbox, "set_attributes", &path, "", &set);
        Ok(Response::new(set.map_err(to_status)?))
    }

    type WatchFilesStream = Answers<v1::FileEvent>;

    async fn watch_files(
        &self,
        request: Request<v1::WatchFilesRequest>,
    ) -> Result<Response<Self::WatchFilesStream>, Status> {
        let request = request.into_inner();
        let sandbox = self.find(&request.id)?;
        let events = self.node.watches.watch(&sandbox, request).await.map_err(to_status)?;
        let events = ReceiverStream::new(events).map(|event| event.map_err(to_status));
        Ok(Response::new(Box::pin(events)))
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
            let name = request.name.clone();
            let packed = pack::pack_diff(&node, &sandbox, request).await;
            report::packed(&sandbox, &name, &packed);
            let packed = packed?;
            node.meters.packs.observe_since(begin);
            Ok(packed)
        });
        let packed = packing.await.map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(packed.map_err(to_status)?))
    }
}
