//! Picks a backend by URL; what follows a `?` says more about the place, slows it down or breaks it on
//! purpose.
//!
//! | URL | backend |
//! |---|---|
//! | `file:///dir`, or a plain path | a directory, [`crate::backend::posix`] |
//! | `3fs:///mount/dir` | a directory on 3FS, [`crate::backend::threefs`] |
//! | `s3://bucket/prefix` | a bucket of an S3 server, [`crate::backend::s3`] |
//! | `memory:NAME` | the memory of this process, [`crate::backend::memory`] |
//!
//! Parameters of `s3://`:
//!
//! | parameter | meaning |
//! |---|---|
//! | `endpoint=https://host:port` | the server; else Amazon's, or `AWS_ENDPOINT_URL` |
//! | `region=eu-central-1` | else `AWS_REGION`, or `us-east-1` |
//! | `credentials=/path` | a file like `~/.aws/credentials`; else `AWS_ACCESS_KEY_ID` and the other usual places |
//!
//! Parameters of `3fs://`:
//!
//! | parameter | meaning |
//! |---|---|
//! | `usrbio=off` | read through the mount even where 3FS's library is |
//! | `library=/path` | the library, else `libhf3fs_api_shared.so` where the loader finds it |
//!
//! Parameters of every URL:
//!
//! | parameter | meaning |
//! |---|---|
//! | `bandwidth=100M` | bytes a second over all requests (`k`, `M`, `G` are powers of 1000, `Ki`, `Mi`, `Gi` of 1024) |
//! | `latency_ms=2` | added to each request |
//! | `fault_seed=7` | which operations fail; see [`crate::backend::fault`] |
//! | `fault_error`, `fault_short_read`, `fault_bit_flip`, `fault_torn_write`, `fault_lost_upload`, `fault_lost_answer`, `fault_delay` | operations of a thousand that are struck |
//! | `fault_delay_ms=50` | how late at most |
//! | `fault_class=packs` | only objects of this class are struck |
//! | `fault_away_while_exists=/path` | the store is away while this file exists |

use crate::backend::Backend;
use crate::backend::fault::{Fault, FaultPlan};
use crate::backend::memory::Memory;
use crate::backend::posix::Posix;
use crate::backend::s3::{Address, S3};
use crate::backend::threefs::{self, ThreeFs, Usrbio};
use crate::backend::throttle::{Speed, Throttle};
use layer::{Context, Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Opens the backend that a URL names; a directory is created when it is absent, a bucket is not.
///
/// `Unavailable` and `Timeout` when the place cannot be reached, `Denied` without the right to it,
/// `Unsupported` for a place that cannot hold a store (an unknown scheme, an S3 server without conditional
/// writes), `Invalid` for what is wrong in the URL itself.
pub fn open(url: &str) -> Result<Arc<dyn Backend>> {
    let (place, query) = url.split_once('?').unwrap_or((url, ""));
    let mut parameters = Parameters::parse(url, query);
    let place = Place::parse(url, place, &mut parameters)?;
    let wrappers = Wrappers::parse(parameters)?;
    let mut backend = place.open()?;
    if let Some(plan) = wrappers.faults {
        backend = Arc::new(Fault::new(backend, plan));
    }
    if let Some(speed) = wrappers.speed {
        backend = Arc::new(Throttle::new(backend, speed));
    }
    Ok(backend)
}

/// For a store on 3FS: the mount whose rings its reads go by, or why they go through the mount. None for every
/// other store. Nothing is opened or made.
pub fn usrbio(url: &str) -> Option<Result<PathBuf>> {
    let (place, query) = url.split_once('?').unwrap_or((url, ""));
    match Place::parse(url, place, &mut Parameters::parse(url, query)) {
        Ok(Place::ThreeFs(path, usrbio)) => Some(threefs::probe(Path::new(&path), &usrbio)),
        Ok(_) => None,
        Err(error) => place.starts_with("3fs://").then_some(Err(error)),
    }
}

/// What stands behind the question mark.
struct Parameters<'a> {
    url: &'a str,
    pairs: Vec<(&'a str, &'a str)>,
}

impl<'a> Parameters<'a> {
    fn parse(url: &'a str, query: &'a str) -> Self {
        let pairs = query.split('&').filter(|parameter| !parameter.is_empty());
        let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, ""))).collect();
        Self { url, pairs }
    }

    /// Takes a parameter out, with its %-escapes resolved.
    fn take(&mut self, name: &str) -> Result<Option<String>> {
        let Some(at) = self.pairs.iter().position(|(found, _)| *found == name) else {
            return Ok(None);
        };
        percent_decoded(self.url, self.pairs.remove(at).1).map(Some)
    }
}

/// Where a store lies.
enum Place {
    Memory(String),
    Directory(String),
    ThreeFs(String, Usrbio),
    S3(Address),
}

impl Place {
    fn parse(url: &str, place: &str, parameters: &mut Parameters<'_>) -> Result<Self> {
        if let Some(name) = place.strip_prefix("memory:") {
            return Ok(Self::Memory(name.to_owned()));
        }
        let Some((scheme, rest)) = place.split_once("://") else {
            if place.is_empty() {
                return Err(Error::invalid("an empty store URL; write file:///dir"));
            }
            return Ok(Self::Directory(place.to_owned()));
        };
        let directory = || match rest.starts_with('/') {
            true => percent_decoded(url, rest),
            false => {
                Err(Error::invalid(format!("store {url:?} names a host; write {scheme}:///dir")))
            }
        };
        match scheme {
            "file" => Ok(Self::Directory(directory()?)),
            "3fs" => Ok(Self::ThreeFs(directory()?, how_to_read(parameters)?)),
            "s3" => {
                let address = Address::parse(rest).context(|| format!("store {url:?}"))?;
                Ok(Self::S3(Address {
                    endpoint: parameters.take("endpoint")?,
                    region: parameters.take("region")?,
                    credentials: parameters.take("credentials")?.map(Into::into),
                    ..address
                }))
            }
            _ => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "store {url:?}: {scheme}:// is unknown; there are file://, 3fs:// and s3://"
                ),
            )),
        }
    }

    fn open(self) -> Result<Arc<dyn Backend>> {
        Ok(match self {
            Self::Memory(name) => Arc::new(Memory::named(&name)),
            Self::Directory(path) => Arc::new(Posix::open(Path::new(&path))?),
            Self::ThreeFs(path, usrbio) => Arc::new(ThreeFs::open(Path::new(&path), &usrbio)?),
            Self::S3(address) => Arc::new(S3::open(&address)?),
        })
    }
}

