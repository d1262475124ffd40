//! Who requires signatures: an environment or a layer is let in when a trusted key has signed it.
//!
//! An environment that is not signed itself is let in when each of its layers is. What was let in once stays so for
//! the life of the process, since ids never mean something else: taking a key away takes a new process.
//!
//! Locking: one mutex around what is known, held for look-ups only; two threads may check the same at once.

use crate::keys::TrustedKeys;
use crate::objects::Store;
use layer::reference::Target;
use layer::{EnvId, Error, ErrorKind, LayerId, Result};
use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

/// How much is remembered; more is forgotten and checked again.
const MAX_KNOWN: usize = 1 << 16;

/// The trusted keys, and what they are known to have signed.
#[derive(Debug)]
pub struct Trust {
    keys: TrustedKeys,
    known: Mutex<HashSet<Target>>,
}

impl Trust {
    /// Nothing is known to be signed.
    pub fn new(keys: TrustedKeys) -> Self {
        Self { keys, known: Mutex::default() }
    }

    /// `Invalid`, with what to do, unless a trusted key has signed this, or each layer of this environment.
    pub fn admit(&self, store: &Store, subject: &Target) -> Result<()> {
        let Some(refusal) = self.refusal(store, subject)? else { return Ok(()) };
        let Target::Environment(id) = subject else { return Err(refusal) };
        for layer in store.read_environment(id)?.layers {
            if self.refusal(store, &Target::Layer(layer))?.is_some() {
                return Err(refusal);
            }
        }
        self.remember(subject);
        Ok(())
    }

    /// As [`Trust::admit`] for one layer, whose user may say for which environment: to be in a signed one is
    /// enough.
    pub fn admit_layer(
        &self,
        store: &Store,
        layer: &LayerId,
        environment: Option<&EnvId>,
    ) -> Result<()> {
        let subject = Target::Layer(*layer);
        let Some(refusal) = self.refusal(store, &subject)? else { return Ok(()) };
        let Some(id) = environment else { return Err(refusal) };
        if self.refusal(store, &Target::Environment(*id))?.is_some()
            || !store.read_environment(id)?.layers.contains(layer)
        {
            return Err(refusal);
        }
        Ok(())
    }

    fn knows(&self, subject: &Target) -> bool {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).contains(subject)
    }

    fn remember(&self, subject: &Target) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() == MAX_KNOWN {
            known.clear();
        }
        known.insert(*subject);
    }

    /// Why this is not let in for a signature of its own, if it is not.
    fn refusal(&self, store: &Store, subject: &Target) -> Result<Option<Error>> {
        if self.knows(subject) {
            return Ok(None);
        }
        let mut why = String::new();
        for key in self.keys.iter() {
            match store.read_signature(subject, key) {
                Ok(Some(_)) => {
                    self.remember(subject);
                    return Ok(None);
                }
                Ok(None) => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) =>
                {
                    why = format!(" ({})", error.chain());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Some(Error::invalid(format!(
            "{subject} is not signed by a key that this node trusts{why}; `lamella sign` signs it"
        ))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::memory::Memory;
    use crate::key::Key;
    use crate::keys::SecretKey;
    use layer::environment::{Environment, RunConfig};
    use std::collections::BTreeMap;
    use std::sync::Arc;

    #[test]
    fn what_no_trusted_key_has_signed_is_refused() {
        let store = Store::open(Arc::new(Memory::new())).unwrap();
        let [trusted, stranger] = [1, 2].map(|seed| SecretKey::from_seed(&[seed; 32]).unwrap());
        let [inside, outside] = [1, 2].map(|byte| LayerId([byte; 32]));
        let environment = Environment::new(vec![inside], RunConfig::default()).unwrap();
        let (id, _) = store.put_environment(&environment.canonical()).unwrap();
        let subject = Target::Environment(id);
        let keys = TrustedKeys::new([trusted.id()]).unwrap();
        let trust = Trust::new(keys.clone());

        store.sign(&subject, &stranger, BTreeMap::new()).unwrap();
        let refusal = trust.admit(&store, &subject).unwrap_err();
        assert_eq!(refusal.kind(), ErrorKind::Invalid);
        assert!(refusal.to_string().contains("is not signed by a key"), "{refusal}");
        assert!(trust.admit_layer(&store, &inside, Some(&id)).is_err());

        store.sign(&subject, &trusted, BTreeMap::new()).unwrap();
        trust.admit(&store, &subject).unwrap();
        assert!(
            trust.admit_layer(&store, &inside, None).is_err(),
            "the layer itself is not signed"
        );
        assert!(trust.admit_layer(&store, &outside, Some(&id)).is_err(), "it is not in there");
        trust.admit_layer(&store, &inside, Some(&id)).unwrap();
        assert!(trust.admit_layer(&store, &inside, None).is_err(), "still not");
        // Another process with other keys does not take it.
        let other =
            Trust::new(TrustedKeys::new([SecretKey::from_seed(&[3; 32]).unwrap().id()]).unwrap());
        assert!(other.admit(&store, &subject).is_err());
    }

    #[test]
    fn an_environment_of_signed_layers_is_let_in() {
        let store = Store::open(Arc::new(Memory::new())).unwrap();
        let key = SecretKey::from_seed(&[1; 32]).unwrap();
        let layers = [1, 2].map(|byte| LayerId([byte; 32]));
        let environment = Environment::new(layers.to_vec(), RunConfig::default()).unwrap();
        let (id, _) = store.put_environment(&environment.canonical()).unwrap();
        let subject = Target::Environment(id);
        let trust = Trust::new(TrustedKeys::new([key.id()]).unwrap());
        for layer in layers {
            assert!(trust.admit(&store, &subject).is_err(), "one is not signed");
            store
                .put_new(&Key::new(format!("layers/0{}/{layer}", layer.0[0])).unwrap(), b"")
                .unwrap();
            store.sign(&Target::Layer(layer), &key, BTreeMap::new()).unwrap();
        }
        trust.admit(&store, &subject).unwrap();
        trust.admit_layer(&store, &layers[0], None).unwrap();
    }
}
