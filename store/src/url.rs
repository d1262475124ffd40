//! Picks a backend by URL: `file:///dir`, a plain path, `memory:NAME`; what follows a `?` slows it down or
//! breaks it on purpose.
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
use crate::backend::throttle::{Speed, Throttle};
use layer::{Error, ErrorKind, Result};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Opens the backend that a URL names; a directory is created when it is absent.
pub fn open(url: &str) -> Result<Arc<dyn Backend>> {
    let (place, query) = url.split_once('?').unwrap_or((url, ""));
    let wrappers = Wrappers::parse(url, query)?;
    let mut backend = open_place(url, place)?;
    if let Some(plan) = wrappers.faults {
        backend = Arc::new(Fault::new(backend, plan));
    }
    if let Some(speed) = wrappers.speed {
        backend = Arc::new(Throttle::new(backend, speed));
    }
    Ok(backend)
}

fn open_place(url: &str, place: &str) -> Result<Arc<dyn Backend>> {
    if let Some(name) = place.strip_prefix("memory:") {
        return Ok(Arc::new(Memory::named(name)));
    }
    if let Some(path) = place.strip_prefix("file://") {
        if !path.starts_with('/') {
            return Err(Error::invalid(format!("store {url:?} names a host; write file:///dir")));
        }
        return Ok(Arc::new(Posix::open(Path::new(&percent_decoded(url, path)?))?));
    }
    if let Some((scheme, _)) = place.split_once("://") {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "store {url:?}: {scheme}:// is not in this version; use file:///dir (for 3FS, its mount directory)"
            ),
        ));
    }
    if place.is_empty() {
        return Err(Error::invalid("an empty store URL; write file:///dir"));
    }
    Ok(Arc::new(Posix::open(Path::new(place))?))
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Wrappers {
    speed: Option<Speed>,
    faults: Option<FaultPlan>,
}

impl Wrappers {
    fn parse(url: &str, query: &str) -> Result<Self> {
        let mut wrappers = Self::default();
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            wrappers.set(name, value).map_err(|why| {
                Error::invalid(format!("store {url:?}: parameter {name:?} {why}"))
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
            ("s3://bucket/x", "s3:// is not in this version"),
            ("file://host/x", "names a host"),
            ("memory:x?bandwidth=fast", "\"bandwidth\" has no size"),
            ("memory:x?latency=2", "\"latency\" is unknown"),
            ("memory:x?fault_error=2000", "above 1000"),
            ("file:///a%2", "%-escape"),
        ] {
            let error = open(url).unwrap_err().to_string();
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
