//! Keys: who signs, and whom one trusts.
//!
//! Files have the forms of RFC 8410, one PEM block each, so that other programs make and read them too:
//! `PRIVATE KEY` (PKCS #8) holds the seed, `PUBLIC KEY` the point. Private keys are never logged, and a file that
//! others can read is refused.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use layer::signature::{Signature, Statement};
use layer::{Context, Error, KeyId, Result, SignatureBytes};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The most keys that are trusted at once.
pub const MAX_TRUSTED_KEYS: usize = 256;
/// The longest file of keys.
const MAX_FILE_BYTES: u64 = 256 << 10;
/// What stands before a public key that is written as a word.
const WORD_MARK: &str = "ed25519:";
/// What files of public keys in a directory end with.
const PUBLIC_ENDING: &str = "pub";
/// Rights of others on a file.
const OTHERS: u32 = 0o077;
const PRIVATE_LABEL: &str = "PRIVATE KEY";
const PUBLIC_LABEL: &str = "PUBLIC KEY";
/// DER of RFC 8410 before the 32 bytes of a seed, and before those of a public key.
const PRIVATE_PREFIX: &[u8] = b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20";
const PUBLIC_PREFIX: &[u8] = b"\x30\x2a\x30\x05\x06\x03\x2b\x65\x70\x03\x21\x00";

/// A private key.
pub struct SecretKey {
    pair: Ed25519KeyPair,
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKey of {}", self.id())
    }
}

impl SecretKey {
    /// The key of a seed.
    pub fn from_seed(seed: &[u8; 32]) -> Result<Self> {
        let pair = Ed25519KeyPair::from_seed_unchecked(seed);
        let pair = pair.map_err(|error| Error::invalid(format!("the seed of a key: {error}")))?;
        Ok(Self { pair })
    }

    /// Makes a key: writes it to a new file that only its owner can read, and the public key to another beside it.
    /// Returns the public key and the name of its file. `Exists` where either is there.
    pub fn generate(path: &Path) -> Result<(KeyId, PathBuf)> {
        let seed = crate::objects::random::<32>()?;
        let id = Self::from_seed(&seed)?.id();
        let mut public = path.as_os_str().to_owned();
        public.push(format!(".{PUBLIC_ENDING}"));
        let public = PathBuf::from(public);
        write_new(&public, 0o644, &public_pem(&id))?;
        let private = pem(PRIVATE_LABEL, &[PRIVATE_PREFIX, &seed].concat());
        if let Err(error) = write_new(path, 0o600, &private) {
            _ = std::fs::remove_file(&public);
            return Err(error);
        }
        Ok((id, public))
    }

    /// Reads a private key. `Invalid` for a file that others than its owner can read.
    pub fn load(path: &Path) -> Result<Self> {
        let what = || format!("private key {}", path.display());
        let (text, mode) = read(path)?;
        if mode & OTHERS != 0 {
            return Err(Error::invalid(format!(
                "{} can be read by others than its owner; `chmod 600` it, or make another key",
                what()
            )));
        }
        Self::parse(&text).context(what)
    }

    fn parse(text: &str) -> Result<Self> {
        match &blocks(text)?[..] {
            [(PRIVATE_LABEL, der)] => {
                let seed = der.strip_prefix(PRIVATE_PREFIX).and_then(|seed| seed.try_into().ok());
                Self::from_seed(seed.ok_or_else(|| Error::invalid("it is no ed25519 key"))?)
            }
            _ => Err(Error::invalid("it is no PEM file with one PRIVATE KEY and nothing else")),
        }
    }

    /// The public key.
    pub fn id(&self) -> KeyId {
        let mut id = KeyId([0; 32]);
        id.0.copy_from_slice(self.pair.public_key().as_ref());
        id
    }

    /// Signs a statement, which must name this key.
    pub fn sign(&self, statement: Statement) -> Result<Signature> {
        if statement.key != self.id() {
            return Err(Error::invalid(format!("a statement of key {}", statement.key)));
        }
        let made = self.pair.sign(&statement.message());
        Ok(statement.signed(SignatureBytes::from_slice(made.as_ref())?))
    }
}

