//! Layers to publish: small, and made of a few chunks that they share.

use super::stage::Dice;
use crate::upload::Chunk as Uploaded;
use layer::ChunkDigest;
use layer::chunk::{BLOCK_BYTES, Chunk, ChunkTable};
use layer::environment::{Environment, RunConfig};
use layer::layer_file::LayerFile;
use layer::manifest::{LayerKind, Manifest};
use layer::tree::{Inode, Kind, Timestamp, Tree};
use layer::{EnvId, LayerId};
use std::collections::BTreeMap;
use store::codec::encode_chunk;

/// Different chunks in one world.
const CHUNKS: usize = 24;

pub(super) struct Content {
    pub(super) layers: Vec<Made>,
    pub(super) environments: Vec<Environment>,
}

pub(super) struct Made {
    pub(super) id: LayerId,
    pub(super) bytes: Vec<u8>,
    /// Their plain bytes.
    pub(super) chunks: Vec<(ChunkDigest, Vec<u8>)>,
}

impl Made {
    pub(super) fn upload(&self, at: usize) -> Uploaded {
        let (digest, plain) = &self.chunks[at];
        let (codec, payload) = encode_chunk(plain, 1);
        Uploaded { digest: *digest, codec, plain_bytes: plain.len() as u32, payload }
    }
}

impl Content {
    pub(super) fn new(dice: &mut Dice) -> Self {
        let plain = |number: usize| -> Vec<u8> {
            let mut dice = Dice::new(number as u64 + 1000);
            (0..BLOCK_BYTES / 8).flat_map(|_| dice.next().to_le_bytes()).collect()
        };
        let chunks: Vec<Vec<u8>> = (0..CHUNKS).map(plain).collect();
        let layers: Vec<Made> = (0..14)
            .map(|number| {
                let mut picked: Vec<usize> =
                    (0..2 + dice.below(4)).map(|_| dice.below(CHUNKS)).collect();
                picked.sort_unstable();
                picked.dedup();
                made(number, &picked.iter().map(|at| chunks[*at].clone()).collect::<Vec<_>>())
            })
            .collect();
        let environments = (0..6)
            .map(|_| {
                let ids = (0..1 + dice.below(3)).map(|_| layers[dice.below(layers.len())].id);
                Environment::new(ids.collect(), RunConfig::default()).unwrap()
            })
            .collect();
        Self { layers, environments }
    }

    pub(super) fn environment(&self, id: &EnvId) -> Option<&Environment> {
        self.environments.iter().find(|environment| environment.id() == *id)
    }
}

fn made(number: usize, plains: &[Vec<u8>]) -> Made {
    let mut table = Vec::new();
    let mut chunks = Vec::new();
    for (start_block, plain) in (0..).zip(plains) {
        let digest = ChunkDigest::of(plain);
        table.push(Chunk { start_block, blocks: 1, digest });
        chunks.push((digest, plain.clone()));
    }
    let chunk_table = ChunkTable::new(table).unwrap();
    let root = Inode {
        mode: 0o755,
        uid: number as u32,
        gid: 0,
        mtime: Timestamp::default(),
        xattrs: Vec::new(),
        kind: Kind::Directory(BTreeMap::new()),
    };
    let image = layer::erofs::writer::write(&Tree::new(root), chunk_table.data_blocks()).unwrap();
    let metadata = image.bytes;
    let manifest = Manifest {
        directories: 1,
        plain_bytes: 0,
        ..Manifest::describing(LayerKind::Base, &chunk_table, &metadata)
    };
    let file = LayerFile { manifest, chunk_table, metadata };
    Made { id: file.id(), bytes: file.encode().unwrap(), chunks }
}
