//! `key`, `sign` and `verify`: who vouches for an environment or a layer.
//!
//! `verify` takes what a node that requires signatures takes, and shows by whom and when it was signed.

use super::images::resolve;
use super::{Scene, blocking, named};
use crate::args::{KeyAction, Sign, Verify};
use crate::embed;
use crate::errors::{Outcome, Remedy};
use crate::quantity::show_time;
use layer::reference::Target;
use layer::signature::Signature;
use layer::{EnvId, Error, ErrorKind, KeyId, LayerId, Result};
use proto::v1::resolve_response::Target as Resolved;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use store::{SecretKey, Store, Trust, TrustedKeys, public_pem};

/// A key, as `key` prints it.
#[derive(Debug, Serialize)]
struct Shown {
    key: KeyId,
    public: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    public_file: Option<PathBuf>,
}

/// `key`
pub fn key(scene: &Scene, action: KeyAction) -> Outcome {
    match action {
        KeyAction::Generate(args) => {
            let made = SecretKey::generate(&args.file).remedy(|error| {
                let exists = error.kind() == ErrorKind::Exists;
                exists.then(|| "a key is never overwritten: choose another file".to_owned())
            })?;
            let (key, file) = made;
            let lines = format!("{key}\ntrust it with {}", file.display());
            let shown = Shown { key, public: public_pem(&key), public_file: Some(file) };
            scene.out.result(&shown, || lines)
        }
        KeyAction::Show(args) => {
            let key = SecretKey::load(&args.file)?.id();
            let shown = Shown { key, public: public_pem(&key), public_file: None };
            scene.out.result(&shown, || shown.public.clone())
        }
    }
}

/// One signature, as it is printed.
#[derive(Debug, Serialize)]
struct Signed {
    subject: Target,
    key: KeyId,
    time: String,
    time_unix_ns: u64,
    claims: BTreeMap<String, String>,
}

impl Signed {
    fn new(signature: Signature) -> Self {
        let statement = signature.statement;
        Self {
            subject: statement.subject,
            key: statement.key,
            time: show_time(statement.time_unix_ns),
            time_unix_ns: statement.time_unix_ns,
            claims: statement.claims,
        }
    }

    fn lines(&self) -> String {
        let mut text = format!("{} signed by {} at {}", self.subject, self.key, self.time);
        for (key, value) in &self.claims {
            _ = write!(text, "\n  {key}={value}");
        }
        text
    }
}

/// What a name stands for, and the store that has it.
async fn subject(scene: &Scene, reference: &str) -> Outcome<(Store, Target)> {
    let name = named(reference)?;
    let mut images = embed::images(&scene.settings, scene.out).await?;
    let target = match resolve(&mut images, &name).await?.target {
        Some(Resolved::LayerId(id)) => Target::Layer(LayerId::from_slice(&id)?),
        Some(Resolved::EnvId(id)) => Target::Environment(EnvId::from_slice(&id)?),
        None => return Err(Error::not_found(format!("{name} has no target")).into()),
    };
    let url = images.store_url(&scene.settings)?;
    let store = blocking(move || Store::open(store::open(&url)?)).await??;
    Ok((store, target))
}

/// `sign`
pub async fn sign(scene: &Scene, args: Sign) -> Outcome {
    let key = SecretKey::load(&args.key)?;
    let (store, target) = subject(scene, &args.reference).await?;
    let claims = args.claims.into_iter().collect();
    let (signature, before) = blocking(move || store.sign(&target, &key, claims)).await??;
    let signed = Signed::new(signature);
    scene.out.result(&signed, || {
        let before = if before { "\nthis key had signed it before" } else { "" };
        format!("{}{before}", signed.lines())
    })
}

/// What `verify` prints.
#[derive(Debug, Serialize)]
struct Verified {
    subject: Target,
    /// By trusted keys, of the subject; else of its layers.
    signatures: Vec<Signed>,
    /// Signatures of the subject by other keys.
    others: usize,
}

fn verified(store: &Store, subject: Target, keys: TrustedKeys) -> Result<Verified> {
    let by = |subject: &Target| -> Vec<Signed> {
        let read = keys.iter().map(|key| store.read_signature(subject, key));
        // What is false does not count, and one that is sound is enough.
        read.filter_map(|read| read.ok().flatten()).map(Signed::new).collect()
    };
    let mut signatures = by(&subject);
    let signers = store.signers(&subject)?;
    let others = signers.iter().filter(|key| !keys.contains(key)).count();
    if signatures.is_empty()
        && let Target::Environment(id) = &subject
    {
        let layers = store.read_environment(id)?.layers;
        signatures = layers.into_iter().flat_map(|layer| by(&Target::Layer(layer))).collect();
    }
    Trust::new(keys).admit(store, &subject)?;
    Ok(Verified { subject, signatures, others })
}

/// `verify`
pub async fn verify(scene: &Scene, args: Verify) -> Outcome {
    let keys = TrustedKeys::load(&args.keys)?;
    let (store, target) = subject(scene, &args.reference).await?;
    let verified = blocking(move || verified(&store, target, keys)).await??;
    scene.out.result(&verified, || {
        let lines: Vec<String> = verified.signatures.iter().map(Signed::lines).collect();
        lines.join("\n")
    })
}
