//! The gRPC service: each call is parsed, handed to a thread that may block, and answered.

use crate::images::Images;
use crate::{names, upload, wire};
use layer::reference::RefKind;
use layer::{Error, ErrorKind, LayerId, Result};
use proto::status::{from_status, to_status};
use proto::v1;
use proto::v1::images_server::{Images as Rpc, ImagesServer};
use std::sync::Arc;
use store::MAX_LAYER_FILE_BYTES;
use tokio_stream::StreamExt;
use tonic::{Request, Response, Status, Streaming};

/// The largest message: a chunk of the largest size and what is around it.
const MAX_MESSAGE_BYTES: usize = layer::chunk::MAX_CHUNK_BYTES as usize + (64 << 10);

/// Missing digests that one answer lists.
const MAX_MISSING: usize = 10_000;

pub(crate) fn routes(images: Arc<Images>) -> tonic::service::Routes {
    let server = ImagesServer::new(Calls { images }).max_decoding_message_size(MAX_MESSAGE_BYTES);
    tonic::service::Routes::new(server)
}

struct Calls {
    images: Arc<Images>,
}

type Answer<T> = std::result::Result<Response<T>, Status>;
type Entries =
    tokio_stream::Iter<std::vec::IntoIter<std::result::Result<v1::ReferenceEntry, Status>>>;

impl Calls {
    async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Images) -> Result<T> + Send + 'static,
    ) -> Answer<T> {
        let images = self.images.clone();
        let done =
            tokio::task::spawn_blocking(move || work(&images)).await.unwrap_or_else(|error| {
                Err(Error::new(ErrorKind::Internal, "the call ended badly").with_source(error))
            });
        done.map(Response::new).map_err(to_status)
    }
}

fn entries(entries: Vec<v1::ReferenceEntry>) -> Entries {
    tokio_stream::iter(entries.into_iter().map(Ok).collect::<Vec<_>>())
}

/// Gathers the parts of a layer file. Returns the publish and the file.
async fn gathered(mut parts: Streaming<v1::CommitLayerPart>) -> Result<(String, Vec<u8>)> {
    let (mut publish_id, mut file) = (String::new(), Vec::new());
    while let Some(part) = parts.message().await.map_err(from_status)? {
        if !part.publish_id.is_empty() {
            publish_id = part.publish_id;
        }
        file.extend_from_slice(&part.data);
        if file.len() as u64 > MAX_LAYER_FILE_BYTES {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("the layer file is longer than {MAX_LAYER_FILE_BYTES} bytes"),
            ));
        }
    }
    Ok((publish_id, file))
}

#[tonic::async_trait]
impl Rpc for Calls {
    async fn open_publish(
        &self,
        request: Request<v1::OpenPublishRequest>,
    ) -> Answer<v1::OpenPublishResponse> {
        let v1::OpenPublishRequest { purpose, ttl_ms } = request.into_inner();
        self.call(move |images| {
            let (publish_id, expires_unix_ns) = images.open_publish(&purpose, ttl_ms)?;
            Ok(v1::OpenPublishResponse { publish_id, expires_unix_ns })
        })
        .await
    }

    async fn missing_chunks(
        &self,
        request: Request<v1::MissingChunksRequest>,
    ) -> Answer<v1::MissingChunksResponse> {
        let request = request.into_inner();
        self.call(move |images| {
            let digests = wire::digests(&request.digests)?;
            let publish = images.publish(&request.publish_id)?;
            let missing = images.missing_chunks(&publish, &digests)?;
            Ok(v1::MissingChunksResponse { missing })
        })
        .await
    }

    async fn upload_chunks(
        &self,
        request: Request<Streaming<v1::UploadChunk>>,
    ) -> Answer<v1::UploadChunksResponse> {
        let sender = match proto::connect::is_own(&request) {
            true => upload::Sender::ThisProcess,
            false => upload::Sender::Anyone,
        };
        let mut messages = request.into_inner();
        let Some(first) = messages.message().await? else {
            return Ok(Response::new(v1::UploadChunksResponse::default()));
        };
        let publish_id = first.publish_id.clone();
        let publish = self.call(move |images| images.publish(&publish_id)).await?.into_inner();
        let rest = messages.map(|message| message.map_err(from_status));
        let chunks = tokio_stream::once(Ok(first)).chain(rest).map(|message| wire::chunk(message?));
        let uploaded =
            upload::receive(self.images.clone(), publish, sender, Box::pin(chunks)).await;
        let uploaded = uploaded.map_err(to_status)?;
        Ok(Response::new(v1::UploadChunksResponse {
            chunks_stored: uploaded.chunks_stored,
            bytes_stored: uploaded.bytes_stored,
            chunks_known: uploaded.chunks_known,
        }))
    }

    async fn commit_layer(
        &self,
        request: Request<Streaming<v1::CommitLayerPart>>,
    ) -> Answer<v1::CommitLayerResponse> {
        let (publish_id, file) = gathered(request.into_inner()).await.map_err(to_status)?;
        self.call(move |images| {
            let publish = images.publish(&publish_id)?;
            let (id, existed) = images.commit_layer(&publish, &file)?;
            Ok(v1::CommitLayerResponse { layer_id: id.0.to_vec(), existed })
        })
        .await
    }

