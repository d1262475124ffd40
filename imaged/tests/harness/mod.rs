//! A daemon in this process, a client to it, and layers to publish.
#![allow(clippy::unwrap_used, dead_code)]

use imaged::{ImagedConfig, Service};
use layer::chunk::{BLOCK_BYTES, Chunk, ChunkTable};
use layer::environment::{Environment, RunConfig};
use layer::layer_file::LayerFile;
use layer::manifest::{LayerKind, Manifest};
use layer::tree::{Inode, Kind, Timestamp, Tree, Xattr};
use layer::{ChunkDigest, LayerId, Result};
use proto::status::from_status;
use proto::v1;
use proto::v1::images_client::ImagesClient;
use std::collections::BTreeMap;
use std::sync::Arc;
use store::codec::encode_chunk;
use store::{Backend, Store};
use tokio_stream::StreamExt;
use tonic::transport::Channel;

pub struct Daemon {
    pub store: Arc<Store>,
    catalog: tempfile::TempDir,
    service: Service,
}

impl Daemon {
    pub async fn new(backend: Arc<dyn Backend>) -> Self {
        let store = Arc::new(Store::open(backend).unwrap());
        Self::start(store, tempfile::tempdir().unwrap()).await.unwrap()
    }

    pub async fn start(store: Arc<Store>, catalog: tempfile::TempDir) -> Result<Self> {
        let config =
            ImagedConfig { store: store.clone(), catalog_dir: catalog.path().join("catalog") };
        let service = tokio::task::spawn_blocking(|| Service::open(config)).await.unwrap()?;
        Ok(Self { store, catalog, service })
    }

    pub async fn client(&self) -> Client {
        let channel = proto::connect::in_process(self.service.routes()).await.unwrap();
        Client { rpc: ImagesClient::new(channel) }
    }

    /// Its word counts.
    pub async fn own_client(&self) -> Client {
        let channel = proto::connect::in_process_own(self.service.routes()).await.unwrap();
        Client { rpc: ImagesClient::new(channel) }
    }

    /// The same store and an empty catalog.
    pub async fn restarted_without_catalog(self) -> Self {
        let Self { store, service, catalog } = self;
        drop(service);
        drop(catalog);
        Self::start(store, tempfile::tempdir().unwrap()).await.unwrap()
    }
}

#[derive(Clone)]
pub struct Client {
    pub rpc: ImagesClient<Channel>,
}

impl Client {
    pub async fn open(&mut self) -> String {
        self.try_open().await.unwrap()
    }

    pub async fn try_open(&mut self) -> Result<String> {
        let request = v1::OpenPublishRequest { purpose: "test".into(), ttl_ms: 0 };
        let opened = self.rpc.open_publish(request).await.map_err(from_status)?;
        Ok(opened.into_inner().publish_id)
    }

    pub async fn missing(&mut self, publish: &str, made: &Made) -> Result<Vec<bool>> {
        let digests = made.chunks.iter().map(|(digest, ..)| digest.0.to_vec()).collect();
        let request = v1::MissingChunksRequest { publish_id: publish.into(), digests };
        Ok(self.rpc.missing_chunks(request).await.map_err(from_status)?.into_inner().missing)
    }

    pub async fn upload(&mut self, publish: &str, made: &Made) -> Result<v1::UploadChunksResponse> {
        self.upload_messages(made.messages(publish)).await
    }

    pub async fn upload_messages(
        &mut self,
        messages: Vec<v1::UploadChunk>,
    ) -> Result<v1::UploadChunksResponse> {
        let uploaded = self.rpc.upload_chunks(tokio_stream::iter(messages)).await;
        Ok(uploaded.map_err(from_status)?.into_inner())
    }

    pub async fn commit(&mut self, publish: &str, made: &Made) -> Result<(LayerId, bool)> {
        let bytes = made.file.encode().unwrap();
        let parts: Vec<_> = bytes
            .chunks(1000)
            .map(|part| v1::CommitLayerPart { publish_id: publish.into(), data: part.to_vec() })
            .collect();
        let done = self.rpc.commit_layer(tokio_stream::iter(parts)).await.map_err(from_status)?;
        let done = done.into_inner();
        Ok((LayerId::from_slice(&done.layer_id)?, done.existed))
    }

    /// The whole sequence, as the builder does it.
    pub async fn publish(&mut self, made: &Made) -> Result<LayerId> {
        let publish = self.try_open().await?;
        let missing = self.missing(&publish, made).await?;
        let mut messages = made.messages(&publish);
        let mut wanted = missing.iter();
        messages.retain(|_| *wanted.next().unwrap());
        if let Some(first) = messages.first_mut() {
            first.publish_id.clone_from(&publish);
        }
        self.upload_messages(messages).await?;
        let (id, _) = self.commit(&publish, made).await?;
        let close = v1::ClosePublishRequest { publish_id: publish };
        self.rpc.close_publish(close).await.map_err(from_status)?;
        Ok(id)
    }

    pub async fn resolve(&mut self, name: &str) -> Result<v1::ResolveResponse> {
        let request = v1::ResolveRequest { name: name.into() };
        Ok(self.rpc.resolve(request).await.map_err(from_status)?.into_inner())
    }

    pub async fn list(&mut self, kind: &str) -> Result<Vec<v1::ReferenceEntry>> {
        let request = v1::ListReferencesRequest { kind: kind.into() };
        let stream = self.rpc.list_references(request).await.map_err(from_status)?.into_inner();
        stream.collect::<std::result::Result<_, _>>().await.map_err(from_status)
    }

