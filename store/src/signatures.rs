//! Signatures beside what they sign: `signatures/<layer|env>/<id>/<public key>`.
//!
//! One for each key, published without replacing. Whoever reads one gets it checked: that it is of this subject and
//! key, and that the key made it. One that is false helps nobody and is replaced by the next signature of its key.
//! They go with what they sign (see `collectable`).

use crate::key::Key;
use crate::keys::{SecretKey, verify};
use crate::objects::Store;
use layer::reference::Target;
use layer::signature::{MAX_SIGNATURE_BYTES, Signature, Statement};
use layer::{Context, Error, ErrorKind, KeyId, Result};
use std::collections::BTreeMap;

/// The most signers of one subject that are listed.
pub const MAX_SIGNERS: usize = 1000;

/// Where the signatures of something lie, with a slash at the end.
pub fn signatures_of(subject: &Target) -> String {
    match subject {
        Target::Layer(id) => format!("signatures/layer/{id}/"),
        Target::Environment(id) => format!("signatures/env/{id}/"),
    }
}

fn object(subject: &Target, key: &KeyId) -> Result<Key> {
    Key::new(format!("{}{key}", signatures_of(subject)))
}

/// What the name of an object says: what is signed and by whom.
pub fn named(name: &str) -> Option<(Target, KeyId)> {
    let (kind, rest) = name.strip_prefix("signatures/")?.split_once('/')?;
    let (id, key) = rest.split_once('/')?;
    let subject = match kind {
        "layer" => Target::Layer(id.parse().ok()?),
        "env" => Target::Environment(id.parse().ok()?),
        _ => return None,
    };
    Some((subject, key.parse().ok()?))
}

/// A signature that is of this subject and key and that the key made.
fn checked(bytes: &[u8], subject: &Target, key: &KeyId) -> Result<Signature> {
    let signature = Signature::decode(bytes)?;
    let statement = &signature.statement;
    if statement.subject != *subject || statement.key != *key {
        return Err(Error::corrupt(format!(
            "the object holds a signature of {} by key {}",
            statement.subject, statement.key
        )));
    }
    verify(&signature)?;
    Ok(signature)
}

impl Store {
    /// Signs what is on the store. Returns the signature, or the one that this key has made before, and whether that
    /// was so.
    pub fn sign(
        &self,
        subject: &Target,
        key: &SecretKey,
        claims: BTreeMap<String, String>,
    ) -> Result<(Signature, bool)> {
        let exists = match subject {
            Target::Layer(id) => self.has_layer(id)?,
            Target::Environment(id) => self.has_environment(id)?,
        };
        if !exists {
            return Err(Error::not_found(format!("{subject} is not on the store")));
        }
        let time_unix_ns = self.clock().now_unix_ns();
        let made = key.sign(Statement::new(*subject, key.id(), time_unix_ns, claims)?)?;
        let sound = |found: &[u8]| checked(found, subject, &key.id()).is_ok();
        let place = object(subject, &key.id())?;
        if !self.put_sound(&place, &made.encode(), MAX_SIGNATURE_BYTES as u64, sound)? {
            return Ok((made, false));
        }
        let before = self.read_signature(subject, &key.id())?;
        Ok((before.unwrap_or(made), true))
    }

    /// The signature of something by a key, checked; `None` where the key has not signed it, `Corrupt` where what is
    /// there is false.
    pub fn read_signature(&self, subject: &Target, key: &KeyId) -> Result<Option<Signature>> {
        let read = self.backend().read_all(&object(subject, key)?, MAX_SIGNATURE_BYTES as u64);
        match read.and_then(|bytes| checked(&bytes, subject, key)) {
            Ok(signature) => Ok(Some(signature)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).context(|| format!("signature of {subject} by key {key}")),
        }
    }

    /// The names of all objects where signatures lie.
    pub fn signature_names(&self) -> Result<Vec<String>> {
        self.list_names("signatures/")
    }

    /// The signature in an object of such a name, checked. `Corrupt` for a name that no signature has.
    pub fn read_signature_at(&self, name: &str) -> Result<Signature> {
        let (subject, key) = named(name)
            .ok_or_else(|| Error::corrupt(format!("object {name} has no name of a signature")))?;
        self.read_signature(&subject, &key)?
            .ok_or_else(|| Error::not_found(format!("signature of {subject} by key {key}")))
    }

    /// Takes a signature from elsewhere; what it signs must be here. Returns whether a sound one of its key was here.
    pub fn put_signature(&self, signature: &Signature) -> Result<bool> {
        verify(signature)?;
        let Statement { subject, key, .. } = &signature.statement;
        let sound = |found: &[u8]| checked(found, subject, key).is_ok();
        let place = object(subject, key)?;
        self.put_sound(&place, &signature.encode(), MAX_SIGNATURE_BYTES as u64, sound)
    }

