//! `fsck` of a whole store, and `repair`.

use super::Scene;
use super::check::{data_read, verdict_without_damage};
use crate::args::{Fsck, Repair};
use crate::embed;
use crate::errors::{Outcome, Remedy};
use crate::node::options::FsdOptions;
use crate::settings::Settings;
use imaged::fsck::{Checked, check, repair as mend};
use layer::{Error, ErrorKind, Result};
use proto::v1::LocateRequest;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use store::{Key, Store, TrustedKeys};

/// Damage beyond this is only counted.
const MAX_LISTED: usize = 1000;

#[derive(Debug, Serialize)]
struct Damage {
    what: String,
    references: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Findings {
    references: u64,
    environments: u64,
    layers: u64,
    packs: u64,
    chunks: u64,
    read_data: bool,
    bytes_read: u64,
    stale_hints: u64,
    signatures: u64,
    /// Keys that are not trusted, and how many signatures they have made; absent where nothing says who is.
    #[serde(skip_serializing_if = "Option::is_none")]
    strange_keys: Option<BTreeMap<String, u64>>,
    damages: u64,
    damaged: Vec<Damage>,
}

impl Findings {
    fn new(checked: Checked, read_data: bool, trusted: Option<&TrustedKeys>) -> Self {
        let strange = |trusted: &TrustedKeys| {
            let strange = checked.signers.iter().filter(|(key, _)| !trusted.contains(key));
            strange.map(|(key, count)| (key.to_string(), *count)).collect()
        };
        let strange_keys = trusted.map(strange);
        let damages = checked.damages.len() as u64;
        let listed = checked.damages.into_iter().take(MAX_LISTED);
        Self {
            references: checked.entries,
            environments: checked.environments,
            layers: checked.layers,
            packs: checked.packs,
            chunks: checked.chunks,
            read_data,
            bytes_read: checked.bytes_read,
            stale_hints: checked.stale_hints,
            signatures: checked.signers.values().sum(),
            strange_keys,
            damages,
            damaged: listed
                .map(|damage| Damage { what: damage.what, references: damage.references })
                .collect(),
        }
    }

    fn lines(&self) -> String {
        let mut text = format!(
            "{} entries of references, {} environments, {} layers, {} signatures, {} chunks in {} packs, {}: ",
            self.references,
            self.environments,
            self.layers,
            self.signatures,
            self.chunks,
            self.packs,
            data_read(self.read_data, self.bytes_read)
        );
        match self.damages {
            0 => text.push_str(verdict_without_damage(self.read_data)),
            damages => _ = write!(text, "{damages} damages"),
        }
        for (key, count) in self.strange_keys.iter().flatten() {
            _ = write!(text, "\nkey {key} is not trusted and has made {count} of the signatures");
        }
        for damage in &self.damaged {
            _ = write!(text, "\n{}", damage.what);
            if !damage.references.is_empty() {
                _ = write!(text, "; hits {}", damage.references.join(", "));
            }
        }
        text
    }
}

/// `fsck` without a reference
pub async fn fsck_store(scene: &Scene, args: &Fsck) -> Outcome {
    let images = embed::images(&scene.settings, scene.out).await?;
    let url = images.store_url(&scene.settings)?;
    let read_data = args.read_data;
    let trusted = trusted(&scene.settings, args.keys.as_deref())?;
    let checked =
        super::blocking(move || check(&Store::open(store::open(&url)?)?, read_data)).await??;
    let findings = Findings::new(checked, read_data, trusted.as_ref());
    scene.out.result(&findings, || findings.lines())?;
    verdict(findings.damages)
}

/// The keys to compare with, where there are any.
pub fn trusted(settings: &Settings, named: Option<&str>) -> Result<Option<TrustedKeys>> {
    let options =
        FsdOptions { require_signature: named.map(str::to_owned), ..FsdOptions::default() };
    options.trusted(settings)
}

fn verdict(damages: u64) -> Outcome {
    if damages == 0 {
        return Ok(());
    }
    Err(Error::corrupt(format!("the store is damaged in {damages} places"))).remedy(|_| {
        Some("`lamella repair --from STORE` mends it from one that has the same".to_owned())
    })
}

/// A store that is there already: one that is made now has nothing to mend with.
fn existing(url: &str) -> Result<Store> {
    let backend = store::open(url)?;
    match backend.size(&Key::new("FORMAT")?) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(Error::not_found(format!("{} is no store", backend.describe())))
        }
        found => found.and_then(|_| Store::open(backend)),
    }
}

/// `repair`
pub async fn repair(scene: &Scene, args: &Repair) -> Outcome {
    #[derive(Serialize)]
    struct Mended {
        entries: u64,
        documents: u64,
        signatures: u64,
        chunks: u64,
        packs: u64,
        left: Findings,
    }
    let mut images = embed::images(&scene.settings, scene.out).await?;
    let (url, from, read_data) =
        (images.store_url(&scene.settings)?, args.from.clone(), !args.skip_data);
    let repaired = super::blocking(move || {
        let store = Store::open(store::open(&url)?)?;
        let from = from.map(|from| existing(&from)).transpose()?;
        mend(&store, from.as_ref(), read_data)
    })
    .await??;
    for layer in &repaired.layers {
        // What still lacks chunks is named below.
        let located = images.client.locate(LocateRequest { layer_id: layer.0.to_vec() }).await;
        if let Err(status) = located {
            tracing::debug!(%status, "no hint for {layer}");
        }
    }
    let mended = Mended {
        entries: repaired.entries,
        documents: repaired.documents,
        signatures: repaired.signatures,
        chunks: repaired.chunks,
        packs: repaired.packs,
        left: Findings::new(repaired.left, read_data, None),
    };
    scene.out.result(&mended, || {
        format!(
            "mended: {} entries of references, {} environments and layers, {} signatures, {} chunks written, {} damaged packs removed\n{}",
            mended.entries,
            mended.documents,
            mended.signatures,
            mended.chunks,
            mended.packs,
            mended.left.lines()
        )
    })?;
    verdict(mended.left.damages)
}
