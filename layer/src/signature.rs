//! Signatures: who vouches for a layer or an environment, and the bytes that are signed.
//!
//! The form only; nothing here computes or checks a signature. An id commits to every byte below it, so signing an
//! id signs all of it, and the signature of an environment covers its layers and how it is run.

use crate::error::{Error, Result};
use crate::id::{KeyId, SignatureBytes};
use crate::json;
use crate::reference::Target;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The longest stored signature.
pub const MAX_SIGNATURE_BYTES: usize = 64 << 10;
/// The most claims in one.
pub const MAX_CLAIMS: usize = 64;
/// The longest key or value of a claim.
pub const MAX_CLAIM_BYTES: usize = 256;
/// What a signed message begins with, so that the key can sign other things too and none is taken for the other.
pub const DOMAIN: &[u8] = b"lamella signature v1\n";

/// What is signed: everything but the signature.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statement {
    /// What the signer says about the subject: free text, under the signature.
    pub claims: BTreeMap<String, String>,
    /// Who signs.
    pub key: KeyId,
    /// What is signed.
    pub subject: Target,
    /// When, in nanoseconds since 1970 by the signer's clock.
    pub time_unix_ns: u64,
    version: u32,
}

impl Statement {
    /// A statement of the current version. `Invalid` for more or longer claims than a signature has.
    pub fn new(
        subject: Target,
        key: KeyId,
        time_unix_ns: u64,
        claims: BTreeMap<String, String>,
    ) -> Result<Self> {
        let statement = Self { claims, key, subject, time_unix_ns, version: json::VERSION };
        statement.check().map_err(Error::invalid)?;
        Ok(statement)
    }

    fn check(&self) -> std::result::Result<(), String> {
        if self.claims.len() > MAX_CLAIMS {
            return Err(format!(
                "a signature has at most {MAX_CLAIMS} claims, not {}",
                self.claims.len()
            ));
        }
        let mut texts = self.claims.iter().flat_map(|(key, value)| [key, value]);
        match texts.find(|text| text.len() > MAX_CLAIM_BYTES) {
            Some(text) => {
                Err(format!("a claim of {} bytes; {MAX_CLAIM_BYTES} is the most", text.len()))
            }
            None => Ok(()),
        }
    }

    /// The bytes that are signed: [`DOMAIN`], then the statement as canonical JSON.
    pub fn message(&self) -> Vec<u8> {
        [DOMAIN, &json::encode(self)].concat()
    }

    /// The same with its signature.
    pub fn signed(self, signature: SignatureBytes) -> Signature {
        Signature { statement: self, signature }
    }
}

/// A statement and its signature, which nobody has checked yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// What is signed.
    pub statement: Statement,
    /// Ed25519 of [`Statement::message`].
    pub signature: SignatureBytes,
}

/// The stored form: the keys of a statement and one more.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    claims: BTreeMap<String, String>,
    key: KeyId,
    signature: SignatureBytes,
    subject: Target,
    time_unix_ns: u64,
    version: u32,
}

impl Signature {
    /// Canonical JSON.
    pub fn encode(&self) -> Vec<u8> {
        json::encode(&self.stored())
    }

    fn stored(&self) -> Stored {
        let Statement { claims, key, subject, time_unix_ns, version } = self.statement.clone();
        Stored { claims, key, signature: self.signature, subject, time_unix_ns, version }
    }

    /// Parses canonical JSON; any other form is `Corrupt`, a newer version is `Unsupported`.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let stored: Stored = json::decode("signature", MAX_SIGNATURE_BYTES, bytes)?;
        let Stored { claims, key, signature, subject, time_unix_ns, version } = stored;
        let statement = Statement { claims, key, subject, time_unix_ns, version };
        statement.check().map_err(Error::corrupt)?;
        Ok(Self { statement, signature })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{EnvId, LayerId};
    use proptest::prelude::*;

    fn statement(subject: Target, claims: BTreeMap<String, String>) -> Statement {
        Statement::new(subject, KeyId([7; 32]), 1_700_000_000_000_000_000, claims).unwrap()
    }

    proptest! {
        #[test]
        fn signatures_round_trip(
            id: [u8; 32],
            is_layer: bool,
            claims in proptest::collection::btree_map(".{0,20}", ".{0,20}", 0..5),
            signature in proptest::collection::vec(any::<u8>(), 64),
        ) {
            let subject = if is_layer {
                Target::Layer(LayerId(id))
            } else {
                Target::Environment(EnvId(id))
            };
            let statement = statement(subject, claims);
            json::assert_sorted_keys(&statement);
            let signature = SignatureBytes::from_slice(&signature).unwrap();
            let signed = statement.signed(signature);
            json::assert_sorted_keys(&signed.stored());
            prop_assert_eq!(Signature::decode(&signed.encode()).unwrap(), signed);
        }
    }

    #[test]
    fn the_message_is_what_the_format_says() {
        let claims = BTreeMap::from([("by".to_owned(), "ci".to_owned())]);
        let statement = statement(Target::Layer(LayerId([1; 32])), claims);
        let expected = format!(
            "lamella signature v1\n{{\"claims\":{{\"by\":\"ci\"}},\"key\":\"{}\",\"subject\":{{\"layer\":\"{}\"}},\
             \"time_unix_ns\":1700000000000000000,\"version\":1}}",
            "07".repeat(32),
            "01".repeat(32)
        );
        assert_eq!(String::from_utf8(statement.message()).unwrap(), expected);
    }

    #[test]
    fn what_is_too_much_is_refused() {
        let subject = Target::Layer(LayerId([1; 32]));
        let many = (0..=MAX_CLAIMS).map(|n| (n.to_string(), String::new())).collect();
        let long = BTreeMap::from([("k".to_owned(), "v".repeat(MAX_CLAIM_BYTES + 1))]);
        for claims in [many, long] {
            assert!(Statement::new(subject, KeyId([7; 32]), 0, claims).is_err());
        }
        let sound = statement(subject, BTreeMap::new()).signed(SignatureBytes([9; 64])).encode();
        let text = String::from_utf8(sound).unwrap();
        assert!(Signature::decode(text.as_bytes()).is_ok());
        let newer = text.replace("\"version\":1", "\"version\":2");
        let error = Signature::decode(newer.as_bytes()).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Unsupported);
        for bad in
            [text.replace("\"claims\":{}", "\"claims\": {}"), format!("{text} "), String::new()]
        {
            assert!(Signature::decode(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