    async fn commit_environment(
        &self,
        request: Request<v1::CommitEnvironmentRequest>,
    ) -> Answer<v1::CommitEnvironmentResponse> {
        let v1::CommitEnvironmentRequest { publish_id, document } = request.into_inner();
        self.call(move |images| {
            let publish = images.publish(&publish_id)?;
            let (id, existed) = images.commit_environment(&publish, &document)?;
            Ok(v1::CommitEnvironmentResponse { env_id: id.0.to_vec(), existed })
        })
        .await
    }

    async fn close_publish(
        &self,
        request: Request<v1::ClosePublishRequest>,
    ) -> Answer<v1::ClosePublishResponse> {
        let id = request.into_inner().publish_id;
        self.call(move |images| {
            images.close_publish(&id)?;
            Ok(v1::ClosePublishResponse {})
        })
        .await
    }

    async fn resolve(&self, request: Request<v1::ResolveRequest>) -> Answer<v1::ResolveResponse> {
        let name = request.into_inner().name;
        self.call(move |images| images.resolve(&name).map(wire::resolved)).await
    }

    type ListReferencesStream = Entries;

    async fn list_references(
        &self,
        request: Request<v1::ListReferencesRequest>,
    ) -> Answer<Self::ListReferencesStream> {
        let kind = request.into_inner().kind;
        self.call(move |images| {
            let kind = if kind.is_empty() { None } else { Some(kind.parse::<RefKind>()?) };
            let listed = images.list_references(kind)?.into_iter();
            Ok(entries(listed.map(|(reference, entry)| wire::entry(&reference, entry)).collect()))
        })
        .await
    }

    type HistoryStream = Entries;

    async fn history(&self, request: Request<v1::HistoryRequest>) -> Answer<Self::HistoryStream> {
        let name = request.into_inner().reference;
        self.call(move |images| {
            let reference = names::parse_reference(&name)?;
            let history = images.history(&reference)?.into_iter();
            Ok(entries(history.map(|entry| wire::entry(&reference, entry)).collect()))
        })
        .await
    }

    async fn tag(&self, request: Request<v1::TagRequest>) -> Answer<v1::ReferenceEntry> {
        let request = request.into_inner();
        self.call(move |images| {
            let reference = names::parse_reference(&request.reference)?;
            let target = wire::target(request.target)?;
            let entry = images.tag(&reference, target, &request.author, request.expected_number)?;
            Ok(wire::entry(&reference, entry))
        })
        .await
    }

    async fn untag(&self, request: Request<v1::UntagRequest>) -> Answer<v1::ReferenceEntry> {
        let v1::UntagRequest { reference, author } = request.into_inner();
        self.call(move |images| {
            let reference = names::parse_reference(&reference)?;
            let entry = images.untag(&reference, &author)?;
            Ok(wire::entry(&reference, entry))
        })
        .await
    }

    async fn describe_layer(
        &self,
        request: Request<v1::DescribeLayerRequest>,
    ) -> Answer<v1::LayerDescription> {
        let id = request.into_inner().layer_id;
        self.call(move |images| images.describe(&LayerId::from_slice(&id)?).map(wire::layer)).await
    }

    async fn acquire_lease(&self, request: Request<v1::AcquireLeaseRequest>) -> Answer<v1::Lease> {
        let v1::AcquireLeaseRequest { holder, ids, ttl_ms } = request.into_inner();
        self.call(move |images| {
            images.acquire_lease(&holder, wire::ids(&ids)?, ttl_ms).map(wire::lease)
        })
        .await
    }

    async fn release_lease(
        &self,
        request: Request<v1::ReleaseLeaseRequest>,
    ) -> Answer<v1::ReleaseLeaseResponse> {
        let id = request.into_inner().lease_id;
        self.call(move |images| {
            images.release_lease(&id)?;
            Ok(v1::ReleaseLeaseResponse {})
        })
        .await
    }

    async fn locate(&self, request: Request<v1::LocateRequest>) -> Answer<v1::LocateResponse> {
        let id = request.into_inner().layer_id;
        self.call(move |images| {
            let (number, missing) = images.write_locations(&LayerId::from_slice(&id)?)?;
            let missing =
                missing.iter().take(MAX_MISSING).map(|digest| digest.0.to_vec()).collect();
            Ok(v1::LocateResponse { number, missing })
        })
        .await
    }

    async fn reindex(&self, _: Request<v1::ReindexRequest>) -> Answer<v1::ReindexResponse> {
        self.call(|images| images.reindex().map(wire::reindexed)).await
    }

    async fn collect(&self, request: Request<v1::CollectRequest>) -> Answer<v1::CollectResponse> {
        let options = wire::collect_options(&request.into_inner());
        self.call(move |images| images.collect(&options).map(wire::collected)).await
    }

    async fn undo_collection(
        &self,
        _: Request<v1::UndoCollectionRequest>,
    ) -> Answer<v1::UndoCollectionResponse> {
        self.call(|images| {
            let reprieved = images.undo_collection()?;
            Ok(v1::UndoCollectionResponse { reprieved })
        })
        .await
    }
}
