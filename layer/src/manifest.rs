//! The manifest of a layer: the small document whose digest is the layer's id.
//!
//! It commits to the metadata image and to the chunk table by their digests, and through the table to
//! every byte of the data space; so two layers with one id are the same tree.

use crate::chunk::ChunkTable;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{Digest, LayerId};
use crate::json;
use crate::words::words;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The version that this program writes and reads.
pub const VERSION: u32 = json::VERSION;
/// The longest canonical manifest.
pub const MAX_BYTES: usize = 1 << 20;
/// Incompatible feature bits that this program knows.
pub const KNOWN_INCOMPATIBLE: u32 = 0;

/// What a layer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LayerKind {
    /// An operating system's root.
    Base,
    /// The files that a task works on.
    Workspace,
    /// Programs and libraries to be added to a base.
    Toolkit,
    /// What a sandbox changed.
    Diff,
}

words!(LayerKind, "kind of layer", {
    Base = "base",
    Workspace = "workspace",
    Toolkit = "toolkit",
    Diff = "diff",
});

/// Feature bits in three tiers: what a reader that does not know a bit has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Features {
    /// Ignore it.
    pub compatible: u32,
    /// Refuse the layer.
    pub incompatible: u32,
    /// Read, but derive nothing new from it.
    pub read_only: u32,
}

/// What a layer consists of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Free text, for example `oci.diff_id`; part of the identity.
    pub annotations: BTreeMap<String, String>,
    /// Digest of the encoded chunk table.
    pub chunk_table_digest: Digest,
    /// Chunks in the table.
    pub chunks: u64,
    /// Blocks of 4096 bytes in the data space.
    pub data_blocks: u32,
    /// Directories, the root included.
    pub directories: u64,
    /// Feature bits.
    pub features: Features,
    /// Inodes that are no directories.
    pub files: u64,
    /// What the layer is for.
    pub kind: LayerKind,
    /// Length of the metadata image.
    pub metadata_bytes: u64,
    /// Digest of the metadata image.
    pub metadata_digest: Digest,
    /// The sum of the sizes of all regular files, each inode once, as `du --apparent-size` counts.
    pub plain_bytes: u64,
    /// [`VERSION`].
    pub version: u32,
}

impl Manifest {
    /// The manifest of these two parts, without features and annotations. What the parts do not tell is
    /// zero and left to the caller: `files`, `directories` and `plain_bytes`.
    pub fn describing(kind: LayerKind, chunk_table: &ChunkTable, metadata: &[u8]) -> Self {
        Self {
            annotations: BTreeMap::new(),
            chunk_table_digest: chunk_table.digest(),
            chunks: chunk_table.len() as u64,
            data_blocks: chunk_table.data_blocks(),
            directories: 0,
            features: Features::default(),
            files: 0,
            kind,
            metadata_bytes: metadata.len() as u64,
            metadata_digest: Digest::of(metadata),
            plain_bytes: 0,
            version: VERSION,
        }
    }

    /// Canonical JSON: sorted keys, no spaces.
    pub fn canonical(&self) -> Vec<u8> {
        json::encode(self)
    }

    /// The id of the layer: BLAKE3 of [`Manifest::canonical`].
    pub fn id(&self) -> LayerId {
        LayerId(Digest::of(&self.canonical()).0)
    }

    /// Parses canonical JSON; any other form is `Corrupt`, a newer version or an unknown
    /// incompatible feature is `Unsupported`.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let manifest: Self = json::decode("layer manifest", MAX_BYTES, bytes)?;
        let unknown = manifest.features.incompatible & !KNOWN_INCOMPATIBLE;
        if unknown != 0 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("layer manifest needs unknown features {unknown:#x}"),
            ));
        }
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn manifest(kind: usize, numbers: [u64; 4], annotations: BTreeMap<String, String>) -> Manifest {
        Manifest {
            annotations,
            chunk_table_digest: Digest::of(&numbers[0].to_le_bytes()),
            chunks: numbers[0],
            data_blocks: 77,
            directories: numbers[1],
            features: Features { compatible: 5, incompatible: 0, read_only: 1 },
            files: numbers[2],
            kind: LayerKind::ALL[kind % 4],
            metadata_bytes: numbers[3],
            metadata_digest: Digest::of(b"metadata"),
            plain_bytes: 12,
            version: VERSION,
        }
    }

    proptest! {
        #[test]
        fn manifests_round_trip(
            kind: usize,
            numbers: [u64; 4],
            annotations in prop::collection::btree_map(".{0,8}", ".{0,20}", 0..5),
        ) {
            let manifest = manifest(kind, numbers, annotations);
            prop_assert_eq!(Manifest::decode(&manifest.canonical()).unwrap(), manifest);
        }

        #[test]
        fn mutations_never_panic_and_never_keep_the_id(
            numbers: [u64; 4],
            at: usize,
            byte: u8,
        ) {
            let manifest = manifest(0, numbers, BTreeMap::new());
            let mut bytes = manifest.canonical();
            let at = at % bytes.len();
            prop_assume!(bytes[at] != byte);
            bytes[at] = byte;
            if let Ok(other) = Manifest::decode(&bytes) {
                prop_assert_ne!(other.id(), manifest.id());
            }
        }
    }

    #[test]
    fn keys_are_sorted() {
        json::assert_sorted_keys(&manifest(1, [1, 2, 3, 4], BTreeMap::new()));
    }

    #[test]
    fn spaces_unknown_fields_versions_and_features_are_refused() {
        let text = String::from_utf8(manifest(0, [1; 4], BTreeMap::new()).canonical()).unwrap();
        let kind_of = |text: &str| Manifest::decode(text.as_bytes()).unwrap_err().kind();
        assert_eq!(kind_of(&text.replacen(',', ", ", 1)), ErrorKind::Corrupt);
        assert_eq!(kind_of(&text.replace("\"chunks\"", "\"chunkz\"")), ErrorKind::Corrupt);
        assert_eq!(
            kind_of(&text.replace("\"version\":1", "\"version\":2")),
            ErrorKind::Unsupported
        );
        let needy = text.replace("\"incompatible\":0", "\"incompatible\":8");
        assert_eq!(kind_of(&needy), ErrorKind::Unsupported);
    }
}
