//! Identities: digests of content, and random ids where content does not decide.

use crate::error::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        text.push(DIGITS[usize::from(byte >> 4)] as char);
        text.push(DIGITS[usize::from(byte & 15)] as char);
    }
    text
}

fn from_hex<const N: usize>(what: &str, text: &str) -> Result<[u8; N]> {
    let digits = text.as_bytes();
    let refuse =
        || Error::invalid(format!("{what} {text:?} is not {} lower-case hex digits", N * 2));
    if digits.len() != N * 2 {
        return Err(refuse());
    }
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Ok(digit - b'0'),
        b'a'..=b'f' => Ok(digit - b'a' + 10),
        _ => Err(refuse()),
    };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = value(pair[0])? << 4 | value(pair[1])?;
    }
    Ok(bytes)
}

macro_rules! identity {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; $bytes]);

        impl $name {
            /// Length in bytes.
            pub const BYTES: usize = $bytes;

            /// Takes raw bytes of unknown length, as the wire carries them.
            pub fn from_slice(bytes: &[u8]) -> Result<Self> {
                bytes.try_into().map(Self).map_err(|_| {
                    Error::invalid(format!("{} has {} bytes, not {}", $what, bytes.len(), $bytes))
                })
            }

            /// The raw bytes.
            pub fn as_bytes(&self) -> &[u8] {
                &self.0
            }

            /// The first twelve hex digits, for people.
            pub fn short(&self) -> String {
                to_hex(&self.0[..6])
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&to_hex(&self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), to_hex(&self.0))
            }
        }

        impl FromStr for $name {
            type Err = Error;
            fn from_str(text: &str) -> Result<Self> {
                from_hex($what, text).map(Self)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
                let text = String::deserialize(d)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

identity! {
    /// BLAKE3 of the canonical manifest of a layer: commits to every byte of its tree.
    LayerId, 32, "layer id"
}
identity! {
    /// BLAKE3 of the canonical environment document.
    EnvId, 32, "environment id"
}
identity! {
    /// BLAKE3 of the plain bytes of a chunk.
    ChunkDigest, 32, "chunk digest"
}
identity! {
    /// BLAKE3 of any other piece of content: a metadata image, a chunk table, a whole file.
    Digest, 32, "digest"
}
identity! {
    /// Random, chosen when a pack is opened.
    PackId, 16, "pack id"
}
identity! {
    /// Who signs: an ed25519 public key, which is its own name.
    KeyId, 32, "public key"
}
identity! {
    /// An ed25519 signature.
    SignatureBytes, 64, "signature"
}

impl ChunkDigest {
    /// The digest of these plain bytes.
    pub fn of(plain: &[u8]) -> Self {
        Self(*blake3::hash(plain).as_bytes())
    }
}

impl Digest {
    /// The digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_as_text_and_refuse_everything_else() {
        let id = LayerId([0xab; 32]);
        assert_eq!(id.to_string().parse::<LayerId>().unwrap(), id);
        assert_eq!(id.short(), "abababababab");
        for bad in ["", "ab", &"AB".repeat(32), &"zz".repeat(32), &"ab".repeat(33)] {
            assert!(bad.parse::<LayerId>().is_err(), "{bad}");
        }
    }
}