/// Whether the key that a signature names made it. `Corrupt` where it did not.
pub fn verify(signature: &Signature) -> Result<()> {
    let statement = &signature.statement;
    let key = UnparsedPublicKey::new(&ED25519, statement.key.as_bytes());
    key.verify(&statement.message(), signature.signature.as_bytes()).map_err(|_| {
        Error::corrupt(format!(
            "the signature of {} by key {} is false",
            statement.subject, statement.key
        ))
    })
}

/// A public key as PEM.
pub fn public_pem(key: &KeyId) -> String {
    pem(PUBLIC_LABEL, &[PUBLIC_PREFIX, key.as_bytes()].concat())
}

/// Public keys that somebody trusts; at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustedKeys {
    keys: BTreeSet<KeyId>,
}

/// The words that [`TrustedKeys::load`] takes, so that processes can hand keys on.
impl fmt::Display for TrustedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self.keys.iter().map(|key| format!("{WORD_MARK}{key}")).collect();
        f.write_str(&words.join(","))
    }
}

impl TrustedKeys {
    /// Takes keys. `Invalid` for none and for more than [`MAX_TRUSTED_KEYS`].
    pub fn new(keys: impl IntoIterator<Item = KeyId>) -> Result<Self> {
        let keys: BTreeSet<KeyId> = keys.into_iter().collect();
        if keys.is_empty() || keys.len() > MAX_TRUSTED_KEYS {
            return Err(Error::invalid(format!(
                "{} public keys, not 1 to {MAX_TRUSTED_KEYS}",
                keys.len()
            )));
        }
        Ok(Self { keys })
    }

    /// Reads them: a file with one `PUBLIC KEY` or more, a directory of such files that end in `.pub`, or
    /// `ed25519:HEX` with commas between.
    pub fn load(place: &str) -> Result<Self> {
        let keys = if place.starts_with(WORD_MARK) {
            place.split(',').map(parse_word).collect()
        } else {
            from_path(Path::new(place))
        };
        keys.and_then(Self::new).context(|| format!("trusted keys {place}"))
    }

    /// Each, in order.
    pub fn iter(&self) -> impl Iterator<Item = &KeyId> {
        self.keys.iter()
    }

    /// Whether this one is among them.
    pub fn contains(&self, key: &KeyId) -> bool {
        self.keys.contains(key)
    }
}

fn parse_word(word: &str) -> Result<KeyId> {
    let hex = word.strip_prefix(WORD_MARK);
    hex.ok_or_else(|| Error::invalid(format!("{word:?} is not {WORD_MARK}HEX")))?.parse()
}

fn from_path(path: &Path) -> Result<Vec<KeyId>> {
    if !path.is_dir() {
        return from_file(path);
    }
    let name = || format!("list {}", path.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).context(name)? {
        let file = entry.context(name)?.path();
        if file.extension().is_some_and(|ending| ending == PUBLIC_ENDING) {
            files.push(file);
        }
    }
    files.sort();
    let mut keys = Vec::new();
    for file in files.iter().take(MAX_TRUSTED_KEYS + 1) {
        keys.extend(from_file(file)?);
    }
    Ok(keys)
}

fn from_file(path: &Path) -> Result<Vec<KeyId>> {
    let (text, _) = read(path)?;
    public_keys(&text).context(|| format!("public key {}", path.display()))
}

/// The public keys of a PEM file; what stands between the blocks is for people.
pub fn public_keys(text: &str) -> Result<Vec<KeyId>> {
    let keys = blocks(text)?.into_iter().map(|(label, der)| match label {
        PUBLIC_LABEL => {
            let key = der.strip_prefix(PUBLIC_PREFIX).and_then(|key| key.try_into().ok());
            key.map(KeyId).ok_or_else(|| Error::invalid("it holds a key that is not ed25519"))
        }
        _ => Err(Error::invalid(format!("it holds a {label}, not only public keys"))),
    });
    keys.collect()
}

/// A file's text and its mode.
fn read(path: &Path) -> Result<(String, u32)> {
    let name = || format!("read {}", path.display());
    let file = File::open(path).context(name)?;
    let found = file.metadata().context(name)?;
    let mut text = String::new();
    file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).context(name)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(Error::invalid(format!("{} is too long for a key", path.display())));
    }
    Ok((text, found.mode()))
}