fn how_to_read(parameters: &mut Parameters<'_>) -> Result<Usrbio> {
    let library = parameters.take("library")?;
    match parameters.take("usrbio")?.as_deref() {
        None => Ok(library.map_or(Usrbio::IfThere, |path| Usrbio::Library(path.into()))),
        Some("off") => Ok(Usrbio::Off),
        Some(other) => Err(Error::invalid(format!("parameter \"usrbio\" is off, not {other:?}"))),
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Wrappers {
    speed: Option<Speed>,
    faults: Option<FaultPlan>,
}

impl Wrappers {
    fn parse(parameters: Parameters<'_>) -> Result<Self> {
        let mut wrappers = Self::default();
        for (name, value) in parameters.pairs {
            wrappers.set(name, value).map_err(|why| {
                Error::invalid(format!("store {:?}: parameter {name:?} {why}", parameters.url))
            })?;
        }
        Ok(wrappers)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let number = || value.parse::<u64>().map_err(|_| format!("has no number but {value:?}"));
        if let Some(fault) = name.strip_prefix("fault_") {
            let plan = self.faults.get_or_insert_default();
            let per_mille = || match number()? {
                rate @ 0..=1000 => Ok(rate as u32),
                _ => Err("is above 1000".to_owned()),
            };
            match fault {
                "seed" => plan.seed = number()?,
                "error" => plan.error_per_mille = per_mille()?,
                "short_read" => plan.short_read_per_mille = per_mille()?,
                "bit_flip" => plan.bit_flip_per_mille = per_mille()?,
                "torn_write" => plan.torn_write_per_mille = per_mille()?,
                "lost_upload" => plan.lost_upload_per_mille = per_mille()?,
                "lost_answer" => plan.lost_answer_per_mille = per_mille()?,
                "delay" => plan.delay_per_mille = per_mille()?,
                "delay_ms" => plan.max_delay = Duration::from_millis(number()?),
                "class" => value.clone_into(&mut plan.only_class),
                "away_while_exists" => plan.away_while_exists = Some(value.into()),
                _ => return Err("is unknown".to_owned()),
            }
            return Ok(());
        }
        let speed = self.speed.get_or_insert_default();
        match name {
            "bandwidth" => speed.bandwidth_bytes_per_s = size(value)?,
            "latency_ms" => speed.latency = Duration::from_millis(number()?),
            _ => return Err("is unknown".to_owned()),
        }
        Ok(())
    }
}

/// `100M`, `64Ki`, `5000`.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let factor: u64 = match &text[digits.len()..] {
        "" => 1,
        "k" | "K" => 1000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        _ => return Err(format!("has no size but {text:?}")),
    };
    let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    number.ok_or_else(|| format!("has no size but {text:?}"))
}

fn percent_decoded(url: &str, path: &str) -> Result<String> {
    let refuse = || Error::invalid(format!("store {url:?} has a broken %-escape"));
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit =
            || rest.next().and_then(|byte| (byte as char).to_digit(16)).ok_or_else(refuse);
        let value = digit()? << 4 | digit()?;
        bytes.push(value as u8);
    }
    String::from_utf8(bytes).map_err(|_| refuse())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_pick_backends_and_wrappers() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_str().unwrap();
        assert_eq!(open(path).unwrap().describe(), format!("file://{path}"));
        assert_eq!(
            open(&format!("file://{path}/a%20b")).unwrap().describe(),
            format!("file://{path}/a b")
        );
        let slow = open("memory:slow?bandwidth=100M&latency_ms=2").unwrap();
        assert_eq!(slow.describe(), "memory:slow throttled to 100000000 B/s and 2 ms");
        let faulty = open("memory:x?fault_seed=1&fault_error=10").unwrap();
        assert_eq!(faulty.describe(), "memory:x with injected faults");
    }

    #[test]
    fn bad_urls_are_refused_with_what_is_wrong() {
        for (url, says) in [
            ("", "empty"),
            ("gs://bucket/x", "gs:// is unknown"),
            ("s3:///x", "no name of a bucket"),
            ("s3://b?credentials=/no/such/file", "credentials file"),
            ("file:///tmp?endpoint=x", "\"endpoint\" is unknown"),
            ("3fs://host/x", "names a host"),
            ("3fs:///x?usrbio=on", "is off, not"),
            ("file://host/x", "names a host"),
            ("memory:x?bandwidth=fast", "\"bandwidth\" has no size"),
            ("memory:x?latency=2", "\"latency\" is unknown"),
            ("memory:x?fault_error=2000", "above 1000"),
            ("file:///a%2", "%-escape"),
        ] {
            let error = open(url).unwrap_err().chain();
            assert!(error.contains(says), "{url}: {error}");
        }
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(size("100M").unwrap(), 100_000_000);
        assert_eq!(size("64Ki").unwrap(), 65_536);
        assert!(size("99999999999G").is_err());
    }
}
