//! The `LayerFs` service: requests become calls of the attachments, on threads that may block.

use crate::completions::Completed;
use crate::node::Node;
use crate::planes::{PlaneKind, virtiofs};
use crate::profile;
use crate::stats;
use layer::profile::Profile;
use layer::{Error, ErrorKind, LayerId, Result};
use proto::status::to_status;
use proto::v1;
use proto::v1::layer_fs_server::{LayerFs, LayerFsServer};
use proto::v1::{
    AttachRequest, AttachResponse, CheckRequest, CheckResponse, CompleteRequest, CompleteResponse,
    DetachRequest, DetachResponse, DrainRequest, DrainResponse, EvictRequest, EvictResponse,
    ExportRequest, ExportResponse, PinRequest, PinResponse, Plane, PrefetchRequest,
    PrefetchResponse, RecordRequest, RecordResponse, StatsRequest, StatsResponse,
    StopRecordRequest, StopRecordResponse, WithdrawRequest, WithdrawResponse,
};
use std::sync::Arc;
use tokio::sync::Notify;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

/// The service over a running node.
#[derive(Clone)]
pub struct Service {
    node: Arc<Node>,
    drained: Arc<Notify>,
}

impl Service {
    /// `drained` is told when the process may end.
    pub fn new(node: Arc<Node>, drained: Arc<Notify>) -> Self {
        Self { node, drained }
    }

    /// The routes to serve.
    pub fn routes(&self) -> Routes {
        Routes::new(LayerFsServer::new(self.clone()))
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Node) -> Result<T> + Send + 'static,
    ) -> Result<Response<T>, Status> {
        let node = Arc::clone(&self.node);
        match tokio::task::spawn_blocking(move || work(&node)).await {
            Ok(Ok(value)) => Ok(Response::new(value)),
            Ok(Err(error)) => Err(to_status(error)),
            Err(error) => {
                let error = Error::new(ErrorKind::Internal, "a request died").with_source(error);
                Err(to_status(error))
            }
        }
    }
}

fn layer_of(bytes: &[u8]) -> Result<LayerId, Status> {
    LayerId::from_slice(bytes).map_err(to_status)
}

fn layers_of(ids: &[Vec<u8>]) -> Result<Vec<LayerId>, Status> {
    ids.iter().map(|id| layer_of(id)).collect()
}

fn plane_of(number: i32) -> Result<Option<PlaneKind>, Status> {
    match Plane::try_from(number) {
        Ok(plane) => Ok(PlaneKind::from_proto(plane)),
        Err(_) => Err(to_status(Error::invalid(format!("plane number {number}")))),
    }
}

#[tonic::async_trait]
impl LayerFs for Service {
    async fn attach(
        &self,
        request: Request<AttachRequest>,
    ) -> Result<Response<AttachResponse>, Status> {
        let AttachRequest { layer_id, holder, plane, env_id } = request.into_inner();
        let environment = profile::environment_of(&env_id).map_err(to_status)?;
        let (layer, plane) = (layer_of(&layer_id)?, plane_of(plane)?);
        self.blocking(move |node| {
            let attached = node.attachments.attach(&layer, &holder, plane, environment)?;
            Ok(AttachResponse {
                mount_path: attached.mount_path.to_string_lossy().into_owned(),
                plane: attached.plane.to_proto().into(),
                complete: attached.complete,
            })
        })
        .await
    }

    async fn detach(
        &self,
        request: Request<DetachRequest>,
    ) -> Result<Response<DetachResponse>, Status> {
        let DetachRequest { layer_id, holder } = request.into_inner();
        let layer = layer_of(&layer_id)?;
        self.blocking(move |node| {
            let unmounted = node.attachments.detach(&layer, &holder)?;
            Ok(DetachResponse { unmounted })
        })
        .await
    }

    async fn export(
        &self,
        request: Request<ExportRequest>,
    ) -> Result<Response<ExportResponse>, Status> {
        let ExportRequest { layer_id, holder } = request.into_inner();
        let layer = layer_of(&layer_id)?;
        self.blocking(move |node| {
            let exported = node.exports.export(&layer, &holder)?;
            Ok(ExportResponse {
                metadata_path: exported.metadata.to_string_lossy().into_owned(),
                data_path: exported.data.to_string_lossy().into_owned(),
                metadata_bytes: exported.metadata_bytes,
                data_bytes: exported.data_bytes,
            })
        })
        .await
    }

    async fn serve(
        &self,
        request: Request<v1::ServeRequest>,
    ) -> Result<Response<v1::ServeResponse>, Status> {
        let v1::ServeRequest { layer_id, holder } = request.into_inner();
        let layer = layer_of(&layer_id)?;
        self.blocking(move |node| {
            let socket = node.servers.serve(&layer, &holder)?;
            Ok(v1::ServeResponse {
                socket_path: socket.to_string_lossy().into_owned(),
                tag: virtiofs::TAG.to_owned(),
            })
        })
        .await
    }