fn write_new(path: &Path, mode: u32, text: &str) -> Result<()> {
    let name = || format!("write {}", path.display());
    let mut file =
        OpenOptions::new().write(true).create_new(true).mode(mode).open(path).context(name)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).context(name)
}

fn pem(label: &str, der: &[u8]) -> String {
    // One line holds every key of ours.
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", STANDARD.encode(der))
}

/// The PEM blocks of a text: label and contents.
fn blocks(text: &str) -> Result<Vec<(&str, Vec<u8>)>> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some((_, begun)) = rest.split_once("-----BEGIN ") {
        let (label, body) = begun
            .split_once("-----")
            .ok_or_else(|| Error::invalid("a PEM block without a label"))?;
        let (body, after) = body
            .split_once(&format!("-----END {label}-----"))
            .ok_or_else(|| Error::invalid("a PEM block without an end"))?;
        let plain: String = body.split_ascii_whitespace().collect();
        let der = STANDARD.decode(plain);
        found.push((label, der.map_err(|error| Error::invalid(format!("base64: {error}")))?));
        rest = after;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_new_key_is_private_and_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("k");
        let (id, public) = SecretKey::generate(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(SecretKey::load(&path).unwrap().id(), id);
        assert!(SecretKey::generate(&path).is_err(), "a key is never overwritten");
        let trusted = TrustedKeys::load(public.to_str().unwrap()).unwrap();
        assert_eq!(trusted.iter().collect::<Vec<_>>(), [&id]);
        assert_eq!(TrustedKeys::load(dir.path().to_str().unwrap()).unwrap(), trusted);
        assert_eq!(TrustedKeys::load(&trusted.to_string()).unwrap(), trusted);

        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        let refused = SecretKey::load(&path).unwrap_err();
        assert!(refused.to_string().contains("chmod 600"), "{refused}");
        let private = TrustedKeys::load(path.to_str().unwrap()).unwrap_err();
        assert!(private.chain().contains("PRIVATE KEY"), "{}", private.chain());
    }

    /// The files and the signature are those of another program: `openssl genpkey -algorithm ed25519`, and the first
    /// test vector of RFC 8032 in these forms.
    #[test]
    fn keys_have_the_standard_forms() {
        let seed = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60";
        let public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";
        let private = "-----BEGIN PRIVATE KEY-----\n\
                       MC4CAQAwBQYDK2VwBCIEIJ1hsZ3v/VpguoRK9JLsLMREScVpezJpGXA7rAMcrn9g\n\
                       -----END PRIVATE KEY-----\n";
        let key = SecretKey::parse(private).unwrap();
        assert_eq!(key.id().to_string(), public);
        let seed: KeyId = seed.parse().unwrap();
        assert_eq!(pem(PRIVATE_LABEL, &[PRIVATE_PREFIX, &seed.0].concat()), private);
        let text = "for people\n-----BEGIN PUBLIC KEY-----\n\
                    MCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=\n-----END PUBLIC KEY-----\n";
        assert_eq!(public_keys(text).unwrap(), [key.id()]);
        assert!(text.ends_with(&public_pem(&key.id())));
    }

    #[test]
    fn what_is_no_key_is_refused() {
        let good = public_pem(&SecretKey::from_seed(&[1; 32]).unwrap().id());
        for bad in [
            good.replace("MCow", "MCox"),
            good.replace("-----END PUBLIC KEY-----", ""),
            good.replace("MCow", "M\u{e9}ow"),
            good.replace("PUBLIC", "EC PUBLIC"),
        ] {
            assert!(public_keys(&bad).is_err(), "{bad}");
        }
        for place in ["ed25519:", "ed25519:00,", "/nowhere/at/all"] {
            assert!(TrustedKeys::load(place).is_err(), "{place}");
        }
        let empty = tempfile::tempdir().unwrap();
        let error = TrustedKeys::load(empty.path().to_str().unwrap()).unwrap_err();
        assert!(error.chain().contains("0 public keys"), "{}", error.chain());
    }
}
