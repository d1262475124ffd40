//! Layer files and their parts, and what a node knows of them.

use super::erofs::small_image;
use crate::Target;
use crate::seal::{sealed, unsealed};
use layer::chunk::{Chunk, ChunkTable};
use layer::frames;
use layer::layer_file::{LayerFile, Layout};
use layer::manifest::{LayerKind, Manifest};
use layer::presence::Presence;
use layer::{ChunkDigest, Digest, LayerId};
use std::collections::BTreeMap;

/// The bytes of a layer file's header in front of its digest.
const HEADER_FIELDS: usize = 40;
/// The bytes of an entry of an image's table: a length and a digest.
const ENTRY_BYTES: usize = 36;

/// A layer file; header, manifest and image get the digests that they should have.
pub const LAYER_FILE: Target = Target {
    name: "layer_file",
    run: |data| {
        let mut bytes = data.to_vec();
        mend(&mut bytes);
        if let Ok(file) = LayerFile::decode(&bytes) {
            let encoded = file.encode().expect("what was decoded can be encoded");
            assert_eq!(LayerFile::decode(&encoded).ok().map(|again| again.id()), Some(file.id()));
        }
    },
    seeds: || {
        let (metadata, blocks) = small_image();
        let table = table(&[1, blocks - 1]);
        let layer = |annotations: &[(&str, &str)]| {
            let mut manifest = Manifest::describing(LayerKind::Base, &table, &metadata);
            let owned = |(key, value): &(&str, &str)| (key.to_string(), value.to_string());
            manifest.annotations = annotations.iter().map(owned).collect::<BTreeMap<_, _>>();
            LayerFile { manifest, chunk_table: table.clone(), metadata: metadata.clone() }
        };
        [layer(&[]), layer(&[("a", "b")])].iter().filter_map(|file| file.encode().ok()).collect()
    },
};

/// Puts the right digests where the layout of the bytes says that digests are.
fn mend(bytes: &mut [u8]) {
    if bytes.len() < HEADER_FIELDS + 32 {
        return;
    }
    let digest = blake3::hash(&bytes[..HEADER_FIELDS]);
    bytes[HEADER_FIELDS..HEADER_FIELDS + 32].copy_from_slice(digest.as_bytes());
    let Ok(layout) = Layout::decode(bytes) else { return };
    if layout.file_bytes() != bytes.len() as u64 {
        return;
    }
    let range = |range: &std::ops::Range<u64>| range.start as usize..range.end as usize;
    let stored = range(&layout.metadata);
    let Ok(mut manifest) = Manifest::decode(&bytes[range(&layout.manifest)]) else { return };
    manifest.chunk_table_digest = Digest::of(&bytes[range(&layout.chunk_table)]);
    mend_image(&mut bytes[stored], &mut manifest);
    let canonical = manifest.canonical();
    if canonical.len() == range(&layout.manifest).len() {
        bytes[range(&layout.manifest)].copy_from_slice(&canonical);
    }
}

/// Makes the table of the image's frames fit them, and the manifest the table.
fn mend_image(stored: &mut [u8], manifest: &mut Manifest) {
    let all = stored.len() as u64;
    let Ok(table_bytes) = frames::table_bytes(manifest.metadata_bytes, all) else { return };
    let end = stored.len() - 32;
    let (mut image, mut at) = (Vec::new(), table_bytes as usize);
    for entry in stored[..table_bytes as usize].chunks_exact(ENTRY_BYTES) {
        let length = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]) as usize;
        let Some(frame) = at.checked_add(length).and_then(|next| stored[..end].get(at..next))
        else {
            return;
        };
        let left = manifest.metadata_bytes as usize - image.len();
        let plain_bytes = left.min(frames::PART_BYTES);
        let plain = match frame.len() == plain_bytes {
            true => frame.to_vec(),
            false => zstd::bulk::decompress(frame, plain_bytes).unwrap_or_default(),
        };
        at += length;
        image.extend_from_slice(&plain);
        if plain.len() != plain_bytes {
            break;
        }
    }
    // What a writer would make of the same image has the right digests.
    manifest.metadata_digest = Digest::of(&image);
    let right = LayerFile {
        manifest: Manifest::describing(LayerKind::Base, &table(&[]), &image),
        chunk_table: table(&[]),
        metadata: image,
    };
    let Ok(right) = right.encode() else { return };
    let Ok(layout) = Layout::decode(&right) else { return };
    let entries = right[layout.metadata.start as usize..].chunks_exact(ENTRY_BYTES);
    for (entry, right) in stored[..table_bytes as usize].chunks_exact_mut(ENTRY_BYTES).zip(entries)
    {
        entry[4..].copy_from_slice(&right[4..]);
    }
    let seal = blake3::hash(&stored[..end]);
    stored[end..].copy_from_slice(seal.as_bytes());
}