    async fn end_serve(
        &self,
        request: Request<v1::EndServeRequest>,
    ) -> Result<Response<v1::EndServeResponse>, Status> {
        let v1::EndServeRequest { layer_id, holder } = request.into_inner();
        let layer = layer_of(&layer_id)?;
        self.blocking(move |node| {
            node.servers.end(&layer, &holder)?;
            Ok(v1::EndServeResponse {})
        })
        .await
    }

    async fn withdraw(
        &self,
        request: Request<WithdrawRequest>,
    ) -> Result<Response<WithdrawResponse>, Status> {
        let WithdrawRequest { layer_id, holder } = request.into_inner();
        let layer = layer_of(&layer_id)?;
        self.blocking(move |node| {
            let gone = node.exports.withdraw(&layer, &holder)?;
            Ok(WithdrawResponse { gone })
        })
        .await
    }

    async fn stats(&self, _: Request<StatsRequest>) -> Result<Response<StatsResponse>, Status> {
        self.blocking(stats::collect).await
    }

    async fn complete(
        &self,
        request: Request<CompleteRequest>,
    ) -> Result<Response<CompleteResponse>, Status> {
        let CompleteRequest { layer_id, rate_bytes_per_s } = request.into_inner();
        let layer = layer_of(&layer_id)?;
        self.blocking(move |node| {
            let Completed { fetched_bytes, broken_off } =
                node.completions.load(&node.attachments, &layer, rate_bytes_per_s)?;
            Ok(CompleteResponse { fetched_bytes, broken_off })
        })
        .await
    }

    async fn record(
        &self,
        request: Request<RecordRequest>,
    ) -> Result<Response<RecordResponse>, Status> {
        let RecordRequest { name, layer_ids, env_id } = request.into_inner();
        let layers = layers_of(&layer_ids)?;
        let environment = profile::environment_of(&env_id).map_err(to_status)?;
        self.blocking(move |node| {
            let warm = node.attachments.record(&name, &layers, environment)?;
            let warm_layer_ids = warm.iter().map(|id| id.as_bytes().to_vec()).collect();
            Ok(RecordResponse { warm_layer_ids })
        })
        .await
    }

    async fn stop_record(
        &self,
        request: Request<StopRecordRequest>,
    ) -> Result<Response<StopRecordResponse>, Status> {
        let StopRecordRequest { name, discard } = request.into_inner();
        self.blocking(move |node| {
            let parts = node.attachments.parts();
            let recorded = parts.recorder.end(&name)?;
            if !discard {
                profile::keep(&parts.store, &recorded)?;
            }
            Ok(StopRecordResponse {
                truncated: recorded.truncated,
                profile: Profile::new(vec![recorded.run]).encode(),
            })
        })
        .await
    }

    async fn prefetch(
        &self,
        request: Request<PrefetchRequest>,
    ) -> Result<Response<PrefetchResponse>, Status> {
        let PrefetchRequest { env_id, layer_ids } = request.into_inner();
        let layers = layers_of(&layer_ids)?;
        let environment = profile::environment_of(&env_id).map_err(to_status)?;
        self.blocking(move |node| {
            node.attachments.prefetch(&layers, environment);
            Ok(PrefetchResponse {})
        })
        .await
    }

    async fn evict(
        &self,
        request: Request<EvictRequest>,
    ) -> Result<Response<EvictResponse>, Status> {
        let layer = layer_of(&request.into_inner().layer_id)?;
        self.blocking(move |node| {
            let freed_bytes = node.attachments.evict(&layer)?;
            Ok(EvictResponse { freed_bytes })
        })
        .await
    }

    async fn pin(&self, request: Request<PinRequest>) -> Result<Response<PinResponse>, Status> {
        let PinRequest { layer_id, pinned } = request.into_inner();
        let layer = layer_of(&layer_id)?;
        self.blocking(move |node| {
            Ok(PinResponse { changed: node.attachments.set_pinned(&layer, pinned)? })
        })
        .await
    }

    async fn check(
        &self,
        request: Request<CheckRequest>,
    ) -> Result<Response<CheckResponse>, Status> {
        let CheckRequest { layer_id, repair } = request.into_inner();
        let layer = layer_of(&layer_id)?;
        self.blocking(move |node| {
            let checked = node.attachments.check(&layer, repair)?;
            Ok(CheckResponse {
                chunks: checked.chunks,
                bytes: checked.bytes,
                damages: checked.damages,
                listed: checked.listed,
                repaired: checked.repaired,
                served: checked.served,
            })
        })
        .await
    }

    async fn drain(
        &self,
        request: Request<DrainRequest>,
    ) -> Result<Response<DrainResponse>, Status> {
        let force = request.into_inner().force;
        let drained = self
            .blocking(move |node| {
                node.drain(force)?;
                Ok(DrainResponse {})
            })
            .await;
        if drained.is_ok() {
            self.drained.notify_one();
        }
        drained
    }
}
