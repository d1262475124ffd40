//! Labels with a meaning, and what the OCI image specification calls a ChainID.

use layer::{Error, LayerId, Result};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// Names and values, as containerd keeps them beside everything.
pub type Labels = BTreeMap<String, String>;

/// The ChainID of the snapshot that whoever prepares really wants.
pub const TARGET: &str = "containerd.io/snapshot.ref";
/// The layer that a snapshot shows; for people who look.
pub const SHOWN_LAYER: &str = "containerd.io/snapshot/lamella.layer";
/// The layer that a snapshot is to show. containerd passes on no label with such a name, so it comes from
/// this program only, and no image of a stranger can say it.
pub const WANTED_LAYER: &str = "lamella/layer";
/// The environment that it is wanted for.
pub const WANTED_ENVIRONMENT: &str = "lamella/environment";
/// The longest label, name and value together; containerd's own bound.
const MAX_LABEL_BYTES: usize = 4096;
/// The most labels of one snapshot.
const MAX_LABELS: usize = 256;

/// Refuses labels that containerd would refuse.
pub fn check(labels: &Labels) -> Result<()> {
    if labels.len() > MAX_LABELS {
        return Err(Error::invalid(format!("{} labels", labels.len())));
    }
    match labels.iter().find(|(name, value)| name.len() + value.len() > MAX_LABEL_BYTES) {
        Some((name, _)) => {
            let start: String = name.chars().take(64).collect();
            Err(Error::invalid(format!("label {start:?} is longer than {MAX_LABEL_BYTES} bytes")))
        }
        None => Ok(()),
    }
}

/// `sha256:` and the digest, as containerd writes digests.
pub fn sha256(bytes: &[u8]) -> String {
    let digits: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}

/// The ChainID of a tar above a chain; `below` is empty at the bottom.
pub fn chain_id(below: &str, diff_id: &str) -> String {
    if below.is_empty() {
        return diff_id.to_owned();
    }
    sha256(format!("{below} {diff_id}").as_bytes())
}

/// What stands for a layer that never was a tar: a document that names it. Its digest is the diffID.
pub fn pointer(layer: &LayerId) -> Vec<u8> {
    format!("{{\"lamella.layer\":\"{layer}\"}}").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_those_of_the_specification() {
        let ids: Vec<String> =
            ["a", "b"].iter().map(|it| format!("sha256:{}", it.repeat(64))).collect();
        assert_eq!(chain_id("", &ids[0]), ids[0]);
        let text = format!("{} {}", ids[0], ids[1]);
        assert_eq!(chain_id(&ids[0], &ids[1]), sha256(text.as_bytes()));
        assert_eq!(
            sha256(b"abc"),
            "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn labels_are_bounded() {
        let one = |name: &str, bytes| Labels::from([(name.to_owned(), "x".repeat(bytes))]);
        check(&one("a", 4095)).unwrap();
        assert!(check(&one("a", 4096)).is_err());
        let many = (0..257).map(|at| (at.to_string(), String::new())).collect();
        assert!(check(&many).is_err());
    }
}