    /// Who has, by the names of the objects, signed something; the first [`MAX_SIGNERS`].
    pub fn signers(&self, subject: &Target) -> Result<Vec<KeyId>> {
        let prefix = signatures_of(subject);
        let names = self.backend().list(&prefix, None, MAX_SIGNERS)?;
        Ok(names.iter().filter_map(|name| name.strip_prefix(&prefix)?.parse().ok()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::memory::Memory;
    use layer::environment::{Environment, RunConfig};
    use layer::{EnvId, LayerId};
    use std::sync::Arc;

    fn store() -> Store {
        Store::open(Arc::new(Memory::new())).unwrap()
    }

    fn environment(store: &Store, layer: u8) -> EnvId {
        let environment = Environment::new(vec![LayerId([layer; 32])], RunConfig::default());
        store.put_environment(&environment.unwrap().canonical()).unwrap().0
    }

    fn replace(store: &Store, name: &Key, bytes: &[u8]) {
        store.backend().delete(name).unwrap();
        store.put_new(name, bytes).unwrap();
    }

    #[test]
    fn a_signature_is_of_one_subject_and_one_key() {
        let store = store();
        let [mine, other] = [1, 2].map(|seed| SecretKey::from_seed(&[seed; 32]).unwrap());
        let [one, two] = [1, 2].map(|layer| Target::Environment(environment(&store, layer)));
        let claims = BTreeMap::from([("commit".to_owned(), "abc".to_owned())]);
        let (made, before) = store.sign(&one, &mine, claims.clone()).unwrap();
        assert!(!before);
        assert_eq!(store.read_signature(&one, &mine.id()).unwrap(), Some(made.clone()));
        assert_eq!(store.read_signature(&one, &other.id()).unwrap(), None);
        assert_eq!(store.read_signature(&two, &mine.id()).unwrap(), None);
        assert_eq!(store.signers(&one).unwrap(), [mine.id()]);
        let (again, before) = store.sign(&one, &mine, BTreeMap::new()).unwrap();
        assert!(before);
        assert_eq!(again, made, "an immutable object is not replaced");

        // Put under another id, or under another key, it is found out.
        let (moved, stolen) =
            (object(&two, &mine.id()).unwrap(), object(&one, &other.id()).unwrap());
        for name in [&moved, &stolen] {
            store.put_new(name, &made.encode()).unwrap();
        }
        for (subject, key) in [(&two, &mine), (&one, &other)] {
            let error = store.read_signature(subject, &key.id()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        }
        // Also when its text is made to fit.
        let mut forged = made.clone();
        forged.statement.subject = two;
        replace(&store, &moved, &forged.encode());
        assert!(store.read_signature(&two, &mine.id()).is_err());
        let mut forged = made;
        forged.statement.key = other.id();
        replace(&store, &stolen, &forged.encode());
        assert!(store.read_signature(&one, &other.id()).is_err());
        // What is false does not keep its key from signing.
        assert!(!store.sign(&two, &mine, claims).unwrap().1);
        assert!(store.read_signature(&two, &mine.id()).unwrap().is_some());
        let absent = Target::Layer(LayerId([9; 32]));
        let error = store.sign(&absent, &mine, BTreeMap::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn no_part_of_a_signature_can_be_changed() {
        let store = store();
        let key = SecretKey::from_seed(&[1; 32]).unwrap();
        let subject = Target::Environment(environment(&store, 1));
        let claims = BTreeMap::from([("commit".to_owned(), "abc".to_owned())]);
        let (made, _) = store.sign(&subject, &key, claims).unwrap();
        let name = object(&subject, &key.id()).unwrap();
        let mut forgeries = Vec::new();
        let mut later = made.clone();
        later.statement.time_unix_ns += 1;
        forgeries.push(later.encode());
        let mut claimed = made.clone();
        claimed.statement.claims.insert("reviewed".to_owned(), "yes".to_owned());
        forgeries.push(claimed.encode());
        let Target::Environment(id) = subject else { unreachable!() };
        let mut kind = made.clone();
        kind.statement.subject = Target::Layer(LayerId(id.0));
        forgeries.push(kind.encode());
        let sound = made.encode();
        // Each byte in turn.
        forgeries.extend((0..sound.len()).map(|at| {
            let mut bytes = sound.clone();
            bytes[at] ^= 1;
            bytes
        }));
        forgeries.push(sound[..sound.len() - 1].to_vec());
        for forgery in forgeries {
            replace(&store, &name, &forgery);
            assert!(store.read_signature(&subject, &key.id()).is_err());
        }
        replace(&store, &name, &sound);
        assert!(store.read_signature(&subject, &key.id()).unwrap().is_some());
    }
}