/// A manifest alone.
pub const MANIFEST: Target = Target {
    name: "manifest",
    run: |data| {
        if let Ok(manifest) = Manifest::decode(data) {
            assert_eq!(manifest.canonical(), data, "only the canonical form is taken");
        }
    },
    seeds: || {
        let (metadata, blocks) = small_image();
        let manifest = Manifest::describing(LayerKind::Toolkit, &table(&[blocks]), &metadata);
        let mut annotated = manifest.clone();
        annotated.annotations.insert("org.example/\u{e9}".to_owned(), "v\n".to_owned());
        vec![manifest.canonical(), annotated.canonical()]
    },
};

/// A chunk table alone.
pub const CHUNK_TABLE: Target = Target {
    name: "chunk_table",
    run: |data| {
        let Ok(table) = ChunkTable::decode(data) else { return };
        assert_eq!(table.encode(), data, "one table has one form");
        for chunk in table.chunks() {
            let last = chunk.start_block + chunk.blocks - 1;
            assert!(last < table.data_blocks());
            assert_eq!(table.find(chunk.start_block), table.find(last));
        }
        assert_eq!(table.covering(0, table.data_bytes()).len(), table.len());
        assert_eq!(table.find(table.data_blocks()), None);
    },
    seeds: || vec![table(&[]).encode(), table(&[1, 8, 4096, 3]).encode()],
};

/// The file in which a node keeps what it has of a layer: two slots.
pub const PRESENCE: Target = Target {
    name: "presence",
    run: |data| {
        let Some((chunks, rest)) = data.split_first_chunk::<2>() else { return };
        let chunks = u32::from(u16::from_le_bytes(*chunks));
        let mut file = rest.to_vec();
        let slot_bytes = Presence::file_bytes(chunks) / 2;
        let used = unsealed(Presence::new(LAYER, chunks).next_write().bytes).len();
        for slot in 0..2 {
            let at = slot * slot_bytes;
            let Some(body) = file.get(at..at + used) else { break };
            let sealed = sealed(body);
            if let Some(place) = file.get_mut(at..at + sealed.len()) {
                place.copy_from_slice(&sealed);
            }
        }
        let found = Presence::decode(LAYER, chunks, &file);
        assert!(found.count() <= chunks);
        let set = (0..chunks).filter(|chunk| found.get(*chunk)).count();
        assert_eq!(set, found.count() as usize);
        assert!(!found.get(chunks), "nothing behind the last chunk is present");
        assert!(Presence::newest(LayerId([1; 32]), chunks, &file).is_none(), "a foreign file");
    },
    seeds: || {
        let seed = |chunks: u16, set: &[u32]| {
            let mut presence = Presence::new(LAYER, u32::from(chunks));
            for chunk in set {
                presence.set(*chunk);
            }
            [&chunks.to_le_bytes()[..], &presence.encode()].concat()
        };
        vec![seed(0, &[]), seed(9, &[0, 8]), seed(1000, &[1, 64, 999])]
    },
};

const LAYER: LayerId = LayerId([9; 32]);

/// A table of chunks of these lengths.
fn table(blocks: &[u32]) -> ChunkTable {
    let mut start_block = 0;
    let chunk = |blocks: &u32| {
        let chunk = Chunk {
            start_block,
            blocks: *blocks,
            digest: ChunkDigest::of(&start_block.to_le_bytes()),
        };
        start_block += blocks;
        chunk
    };
    ChunkTable::new(blocks.iter().map(chunk).collect()).expect("chunks back to back")
}
