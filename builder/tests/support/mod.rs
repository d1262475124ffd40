//! A store in memory, and ways to look at what a build put there.
#![allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::needless_pass_by_value
)]

use builder::{
    BuildOptions, Built, Cancel, ChunkingOptions, EncodedChunk, LowerLayers, Publisher, Silent,
    Source,
};
use layer::chunk::ChunkTable;
use layer::layer_file::LayerFile;
use layer::manifest::LayerKind;
use layer::tree::{Body, FileData, Inode, Kind, Tree};
use layer::{ChunkDigest, EnvId, Error, LayerId, Result};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;

/// Keeps everything, checks what the image daemon checks.
#[derive(Debug, Default)]
pub struct MemoryPublisher {
    pub chunks: Mutex<BTreeMap<ChunkDigest, Vec<u8>>>,
    pub layers: Mutex<BTreeMap<LayerId, LayerFile>>,
    pub environments: Mutex<Vec<Vec<u8>>>,
    /// Refuses uploads after so many, to play a full store.
    pub room: Mutex<Option<usize>>,
    /// So many times a layer is refused and all chunks are forgotten: the publish has ended meanwhile.
    pub endings: Mutex<u32>,
    /// Refuses the next question with the end of the publish.
    pub ended: Mutex<bool>,
    /// How often a publish was opened again.
    pub reopened: Mutex<u32>,
    /// Pressed after so many uploads.
    pub cancel_after: Mutex<Option<(usize, Cancel)>>,
}

impl Publisher for MemoryPublisher {
    fn missing(&self, digests: &[ChunkDigest]) -> Result<Vec<bool>> {
        if std::mem::take(&mut *self.ended.lock().unwrap()) {
            return Err(Error::not_found("the publish has ended"));
        }
        let chunks = self.chunks.lock().unwrap();
        Ok(digests.iter().map(|digest| !chunks.contains_key(digest)).collect())
    }

    fn upload(&self, chunk: EncodedChunk) -> Result<()> {
        let plain = store::codec::decode_chunk(
            &chunk.payload,
            chunk.codec,
            chunk.plain_bytes,
            &chunk.digest,
        )?;
        let mut chunks = self.chunks.lock().unwrap();
        if self.room.lock().unwrap().is_some_and(|room| chunks.len() >= room) {
            return Err(Error::new(layer::ErrorKind::NoSpace, "the store is full"));
        }
        assert!(chunks.insert(chunk.digest, plain).is_none(), "a chunk was uploaded twice");
        if let Some((count, cancel)) = &*self.cancel_after.lock().unwrap()
            && chunks.len() >= *count
        {
            cancel.cancel();
        }
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn commit_layer(&self, file: &[u8]) -> Result<LayerId> {
        let file = LayerFile::decode(file)?;
        let mut endings = self.endings.lock().unwrap();
        if *endings > 0 {
            *endings -= 1;
            self.chunks.lock().unwrap().clear();
            return Err(Error::not_found("the publish has ended"));
        }
        let chunks = self.chunks.lock().unwrap();
        for chunk in file.chunk_table.chunks().iter().filter(|chunk| !chunk.is_zero()) {
            let plain = chunks.get(&chunk.digest).expect("a layer without its chunk");
            assert_eq!(plain.len(), chunk.plain_bytes() as usize);
        }
        let id = file.id();
        self.layers.lock().unwrap().insert(id, file);
        Ok(id)
    }

    fn reopen(&self) -> Result<()> {
        *self.reopened.lock().unwrap() += 1;
        Ok(())
    }

    fn commit_environment(&self, document: &[u8]) -> Result<EnvId> {
        let environment = layer::environment::Environment::decode(document)?;
        self.environments.lock().unwrap().push(document.to_vec());
        Ok(environment.id())
    }
}

impl MemoryPublisher {
    pub fn layer(&self, id: LayerId) -> LayerFile {
        self.layers.lock().unwrap()[&id].clone()
    }

    /// The plain data space of a layer.
    pub fn data(&self, id: LayerId) -> Vec<u8> {
        let file = self.layer(id);
        let chunks = self.chunks.lock().unwrap();
        let mut data = Vec::new();
        for chunk in file.chunk_table.chunks() {
            match chunk.is_zero() {
                true => data.resize(data.len() + chunk.plain_bytes() as usize, 0),
                false => data.extend_from_slice(&chunks[&chunk.digest]),
            }
        }
        data
    }

