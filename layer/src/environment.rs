//! The environment document: an ordered stack of layers and how to run in it.

use crate::error::{Error, Result};
use crate::id::{Digest, EnvId, LayerId};
use crate::json;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The version that this program writes and reads.
pub const VERSION: u32 = json::VERSION;
/// The longest canonical document.
pub const MAX_BYTES: usize = 1 << 20;
/// The most layers in one environment; the kernel's overlayfs ends at 500 lower layers.
pub const MAX_LAYERS: usize = 400;

/// How to run in an environment; the fields are those of an OCI image's config.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Arguments, or the command where there is no entrypoint.
    pub cmd: Vec<String>,
    /// Working directory; empty = `/`.
    pub cwd: String,
    /// The command.
    pub entrypoint: Vec<String>,
    /// `NAME=value`, in order.
    pub env: Vec<String>,
    /// `80/tcp`.
    pub exposed_ports: Vec<String>,
    /// Free text.
    pub labels: BTreeMap<String, String>,
    /// `SIGTERM` or a number.
    pub stop_signal: Option<String>,
    /// `user`, `uid`, `user:group` or `uid:gid`; empty = root.
    pub user: String,
    /// Paths.
    pub volumes: Vec<String>,
}

/// A stack of layers and its run configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Environment {
    /// How to run in it.
    pub config: RunConfig,
    /// The kept documents of the container image that it came from. Left out of the document where
    /// there is none, so that environments from before there were any keep their ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<Digest>,
    /// The layers, the bottom one first; at most [`MAX_LAYERS`].
    pub layers: Vec<LayerId>,
    /// [`VERSION`].
    pub version: u32,
}

impl Environment {
    /// An environment of the current version. Fails for no layers or more than [`MAX_LAYERS`].
    pub fn new(layers: Vec<LayerId>, config: RunConfig) -> Result<Self> {
        let environment = Self { config, image: None, layers, version: VERSION };
        environment.check().map_err(Error::invalid)?;
        Ok(environment)
    }

    /// The same, with the documents of the image that it came from.
    pub fn with_image(self, image: Option<Digest>) -> Self {
        Self { image, ..self }
    }

    fn check(&self) -> std::result::Result<(), String> {
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            return Err(format!(
                "environment: {} layers, not 1 to {MAX_LAYERS}",
                self.layers.len()
            ));
        }
        Ok(())
    }

    /// Canonical JSON: sorted keys, no spaces.
    pub fn canonical(&self) -> Vec<u8> {
        json::encode(self)
    }

    /// The id: BLAKE3 of [`Environment::canonical`].
    pub fn id(&self) -> EnvId {
        EnvId(Digest::of(&self.canonical()).0)
    }

    /// Parses canonical JSON; any other form is `Corrupt`, a newer version is `Unsupported`.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let environment: Self = json::decode("environment", MAX_BYTES, bytes)?;
        environment.check().map_err(Error::corrupt)?;
        Ok(environment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use proptest::prelude::*;

    fn environment(words: Vec<String>, layers: u8, stop_signal: Option<String>) -> Environment {
        let config = RunConfig {
            cmd: words.clone(),
            cwd: "/work".into(),
            entrypoint: vec!["/bin/sh".into()],
            env: words.iter().map(|word| format!("A={word}")).collect(),
            exposed_ports: vec!["80/tcp".into()],
            labels: words.iter().map(|word| (word.clone(), word.clone())).collect(),
            stop_signal,
            user: "1000:1000".into(),
            volumes: words,
        };
        Environment::new((0..=layers).map(|byte| LayerId([byte; 32])).collect(), config).unwrap()
    }

    proptest! {
        #[test]
        fn environments_round_trip(
            words in prop::collection::vec(".{0,12}", 0..6),
            layers: u8,
            stop_signal in prop::option::of("[A-Z]{3,9}"),
            image in prop::option::of(any::<[u8; 32]>()),
        ) {
            let environment =
                environment(words, layers, stop_signal).with_image(image.map(Digest));
            prop_assert_eq!(Environment::decode(&environment.canonical()).unwrap(), environment);
        }
    }

    #[test]
    fn keys_are_sorted_and_order_of_layers_counts() {
        let mut environment = environment(vec!["b".into(), "a".into()], 3, None);
        json::assert_sorted_keys(&environment);
        json::assert_sorted_keys(&environment.clone().with_image(Some(Digest([1; 32]))));
        assert!(!String::from_utf8(environment.canonical()).unwrap().contains("image"));
        let id = environment.id();
        environment.layers.reverse();
        assert_ne!(environment.id(), id);
    }

    #[test]
    fn no_layers_and_other_forms_are_refused() {
        assert!(Environment::new(Vec::new(), RunConfig::default()).is_err());
        let text = String::from_utf8(environment(Vec::new(), 0, None).canonical()).unwrap();
        let kind_of = |text: &str| Environment::decode(text.as_bytes()).unwrap_err().kind();
        assert_eq!(kind_of(&format!("{text}\n")), ErrorKind::Corrupt);
        assert_eq!(
            kind_of(&text.replace("\"version\":1", "\"version\":9")),
            ErrorKind::Unsupported
        );
        let empty = text.replace(&format!("\"{}\"", LayerId([0; 32])), "");
        assert_eq!(kind_of(&empty), ErrorKind::Corrupt);
    }
}
