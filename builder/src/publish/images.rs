//! Publishing through the image daemon's gRPC interface.
//!
//! The builder's threads block; the client is asynchronous. Chunks pass through a bounded channel into
//! one upload stream that lives from the first upload to the next flush, so a slow store slows the
//! builder and memory stays bounded. Must not be called from asynchronous code.

use super::{EncodedChunk, Publisher};
use layer::pack::Codec;
use layer::{ChunkDigest, EnvId, Error, ErrorKind, LayerId, Result};
use proto::status::from_status;
use proto::v1;
use proto::v1::images_client::ImagesClient;
use std::sync::{Mutex, PoisonError};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::transport::Channel;

/// Chunks that may wait for the wire. With the largest chunks that is 64 MiB, with usual ones 1 MiB.
const WAITING_CHUNKS: usize = 16;
/// Bytes of a layer file in one message.
const PART_BYTES: usize = 1 << 20;
/// How long what is published is kept alive without a layer that names it.
const LEASE_TTL_MS: u64 = 6 * 3600 * 1000;

/// A [`Publisher`] over a connection to the image daemon. Holds a lease until it is dropped.
#[derive(Debug)]
pub struct ImagesPublisher {
    handle: Handle,
    client: ImagesClient<Channel>,
    publish_id: String,
    stream: Mutex<Option<Stream>>,
}

#[derive(Debug)]
struct Stream {
    sender: mpsc::Sender<v1::UploadChunk>,
    reply: JoinHandle<Result<v1::UploadChunksResponse, Status>>,
}

impl ImagesPublisher {
    /// Opens a publish. `purpose` is for people who look at leases. Blocks; `handle` is the runtime
    /// that drives `channel`.
    pub fn open(handle: Handle, channel: Channel, purpose: &str) -> Result<Self> {
        let client = ImagesClient::new(channel);
        let request = v1::OpenPublishRequest { purpose: purpose.to_owned(), ttl_ms: LEASE_TTL_MS };
        let opened = handle
            .block_on(client.clone().open_publish(request))
            .map_err(|status| from_status(status).context("open a publish"))?;
        let publish_id = opened.into_inner().publish_id;
        Ok(Self { handle, client, publish_id, stream: Mutex::new(None) })
    }

    /// Starts an upload stream with its first message, or hands out the one there is.
    fn sender(&self, first: &mut Option<v1::UploadChunk>) -> Result<mpsc::Sender<v1::UploadChunk>> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = &*stream {
            return Ok(stream.sender.clone());
        }
        let (sender, receiver) = mpsc::channel(WAITING_CHUNKS);
        if let Some(mut chunk) = first.take() {
            chunk.publish_id.clone_from(&self.publish_id);
            sender
                .try_send(chunk)
                .map_err(|_| Error::new(ErrorKind::Internal, "a fresh channel is full"))?;
        }
        let mut client = self.client.clone();
        let reply = self.handle.spawn(async move {
            client
                .upload_chunks(ReceiverStream::new(receiver))
                .await
                .map(tonic::Response::into_inner)
        });
        *stream = Some(Stream { sender: sender.clone(), reply });
        Ok(sender)
    }

    /// Ends the upload stream, if there is one, and waits for the daemon's verdict.
    fn finish(&self) -> Result<()> {
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Stream { sender, reply }) = stream else { return Ok(()) };
        drop(sender);
        match self.handle.block_on(reply) {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(status)) => Err(from_status(status).context("upload chunks")),
            Err(error) => {
                Err(Error::new(ErrorKind::Internal, "the upload task died").with_source(error))
            }
        }
    }
}

impl Publisher for ImagesPublisher {
    fn missing(&self, digests: &[ChunkDigest]) -> Result<Vec<bool>> {
        let request = v1::MissingChunksRequest {
            publish_id: self.publish_id.clone(),
            digests: digests.iter().map(|digest| digest.0.to_vec()).collect(),
        };
        let answer = self
            .handle
            .block_on(self.client.clone().missing_chunks(request))
            .map_err(|status| from_status(status).context("ask which chunks are missing"))?;
        Ok(answer.into_inner().missing)
    }

    fn upload(&self, chunk: EncodedChunk) -> Result<()> {
        let codec = match chunk.codec {
            Codec::None => v1::Codec::None,
            Codec::Zstd => v1::Codec::Zstd,
        };
        let mut message = Some(v1::UploadChunk {
            publish_id: String::new(),
            digest: chunk.digest.0.to_vec(),
            codec: codec.into(),
            plain_bytes: chunk.plain_bytes,
            payload: chunk.payload,
        });
        let sender = self.sender(&mut message)?;
        let Some(message) = message else { return Ok(()) };
        if sender.blocking_send(message).is_err() {
            // The daemon ended the stream; its answer says why.
            self.finish()?;
            return Err(Error::new(ErrorKind::Unavailable, "the upload stream ended early"));
        }
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        self.finish()
    }

    fn commit_layer(&self, file: &[u8]) -> Result<LayerId> {
        let parts: Vec<v1::CommitLayerPart> = file
            .chunks(PART_BYTES)
            .map(|data| v1::CommitLayerPart {
                publish_id: self.publish_id.clone(),
                data: data.to_vec(),
            })
            .collect();
        let answer = self
            .handle
            .block_on(self.client.clone().commit_layer(tokio_stream::iter(parts)))
            .map_err(|status| from_status(status).context("commit a layer"))?;
        LayerId::from_slice(&answer.into_inner().layer_id)
    }

    fn commit_environment(&self, document: &[u8]) -> Result<EnvId> {
        let request = v1::CommitEnvironmentRequest {
            publish_id: self.publish_id.clone(),
            document: document.to_vec(),
        };
        let answer = self
            .handle
            .block_on(self.client.clone().commit_environment(request))
            .map_err(|status| from_status(status).context("commit an environment"))?;
        EnvId::from_slice(&answer.into_inner().env_id)
    }
}

impl Drop for ImagesPublisher {
    fn drop(&mut self) {
        let mut client = self.client.clone();
        let request = v1::ClosePublishRequest { publish_id: std::mem::take(&mut self.publish_id) };
        // The lease would expire by itself; nobody waits for this answer.
        self.handle.spawn(async move {
            if let Err(status) = client.close_publish(request).await {
                tracing::debug!(%status, "close a publish");
            }
        });
    }
}