    pub async fn history(&mut self, reference: &str) -> Result<Vec<v1::ReferenceEntry>> {
        let request = v1::HistoryRequest { reference: reference.into() };
        let stream = self.rpc.history(request).await.map_err(from_status)?.into_inner();
        stream.collect::<std::result::Result<_, _>>().await.map_err(from_status)
    }
}

/// A layer with its data. No file in its metadata image refers to the data: the daemon does not ask.
pub struct Made {
    pub file: LayerFile,
    pub data: Vec<u8>,
    /// Digest, codec number, plain bytes and payload of each chunk that is not zeros.
    pub chunks: Vec<(ChunkDigest, u8, u32, Vec<u8>)>,
    pub note: String,
}

/// `count` chunks of several sizes, some compressible, and two of zeros.
pub fn made(seed: u64, count: u64) -> Made {
    let plains = (0..count + 2)
        .map(|number| {
            let blocks = (number % 5 * 7 + 1) as usize;
            let size = blocks * BLOCK_BYTES as usize;
            match number {
                1 | 3 => vec![0; size],
                _ if number % 2 == 0 => noise(size * 2, seed << 32 | number),
                _ => format!("{seed} {number} ").bytes().cycle().take(size).collect(),
            }
        })
        .collect::<Vec<_>>();
    assemble(&plains, format!("layer {seed}"))
}

/// `count` chunks of this size that do not compress.
pub fn large(seed: u64, count: u64, size: usize) -> Made {
    let plains: Vec<_> = (0..count).map(|number| noise(size, seed << 32 | number << 8)).collect();
    assemble(&plains, format!("large layer {seed}"))
}

fn assemble(plains: &[Vec<u8>], note: String) -> Made {
    let (mut table, mut chunks, mut data, mut start_block) =
        (Vec::new(), Vec::new(), Vec::new(), 0);
    for plain in plains {
        let blocks = plain.len() as u32 / BLOCK_BYTES;
        let zero = plain.iter().all(|byte| *byte == 0);
        let digest = if zero { ChunkDigest::ZERO } else { ChunkDigest::of(plain) };
        table.push(Chunk { start_block, blocks, digest });
        start_block += blocks;
        data.extend_from_slice(plain);
        if !zero {
            let (codec, payload) = encode_chunk(plain, 1);
            chunks.push((digest, codec.number(), plain.len() as u32, payload));
        }
    }
    let chunk_table = ChunkTable::new(table).unwrap();
    let metadata = image(&note, chunk_table.data_blocks());
    let manifest = Manifest {
        annotations: [("note".to_owned(), note.clone())].into(),
        directories: 1,
        plain_bytes: data.len() as u64,
        ..Manifest::describing(LayerKind::Base, &chunk_table, &metadata)
    };
    Made { file: LayerFile { manifest, chunk_table, metadata }, data, chunks, note }
}

/// A metadata image with nothing but a root, which carries the note.
pub fn image(note: &str, data_blocks: u32) -> Vec<u8> {
    let root = Inode {
        mode: 0o755,
        uid: 0,
        gid: 0,
        mtime: Timestamp::default(),
        xattrs: vec![Xattr { name: b"user.note".to_vec(), value: note.as_bytes().to_vec() }],
        kind: Kind::Directory(BTreeMap::new()),
    };
    layer::erofs::writer::write(&Tree::new(root), data_blocks).unwrap().bytes
}

impl Made {
    /// The same layer with other parts, which its manifest describes as they are.
    pub fn with_parts(self, chunk_table: ChunkTable, metadata: Vec<u8>) -> Self {
        let Manifest { annotations, kind, .. } = self.file.manifest;
        let manifest =
            Manifest { annotations, ..Manifest::describing(kind, &chunk_table, &metadata) };
        Self { file: LayerFile { manifest, chunk_table, metadata }, ..self }
    }

    pub fn messages(&self, publish: &str) -> Vec<v1::UploadChunk> {
        let message =
            |(number, chunk): (usize, &(ChunkDigest, u8, u32, Vec<u8>))| v1::UploadChunk {
                publish_id: if number == 0 { publish.into() } else { String::new() },
                digest: chunk.0.0.to_vec(),
                codec: i32::from(chunk.1),
                plain_bytes: chunk.2,
                payload: chunk.3.clone(),
            };
        self.chunks.iter().enumerate().map(message).collect()
    }

    pub fn stored_bytes(&self) -> usize {
        self.chunks.iter().map(|(.., payload)| payload.len()).sum()
    }

    /// Takes the first `count` chunks with data from another layer of the same shape.
    pub fn replace_chunks(&mut self, other: &Made, count: usize) {
        let mut left = count;
        let plains: Vec<Vec<u8>> = self
            .file
            .chunk_table
            .chunks()
            .iter()
            .map(|chunk| {
                let range = chunk.byte_range();
                let range = range.start as usize..range.end as usize;
                let take = !chunk.is_zero() && left > 0;
                left -= usize::from(take);
                if take { other.data[range].to_vec() } else { self.data[range].to_vec() }
            })
            .collect();
        *self = assemble(&plains, self.note.clone());
    }
}

pub fn environment(layers: &[LayerId]) -> Environment {
    Environment::new(layers.to_vec(), RunConfig::default()).unwrap()
}

/// Bytes that do not compress.
pub fn noise(len: usize, mut state: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
