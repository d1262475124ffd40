//! Publishing through the image daemon's gRPC interface.
//!
//! The builder's threads block; the client is asynchronous. Chunks pass through a bounded channel into
//! one upload stream that lives from the first upload to the next flush, so a slow store slows the
//! builder and memory stays bounded. Must not be called from asynchronous code.
//!
//! Several threads upload into the one stream. When the daemon ends it early, whoever notices first asks for
//! the verdict; it is kept, so that every call after it fails with the daemon's reason and none opens a
//! stream of its own.
//!
//! Locking: one mutex around the state of the stream, held while the verdict is awaited and never while a
//! chunk is sent: chunks on their way have to arrive, or be refused, before there is a verdict.

use super::{EncodedChunk, Publisher};
use layer::pack::Codec;
use layer::{ChunkDigest, EnvId, Error, ErrorKind, LayerId, Result};
use proto::status::from_status;
use proto::v1;
use proto::v1::images_client::ImagesClient;
use std::sync::{Mutex, MutexGuard, PoisonError};
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
    purpose: String,
    /// Another one after each [`Publisher::reopen`].
    publish_id: Mutex<String>,
    upload: Mutex<Upload>,
}

/// The upload stream.
#[derive(Debug)]
enum Upload {
    /// Nothing was uploaded since the last flush.
    Idle,
    /// Chunks go to the sender; the reply is the verdict on all of them.
    Open {
        sender: mpsc::Sender<v1::UploadChunk>,
        reply: JoinHandle<Result<v1::UploadChunksResponse, Status>>,
    },
    /// The daemon refused something, or is gone: the kind of its answer and what it said.
    Failed(ErrorKind, String),
}

impl ImagesPublisher {
    /// Opens a publish. `purpose` is for people who look at leases. Blocks; `handle` is the runtime
    /// that drives `channel`.
    pub fn open(handle: Handle, channel: Channel, purpose: &str) -> Result<Self> {
        let client = ImagesClient::new(channel);
        let purpose = purpose.to_owned();
        let publish_id = Mutex::new(open(&handle, &client, &purpose)?);
        Ok(Self { handle, client, purpose, publish_id, upload: Mutex::new(Upload::Idle) })
    }

    fn publish_id(&self) -> String {
        self.publish_id.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The lease would expire by itself; nobody waits for this answer.
    fn close(&self, publish_id: String) {
        let mut client = self.client.clone();
        self.handle.spawn(async move {
            let request = v1::ClosePublishRequest { publish_id };
            if let Err(status) = client.close_publish(request).await {
                tracing::debug!(%status, "close a publish");
            }
        });
    }

    fn state(&self) -> MutexGuard<'_, Upload> {
        self.upload.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where chunks go; opens the stream when there is none.
    fn sender(&self) -> Result<mpsc::Sender<v1::UploadChunk>> {
        let mut state = self.state();
        match &*state {
            Upload::Open { sender, .. } => return Ok(sender.clone()),
            Upload::Failed(kind, reason) => return Err(refusal(*kind, reason)),
            Upload::Idle => {}
        }
        let (sender, receiver) = mpsc::channel(WAITING_CHUNKS);
        let mut client = self.client.clone();
        let reply = self.handle.spawn(async move {
            let answer = client.upload_chunks(ReceiverStream::new(receiver)).await;
            answer.map(tonic::Response::into_inner)
        });
        *state = Upload::Open { sender: sender.clone(), reply };
        Ok(sender)
    }

    /// Ends the stream, if there is one, and waits for the daemon's verdict.
    fn settle(&self) -> Result<()> {
        let mut state = self.state();
        let failed = match std::mem::replace(&mut *state, Upload::Idle) {
            Upload::Idle => return Ok(()),
            Upload::Failed(kind, reason) => (kind, reason),
            Upload::Open { sender, reply } => {
                drop(sender);
                match self.handle.block_on(reply) {
                    Ok(Ok(_)) => return Ok(()),
                    Ok(Err(status)) => {
                        let error = from_status(status);
                        (error.kind(), error.chain())
                    }
                    Err(error) => (ErrorKind::Internal, format!("the upload task died: {error}")),
                }
            }
        };
        let error = refusal(failed.0, &failed.1);
        *state = Upload::Failed(failed.0, failed.1);
        Err(error)
    }
}

/// Opens a publish; answers its id.
fn open(handle: &Handle, client: &ImagesClient<Channel>, purpose: &str) -> Result<String> {
    let request = v1::OpenPublishRequest { purpose: purpose.to_owned(), ttl_ms: LEASE_TTL_MS };
    let opened = handle
        .block_on(client.clone().open_publish(request))
        .map_err(|status| from_status(status).context("open a publish"))?;
    Ok(opened.into_inner().publish_id)
}

fn refusal(kind: ErrorKind, reason: &str) -> Error {
    Error::new(kind, reason).context("upload chunks")
}

impl Publisher for ImagesPublisher {
    fn missing(&self, digests: &[ChunkDigest]) -> Result<Vec<bool>> {
        let request = v1::MissingChunksRequest {
            publish_id: self.publish_id(),
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
        let message = v1::UploadChunk {
            // Only the stream's first message needs it, but which one that is depends on the threads.
            publish_id: self.publish_id(),
            digest: chunk.digest.0.to_vec(),
            codec: codec.into(),
            plain_bytes: chunk.plain_bytes,
            payload: chunk.payload,
        };
        if self.sender()?.blocking_send(message).is_err() {
            // The daemon ended the stream; its verdict says why.
            self.settle()?;
            return Err(refusal(ErrorKind::Unavailable, "the upload stream ended early"));
        }
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        self.settle()
    }

    fn commit_layer(&self, file: &[u8]) -> Result<LayerId> {
        let publish_id = self.publish_id();
        let parts: Vec<v1::CommitLayerPart> = file
            .chunks(PART_BYTES)
            .map(|data| v1::CommitLayerPart { publish_id: publish_id.clone(), data: data.to_vec() })
            .collect();
        let answer = self
            .handle
            .block_on(self.client.clone().commit_layer(tokio_stream::iter(parts)))
            .map_err(|status| from_status(status).context("commit a layer"))?;
        LayerId::from_slice(&answer.into_inner().layer_id)
    }

    fn reopen(&self) -> Result<()> {
        let opened = open(&self.handle, &self.client, &self.purpose)?;
        let mut publish_id = self.publish_id.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = std::mem::replace(&mut *publish_id, opened);
        drop(publish_id);
        *self.state() = Upload::Idle;
        self.close(ended);
        Ok(())
    }

    fn commit_environment(&self, document: &[u8]) -> Result<EnvId> {
        let request = v1::CommitEnvironmentRequest {
            publish_id: self.publish_id(),
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
        self.close(self.publish_id());
    }
}