    /// What a layer holds, by our own reader.
    pub fn view(&self, id: LayerId) -> View {
        let file = self.layer(id);
        let tree = layer::erofs::reader::Reader::parse(&file.metadata).unwrap().to_tree().unwrap();
        View { tree, data: self.data(id) }
    }
}

/// A layer that can be looked at.
#[derive(Debug)]
pub struct View {
    pub tree: Tree,
    pub data: Vec<u8>,
}

impl View {
    pub fn get(&self, path: &str) -> Option<&Inode> {
        self.tree.find(path.as_bytes()).and_then(|ix| self.tree.get(ix))
    }

    #[track_caller]
    pub fn inode(&self, path: &str) -> &Inode {
        self.get(path).unwrap_or_else(|| panic!("{path} is not there: {:?}", self.paths()))
    }

    #[track_caller]
    pub fn bytes(&self, path: &str) -> Vec<u8> {
        match &self.inode(path).kind {
            Kind::Regular(file) => self.content(file),
            other => panic!("{path} is {other:?}"),
        }
    }

    #[track_caller]
    pub fn text(&self, path: &str) -> String {
        String::from_utf8(self.bytes(path)).unwrap()
    }

    #[track_caller]
    pub fn target(&self, path: &str) -> String {
        match &self.inode(path).kind {
            Kind::Symlink(target) => String::from_utf8_lossy(target).into_owned(),
            other => panic!("{path} is {other:?}"),
        }
    }

    #[track_caller]
    pub fn xattr(&self, path: &str, name: &str) -> Option<Vec<u8>> {
        let xattrs = &self.inode(path).xattrs;
        xattrs.iter().find(|xattr| xattr.name == name.as_bytes()).map(|xattr| xattr.value.clone())
    }

    pub fn same_inode(&self, a: &str, b: &str) -> bool {
        let a = self.tree.find(a.as_bytes());
        a.is_some() && a == self.tree.find(b.as_bytes())
    }

    fn content(&self, file: &FileData) -> Vec<u8> {
        let mut bytes = vec![0; file.size as usize];
        match &file.body {
            Body::Inline(inline) => bytes.copy_from_slice(inline),
            Body::Extents(extents) => {
                for extent in extents {
                    let from = extent.data_block as usize * 4096;
                    let to = extent.file_block as usize * 4096;
                    let length = (extent.blocks as usize * 4096).min(bytes.len() - to);
                    bytes[to..to + length].copy_from_slice(&self.data[from..from + length]);
                }
            }
        }
        bytes
    }

    /// All paths in path order.
    pub fn paths(&self) -> Vec<String> {
        let mut paths = Vec::new();
        let mut pending = vec![(String::new(), layer::tree::InodeIx::ROOT)];
        while let Some((path, ix)) = pending.pop() {
            for (name, child) in self.tree.entries(ix).into_iter().flatten() {
                let path = format!("{path}/{}", String::from_utf8_lossy(name));
                paths.push(path[1..].to_owned());
                pending.push((path, *child));
            }
        }
        paths.sort();
        paths
    }
}

pub fn options() -> BuildOptions {
    BuildOptions { threads: 2, ..BuildOptions::new(LayerKind::Base) }
}

/// Small sizes, so that small trees meet every rule.
pub fn tight() -> BuildOptions {
    BuildOptions {
        chunking: ChunkingOptions {
            chunk_bytes: 8192,
            bundle_file_bytes: 8192,
            bundle_min_bytes: 8192,
            bundle_max_bytes: 16_384,
            border_one_in: 2,
            inline_bytes: 16,
            hole_entries: 64,
        },
        ..options()
    }
}

pub fn build(path: &Path, publisher: &MemoryPublisher, options: &BuildOptions) -> Result<Built> {
    builder::build(&Source::parse(path.to_str().unwrap())?, publisher, options, &Silent)
}

/// Bytes that do not compress, the same for the same seed.
pub fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    (0..length)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as u8
        })
        .collect()
}

/// Layers of a publisher as those below an upper directory, bottom first.
pub struct Below<'a> {
    pub publisher: &'a MemoryPublisher,
    pub layers: Vec<LayerId>,
}

impl LowerLayers for Below<'_> {
    fn count(&self) -> usize {
        self.layers.len()
    }

    fn layer(&self, number: usize) -> Result<(Tree, ChunkTable)> {
        let id = self.layers[number];
        Ok((self.publisher.view(id).tree, self.publisher.layer(id).chunk_table))
    }
}
